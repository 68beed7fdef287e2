"""The environment for verifiers 0.4, exported by `harness1_verifiers`, because ids of verifiers cannot be dotted."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from harness1.adapters.driven import measure
from harness1.config import Config, load_config
from harness1.data.open import from_anywhere, open_source
from harness1.episodes.jobs import EpisodeSetup
from harness1.episodes.rollout import rollout
from harness1.episodes.single import Samples, append
from harness1.errors import InfrastructureFault, UsageError, optional
from harness1.http.model_endpoint import policy_endpoint
from harness1.policy.language_model import ChatCompletionsPolicy
from harness1.records import Episode, Gold, Status, Task
from harness1.reward import score

with optional("verifiers", "verifiers"):
    import verifiers.v1 as vf


MEASURES = ("recall", "precision", "f1", "trajectory_recall", "set_size", "turns", "tool_errors", "format_errors")
KEPT = "harness1"
"""Name under which a trace keeps the part of its episode that is scored."""


def slim(episode: Episode) -> dict[str, Any]:
    """Return what scoring reads of an episode, without texts and token ids: a trace should not carry megabytes."""
    turns = []
    for turn in episode.turns:
        calls = [msgspec.structs.replace(call, prompt=(), output_ids=(), output_logprobs=()) for call in turn.calls]
        seen = turn.observation
        seen = seen and msgspec.structs.replace(seen, hits=(), rankings=(), verdicts=(), resolved={})
        turns.append(msgspec.structs.replace(turn, calls=tuple(calls), reasoning="", observation=seen))
    kept = msgspec.structs.replace(episode, turns=tuple(turns), segments={}, counts={})
    found: dict[str, Any] = msgspec.to_builtins(kept)
    return found


class SearchTaskConfig(vf.TaskConfig):
    """How tasks are scored."""

    settings: list[str] = []
    """Overrides of `[reward]`, such as `reward.recipe=robust`."""


class SearchData(vf.TaskData):
    """A task as verifiers keeps it. The gold is for scoring alone; the card of recorded episodes names the dataset."""

    query: str
    split: str
    gold: dict[str, Any]
    dataset: str


class SearchTask(vf.Task[SearchData, vf.State, SearchTaskConfig]):
    """One question; its reward and metrics are those of `harness1 eval`."""

    @property
    def key(self) -> str:
        """The task's id, because the hash that verifiers makes depends on the order of loading."""
        return str(self.data.id)

    @vf.reward
    async def reward(self, trace: vf.Trace) -> dict[str, float]:
        """Return the total of the composite reward as `reward`."""
        scored = self._score(trace)
        assert scored.reward is not None
        return {"reward": scored.reward.total}

    @vf.metric
    async def terms(self, trace: vf.Trace) -> dict[str, float]:
        """Return the weighted terms of the reward, and the measures of the curated set."""
        scored = self._score(trace)
        assert scored.reward is not None
        terms = {f"reward/{name}": term.weight * term.value for name, term in scored.reward.terms.items()}
        return terms | measure(scored, self._gold, MEASURES)

    @property
    def _gold(self) -> Gold:
        return msgspec.convert(self.data.gold, Gold)

    def _score(self, trace: vf.Trace) -> Episode:
        episode = msgspec.convert(trace.info[KEPT], Episode)
        return score(episode, self._gold, load_config(None, self.config.settings))


class SearchTasksetConfig(vf.TasksetConfig):
    """Which tasks are loaded, under `[env.taskset]`."""

    data: str = ""
    """A dataset, as for `open_source`: a folder, or world:SIZE."""
    split: str = "test"
    task: SearchTaskConfig = SearchTaskConfig()


class SearchTaskset(vf.Taskset[SearchTask, SearchTasksetConfig]):
    """The tasks of a dataset's split that have gold."""

    def load(self) -> Iterable[SearchTask]:
        if not self.config.data:
            raise UsageError("set data under [env.taskset]: a dataset's name or folder, or world:SIZE")
        place = from_anywhere(self.config.data)
        for task in open_source(self.config.data).tasks(self.config.split):
            if task.gold is not None:
                words = {"id": task.task_id, "prompt": task.query, "query": task.query, "split": task.split}
                gold: dict[str, Any] = msgspec.to_builtins(task.gold)
                yield SearchTask(SearchData(**words, gold=gold, dataset=place), self.config.task)


class SearchHarnessConfig(vf.HarnessConfig):
    """How episodes are played, under `[env.agent.harness]`."""

    index: str = ""
    """An index folder, or the address of `harness1 serve retrieve`; better an address for many episodes at once."""
    config: str = ""
    """A configuration file, or the name of one that comes with the package."""
    settings: list[str] = []
    """Overrides, such as `env.rendering.order=epoch`."""
    record: str = ""
    """A run folder that keeps whole episodes; empty: none."""


class SearchHarness(vf.Harness[SearchHarnessConfig]):
    """Plays episodes over an index with the model of the endpoint."""

    EXECUTES_CODE = False
    NEEDS_CONTAINER = False
    APPENDS_SYSTEM_PROMPT = True

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        """Play one episode; an InfrastructureFault of the index or the model is an error of the trace."""
        setup = await asyncio.to_thread(lambda: self._setup)
        model = msgspec.structs.replace(setup.config.machine.model, key=secret)
        machine = msgspec.structs.replace(setup.config.machine, model=model)
        reserve = setup.config.env.generation_reserve
        server = policy_endpoint(endpoint, machine)
        policy = ChatCompletionsPolicy(server, ctx.model, reserve, setup.config.policy, "verifiers")
        policy.thinks = True  # every attempt may be trained on: none has less room than another
        env = setup.environment(await asyncio.to_thread(setup.open_retriever), policy)
        task = Task(str(data.id), str(getattr(data, "query", data.prompt)), str(getattr(data, "split", "")))
        # Each trace has a seed of its own: rollouts of one task must differ.
        episode = await rollout(env, policy, task, seed=int(trace.id[:7], 16), group_id=task.task_id)
        if self.config.record:
            out, dataset = Path(self.config.record), str(getattr(data, "dataset", ""))
            name = f"verifiers:{ctx.model}"
            episode = append(episode, out, setup.config, name, setup.retriever, dataset, self._samples)
        trace.info[KEPT] = slim(episode)
        if episode.status is Status.INFRA_ERROR:
            raise InfrastructureFault(str(episode.error))
        delivered = "\n".join(each.unit_id for each in episode.curated)
        return vf.ProgramResult(exit_code=0, stdout=delivered, stderr="")

    @cached_property
    def _samples(self) -> Samples:
        return Samples()

    @cached_property
    def _setup(self) -> EpisodeSetup:
        if not self.config.index:
            raise UsageError("set index under [env.agent.harness]: an index folder, or the address of a server")
        config: Config = load_config(self.config.config or None, self.config.settings)
        return EpisodeSetup(config, self.config.index, "verifiers")
