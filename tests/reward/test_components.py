from __future__ import annotations

from typing import Any

import pytest

from harness1.config import Env, load_config
from harness1.reward import (
    COMPONENTS,
    Case,
    Component,
    available_tools,
    component,
    curation,
    diversity,
    diversity_shortfall,
    turn_penalty,
)
from harness1.reward.measures import Outcome
from tests.support import ended_episode

EPISODE = ended_episode()
BY_NAME = {part.name: part for part in COMPONENTS}
ONLY_SEARCH = [f"env.{tool}.on=false" for tool in ("fan_out", "grep", "read", "review", "verification")]


def value(part: Component, *settings: str, **outcome: Any) -> float:
    return part.term(Case(Outcome(**outcome), EPISODE, load_config(overrides=list(settings)))).value


def used(count: int) -> dict[str, int]:
    return {f"tool{number}": 1 for number in range(count)}


@pytest.mark.parametrize(
    ("name", "outcome", "expected"),
    [
        ("outcome", {"precision": 0.5, "recall": 0.25}, 5 * 0.125 / 2.25),
        ("trajectory", {"trajectory_recall": 0.4}, 0.4),
        ("answer_found", {"answer_recall": 0.0}, 0.0),
        ("answer_found", {"answer_recall": 0.01}, 1.0),
        ("answer", {"answer_recall": 0.3}, 0.3),
        ("trajectory_answer", {"trajectory_answer_recall": 0.6}, 0.6),
        ("answer_missed", {"trajectory_answer_recall": 0.75, "answer_recall": 0.5}, 0.25),
        ("answer_missed", {"trajectory_answer_recall": 0.5, "answer_recall": 0.75}, 0.0),
        ("recall_gap", {"trajectory_recall": 0.75, "recall": 0.5}, 0.25),
        ("recall_gap", {"trajectory_recall": 0.5, "recall": 0.75}, 0.0),
        ("clutter", {"precision": 0.25, "set_size": 8}, 6 / 30),
        ("clutter", {"precision": 0.0, "set_size": 30}, 1.0),
        ("clutter", {}, 0.0),
    ],
)
def test_values_by_hand(name: str, outcome: dict[str, float], expected: float) -> None:
    assert value(BY_NAME[name], **outcome) == pytest.approx(expected)


def test_beta_is_the_one_that_is_set() -> None:
    assert value(BY_NAME["outcome"], "reward.beta=1", precision=0.5, recall=0.25) == pytest.approx(1 / 3)


@pytest.mark.parametrize(("tools", "share", "short"), [(0, 0.0, 6.0), (3, 0.5, 3.0), (6, 1.0, 0.0), (9, 1.0, 0.0)])
def test_diversity_counts_distinct_tools_up_to_the_target(tools: int, share: float, short: float) -> None:
    assert value(diversity, calls=used(tools)) == share
    assert value(diversity_shortfall, calls=used(tools)) == short


def test_tools_that_are_off_are_not_missed() -> None:
    assert available_tools(Env()) == 7
    assert available_tools(load_config(overrides=ONLY_SEARCH).env) == 2
    assert value(diversity, *ONLY_SEARCH, calls=used(2)) == 1.0
    assert value(diversity_shortfall, *ONLY_SEARCH, calls=used(2)) == 0.0


@pytest.mark.parametrize(("turns", "expected"), [(0, 0.0), (20, 0.0), (21, 0.05), (30, 0.5), (40, 1.0), (99, 1.0)])
def test_turns_beyond_the_free_ones_cost_up_to_the_whole_penalty(turns: int, expected: float) -> None:
    assert value(turn_penalty, turns=turns) == pytest.approx(expected)


def test_fewer_turns_allowed_than_free_cost_nothing() -> None:
    assert value(turn_penalty, "env.max_turns=5", turns=5) == 0.0
    assert value(turn_penalty, "env.max_turns=5", turns=21) == 1.0


def test_curation_is_a_share_of_turns_up_to_its_target() -> None:
    assert value(curation, turns=10, calls={"curate": 2}) == pytest.approx(0.5)
    assert value(curation, turns=10, calls={"curate": 8}) == 1.0
    assert value(curation, turns=0) == 0.0


def test_penalties_weigh_negatively_and_nothing_else_does() -> None:
    overrides = [
        f"reward.{name}=0.5" for name in ("recall", "recall_gap", "clutter", "diversity_shortfall", "curation")
    ]
    settings = load_config(overrides=overrides).reward
    negative = {part.name for part in COMPONENTS if part.weight(settings) < 0.0}
    assert negative == {"answer_missed", "recall_gap", "clutter", "diversity_shortfall", "turn_penalty"}
    assert all(part.weight(settings) != 0.0 for part in COMPONENTS)


def test_clutter_is_a_share_of_what_can_be_delivered() -> None:
    assert value(BY_NAME["clutter"], "env.curation.cap=10", set_size=10, precision=0.5) == pytest.approx(0.5)


def test_the_process_is_tools_curation_and_turns() -> None:
    process = {part.name for part in COMPONENTS if part.process}
    assert process == {"diversity", "diversity_shortfall", "curation", "turn_penalty"}


def test_a_component_that_runs_away_is_capped() -> None:
    @component("wild", weight=lambda settings: settings.outcome, ceiling=lambda _: 3.0)
    def wild(case: Case) -> float:
        return float(case.outcome.turns)

    assert (value(wild, turns=99), value(wild, turns=-99), value(wild, turns=2)) == (3.0, 0.0, 2.0)
