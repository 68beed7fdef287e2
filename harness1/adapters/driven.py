"""Episodes that somebody else drives, played by `rollout` like any other; `Searches` opens many of them by name."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from harness1.config import Config
from harness1.data.indexing import Files
from harness1.env.environment import SearchEnv, Step
from harness1.env.pieces import Piece
from harness1.env.render import Context
from harness1.episodes.jobs import EpisodeSetup
from harness1.episodes.rollout import rollout
from harness1.episodes.single import question_task
from harness1.errors import UsageError
from harness1.memory.confidence import UNCONVINCING, judge
from harness1.plain import counted, digest, unbroken
from harness1.policy.policy import Decision
from harness1.records import Curated, Episode, Gold, Record, Status, Task, ToolCall
from harness1.reward import score
from harness1.reward.measures import measure_outcome


class DrivenPolicy:
    """A policy that hands each context out, and waits for the decision on it. Records show the name of who decides."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.hash = digest(["driven", name])
        self.contexts: asyncio.Queue[Context] = asyncio.Queue()
        self.decisions: asyncio.Queue[Decision] = asyncio.Queue()

    def open(self, task: Task, seed: int) -> DrivenPolicy:
        return self

    async def act(self, context: Context) -> Decision:
        self.contexts.put_nowait(context)
        return await self.decisions.get()

    def fork(self) -> DrivenPolicy:
        raise UsageError("an episode that somebody else drives cannot be forked")


class DrivenEpisode:
    """One episode, step by step. Use it from one task at a time."""

    def __init__(
        self, env: SearchEnv, task: Task, name: str, *, seed: int = 0, sample_idx: int = 0, group_id: str | None = None
    ) -> None:
        self.env, self.task = env, task
        self.context: Context | None = None
        """What a decision is awaited on; None before the beginning and after the end."""
        self.last: Step | None = None
        self.episode: Episode | None = None
        """The record, without a reward, once the episode is over."""
        self._policy = DrivenPolicy(name)
        numbers: dict[str, Any] = {"seed": seed, "sample_idx": sample_idx, "group_id": group_id}
        note = lambda step: setattr(self, "last", step)  # noqa: E731
        self._rollout = rollout(env, self._policy, task, **numbers, on_step=note)
        self._playing: asyncio.Task[Episode] | None = None

    async def begin(self) -> Context | None:
        """Start the episode and return its first context, None after a fault; raise UsageError the second time."""
        if self._playing is not None:
            raise UsageError("this episode was begun before")
        self._playing = asyncio.create_task(self._rollout)
        return await self._next()

    async def act(self, decision: Decision | ToolCall) -> Context | None:
        """Carry out a decision; return the next context, if any. Raise UsageError if none is awaited."""
        if self.context is None:
            raise UsageError("the episode is over" if self.episode else "the episode awaits no decision now")
        self.context = None
        self._policy.decisions.put_nowait(Decision((decision,)) if isinstance(decision, ToolCall) else decision)
        return await self._next()

    def score(self, config: Config) -> Episode:
        """Return the record of an episode that is over, with its reward if its task has gold."""
        assert self.episode is not None
        return self.episode if self.task.gold is None else score(self.episode, self.task.gold, config)

    async def close(self) -> None:
        """End the episode without a record, if it is not over yet."""
        self.context = None
        if self._playing is None:
            self._rollout.close()
        else:
            self._playing.cancel()
            await asyncio.wait({self._playing})

    def abandon(self) -> None:
        """Do the same from another thread, without waiting for it."""
        self.context = None
        if self._playing is not None and not (loop := self._playing.get_loop()).is_closed():
            loop.call_soon_threadsafe(self._playing.cancel)

    async def _next(self) -> Context | None:
        assert self._playing is not None
        shown = asyncio.create_task(self._policy.contexts.get())
        try:
            await asyncio.wait({shown, self._playing}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            await self.close()  # whoever drives has gone: nobody will decide
            raise
        finally:
            shown.cancel()
        if self._playing.cancelled():
            raise UsageError("the episode was closed")
        if self._playing.done():
            self.episode = self._playing.result()
        else:
            self.context = shown.result()
        return self.context


def measure(episode: Episode, gold: Gold | None, names: Sequence[str]) -> dict[str, float]:
    """Return measures of an episode's outcome by name, for the metrics of a framework."""
    found = measure_outcome(episode, gold)
    return {name: float(getattr(found, name)) for name in names}


def environments(setup: EpisodeSetup) -> Callable[[], SearchEnv]:
    """Return what makes the environments of driven episodes over the index of a setup, which is opened once, here."""
    retriever, policy = setup.open_retriever(), DrivenPolicy(setup.policy)
    return lambda: setup.environment(retriever, policy)


def newest_observation(context: Context) -> tuple[Piece, ...]:
    """Return the pieces behind the policy's last output (all before its first), for clients that keep a transcript."""
    turns = [place for place, each in enumerate(context.pieces) if each.turn_ref is not None]
    return context.pieces[turns[-1] + 1 :] if turns else context.pieces


NAME_BYTES = 9
"""Randomness of a name: it is all that keeps clients apart."""
WINDOW = 1_000_000
"""Tokens of an episode whose context is the client's business."""
LONGEST_QUESTION = 8192
"""Characters of a question or a query."""
SWEEPS, SHORTEST_S = 10, 0.05
"""Looks for idle searches in the time after which one is idle, and the shortest time between them."""


def read_text(given: object, what: str) -> str:
    """Return a question or a query of a client; raise UsageError if it is no text, empty or too long."""
    if not isinstance(given, str) or not given.strip() or len(given) > LONGEST_QUESTION:
        raise UsageError(f"a {what} is a text of 1 to {LONGEST_QUESTION:,} characters")
    return given


class Delivered(Record):
    """A document of the curated set, as a client gets it."""

    rank: int
    id: str
    tag: str
    title: str
    snippet: str
    path: str = ""
    """That of its file; empty if it is none, or is not shown to this client."""


class StepReply(Record):
    """What a client is told after a step: all that is new in the context, and once it is over what it delivers."""

    text: str
    files: dict[str, str] = {}
    """The paths, by handle, of documents that were found in this step and are files."""
    failed: bool = False
    """The call was not carried out, or the index failed."""
    curated: tuple[Delivered, ...] | None = None
    convincing: bool = True
    """A delivered document is surely enough one that the question asks for."""
    stop_reason: str = ""


def append_only(config: Config) -> Config:
    """Return the configuration for clients that keep a transcript: each context continues the one before, with what
    changed in the memory behind every observation. Windows and deadlines are the client's."""
    rendering = msgspec.structs.replace(config.env.rendering, order="epoch", epoch_turns=config.env.max_turns)
    env = msgspec.structs.replace(config.env, rendering=rendering, context_window=WINDOW)
    machine = msgspec.structs.replace(config.machine, episode_deadline_s=float(10**6))
    return msgspec.structs.replace(config, env=env, machine=machine)


@dataclass
class _Open:
    driven: DrivenEpisode
    used: float
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class Searches:
    """Searches that are under way in environments with the settings of `append_only`; `keep` gets every finished
    episode, recorded with the `driver`, and `files` finds the file of a document, whose path the client is told. One
    search more than `most` closes the one that was used longest ago; one without a call for `idle_s` is closed too."""

    def __init__(
        self,
        open_env: Callable[[], SearchEnv],
        driver: str,
        keep: Callable[[Episode], object] = lambda _: None,
        most: int = 256,
        idle_s: float = 1800.0,
        files: Files = lambda _: None,
    ) -> None:
        self._open_env, self._driver, self._keep, self._most, self._idle_s = open_env, driver, keep, most, idle_s
        self._files = files
        self._searches: OrderedDict[str, _Open] = OrderedDict()
        self._started = 0
        self._sweeper: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._searches)

    async def start(self, question: object) -> tuple[str, StepReply]:
        """Begin a search; return its name and first context. Raise UsageError as `read_text`."""
        # A client that cancels a call may come back: what it began is carried out.
        return await asyncio.shield(self._start(read_text(question, "question")))

    async def act(self, name: str, call: ToolCall) -> StepReply:
        """Carry out a call in a search, one after the other; raise UsageError if there is no such search."""
        return await asyncio.shield(self._act(name, call))

    async def close(self) -> None:
        """Close all searches without records."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        for name in list(self._searches):
            await self._close(name)

    async def _start(self, question: str) -> tuple[str, StepReply]:
        self._started += 1
        driven = DrivenEpisode(self._open_env(), question_task(question), self._driver, sample_idx=self._started)
        name = secrets.token_urlsafe(NAME_BYTES)
        found = _Open(driven, time.monotonic())
        async with found.lock:
            while len(self._searches) >= self._most:
                await self._close(next(iter(self._searches)))
            self._searches[name] = found
            if self._sweeper is None or self._sweeper.done():
                self._sweeper = asyncio.create_task(self._close_idle())
            await driven.begin()
            return name, self._answer(name, found)

    async def _act(self, name: str, call: ToolCall) -> StepReply:
        found = self._find(name)
        async with found.lock:
            self._find(name)  # it may have ended while this call waited
            found.used = time.monotonic()
            self._searches.move_to_end(name)
            await found.driven.act(call)
            return self._answer(name, found)

    def _find(self, name: str) -> _Open:
        if name not in self._searches:
            raise UsageError("there is no such search: it has ended, was closed, or never was; start one")
        return self._searches[name]

    async def _close_idle(self) -> None:
        while self._searches:
            bound = time.monotonic() - self._idle_s
            for name in [name for name, each in self._searches.items() if each.used < bound and not each.lock.locked()]:
                await self._close(name)
            await asyncio.sleep(max(self._idle_s / SWEEPS, SHORTEST_S))

    async def _close(self, name: str) -> None:
        if (found := self._searches.pop(name, None)) is not None:
            await found.driven.close()

    def _answer(self, name: str, found: _Open) -> StepReply:
        driven = found.driven
        turn = driven.last.turn if driven.last is not None else None
        failed = turn is not None and turn.observation is not None and turn.observation.error is not None
        if driven.context is not None:
            text = "".join(each.text for each in newest_observation(driven.context) if each.role != "system")
            pool = driven.env.state.memory.pool.entries.values() if turn else ()
            found_now = [each for each in pool if turn and each.turn == turn.index]
            paths = {each.handle: str(path) for each in found_now if (path := self._files(each.doc_id))}
            return StepReply(text, paths, failed)
        self._searches.pop(name, None)  # it may have been closed meanwhile
        episode = driven.episode
        assert episode is not None
        self._keep(episode)
        if episode.status is Status.INFRA_ERROR:
            return StepReply(f"The search is invalid: {episode.error}", {}, True, (), False, episode.stop_reason)
        curated = deliver(driven.env, episode.curated, self._files)
        convincing = judge(driven.env.state.memory, episode.curated).convincing
        lines = [f"The search is over. It delivers {counted(len(curated), 'document')}, the best first."]
        lines += [] if convincing else [f"{UNCONVINCING}: these are the nearest."]
        for each in curated:  # the path or the id stands on a line of its own
            lines += [unbroken(each.path or each.id), f"  {each.rank}. {each.tag}: {unbroken(each.title)}"]
            lines.append(f"  {' '.join(each.snippet.split())}")
        return StepReply("\n".join(lines), {}, failed, curated, convincing, episode.stop_reason)


def deliver(env: SearchEnv, curated: tuple[Curated, ...], files: Files = lambda _: None) -> tuple[Delivered, ...]:
    """Return the curated set with titles, the beginnings of texts and the paths of files."""
    memory = env.state.memory
    found = []
    for each in curated:
        entry = memory.pool.entries[each.unit_id]
        text, path = memory.text_of(each.unit_id)[:500], files(entry.doc_id)
        found.append(Delivered(each.rank, each.unit_id, each.tag, entry.title, text, str(path or "")))
    return tuple(found)
