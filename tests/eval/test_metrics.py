"""What an episode measured and cost its model is counted from its record, and summed over the tasks of a run."""

import json
import math
import random
from collections.abc import Iterable, Mapping
from itertools import takewhile
from typing import Any

import msgspec
import pytest

from harness1.config import Config, Env, load_config
from harness1.episodes.rollout import rollout
from harness1.errors import UsageError
from harness1.eval.metrics import (
    METRICS,
    MeasuredRun,
    Tokens,
    cut,
    measure,
    metric_names,
    model_use,
    rerank_recall,
    resources,
    task_metrics,
    tokens_of,
)
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
from harness1.reward import score
from harness1.reward.measures import measure_outcome
from harness1.rows.calls import calls_of
from tests.eval.run_folders import episode as finished
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


def summarise(episodes: Iterable[Episode], tasks: Mapping[str, Task], config: Config, seed: int = 0, **how: Any) -> Any:
    return MeasuredRun(episodes, tasks, config, **how).summary(seed)


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


CONFIG = load_config()
TASKS = {name: Task(name, "query", gold=Gold(relevant={"a": 1, "b": 1})) for name in ("t1", "t2", "t3", "t4", "t5")}


def calls(*names: str) -> tuple[Turn, ...]:
    return tuple(Turn(i, action=ToolCall(name), observation=Observation(name)) for i, name in enumerate(names))


RUN = [
    finished("t1", "ab", turns=calls("search_corpus", "search_corpus", "curate")),  # recall 1
    finished("t1", "", sample=1),  # recall 0
    finished("t2", "ab", stop=StopReason.FORMAT_LIMIT, turns=calls("search_corpus")),  # recall 0
    finished("t3", "ab", stop=StopReason.FAULT),  # no recall
    finished("t4", "ax", stop=StopReason.CONTEXT_LIMIT),  # recall 1/2
]


def test_samples_are_averaged_then_tasks_failures_are_zero_and_faults_are_left_out() -> None:
    summary = summarise(RUN, TASKS, CONFIG)
    assert summary["curated_recall"]["mean"] == pytest.approx((0.5 + 0.0 + 0.5) / 3)
    assert summary["curated_precision"]["mean"] == pytest.approx((0.5 + 0.0 + 0.5) / 3)
    assert summary["trajectory_recall"]["mean"] == pytest.approx((0.5 + 1.0 + 0.5) / 3)
    assert summary["curated_recall"]["low"] < summary["curated_recall"]["mean"] < summary["curated_recall"]["high"]
    assert (summary["tasks"], summary["scored"], summary["missing"], summary["episodes"]) == (5, 3, 1, 5)
    assert summary["failures"] == {"policy_error": 1, "infra_error": 1, "truncated": 1}
    ends = {"end_search": 2, "context_limit": 1, "format_limit": 1, "fault": 1}
    assert summary["stop_reasons"] == {reason.value: ends.get(reason.value, 0) for reason in StopReason}
    # Tools are calls per episode, and the mix is their share.
    assert summary["tool_search_corpus"]["mean"] == pytest.approx((1.0 + 1.0 + 0.0) / 3)
    assert summary["tool_curate"]["mean"] == pytest.approx(0.5 / 3)
    assert summary["tool_mix"] == {"curate": 0.25, "search_corpus": 0.75}


def test_a_task_that_a_finished_run_dropped_counts_as_one_that_nothing_was_done_for() -> None:
    summary, open_ended = summarise(RUN, TASKS, CONFIG, finished=True), summarise(RUN, TASKS, CONFIG)
    # t5 has no episode; t3, which the infrastructure broke, is still in no mean.
    assert (summary["tasks"], summary["scored"], summary["missing"]) == (5, 4, 1)
    assert summary["curated_recall"]["mean"] == pytest.approx(open_ended["curated_recall"]["mean"] * 3 / 4)
    assert summary["nDCG@10"]["mean"] == pytest.approx(open_ended["nDCG@10"]["mean"] * 3 / 4)
    dropped = task_metrics(RUN, TASKS, CONFIG, finished=True)["t5"]
    assert {dropped[name] for name in ("curated_recall", "trajectory_recall", "RR", "turns")} == {0.0}
    assert dropped["reward"] == CONFIG.reward.empty
    assert {"t1", "t2", "t4", "t5"} == task_metrics(RUN, TASKS, CONFIG, finished=True).keys()
    assert (summary["episodes"], summary["failures"]) == (open_ended["episodes"], open_ended["failures"])


def test_what_only_some_tasks_define_is_averaged_over_these() -> None:
    told = finished(
        "t1", "ab", turns=tuple(msgspec.structs.replace(turn, prompt_tokens=90) for turn in calls("a", "b"))
    )
    summary = summarise([told, finished("t2", "")], TASKS, CONFIG)
    assert summary["prompt_tokens"] == {"mean": 180.0, "low": 180.0, "high": 180.0}
    assert summary["prefill_tokens"]["mean"] == 0.0


def test_rewards_are_those_of_the_given_configuration() -> None:
    dear = load_config(overrides=["reward.outcome=9"])
    assert summarise(RUN, TASKS, dear)["reward"]["mean"] > summarise(RUN, TASKS, CONFIG)["reward"]["mean"]
    failed = [score(RUN[2], TASKS["t2"].gold, CONFIG)]
    assert summarise(failed, TASKS, dear)["reward"]["mean"] == -0.5


def test_the_summary_is_json_and_depends_on_the_seed_and_on_no_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness1.eval.metrics.RESAMPLES", 10)
    shuffled = random.Random(0).sample(RUN, len(RUN))
    first, second = (json.dumps(summarise(iter(run), TASKS, CONFIG), allow_nan=False) for run in (RUN, shuffled))
    assert first == second
    assert first != json.dumps(summarise(RUN, TASKS, CONFIG, seed=1))
    faults = summarise([RUN[3]], TASKS, CONFIG)
    assert (faults["curated_recall"], faults["scored"]) == ({"mean": None, "low": None, "high": None}, 0)
    assert summarise([], {}, CONFIG)["tool_mix"] == {}


def test_an_episode_of_an_unknown_task_or_without_gold_is_refused() -> None:
    with pytest.raises(UsageError, match="'t1'"):
        summarise(RUN, {"t2": TASKS["t2"]}, CONFIG)
    with pytest.raises(UsageError, match="'t1' has no gold"):
        summarise(RUN, {name: task.public() for name, task in TASKS.items()}, CONFIG)


def test_cutting_keeps_the_best_ranked_and_drops_the_reward_of_the_whole() -> None:
    unsorted = (Curated("x", "low", 3), Curated("a", "high", 1), Curated("b", "fair", 2))
    whole = score(finished("t1", "", turns=()), TASKS["t1"].gold, CONFIG)
    episode = cut(msgspec.structs.replace(whole, curated=unsorted), 2)
    assert [entry.unit_id for entry in episode.curated] == ["a", "b"]
    assert (episode.reward, episode.hashes.reward) == (None, "")
    assert measure_outcome(episode, TASKS["t1"].gold).precision == 1.0
    assert cut(episode, 30).curated == episode.curated


PRICED = load_config(None, ["machine.price=[2, 0.5, 8]"])


def spoken() -> Episode:
    return episode_of(sayer(search("river"), search("war"), END), "stable_first")


def test_seconds_are_those_of_the_stages_and_their_sum() -> None:
    one, two = (
        msgspec.structs.replace(scripted(), stage_ms=spent)
        for spent in ({"policy": 1500.0, "environment": 250.0}, {"environment": 750.0, "ready": 1000.0})
    )
    found = resources(iter([one, two]), Config())
    assert found["episode_seconds"] == {"environment": 1.0, "policy": 1.5, "ready": 1.0, "total": 3.5}
    assert found["episodes"] == 2
    assert "wall_seconds" not in found
    nothing = resources([], Config(), 12.3456)
    assert (nothing["wall_seconds"], nothing["episode_seconds"]) == (12.346, {"total": 0})
    assert nothing["per_episode"]["seconds"] == {"mean": None, "low": None, "high": None}
    assert nothing["episodes"] == nothing["tokens"]["prompt"] == 0


def test_seconds_and_cost_of_an_episode_are_means_over_tasks_of_their_samples() -> None:
    def took(task: str, seconds: float, status: Status = Status.COMPLETED) -> Episode:
        named = msgspec.structs.replace(spoken(), task=Task(task, "?"), status=status)
        return msgspec.structs.replace(named, stage_ms={"policy": 600 * seconds, "environment": 400 * seconds})

    episodes = [took("a", 1.0), took("a", 3.0), took("b", 4.0), took("b", 90.0, Status.INFRA_ERROR)]
    found = resources(episodes, PRICED)["per_episode"]
    assert found["seconds"] == {"mean": pytest.approx(3.0), "low": pytest.approx(2.0), "high": pytest.approx(4.0)}
    assert found["cost"]["mean"] == pytest.approx(resources([spoken()], PRICED)["cost"])
    assert resources(episodes, Config())["per_episode"].keys() == {"seconds"}


def test_tokens_are_summed_and_cost_nothing_without_prices_or_a_model() -> None:
    episode = scripted()
    found = resources([episode, episode], Config())
    tokens = tokens_of(episode)
    told = {"prompt": 2 * tokens.prompt, "prefill": 2 * tokens.prefill, "output": 0, "exact": True, "episodes": 2}
    assert found["tokens"] == told
    assert "cost" not in found
    assert resources([episode], PRICED)["cost"] == 0.0


def test_a_cost_is_that_of_fresh_cached_and_output_tokens() -> None:
    episode = spoken()
    found = resources([scripted(), episode], PRICED)
    used = tokens_of(episode)
    assert 0 < used.prefill < used.prompt
    assert used.output == sum(len(call.output_ids) for call in calls_of(episode))
    dollars = (2 * used.prefill + 0.5 * (used.prompt - used.prefill) + 8 * used.output) / 1e6
    assert found["cost"] == pytest.approx(dollars)


def test_what_is_estimated_or_not_known_is_said() -> None:
    hosted = without_tokens(spoken())
    silent = msgspec.structs.replace(hosted, turns=(), segments={})
    found = resources([hosted, silent], PRICED)
    assert (found["tokens"]["exact"], found["tokens"]["episodes"], found["episodes"]) == (False, 1, 2)
    assert found["cost"] > 0.0
    assert found["per_episode"]["cost"]["mean"] == pytest.approx(found["cost"])  # of what is known
