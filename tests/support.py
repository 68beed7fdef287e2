"""Small worlds for tests: an in-memory retriever that counts shared words, and chunks made by hand."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import wraps
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from harness1.config import Env, Machine
from harness1.env.environment import SearchEnv, Step
from harness1.env.render import Context
from harness1.plain import text_digest
from harness1.policy.policy import Decision
from harness1.records import Chunk, ChunkId, DocId, Episode, Hashes, Hit, Status, StopReason, Task, ToolCall, Unit
from harness1.retrieval.protocol import BadPattern, IndexInfo, RetrievalFault, Scored, SearchRequest, SearchResult

Result = TypeVar("Result")


def run(coroutine: Coroutine[Any, Any, Result]) -> Result:
    return asyncio.run(coroutine)


def read_run(path: Path) -> list[tuple[str, list[tuple[str, float]]]]:
    found: dict[str, list[tuple[str, float]]] = {}
    for line in path.read_text(encoding="utf-8").split("\n")[:-1]:
        task_id, _, unit_id, _, score, _ = line.split(" ")
        found.setdefault(task_id, []).append((unit_id, float(score)))
    return list(found.items())


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """A test that is a coroutine function, in an event loop of its own."""
    return wraps(test)(lambda *arguments, **fixtures: run(test(*arguments, **fixtures)))


def similarity(one: bytes, other: bytes) -> float:
    """The share of equal positions of two MinHash signatures."""
    return float(np.mean(np.frombuffer(one, "<u4") == np.frombuffer(other, "<u4")))


def wait_for(what: Callable[[], bool]) -> None:
    """Wait until something holds, at most a minute."""
    ends = time.monotonic() + 60
    while not what():
        assert time.monotonic() < ends
        time.sleep(0.05)


def hear_interrupts() -> None:
    """Let a new process hear interrupts: a shell has its background jobs ignore them, and the tests may be one."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def hearing() -> Callable[[], None] | None:
    """The `preexec_fn` of a process that is to hear interrupts: none where it does, as what libraries have put before
    and after a fork (gRPC's poller) would run with it, and may end the new process."""
    return hear_interrupts if signal.getsignal(signal.SIGINT) is signal.SIG_IGN else None


@contextmanager
def command_process(*words: str, piped: bool = False) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process of the command that serves, and the first line that it prints, unless its input is a pipe (`piped`);
    killed at the end if it still runs."""
    command = [sys.executable, "-m", "harness1", "serve", *words]
    pipes: dict[str, Any] = dict.fromkeys(("stdout", "stderr", *(["stdin"] if piped else [])), subprocess.PIPE)
    process = subprocess.Popen(command, **pipes, text=True, preexec_fn=hearing())
    try:
        line = "" if piped else process.stdout.readline()
        assert line or piped, process.stderr.read()
        yield process, line
    finally:
        process.kill()
        process.communicate()


class Ask(NamedTuple):
    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes


Reply = tuple[int, Mapping[str, str], bytes]


@contextmanager
def replying(reply: Callable[[Ask], Reply]) -> Iterator[str]:
    """The URL of a server on loopback; the function may take its time, for each request has a thread."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status, headers, made = reply(Ask(self.command, self.path, dict(self.headers), body))
            with suppress(ConnectionError):
                self.send_response(status)
                for name, value in {"Content-Length": str(len(made)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(made)

        do_GET = do_POST  # noqa: N815

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            pass

    class Server(ThreadingHTTPServer):
        # The default of 5 resets connections when more clients than that come at once.
        request_queue_size = 128

    server = Server(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def die_at_fsync(step: Callable[[], object], number: int | None) -> int:
    """Carry out a step in another process that is killed at its n-th fsync (None: at none); its exit status."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    left = [number]
    real = os.fsync

    def fsync(handle: int) -> None:
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left[0] = None if left[0] is None else left[0] - 1
        real(handle)

    os.fsync = fsync
    try:
        step()
    finally:
        os._exit(0)


def chunk(doc_id: str, text: str, title: str = "", index: int = 0) -> Chunk:
    return Chunk(ChunkId(f"{doc_id}#{index}"), DocId(doc_id), index, title, text)


def hit(doc_id: str, text: str, title: str = "", index: int = 0, rank: int = 0) -> Hit:
    made = chunk(doc_id, text, title, index)
    return Hit(made.chunk_id, made.doc_id, index, title, text, 1.0, rank, -(-len(text) // 4))


def ended_episode() -> Episode:
    return Episode(
        episode_id="e",
        task=Task("t", "query"),
        stop_reason=StopReason.END_SEARCH,
        status=Status.COMPLETED,
        hashes=Hashes("", "", ""),
    )


class WordRetriever:
    """Ranks chunks by the number of query words that they hold. `faults` makes the next calls fail."""

    def __init__(self, chunks: Sequence[Chunk], unit: Unit = "document", faults: int = 0) -> None:
        self.chunks = list(chunks)
        self.info = IndexInfo("word-index", unit, len({made.doc_id for made in chunks}), len(self.chunks))
        self.faults = faults
        self.calls = 0

    async def search(self, requests: Sequence[SearchRequest]) -> list[SearchResult | RetrievalFault]:
        return [self._search(request) for request in requests]

    async def grep(self, pattern: str, limit: int, deadline: float) -> tuple[Chunk, ...] | BadPattern | RetrievalFault:
        if self._fails():
            return RetrievalFault("down")
        try:
            compiled = re.compile(pattern)
        except re.error as error:
            return BadPattern(str(error))
        return tuple([made for made in self.chunks if compiled.search(made.text)][:limit])

    async def read(self, doc_id: DocId) -> tuple[Chunk, ...] | RetrievalFault:
        if self._fails():
            return RetrievalFault("down")
        return tuple(made for made in self.chunks if made.doc_id == doc_id)

    async def get(self, chunk_ids: Sequence[ChunkId]) -> tuple[Chunk, ...] | RetrievalFault:
        return tuple(made for made in self.chunks if made.chunk_id in chunk_ids)

    def _search(self, request: SearchRequest) -> SearchResult | RetrievalFault:
        if self._fails():
            return RetrievalFault("down")
        words = set(request.query.lower().split())
        found = []
        for made in self.chunks:
            score = len(words & set(f"{made.title} {made.text}".lower().replace(".", " ").split()))
            if score and made.chunk_id not in request.exclude:
                found.append(Scored(made, float(score)))
        found.sort(key=lambda scored: (-scored.score, scored.chunk.chunk_id))
        return SearchResult(tuple(found[: request.k]))

    def _fails(self) -> bool:
        self.calls += 1
        if self.faults > 0:
            self.faults -= 1
            return True
        return False


CORPUS = (
    chunk("ada", "Ada Lovelace wrote the first program. She was the daughter of Lord Byron.", "Ada Lovelace"),
    chunk("byron", "Lord Byron was an English poet. He died in Missolonghi in 1824.", "Lord Byron"),
    chunk("babbage", "Charles Babbage designed the Analytical Engine. Ada Lovelace described it.", "Charles Babbage"),
    chunk("miss", "Missolonghi is a town in western Greece. It was besieged in 1825.", "Missolonghi"),
    chunk("noise", "Rain fell on the town for days.", "Weather"),
)

WORDS = "river castle bridge king Paris London Rome Ada Byron engine program poet town war 1824 1900 rain".split()  # noqa: SIM905

QUICK = Machine(attempts=3, workers=1)


def make_env(config: Env | None = None, chunks: Sequence[Chunk] = CORPUS, **options: Any) -> SearchEnv:
    retriever = options.pop("retriever", None) or WordRetriever(chunks, options.pop("unit", "document"))
    return SearchEnv(config or Env(), retriever, machine=QUICK, **options)


def play(env: SearchEnv, *actions: ToolCall, query: str = "Where did the father of Ada Lovelace die?") -> list[Step]:
    async def steps() -> list[Step]:
        await env.reset(Task("task", query))
        return [await env.step([action], "because") for action in actions]

    return run(steps())


def search(query: str) -> ToolCall:
    return ToolCall("search_corpus", {"query": query})


def curate(**arguments: Any) -> ToolCall:
    return ToolCall("curate", arguments)


def call(name: str, **arguments: Any) -> ToolCall:
    return ToolCall(name, arguments)


END = ToolCall("end_search", {"reasoning": "done"})


def text_of(context: Context | None) -> str:
    return "".join(piece.text for piece in context.pieces)


def recount(env: SearchEnv, context: Context) -> int:
    """The tokens of a prompt, counted anew: pieces, what each message adds, and the tool declarations."""
    counter = env.counter
    total = counter.tools(context.tools)
    role = None
    for piece in context.pieces:
        if piece.turn_ref is not None or piece.role != role:
            total += counter.overhead(piece)
        role = piece.role
        total += counter.piece(piece)
    return total


def wide_corpus(documents: int, seed: int = 0) -> list[Chunk]:
    """Documents of one to four chunks with shared names, numbers, and now and then a copy of an earlier text."""
    rng = random.Random(seed)
    chunks: list[Chunk] = []
    for number in range(documents):
        title = f"{rng.choice(WORDS).title()} {number}"
        for index in range(rng.choice((1, 1, 2, 4))):
            sentences = [" ".join(rng.choices(WORDS, k=12)).capitalize() + "." for _ in range(rng.randint(1, 12))]
            chunks.append(chunk(f"doc_{number}", " ".join(sentences), title, index))
        if number % 7 == 3:
            twin = rng.choice(chunks)
            chunks.append(chunk(f"copy_{number}", twin.text, twin.title))
    return chunks


class Script:
    """A policy that takes the given actions; a string stands for an answer that could not be parsed."""

    name = "script"

    def __init__(self, *actions: ToolCall | Sequence[ToolCall] | str) -> None:
        self.actions = actions
        self.hash = text_digest(repr(actions))

    def open(self, task: Task, seed: int) -> ScriptSession:
        return ScriptSession(self.actions)


class ScriptSession:
    def __init__(self, actions: Sequence[ToolCall | Sequence[ToolCall] | str]) -> None:
        self.actions = list(actions)

    async def act(self, context: Context) -> Decision:
        if not self.actions:
            return Decision((END,))
        action = self.actions.pop(0)
        if isinstance(action, str):
            return Decision(parse_error=action, reasoning="confused")
        return Decision((action,) if isinstance(action, ToolCall) else tuple(action), "because")

    def fork(self) -> ScriptSession:
        return ScriptSession(self.actions)
