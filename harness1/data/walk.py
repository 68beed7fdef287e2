"""Finds the files of a folder, and says which it passes over: hidden ones, what a `.gitignore` names, what is built."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import re2
from pathspec import GitIgnoreSpec

from harness1.data.source import status_of

Problem = Callable[[str, str], None]
"""Called with the name of a file or folder within the corpus, and why it is left out."""
Rules = Sequence[tuple[str, GitIgnoreSpec]]
"""What each `.gitignore` on the way to a folder says, some rules at a time, behind the path of its own folder."""
DEEPEST = 100  # levels of folders that are entered; archives of whole disks have 30
BUILT = frozenset({"__pycache__", "bower_components", "build", "dist", "node_modules", "site-packages", "target"})
"""Folders of what programs made or fetched; other virtual environments and caches are known by `MARKS`."""
MARKS = frozenset({"pyvenv.cfg", "CACHEDIR.TAG"})
GIT, IGNORE = ".git", ".gitignore"
RULES_BYTES, RULE_LENGTH, BLOCK = 1 << 20, 1000, 100


class Walk:
    """A walk through the files below a folder. `follow_links`: also to folders, and out of this one. `everything`:
    pass over nothing but the store of git."""

    def __init__(self, path: Path, problem: Problem, *, follow_links: bool = False, everything: bool = False) -> None:
        self.path, self._root, self._problem = path, os.path.realpath(path), problem
        self._follow, self._everything = follow_links, everything
        self.skipped: list[str] = []
        """Names of files and folders (with a slash at the end) that were passed over."""

    def files(self) -> Iterator[str]:
        """Yield the relative paths of the regular files. A folder that links reach twice is entered once."""
        entered = set[tuple[int, int]]()
        folders: list[tuple[int, str, Rules]] = [(0, "", ())]
        while folders:
            depth, folder, rules = folders.pop()
            try:
                entries = sorted(os.scandir(self.path / folder), key=lambda entry: entry.name)
                identity = (self.path / folder).stat()
            except OSError as error:
                self._problem(folder or ".", f"the folder cannot be listed: {error.strerror}")
                continue
            if (identity.st_dev, identity.st_ino) in entered:
                continue
            entered.add((identity.st_dev, identity.st_ino))
            names = {entry.name for entry in entries}
            if folder and names & MARKS and not self._everything:
                self.skipped.append(f"{folder}/")
                continue
            if IGNORE in names and not self._everything:
                above = f"{folder}/" if folder else ""
                rules = (*rules, *((above, spec) for spec in _rules_of(self.path / folder / IGNORE)))
            inner = []
            for entry in entries:
                name, is_folder = f"{folder}/{entry.name}" if folder else entry.name, _is_folder(entry)
                if self._passes_over(name, is_folder, rules):
                    self.skipped.append(f"{name}/" if is_folder else name)
                elif self._takes(entry, name, is_folder, depth):
                    if is_folder:
                        inner.append((depth + 1, name, rules))
                    else:
                        yield name
            folders += reversed(inner)

    def _passes_over(self, name: str, is_folder: bool, rules: Rules) -> bool:
        last = name.rpartition("/")[2]
        if self._everything or last == GIT:
            return last == GIT
        if last.startswith(".") or (is_folder and (last in BUILT or last.endswith(".egg-info"))):
            return True
        for folder, spec in reversed(rules):
            said = spec.check_file(name.removeprefix(folder) + "/" * is_folder).include
            if said is not None:
                return said
        return False

    def _takes(self, entry: os.DirEntry[str], name: str, is_folder: bool, depth: int) -> bool:
        why, is_link = "", entry.is_symlink()
        if is_link and not self._follow and not Path(os.path.realpath(entry)).is_relative_to(self._root):
            why = "a link that leads out of the folder (--follow-links reads it)"
        elif is_folder and depth == DEEPEST:
            why = f"folders are entered {DEEPEST} levels deep"
        elif not is_folder and not status_of(self.path / name):
            why = "not a regular file"
        if why:
            self._problem(name, why)
        return not why and not (is_folder and is_link and not self._follow)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    with suppress(OSError):
        return entry.is_dir()
    return False


def _rules_of(file: Path) -> list[GitIgnoreSpec]:
    """Return the rules of a `.gitignore`. The engine is RE2, because a line of stars keeps Python's busy for ever;
    it takes no more than some thousands of rules at once."""
    lines = list[str]()
    with suppress(OSError):
        if status_of(file):
            with file.open("rb") as opened:
                lines = opened.read(RULES_BYTES).decode("utf-8", "replace").splitlines()
    lines = [line for line in lines if len(line) <= RULE_LENGTH]
    return [spec for at in range(0, len(lines), BLOCK) for spec in _compiled(lines[at : at + BLOCK])]


def _compiled(lines: Sequence[str]) -> list[GitIgnoreSpec]:
    """Return some rules; a line that is none counts for nothing, as with git."""
    with suppress(ValueError, re.error, re2.error):
        return [GitIgnoreSpec.from_lines(lines, backend="re2")]
    return [spec for line in lines for spec in _compiled([line])] if len(lines) > 1 else []
