"""A recorded run can be played again as a policy, and leads to the same episode."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from harness1.episodes.rollout import rollout
from harness1.errors import UsageError
from harness1.policy.scripted import RandomPolicy, RecordedPolicy
from harness1.records import Episode, Status, StopReason, Task
from harness1.runs.journal import EPISODES, EpisodeStore
from tests.support import END, Script, make_env, run, search, wide_corpus

WORLD = wide_corpus(30)
TASK = Task("t", "Which river castle did Ada see?")


def recorded(*script: object) -> Episode:
    policy = Script(*script) if script else RandomPolicy()  # type: ignore[arg-type]
    return run(rollout(make_env(None, WORLD), policy, TASK, seed=5))


def again(policy: RecordedPolicy, task: Task = TASK) -> Episode:
    return run(rollout(make_env(None, WORLD), policy, task, seed=9))


def test_the_same_actions_lead_to_the_same_turns() -> None:
    episode = recorded()
    assert again(RecordedPolicy([episode])).turns == episode.turns


def test_ignored_calls_and_parse_errors_are_repeated_too() -> None:
    episode = recorded([search("river"), END], "garbled")
    repeated = again(RecordedPolicy([episode]))
    assert repeated.turns == episode.turns
    assert repeated.status is Status.POLICY_ERROR


def test_where_the_record_ends_the_search_ends() -> None:
    episode = recorded(search("river"), search("war"), END)
    broken = msgspec.structs.replace(episode, turns=episode.turns[:1])
    assert again(RecordedPolicy([broken])).stop_reason is StopReason.END_SEARCH


def test_a_run_is_read_from_its_folder_or_its_file(tmp_path: Path) -> None:
    with EpisodeStore(tmp_path) as store:
        store.append(recorded())
    for path in (tmp_path, tmp_path / EPISODES):
        policy = RecordedPolicy.load(path)
        assert policy.name == f"replay:{path}"
        assert policy.hash == RecordedPolicy([recorded()]).hash


def test_other_actions_are_another_policy() -> None:
    assert RecordedPolicy([recorded(search("a"), END)]).hash != RecordedPolicy([recorded(search("b"), END)]).hash


def test_an_unknown_query_is_refused() -> None:
    with pytest.raises(UsageError, match="no recorded episode"):
        again(RecordedPolicy([recorded()]), Task("t", "Another question?"))
