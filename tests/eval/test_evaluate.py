"""Evaluation into a run folder."""

import errno
import random
from dataclasses import replace
from itertools import count
from pathlib import Path

import msgspec
import pytest

from harness1.config import Config, load_config
from harness1.data.indexing import ensure_index
from harness1.data.open import open_source
from harness1.errors import UsageError
from harness1.eval import evaluate as evaluating
from harness1.eval.evaluate import Evaluation, evaluate, load_finished_metrics
from harness1.eval.outputs import output_names
from harness1.records import ChunkId, DocId, Episode, Gold, Task
from harness1.retrieval.build import build_index
from harness1.retrieval.corpus import Document, GivenChunk
from harness1.runs.files import read_stage
from harness1.runs.folder import METRICS, RESOURCES, read_provenance, run_config
from harness1.runs.journal import EPISODES, EpisodeStore, read_episodes
from tests.run_folders import repeatable
from tests.support import die_at_fsync

SOURCE = open_source("world:100")
CONFIG = load_config(None, ["machine.workers=1"])


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("evaluate") / "index"
    build_index(SOURCE.documents(), folder, Config().index)
    return str(folder)


def evaluation(index: str, tasks: int = 4, policy: str = "oracle", samples: int = 1) -> Evaluation:
    return Evaluation("world:100", "train", SOURCE.tasks("train")[:tasks], index, policy, CONFIG, samples)


def test_a_run_folder_says_what_was_run_and_how_it_ended_and_is_left_alone(index: str, tmp_path: Path) -> None:
    job = evaluation(index)
    assert load_finished_metrics(job, tmp_path) is None
    metrics = evaluate(job, tmp_path)
    assert msgspec.json.decode((tmp_path / METRICS).read_bytes()) == metrics == load_finished_metrics(job, tmp_path)
    stage = read_stage(tmp_path)
    assert (stage.status, stage.inputs["policy"]) == ("finished", stage.hashes["policy"])
    assert set(stage.hashes) == {"env", "policy", "index", "counter"}
    assert run_config(tmp_path) == (CONFIG, str(Path(index).resolve()))
    assert load_finished_metrics(evaluation(index, 3), tmp_path) is None
    (tmp_path / METRICS).write_text("torn")
    assert load_finished_metrics(job, tmp_path) is None


def test_only_what_was_lost_or_torn_is_played_again(index: str, tmp_path: Path) -> None:
    job = evaluation(index)
    first = evaluate(job, tmp_path)
    lines = (tmp_path / EPISODES).read_bytes().splitlines(keepends=True)
    (tmp_path / EPISODES).write_bytes(b"".join(lines[1:3]) + lines[3][:50])
    assert load_finished_metrics(job, tmp_path) is None
    started, ran = list[tuple[int, int]](), list[Episode]()
    assert evaluate(job, tmp_path, lambda *counts: started.append(counts), ran.append) == first
    assert (started, len(ran)) == ([(2, 4)], 2)
    assert load_finished_metrics(job, tmp_path) == first
    (tmp_path / EPISODES).unlink()
    assert load_finished_metrics(job, tmp_path) is None


def test_an_interrupt_says_that_the_same_command_goes_on(index: str, tmp_path: Path) -> None:
    def interrupted(_: Episode) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        evaluate(evaluation(index), tmp_path, on_episode=interrupted)
    assert caught.value.__notes__ == ["the same command continues where it stopped"]
    found = read_provenance(tmp_path)
    assert found["ended"]
    evaluate(evaluation(index), tmp_path)
    assert msgspec.json.decode((tmp_path / RESOURCES).read_bytes())["wall_seconds"] > 0


def test_an_index_of_another_corpus_is_refused_before_anything_runs(index: str, tmp_path: Path) -> None:
    gold = Gold({DocId("elsewhere"): 1})
    tasks = [msgspec.structs.replace(task, gold=gold) for task in SOURCE.tasks("train")[:25]]
    other = replace(evaluation(index), tasks=tasks)
    with pytest.raises(UsageError, match="another corpus"):
        evaluate(other, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    some = [*tasks[:19], SOURCE.tasks("train")[19]]
    replace(other, tasks=some).check()
    replace(other, index="http://nowhere.example").check()


def test_qrels_of_absent_documents_are_told_from_the_index_of_another_corpus(tmp_path: Path) -> None:
    settings = load_config(None, ["machine.workers=1"])
    for name in ("here", "elsewhere"):
        (tmp_path / name / "qrels").mkdir(parents=True)
        (tmp_path / name / "corpus.jsonl").write_text(f'{{"_id": "{name}", "title": "", "text": "A text."}}\n')
        (tmp_path / name / "queries.jsonl").write_text('{"_id": "q", "text": "Which?"}\n')
        (tmp_path / name / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\nq\tabsent\t1\n")
    index = tmp_path / "index"
    ensure_index(open_source(str(tmp_path / "here")), index, settings)
    tasks = [Task("q", "Which?", "test", Gold({DocId("absent"): 1}))]
    ours = Evaluation(str(tmp_path / "here"), "test", tasks, str(index), "random", settings)
    with pytest.raises(UsageError, match=r"tasks of .*here: qrels name documents that the corpus lacks"):
        ours.check()
    with pytest.raises(UsageError, match=r"elsewhere: it is an index of another corpus, .*here$"):
        replace(ours, dataset=str(tmp_path / "elsewhere")).check()


def test_facts_are_looked_up_by_their_chunks(tmp_path: Path) -> None:
    document = Document(doc_id=DocId("d"), title="D", text="One two.", chunks=(GivenChunk(ChunkId("c"), 0, 8),))
    settings = load_config(None, ["index.unit=chunk", "machine.workers=1"])
    build_index([document], tmp_path / "index", settings.index)
    tasks = [Task("t", "?", gold=Gold({}, facts=((ChunkId("x"), ChunkId("c")),)))]
    found = Evaluation("w", "test", tasks, str(tmp_path / "index"), "random", settings)
    found.check()
    absent = [Task("t", "?", gold=Gold(relevant={DocId("d"): 1}, facts=((ChunkId("d"),),)))]
    with pytest.raises(UsageError, match="another corpus"):
        replace(found, tasks=absent).check()


def test_tasks_without_gold_are_refused_before_anything_runs(index: str, tmp_path: Path) -> None:
    task = msgspec.structs.replace(SOURCE.tasks("train")[0], gold=Gold({}))
    for tasks, why in (([task], task.task_id), ([], "no tasks")):
        with pytest.raises(UsageError, match=why):
            evaluate(Evaluation("w", "train", tasks, index, "oracle", CONFIG), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def names(task: Evaluation) -> list[str]:
    return list(output_names([each.task_id for each in task.tasks], task.samples))


def test_what_is_made_of_the_episodes_by_other_settings_is_made_again(index: str, tmp_path: Path) -> None:
    job, setting = evaluation(index, 3, "random"), "machine.price=[2, 0, 0]"
    evaluate(job, tmp_path)
    work = load_config(None, ["machine.workers=1", setting])
    other = replace(job, config=work)
    assert load_finished_metrics(other, tmp_path) is None
    ran: list[Episode] = []
    evaluate(other, tmp_path, on_episode=ran.append)
    assert not ran
    assert load_finished_metrics(other, tmp_path) is not None
    assert load_finished_metrics(job, tmp_path) is None
    found = msgspec.json.decode((tmp_path / RESOURCES).read_bytes())
    assert "cost" in found
    assert load_config(tmp_path / "config.toml") == work
    idle = replace(other, config=load_config(None, ["machine.workers=2", setting]))
    assert load_finished_metrics(idle, tmp_path) is not None
    card = msgspec.json.decode((tmp_path / "stage.json").read_bytes())
    card["outputs"]["config"]["machine"]["bootstrap"] = 500  # as an earlier version could
    (tmp_path / "stage.json").write_bytes(msgspec.json.encode(card))
    assert load_finished_metrics(idle, tmp_path) is None
    evaluate(idle, tmp_path, on_episode=ran.append)
    assert not ran
    assert load_finished_metrics(idle, tmp_path) is not None


def test_what_is_missing_of_the_outputs_is_made_again_without_an_episode(index: str, tmp_path: Path) -> None:
    job = evaluation(index, 2, "random", samples=2)
    evaluate(job, tmp_path)
    first, provenance = repeatable(tmp_path), (tmp_path / "provenance.json").read_bytes()
    ran: list[Episode] = []
    for name in names(job):
        (tmp_path / name).unlink()
        assert load_finished_metrics(job, tmp_path) is None, name
        evaluate(job, tmp_path, on_episode=ran.append)
        assert load_finished_metrics(job, tmp_path) is not None, name
        now = (tmp_path / "provenance.json").read_bytes()
        assert name == "provenance.json" or now == provenance
        provenance = now
    assert not ran
    assert set(repeatable(tmp_path)) == set(first)


def test_outputs_do_not_depend_on_the_order_in_which_episodes_finished(index: str, tmp_path: Path) -> None:
    job = evaluation(index, 5, "random", samples=3)
    evaluate(job, tmp_path)
    first = repeatable(tmp_path)  # with a report
    assert set(names(job)) - set(first) == {"provenance.json", "resources.json"}
    lines = (tmp_path / EPISODES).read_bytes().splitlines(keepends=True)
    random.Random(1).shuffle(lines)
    (tmp_path / EPISODES).write_bytes(b"".join(lines))
    (tmp_path / METRICS).unlink()
    evaluate(job, tmp_path)
    assert not (tmp_path / "report.html").exists()  # it was made of other files
    assert repeatable(tmp_path) == first


def test_a_run_that_is_killed_while_it_writes_is_completed(index: str, tmp_path: Path) -> None:
    job = evaluation(index, 2)
    evaluate(job, tmp_path / "whole")
    whole = repeatable(tmp_path / "whole")
    for number in count(0, 4):
        out = tmp_path / str(number)
        if die_at_fsync(lambda out=out: evaluate(job, out), number) == 0:
            break
        assert load_finished_metrics(job, out) is None
        evaluate(job, out)
        assert repeatable(out) == whole
        assert len(list(read_episodes(out))) == 2
        assert {path.name for path in out.iterdir()} == {path.name for path in (tmp_path / "whole").iterdir()}
    assert number > len(names(job))


def test_a_full_disk_is_one_clear_line(index: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for owner, name in ((EpisodeStore, "append"), (evaluating, "write_outputs")):
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, full)
            with pytest.raises(UsageError, match="no space left"):
                evaluate(evaluation(index), tmp_path)
        stage = read_stage(tmp_path)
        assert stage.status == "interrupted"
    assert evaluate(evaluation(index), tmp_path)["scored"] == 4


def test_a_place_that_cannot_hold_a_run_or_is_written_by_another_process_is_told(index: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "run", Path("/proc/run")):
        with pytest.raises(UsageError, match=str(out)):
            evaluate(evaluation(index, 1), out)
    evaluate(evaluation(index, 1), tmp_path / "run")
    card = (tmp_path / "run" / "stage.json").read_bytes()
    with EpisodeStore(tmp_path / "run"), pytest.raises(UsageError, match="another process"):
        evaluate(evaluation(index, 1), tmp_path / "run")
    assert (tmp_path / "run" / "stage.json").read_bytes() == card
