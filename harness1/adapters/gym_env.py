"""The environment for Gymnasium: `reset` and `step`, with texts as observations and calls in JSON as actions."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from harness1.adapters.driven import DrivenEpisode
from harness1.config import Config
from harness1.env.environment import SearchEnv
from harness1.env.render import Context
from harness1.errors import MALFORMED, InfrastructureFault, UsageError, optional
from harness1.models.calls import tools_of
from harness1.policy.policy import Decision
from harness1.records import StopReason, Task, ToolCall
from harness1.tools.documents import END_SEARCH

with optional("gym", "gymnasium"):
    import gymnasium


DRIVER = "gymnasium"
TRUNCATED = (StopReason.TURN_LIMIT, StopReason.CONTEXT_LIMIT)


class Texts(gymnasium.Space[str]):
    """All texts, of any script and length. Samples are calls that every environment knows."""

    def __init__(self, seed: int | np.random.Generator | None = None) -> None:
        super().__init__((), np.str_, seed)

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        word = "".join(chr(97 + each) for each in self.np_random.integers(0, 26, 5))
        return action("search_corpus", query=word) if self.np_random.random() < 0.9 else action(END_SEARCH)

    def contains(self, x: Any) -> bool:
        return isinstance(x, str)

    @property
    def is_np_flattenable(self) -> bool:
        return False


def action(name: str, **arguments: Any) -> str:
    """Return a call as `step` takes it."""
    return json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)


class SearchGym(gymnasium.Env[str, str]):
    """One search episode at a time; the reward comes with the last step, and is 0 before. Observations are whole
    contexts; `info` has the tools as OpenAI's functions, and at the end `episode`, the scored record. `reset` draws a
    task by its seed, or takes `options={"task_id": ...}`. An action that is no call ends the episode."""

    metadata: dict[str, Any] = {"render_modes": []}

    def __init__(self, tasks: Sequence[Task], open_env: Callable[[], SearchEnv], config: Config) -> None:
        if not tasks:
            raise UsageError("there are no tasks to play")
        self.observation_space, self.action_space = Texts(), Texts()
        self._tasks = {task.task_id: task for task in tasks}
        self._open_env, self._config = open_env, config
        self._runner = asyncio.Runner()
        self._driven: DrivenEpisode | None = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Begin an episode; raise UsageError if there is no such task, InfrastructureFault if it could not begin."""
        super().reset(seed=seed)
        self._close_episode()
        wanted = (options or {}).get("task_id")
        names = list(self._tasks)
        task = self._tasks.get(names[int(self.np_random.integers(len(names)))] if wanted is None else str(wanted))
        if task is None:
            raise UsageError(f"there is no task {wanted!r}")
        self._driven = DrivenEpisode(self._open_env(), task, DRIVER, seed=seed or 0)
        context = self._runner.run(self._driven.begin())
        if context is None:
            raise InfrastructureFault(f"the episode is invalid: {self._driven.score(self._config).error}")
        return _text(context), self._info(self._driven, context)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Carry out a call in JSON. Raise UsageError without an episode, InfrastructureFault if the index failed."""
        if self._driven is None or self._driven.context is None:
            raise UsageError("no episode is under way: call reset first")
        try:
            found = json.loads(action)
            decision = Decision((ToolCall(str(found["name"]), dict(found.get("arguments") or {})),))
        except (*MALFORMED, TypeError, KeyError, AttributeError) as error:
            decision = Decision(parse_error=f"not a call in JSON: {type(error).__name__}")
        context = self._runner.run(self._driven.act(decision))
        if context is not None:
            return _text(context), 0.0, False, False, self._info(self._driven, context)
        episode = self._driven.score(self._config)
        if episode.error:
            raise InfrastructureFault(f"the episode is invalid: {episode.error}")
        if episode.reward is None:
            raise UsageError(f"task {episode.task.task_id} has no gold, so its episode has no reward")
        truncated = episode.stop_reason in TRUNCATED
        info = {"task_id": episode.task.task_id, "stop_reason": str(episode.stop_reason), "episode": episode}
        return "", episode.reward.total, not truncated, truncated, info

    def close(self) -> None:
        """Close the episode that is under way, and the event loop."""
        self._close_episode()
        self._runner.close()

    def _close_episode(self) -> None:
        if self._driven is not None:
            self._runner.run(self._driven.close())
            self._driven = None

    def _info(self, driven: DrivenEpisode, context: Context) -> dict[str, Any]:
        return {"task_id": driven.task.task_id, "turn": context.turn, "tools": tools_of(context.tools)}


def _text(context: Context) -> str:
    return "".join(piece.text for piece in context.pieces)
