"""Sources: a corpus in any layout, and the tasks over it if it has any; and the faults that a line of one may have."""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from harness1.errors import CorpusError, UsageError
from harness1.plain import counted, digest, utf8_safe
from harness1.records import Task
from harness1.retrieval.corpus import Document

SHOWN_KINDS, SHOWN_NAMES = 20, 5


@dataclass
class Reading:
    """What a pass over a folder left unread on purpose, and how it read the rest."""

    unread: Counter[str] = field(default_factory=Counter)
    """The number of files of each kind that nothing reads, by the ending of their names."""
    absent: set[str] = field(default_factory=set)  # those of them that the extra `documents` would read
    skipped: list[str] = field(default_factory=list)
    """The names of hidden, ignored and built files and folders; of what is in such a folder, its own alone."""
    copies: dict[str, list[str]] = field(default_factory=dict)
    """The names of further files with the text of a document."""
    notices: list[str] = field(default_factory=list)
    """A line for each file whose text may not be what its author wrote."""

    def clear(self) -> None:
        for each in vars(self).values():
            each.clear()

    def lines(self) -> list[str]:
        """Return what to tell of it, a line for each kind of thing."""
        lines = list[str]()
        if self.unread:
            kinds = [f"{ending} {count}" for ending, count in self.unread.most_common()]
            files, was = counted(self.unread.total(), "file"), "was" if self.unread.total() == 1 else "were"
            lines.append(f"{files} of {counted(len(kinds), 'kind')} {was} not read ({_first(kinds, SHOWN_KINDS)})")
        if self.absent:
            lines.append(f"pip install 'harness1[documents]' reads {', '.join(sorted(self.absent))}")
        if self.skipped:
            lines.append(f"{len(self.skipped)} passed over: {_first(self.skipped, SHOWN_NAMES)} (--all reads them)")
        if copies := sum(map(len, self.copies.values())):
            pairs = [f"{name} is {first}" for first, names in self.copies.items() for name in names]
            lines.append(f"{counted(copies, 'file')} with the text of another: {_first(pairs, SHOWN_NAMES)}")
        return [*lines, *self.notices]

    def facts(self) -> dict[str, Any]:
        """Return it for a card; what is empty is left out."""
        found = {"unread": {**self.unread}, "skipped": self.skipped, "copies": self.copies, "notices": self.notices}
        return {name: value for name, value in found.items() if value}


def _first(names: list[str], most: int) -> str:
    return ", ".join([*names[:most], *([f"and {len(names) - most} more"] if len(names) > most else [])])


@dataclass(frozen=True)
class Source:
    """A corpus, and the tasks over it if it has any."""

    name: str
    kind: str
    documents: Callable[[], Iterator[Document]]  # starts a new, lazy pass over all documents
    splits: tuple[str, ...] = ()
    read_tasks: Callable[[str], list[Task]] = lambda split: []  # reads the tasks of one split, which must exist
    problems: list[str] = field(default_factory=list)
    """One line for each unreadable part that the last pass over the documents left out."""
    root: Path | None = None  # the place on disk; None for generated sources
    edition: str = ""
    """For generated sources, changes whenever documents or tasks do. For files, the reader if it matters."""
    has_documents: bool = True  # false if the documents are on the web
    secret_answers: bool = False  # true if the answers in the gold may be compared with but never written
    label: str = ""  # names the source in error messages; "": by its name
    reading: Reading = field(default_factory=Reading)  # of the last pass over a folder of files

    def tasks(self, split: str) -> list[Task]:
        """Return the tasks of one split."""
        where = self.label or self.name
        if not self.splits:
            raise UsageError(f"{where} has documents, but no questions whose evidence is known")
        if split not in self.splits:
            raise UsageError(f"{where} has no split {split!r}; it has: {', '.join(self.splits)}")
        return self.read_tasks(split)

    def training_split(self) -> str:
        """Return the split that training takes its tasks from unless told another: `train`, `dev` or the only one."""
        if taught := [name for name in ("train", "dev") if name in self.splits]:
            return taught[0]
        if len(self.splits) != 1:
            raise UsageError(f"{self.name} has the splits {', '.join(self.splits) or 'none'}: choose one by --split")
        return self.splits[0]

    @property
    def fingerprint(self) -> str:
        """Return a value that changes when the corpus may have changed: of names, sizes and times of files, which
        are not read, or of name and edition of a generated corpus."""
        if self.root is None:
            return digest([self.name, self.edition])
        files, folders = [] if self.root.is_dir() else [self.root], [self.root]
        while folders:  # os.walk calls itself for each level until Python 3.12
            with suppress(OSError):
                for entry in [*os.scandir(folders.pop())]:
                    (folders if entry.is_dir(follow_symlinks=False) else files).append(Path(entry))
        found = [(str(file), status) for file in sorted(files) if (status := status_of(file))]
        names = [(utf8_safe(name), status.st_size, status.st_mtime_ns) for name, status in found]
        return digest([self.edition, names] if self.edition else names)


def status_of(file: Path) -> os.stat_result | None:
    """Return what the system says of a regular file, also behind a link, or None."""
    try:
        status = file.stat()
    except OSError:
        return None
    return status if stat.S_ISREG(status.st_mode) else None


Given = TypeVar("Given")
Made = TypeVar("Made")


class DuplicateId(CorpusError):
    """The id occurred before."""


class EmptyText(CorpusError):
    """The document, or a chunk of it, has no text."""


class AbsentGold(CorpusError):
    """The corpus lacks what a query should find."""


class NoGold(CorpusError):
    """The query names nothing to find."""


Fault = Callable[[CorpusError], None]  # called with the fault of a line; if it returns, the line is left out


def refuse(error: CorpusError) -> None:
    """Raise the fault: the dataset cannot be read."""
    raise error


def make_each(
    located: Iterable[tuple[str, Given]], make: Callable[[str, Given], Made], fault: Fault
) -> Iterator[tuple[str, Made]]:
    """Yield what is made from the value at each place, with the place. Values that cannot be used go to `fault`."""
    for where, value in located:
        try:
            yield where, make(where, value)
        except CorpusError as error:
            fault(error)


def drop_repeated(
    located: Iterable[tuple[str, Made]], name: Callable[[Made], str], fault: Fault
) -> Iterator[tuple[str, Made]]:
    """Yield the value at each place, with the place. Values whose id occurred before go to `fault`."""
    seen: set[str] = set()
    for where, value in located:
        if name(value) in seen:
            fault(DuplicateId(f"{where}: the id {name(value)!r} occurs a second time"))
        else:
            seen.add(name(value))
            yield where, value
