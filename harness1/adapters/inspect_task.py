"""The environment for Inspect: a task whose solver plays our episodes with Inspect's model, scored as `harness1 eval`
scores them.

    inspect eval harness1/search -T data=FOLDER -T index=hotpotqa.index --model openai/gpt-5
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from harness1.adapters.driven import measure
from harness1.config import Config, load_config
from harness1.data.open import open_source
from harness1.episodes.jobs import EpisodeSetup
from harness1.episodes.rollout import rollout
from harness1.episodes.single import Samples, append
from harness1.errors import InfrastructureFault, UsageError, optional
from harness1.policy.language_model import ChatCompletionsPolicy
from harness1.records import Episode, Gold, Status, Task
from harness1.reward import score

with optional("inspect", "inspect_ai"):
    from inspect_ai import Task as InspectTask
    from inspect_ai import task
    from inspect_ai.dataset import MemoryDataset, Sample
    from inspect_ai.model import GenerateConfig, get_model, messages_from_openai
    from inspect_ai.scorer import Score, Scorer, Target, mean, scorer, stderr
    from inspect_ai.solver import Generate, Solver, TaskState, solver
    from inspect_ai.tool import ToolInfo, ToolParams


KEPT = "harness1_episode"
"""Name of the episode in a sample's store."""
MEASURES = ("recall", "precision", "f1", "trajectory_recall", "set_size", "turns")

Answer = TypeVar("Answer")


def read_golds(dataset: str, split: str) -> dict[str, Gold]:
    """Return the gold of a split's tasks, by their ids."""
    return {task.task_id: task.gold for task in open_source(dataset).tasks(split) if task.gold is not None}


class InspectModel:
    """Answers posts of chat completions with Inspect's active model, so that each is an event in its log."""

    async def post(self, path: str, body: Any, kind: type[Answer], ended: object = None) -> Answer:
        """Generate once; a model's failure is raised as Inspect raises it, and ends the sample."""
        messages = await messages_from_openai(body["messages"])
        tools = [
            ToolInfo(
                name=each["function"]["name"],
                description=each["function"]["description"] or each["function"]["name"],
                parameters=ToolParams(**each["function"]["parameters"]),
            )
            for each in body["tools"]
        ]
        config = GenerateConfig(max_tokens=body["max_tokens"], temperature=body["temperature"], seed=body["seed"])
        output = await get_model().generate(messages, tools, "any", config)
        given = [(each.id, each.function, json.dumps(each.arguments)) for each in output.message.tool_calls or []]
        calls = [{"id": key, "function": {"name": name, "arguments": text}} for key, name, text in given]
        message = {"content": output.message.text, "tool_calls": calls}
        stop = "length" if output.stop_reason == "max_tokens" else "stop"
        return msgspec.convert({"choices": [{"message": message, "finish_reason": stop}]}, kind)


@solver
def search_solver(index: str, config: Config, record: str = "", dataset: str = "", split: str = "test") -> Solver:
    """Return the solver that plays an episode over an index; the sample's store and the run folder `record` keep it.
    Raises UsageError: `record` without the `dataset` that has the gold."""
    if record and not dataset:
        raise UsageError("`record` needs `dataset`")
    setup, samples = EpisodeSetup(config, index, "inspect"), Samples()
    golds = read_golds(dataset, split) if record else {}

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        if record and str(state.sample_id) not in golds:
            raise UsageError(
                f"{dataset} has no task {state.sample_id} with gold in {split}, so `record` cannot score it"
            )
        name, reserve = str(get_model()), config.env.generation_reserve
        policy = ChatCompletionsPolicy(InspectModel(), name, reserve, config.policy, "inspect")
        env = setup.environment(setup.open_retriever(), policy)
        episode = await rollout(env, policy, Task(str(state.sample_id), state.input_text, "inspect"), seed=state.epoch)
        if record:
            scored = score(episode, golds[str(state.sample_id)], config)
            append(scored, Path(record), config, f"inspect:{name}", index, dataset, samples)
        if episode.status is Status.INFRA_ERROR:
            raise InfrastructureFault(str(episode.error))
        state.store.set(KEPT, msgspec.to_builtins(episode))
        state.output.completion = "\n".join(each.unit_id for each in episode.curated)
        return state

    return solve


@scorer(metrics={"*": [mean(), stderr()]})
def search_scores(config: Config, dataset: str, split: str = "test") -> Scorer:
    """Return the scorer of a dataset's split: the composite reward, and the measures of the curated set."""
    golds = read_golds(dataset, split)

    async def score_state(state: TaskState, target: Target) -> Score:
        gold = golds[str(state.sample_id)]
        found = score(msgspec.convert(state.store.get(KEPT), Episode), gold, config)
        assert found.reward is not None
        values = {"reward": found.reward.total, **measure(found, gold, MEASURES)}
        terms = {name: term.weight * term.value for name, term in found.reward.terms.items()}
        return Score(value=values, metadata={"terms": terms, "stop_reason": str(found.stop_reason)})

    return score_state


@task
def search(
    data: str, index: str, split: str = "test", limit: int = 0, config: str = "", settings: str = "", record: str = ""
) -> InspectTask:
    """Return the task of a dataset's split, for `open_source`, over an index folder or the address of `harness1 serve
    retrieve`. `settings` are overrides, separated by spaces; a run folder `record` keeps whole episodes."""
    loaded = load_config(config or None, settings.split())
    tasks = [each for each in open_source(data).tasks(split) if each.gold is not None][: limit or None]
    # No gold: whatever a sample holds, other solvers of a chain see.
    samples = MemoryDataset([Sample(input=each.query, id=each.task_id) for each in tasks])
    solver = search_solver(index, loaded, record, data, split)
    return InspectTask(samples, solver=solver, scorer=search_scores(loaded, data, split))
