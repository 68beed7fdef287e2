from pathlib import Path

import msgspec
import pytest

from harness1.data.benchmarks import BENCHMARKS
from harness1.data.datasets import import_benchmark
from harness1.data.open import open_source
from harness1.data.source import AbsentGold
from harness1.errors import CorpusError, UsageError
from harness1.records import Task
from harness1.runs.files import read_stage
from tests.data.benchmarks import official
from tests.data.benchmarks.official import ALL, SECRET, Official

EVERY = pytest.mark.parametrize("each", ALL, ids=lambda each: each.name)


def without_answers(tasks: list[Task]) -> list[Task]:
    return [msgspec.structs.replace(task, gold=msgspec.structs.replace(task.gold, answers=())) for task in tasks]


@EVERY
def test_an_import_reads_as_the_download_does(each: Official, tmp_path: Path) -> None:
    folder = each.make(tmp_path / "official")
    counts = import_benchmark(BENCHMARKS[each.name], folder, tmp_path / "out")
    direct, made = open_source(f"{each.name}:{folder}"), open_source(str(tmp_path / "out"))
    assert made.kind == "beir"
    assert list(made.documents()) == list(direct.documents())
    for split in direct.splits:
        expected = direct.tasks(split)
        assert counts["tasks"][split] == len(expected)
        kept = without_answers(expected) if direct.secret_answers else expected
        assert (made.tasks(split) if expected else []) == kept
    assert counts["documents"] == len(list(direct.documents()))


def test_answers_that_are_secret_are_written_nowhere(tmp_path: Path) -> None:
    folder = official.BROWSECOMP_PLUS.make(tmp_path / "official")
    assert open_source(f"browsecomp_plus:{folder}").tasks("all")[0].gold.answers == (SECRET,)
    import_benchmark(BENCHMARKS["browsecomp_plus"], folder, tmp_path / "out")
    written = [path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert len(written) == 6
    assert not any(SECRET.encode() in data for data in written)


def test_questions_without_documents_are_imported_for_an_index_elsewhere(tmp_path: Path) -> None:
    folder = official.SEAL0.make(tmp_path / "official", lambda questions, corpus: corpus.clear())
    assert import_benchmark(BENCHMARKS["seal0"], folder, tmp_path / "out") == {"documents": 0, "tasks": {"test": 2}}
    made = open_source(str(tmp_path / "out"))
    assert (len(made.tasks("test")), made.has_documents) == (2, False)


def test_an_import_is_done_once_and_again_where_the_download_changed(tmp_path: Path) -> None:
    folder, out, read = official.WEB.make(tmp_path / "official"), tmp_path / "out", []
    for _ in range(2):
        counts = import_benchmark(BENCHMARKS["web"], folder, out, on_document=lambda: read.append(1))
        assert counts == {"documents": 3, "tasks": {"test": 2}}
    assert len(read) == 3
    (folder / "test.jsonl").write_text((folder / "test.jsonl").read_text() + "\n")
    with pytest.raises(UsageError, match="holds another import"):
        import_benchmark(BENCHMARKS["web"], folder, out)
    import_benchmark(BENCHMARKS["web"], folder, out, force=True)
    assert read_stage(out).status == "finished"


def test_a_broken_download_leaves_an_import_that_is_taken_up(tmp_path: Path) -> None:
    def tear(questions, corpus):
        corpus[1]["document_text"] = " "

    out = tmp_path / "out"
    folder = official.WEB.make(tmp_path / "official", tear)
    with pytest.raises(CorpusError, match="row 2: chunk '44_0' has no text"):
        import_benchmark(BENCHMARKS["web"], folder, out)
    assert read_stage(out).status == "interrupted"


def test_what_is_broken_can_be_left_out_with_the_tasks_that_need_it(tmp_path: Path) -> None:
    def tear(questions, corpus):
        corpus[1]["document_text"] = " "
        questions.append({"query_id": "3", "query": "Q?", "document_ids": ["99"], "answer": ""})

    faults: list[CorpusError] = []
    folder = official.WEB.make(tmp_path / "official", tear)
    counts = import_benchmark(BENCHMARKS["web"], folder, tmp_path / "out", fault=faults.append)
    assert counts == {"documents": 2, "tasks": {"test": 1}}
    assert [str(fault).rpartition("/")[2].partition(" should")[0] for fault in faults] == [
        "test.jsonl:3: query '3'",
        "train-00000.parquet: row 2: chunk '44_0' has no text",
        "official: query '2'",
    ]
    assert [isinstance(fault, AbsentGold) for fault in faults] == [True, False, True]
    assert open_source(str(tmp_path / "out")).tasks("test")[0].task_id == "1"
