"""Each gate stops what it is there to stop, and nothing else."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from harness1.config import Env, Gates
from harness1.data.leaks import EvaluationSet, Leaks
from harness1.episodes.rollout import rollout
from harness1.errors import UsageError
from harness1.records import DocId, Episode, Gold, ModelCall, Status, Task
from harness1.sft.build import GateCounts, TeacherEpisode, apply_gates, candidate, check_any_left, draw_held_out
from tests.support import END, Script, WordRetriever, curate, make_env, run, search

QUERY = "Where did the father of Ada Lovelace die?"
GATES = (*("fault", "format", "documents", "recall", "precision", "tools", "excluded", "leak"), *("duplicate", "quota"))
LOOSE = Gates(near=0.9)
ASKED = Task("q", "Which river flows past the castle of the king in Rome?", "test", Gold({DocId("castle"): 1}))
LEAKS = Leaks(0.9, [EvaluationSet("d", "test", [ASKED])])
EARLIER = {("d", "learned")}


def one(number: int = 0, **changes: Any) -> TeacherEpisode:
    base = TeacherEpisode(
        place=(0, number),
        episode_id=f"e{number}",
        task_id=f"t{number}",
        dataset="d",
        query=f"Who painted the {'abcdefghijklmnopqrstuvwxyz'[number]} portrait hanging in hall {number}, and when?",
        status=Status.COMPLETED,
        format_errors=0,
        documents=3,
        recall=0.5,
        precision=0.5,
        trajectory_recall=1.0,
        turns=4,
        calls={"search_corpus": 2, "curate": 1, "end_search": 1},
        actions=f"a{number}",
    )
    return msgspec.structs.replace(base, **changes)


def passed(*candidates: TeacherEpisode, gates: Gates = LOOSE, seed: int = 0) -> tuple[list[str], dict[str, GateCounts]]:
    kept, reports = apply_gates(candidates, gates, LEAKS, seed, EARLIER)
    assert tuple(report.name for report in reports) == GATES
    assert [report.entered for report in reports[1:]] == [report.passed for report in reports[:-1]]
    return [each.episode_id for each in kept], {report.name: report for report in reports}


@pytest.mark.parametrize(
    ("gate", "changes"),
    [
        ("fault", {"status": Status.INFRA_ERROR}),
        ("format", {"status": Status.POLICY_ERROR}),
        ("format", {"format_errors": 1}),
        ("documents", {"documents": 0}),
        ("recall", {"recall": 0.09}),
        ("precision", {"precision": 0.39}),
        ("tools", {"calls": {}}),
        ("excluded", {"task_id": "learned"}),
        ("leak", {"query": "which RIVER flows past the castle of the king in Rome"}),
        ("leak", {"gold": frozenset({"castle"})}),
        ("duplicate", {"query": one(0).query.upper(), "turns": 5}),
        ("quota", {}),
    ],
)
def test_each_gate_stops_what_fails_it_alone(gate: str, changes: dict[str, Any]) -> None:
    gates = Gates(near=0.9, precision=0.4, quotas={"e": 1} if gate == "quota" else {})
    candidates = [one(0), one(1, **changes)]
    if gate == "quota":
        candidates = [one(0, dataset="e"), one(1, dataset="e")]
    kept, reports = passed(*candidates, gates=gates)
    assert {name: report.entered - report.passed for name, report in reports.items() if report.dropped} == {gate: 1}
    assert len(kept) == 1
    assert kept == ["e0"] or gate == "quota"


def test_a_report_names_the_first_few_and_says_why() -> None:
    bounds = {"documents": 1, "recall": 0.1, "calls": {"search_corpus": 1}, "status": Status.TRUNCATED}  # which pass
    kept, reports = passed(*(one(number, recall=0.0) for number in range(8)), one(9, **bounds))
    assert kept == ["e9"]
    report = reports["recall"]
    assert (report.entered, report.passed, len(report.dropped)) == (9, 1, 5)
    assert report.dropped[0] == "d/t0 (e0): curated recall 0.000"
    _, reports = passed(one(query="Which river flows past the castle of the king in Rome?"))
    assert reports["leak"].dropped == ("d/t0 (e0): asks the same as d:test/q",)


def test_of_tasks_that_ask_the_same_the_best_and_then_the_shortest_stays() -> None:
    query = one(0).query
    assert passed(one(0), one(1, query=query, recall=0.6, turns=9))[0] == ["e1"]
    assert passed(one(0), one(1, query=query, turns=3))[0] == ["e1"]
    assert passed(one(0), one(1, query=query))[0] == ["e0"]
    assert passed(one(0), one(1, query=query, dataset="other"))[0] == ["e0"]


def test_samples_of_a_task_are_duplicates_if_they_did_the_same_or_there_are_enough_better_ones() -> None:
    task = {"task_id": "t0", "query": one(0).query}
    assert passed(one(0), one(1, **task), one(2, actions="a0", **task))[0] == ["e0", "e1"]
    samples = one(0), one(1, turns=3, **task), one(2, recall=0.9, turns=9, **task), one(3)
    assert passed(*samples, gates=Gates(near=0.9, per_task=1))[0] == ["e2", "e3"]
    assert passed(*samples, gates=Gates(near=0.9, per_task=2))[0] == ["e1", "e2", "e3"]
    same = {"task_id": "t1", "query": one(0).query}  # of a task that asks the same as another, all go
    assert passed(one(0, recall=0.9), one(1, **same), one(2, **same))[0] == ["e0"]
    assert passed(one(0), one(1, task_id="t0", dataset="other", actions="a0"))[0] == ["e0", "e1"]


def test_a_quota_is_filled_in_an_order_that_the_seed_decides() -> None:
    many = [one(number) for number in range(20)] + [one(20, dataset="other")]
    gates = Gates(near=1.0, quotas={"d": 5})
    first = passed(*many, gates=gates)[0]
    assert (len(first), first[-1], passed(*many, gates=gates)[0]) == (6, "e20", first)
    assert passed(*reversed(many), gates=gates)[0] == first[::-1]
    assert passed(*many, gates=gates, seed=1)[0] != first


def test_an_empty_result_says_which_gate_took_how_many() -> None:
    candidates = (one(0, status=Status.INFRA_ERROR), one(1, recall=0.0), one(2, recall=0.0))
    kept, reports = apply_gates(candidates, Gates(), Leaks(1.0), 0)
    with pytest.raises(
        UsageError, match="none of 3 episodes is left: fault dropped 1, recall dropped 2; for example d/t1"
    ):
        check_any_left(kept, reports)


def test_held_out_tasks_are_a_seeded_share_of_each_dataset() -> None:
    kept = [one(number, dataset=name) for name in ("d", "e") for number in range(20)]
    held = draw_held_out(kept, 0.2, seed=0)
    assert sorted(name for name, _ in held) == ["d"] * 4 + ["e"] * 4
    assert draw_held_out(reversed(kept), 0.2, seed=0) == held
    assert draw_held_out(kept, 0.2, seed=1) != held
    assert draw_held_out(kept, 0.0, seed=0) == frozenset()
    samples = [one(0), one(1, task_id="t0")]
    assert len(draw_held_out([one(0), one(1)], 0.01, seed=0)) == 1
    assert len(draw_held_out([one(0), one(1)], 1.0, seed=0)) == 1
    assert draw_held_out(samples, 0.5, seed=0) == frozenset()


def played(*actions: Any, **options: Any) -> Episode:
    return run(rollout(make_env(Env(), **options), Script(*actions), Task("t", QUERY)))


def test_a_candidate_is_read_off_an_episode() -> None:
    gold = Gold({DocId("byron"): 1, DocId("miss"): 1})
    bad = search("")
    found = candidate(played(search("Lord Byron"), bad, curate(add_ids=["D1"]), END), gold, "d", (1, 2))
    assert (found.place, found.task, found.query, found.turns) == ((1, 2), ("d", "t"), QUERY, 4)
    assert found.calls == {"search_corpus": 1, "curate": 1, "end_search": 1}
    assert (found.documents > 0, found.format_errors) == (True, 0)
    assert 0.0 < found.recall <= found.trajectory_recall
    found = candidate(played(search("Lord Byron"), "nonsense"), Gold({DocId("byron"): 1}), "d", (0, 0))
    assert (found.status, found.documents, found.recall, found.format_errors) == (Status.POLICY_ERROR, 0, 0.0, 1)


def test_failed_attempts_count_as_format_errors_and_actions_are_the_same_only_with_their_arguments() -> None:
    gold, episode = Gold({DocId("byron"): 1}), played(search("Lord Byron"), END)
    calls = tuple(ModelCall(f"1.{attempt}", attempt=attempt) for attempt in range(2))
    turn = msgspec.structs.replace(episode.turns[0], calls=calls)
    episode = msgspec.structs.replace(episode, turns=(turn, *episode.turns[1:]))
    assert candidate(episode, gold, "d", (0, 0)).format_errors == 1
    first, again, other = (candidate(played(search(words), END), gold, "d", (0, 0)) for words in ("a", "a", "b"))
    assert first.actions == again.actions != other.actions
    broken = played(search("Lord Byron"), retriever=WordRetriever((), faults=9))
    found = candidate(broken, gold, "d", (0, 0))
    assert passed(found)[1]["fault"].dropped == (f"d/t ({broken.episode_id}): the infrastructure failed",)
