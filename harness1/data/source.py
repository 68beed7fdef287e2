"""A corpus, and the tasks over it where it has any, whatever its layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

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
    """Of what is generated: changes whenever its documents or tasks do. Of files: who reads them, where that counts."""

    has_documents: bool = True
    """Whether a pass over the documents has any; not so where they are on the web."""
    secret_answers: bool = False
    """Whether the answers in the gold of its tasks may be compared with and never written."""

    @property
    def fingerprint(self) -> str:
        """Changes when the corpus may have changed: names, sizes and times of its files, without reading them.

        A generated corpus is decided by its name and edition.
        """
        if self.root is None:
            return digest([self.name, self.edition])
        files = sorted(self.root.rglob("*")) if self.root.is_dir() else [self.root]
        found = [(str(file), file.stat()) for file in files if file.is_file()]
        names = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in found]
        return digest([self.edition, names] if self.edition else names)
