"""Admission: clean tasks are let through, four kinds of bad ones are not, and the reward ranks whom it should."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import msgspec
import pytest

from harness1.config import Config, load_config
from harness1.data.open import open_source
from harness1.episodes.jobs import EpisodeJob, EpisodeSetup, run_chunk
from harness1.errors import SchemaError, UsageError
from harness1.eval.evaluate import Evaluation
from harness1.records import Curated, Episode, Gold, RewardRecord, Task
from harness1.retrieval.build import build_index
from harness1.reward import composite
from harness1.reward.measures import measure_outcome
from harness1.rl.admission import (
    BLIND,
    HEADROOM,
    NO_OP,
    ORACLE,
    ORDER,
    POLICIES,
    REPORT,
    SEARCHING,
    TWICE,
    AdmissionReport,
    Reason,
    Scoring,
    TaskAdmission,
    Trial,
    admission_of,
    check,
    ideal,
    judge,
    read_report,
    readme,
    trial,
)

CONFIG = load_config(None, ["reward.recipe=robust", "machine.workers=1"])
PAPER = load_config(None, ["machine.workers=1"])
SOURCE = open_source("world:150")
TASKS = SOURCE.tasks("train")[:18]
Played = dict[str, list[Episode]]


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("admission") / "index"
    build_index(SOURCE.documents(), folder, Config().index)
    return str(folder)


def play(index: str, tasks: list[Task]) -> list[Played]:
    """The episodes of all policies, for each task."""
    played: list[Played] = [{policy: [] for policy in POLICIES} for _ in tasks]
    for policy in (*POLICIES, TWICE):
        episodes = run_chunk(EpisodeSetup(CONFIG, index, policy), [EpisodeJob(task) for task in tasks])
        for by_policy, episode in zip(played, episodes, strict=True):
            by_policy[policy].append(episode)
    return played


@pytest.fixture(scope="module")
def played(index: str) -> list[Played]:
    return play(index, TASKS)


def scoring_of(config: Config) -> Scoring:
    return lambda episode, gold: composite(measure_outcome(episode, gold), episode, config, gold)


ROBUST = scoring_of(CONFIG)


def trials(task: Task, played: Played, scoring: Scoring) -> dict[str, list[Trial]]:
    return {policy: [trial(episode, task.gold, scoring) for episode in played[policy]] for policy in played}


def best_of(task: Task, played: Played, scoring: Scoring) -> RewardRecord | None:
    return scoring(ideal(played[ORACLE][0], task.gold, CONFIG.env.curation.cap), task.gold)


def judged(task: Task, played: Played, scoring: Scoring = ROBUST) -> TaskAdmission:
    return admission_of(task.task_id, trials(task, played, scoring), best_of(task, played, scoring))


def drifting() -> Scoring:
    """A scoring that says something else each time."""
    ticks = count()
    return lambda episode, gold: RewardRecord(ROBUST(episode, gold).total + 1e-6 * next(ticks))


@pytest.mark.parametrize("config", [CONFIG, PAPER], ids=["robust", "paper"])
def test_clean_tasks_are_admitted(played: list[Played], config: Config) -> None:
    verdicts = [judged(task, each, scoring_of(config)) for task, each in zip(TASKS, played, strict=True)]
    admitted = [verdict for verdict in verdicts if not verdict.rejected]
    assert len(admitted) >= 0.95 * len(TASKS)
    for verdict in admitted:
        assert (verdict.scores[NO_OP], verdict.scores[ORACLE]) == (0.0, 1.0)
        assert verdict.headroom == 1.0 - max(verdict.scores[policy] for policy in SEARCHING)


def test_gold_that_is_not_in_the_index_is_rejected(index: str) -> None:
    gold = Gold(relevant={**TASKS[0].gold.relevant, "absent": 1})
    task = msgspec.structs.replace(TASKS[0], gold=gold)
    found = judged(task, *play(index, [task]))
    assert found.rejected == ("unattained",)
    assert 0.0 < found.attained < 0.95
    nowhere = msgspec.structs.replace(task, gold=Gold(relevant={"absent": 1}))
    lost = judged(nowhere, *play(index, [nowhere]))
    assert (lost.rejected, lost.attained, lost.scores, lost.headroom) == (("unattained",), 0.0, {}, 0.0)


def test_gold_that_the_question_gives_away_is_rejected(index: str, played: list[Played]) -> None:
    first = next(
        task
        for task, each in zip(TASKS, played, strict=True)
        if measure_outcome(each["stop-at-once"][0], task.gold).recall > 0.0
    )
    task = msgspec.structs.replace(first, query=f"{first.query} ({', '.join(first.gold.relevant)})")
    found = judged(task, *play(index, [task]))
    assert found.rejected == ("leaked",)
    assert found.scores["id-inventor"] >= 0.05


@pytest.mark.parametrize(
    ("scoring", "reason"), [(drifting(), "unstable"), (lambda _episode, _gold: RewardRecord(1.0), "flat")]
)
def test_bad_scoring_is_rejected(played: list[Played], scoring: Scoring, reason: Reason) -> None:
    for task, each in zip(TASKS[:5], played, strict=False):
        assert reason in judged(task, each, scoring).rejected


def test_a_policy_that_does_otherwise_the_second_time_is_rejected(played: list[Played]) -> None:
    once, again = played[0][TWICE]
    other = msgspec.structs.replace(again, curated=tuple(reversed(again.curated)))
    assert judged(TASKS[0], played[0] | {TWICE: [once, other]}).rejected == ("unstable",)


def test_nothing_is_known_where_the_infrastructure_failed(played: list[Played]) -> None:
    found = trials(TASKS[0], played[0], ROBUST)
    lost = Trial(found["random"][0].outcome, (), None, None)
    assert admission_of("t", found | {"random": [lost]}, RewardRecord(2.5)).rejected == ("fault",)
    assert admission_of("t", found | {TWICE: [found[TWICE][0], lost]}, RewardRecord(2.5)).rejected == ("fault",)


def test_an_ideal_delivery_holds_the_answer_first_and_no_more_than_the_set_may(played: list[Played]) -> None:
    gold = Gold(relevant={"a": 1, "b": 2, "c": 1, "d": 0}, answer_docs=("c",))
    best = ideal(played[0][NO_OP][0], gold, 2)
    assert [entry.unit_id for entry in best.curated] == ["c", "a"]
    whole = scoring_of(PAPER)(ideal(played[0][ORACLE][0], gold, 30), gold)
    assert whole.total == pytest.approx(3.2, abs=0.15)
    facts = Gold(relevant={}, facts=(("x", "y"), ("y", "z")))  # one chunk of each, and none twice
    held = (Curated("y", "fair", 1),)
    episode = msgspec.structs.replace(played[0][ORACLE][0], unit="chunk", curated=held)
    assert [entry.unit_id for entry in ideal(episode, facts, 30).curated] == ["y"]


def report(played: list[Played], config: Config) -> AdmissionReport:
    scoring = scoring_of(config)
    found = {task.task_id: trials(task, each, scoring) for task, each in zip(TASKS, played, strict=True)}
    best = {task.task_id: best_of(task, each, scoring) for task, each in zip(TASKS, played, strict=True)}
    return judge(Evaluation("world", "train", TASKS, "", ORACLE, config), None, found, best)


def test_the_robust_reward_ranks_as_it_should_and_the_published_one_does_not(played: list[Played]) -> None:
    robust = report(played, CONFIG)
    assert sum(pair.right for pair in robust.pairs) >= 0.9 * sum(pair.tasks for pair in robust.pairs) > 50
    assert 0 < robust.ranked[0] <= robust.ranked[1] <= len(TASKS)
    published = {(pair.better, pair.worse): pair for pair in report(played, PAPER).pairs}
    hoarding = published["stop-at-once", "curate-everything"]
    assert hoarding.tasks > 2 * hoarding.right


def test_a_report_says_what_a_policy_lives_on(played: list[Played]) -> None:
    found = {each.policy: each for each in report(played, PAPER).policies}
    assert (tuple(found), found["curate-everything"].lives_on) == (POLICIES, "answer_found")
    for policy in BLIND:
        assert (found[policy].lives_on, found[policy].terms) == ("", {"empty": pytest.approx(-0.2)})
    spammer = found["tool-spammer"]
    assert spammer.terms["diversity"] > found["stop-at-once"].terms["diversity"]
    assert spammer.reward == pytest.approx(sum(spammer.terms.values()))


def test_headroom_decides_what_is_sampled(played: list[Played], tmp_path: Path) -> None:
    made = report(played, CONFIG)
    (tmp_path / REPORT).write_bytes(msgspec.json.encode(made))
    assert read_report(tmp_path) == read_report(tmp_path / REPORT) == made
    wide = set(made.list_admitted(0.0))
    some = sorted(task.headroom for task in made.tasks if not task.rejected)[len(wide) // 2]
    narrow = set(made.list_admitted(some))
    assert narrow == {task.task_id for task in made.tasks if not task.rejected and task.headroom >= some} < wide
    assert f"{len(made.list_admitted(HEADROOM))} of them with headroom of at least 0.15" in readme(made)
    assert " > ".join(ORDER) in readme(made)


def test_a_report_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="rl check"):
        read_report(tmp_path)
    with pytest.raises(UsageError, match="no tasks in split train"):
        check(Evaluation("d", "train", [], "", ORACLE, CONFIG), tmp_path)
    (tmp_path / REPORT).write_text("{}")
    with pytest.raises(SchemaError, match="rl check"):
        read_report(tmp_path)
