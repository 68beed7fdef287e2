"""The environment for OpenEnv: sessions of a server, each with an episode, and sessions for its trainers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import msgspec

from harness1.adapters.driven import DrivenEpisode, deliver, measure, read_text
from harness1.config import Config
from harness1.data.source import Source
from harness1.env.environment import SearchEnv
from harness1.env.render import Context
from harness1.episodes.rollout import rollout
from harness1.episodes.single import question_task as asked_task
from harness1.errors import InfrastructureFault, UsageError, optional
from harness1.models.calls import messages_of, tools_of
from harness1.plain import digest
from harness1.policy.policy import Decision, Policy
from harness1.records import Episode, Status, Task, ToolCall
from harness1.reward import score
from harness1.rows.calls import calls_for_rows

with optional("openenv", "openenv"):
    from openenv.core.env_server.http_server import create_app
    from openenv.core.env_server.interfaces import Environment
    from openenv.core.env_server.types import Action, ConcurrencyConfig, Observation, State
    from openenv.core.harness.rollout import ResourceSession, ResourceSessionFactory, ToolResult, VerifyResult
    from openenv.core.harness.training import TrainingTrace, TrainingTurn
    from pydantic import Field


DRIVER = "openenv"
IDLE_S = 1800.0
"""Time after which a session without a call gives up its place."""


class SearchAction(Action):
    """One call of a tool."""

    tool: str
    arguments: dict[str, Any] = Field(default_factory=dict)
    reasoning: str = ""


class SearchObservation(Observation):
    """What is visible now, as a chat model takes it; at the end what is delivered, and a reward if there is gold."""

    messages: list[dict[str, Any]] = Field(default_factory=list)
    tools: list[dict[str, Any]] = Field(default_factory=list)
    curated: list[dict[str, Any]] = Field(default_factory=list)
    stop_reason: str = ""


class SearchState(State):
    """The task under way, and the number of finished turns in `step_count`."""

    task_id: str = ""


class SearchEnvironment(Environment):
    """One session: an episode at a time, driven by its client; `keep` gets every finished one, scored if it can be."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(
        self, source: Source, open_env: Callable[[], SearchEnv], config: Config, keep: Callable[[Episode], object]
    ) -> None:
        super().__init__()
        self._source, self._open_env, self._config, self._keep = source, open_env, config, keep
        self._driven: DrivenEpisode | None = None
        self._closed = False

    async def reset_async(
        self, seed: int | None = None, episode_id: str | None = None, **asked: Any
    ) -> SearchObservation:
        """Begin an episode of `index` in `split`, a `task_id` or a `query`; raise UsageError or InfrastructureFault."""
        if self._closed:  # its socket may still be open, and its place is another's
            raise UsageError("this session was closed, as nothing was asked for too long: connect again")
        if self._driven is not None:
            await self._driven.close()
        task = self._task(asked, seed or 0)
        self._driven = DrivenEpisode(self._open_env(), task, DRIVER, seed=seed or 0, group_id=task.task_id)
        return self._observe(self._driven, await self._driven.begin())

    async def step_async(self, action: SearchAction, timeout_s: float | None = None, **_: Any) -> SearchObservation:
        """Carry out a call; raise UsageError if no episode is under way, InfrastructureFault if the index failed."""
        if self._driven is None:
            raise UsageError("no episode is under way: call reset first")
        call = ToolCall(action.tool, dict(action.arguments))
        return self._observe(self._driven, await self._driven.act(Decision((call,), action.reasoning)))

    def reset(self, seed: int | None = None, episode_id: str | None = None, **asked: Any) -> SearchObservation:
        raise NotImplementedError("await reset_async")

    def step(self, action: SearchAction, timeout_s: float | None = None, **_: Any) -> SearchObservation:
        raise NotImplementedError("await step_async")

    @property
    def state(self) -> SearchState:
        """The task under way, and the turns that are over."""
        if self._driven is None:
            return SearchState()
        context, episode = self._driven.context, self._driven.episode
        turns = context.turn - 1 if context else len(episode.turns) if episode else 0
        return SearchState(task_id=self._driven.task.task_id, step_count=turns)

    def close(self) -> None:
        """Close the episode that is under way; servers call it from a thread of their own."""
        self._closed = True
        if self._driven is not None:
            self._driven.abandon()

    def list_splits(self) -> list[str]:
        return list(self._source.splits)

    def list_tasks(self, split: str) -> list[dict[str, Any]]:
        """Return id, index and query of every task of a split; never its gold."""
        tasks = enumerate(self._source.tasks(split))
        return [{"id": task.task_id, "index": place, "query": task.query} for place, task in tasks]

    def num_tasks(self, split: str) -> int:
        return len(self._source.tasks(split))

    def get_task(self, split: str, index: int) -> dict[str, Any]:
        """Return one task; raise IndexError if there is none."""
        if not 0 <= index < self.num_tasks(split):
            raise IndexError(f"{split} has no task {index}")
        return self.list_tasks(split)[index]

    def _task(self, asked: dict[str, Any], seed: int) -> Task:
        if query := asked.get("query"):
            return asked_task(read_text(query, "query"))
        tasks = self._source.tasks(str(asked.get("split") or self._source.splits[0]))
        if name := asked.get("task_id"):
            found = next((task for task in tasks if task.task_id == name), None)
            if found is None:
                raise UsageError(f"there is no such task: {asked}")
            return found
        if not tasks:
            raise UsageError("this split has no tasks")
        # Every sample of a group has one seed, and must get one task.
        index = asked.get("index")
        place = str(seed % len(tasks) if index is None else index)
        if not place.isdecimal() or len(place) > 20 or int(place) >= len(tasks):
            raise UsageError(f"there is no task of index {place[:40]!r}: the indexes are 0 to {len(tasks) - 1}")
        return tasks[int(place)]

    def _observe(self, driven: DrivenEpisode, context: Context | None) -> SearchObservation:
        if context is not None:
            return SearchObservation(messages=messages_of(context.pieces, {}), tools=tools_of(context.tools))
        episode = driven.score(self._config)
        self._keep(episode)
        if episode.status is Status.INFRA_ERROR:
            raise InfrastructureFault(f"the episode is invalid: {episode.error}")
        curated = [msgspec.to_builtins(each) for each in deliver(driven.env, episode.curated)]
        reward = episode.reward.total if episode.reward is not None else None
        return SearchObservation(done=True, reward=reward, curated=curated, stop_reason=str(episode.stop_reason))


def openenv_app(
    source: Source,
    open_env: Callable[[], SearchEnv],
    config: Config,
    keep: Callable[[Episode], object] = lambda _: None,
    sessions: int = 64,
) -> Any:
    """Return the FastAPI application of a server of `SearchEnvironment` with this many concurrent sessions."""
    made = lambda: SearchEnvironment(source, open_env, config, keep)  # noqa: E731
    bounds = ConcurrencyConfig(max_concurrent_envs=sessions, session_timeout=IDLE_S)
    kinds = (SearchAction, SearchObservation)
    return create_app(made, *kinds, "harness1", concurrency_config=bounds, state_cls=SearchState)


def serve_openenv(
    app: Any, check: Callable[[Any], None], host: str, port: int, on_ready: Callable[[int], None] = lambda _: None
) -> None:
    """Serve until SIGTERM or Ctrl-C; `check`, an `Access.check`, raises Refused for what is not admitted."""
    import uvicorn

    from harness1.serve.server import SHUTDOWN_S, SignalFree, listening, run_until_ended, running
    from harness1.serve.service import Refused, guard

    http = guard(app, check)

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        async def tell(message: Any) -> None:
            with suppress(OSError):  # the client has left, as `receive` tells
                await send(message)

        if scope["type"] == "websocket":
            try:
                check(scope)
            except Refused:
                await tell({"type": "websocket.close", "code": 1008})
                return
        await (http if scope["type"] == "http" else app)(scope, receive, tell)

    @asynccontextmanager
    async def serving() -> AsyncIterator[None]:
        with await listening(host, port) as listener:
            server = SignalFree(uvicorn.Config(answer, log_level="warning", timeout_graceful_shutdown=SHUTDOWN_S))
            async with running(server, listener):
                on_ready(int(listener.getsockname()[1]))
                yield

    run_until_ended(serving)


MEASURES = ("recall", "precision", "f1", "set_size", "turns")
FAILED = 1
"""Exit code of a session whose episode is invalid, or did not end in time."""


class SearchSession(ResourceSession):
    """One episode, played by a policy of ours in `wait_for_completion`."""

    def __init__(self, env: SearchEnv, policy: Policy, task: Task, config: Config, seed: int, group_id: str) -> None:
        self._env, self._policy, self._task, self._config = env, policy, task, config
        self._seed, self._group_id = seed, group_id
        self.episode: Episode | None = None

    def wait_for_completion(self, timeout_s: float | None = None) -> int:
        """Play the episode; return 0, or 1 if the index or the model failed, or the time was over."""

        async def play() -> Episode:
            async with asyncio.timeout(timeout_s):
                return await rollout(self._env, self._policy, self._task, seed=self._seed, group_id=self._group_id)

        try:
            episode = asyncio.run(play())
        except TimeoutError:
            return FAILED
        self.episode = score(episode, self._task.gold, self._config)
        return FAILED if episode.status is Status.INFRA_ERROR else 0

    def fetch_training_trace(self) -> TrainingTrace:
        """Return the calls to train on as they were sampled; a broken episode has none."""
        turns = [
            TrainingTurn(
                node_id=call.call_id,
                prompt_token_ids=list(call.prompt_ids),
                completion_token_ids=list(call.output_ids),
                per_token_logps=list(call.output_logprobs or ()),
                loss_mask=[0] * len(call.prompt_ids) + [1] * len(call.output_ids),
                metadata={"session_id": call.session_id, "policy_version": call.version_start},
            )
            for call in (calls_for_rows(self.episode) if self.episode is not None else ())
        ]
        return TrainingTrace(turns=turns)

    def verify(self, transcript: list[dict[str, Any]], final_state: Any | None = None) -> VerifyResult:
        """Return the composite reward; none for an invalid episode, which must not be trained on."""
        if self.episode is None or self.episode.reward is None or self.episode.status is Status.INFRA_ERROR:
            return VerifyResult(env_reward=None, done=False)
        metrics = measure(self.episode, self._task.gold, MEASURES)
        return VerifyResult(env_reward=self.episode.reward.total, done=True, metrics=metrics)

    def initial_messages(self) -> list[dict[str, Any]]:
        """Return the question; the episode makes its own prompts and calls its own tools."""
        return [{"role": "user", "content": self._task.query}]

    def list_tools(self) -> list[Any]:
        return []

    def call_tool(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        return ToolResult(error=f"the episode calls its own tools, not {name}", done=True)

    def close(self) -> None:
        """Do nothing."""


class SearchSessions(ResourceSessionFactory):
    """Makes sessions over tasks with gold, of a policy with token ids, as which `open_env`'s environments count."""

    def __init__(
        self, tasks: Sequence[Task], open_env: Callable[[], SearchEnv], policy: Policy, config: Config
    ) -> None:
        self._tasks = [task for task in tasks if task.gold is not None]
        if not self._tasks:
            raise UsageError("there are no tasks with gold to learn from")
        self._open_env, self._policy, self._config = open_env, policy, config

    def create(self, task: Any = None, seed: int | None = None, episode_id: str | None = None) -> SearchSession:
        """Make the session of a sample, whose `episode_id` seeds what the policy draws; raise UsageError if there is no
        such task: that with an id, or of a row with `task_id`, or else by the seed, which is that of a whole group."""
        name = task.get("task_id") if isinstance(task, dict) else task
        found = [each for each in self._tasks if each.task_id == name]
        if isinstance(name, str) and not found:
            raise UsageError(f"there is no task {name!r}")
        chosen = found[0] if found else self._tasks[(seed or 0) % len(self._tasks)]
        drawn = int(digest([seed or 0, episode_id or ""])[:7], 16)
        return SearchSession(self._open_env(), self._policy, chosen, self._config, drawn, f"group-{seed or 0}")
