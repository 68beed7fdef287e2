"""A recorded run is read by its card, and a dataset that was edited since is noticed; new gold scores old episodes."""

import pickle
import shutil
from collections.abc import Callable
from itertools import count
from pathlib import Path

import msgspec
import pytest

from harness1.config import Config, load_config
from harness1.data.open import open_source
from harness1.data.source import Source
from harness1.errors import UsageError
from harness1.eval.evaluate import Evaluation, ensure_run, evaluate, load_finished_metrics, rescore
from harness1.eval.run import Run, read_run
from harness1.records import DocId, Gold, Status, Task
from harness1.retrieval.build import build_index
from harness1.runs.files import Stage, read_stage
from harness1.runs.folder import METRICS, REPORT
from harness1.runs.journal import EPISODES, count_undigested, read_episodes, without_digest
from harness1.viewer.report import write_report
from harness1.viewer.run_page import RunSource
from tests.eval.run_folders import dataset, episode, run_folder
from tests.run_folders import repeatable
from tests.support import die_at_fsync
from tests.viewer.making import some_tasks, write_dataset, write_episodes


def test_gold_is_that_of_the_question_where_datasets_share_an_id(tmp_path: Path) -> None:
    first, second = (tmp_path / name for name in ("first", "second"))
    write_dataset(first, [Task("one", "Where?")])
    write_dataset(second, [Task("one", "When?"), Task("two", "Who?")])
    judged = second / "qrels" / "test.tsv"
    judged.write_text("query-id\tcorpus-id\tscore\none\tada\t1\ntwo\tada\t1\n")
    run = Run(tmp_path, Stage("run", {}, outputs={"datasets": [str(first), str(second)], "split": "test"}))
    assert run.known_gold[1] == []
    (asked,) = open_source(str(first)).tasks("test")
    assert run.gold_of(asked.public()) == asked.gold
    assert len(asked.gold.relevant if asked.gold else ()) == 3
    other = run.gold_of(Task("one", "When?"))
    assert len(other.relevant) == 1
    assert run.gold_of(Task("one", "Why?")) is None


def test_keeps_gold_and_drops_open_datasets_on_the_way_to_a_worker(tmp_path: Path) -> None:
    dataset = write_dataset(tmp_path / "data", some_tasks(1))
    run = Run(tmp_path, Stage("run", {"dataset": str(dataset), "split": "test"}))
    assert run.known_gold[0]
    assert run.sources
    assert pickle.loads(pickle.dumps(run)).__dict__.keys() == run.__dict__.keys() - {"sources"}


def test_secret_answers_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    task = Task("one", "Where?", "test", Gold({DocId("ada"): 1}, answers=("London",)))
    source = Source("secret", "secret", lambda: iter(()), ("test",), lambda split: [task], secret_answers=True)
    monkeypatch.setattr("harness1.eval.run.open_source", lambda place: source)
    run = Run(Path(), Stage("run", {"dataset": "secret", "split": "test"}))
    assert run.gold_of(task) == Gold({DocId("ada"): 1})


def test_only_tasks_that_were_played_have_gold(tmp_path: Path) -> None:
    tasks = some_tasks(3)
    dataset = write_dataset(tmp_path / "data", tasks)
    card = Stage("run", {"dataset": str(dataset), "split": "test", "tasks": ["task-1"]})
    run = Run(tmp_path, card)
    assert [task.task_id for task in tasks if run.gold_of(task)] == ["task-1"]
    moved = msgspec.structs.replace(card, inputs={**card.inputs, "dataset": str(tmp_path / "gone")})
    assert "cannot be opened" in Run(tmp_path, moved).known_gold[1][0]
    assert "names no dataset" in Run(tmp_path, Stage("run", {})).known_gold[1][0]


def test_reads_a_run_that_an_earlier_version_fused(tmp_path: Path) -> None:
    data = dataset(tmp_path / "data", {"t1": "one", "t2": "two"})
    fused = run_folder(tmp_path / "fused", data, [episode("t1", "ab"), episode("t2", "a")], fused=[{"samples": 2}])
    stage = read_stage(fused)
    stage.write(
        fused,
        outputs={**stage.outputs, "taken": {"t1": {"turns": 4.0}}, "lines": {"key": stage.outputs["lines"]["key"]}},
    )
    run = read_run(fused)
    assert [run.per_task[name]["turns"] for name in ("t1", "t2")] == [4.0, 0.0]
    assert "reward" not in run.per_task["t1"]
    write_report(fused)
    assert "fused from 2 rollouts" in (fused / REPORT).read_text()
    dataset(tmp_path / "data", {"t1": "one", "t2": "two"}, gold="c")
    assert read_run(fused).per_task["t1"]["curated_recall"] == 0.0  # its card has no hash of its gold


QUERIES = {"t1": "text a", "t2": "text b", "t3": "text c"}
CONFIG = load_config(None, ["machine.workers=1"])


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = dataset(tmp_path / "data", QUERIES)
    build_index(open_source(str(folder)).documents(), tmp_path / "index", Config().index)
    return folder


def evaluation(data: Path, policy: str = "single-shot", tasks: int = 3, samples: int = 1) -> Evaluation:
    chosen = open_source(str(data)).tasks("test")[:tasks]
    return Evaluation(str(data), "test", chosen, str(data.parent / "index"), policy, CONFIG, samples)


def with_other_gold(data: Path) -> Path:
    return dataset(data, QUERIES, gold="bcdefghijklmnopqrstuvwxyz")


def with_other_query(data: Path) -> Path:
    return dataset(data, {**QUERIES, "t2": "text z"})


def forget_hashes(run: Path) -> None:
    """Make the card that of an earlier version."""
    stage = read_stage(run)
    inputs = {name: value for name, value in stage.inputs.items() if name not in ("queries", "gold")}
    outputs = {name: value for name, value in stage.outputs.items() if name != "lines"}
    msgspec.structs.replace(stage, inputs=inputs, outputs=outputs).write(run)
    lines = (run / EPISODES).read_bytes().splitlines()
    (run / EPISODES).write_bytes(b"".join(without_digest(line)[0] + b"\n" for line in lines))


def test_changed_gold_is_refused_and_scores_the_episodes_again_without_playing(data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    before = ensure_run(evaluation(data), run)
    played = list(read_episodes(run))
    changed = evaluation(with_other_gold(data))
    with pytest.raises(UsageError, match=r"scored with other gold .* --rescore .* --force"):
        ensure_run(changed, run)
    assert msgspec.json.decode((run / METRICS).read_bytes()) == before
    rescore(changed, run)
    ran: list[object] = []
    after = evaluate(changed, run, on_episode=ran.append)
    assert not ran
    assert after["curated_recall"] != before["curated_recall"]
    assert load_finished_metrics(changed, run) == after
    ensure_run(changed, tmp_path / "fresh")
    assert repeatable(run) == repeatable(tmp_path / "fresh")
    again = list(read_episodes(run))
    assert [each.reward for each in again] != [each.reward for each in played]
    bare, before_it = ([msgspec.structs.replace(each, reward=None) for each in found] for found in (again, played))
    assert bare == before_it


def test_episodes_that_saw_the_gold_are_not_scored_again(data: Path, tmp_path: Path) -> None:
    ensure_run(evaluation(data, "oracle"), tmp_path / "run")
    changed = evaluation(with_other_gold(data), "oracle")
    with pytest.raises(UsageError, match="other gold") as refused:
        ensure_run(changed, tmp_path / "run")
    assert "--rescore" not in str(refused.value)
    with pytest.raises(UsageError, match="sees the gold"):
        rescore(changed, tmp_path / "run")


def test_a_changed_question_is_refused_and_named_unless_it_is_of_no_task_of_the_run(data: Path, tmp_path: Path) -> None:
    first = ensure_run(evaluation(data, tasks=1), tmp_path / "one")
    ensure_run(evaluation(data), tmp_path / "run")
    changed = evaluation(with_other_query(data))
    assert ensure_run(evaluation(data, tasks=1), tmp_path / "one") == first
    with pytest.raises(UsageError, match=r"it differs in tasks\)"):
        ensure_run(changed, tmp_path / "one")
    for step in (ensure_run, rescore):
        with pytest.raises(UsageError, match=r"task 't2' has changed .*'text b'.*'text z'.*--force"):
            step(changed, tmp_path / "run")
    with pytest.raises(UsageError, match="task 't2' has changed"):
        read_run(tmp_path / "run")


def test_a_question_that_was_not_played_yet_counts_too(data: Path, tmp_path: Path) -> None:
    def stop(_: object) -> None:
        raise KeyboardInterrupt

    run = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        evaluate(evaluation(data), run, on_episode=stop)
    (run / EPISODES).write_bytes(b"")
    with pytest.raises(UsageError, match=r"questions .* not played have changed"):
        ensure_run(evaluation(with_other_query(data)), run)


@pytest.mark.parametrize(
    ("change", "refusal"),
    [(with_other_gold, "other gold or other rules, as task 't1' shows"), (with_other_query, "task 't2' has changed")],
)
def test_a_run_of_an_earlier_version_is_compared_by_its_episodes(
    data: Path, tmp_path: Path, change: Callable[[Path], Path], refusal: str
) -> None:
    run = tmp_path / "run"
    before = ensure_run(evaluation(data), run)
    forget_hashes(run)
    assert read_run(run).tasks.keys() == QUERIES.keys()
    with pytest.raises(UsageError, match=refusal):
        ensure_run(evaluation(change(data)), run)
    assert ensure_run(evaluation(dataset(data, QUERIES)), run) == before
    stage = read_stage(run)
    assert {"queries", "gold"} <= stage.inputs.keys()
    assert count_undigested(run / EPISODES) == 3
    changed = evaluation(with_other_gold(data))
    rescore(changed, run)
    assert ensure_run(changed, run) != before
    assert count_undigested(run / EPISODES) == 0


def test_what_reads_a_run_says_that_its_gold_has_changed(data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    ensure_run(evaluation(data), run)
    assert RunSource.open(run).notes == []
    with_other_gold(data)
    with pytest.raises(UsageError, match=r"scored with other gold .*--rescore"):
        read_run(run)
    assert "gold has changed" in RunSource.open(run).notes[0]
    before = read_stage(run)
    before.write(run, status="finished", origins=("elsewhere",))
    rescore(evaluation(data), run)
    assert read_run(run).tasks.keys() == QUERIES.keys()
    assert {*read_stage(run).origins} == {"elsewhere", *before.origins}


def test_scoring_again_can_be_killed_anywhere_and_repeated(data: Path, tmp_path: Path) -> None:
    first = tmp_path / "0"
    original = evaluation(data)
    ensure_run(original, first)
    changed = evaluation(with_other_gold(data))
    ensure_run(changed, tmp_path / "whole")
    for number in count():
        run = tmp_path / f"run{number}"
        run.mkdir()
        for path in filter(Path.is_file, first.iterdir()):
            shutil.copy(path, run)
        if die_at_fsync(lambda run=run: rescore(changed, run), number) == 0:
            break
        if number:  # whoever takes the edit back must not get the new rewards with the old gold
            with pytest.raises(UsageError, match="other gold"):
                ensure_run(original, run)
        with pytest.raises(UsageError, match="other gold"):
            ensure_run(changed, run)
        rescore(changed, run)
        ensure_run(changed, run)
        assert repeatable(run) == repeatable(tmp_path / "whole")
        assert not [path.name for path in run.iterdir() if path.name.startswith(".")]
    assert number == 4


def test_broken_episodes_stay_unscored(data: Path, tmp_path: Path) -> None:
    ensure_run(evaluation(data), tmp_path / "first")
    episodes = list(read_episodes(tmp_path / "first"))
    stage, run = read_stage(tmp_path / "first"), tmp_path / "run"
    outputs = {**stage.outputs, "lines": {"key": stage.outputs["lines"]["key"], "undigested": 0}}
    stage.write(run, status="interrupted", outputs=outputs)
    first = msgspec.structs.replace(episodes[0], status=Status.INFRA_ERROR, reward=None)
    write_episodes(run, [first, *episodes[1:]])
    rescore(evaluation(with_other_gold(data)), run)
    assert [each.reward is None for each in read_episodes(run)] == [True, False, False]
