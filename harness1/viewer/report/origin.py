"""The parts of a report that say where a run comes from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from harness1.config import Config
from harness1.eval.ablations.table import COLUMNS, cells
from harness1.runs.folder import shown_config
from harness1.runs.provenance import SESSION
from harness1.settings import differences
from harness1.viewer.report.files import RunFiles
from harness1.viewer.report.markup import Markup, element, table
from harness1.viewer.report.results import NOTHING, facts, section

CLOCKED = (*SESSION, "earlier")
"""Parts of the provenance that are of a process or a machine, not of the run."""
PLACES = ("index", "source", "sources", "tokenizer")
"""Parts of the card that are paths."""
TOOK: Mapping[str, str] = MappingProxyType(
    {
        "wall_seconds": "seconds on the clock",
        "episode_seconds": "seconds of all episodes together",
        "cost": "dollars",
    }
)
"""Parts of the resources, as they are called on the page."""
WORK = "machine."
"""Settings that decide how work is carried out, and no episode."""


def ablations(files: RunFiles) -> Markup:
    """The table of ablations that this run is part of."""
    if files.ablations is None:
        return NOTHING
    found = files.ablations
    grid = table(COLUMNS, cells(found), range(1, len(COLUMNS)))
    said = " ".join(filter(None, (found.verdict, found.remarks)))
    return section("Ablations", grid, element("p", said, class_="note"))


def settings(files: RunFiles) -> Markup:
    """Where the configuration is not the default one, but for how work is carried out."""
    changed = {name: pair for name, pair in _changed(files).items() if not name.startswith(WORK)}
    if not changed:
        return section("Configuration", element("p", "Every setting has its default value.", class_="note"))
    return section("Configuration", _settings_table(changed))


def hashes(files: RunFiles) -> Markup:
    """The hashes of all that decided the episodes, and what else is known of the run."""
    known = {**files.stage.hashes, **(files.provenance.get("hashes") or {})}
    origin = {name: value for name, value in files.provenance.items() if name not in (*CLOCKED, "hashes", "dataset")}
    rows = [(f"{name} hash", element("code", str(value))) for name, value in sorted(known.items())]
    return section("Provenance", facts([*((name, shown(value)) for name, value in origin.items()), *rows]))


def machine(files: RunFiles) -> Markup:
    """Everything that depends on the clock, the machine, or where things lie."""
    outputs = files.stage.outputs
    rows = [(name, shown(outputs[name])) for name in PLACES if outputs.get(name)]
    rows = [("dataset", shown(files.stage.inputs.get("dataset"))), *rows]
    rows += [(name, shown(value)) for name, value in _took(files.resources)]
    rows += [(name, shown(value)) for name, value in _flat({key: files.provenance.get(key) for key in CLOCKED})]
    work = {name: pair for name, pair in _changed(files).items() if name.startswith(WORK)}
    parts = [facts(rows), *([_settings_table(work)] if work else [])]
    return section("Clock and machine", *parts, name="machine")


def _took(resources: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """What a run took, under names that tell the time on the clock from the sum over episodes side by side."""
    for name, value in resources.items():
        if name == "per_episode":
            for unit, found in value.items():
                if found["mean"] is not None:
                    mean, low, high = (shown(found[each]) for each in ("mean", "low", "high"))
                    yield f"{TOOK.get(unit, unit)} for each episode", f"{mean} ({low} to {high})"
        elif name in TOOK:
            yield TOOK[name], value
        else:
            yield from _flat({name: value})


def shown(value: Any) -> str:
    """A value of a card or a setting as text."""
    match value:
        case None:
            return "none"
        case bool():
            return "true" if value else "false"
        case float():
            return f"{value:,.6g}"
        case list() | tuple():
            return ", ".join(map(shown, value)) or "none"
        case dict():
            return ", ".join(f"{name} {shown(each)}" for name, each in value.items()) or "none"
        case _:
            return str(value) or "empty"


def _changed(files: RunFiles) -> dict[str, tuple[Any, Any]]:
    """Settings that are not the default, with both values; settings that have come since have their default."""
    given = files.stage.outputs.get("config") or {}
    usual = msgspec.json.decode(msgspec.json.encode(shown_config(Config())))
    return {name: (here, there) for name, here, there in sorted(differences(given, usual)) if here is not None}


def _settings_table(changed: Mapping[str, tuple[Any, Any]]) -> Markup:
    rows = [(element("code", name), shown(here), shown(usual)) for name, (here, usual) in changed.items()]
    return table(("setting", "here", "default"), rows)


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of nested groups by dotted names; lists, and what is not known, by what they hold."""
    for name, value in tree.items():
        if isinstance(value, Mapping) and prefix.count(".") < 2 and name != "libraries":
            yield from _flat(value, f"{prefix}{name}.")
        elif value is not None and value != []:
            yield f"{prefix}{name}", value
