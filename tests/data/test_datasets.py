"""What is wrong with a dataset is found, and an official download becomes a BEIR folder."""

import gzip
from pathlib import Path

import pytest
from msgspec.structs import replace

from harness1.data import beir, tables
from harness1.data.benchmarks import BENCHMARKS
from harness1.data.datasets import FINDINGS, SHOWN, check, copy_dataset, import_benchmark
from harness1.data.open import open_source
from harness1.data.source import AbsentGold
from harness1.errors import CorpusError, UsageError
from harness1.records import ChunkId, DocId, Gold, Task
from harness1.retrieval.corpus import Document, GivenChunk
from harness1.runs.files import read_stage
from tests.data.benchmarks import official
from tests.data.benchmarks.official import ALL, SECRET, Official

pytestmark = pytest.mark.usefixtures("parquet_here")


def document(name: str, text: str) -> Document:
    return Document(doc_id=DocId(name), title="", text=text)


def task(name: str, query: str, *relevant: str, split: str = "test") -> Task:
    return Task(task_id=name, query=query, split=split, gold=Gold(relevant={DocId(each): 1 for each in relevant}))


def found(folder: Path) -> dict[str, list[str]]:
    return {finding.kind: list(finding.examples) for finding in check(str(folder)).findings}


def test_every_kind_of_fault_is_found(tmp_path: Path) -> None:
    query = "Which of the many rivers of the old kingdom flows past the ruined mill at the end of the valley?"
    documents = [document("a", "One text."), document("b", " one  TEXT. "), document("c", "Another.")]
    tasks = [
        task("t1", query, "a"),
        task("t2", "Where is it?", "a", "gone"),
        task("d1", "where is it", "a", split="dev"),
        task("l1", query.replace("flows", "runs"), "a", split="train"),
        task("l2", "Where is IT!", "c", split="train"),
        task("l3", "Something of its own?", "c", split="train"),
    ]
    beir.write(tmp_path, documents, tasks)
    with (tmp_path / "corpus.jsonl").open("a") as corpus:
        corpus.write('{"_id": "a", "text": "again"}\n{"_id": "d", "title": "T", "text": " "}\n{"torn\n')
    with (tmp_path / "queries.jsonl").open("a") as queries:
        queries.write('{"_id": "u1", "text": "Nobody judged this."}\n')
    assert (everything := found(tmp_path)).keys() < set(FINDINGS)
    assert everything == {
        "duplicate_text": ["document 'b' has the text of 'a'"],
        "duplicate_id": [f"{tmp_path}/corpus.jsonl:4: the id 'a' occurs a second time"],
        "empty_text": ["document 'd' has a title and no text"],
        "malformed": [f"{tmp_path}/corpus.jsonl:6: not a JSON object: JSON is malformed: invalid character (byte 6)"],
        "absent_gold": [f"{tmp_path}/queries.jsonl:2: query 't2' should find 'gone', which is not there"],
        "no_gold": [f"{tmp_path}/queries.jsonl:7: query 'u1' has no relevant document in any split"],
        "leak_exact": ["dev/d1 asks what test/t2 does", "train/l2 asks what test/t2 does"],
        "leak_near": ["train/l1 asks nearly what test/t1 does"],
    }


def test_one_chunk_of_a_fact_is_enough(tmp_path: Path) -> None:
    chunks = (GivenChunk(ChunkId("a_0"), 0, 3), GivenChunk(ChunkId("a_1"), 4, 8))
    cut = Document(doc_id=DocId("a"), title="", text="One text.", chunks=chunks)
    gold = Gold(relevant={DocId("a"): 1}, facts=((ChunkId("x_0"), ChunkId("a_1")), (ChunkId("x_1"),)))
    beir.write(tmp_path, [cut], [Task(task_id="t", query="Q?", gold=gold)])
    said = f"{tmp_path}/queries.jsonl:1: query 't' should find one of ['x_1'], which is not there"
    assert found(tmp_path) == {"absent_gold": [said]}


def test_many_findings_are_counted_and_a_few_named(tmp_path: Path) -> None:
    beir.write(tmp_path, [document(str(number), "same") for number in range(50)], [task("t", "Q?", "0")])
    (finding,) = check(str(tmp_path)).findings
    assert (finding.kind, finding.count, len(finding.examples)) == ("duplicate_text", 49, SHOWN)


def test_a_corpus_that_cannot_be_read_through_is_no_proof_of_absence(tmp_path: Path) -> None:
    folder = official.BROWSECOMP_PLUS.make(tmp_path / "a")
    path = folder / "corpus/data/train-00000.parquet"
    path.write_bytes(path.read_bytes()[:-9])
    report = check(f"browsecomp_plus:{folder}")
    assert {finding.kind for finding in report.findings} == {"malformed"}
    assert check(f"hotpotqa:{folder}").findings[0].kind == "malformed"
    path.unlink()
    path.symlink_to("gone")
    with pytest.raises(CorpusError, match="not a whole Parquet file"):
        list(tables.rows([path]))
    many = [document(str(number), f"text {number}") for number in range(99)]
    beir.write(tmp_path / "b", many, [task("t", "Q?", "98")])
    corpus = tmp_path / "b/corpus.jsonl"
    (tmp_path / "b/corpus.jsonl.gz").write_bytes(gzip.compress(corpus.read_bytes())[:-30])
    corpus.unlink()
    assert list(found(tmp_path / "b")) == ["malformed"]


def test_what_a_pass_leaves_out_is_told(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "b.txt").write_text(" ")
    assert found(tmp_path) == {"left_out": ["b.txt: no text in it"]}


@pytest.mark.parametrize("each", ALL, ids=lambda each: each.name)
def test_nothing_is_wrong_with_a_sound_benchmark_and_an_import_reads_as_the_download_does(
    each: Official, tmp_path: Path
) -> None:
    folder = each.make(tmp_path / "official")
    report = check(f"{each.name}:{folder}")
    assert report.findings == ()
    assert (report.chunks > 0) == (each.name in ("web", "patents", "sec"))
    direct = open_source(f"{each.name}:{folder}")
    documents, tasks = list(direct.documents()), {split: direct.tasks(split) for split in direct.splits}
    counts = {split: len(some) for split, some in tasks.items()}
    assert (report.documents, report.tasks) == (len(documents), counts)
    assert import_benchmark(BENCHMARKS[each.name], folder, tmp_path / "out") == {
        "documents": len(documents),
        "tasks": counts,
    }
    made = open_source(str(tmp_path / "out"))
    assert list(made.documents()) == documents
    for split, expected in tasks.items():
        secret = direct.secret_answers
        kept = [replace(task, gold=replace(task.gold, answers=())) if secret else task for task in expected]
        assert (made.tasks(split) if expected else []) == kept


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
    assert check(f"seal0:{folder}").findings == ()


def test_an_import_takes_official_questions_in_a_folder_that_has_judgements_too(tmp_path: Path) -> None:
    folder = official.SEAL0.make(tmp_path / "official")
    (folder / "qrels").mkdir()
    (folder / "qrels/test.tsv").write_text("")
    assert import_benchmark(BENCHMARKS["seal0"], folder, tmp_path / "out") == {"documents": 3, "tasks": {"test": 2}}
    (folder / "corpus.jsonl").write_text("")
    with pytest.raises(CorpusError, match=r"seal0:.* holds no documents"):
        import_benchmark(BENCHMARKS["seal0"], folder, tmp_path / "empty", fault=lambda error: None)


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


def break_question(folder: Path) -> None:
    with (folder / "queries.jsonl").open("a") as queries:
        queries.write('{"torn\n')


@pytest.mark.parametrize(
    ("spoil", "spec", "error", "says"),
    [
        (break_question, "{}", CorpusError, r"queries\.jsonl:2: not a JSON object"),
        (lambda folder: None, "seal0:{}/web", CorpusError, "holds questions and no documents: .* --index web:"),
        (lambda folder: (folder / "corpus.jsonl").write_text(""), "{}", CorpusError, "holds no documents"),
        (lambda folder: None, "world:60", UsageError, "holds another copy"),
    ],
)
def test_a_copy_is_made_once_and_what_cannot_be_copied_leaves_it(
    spoil, spec: str, error: type[Exception], says: str, tmp_path: Path
) -> None:
    folder, out, read = tmp_path / "set", tmp_path / "out", list[int]()
    beir.write(folder, [document("a", "x")], [task("t", "Q?", "a")])
    official.SEAL0.make(folder / "web", lambda questions, corpus: corpus.clear())
    for _ in range(2):
        counts = copy_dataset(str(folder), out, on_document=lambda: read.append(1))
        assert counts == {"documents": 1, "tasks": {"test": 1}}
    assert len(read) == 1
    spoil(folder)
    force = error is CorpusError
    with pytest.raises(error, match=says):
        copy_dataset(spec.format(folder), out, force=force, on_document=lambda: read.append(1))
    assert (len(read), read_stage(out).status) == (1, "finished")
    assert open_source(str(out)).tasks("test") == [task("t", "Q?", "a")]
    assert copy_dataset("world:60", out, force=True)["documents"] == 60
