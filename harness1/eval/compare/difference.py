"""Differences between the cards and the settings of two runs."""

from __future__ import annotations

from collections.abc import Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any

from harness1.eval.run_view import RunView
from harness1.settings import differences


def config_difference(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the dotted name of every setting whose value differs, with both values; None where a setting is absent.

    Args:
        first: a configuration as nested plain data (see `runs.folder.shown_config`).
    """
    return {name: (one, other) for name, one, other in sorted(differences(first, second), key=itemgetter(0))}


def card_difference(first: RunView, second: RunView) -> dict[str, tuple[Any, Any]]:
    """Return, with both values, the differences in what decides a run beside its configuration and tasks."""
    cards = _card(first), _card(second)
    return {name: (value, cards[1][name]) for name, value in cards[0].items() if value != cards[1][name]}


def _card(run: RunView) -> dict[str, Any]:
    inputs, outputs = run.stage.inputs, run.stage.outputs
    return {
        "policy": run.policy,
        "policy hash": str(inputs.get("policy", ""))[:12],
        "format": outputs.get("format"),
        "index": f"{Path(run.index).name} {str(inputs.get('index', ''))[:12]}".strip(),
        "samples": inputs.get("samples"),
        "seed": inputs.get("seed"),
        "fused from": outputs.get("sources"),
    }
