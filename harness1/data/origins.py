"""Origins: the names of all datasets and models that a folder was made of. Each verb that writes a folder notes in its
card those of what it reads, so that `harness1 push` knows what may be published, whatever lies between."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec

from harness1.data.open import benchmark_and_path, is_generated
from harness1.data.source import Source
from harness1.errors import SchemaError, UsageError
from harness1.plain import at_home, paths_in
from harness1.runs.files import STAGE, read_record

UNKNOWN = "unknown:"
"""Begins the origin of what no card tells the origin of."""
QUESTIONS = (f"{UNKNOWN}questions",)
"""The origin of questions that are no dataset's."""
DATA_CARD = "card.json"
CARDS = (STAGE, DATA_CARD, "checkpoint.json", "data_card.json")
"""Cards of a verb's work, of rows, of a checkpoint, and the copy of that of rows in a checkpoint."""
NAMED_BY = {
    "data get": ("benchmark", "dataset"),
    "data import": ("benchmark",),
    "data copy": ("benchmark",),  # of secret ones alone
    "models-get": ("package",),
}
"""The inputs by which cards name what was fetched."""
_HUB_CACHE = re.compile(r"/(?:models|datasets)--([^/]+?)--([^/]+)/snapshots/")


class _Card(msgspec.Struct):
    """What any card says of origins."""

    verb: str = ""
    inputs: dict[str, Any] = {}
    outputs: dict[str, Any] = {}
    origins: tuple[str, ...] = ()
    runs: Any = ()

    @property
    def told(self) -> set[str]:
        named = (self.inputs.get(name) for name in NAMED_BY.get(self.verb, ()))
        return {each for each in (*self.origins, *named) if isinstance(each, str) and each}

    @property
    def datasets(self) -> list[str]:
        several = self.outputs.get("datasets")
        one = self.outputs.get("source") or self.outputs.get("corpus") or self.inputs.get("dataset")
        runs = [run.get("dataset") for run in self.runs if isinstance(run, dict)] if isinstance(self.runs, list) else []
        named = [*(several if isinstance(several, list) else [one]), *runs]
        return [each for each in named if isinstance(each, str) and each]


def origins_of(*places: str | Path) -> tuple[str, ...]:
    """Return the origins of datasets, as `open_source` takes their names, and of folders of any kind. Where no card
    tells all of a place, one of them is `UNKNOWN` and the last part of its path."""
    return united(*(_origins(place, named=True) for place in places))


def origins_of_source(source: Source) -> tuple[str, ...]:
    """Return the origins of an opened dataset."""
    if source.root is None:
        return (source.name,)
    official = f"{source.kind}:{source.root}"
    return origins_of(official if _is_name(official) else source.root)


def united(*each: Iterable[str]) -> tuple[str, ...]:
    """Return the origins of what is made of several."""
    return tuple(sorted(set(chain.from_iterable(each))))


def known_origins(*places: str | Path) -> tuple[str, ...]:
    """Return the known origins of those places that are folders, or of what `KIND:FOLDER` names: what else a model
    was trained on, nobody can tell."""
    folders = (next(filter(os.path.isdir, paths_in(str(place))), None) for place in places)
    return tuple(each for each in origins_of(*filter(None, folders)) if not each.startswith(UNKNOWN))


def searched_origins(*indexes: str) -> tuple[str, ...]:
    """Return the origins of what is searched: of an index folder all, since its texts stand in what is made with it; of
    an engine of another package the known ones."""
    folders = filter(os.path.isdir, map(at_home, filter(None, indexes)))  # agents search no index
    return united(origins_of(*folders), known_origins(*indexes))


def _origins(place: str | Path, *, named: bool) -> set[str]:
    """Return the origins of one place. `named`: also those of the datasets that its cards name."""
    if isinstance(place, str) and is_generated(place):
        return {place}
    # The name of a folder may be that of a dataset.
    benchmark, rest = benchmark_and_path(place) if isinstance(place, str) else ("", place)
    path = Path(rest).resolve()
    found, told, claimed, damaged = {benchmark} - {""}, bool(benchmark), set[str](), False
    if hub := _HUB_CACHE.search(f"{path}/"):
        found, told = found | {"/".join(hub.groups())}, True
    for folder in (path, *path.parents):
        is_its = folder == path or (folder == path.parent and path.is_file())
        for name, card in _cards(folder):
            if card is None:
                damaged |= is_its
                continue
            found |= card.told
            told |= bool(card.told) and (is_its or card.verb == "data get")
            if named and is_its:  # cards of earlier versions say no more; at a path, something else may lie by now
                claimed |= {origin for each in card.datasets for origin in _claimed(each)}
                told |= name in (STAGE, DATA_CARD) and bool(card.datasets) and all(map(_is_name, card.datasets))
    if told and not damaged:
        return found | {each for each in claimed if not each.startswith(UNKNOWN)}
    return found | claimed | {f"{UNKNOWN}{path.name}"}


def _cards(folder: Path) -> Iterator[tuple[str, _Card | None]]:
    """Yield the cards of a folder by name, None for one that cannot be read."""
    for name in CARDS:
        try:
            if card := read_record(folder / name, _Card, "a card"):
                yield name, card
        except (OSError, SchemaError, UsageError):
            if os.path.lexists(folder / name):
                yield name, None


def _is_name(dataset: str) -> bool:
    return is_generated(dataset) or benchmark_and_path(dataset)[0] != ""


def _claimed(dataset: str) -> set[str]:
    with suppress(OSError, ValueError):  # a path that none can be
        if _is_name(dataset) or Path(dataset).is_absolute():
            return _origins(dataset, named=False)
    return set()
