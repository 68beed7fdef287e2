"""One way to name a corpus, whatever its layout: `open_source` finds the reader that understands it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from harness1.data import beir, folder, jsonl
from harness1.errors import CorpusError, UsageError
from harness1.hashing import digest
from harness1.records import Task
from harness1.retrieval.corpus import Document


@dataclass(frozen=True)
class Source:
    """A corpus, and the tasks over it where it has any."""

    name: str
    kind: str
    documents: Callable[[], Iterator[Document]]
    """Starts a new, lazy pass over all documents."""
    splits: tuple[str, ...]
    tasks: Callable[[str], list[Task]]
    """The tasks of one split; a `UsageError` names those that exist."""
    problems: list[str] = field(default_factory=list)
    """What could not be read in the last pass over the documents, one line each; it was left out."""
    root: Path | None = None
    """Where it lies on disk; None for what is generated."""
    edition: str = ""
    """Of what is generated: changes whenever its documents or tasks do."""

    @property
    def fingerprint(self) -> str:
        """Changes when the corpus may have changed: names, sizes and times of its files, without reading them.

        A generated corpus is decided by its name and edition.
        """
        if self.root is None:
            return digest([self.name, self.edition])
        files = sorted(self.root.rglob("*")) if self.root.is_dir() else [self.root]
        found = [(str(file), file.stat()) for file in files if file.is_file()]
        return digest([(name, stat.st_size, stat.st_mtime_ns) for name, stat in found])


def from_anywhere(spec: str) -> str:
    """The same corpus by a word that does not depend on the current directory: a path is made whole."""
    return spec if spec == "stdlib" or spec.startswith("world:") else str(Path(spec).resolve())


def open_source(spec: str) -> Source:
    """The corpus that a word of the command line stands for.

    Args:
        spec: a BEIR folder, a JSONL file (.jsonl, .jsonl.gz), a folder of texts (.md .txt .html .htm .pdf),
            `world:SIZE` for a synthetic world of so many documents, or `stdlib` for Python's own documentation.

    Raises:
        UsageError: nothing of that name exists, or it is of no kind that can be read.
        CorpusError: it exists and is broken; for faults within documents, raised while they are read.
    """
    if spec.startswith("world:"):
        return _world(spec)
    if spec == "stdlib":
        from harness1.data.stdlib import stdlib_source

        return stdlib_source()
    path = Path(spec)
    if not path.exists():
        raise UsageError(f"{spec}: no such file or folder (nor is it world:SIZE or stdlib)")
    if beir.is_beir(path):
        return _checked(path, "beir", lambda: beir.read_corpus(path), beir.splits(path), [])
    if path.is_dir():
        problems: list[str] = []
        return _checked(path, "folder", lambda: folder.read(path, problems), (), problems)
    if path.name.endswith((".jsonl", ".jsonl.gz")):
        return _checked(path, "jsonl", lambda: jsonl.read(path), (), [])
    raise UsageError(f"{spec}: not a corpus; give a BEIR folder, a .jsonl or .jsonl.gz file, or a folder of texts")


def _world(spec: str) -> Source:
    from harness1.data.world import world_source

    size = spec.removeprefix("world:")
    if not (size.isascii() and size.isdigit()):
        raise UsageError(f"{spec}: a synthetic world is world:SIZE, SIZE being its number of documents")
    return world_source(int(size))


def _checked(
    path: Path,
    kind: str,
    read: Callable[[], Iterator[Document]],
    splits: tuple[str, ...],
    problems: list[str],
) -> Source:
    """A source on disk whose documents are at least one."""

    def documents() -> Iterator[Document]:
        problems.clear()
        empty = True
        for document in read():
            empty = False
            yield document
        if empty:
            raise CorpusError(f"{path} holds no documents" + "".join(f"\n  {problem}" for problem in problems[:10]))

    def tasks(split: str) -> list[Task]:
        if split not in splits:
            raise UsageError(f"{path} has no split {split!r}; it has: {', '.join(splits) or 'none'}")
        return beir.read_tasks(path, split)

    return Source(path.resolve().name, kind, documents, splits, tasks, problems, path.resolve())
