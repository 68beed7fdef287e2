"""Making a policy by what a user typed after `--policy`. Adding one is one file and one line here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from harness1.config import Config
from harness1.errors import UsageError
from harness1.policy.models import NAMES as MODELS
from harness1.policy.models import ModelSpec, is_model, open_model
from harness1.policy.oracle import OraclePolicy
from harness1.policy.oracle_teacher import OracleTeacher
from harness1.policy.policy import Policy
from harness1.policy.random_walk import RandomPolicy
from harness1.policy.recorded import RecordedPolicy
from harness1.policy.scripted import ScriptedPolicy
from harness1.policy.single_shot import SingleShotPolicy
from harness1.records import Gold

PLAIN: dict[str, Callable[[], Policy]] = {
    "scripted": ScriptedPolicy,
    "single-shot": SingleShotPolicy,
    "random": RandomPolicy,
}
"""Policies that need nothing but their name."""

SIGHTED: dict[str, Callable[[Mapping[str, Gold]], Policy]] = {
    "oracle": OraclePolicy,
    "oracle-teacher": OracleTeacher,
}
"""Policies with sight of the gold, by task id."""

NAMES = (*PLAIN, "scripted:SIZE (1 to 30)", *SIGHTED, "replay:RUN", *MODELS)


def needs_gold(spec: str) -> bool:
    """Whether a policy acts with sight of the gold."""
    return spec in SIGHTED


def check_policy(spec: str) -> None:
    """Refuse a policy that does not exist, before any work is done for it. Models are not loaded.

    Raises:
        UsageError: there is no such policy.
    """
    if is_model(spec):
        ModelSpec.read(spec)
    else:
        make_policy(spec, {})


def make_policy(spec: str, golds: Mapping[str, Gold], config: Config = Config()) -> Policy:
    """A policy from its name; the oracles alone are given the gold, by task id.

    Raises:
        UsageError: there is no such policy, or its model cannot be loaded.
        ConfigError: the settings do not fit its model.
    """
    kind, _, argument = spec.partition(":")
    if kind == "replay" and argument:
        return RecordedPolicy.load(Path(argument))
    if kind == "scripted" and argument.isdecimal() and 1 <= int(argument[:3]) <= 30:
        return ScriptedPolicy(int(argument))
    if needs_gold(spec):
        return SIGHTED[spec](golds)
    if spec in PLAIN:
        return PLAIN[spec]()
    if is_model(spec):
        return open_model(spec, config)
    raise UsageError(f"there is no policy {spec!r}; choose one of {', '.join(NAMES)}")
