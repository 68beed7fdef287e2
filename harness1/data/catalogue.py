"""The names under which datasets are fetched: BEIR's sets, the benchmarks of the paper, and ids of the hub."""

from __future__ import annotations

import re
from importlib import resources

import msgspec

from harness1.data.benchmarks.registry import BENCHMARKS
from harness1.errors import UsageError
from harness1.plain import meant
from harness1.records import Record

PREFIX = "beir/"
"""Names the archive of BEIR where a benchmark of the paper has the plain name."""
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
_FILES = (".jsonl", ".json", ".gz", ".zip", ".md", ".txt", ".html", ".htm", ".pdf")


class BeirSet(Record):
    """A public dataset of BEIR. `md5` is the checksum of its archive, `parts` are the datasets in it, if several."""

    name: str
    what: str
    size: str
    md5: str
    parts: tuple[str, ...] = ()


_SETS = resources.files(__package__).joinpath("beir_sets.toml").read_bytes()
BEIR_SETS = {each.name: each for each in msgspec.toml.decode(_SETS, type=dict[str, list[BeirSet]])["set"]}


def is_name(spec: str) -> bool:
    """Return whether a dataset is given as NAME or OWNER/NAME, and not as what is plainly a path."""
    return _NAME.fullmatch(spec) is not None and not spec.endswith(_FILES)


def plain_name(name: str) -> str:
    """Return the one name of a dataset: BEIR's prefix stays only where a benchmark of the paper has the plain name."""
    plain = name.removeprefix(PREFIX)
    return plain if plain in BEIR_SETS and plain not in BENCHMARKS else name


def beir_set(name: str) -> BeirSet | None:
    """Return the set of BEIR whose archive holds a dataset, or None.

    Raises:
        UsageError: the archive holds several datasets, and the name is not that of one.
    """
    first, _, part = name.removeprefix(PREFIX).partition("/")
    found = BEIR_SETS.get(first)
    if found is None or name in BENCHMARKS or (part and not found.parts):
        return None
    if found.parts and part not in found.parts:
        names = ", ".join(f"{first}/{each}" for each in found.parts)
        raise UsageError(f"{first} holds several datasets; name one: {names}")
    return found


def nearest_name(name: str) -> str:
    """Return the question whether a similar name was meant, or an empty string."""
    return meant(name, [*BENCHMARKS, *BEIR_SETS])
