"""BrowseComp-Plus (Chen et al. 2025): BrowseComp's questions over a fixed corpus, with judged documents.

    topics-qrels/queries.tsv                id, tab, question; no header
    topics-qrels/qrel_golds.txt             `id 0 document 1`: documents that hold the answer
    topics-qrels/qrel_evidence.txt          the same: documents that are needed
    corpus/*.parquet                        `docid`, `text`, `url`
    data/browsecomp_plus_decrypted.jsonl    made by the benchmark's own script; `query_id` and `answer` are read

Its authors ask that questions and answers never stand as plain text online. Answers are read into `Gold` where the
user has decrypted them, and are written nowhere.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import msgspec

from harness1.data.benchmarks import tables
from harness1.data.benchmarks.benchmark import Benchmark, Hub, Located, source_of
from harness1.data.benchmarks.corpora import corpus_of
from harness1.data.faults import DuplicateId, Fault
from harness1.data.formats import trec
from harness1.data.formats.jsonl import numbered_lines
from harness1.data.source import Source
from harness1.errors import CorpusError
from harness1.records import DocId, Gold, Task

NAME = "browsecomp_plus"
SEED, TRAIN_SHARE = 42, 0.8
"""The split of the published training code: sorted ids, shuffled by Python's generator, of which the first 80 %
train."""
TOPICS = ("topics-qrels/queries.tsv", "queries.tsv")
GOLD = (
    "topics-qrels/qrel_golds.txt",
    "qrel_golds.txt",
    "topics-qrels/qrel_gold.txt",
    "qrel_gold.txt",
    "qrels_gold.txt",
)
EVIDENCE = ("topics-qrels/qrel_evidence.txt", "qrel_evidence.txt", "qrels_evidence.txt")
CORPUS = (
    *(
        "corpus/**/*.parquet",
        "corpus.parquet",
        "corpus.jsonl",
        "corpus.jsonl.gz",
        "browsecomp-plus-corpus/**/*.parquet",
    ),
    *("corpora/browsecompplus/test/**/*.parquet", "corpora/browsecompplus/**/*.parquet", "data/*.parquet"),
)
ANSWERS = ("data/browsecomp_plus_decrypted.jsonl", "browsecomp_plus_decrypted.jsonl", "answers.jsonl")


class _Answer(msgspec.Struct):
    """The parts that are read of a decrypted line, which also holds the texts of its documents."""

    query_id: str | int
    answer: str


def open_browsecomp_plus(root: Path, fault: Fault) -> Source:
    """Open the questions of a folder over its corpus: all (`all`), or split as in the paper (`train`, `test`)."""
    topics = tables.require_files(root, "questions", *TOPICS)[0]
    gold, evidence = (tables.require_files(root, "judgements", *names)[0] for names in (GOLD, EVIDENCE))
    corpus = corpus_of(tables.require_files(root, "corpus", *CORPUS), fault)
    answers = tables.find_files(root, *ANSWERS)

    def tasks(split: str) -> Located:
        return _tasks(topics, gold, evidence, answers, split, fault)

    splits = {split: partial(tasks, split) for split in ("all", "test", "train")}
    return source_of(NAME, root, corpus, splits, fault, secret_answers=True)


def training_ids(task_ids: Iterable[str]) -> set[str]:
    """Return the questions that the paper trains on; the others are its test split."""
    names = sorted(task_ids)
    random.Random(SEED).shuffle(names)
    return set(names[: int(len(names) * TRAIN_SHARE)])


def _tasks(topics: Path, gold: Path, evidence: Path, answers: tuple[Path, ...], split: str, fault: Fault) -> Located:
    questions = list(tables.tsv_rows(topics, fault, ("query_id", "query")))
    known = {row["query_id"] for _, row in questions}
    final, needed = _judged(gold, known, fault), _judged(evidence, known, fault)
    texts = _answers(answers[0], fault) if answers else {}
    taught = training_ids(known)
    for where, row in questions:
        task_id = row["query_id"]
        if split != "all" and (task_id in taught) != (split == "train"):
            continue
        try:
            if not task_id.strip():
                raise CorpusError(f"{where}: needs an id before the first tab")
            query = tables.text_of(where, row, "query")
        except CorpusError as error:
            fault(error)
            continue
        found = Gold(
            relevant=dict.fromkeys((*final.get(task_id, ()), *needed.get(task_id, ())), 1),
            answer_docs=tuple(final.get(task_id, ())),
            answers=texts.get(task_id, ()),
        )
        yield where, Task(task_id=task_id, query=query, split=split, gold=found)


def _judged(path: Path, known: set[str], fault: Fault) -> dict[str, dict[DocId, None]]:
    """Return, for each question, the documents with a grade above 0."""
    found: dict[str, dict[DocId, None]] = {}
    for judgement in trec.judgements(path, fault):
        if judgement.task_id not in known:
            fault(CorpusError(f"{judgement.where}: query {judgement.task_id!r} is not among the questions"))
        elif judgement.grade > 0:
            found.setdefault(judgement.task_id, {})[DocId(judgement.unit_id)] = None
    return found


def _answers(path: Path, fault: Fault) -> dict[str, tuple[str]]:
    decoder = msgspec.json.Decoder(_Answer)
    found: dict[str, tuple[str]] = {}
    for number, line in numbered_lines(path):
        if not line.strip():
            continue
        try:
            answer = decoder.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            fault(CorpusError(f"{path}:{number}: not a question with its answer: {error}"))
            continue
        if str(answer.query_id) in found:
            fault(DuplicateId(f"{path}:{number}: the id {str(answer.query_id)!r} occurs a second time"))
            continue
        found[str(answer.query_id)] = (answer.answer,)
    return found


BROWSECOMP_PLUS = Benchmark(
    name=NAME,
    what="BrowseComp's questions over a fixed corpus of web pages, judged as evidence and as holding the answer",
    size="830 questions (166 in the paper's test split), 100,195 documents",
    licence="MIT as declared; the pages are third parties'. Questions and answers must not be published as plain text",
    origin="https://github.com/texttron/BrowseComp-Plus, Tevatron/browsecomp-plus-corpus on the hub",
    files=(
        "topics-qrels/queries.tsv (made by the benchmark's scripts_build_index/decrypt_dataset.py --generate-tsv)",
        "topics-qrels/qrel_golds.txt and topics-qrels/qrel_evidence.txt (in its repository)",
        "corpus/*.parquet: docid, text, url; or corpora/browsecompplus/test/*.parquet: chunk_id, document_text",
        "data/browsecomp_plus_decrypted.jsonl, if there are to be answers",
    ),
    verified="layout and columns against the benchmark's own code and that of others who read it; fixtures written by"
    " that; the parting into train and test against the published list of ids, all 830. Not tried on an original"
    " file",
    open=open_browsecomp_plus,
    hub=(Hub("Tevatron/browsecomp-plus-corpus", ("data/*.parquet",), "corpus"),),
    by_hand="clone https://github.com/texttron/BrowseComp-Plus, run its scripts_build_index/decrypt_dataset.py with"
    " --generate-tsv, and copy its topics-qrels/ into the folder",
)
