"""BrowseComp-Plus (Chen et al. 2025): BrowseComp's questions over a fixed corpus, with judged documents.

    topics-qrels/queries.tsv                id, tab, question; no header
    topics-qrels/qrel_golds.txt             `id 0 document 1`: documents that hold the answer
    topics-qrels/qrel_evidence.txt          the same: documents that are needed
    corpus/*.parquet                        `docid`, `text`, `url`
    data/browsecomp_plus_decrypted.jsonl    made by the benchmark's own script; `query_id` and `answer` are read

Its authors ask that questions and answers never appear online as plain text. Answers are read into `Gold` if the user
has decrypted them, and are never written.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import msgspec

from harness1.data.benchmarks import tables
from harness1.data.benchmarks.benchmark import Located, source_of, tasks_of
from harness1.data.benchmarks.corpora import corpus_of
from harness1.data.benchmarks.tables import Row
from harness1.data.faults import Fault, distinct
from harness1.data.formats import trec
from harness1.data.formats.jsonl import decoded
from harness1.data.source import Source
from harness1.errors import CorpusError
from harness1.records import Gold, Task

NAME = "browsecomp_plus"
SEED, TRAIN_SHARE = 42, 0.8
"""The split of the published training code: sorted ids, shuffled by Python's generator, with the first 80 % for
training."""
TOPICS = ("topics-qrels/queries.tsv", "queries.tsv")
GOLD = ("topics-qrels/qrel_golds.txt", "qrel_golds.txt", "topics-qrels/qrel_gold.txt", "qrel_gold.txt",
        "qrels_gold.txt")  # fmt: skip
EVIDENCE = ("topics-qrels/qrel_evidence.txt", "qrel_evidence.txt", "qrels_evidence.txt")
CORPUS = ("corpus/**/*.parquet", "corpus.parquet", "corpus.jsonl", "corpus.jsonl.gz",
          "browsecomp-plus-corpus/**/*.parquet", "corpora/browsecompplus/test/**/*.parquet",
          "corpora/browsecompplus/**/*.parquet", "data/*.parquet")  # fmt: skip
ANSWERS = ("data/browsecomp_plus_decrypted.jsonl", "browsecomp_plus_decrypted.jsonl", "answers.jsonl")


class _Answer(msgspec.Struct):
    """The fields read from a decrypted line, which also holds the texts of its documents."""

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
    final, needed = (trec.read_qrels(path, known, "questions", fault) for path in (gold, evidence))
    texts = _answers(answers[0], fault) if answers else {}
    taught = training_ids(known)

    def task(where: str, row: Row, number: int) -> Task | None:
        task_id = row["query_id"]
        if split != "all" and (task_id in taught) != (split == "train"):
            return None
        if not task_id.strip():
            raise CorpusError(f"{where}: needs an id before the first tab")
        found = Gold(
            relevant=dict.fromkeys((*final.get(task_id, ()), *needed.get(task_id, ())), 1),
            answer_docs=tuple(final.get(task_id, ())),
            answers=texts.get(task_id, ()),
        )
        return Task(task_id, tables.text_of(where, row, "query"), split, found)

    return tasks_of(iter(questions), fault, task)


def _answers(path: Path, fault: Fault) -> dict[str, tuple[str]]:
    lines = decoded(path, _Answer, "a question with its answer", fault)
    answers = distinct(lines, lambda line: str(line.query_id), fault)
    return {str(line.query_id): (line.answer,) for _, line in answers}
