"""Tables for spreadsheets, which evaluate nothing in them."""

from __future__ import annotations

import csv
import io

import pytest

from harness1.eval.answer_run import as_csv
from harness1.eval.answers import Answered, AnswerItem, Reply
from harness1.eval.outputs import FORMULA, csv_table


def cells(table: str) -> list[list[str]]:
    return list(csv.reader(io.StringIO(table, newline="")))


@pytest.mark.parametrize("prefix", [*FORMULA, " =", "'="])
def test_a_text_is_never_a_formula_and_different_texts_stay_different(prefix: str) -> None:
    text = f"{prefix}cmd|' /C calc'!A0"
    ((_,), (cell,), (escaped,)) = cells(csv_table(["text"], [[text], [f"'{text}"]]))
    assert (cell, escaped) == (f"'{text}", f"''{text}")


def test_numbers_stay_numbers() -> None:
    assert cells(csv_table(["-a"], [[-0.5, -3, "-3"]])) == [["'-a"], ["-0.5", "-3", "'-3"]]


def test_answers_and_right_answers_are_inert() -> None:
    question = AnswerItem("=id", 0, "?", ("@right",), ())
    reply = Reply(task_id="=id", condition="closed", model="m", prompt="p", text="=1+1")
    _, row = cells(as_csv([Answered(question, "closed", reply)]))
    assert (row[0], row[-2:]) == ("'=id", ["'=1+1", "'@right"])
