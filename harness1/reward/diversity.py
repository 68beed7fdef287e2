"""The pull against searching with one tool alone: a bonus for distinct tools, and a penalty for what is missing."""

from __future__ import annotations

from harness1.config import Env
from harness1.reward.component import Case, component
from harness1.tools.end_search import end_search
from harness1.tools.registry import TOOLS


@component("diversity", weight=lambda settings: settings.diversity, process=True)
def diversity(case: Case) -> float:
    """min(d / d*, 1): distinct tools used with success, of the target."""
    return case.outcome.tools / target(case)


@component(
    "diversity_shortfall",
    weight=lambda settings: -settings.diversity_shortfall,
    ceiling=lambda settings: float(settings.diversity_target),
    process=True,
)
def diversity_shortfall(case: Case) -> float:
    """max(d* - d, 0): a number of tools, at most the target."""
    return float(target(case) - case.outcome.tools)


def target(case: Case) -> int:
    """d*: never more tools than the environment offers, so that a tool switched off costs no reward."""
    return min(case.config.reward.diversity_target, available_tools(case.config.env))


def available_tools(env: Env) -> int:
    """How many tools can be counted: all that the environment offers but the one that ends the episode."""
    return sum(enabled(env) for tool, enabled in TOOLS if tool is not end_search)
