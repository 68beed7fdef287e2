"""What is measured while a policy is trained: turns beside the teacher's, whole episodes, and which look was best."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from harness1.config import Env
from harness1.data.world import world_source
from harness1.env.environment import SearchEnv
from harness1.env.render import Context
from harness1.episodes.rollout import rollout
from harness1.errors import InfrastructureFault
from harness1.models.backend import Grammar, SampledOutput
from harness1.policy.policy import Decision
from harness1.policy.scripted import ScriptedPolicy
from harness1.records import Sampling, Task, ToolCall
from harness1.reward.measures import measure_outcome
from harness1.rows import TrainRow
from harness1.sft.train import HeldOutTurn, episode_results, is_valid, means, pick_turns, turn_metrics
from harness1.tools.registry import Toolbox
from tests.support import END, Script, WordRetriever, call, chunk, curate, make_env, play, run, search
from tests.vocabularies import chat_format

CHAT = chat_format("hermes", "chatml")
TOOLBOX = Toolbox.of(Env())
SOURCE = world_source(20, seed=3)
CHUNKS = [chunk(made.doc_id, made.text, made.title) for made in SOURCE.documents()]
TASKS = SOURCE.tasks("train")[:4]


async def episode_metrics(*args: Any, **settings: Any) -> dict[str, float]:
    return means(await episode_results(*args, **settings))


def test_every_trained_stretch_is_a_turn_behind_all_that_stands_before_it() -> None:
    row = TrainRow((1, 2, 3, 4, 5, 6, 7), (0, 1, 1, 0, 0, 1, 1))
    assert pick_turns([row, TrainRow((8, 9), (0, 1)), TrainRow((1, 2, 3), (0, 1, 0))], 10) == [
        HeldOutTurn((1,), (2, 3)),
        HeldOutTurn((1, 2, 3, 4, 5), (6, 7)),
        HeldOutTurn((8,), (9,)),
        HeldOutTurn((1,), (2,)),
    ]
    rows = [TrainRow((at, 1), (0, 1)) for at in range(10)]
    assert ([turn.prompt_ids[0] for turn in pick_turns(rows, 4)], pick_turns(rows, 0)) == ([0, 2, 5, 7], [])


@pytest.mark.parametrize(
    ("action", "valid"),
    [
        (search("river"), True),
        (END, True),
        (curate(add_ids=["D1"]), True),
        (call("find", query="river"), False),
        (call("search_corpus"), False),
        (call("search_corpus", query="river", pages=3), False),
        (call("search_corpus", query=7), False),
    ],
)
def test_an_action_is_valid_if_its_tool_takes_its_arguments(action: ToolCall, valid: bool) -> None:
    assert is_valid(action, TOOLBOX) == valid
    (step,) = play(make_env(), action)
    error = step.observation.error if step.observation else None
    assert (error is None or error.code not in ("unknown_tool", "bad_arguments")) == valid


class Sayer:
    """A model that has one output for each prompt."""

    hash, version = "sayer", 0

    def __init__(self, outputs: Mapping[tuple[int, ...], tuple[int, ...]]) -> None:
        self.outputs, self.asked = outputs, list[Sampling]()

    async def generate(self, ids: Sequence[int], sampling: Sampling, grammar: Grammar | None = None) -> SampledOutput:
        self.asked.append(sampling)
        return SampledOutput(self.outputs[tuple(ids)], (), "stop")

    async def load_weights(self, folder: object, version: int) -> None:
        raise NotImplementedError


def said(*actions: ToolCall) -> tuple[int, ...]:
    """An output of several calls, or of none."""
    if not actions:
        return (*CHAT.text("I do not know."), *CHAT.stop_ids)
    spoken = [CHAT.format_action("", action) for action in actions]
    return (*(token for each in spoken[:-1] for token in each if token not in CHAT.stop_ids), *spoken[-1])


def metrics_of(*pairs: tuple[tuple[int, ...], ToolCall]) -> tuple[dict[str, float], Sayer]:
    """Of outputs, each beside the teacher's action."""
    backend = Sayer({(at,): output for at, (output, _) in enumerate(pairs)})
    turns = [HeldOutTurn((at,), CHAT.format_action("So.", meant)) for at, (_, meant) in enumerate(pairs)]
    return run(turn_metrics(backend, CHAT, TOOLBOX, turns, 99)), backend


def test_outputs_are_counted_by_what_an_environment_would_carry_out() -> None:
    found, backend = metrics_of(
        (said(search("river")), search("river")),
        (said(search("king")), search("river")),
        (said(curate(add_ids=["D1"])), search("river")),
        (said(call("search_corpus", pages=3)), search("river")),
        (said(call("find")), search("river")),
        (said(), search("river")),
        (said(END), END),
        (said(END), search("river")),
        (said(END, search("river")), search("river")),  # the search is what an environment takes
    )
    assert found == {"valid": 6 / 9, "tool_agreement": 5 / 9, "action_agreement": 3 / 9}
    assert backend.asked == [Sampling(temperature=0.0, max_tokens=99, stop_ids=CHAT.stop_ids)] * 9
    assert metrics_of()[0] == {}


def env_of(**options: Any) -> Callable[[], SearchEnv]:
    return lambda: make_env(chunks=CHUNKS, **options)


def test_episodes_are_measured_as_an_evaluation_does() -> None:
    found = run(episode_metrics(ScriptedPolicy(), env_of(), TASKS, concurrency=2))
    episodes = [run(rollout(env_of()(), ScriptedPolicy(), task)) for task in TASKS]
    outcomes = [measure_outcome(episode, task.gold) for episode, task in zip(episodes, TASKS, strict=True)]
    measures = {"curated_recall": "recall", "set_size": "set_size", "turns": "turns"}
    expected = {name: sum(getattr(each, field) for each in outcomes) / 4 for name, field in measures.items()}
    assert found == pytest.approx(expected | {"format_failures": 0.0})
    assert found["curated_recall"] > 0
    confused = run(episode_metrics(Script("no idea"), env_of(), TASKS[:2], concurrency=1))
    assert confused == {"curated_recall": 0.0, "set_size": 0.0, "turns": 0.0, "format_failures": 1.0}


def test_an_episode_that_the_infrastructure_broke_counts_nowhere() -> None:
    broken = [WordRetriever(CHUNKS, faults=1000), WordRetriever(CHUNKS)]
    found = run(episode_metrics(ScriptedPolicy(), lambda: make_env(retriever=broken.pop()), TASKS[:2], concurrency=1))
    alone = run(episode_metrics(ScriptedPolicy(), env_of(), TASKS[:1], concurrency=1))
    assert found == alone
    assert run(episode_metrics(Failing(), env_of(), TASKS, concurrency=1)) == {}


class Failing:
    """A policy whose model is gone."""

    name = hash = "failing"

    def open(self, task: Task, seed: int) -> Failing:
        return self

    async def act(self, context: Context) -> Decision:
        raise InfrastructureFault("the model is gone")

    def fork(self) -> Failing:
        return self


class Metered(Failing):
    """A policy that notes how many episodes are at work at once."""

    at_work = most = 0

    async def act(self, context: Context) -> Decision:
        self.at_work += 1
        self.most = max(self.most, self.at_work)
        await asyncio.sleep(0.001)
        self.at_work -= 1
        return Decision((END,))


@pytest.mark.parametrize("concurrency", [1, 3])
def test_so_many_episodes_are_at_work_at_once(concurrency: int) -> None:
    policy = Metered()
    run(episode_metrics(policy, env_of(), TASKS, concurrency))
    assert policy.most == concurrency
