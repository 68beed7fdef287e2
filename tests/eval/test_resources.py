"""What a run took: seconds by stage, tokens, and dollars where prices are given."""

from __future__ import annotations

import msgspec
import pytest

from harness1.config import Config, load_config
from harness1.eval.metrics import tokens_of
from harness1.eval.summary import resources
from harness1.records import Episode, Status, Task
from harness1.rows.calls import calls_of
from tests.eval.test_model_use import END, scripted, without_tokens
from tests.policy.test_language_model import episode_of, sayer
from tests.support import search

PRICED = load_config(None, ["machine.price.prompt=2", "machine.price.cached=0.5", "machine.price.output=8"])


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


def test_seconds_on_the_clock_stand_beside_those_of_the_episodes() -> None:
    assert resources([], Config(), 12.3456)["wall_seconds"] == 12.346


def test_seconds_and_cost_of_an_episode_are_means_over_tasks_of_their_samples() -> None:
    def took(task: str, seconds: float, status: Status = Status.COMPLETED) -> Episode:
        named = msgspec.structs.replace(spoken(), task=Task(task, "?"), status=status)
        return msgspec.structs.replace(named, stage_ms={"policy": 600 * seconds, "environment": 400 * seconds})

    episodes = [took("a", 1.0), took("a", 3.0), took("b", 4.0), took("b", 90.0, Status.INFRA_ERROR)]
    found = resources(episodes, PRICED)["per_episode"]
    assert found["seconds"] == {"mean": pytest.approx(3.0), "low": pytest.approx(2.0), "high": pytest.approx(4.0)}
    assert found["cost"]["mean"] == pytest.approx(resources([spoken()], PRICED)["cost"])
    assert resources(episodes, Config())["per_episode"].keys() == {"seconds"}


def test_a_cost_that_is_not_known_is_no_cost_of_nothing() -> None:
    silent = msgspec.structs.replace(without_tokens(spoken()), turns=(), segments={}, task=Task("silent", "?"))
    found = resources([spoken(), silent], PRICED)
    assert found["per_episode"]["cost"]["mean"] == pytest.approx(found["cost"])


def test_tokens_are_summed_and_cost_nothing_without_prices_or_a_model() -> None:
    episode = scripted()
    found = resources([episode, episode], Config())
    tokens = tokens_of(episode)
    assert tokens is not None
    told = {"prompt": 2 * tokens.prompt, "prefill": 2 * tokens.prefill, "output": 0, "exact": True, "episodes": 2}
    assert found["tokens"] == told
    assert "cost" not in found
    assert resources([episode], PRICED)["cost"] == 0.0


def test_a_cost_is_that_of_fresh_cached_and_output_tokens() -> None:
    episode = spoken()
    found = resources([scripted(), episode], PRICED)
    used = tokens_of(episode)
    assert used is not None
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


def test_no_episodes_took_nothing() -> None:
    found = resources([], Config())
    assert found["episode_seconds"] == {"total": 0}
    assert found["per_episode"]["seconds"] == {"mean": None, "low": None, "high": None}
    assert found["episodes"] == found["tokens"]["prompt"] == 0
