"""An episode that somebody else drives: contexts go out, decisions come in, and `rollout` plays it like any other.

So deadlines, faults, records, replay and rewards of an episode that is played through MCP, OpenEnv or Gymnasium are
those of every other run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from harness1.env.environment import SearchEnv, Step
from harness1.env.render.context import Context
from harness1.env.render.pieces import Piece
from harness1.episodes.jobs import EpisodeSetup
from harness1.episodes.rollout import rollout
from harness1.errors import UsageError
from harness1.hashing import digest
from harness1.policy.policy import Decision
from harness1.records import Episode, Task, ToolCall


class DrivenPolicy:
    """A policy without a mind of its own: it hands each context out, and waits for the decision on it.

    Args:
        name: of the framework that decides; the records show it.
    """

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
    """One episode, step by step. Use it from one task at a time.

    Attributes:
        context: what a decision is awaited on; None before the beginning and after the end.
        last: the last step, if there was one.
        episode: the record, without a reward, once the episode is over.
    """

    def __init__(
        self,
        env: SearchEnv,
        task: Task,
        name: str,
        *,
        seed: int = 0,
        sample_idx: int = 0,
        group_id: str | None = None,
    ) -> None:
        self.task = task
        self.context: Context | None = None
        self.last: Step | None = None
        self.episode: Episode | None = None
        self._policy = DrivenPolicy(name)
        self._rollout = rollout(
            env, self._policy, task, seed=seed, sample_idx=sample_idx, group_id=group_id, on_step=self._on_step
        )
        self._playing: asyncio.Task[Episode] | None = None

    async def begin(self) -> Context | None:
        """Start the episode and return its first context; None if it ended at once, by a fault.

        Raises:
            UsageError: it was begun before.
        """
        if self._playing is not None:
            raise UsageError("this episode was begun before")
        self._playing = asyncio.create_task(self._rollout)
        return await self._next()

    async def act(self, decision: Decision | ToolCall) -> Context | None:
        """Carry out a decision on the current context, and return the next one; None if the episode is over.

        Raises:
            UsageError: no decision is awaited: the episode has not begun, is over, or is at work on the last one.
        """
        if self.context is None:
            raise UsageError("the episode is over" if self.episode else "the episode awaits no decision now")
        self.context = None
        call = Decision((decision,)) if isinstance(decision, ToolCall) else decision
        self._policy.decisions.put_nowait(call)
        return await self._next()

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

    def _on_step(self, step: Step) -> None:
        self.last = step

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


def environments(setup: EpisodeSetup) -> Callable[[], SearchEnv]:
    """Return what makes the environments of driven episodes over the index of a setup, which is opened once, here; its
    `policy` names the framework that decides."""
    retriever, policy = setup.open_retriever(), DrivenPolicy(setup.policy)
    return lambda: setup.environment(retriever, policy)


def newest_observation(context: Context) -> tuple[Piece, ...]:
    """Return the pieces behind the policy's last output, for a client that keeps a transcript of its own; all of them
    before its first. With `env.rendering.order = "transcript"` nothing else is new."""
    turns = [place for place, each in enumerate(context.pieces) if each.turn_ref is not None]
    return context.pieces[turns[-1] + 1 :] if turns else context.pieces
