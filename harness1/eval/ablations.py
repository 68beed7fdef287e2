"""Ablations: a configuration with one mechanism of the environment removed at a time (table 3 of arXiv 2606.02373)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from types import MappingProxyType
from typing import Any

import msgspec

from harness1.config import Config, Env
from harness1.errors import UsageError
from harness1.eval.evaluate import Evaluation
from harness1.plain import meant

BASE = "base"
Ablation = Callable[[Env], Env]


def _without(*switches: str, **groups: dict[str, Any]) -> Ablation:
    """Return the change that switches mechanisms off and changes settings of groups."""

    def change(env: Env) -> Env:
        changed = {name: msgspec.structs.replace(getattr(env, name), **values) for name, values in groups.items()}
        return msgspec.structs.replace(env.switch(**dict.fromkeys(switches, False)), **changed)

    return change


_NAMES = (
    *("importance_tags", "compression", "auto_populate", "evidence", "verification", "review", "dedup", "guidance"),
    *("history", "budget_marker", "fan_out", "grep", "read", "rank", "leads", "auto_populate_by_evidence"),
    "read_by_evidence",
)
_MECHANISMS: Mapping[str, Ablation] = {name: _without(name) for name in _NAMES} | {
    "importance_tags": _without("tags", curation={"eviction": "fifo"}),
    "evidence": _without("evidence", "entity_handles"),
    "guidance": lambda env: msgspec.structs.replace(env, guidance="none"),
    "auto_populate_by_evidence": _without(auto_populate={"by": "first"}),
    "read_by_evidence": _without(read={"by": "order"}),
}
ABLATIONS: Mapping[str, Ablation] = MappingProxyType(
    {**_MECHANISMS, "all_off": lambda env: reduce(lambda left, ablation: ablation(left), _MECHANISMS.values(), env)}
)
"""Each mechanism with the change that removes it everywhere; `all_off` leaves searching, curating and ending."""


def ablate_config(config: Config, name: str) -> Config:
    """Return the configuration without a mechanism, even for a model trained with it; UsageError if there is none."""
    if name not in ABLATIONS:
        raise UsageError(f"unknown ablation {name!r}; choose from: all, {', '.join(ABLATIONS)}{meant(name, ABLATIONS)}")
    machine = config.machine
    machine = msgspec.structs.replace(machine, model=msgspec.structs.replace(machine.model, foreign=True))
    return msgspec.structs.replace(config, env=ABLATIONS[name](config.env), machine=machine)


def conditions(evaluation: Evaluation, names: Sequence[str]) -> dict[str, Evaluation]:
    """Return the evaluations to play, in order: the base, and the ablations of mechanisms that are not already off."""
    variants = {name: replace(evaluation, config=ablate_config(evaluation.config, name)) for name in names}
    changed = {name: each for name, each in variants.items() if each.config.env != evaluation.config.env}
    return {BASE: evaluation, **changed}
