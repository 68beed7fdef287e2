import json
import sys
from pathlib import Path

import pytest

from harness1.data.benchmarks import BENCHMARKS, addresses, training_ids
from harness1.data.open import from_anywhere, open_source
from harness1.data.source import AbsentGold, DuplicateId, NoGold
from harness1.errors import CorpusError, MissingExtra, UsageError
from harness1.records import Gold
from tests.data.benchmarks import official
from tests.data.benchmarks.official import ALL, SECRET, Official, Rows, write_jsonl, write_parquet

PARQUET = {"web": "test", "patents": "test", "sec": "test", "longseal": "longseal", "seal0": "seal-0"}
EVERY = pytest.mark.parametrize("each", ALL, ids=lambda each: each.name)
pytestmark = pytest.mark.usefixtures("parquet_here")


def tasks_of(each: Official, folder: Path, fault=None):
    spec = f"{each.name}:{folder}"
    return (open_source(spec, fault) if fault else open_source(spec)).tasks(each.split)


def read(each: Official, folder: Path):
    """All tasks and documents, the lazy ones too."""
    source = open_source(f"{each.name}:{folder}")
    return source.tasks(each.split), list(source.documents())


def reencode(path: Path, old: bytes, new: bytes, begin: bytes = b"") -> None:
    path.write_bytes(begin + path.read_bytes().replace(old, new))


def documents_of(each: Official, folder: Path):
    return {document.doc_id: document for document in open_source(f"{each.name}:{folder}").documents()}


def test_the_eight_benchmarks_of_the_paper_are_there() -> None:
    assert set(BENCHMARKS) == {each.name for each in ALL}
    assert [name for name, each in BENCHMARKS.items() if each.unit == "chunk"] == ["sec"]


@EVERY
def test_a_sound_download_is_read(each: Official, tmp_path: Path) -> None:
    tasks, documents = read(each, each.make(tmp_path / "a"))
    assert len(tasks) == 2
    names = {document.doc_id for document in documents}
    assert all(task.gold and task.gold.relevant.keys() <= names for task in tasks)
    assert all(task.split == each.split and task.query.strip() for task in tasks)
    assert open_source(f"{each.name}:{tmp_path}/a").secret_answers == (each.name == "browsecomp_plus")
    assert BENCHMARKS[each.name].secret_answers == (each.name == "browsecomp_plus")
    assert from_anywhere(f"{each.name}:{tmp_path}/a") == f"{each.name}:{tmp_path}/a"


@EVERY
def test_line_ends_and_byte_order_marks_change_nothing(each: Official, tmp_path: Path) -> None:
    expected = read(each, each.make(tmp_path / "a"))
    folder = each.make(tmp_path / "b")
    for path in folder.rglob("*"):
        if path.suffix in (".jsonl", ".json", ".tsv", ".txt"):
            reencode(path, b"\n", b"\r\n", b"\xef\xbb\xbf")
    tasks, documents = read(each, folder)
    plain = [(task.task_id, task.query.replace("\r\n", "\n"), task.gold, task.metadata) for task in tasks]
    assert plain == [(task.task_id, task.query, task.gold, task.metadata) for task in expected[0]]
    assert documents == expected[1]


@EVERY
def test_a_broken_line_is_named(each: Official, tmp_path: Path) -> None:
    path = each.make(tmp_path / "a") / each.text_file
    lines = path.read_bytes().split(b"\n")
    broken = len(lines) - 2 if each.name != "hotpotqa" else 2
    lines[broken] = b'{"torn'
    path.write_bytes(b"\n".join(lines))
    place = "not a JSON array" if each.name == "hotpotqa" else rf"{path.name}:{broken + 1}\b"
    with pytest.raises(CorpusError, match=place):
        read(each, tmp_path / "a")


def blank_question(questions: Rows, corpus: Rows) -> None:
    questions[1][next(key for key in ("question", "query", "Prompt") if key in questions[1])] = " "


def forget_gold(questions: Rows, corpus: Rows) -> None:
    for key in ("golds", "evidence", "document_ids", "gold_document_ids", "supporting_facts", "urls"):
        if key in questions[1]:
            questions[1][key] = []
    if "wiki_links" in questions[0]:
        questions[1]["wikipedia_link_1"] = ""


@EVERY
@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        (blank_question, CorpusError, "needs a text"),
        (forget_gold, NoGold, "names nothing to find"),
        (official.lose_gold, AbsentGold, "corpus does not have"),
    ],
)
def test_what_is_wrong_with_a_question_is_named_and_it_is_left_out(
    each: Official, change, error, says: str, tmp_path: Path
) -> None:
    folder = each.make(tmp_path / "a", change)
    with pytest.raises(error, match=rf"{Path(each.text_file).name}:(?: row )?\d+.*{says}"):
        tasks_of(each, folder)
    faults: list[CorpusError] = []
    first = read(each, each.make(tmp_path / "b"))[0][0]
    assert [task.query for task in tasks_of(each, folder, faults.append)] == [first.query]
    assert [type(fault) for fault in faults] == [error]


@EVERY
def test_a_question_that_stands_twice_is_named(each: Official, tmp_path: Path) -> None:
    def repeat(questions: Rows, corpus: Rows) -> None:
        questions.append(questions[0] | {"golds": []} if each.name == "browsecomp_plus" else questions[0])

    if each.name in ("longseal", "seal0"):  # their questions have no ids
        assert [task.task_id for task in tasks_of(each, each.make(tmp_path / "a"))] == ["0", "1"]
        return
    with pytest.raises(DuplicateId, match=rf"{Path(each.text_file).name}:(?: row )?\d+.*a second time"):
        tasks_of(each, each.make(tmp_path / "a", repeat))


@pytest.mark.parametrize("each", [each for each in ALL if each.corpus], ids=lambda each: each.name)
def test_a_document_that_stands_twice_is_named(each: Official, tmp_path: Path) -> None:
    folder = each.make(tmp_path / "a", lambda questions, corpus: corpus.append(corpus[0]))
    with pytest.raises(DuplicateId, match=r"(row|jsonl:) ?\d+: the id .* a second time"):
        read(each, folder)
    faults: list[CorpusError] = []
    lenient = list(open_source(f"{each.name}:{folder}", faults.append).documents())
    assert lenient == list(documents_of(each, each.make(tmp_path / "b")).values())
    assert [type(fault) for fault in faults] == [DuplicateId]


@EVERY
def test_a_folder_without_its_files_says_what_is_expected(each: Official, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(CorpusError, match="expected"):
        open_source(f"{each.name}:{tmp_path}/a")
    with pytest.raises(UsageError, match="no such file"):
        open_source(f"{each.name}:{tmp_path}/b")
    with pytest.raises(UsageError, match="has no split 'x'; it has: "):
        open_source(f"{each.name}:{each.make(tmp_path / 'c')}").tasks("x")


@pytest.mark.parametrize("each", [each for each in ALL if each.name in PARQUET], ids=lambda each: each.name)
def test_questions_in_parquet_are_the_same_and_rows_are_named(each: Official, tmp_path: Path) -> None:
    folder = each.make(tmp_path / "a")
    expected = read(each, folder)
    rows = [{key: value for key, value in row.items() if key != "gold_document_ids"} for row in each.questions]
    (folder / each.text_file).unlink()
    path = folder / f"{PARQUET[each.name]}.parquet"
    write_parquet(path, rows)
    tasks, documents = read(each, folder)
    assert [task.task_id for task in tasks] == [task.task_id for task in expected[0]]
    assert [task.gold.relevant for task in tasks] == [task.gold.relevant for task in expected[0]]
    assert documents == expected[1]
    rows[1][next(key for key in ("question", "query") if key in rows[1])] = None
    write_parquet(path, rows)
    with pytest.raises(CorpusError, match=rf"{path.name}: row 2: needs a text"):
        tasks_of(each, folder)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(CorpusError, match=rf"{path.name}: not a whole Parquet file after row 0"):
        tasks_of(each, folder)


def test_gold_and_evidence_of_browsecomp_plus_are_told_apart(tmp_path: Path) -> None:
    folder = official.BROWSECOMP_PLUS.make(tmp_path / "a")
    first, second = tasks_of(official.BROWSECOMP_PLUS, folder)
    assert first.gold == Gold(relevant={"5": 1, "7": 1}, answer_docs=("5",), answers=(SECRET,))
    assert (set(second.gold.relevant), second.gold.answer_docs) == ({"6", "7"}, ("6",))
    assert first.query == "Who tells of the matter 5?\nName one."
    assert second.query == '"Matter 6" is told where?'
    answers = folder / "data/browsecomp_plus_decrypted.jsonl"
    write_jsonl(answers, [{"query_id": 769, "answer": "  "}])
    assert tasks_of(official.BROWSECOMP_PLUS, folder)[0].gold.answers == ("  ",)
    answers.unlink()
    (folder / "topics-qrels/queries.tsv").write_text('769\t"Matter" 5?\n770\t"Matter 6"\n')
    tasks = tasks_of(official.BROWSECOMP_PLUS, folder)
    assert [task.gold.answers for task in tasks] == [(), ()]
    assert [task.query for task in tasks] == ['"Matter" 5?', "Matter 6"]  # a quote that begins a plain question


def test_judgements_of_unknown_questions_and_contradictions_are_named(tmp_path: Path) -> None:
    path = official.BROWSECOMP_PLUS.make(tmp_path / "a") / "topics-qrels/qrel_evidence.txt"
    judged = path.read_text()
    path.write_text(f"{judged}999 0 5 1\n")
    with pytest.raises(CorpusError, match=r"qrel_evidence\.txt:4: query '999' is not among the questions"):
        tasks_of(official.BROWSECOMP_PLUS, tmp_path / "a")
    path.write_text(f"{judged}769 0 5 0\n")
    with pytest.raises(DuplicateId, match=r"qrel_evidence\.txt:4: '5' was given another grade"):
        tasks_of(official.BROWSECOMP_PLUS, tmp_path / "a")


def test_browsecomp_plus_is_parted_as_the_published_code_does() -> None:
    names = [str(number) for number in range(830)]
    taught = training_ids(reversed(names))
    assert (len(taught), len(set(names) - taught)) == (664, 166)
    assert sorted(set(names) - taught)[:3] == ["103", "108", "120"]


def test_chunks_keep_their_ids_and_come_in_order(tmp_path: Path) -> None:
    document = documents_of(official.WEB, official.WEB.make(tmp_path / "a"))["42"]
    assert [chunk.chunk_id for chunk in document.chunks] == ["42_0", "42_1", "42_2", "42_10"]
    assert document.text[document.chunks[1].start : document.chunks[1].end] == "Chunk 42_1 speaks of topic 42_1."


def test_facts_are_stated_by_any_of_their_chunks(tmp_path: Path) -> None:
    folder = official.SEC.make(tmp_path / "a")
    assert tasks_of(official.SEC, folder)[0].gold == Gold(
        relevant={"a-24": 1, "b-25": 1},
        answer_docs=("b-25",),
        facts=(("a-24_0", "a-24_1"), ("b-25_0",)),
        answer_facts=(1,),
        answers=("seven",),
    )
    half = official.SEC.make(tmp_path / "b", lambda questions, corpus: corpus.pop(0))
    assert len(tasks_of(official.SEC, half)) == 2


def test_released_training_questions_are_those_of_the_benchmark(tmp_path: Path) -> None:
    folder = official.SEC.make(tmp_path / "a")
    facts = json.dumps(official.SEC.questions[0]["document_ids"])
    row = {"stage": "rl", "dataset_name": "sec", "query_id": "t1", "query": "Q?", "answer": "A"}
    row["document_ids_json"] = facts
    others = [row | {"stage": "sft", "query_id": "t2"}, row | {"dataset_name": "web", "query_id": "t3"}]
    write_parquet(folder / "data/train-00000-of-00001.parquet", [row, *others])
    source = open_source(f"sec:{folder}")
    assert source.splits == ("test", "train")
    assert [task.task_id for task in source.tasks("train")] == ["t1"]


def test_web_is_asked_over_the_corpus_of_its_own_split_only(tmp_path: Path) -> None:
    folder = official.WEB.make(tmp_path / "a")
    write_jsonl(folder / "train.jsonl", official.WEB.questions)
    assert open_source(f"web:{folder}").splits == ("test",)
    (folder / "corpora/web/test").rename(folder / "corpora/web/train")
    assert open_source(f"web:{folder}").splits == ("train",)
    official.SEC.make(folder)
    assert open_source(f"web:{folder}").fingerprint != open_source(f"sec:{folder}").fingerprint


def test_full_wiki_alone_lacks_evidence_and_with_distractors_has_it(tmp_path: Path) -> None:
    folder = official.HOTPOTQA.make(tmp_path / "a")
    rows = [row | {"context": [official.paragraph("Elsewhere")]} for row in official.HOTPOTQA.questions]
    (folder / "hotpot_dev_fullwiki_v1.json").write_text(json.dumps(rows))
    tasks, documents = read(official.HOTPOTQA, folder)
    assert [task.task_id for task in tasks] == ["h1", "h2"]
    assert {document.doc_id for document in documents} == {"Alpha_(town)", "Beta", "Gamma_Delta", "Noise", "Elsewhere"}
    with pytest.raises(AbsentGold):
        open_source(f"hotpotqa:{folder}/hotpot_dev_fullwiki_v1.json").tasks("dev")
    rows[0]["question"] = "Something else?"
    (folder / "hotpot_dev_fullwiki_v1.json").write_text(json.dumps(rows))
    with pytest.raises(DuplicateId, match=r"fullwiki_v1\.json: row 1: .* asks something else"):
        tasks_of(official.HOTPOTQA, folder)


def test_hotpotqa_of_the_hub_is_the_same(tmp_path: Path) -> None:
    expected = read(official.HOTPOTQA, official.HOTPOTQA.make(tmp_path / "a"))
    rows = []
    for row in official.HOTPOTQA.questions:
        facts = {"title": [pair[0] for pair in row["supporting_facts"]], "sent_id": [1, 1]}
        context = {"title": [pair[0] for pair in row["context"]], "sentences": [pair[1] for pair in row["context"]]}
        kept = {key: row[key] for key in ("question", "answer", "type", "level")}
        rows.append({"id": row["_id"], **kept, "supporting_facts": facts, "context": context})
    write_parquet(tmp_path / "b/distractor/validation-00000-of-00001.parquet", rows)
    assert read(official.HOTPOTQA, tmp_path / "b") == expected
    for key, second in (("supporting_facts", "sent_id"), ("context", "sentences")):
        torn = {**rows[0], key: {**rows[0][key], second: rows[0][key][second][:1]}}
        write_parquet(tmp_path / "b/distractor/validation-00000-of-00001.parquet", [torn])
        with pytest.raises(CorpusError, match=f"row 1: {key} is not a list of pairs"):
            read(official.HOTPOTQA, tmp_path / "b")


def test_another_text_of_a_document_is_told(tmp_path: Path) -> None:
    def change(questions, corpus):
        questions[1]["context"][-1] = ["Noise", ["Not the same."]]

    source = open_source(f"hotpotqa:{official.HOTPOTQA.make(tmp_path / 'a', change)}")
    assert len(list(source.documents())) == 4
    assert [problem.rpartition(": ")[2] for problem in source.problems] == ["another text of Noise"]


def test_pages_of_longseal_without_text_or_address_are_left_out(tmp_path: Path) -> None:
    def change(questions, corpus):
        questions[0]["30_docs"] += [{"title": "", "text": " ", "url": "https://e.org/x"}, {"title": "t", "text": "t"}]

    source = open_source(f"longseal:{official.LONGSEAL.make(tmp_path / 'a', change)}")
    assert [document.doc_id[-1] for document in source.documents()] == [*"aboc", "p"]
    assert [problem.rpartition("a page ")[2] for problem in source.problems] == ["without text", "without an address"]


def test_questions_without_pages_have_tasks_and_no_documents(tmp_path: Path) -> None:
    for each in (official.SEAL0, official.FRAMES):
        folder = each.make(tmp_path / each.name, lambda questions, corpus: corpus.clear())
        source = open_source(f"{each.name}:{folder}")
        assert [set(task.gold.relevant) for task in source.tasks("test")] == [
            {"https://e.org/a", "https://e.org/b"},
            {"https://e.org/c"},
        ]
        assert not source.has_documents
        with pytest.raises(CorpusError, match=r"no documents: they are on the web.*--index"):
            list(source.documents())


def test_a_saved_page_may_have_a_title_alone(tmp_path: Path) -> None:
    def change(questions: Rows, corpus: Rows) -> None:
        corpus[0].pop("text")
        corpus[1]["text"] = None

    folder = official.SEAL0.make(tmp_path / "a", change)
    expected = ["", "", "The page b tells."]
    assert [document.text for document in documents_of(official.SEAL0, folder).values()] == expected
    (folder / "corpus.jsonl").unlink()
    pages = [{key: row[key] for key in ("_id", "title")} for row in official.SEAL0.corpus]
    write_parquet(folder / "corpus.parquet", pages)
    assert [document.text for document in documents_of(official.SEAL0, folder).values()] == [""] * 3


def test_a_cell_of_frames_may_hold_several_addresses() -> None:
    washington = "https://en.wikipedia.org/wiki/Washington,_D.C."
    cell = f" {washington}, https://en.wikipedia.org/wiki/B_(c) and more\nhttps://e.org/d;"
    assert addresses(cell) == [washington, "https://en.wikipedia.org/wiki/B_(c)", "https://e.org/d"]


def test_parquet_without_its_package_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = official.WEB.make(tmp_path / "a")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtra, match=r"pip install .*\[data\]'"):
        list(open_source(f"web:{folder}").documents())
