"""Small benchmarks in the layouts in which the eight are handed out, written for the tests: two questions each."""

import csv
import json
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

SECRET = "the Quagga Accord of 1907"
"""An answer that must never be written."""
Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Official:
    """One benchmark as files. `write` takes the rows of its questions and those of its corpus."""

    name: str
    split: str
    questions: Rows
    corpus: Rows
    write: Callable[[Path, Rows, Rows], None]
    text_file: str
    """The file of the questions, where it is text."""

    def make(self, folder: Path, change: Callable[[Rows, Rows], object] = lambda questions, corpus: None) -> Path:
        questions, corpus = deepcopy(self.questions), deepcopy(self.corpus)
        change(questions, corpus)
        folder.mkdir(parents=True, exist_ok=True)
        self.write(folder, questions, corpus)
        return folder


def write_jsonl(path: Path, rows: Rows) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_parquet(path: Path, rows: Rows) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def write_tsv(path: Path, rows: list[list[str]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        csv.writer(file, "excel-tab", lineterminator="\n").writerows(rows)


def lose_gold(questions: Rows, corpus: Rows) -> None:
    """Take something that the second question should find out of the corpus."""
    if corpus:
        del corpus[1]
    elif "golds" in questions[1]:
        questions[1]["golds"] = []
    else:
        del questions[1]["context"][0]


def paragraph(title: str) -> list[Any]:
    return [title, [f"{title} is a place.", f" {title} has a river."]]


def _hotpot_question(number: int, *titles: str) -> dict[str, Any]:
    return {
        "_id": f"h{number}",
        "question": f'Which river\tof "{titles[0]}" is meant in question {number}?',
        "answer": f"River {number}",
        "type": "bridge",
        "level": "hard",
        "supporting_facts": [[title, 1] for title in titles],
        "context": [paragraph(title) for title in (*titles, "Noise")],
    }


def _write_hotpot(folder: Path, questions: Rows, corpus: Rows) -> None:
    lines = ",\n".join(map(json.dumps, questions))
    (folder / "hotpot_dev_distractor_v1.json").write_text(f"[\n{lines}\n]\n")


HOTPOTQA = Official(
    "hotpotqa",
    "dev",
    [_hotpot_question(1, "Alpha (town)", "Beta"), _hotpot_question(2, "Gamma Delta", "Beta")],
    [],
    _write_hotpot,
    "hotpot_dev_distractor_v1.json",
)


def _write_browsecomp(folder: Path, questions: Rows, corpus: Rows) -> None:
    write_tsv(folder / "topics-qrels/queries.tsv", [[row["id"], row["query"]] for row in questions])
    for name in ("golds", "evidence"):
        lines = [f"{row['id']} 0 {doc_id} 1\n" for row in questions for doc_id in row[name]]
        (folder / f"topics-qrels/qrel_{name}.txt").write_text("".join(lines))
    write_parquet(folder / "corpus/data/train-00000.parquet", corpus)
    ids = [row["id"] for row in QUESTIONS_OF_BROWSECOMP]
    answers = [{"query_id": each, "query": "?", "answer": SECRET, "gold_docs": []} for each in ids]
    write_jsonl(folder / "data/browsecomp_plus_decrypted.jsonl", answers)


QUESTIONS_OF_BROWSECOMP: Rows = [
    {"id": "769", "query": "Who tells of the matter 5?\nName one.", "golds": ["5"], "evidence": ["5", "7"]},
    {"id": "770", "query": '"Matter 6" is told where?', "golds": ["6"], "evidence": ["7"]},
]
BROWSECOMP_PLUS = Official(
    "browsecomp_plus",
    "all",
    QUESTIONS_OF_BROWSECOMP,
    [{"docid": str(n), "text": f"Page {n} tells of the matter {n}.", "url": f"https://e.org/{n}"} for n in (5, 6, 7)],
    _write_browsecomp,
    "topics-qrels/queries.tsv",
)


def _chunks(*names: str) -> Rows:
    """Chunks in an order in which those of a document are apart."""
    sources = {name: json.dumps({"source": name.rpartition("_")[0]}) for name in names}
    return [
        {"chunk_id": name, "document_text": f"Chunk {name} speaks of topic {name}.", "metadata_json": source}
        for name, source in sources.items()
    ]


def _write_context1(name: str, split: str) -> Callable[[Path, Rows, Rows], None]:
    def write(folder: Path, questions: Rows, corpus: Rows) -> None:
        write_jsonl(folder / "test.jsonl", questions)
        write_parquet(folder / f"corpora/{name}/{split}/train-00000.parquet", corpus[:2])
        write_parquet(folder / f"corpora/{name}/{split}/train-00001.parquet", corpus[2:])

    return write


def _documents_of(name: str) -> Official:
    one: dict[str, Any] = {"query_id": "1", "query": "What of topic 42_1?", "answer": "x"}
    two: dict[str, Any] = {"query_id": "2", "query": "What of topic 44_0?", "answer": "y"}
    questions = [
        {**one, "document_ids": ["42", "43"], "gold_document_ids": ["42"]},
        {**two, "document_ids": ["44"], "gold_document_ids": "['44']"},
    ]
    corpus = _chunks("42_1", "44_0", "43_0", "42_0", "42_10", "42_2")
    return Official(name, "test", questions, corpus, _write_context1(name, "test"), "test.jsonl")


WEB, PATENTS = _documents_of("web"), _documents_of("patents")


def _fact(final: bool, *chunks: str) -> dict[str, Any]:
    return {"fact": f"stated by {chunks}", "chunk_ids": list(chunks), "is_final_answer": final}


SEC = Official(
    "sec",
    "test",
    [
        {
            "query_id": "AAPL_3",
            "query": "Which chunk speaks of topic a-24_1?",
            "document_ids": [_fact(False, "a-24_0", "a-24_1"), _fact(True, "b-25_0")],
            "answer": "seven",
        },
        {"query_id": "MSFT_3", "query": "And topic c-26_0?", "document_ids": [_fact(True, "c-26_0")], "answer": "8"},
    ],
    _chunks("a-24_1", "c-26_0", "b-25_0", "a-24_0"),
    _write_context1("sec", "train"),
    "test.jsonl",
)


def _page(name: str) -> dict[str, Any]:
    return {"date": None, "title": name, "text": f"The page {name} tells.", "url": f"https://e.org/{name}#part"}


def _seal_question(number: int, *pages: str) -> dict[str, Any]:
    return {
        "question": f"What does page {pages[0]} tell in {number}?",
        "answer": f"answer {number}",
        "urls": [_page(name)["url"] for name in pages],
        "topic": "Sports",
        "canary": "sealqa:0",
    }


def _write_longseal(folder: Path, questions: Rows, corpus: Rows) -> None:
    write_jsonl(folder / "longseal.jsonl", questions)


LONGSEAL = Official(
    "longseal",
    "test",
    [
        _seal_question(1, "a", "b")
        | {"golds": [_page("a"), _page("b")], "12_docs": [_page("n")], "30_docs": [_page("o")]},
        _seal_question(2, "c") | {"golds": [_page("c")], "12_docs": [_page("n")], "30_docs": [_page("o"), _page("p")]},
    ],
    [],
    _write_longseal,
    "longseal.jsonl",
)


def _write_seal0(folder: Path, questions: Rows, corpus: Rows) -> None:
    write_jsonl(folder / "seal-0.jsonl", questions)
    if corpus:
        write_jsonl(folder / "corpus.jsonl", corpus)


def _kept(name: str) -> dict[str, Any]:
    return {"_id": f"https://e.org/{name}", "title": name, "text": f"The page {name} tells."}


SEAL0 = Official(
    "seal0",
    "test",
    [_seal_question(1, "a", "b"), _seal_question(2, "c")],
    [_kept("a"), _kept("c"), _kept("b")],
    _write_seal0,
    "seal-0.jsonl",
)


def _write_frames(folder: Path, questions: Rows, corpus: Rows) -> None:
    links = [f"wikipedia_link_{number}" for number in (*range(1, 11), "11+")]
    names = ["", "Prompt", "Answer", *links, "reasoning_types", "wiki_links"]
    write_tsv(folder / "test.tsv", [names, *([str(row.get(name, "")) for name in names] for row in questions)])
    if corpus:
        write_jsonl(folder / "corpus.jsonl", corpus)


FRAMES = Official(
    "frames",
    "test",
    [
        {
            "": "0",
            "Prompt": "What do a and b tell?\nBoth, please.",
            "Answer": "much",
            "wiki_links": "['https://e.org/a', 'https://e.org/b#history']",
            "reasoning_types": "Multiple constraints",
        },
        {"": "1", "Prompt": "What does c tell?", "Answer": "little", "wikipedia_link_1": "https://e.org/c (the page)"},
    ],
    [_kept("a"), _kept("c"), _kept("b")],
    _write_frames,
    "test.tsv",
)
ALL = (BROWSECOMP_PLUS, WEB, PATENTS, SEC, LONGSEAL, SEAL0, FRAMES, HOTPOTQA)
