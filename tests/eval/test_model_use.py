"""What an episode asked of its model is counted from its record; a policy without a model has no such numbers."""

from __future__ import annotations

from itertools import takewhile

import msgspec
import pytest

from harness1.config import Config, Env
from harness1.episodes.rollout import rollout
from harness1.eval.metrics import Tokens, model_use, tokens_of
from harness1.eval.summary import summarise
from harness1.policy.scripted import ScriptedPolicy
from harness1.records import DocId, Episode, Gold, ModelCall, Task
from harness1.rows.calls import calls_of
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
        "prefill_tokens": used["prefill_tokens"],
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


@pytest.mark.parametrize("order", ["paper", "stable_first", "epoch"])
def test_prefill_is_what_the_call_before_left_in_no_cache(order: str) -> None:
    model = sayer(search("river"), NONSENSE, *map(search, WORDS[1:]), END)
    episode = episode_of(model, order)
    outputs = [made.output_ids for made in calls_of(episode)]
    fresh = len(model.prompts[0])
    for before, output, prompt in zip(model.prompts, outputs, model.prompts[1:], strict=False):
        same = takewhile(lambda pair: pair[0] == pair[1], zip((*before, *output), prompt, strict=False))
        fresh += len(prompt) - len(list(same))
    assert model_use(episode)["prefill_tokens"] == fresh
    assert fresh < model_use(episode)["prompt_tokens"]


def test_an_epoch_reuses_more_of_its_prompts_than_the_published_order() -> None:
    shares = {}
    for order in ("paper", "epoch"):
        used = model_use(episode_of(sayer(*map(search, WORDS), END), order))
        shares[order] = used["prefill_tokens"] / used["prompt_tokens"]
    assert shares["epoch"] < shares["paper"]


def test_a_hosted_model_has_calls_and_the_tokens_of_its_contexts() -> None:
    whole = episode_of(sayer(search("river"), NONSENSE, END))
    used = model_use(without_tokens(whole))
    first, second = whole.turns
    counted = {
        "prompt_tokens": first.prompt_tokens + 2 * second.prompt_tokens,
        "prefill_tokens": first.prefill_tokens + second.prefill_tokens,
    }
    assert used == {"model_calls": 3.0, "failed_attempts": 1.0} | counted
    tokens = tokens_of(without_tokens(whole))
    assert tokens is not None
    assert not tokens.exact


def test_every_attempt_of_a_hosted_model_is_given_the_context_and_answers_it() -> None:
    plain = tokens_of(without_tokens(episode_of(sayer(END))))
    retried = tokens_of(without_tokens(episode_of(sayer(NONSENSE, NONSENSE, END))))
    assert plain is not None
    assert plain.output > 0
    assert retried == msgspec.structs.replace(plain, prompt=3 * plain.prompt, output=3 * plain.output)


def test_a_policy_without_a_model_has_only_the_tokens_of_its_contexts() -> None:
    episode = scripted()
    contexts = [(turn.prompt_tokens, turn.prefill_tokens) for turn in episode.turns]
    prompt, prefill = (float(sum(column)) for column in zip(*contexts, strict=True))
    assert model_use(episode) == {"prompt_tokens": prompt, "prefill_tokens": prefill}
    assert 0.0 < prefill < prompt
    assert tokens_of(episode) == Tokens(int(prompt), int(prefill), 0, exact=True)


def test_a_record_that_tells_no_size_of_contexts_has_no_tokens() -> None:
    told = scripted()
    turns = [msgspec.structs.replace(turn, prompt_tokens=0, prefill_tokens=0) for turn in told.turns]
    assert model_use(msgspec.structs.replace(told, turns=tuple(turns))) == {}


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
