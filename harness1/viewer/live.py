"""A live page of work under way: what it is told, read from folders that are being written."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from harness1.errors import InfrastructureFault, SchemaError, UsageError
from harness1.eval.metrics import MEANINGS
from harness1.records import TAGS, Episode, EpisodeKey
from harness1.rows.calls import CALLS
from harness1.rows.calls import VERB as PROXY
from harness1.runs.files import STAGE, read_stage
from harness1.runs.folder import METRICS
from harness1.runs.journal import EPISODES, read_appended
from harness1.training.log import LOG
from harness1.viewer.html import deflate, page
from harness1.viewer.pages import make_episode
from harness1.viewer.run_page import EpisodeRow, RunSource, row_of, score_episode
from harness1.viewer.work import hold_sessions, is_recipe, recipe_card, recipe_parts, training_card, training_row

AT_ONCE, KEPT = 200, 32  # episodes of a run that are read for one answer, and whose data is kept after it was asked for
SESSION_BYTES = 30_000_000
TRAININGS = ("rl train", "sft train")


Stamp = tuple[int, int, int]
"""Inode, size and time of a file; zeros if there is none."""


class WatchedRun:
    """A run folder, of which only what was appended is read."""

    def __init__(self, folder: Path) -> None:
        self.source = RunSource.open(folder)
        self._file, self._cards = _stamp(folder / EPISODES), [_stamp(folder / name) for name in (STAGE, METRICS)]
        self._end, self.left = 0, False

    def is_other(self) -> bool:
        """Return whether the folder holds other episodes than before, such as those of a run begun again."""
        was, self._file = self._file, _stamp(self.source.folder / EPISODES)
        return was[0] not in (0, self._file[0]) or self._file[1] < self._end

    def new(self) -> Iterator[tuple[int, Episode]]:
        """Yield the episodes that were appended, and where the line of each begins; `left` says if there are more."""
        if (cards := [_stamp(self.source.folder / name) for name in (STAGE, METRICS)]) != self._cards:
            self._cards = cards
            self.source.stage = read_stage(self.source.folder) or self.source.stage
        count = 0
        for start, end, episode in read_appended(self.source.folder, self._end, AT_ONCE):
            self._end, count = end, count + 1
            yield start, episode
        self.left = count == AT_ONCE

    def episode(self, start: int) -> Episode:
        """Return the episode whose line begins at a byte."""
        return next(episode for _, _, episode in read_appended(self.source.folder, start, 1))


class Watched:
    """Folders under way, for any number of pages and threads. Folders that do not exist yet are waited for; the
    episodes of an `rl train` belong to its folder, and a recipe's folder stands for those of its stages."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = folders
        self._lock = threading.RLock()
        self._replaying = threading.Lock()
        self._begin()

    def page(self) -> Iterator[str]:
        """Yield the page, which asks for the rest."""
        live = {"life": "", "next": 0, "waiting": [], "problems": []}
        lists: dict[str, Any] = {name: [] for name in ("rows", "runs", "trainings", "sessions", "pairs", "recipes")}
        about = {"columns": EpisodeRow.__struct_fields__, "tags": TAGS, "classes": MEANINGS, "live": live}
        return page(" · ".join(folder.resolve().name for folder in self._folders), about | lists, live=True)

    def news(self, life: str, seen: int) -> dict[str, Any]:
        """Return what changed since a page has `seen` so many changes; of another `life` it must begin again."""
        with self._lock:
            self._look()
            fresh = self._changes[seen if life == self._life else 0 :]
            rows = {change: self._rows[change] for change in fresh if isinstance(change, int)}
            return {
                "life": self._life,
                "next": len(self._changes),
                "left": any(run.left for run in self._runs),
                "rows": list(rows.items()),
                "changed": sorted({change for change in fresh if isinstance(change, str)}),
                "runs": [run.source.card for run in self._runs],
                "trainings": [training_row(folder) for folder in self._trainings],
                "recipes": list(self._recipes.values()),
                "sessions": [row for found in self._sessions.values() for row, _ in found],
                "waiting": [str(folder) for folder in self._waiting],
                "problems": sorted(self._problems),
            }

    def data(self, name: str) -> str | None:
        """Return the data of a tag, such as `e12`, as in a file; None if there is none of that name."""
        kind, number = name[:1], name[1:]
        if not (number.isascii() and number.isdecimal() and len(number) < 10):
            return None
        at = int(number)
        with self._lock:
            if kind == "r" and at < len(self._runs):
                return deflate(self._runs[at].source.shared({}))
            if kind == "t" and at < len(self._trainings):
                return deflate(training_card(self._trainings[at]))
            texts = [text for found in self._sessions.values() for _, text in found]
            if kind == "s" and at < len(texts):
                return texts[at]
            if kind != "e" or at >= len(self._rows):
                return None
            run, start = self._places[at]
        with self._replaying:
            return self._made(run, start)

    def _begin(self) -> None:
        self._life = secrets.token_hex(4)
        self._waiting = list(dict.fromkeys(self._folders))
        self._runs: list[WatchedRun] = []
        self._trainings: list[Path] = []
        self._recipes: dict[Path, dict[str, Any]] = {}
        self._parts = {*self._folders}  # a stage may also be given by itself
        self._stamps: dict[Path, Stamp] = {}  # of the logs of trainings and the calls of recordings
        self._recordings: list[Path] = []
        self._sessions: dict[Path, list[tuple[dict[str, Any], str]]] = {}
        self._problems: set[str] = set()
        self._rows: list[EpisodeRow] = []
        self._places: list[tuple[WatchedRun, int]] = []
        self._numbers: dict[tuple[int, EpisodeKey], int] = {}
        self._changes: list[int | str] = []
        self._made = lru_cache(maxsize=KEPT)(_episode_data)

    def _look(self) -> None:
        if any(run.is_other() for run in self._runs):
            self._begin()
        begun = [folder for folder in self._waiting if is_recipe(folder)]
        self._waiting = [folder for folder in self._waiting if folder not in begun]
        for folder in [*self._recipes, *begun]:
            with self._keep_problem():
                self._recipes[folder] = recipe_card(folder)
                fresh = [part for part in recipe_parts(folder) if part not in self._parts]
                self._parts.update(fresh)
                self._waiting += fresh
        for folder in list(self._waiting):
            ended = True  # what cannot be opened is not waited for either
            with self._keep_problem():
                ended = self._open(folder)
            if ended:
                self._waiting.remove(folder)
        for number, run in enumerate(self._runs):
            with self._keep_problem():
                for start, episode in run.new():
                    source = run.source
                    result = score_episode(episode, source.gold_of(episode.task), source.config)
                    row = row_of(episode, number, result, source.tools, None)
                    at = self._numbers.setdefault((number, episode.key), len(self._rows))
                    self._rows[at : at + 1] = [msgspec.structs.replace(row, held=True)]
                    self._places[at : at + 1] = [(run, start)]
                    self._changes.append(at)
        logs = enumerate(folder / LOG for folder in self._trainings)
        self._changes += [f"t{number}" for number, log in logs if self._has_changed(log)]
        for folder in self._recordings:
            if self._has_changed(folder / CALLS):
                with self._keep_problem():
                    self._sessions[folder] = hold_sessions([folder], SESSION_BYTES)
                self._changes += [f"s{number}" for number in range(sum(map(len, self._sessions.values())))]

    @contextmanager
    def _keep_problem(self) -> Iterator[None]:
        try:
            yield
        except (SchemaError, UsageError) as error:
            self._problems.add(str(error))

    def _has_changed(self, path: Path) -> bool:
        was, self._stamps[path] = self._stamps.get(path, (0, 0, 0)), _stamp(path)
        return was != self._stamps[path]

    def _open(self, folder: Path) -> bool:
        stage = read_stage(folder)
        verb = "" if stage is None else stage.verb
        if (folder / LOG).is_file():
            self._trainings.append(folder)
            if verb == TRAININGS[0]:
                self._waiting.append(folder / "episodes")
        elif verb == PROXY:
            self._recordings.append(folder)
        elif verb and verb not in TRAININGS and (verb != "run" or (folder / EPISODES).is_file()):
            self._runs.append(WatchedRun(folder))
        else:
            return False
        return True


def _episode_data(run: WatchedRun, start: int) -> str:
    """Return the data of an episode in three parts; InfrastructureFault if its record cannot be read."""
    try:
        made = make_episode(run.source, 0, (run.episode(start), True))
    except (OSError, StopIteration, SchemaError) as error:
        raise InfrastructureFault(f"the record of the episode cannot be read: {error}") from error
    if made.data is None:
        raise InfrastructureFault(made.row.problem or "the episode cannot be shown")
    return f"{made.data},{deflate([])},{deflate({'passages': made.passages, 'texts': made.shared})}"


def _stamp(path: Path) -> Stamp:
    try:
        found = path.stat()
    except OSError:
        return 0, 0, 0
    return found.st_ino, found.st_size, found.st_mtime_ns
