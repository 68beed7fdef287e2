"""Differences between the cards and the settings of two runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from harness1.eval.run_view import RunView


def config_difference(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the dotted name of every setting whose value differs, with both values; None where a setting is absent.

    Args:
        first: a configuration as nested plain data (see `runs.folder.shown_config`).
    """
    flat = dict(_settings(first)), dict(_settings(second))
    names = sorted(flat[0].keys() | flat[1].keys())
    pairs = ((name, (flat[0].get(name), flat[1].get(name))) for name in names)
    return {name: pair for name, pair in pairs if pair[0] != pair[1]}


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


def _settings(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _settings(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
