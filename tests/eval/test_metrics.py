"""What an episode asked of its model is counted from its record; a policy without a model has no such numbers."""

from __future__ import annotations

import math
from itertools import takewhile

import msgspec
import pytest

from harness1.config import Env, load_config
from harness1.episodes.rollout import rollout
from harness1.errors import UsageError
from harness1.eval.metrics import METRICS, Tokens, measure, metric_names, model_use, rerank_recall, tokens_of
from harness1.policy.scripted import ScriptedPolicy
from harness1.records import (
    Curated,
    Delta,
    Episode,
    Gold,
    Hashes,
    Hit,
    ModelCall,
    Note,
    Observation,
    Ranking,
    RewardRecord,
    Status,
    StopReason,
    Task,
    ToolCall,
    Turn,
)
from harness1.reward.measures import measure_outcome
from harness1.rows.calls import calls_of
from tests.policy.test_language_model import NONSENSE, episode_of, sayer
from tests.support import call, make_env, run, search

SEARCH, GREP, END = ToolCall("search_corpus"), ToolCall("grep_corpus"), ToolCall("end_search")
EPISODE = Episode(
    episode_id="e",
    task=Task("t", "query"),
    stop_reason=StopReason.END_SEARCH,
    status=Status.COMPLETED,
    hashes=Hashes("", "", ""),
    turns=(
        Turn(0, action=SEARCH, observation=Observation("search_corpus", delta=Delta(auto_populated=("x", "a", "y")))),
        Turn(1, action=SEARCH, observation=Observation("search_corpus")),
        Turn(2, action=GREP, observation=Observation("grep_corpus", error=Note("bad_pattern"))),
        Turn(3, action=END, observation=Observation("end_search")),
        Turn(4, parse_error="no call"),
    ),
    curated=(Curated("x", "high", 1), Curated("a", "fair", 2), Curated("z", "low", 3)),
    pool=("x", "a", "z", "y"),
    aliases={"b": "x"},
    reward=RewardRecord(0.75),
)
GOLD = Gold(relevant={"a": 1, "b": 1, "c": 1}, answer_docs=("b",))


def test_every_metric_by_hand() -> None:
    expected = {
        **dict.fromkeys(("curated_recall", "curated_precision", "curated_f1", "curated_f2"), 1 / 3),
        **dict.fromkeys(("curated_recall_alias", "curated_precision_alias"), 2 / 3),
        "answer_recall": 0.0,
        "answer_recall_alias": 1.0,
        "trajectory_recall": 2 / 3,
        "trajectory_answer_recall": 1.0,
        "selection_loss": 1 / 3,
        "R@1": 0.0,
        "P@1": 0.0,
        "Success@1": 0.0,
        **{f"R@{k}": 1 / 3 for k in (3, 5, 10, 15, 30)},
        **{f"P@{k}": 1 / k for k in (3, 5, 10, 15, 30)},
        **{f"Success@{k}": 1.0 for k in (3, 5, 10, 15, 30)},
        "nDCG@10": (1 / math.log2(3)) / (1 + 1 / math.log2(3) + 1 / 2),
        "AP": (1 / 2) / 3,
        "RR": 1 / 2,
        "set_size": 3.0,
        "turns": 4.0,
        "reward": 0.75,
        "auto_populated_kept": 2.0,
        **dict.fromkeys(("duplicates_hidden", "tool_errors", "format_errors"), 1.0),
        "tool_search_corpus": 2.0,
    }
    assert measure(measure_outcome(EPISODE, GOLD), EPISODE, Env()) == pytest.approx(expected)
    assert set(METRICS) == expected.keys() - {"tool_search_corpus"}


def test_a_mechanism_that_is_off_and_an_episode_without_a_reward_have_no_metric() -> None:
    env = load_config(overrides=["env.dedup.on=false", "env.auto_populate.on=false"]).env
    assert set(metric_names(Env())) - set(metric_names(env)) == {"duplicates_hidden", "auto_populated_kept"}
    assert "duplicates_hidden" not in measure(measure_outcome(EPISODE, GOLD), EPISODE, env)
    unscored = msgspec.structs.replace(EPISODE, reward=None)
    with pytest.raises(UsageError, match="'e' has no reward"):
        measure(measure_outcome(unscored, GOLD), unscored, Env())


def searched(*rankings: Ranking, unit: str = "document", hits: tuple[Hit, ...] = ()) -> Episode:
    turns = tuple(
        Turn(at, action=SEARCH, observation=Observation("search_corpus", hits=hits, rankings=(ranking,)))
        for at, ranking in enumerate(rankings)
    )
    return msgspec.structs.replace(EPISODE, turns=turns, unit=unit)


def test_rerank_recall_is_the_share_of_the_gold_given_to_the_reranker_that_it_handed_on() -> None:
    first = Ranking("q", ("x", "a"), pre_rerank_ids=("b", "x", "a", "y"))
    assert rerank_recall(searched(first), GOLD) == 0.5
    later = Ranking("q", ("b",), pre_rerank_ids=("b", "z"))
    assert rerank_recall(searched(first, later), GOLD) == 1.0
    assert measure(measure_outcome(EPISODE, GOLD), searched(first), Env(), GOLD)["rerank_recall"] == 0.5
    # Documents are counted by their chunks, and facts by theirs.
    given = Ranking("q", ("x", "a#0"), pre_rerank_ids=("b#2", "x", "a#0", "c-7"))
    assert rerank_recall(searched(given), GOLD) == 0.5
    hits = (Hit("c-7", "c", 7, "", "", 1.0, 0, 0),)
    assert rerank_recall(searched(given, hits=hits), GOLD) == pytest.approx(1 / 3)
    facts = Gold(relevant={"a": 1}, facts=(("a#0", "a#1"), ("b#2",), ("z",)))
    assert rerank_recall(searched(given, unit="chunk"), facts) == 0.5
    # Without a reranker, or gold before it, there is none.
    for ranking in (Ranking("q", ("a",)), Ranking("q", ("x",), pre_rerank_ids=("x", "y"))):
        assert rerank_recall(searched(ranking), GOLD) is None
    assert "rerank_recall" not in measure(measure_outcome(EPISODE, GOLD), EPISODE, Env(), GOLD)


ENDING = call("end_search")
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


def test_calls_failed_attempts_and_tokens_are_counted() -> None:
    model = sayer(search("river"), NONSENSE, NONSENSE, search("war"), ENDING)
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
    # Those without an action, in an episode that failed too.
    assert model_use(episode_of(sayer(search("river"), *[NONSENSE] * 9)))["failed_attempts"] == 4.0
    assert model_use(episode_of(sayer(*[NONSENSE] * 9), format_retries=0))["failed_attempts"] == 1.0


@pytest.mark.parametrize(("order", "rows"), [("paper", 6), ("stable_first", 6), ("epoch", 2)])
def test_calls_merge_where_the_order_of_a_context_lets_prompts_grow(order: str, rows: int) -> None:
    episode = episode_of(sayer(*map(search, WORDS), ENDING), order)
    assert len(list(calls_of(episode))) == 6
    assert model_use(episode)["merge_ratio"] == 6 / rows


@pytest.mark.parametrize("order", ["paper", "stable_first", "epoch"])
def test_prefill_is_what_the_call_before_left_in_no_cache(order: str) -> None:
    model = sayer(search("river"), NONSENSE, *map(search, WORDS[1:]), ENDING)
    episode = episode_of(model, order)
    outputs = [made.output_ids for made in calls_of(episode)]
    fresh = len(model.prompts[0])
    for before, output, prompt in zip(model.prompts, outputs, model.prompts[1:], strict=False):
        same = takewhile(lambda pair: pair[0] == pair[1], zip((*before, *output), prompt, strict=False))
        fresh += len(prompt) - len(list(same))
    assert model_use(episode)["prefill_tokens"] == fresh
    assert fresh < model_use(episode)["prompt_tokens"]


def test_a_hosted_model_has_calls_and_the_tokens_of_its_contexts() -> None:
    whole = episode_of(sayer(search("river"), NONSENSE, ENDING))
    used = model_use(without_tokens(whole))
    first, second = whole.turns
    counted = {
        "prompt_tokens": first.prompt_tokens + 2 * second.prompt_tokens,
        "prefill_tokens": first.prefill_tokens + second.prefill_tokens,
    }
    assert used == {"model_calls": 3.0, "failed_attempts": 1.0} | counted
    tokens = tokens_of(without_tokens(whole))
    assert not tokens.exact


def test_a_policy_without_a_model_has_only_the_tokens_of_its_contexts() -> None:
    episode = scripted()
    contexts = [(turn.prompt_tokens, turn.prefill_tokens) for turn in episode.turns]
    prompt, prefill = (float(sum(column)) for column in zip(*contexts, strict=True))
    assert model_use(episode) == {"prompt_tokens": prompt, "prefill_tokens": prefill}
    assert 0.0 < prefill < prompt
    assert tokens_of(episode) == Tokens(int(prompt), int(prefill), 0, exact=True)
