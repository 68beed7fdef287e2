"""All benchmarks by name: the reader of each, and what users are told about it (`benchmarks.toml`)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import resources
from pathlib import Path

import msgspec

from harness1.data.benchmarks.browsecomp_plus import open_browsecomp_plus
from harness1.data.benchmarks.context1 import document_gold, fact_gold, open_context1
from harness1.data.benchmarks.frames import open_frames
from harness1.data.benchmarks.hotpotqa import open_hotpotqa
from harness1.data.benchmarks.sealqa import open_longseal, open_seal0
from harness1.data.faults import Fault
from harness1.data.source import Source
from harness1.errors import UsageError
from harness1.records import Record, Unit

READERS: dict[str, Callable[[Path, Fault], Source]] = {
    "browsecomp_plus": open_browsecomp_plus,
    "web": partial(open_context1, "web", document_gold),
    "patents": partial(open_context1, "patents", document_gold),
    "sec": partial(open_context1, "sec", fact_gold, shared=True),
    "longseal": open_longseal,
    "seal0": open_seal0,
    "frames": open_frames,
    "hotpotqa": open_hotpotqa,
}


class Hub(Record):
    """Files of a dataset on the Hugging Face hub: patterns of names, and the folder that each goes to."""

    repository: str
    patterns: tuple[str, ...]
    folder: str = ""


class Benchmark(Record):
    """A benchmark. `files` says what a folder must hold; `verified` says on which data the reader was tried."""

    name: str
    what: str
    size: str
    licence: str
    origin: str
    files: tuple[str, ...]
    verified: str
    unit: Unit = "document"
    """The unit that the paper scores, which `index.unit` must equal."""
    hub: tuple[Hub, ...] = ()
    by_hand: str = ""
    """Files that no hub has, and how to get them."""
    secret_answers: bool = False
    """True if neither questions nor answers may be published; also of the source that `open` returns."""

    def open(self, root: Path, fault: Fault) -> Source:
        """Open the official files of the benchmark: a folder, or the one file."""
        return READERS[self.name](root, fault)

    def row(self) -> dict[str, object]:
        """Return the facts that users see, as plain data."""
        shown = ("name", "what", "size", "licence", "origin", "files", "verified", "unit")
        return {name: getattr(self, name) for name in shown}


_CARDS = resources.files(__package__).joinpath("benchmarks.toml").read_bytes()
BENCHMARKS = {each.name: each for each in msgspec.toml.decode(_CARDS, type=dict[str, list[Benchmark]])["benchmark"]}


def benchmark_named(name: str) -> Benchmark:
    """Return the benchmark with a name.

    Raises:
        UsageError: there is no such benchmark.
    """
    if name not in BENCHMARKS:
        raise UsageError(f"there is no benchmark {name!r}; there are: {', '.join(BENCHMARKS)}")
    return BENCHMARKS[name]
