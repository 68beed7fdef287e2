"""Opens a corpus by its name, whatever its layout: `open_source` finds the reader."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from harness1.data.faults import Fault, refuse
from harness1.data.formats import beir, folder, jsonl, trec_folder
from harness1.data.source import Source
from harness1.errors import CorpusError, UsageError
from harness1.records import Task
from harness1.retrieval.corpus import Document


def from_anywhere(spec: str) -> str:
    """Return a name of the corpus that does not depend on the current directory: paths become absolute."""
    if spec == "stdlib" or spec.startswith("world:"):
        return spec
    name, path = _of_benchmark(spec)
    return f"{name}:{Path(path).resolve()}" if name else str(Path(path).resolve())


def open_source(spec: str, fault: Fault = refuse) -> Source:
    """Open a dataset: its documents, and its tasks by split.

    Args:
        spec: a BEIR or TREC folder, a JSONL file (.jsonl, .jsonl.gz), a folder of texts (.md .txt .html .htm .pdf),
            `NAME:PATH` for a benchmark in its official files, `world:SIZE` for a synthetic world of that many
            documents, or `stdlib` for Python's own documentation.
        fault: is called with each broken line while documents and tasks are read; the default raises.

    Raises:
        UsageError: nothing of that name exists, or its kind cannot be read.
        CorpusError: it exists and is broken; for faults within documents, raised while they are read.
    """
    if spec.startswith("world:"):
        return _world(spec)
    if spec == "stdlib":
        from harness1.data.stdlib import stdlib_source

        return stdlib_source()
    name, place = _of_benchmark(spec)
    path = Path(place)
    if not path.exists():
        raise UsageError(f"{place}: no such file or folder (nor is it world:SIZE, stdlib or BENCHMARK:PATH)")
    if name:
        from harness1.data.benchmarks.registry import BENCHMARKS

        return BENCHMARKS[name].open(path, fault)
    return _of_files(path, fault)


def _of_files(path: Path, fault: Fault) -> Source:
    """Open a corpus whose layout is told by its files."""
    if trec_folder.is_trec(path):
        tasks = partial(trec_folder.read_tasks, path, fault=fault)
        return _checked(path, "trec", lambda: trec_folder.read_corpus(path, fault), trec_folder.splits(path), tasks)
    if beir.is_beir(path):
        tasks = partial(beir.read_tasks, path, fault=fault)
        found = _checked(path, "beir", lambda: beir.read_corpus(path, fault), beir.splits(path), tasks)
        return replace(found, has_documents=not beir.is_empty(path))
    if path.is_dir():
        problems: list[str] = []
        return _checked(path, "folder", lambda: folder.read(path, problems), problems=problems)
    if path.name.endswith((".jsonl", ".jsonl.gz")):
        return _checked(path, "jsonl", lambda: jsonl.read(path, fault))
    raise UsageError(
        f"{path}: not a corpus; give a BEIR or TREC folder, a .jsonl or .jsonl.gz file, or a folder of texts"
    )


def _of_benchmark(spec: str) -> tuple[str, str]:
    """Return the benchmark that a spec names, or "", and the path."""
    name, colon, path = spec.partition(":")
    if not colon:
        return "", spec
    from harness1.data.benchmarks.registry import BENCHMARKS

    return (name, path) if name in BENCHMARKS else ("", spec)


def _world(spec: str) -> Source:
    from harness1.data.world.generate import world_source

    size = spec.removeprefix("world:")
    if not (size.isascii() and size.isdigit()):
        raise UsageError(f"{spec}: a synthetic world is world:SIZE, SIZE being its number of documents")
    return world_source(int(size))


def _checked(
    path: Path,
    kind: str,
    read: Callable[[], Iterator[Document]],
    splits: tuple[str, ...] = (),
    read_tasks: Callable[[str], list[Task]] = lambda split: [],
    problems: list[str] | None = None,
) -> Source:
    """Return a source on disk that raises if it has no documents."""
    problems = [] if problems is None else problems

    def documents() -> Iterator[Document]:
        problems.clear()
        empty = True
        for document in read():
            empty = False
            yield document
        if empty:
            raise CorpusError(f"{path} holds no documents" + "".join(f"\n  {problem}" for problem in problems[:10]))

    root = path.resolve()
    return Source(root.name, kind, documents, splits, read_tasks, problems, root, label=str(path))
