"""What a run took: seconds by stage, tokens, and dollars where prices are given."""

from __future__ import annotations

import json
import random

import msgspec
import pytest

from harness1.config import Config, load_config
from harness1.errors import UsageError
from harness1.eval.metrics import tokens_of
from harness1.eval.summary import cut, resources, summarise, task_metrics
from harness1.records import Curated, Episode, Gold, Observation, Status, StopReason, Task, ToolCall, Turn
from harness1.reward import score
from harness1.reward.measures import measure_outcome
from harness1.rows.calls import calls_of
from tests.eval.run_folders import episode as finished
from tests.eval.test_metrics import END, scripted, without_tokens
from tests.policy.test_language_model import episode_of, sayer
from tests.support import search

CONFIG = load_config(overrides=["machine.bootstrap=100"])
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


def test_repeats_tell_the_spread_within_a_task_from_that_between_tasks() -> None:
    repeated = [*RUN[:2], finished("t4", "a"), finished("t4", "a", sample=1), RUN[2]]
    found = summarise(repeated, TASKS, CONFIG)["spread"]
    # Recalls: t1 1 and 0, t4 1/2 and 1/2, t2 0.
    within = (0.5 + 0.0) / 2
    between = 1 / 12 - within * (1 / 2 + 1 / 2 + 1) / 3
    assert between < 0
    assert found["curated_recall"] == {"between": 0.0, "within": pytest.approx(within**0.5), "repeats": 2}
    # Calls of search: t1 2 and 0, t4 none, t2 1.
    assert found["tool_search_corpus"]["within"] == pytest.approx(1.0)
    assert summarise(RUN[:2], TASKS, CONFIG)["spread"]["curated_recall"]["between"] is None
    assert summarise([finished("t1", "a"), finished("t2", "")], TASKS, CONFIG)["spread"] == {}


def test_what_only_some_tasks_define_is_averaged_over_these() -> None:
    told = finished(
        "t1", "ab", turns=tuple(msgspec.structs.replace(turn, prompt_tokens=90) for turn in calls("a", "b"))
    )
    summary = summarise([told, finished("t2", "")], TASKS, CONFIG)
    assert summary["prompt_tokens"] == {"mean": 180.0, "low": 180.0, "high": 180.0}
    assert summary["prefill_tokens"]["mean"] == 0.0


def test_rewards_are_those_of_the_given_configuration() -> None:
    dear = load_config(overrides=["machine.bootstrap=10", "reward.outcome=9"])
    assert summarise(RUN, TASKS, dear)["reward"]["mean"] > summarise(RUN, TASKS, CONFIG)["reward"]["mean"]
    failed = [score(RUN[2], TASKS["t2"].gold, CONFIG)]
    assert summarise(failed, TASKS, dear)["reward"]["mean"] == -0.5


def test_the_summary_is_json_and_depends_on_no_order() -> None:
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


def test_no_episodes_took_nothing() -> None:
    found = resources([], Config(), 12.3456)
    assert (found["wall_seconds"], found["episode_seconds"]) == (12.346, {"total": 0})
    assert found["per_episode"]["seconds"] == {"mean": None, "low": None, "high": None}
    assert found["episodes"] == found["tokens"]["prompt"] == 0
