"""FRAMES (Krishna et al. 2024): questions over 2 to 15 articles of Wikipedia, without a corpus.

`test.tsv` has a number, `Prompt`, `Answer`, `wikipedia_link_1` to `wikipedia_link_11+`, `reasoning_types` and
`wiki_links`, a list written as in Python. A cell may hold several addresses, and words after one.
"""

from __future__ import annotations

import re
from pathlib import Path

from harness1.data.benchmarks import tables
from harness1.data.benchmarks.benchmark import source_of, tasks_of
from harness1.data.benchmarks.sealqa import kept_pages, page_id
from harness1.data.benchmarks.tables import Row
from harness1.data.faults import Fault
from harness1.data.formats.jsonl import identifier
from harness1.data.source import Source
from harness1.errors import CorpusError
from harness1.records import Gold, Task

NAME = "frames"
NUMBER_KEYS = ("", "Unnamed: 0", "id", "index")
LINK = "wikipedia_link_"
_BETWEEN = re.compile(r"(?<![\s,;])[\s,;]++(?=https?://)")


def open_frames(root: Path, fault: Fault) -> Source:
    """Open the questions of a file, whose relevant documents are addresses of articles."""
    files = tables.require_files(
        root, "questions", "test.tsv", "test*.parquet", "frames*.tsv", "test.jsonl", "test.json"
    )
    splits = {"test": lambda: tasks_of(tables.rows(files, fault), fault, _task)}
    return source_of(NAME, root, kept_pages(root, fault), splits, fault)


def addresses(cell: str) -> list[str]:
    """Return the addresses in a cell, separated by commas, blanks or line breaks; an address may itself hold commas."""
    pieces = (piece.split() for piece in _BETWEEN.split(cell.strip()))
    return [words[0].strip("'\"[]").rstrip(",;") for words in pieces if words and "://" in words[0]]


def _task(where: str, row: Row, number: int) -> Task:
    relevant = [page_id(where, address) for cell in _cells(where, row) for address in addresses(cell)]
    named = any(key in row for key in NUMBER_KEYS)
    return Task(
        task_id=identifier(where, row, NUMBER_KEYS) if named else str(number),
        query=tables.text_of(where, row, "Prompt"),
        split="test",
        gold=Gold(relevant=dict.fromkeys(relevant, 1), answers=(tables.text_of(where, row, "Answer"),)),
        metadata={"reasoning_types": row["reasoning_types"]} if row.get("reasoning_types") else {},
    )


def _cells(where: str, row: Row) -> list[str]:
    """Return the cells that hold addresses: the list of all of them, else the columns for one each."""
    found = tables.list_of(where, row, "wiki_links") if row.get("wiki_links") else []
    if not found:
        found = [value for key, value in row.items() if key.startswith(LINK) and value]
    if not all(isinstance(cell, str) for cell in found):
        raise CorpusError(f"{where}: an address in wiki_links is not a text")
    return found
