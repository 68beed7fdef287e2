"""Sessions that OpenEnv's trainers learn from: one row for each model call, with the exact tokens. TRL's
`HarnessRolloutWorker(harness_session_factory=SearchSessions(...))` takes them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

try:
    from openenv.core.harness.rollout import ResourceSession, ResourceSessionFactory, ToolResult, VerifyResult
    from openenv.core.harness.training import TrainingTrace, TrainingTurn
except ImportError as error:
    from harness1.errors import MissingExtra

    raise MissingExtra("openenv", "openenv") from error

from harness1.config import Config
from harness1.env.environment import SearchEnv
from harness1.episodes.rollout import rollout
from harness1.errors import UsageError
from harness1.hashing import digest
from harness1.policy.policy import Policy
from harness1.records import Episode, Status, Task
from harness1.reward.composite import score
from harness1.reward.outcome import outcome
from harness1.rows.calls import captured_calls

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

        async def played() -> Episode:
            async with asyncio.timeout(timeout_s):
                return await rollout(self._env, self._policy, self._task, seed=self._seed, group_id=self._group_id)

        try:
            episode = asyncio.run(played())
        except TimeoutError:
            return FAILED
        self.episode = score(episode, self._task.gold, self._config)
        return FAILED if episode.status is Status.INFRA_ERROR else 0

    def fetch_training_trace(self) -> TrainingTrace:
        """Return the calls to train on: prompt, output and log probabilities as they were sampled. A broken episode has
        none."""
        calls = captured_calls(self.episode) if self.episode is not None else ()
        return TrainingTrace(
            turns=[
                TrainingTurn(
                    node_id=call.call_id,
                    prompt_token_ids=list(call.prompt_ids),
                    completion_token_ids=list(call.output_ids),
                    per_token_logps=list(call.output_logprobs or ()),
                    loss_mask=[0] * len(call.prompt_ids) + [1] * len(call.output_ids),
                    metadata={"session_id": call.session_id, "policy_version": call.version_start},
                )
                for call in calls
            ]
        )

    def verify(self, transcript: list[dict[str, Any]], final_state: Any | None = None) -> VerifyResult:
        """Return the composite reward; none for an invalid episode, which must not be trained on."""
        if self.episode is None or self.episode.reward is None or self.episode.status is Status.INFRA_ERROR:
            return VerifyResult(env_reward=None, done=False)
        found = outcome(self.episode, self._task.gold)
        metrics = {name: float(getattr(found, name)) for name in MEASURES}
        return VerifyResult(env_reward=self.episode.reward.total, done=True, metrics=metrics)

    def initial_messages(self) -> list[dict[str, Any]]:
        """Return the question: the episode makes its own prompts."""
        return [{"role": "user", "content": self._task.query}]

    def list_tools(self) -> list[Any]:
        """Return no tools: the episode calls its own."""
        return []

    def call_tool(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        """Refuse: the episode calls its own tools."""
        return ToolResult(error=f"the episode calls its own tools, not {name}", done=True)

    def close(self) -> None:
        """Do nothing: an episode leaves nothing open."""


class SearchSessions(ResourceSessionFactory):
    """Makes sessions over tasks with gold.

    Args:
        open_env: makes the environment of an episode; it counts tokens as the policy does.
        policy: with token ids and log probabilities.
    """

    def __init__(
        self, tasks: Sequence[Task], open_env: Callable[[], SearchEnv], policy: Policy, config: Config
    ) -> None:
        self._tasks = [task for task in tasks if task.gold is not None]
        if not self._tasks:
            raise UsageError("there are no tasks with gold to learn from")
        self._open_env, self._policy, self._config = open_env, policy, config

    def create(self, task: Any = None, seed: int | None = None, episode_id: str | None = None) -> SearchSession:
        """Make the session of one sample.

        Args:
            task: a task's id, or a row with `task_id`; else the seed chooses.
            seed: of the group, whose samples all get the same task.
            episode_id: of the sample, which seeds what the policy draws.

        Raises:
            UsageError: there is no such task.
        """
        name = task.get("task_id") if isinstance(task, dict) else task
        found = [each for each in self._tasks if each.task_id == name]
        if isinstance(name, str) and not found:
            raise UsageError(f"there is no task {name!r}")
        chosen = found[0] if found else self._tasks[(seed or 0) % len(self._tasks)]
        drawn = int(digest([seed or 0, episode_id or ""])[:7], 16)
        return SearchSession(self._open_env(), self._policy, chosen, self._config, drawn, f"group-{seed or 0}")
