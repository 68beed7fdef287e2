"""TREC run and relevance files in the format of `trec_eval`: columns between white space.

A run line is `task Q0 unit rank score tag`, with ranks from 1; a relevance line is `task 0 unit grade`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from harness1.data.faults import DuplicateId, Fault, refuse
from harness1.data.formats.jsonl import numbered_lines
from harness1.errors import CorpusError, UsageError
from harness1.records import UnitId
from harness1.runs.files import write_atomically

Run = list[tuple[str, list[tuple[UnitId, float]]]]
"""For each task, its units with their scores, best first."""


def write_run(path: Path, run: Iterable[tuple[str, Sequence[tuple[UnitId, float]]]], tag: str) -> None:
    """Write rankings, best first; scores are written in full, so that reading gives equal values.

    Raises:
        UsageError: an id or the tag is empty or holds white space, or the file cannot be written.
    """
    _write(
        path,
        (
            f"{_column(task_id)} Q0 {_column(unit_id)} {rank} {float(score)!r} {_column(tag)}"
            for task_id, units in run
            for rank, (unit_id, score) in enumerate(units, start=1)
        ),
    )


def write_qrels(path: Path, qrels: Mapping[str, Mapping[UnitId, int]]) -> None:
    """Write the grade of every judged unit of every task.

    Raises:
        UsageError: an id is empty or holds white space, or the file cannot be written.
    """
    _write(
        path,
        (
            f"{_column(task_id)} 0 {_column(unit_id)} {grade}"
            for task_id, grades in qrels.items()
            for unit_id, grade in grades.items()
        ),
    )


def read_run(path: Path) -> Run:
    """Return the rankings of a run file, each sorted by its rank column, tasks in the order of the file.

    Raises:
        CorpusError: the file cannot be read, or a line has not the six columns (`file:line` is named).
    """
    rows: dict[str, list[tuple[int, UnitId, float]]] = {}
    for where, columns in _columns(path, 6):
        task_id, _, unit_id, rank, score, _ = columns
        try:
            rows.setdefault(task_id, []).append((int(rank), UnitId(unit_id), float(score)))
        except ValueError as error:
            raise CorpusError(f"{where}: rank and score must be numbers, not {rank!r} and {score!r}") from error
    return [
        (task_id, [(unit_id, score) for _, unit_id, score in sorted(units, key=lambda row: row[0])])
        for task_id, units in rows.items()
    ]


def read_qrels(path: Path) -> dict[str, dict[UnitId, int]]:
    """Return the grades of a relevance file.

    Raises:
        CorpusError: the file cannot be read, or a line has not the four columns (`file:line` is named).
    """
    qrels: dict[str, dict[UnitId, int]] = {}
    for judgement in judgements(path):
        qrels.setdefault(judgement.task_id, {})[judgement.unit_id] = judgement.grade
    return qrels


class Qrel(NamedTuple):
    """A line of a relevance file, with its place as `file:line`."""

    where: str
    task_id: str
    unit_id: UnitId
    grade: int


def judgements(path: Path, fault: Fault = refuse) -> Iterator[Qrel]:
    """Yield the lines of a relevance file, in order. A unit that is judged twice must have the same grade.

    Raises:
        CorpusError: a line is malformed, or contradicts an earlier one, unless `fault` lets it pass; or the file cannot
            be read.
    """
    grades: dict[tuple[str, str], int] = {}
    for where, (task_id, _, unit_id, text) in _columns(path, 4, fault):
        try:
            grade = int(text)
        except ValueError:
            fault(CorpusError(f"{where}: the grade must be a whole number, not {text!r}"))
            continue
        if grades.setdefault((task_id, unit_id), grade) != grade:
            fault(DuplicateId(f"{where}: {unit_id!r} was given another grade for query {task_id!r} before"))
            continue
        yield Qrel(where, task_id, UnitId(unit_id), grade)


def _columns(path: Path, count: int, fault: Fault = refuse) -> Iterator[tuple[str, list[str]]]:
    for number, line in numbered_lines(path):
        columns = line.decode("utf-8", "replace").split()
        if columns and len(columns) != count:
            fault(CorpusError(f"{path}:{number}: {len(columns)} columns where {count} are expected"))
        elif columns:
            yield f"{path}:{number}", columns


def _column(name: str) -> str:
    if name.split() != [name]:
        raise UsageError(f"{name!r} is empty or holds white space, which a TREC file cannot")
    return name


def _write(path: Path, lines: Iterable[str]) -> None:
    text = "".join(f"{line}\n" for line in lines)
    try:
        write_atomically(path, text.encode())
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error
