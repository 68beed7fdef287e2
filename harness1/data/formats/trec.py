"""TREC run and relevance files in the format of `trec_eval`: columns separated by white space.

A run line is `task Q0 unit rank score tag`, with ranks from 1; a relevance line is `task 0 unit grade`.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from harness1.data.faults import DuplicateId, Fault, refuse
from harness1.data.formats.jsonl import numbered_lines
from harness1.errors import CorpusError, UsageError
from harness1.records import DocId, UnitId
from harness1.runs.files import write_atomically

HIGHEST_GRADE = 1000
Run = list[tuple[str, list[tuple[UnitId, float]]]]
"""For each task, its units with their scores, best first."""


def write_run(path: Path, run: Iterable[tuple[str, Sequence[tuple[UnitId, float]]]], tag: str) -> None:
    """Write rankings, best first; scores are written in full, so that reading gives equal values.

    Raises:
        UsageError: an id or the tag is empty or holds white space, or the file cannot be written.
    """
    lines = (
        f"{_column(task_id)} Q0 {_column(unit_id)} {rank} {float(score)!r} {_column(tag)}\n"
        for task_id, units in run
        for rank, (unit_id, score) in enumerate(units, start=1)
    )
    text = "".join(lines)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error


def read_run(path: Path) -> Run:
    """Return the rankings of a run file, each sorted by its rank column, tasks in the order of the file.

    Raises:
        CorpusError: the file cannot be read, or a line does not have the six columns (`file:line` is named).
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


def read_qrels(path: Path, known: Container[str], what: str, fault: Fault = refuse) -> dict[str, dict[DocId, int]]:
    """Return the documents with a grade above 0 of every task that has any. A document that is judged twice must have
    the same grade.

    Args:
        known: the tasks that may be judged, which `what` names in errors.

    Raises:
        CorpusError: a line is malformed, contradicts an earlier one, or judges an unknown task, unless `fault` lets it
            pass; or the file cannot be read.
    """
    grades: dict[tuple[str, str], int] = {}
    relevant: dict[str, dict[DocId, int]] = {}
    for where, (task_id, _, doc_id, text) in _columns(path, 4, fault):
        try:
            grade = grade_of(text)
        except ValueError:
            fault(CorpusError(f"{where}: the grade must be a whole number, not {text!r}"))
            continue
        if grades.setdefault((task_id, doc_id), grade) != grade:
            fault(DuplicateId(f"{where}: {doc_id!r} was given another grade for query {task_id!r} before"))
        elif task_id not in known:
            fault(CorpusError(f"{where}: query {task_id!r} is not among the {what}"))
        elif grade > 0:
            relevant.setdefault(task_id, {})[DocId(doc_id)] = grade
    return relevant


def write_qrels(path: Path, relevant: Mapping[str, Mapping[DocId, int]]) -> None:
    """Write graded documents of tasks, in the order given.

    Raises:
        UsageError: an id holds white space or is empty, or the file cannot be written.
    """
    graded = ((task_id, doc_id, grade) for task_id, found in relevant.items() for doc_id, grade in found.items())
    _write(path, (f"{_column(task_id)} 0 {_column(doc_id)} {grade}" for task_id, doc_id, grade in graded))


def grade_of(text: str) -> int:
    """Return the grade that a column holds, or raise ValueError; larger ones are no grades, and break sums of gains."""
    grade = int(text)
    if abs(grade) > HIGHEST_GRADE:
        raise ValueError(f"a grade of more than {HIGHEST_GRADE}")
    return grade


def _columns(path: Path, count: int, fault: Fault = refuse) -> Iterator[tuple[str, list[str]]]:
    for number, line in numbered_lines(path, fault):
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
