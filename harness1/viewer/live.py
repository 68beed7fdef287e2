"""A live page of work under way, and its server, which is for this machine only and does nothing but read. It needs no
extra: the server of the standard library listens on loopback, takes no bodies, and answers from memory."""

from __future__ import annotations

import secrets
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

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
        """Return what has changed since a page has `seen` so many changes of a `life`, and the state of everything
        small. Another life means that the page must begin again."""
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
    """Return the data of an episode in three parts; the third holds what a file stores once for many episodes. Raises
    InfrastructureFault: its record has become unreadable."""
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


HOST = "127.0.0.1"
NAMES = ("localhost", HOST, "[::1]")  # names by which a browser on this machine calls it
CLIENTS, SILENT_S = 32, 10.0
"""Requests that are answered at a time; the time after which a client that sends nothing is cut off."""
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class LiveServer(ThreadingHTTPServer):
    """Answers `/`, `/news` and `/data/NAME` to pages of its own address. Raises UsageError: it cannot listen."""

    daemon_threads = True

    def __init__(self, watched: Watched, port: int = 0) -> None:
        self.watched = watched
        self._places = threading.BoundedSemaphore(CLIENTS)
        try:
            super().__init__((HOST, port), _Handler)
        except OSError as error:
            raise UsageError(f"cannot listen on {HOST}:{port}: {error.strerror or error}") from error
        # A browser leaves out the port of HTTP itself.
        self.hosts = frozenset(NAMES if port == 80 else (f"{name}:{self.server_port}" for name in NAMES))

    @property
    def address(self) -> str:
        return f"http://{HOST}:{self.server_port}/"

    def process_request(self, request: Any, client_address: Any) -> None:
        self._places.acquire()
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Leave a client that has gone alone; anything else is reported."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    timeout = SILENT_S
    server: LiveServer

    def do_GET(self) -> None:
        if (refusal := self._refusal()) is not None:
            self._answer(*refusal)
            return
        parts = urlsplit(self.path)
        try:
            if parts.path == "/":
                self._answer(200, "".join(self.server.watched.page()), "text/html")
            elif parts.path == "/news":
                asked = parse_qs(parts.query)
                seen = asked.get("next", ["0"])[0]
                seen = seen if seen.isascii() and seen.isdecimal() and len(seen) < 10 else "0"
                news = self.server.watched.news(asked.get("life", [""])[0], int(seen))
                self._answer(200, msgspec.json.encode(news).decode(), "application/json")
            elif parts.path.startswith("/data/") and (text := self.server.watched.data(parts.path[6:])) is not None:
                self._answer(200, text)
            else:
                self._answer(404, "nothing of that name is here")
        except (UsageError, InfrastructureFault) as error:
            self._answer(500, str(error))

    def _refusal(self) -> tuple[int, str] | None:
        """Return why a request is refused: foreign pages may name this machine (421) and themselves (403)."""
        named = [each.lower() for each in self.headers.get_all("Host", [])]
        if len(named) != 1 or named[0] not in self.server.hosts:
            return 421, "this server is not of that name"
        own = {f"http://{host}" for host in self.server.hosts}
        if any(each.lower() not in own for each in self.headers.get_all("Origin", [])):
            return 403, "pages of other sites may not read this server"
        return None

    def _answer(self, status: int, text: str, kind: str = "text/plain") -> None:
        body = text.encode()
        self.send_response(status)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass

    def version_string(self) -> str:
        return "harness1"


def serve_view(server: LiveServer) -> None:
    """Answer until Ctrl-C, or SIGTERM, which ends the process."""
    before: Callable[..., Any] | int | None = signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        with server:
            server.serve_forever(poll_interval=0.2)
    finally:
        signal.signal(signal.SIGTERM, before)
