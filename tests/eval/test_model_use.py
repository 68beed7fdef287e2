"""What an episode asked of its model is counted from its record; a policy without a model has no such numbers."""

from __future__ import annotations

import msgspec
import pytest

from harness1.config import Config, Env
from harness1.eval.model_use import model_use
from harness1.eval.summary import summarise
from harness1.model_calls import calls_of
from harness1.policy.scripted import ScriptedPolicy
from harness1.records import DocId, Episode, Gold, ModelCall, Task
from harness1.rollout import rollout
from tests.policy.test_language_model import NONSENSE, episode_of, sayer
from tests.support import call, make_env, run, search

END = call("end_search")
WORDS = ("river", "war", "town", "rain", "king")


def without_tokens(episode: Episode) -> Episode:
    """The episode as a hosted model leaves it."""
    turns = [
        msgspec.structs.replace(turn, calls=tuple(ModelCall(made.call_id, attempt=made.attempt) for made in turn.calls))
        for turn in episode.turns
    ]
    return msgspec.structs.replace(episode, turns=tuple(turns), segments={})


def scripted() -> Episode:
    return run(rollout(make_env(), ScriptedPolicy(), Task("s", "river and war")))


def test_calls_attempts_and_tokens_are_counted() -> None:
    model = sayer(search("river"), NONSENSE, NONSENSE, search("war"), END)
    episode = episode_of(model)
    used = model_use(episode)
    assert used == {
        "model_calls": 5.0,
        "failed_attempts": 2.0,
        "prompt_tokens": float(sum(map(len, model.prompts))),
        "output_tokens": float(sum(len(made.output_ids) for made in calls_of(episode))),
        "merge_ratio": 1.0,
    }
    assert used["prompt_tokens"] > 1000


def test_failed_attempts_are_those_without_an_action_in_an_episode_that_failed_too() -> None:
    assert model_use(episode_of(sayer(search("river"), *[NONSENSE] * 9)))["failed_attempts"] == 4.0
    assert model_use(episode_of(sayer(*[NONSENSE] * 9), format_retries=0))["failed_attempts"] == 1.0
    assert model_use(episode_of(sayer(search("river"), END)))["failed_attempts"] == 0.0


@pytest.mark.parametrize(("order", "rows"), [("paper", 6), ("stable_first", 6), ("epoch", 2)])
def test_calls_merge_where_the_order_of_a_context_lets_prompts_grow(order: str, rows: int) -> None:
    episode = episode_of(sayer(*map(search, WORDS), END), order)
    assert len(list(calls_of(episode))) == 6
    assert model_use(episode)["merge_ratio"] == 6 / rows


def test_a_hosted_model_has_calls_and_no_tokens() -> None:
    episode = without_tokens(episode_of(sayer(search("river"), NONSENSE, END)))
    assert model_use(episode) == {"model_calls": 3.0, "failed_attempts": 1.0}


def test_a_policy_without_a_model_uses_none() -> None:
    assert model_use(scripted()) == {}


def test_metrics_of_a_run_hold_the_means_and_those_of_a_run_without_a_model_do_not() -> None:
    gold = Gold({DocId("doc_1"): 1})
    tasks = {name: Task(name, "river and war", gold=gold) for name in ("t", "u")}
    one = episode_of(sayer(search("river"), NONSENSE, END))
    two = msgspec.structs.replace(episode_of(sayer(END)), task=Task("u", "x"))
    found = summarise([one, two], tasks, Config(env=Env()))
    assert found["model_calls"]["mean"] == 2.0
    assert found["failed_attempts"]["mean"] == 0.5
    assert found["merge_ratio"]["mean"] == 1.0
    assert found["model_calls"]["low"] <= 2.0 <= found["model_calls"]["high"]
    plain = summarise([msgspec.structs.replace(scripted(), task=Task("t", "x"))], tasks, Config())
    assert "model_calls" not in plain
