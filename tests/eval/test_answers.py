"""A frozen model answers a run under three conditions; what is there is not asked again, and a fault is never a 0."""

from __future__ import annotations

import asyncio
import csv
import io
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness1.config import Machine
from harness1.errors import HarnessError, InfrastructureFault, SchemaError, UsageError
from harness1.eval.answer_run import as_csv, summarise_answers
from harness1.eval.answers import (
    ANSWERS,
    Answered,
    Answering,
    AnswerItem,
    DocumentReader,
    NamedModel,
    ReplyStore,
    answer_all,
)
from harness1.http.model_endpoint import Completer
from harness1.records import UnitId
from tests.support import CORPUS, WordRetriever

WHERE = AnswerItem("where", 0, "Where did poet Lord Byron die?", ("Missolonghi",), (UnitId("byron"), UnitId("noise")))
AGAIN = msgspec.structs.replace(WHERE, sample_idx=1, delivered=(UnitId("noise"),))
WHO = AnswerItem("who", 0, "Who designed the Analytical Engine?", ("Charles Babbage", "Babbage"), (UnitId("babbage"),))
QUESTIONS = (WHERE, AGAIN, WHO)
Says = Callable[[str, str], str | HarnessError]


class Server:
    """An endpoint that answers (system, user) by a function; it counts what it was asked."""

    def __init__(self, says: Says, usage: Mapping[str, int] | None = None) -> None:
        self.says, self.usage, self.asked = says, usage, list[str]()

    async def post(self, path: str, body: Any, kind: type[Any]) -> Any:
        await asyncio.sleep(0)
        system, user = (message["content"] for message in body["messages"])
        self.asked.append(user)
        said = self.says(system, user)
        if isinstance(said, HarnessError):
            raise said
        return msgspec.convert({"choices": [{"message": {"content": said}}], "usage": self.usage}, kind)


def reads(system: str, user: str) -> str:
    """Says what its documents say, and nothing without them."""
    for word in ("Missolonghi", "Babbage"):
        if word in user.partition("<question>")[0]:
            return word
    return "no idea"


def judges(system: str, user: str) -> str:
    correct, answer = (re.search(rf"<{tag}>\n(.*)\n</{tag}>", user, re.S) for tag in ("correct", "answer"))
    assert correct
    assert answer
    return "correct" if answer[1] in correct[1].splitlines() else "incorrect"


def working(server: Server, judge: Server | None = None, **options: Any) -> Answering:
    library = DocumentReader(WordRetriever(CORPUS), Machine(attempts=1))
    return Answering(
        options.pop("questions", QUESTIONS),
        library,
        NamedModel("openai:reader@http://there/v1", Completer(server, "reader", 50)),
        NamedModel("openai:judge@http://there/v1", Completer(judge, "judge", 50)) if judge else None,
        **options,
    )


def answered(work: Answering, folder: Path, places: int = 4) -> list[Answered]:
    with ReplyStore(folder) as store:
        return asyncio.run(answer_all(work, store, places))


def texts(found: list[Answered]) -> dict[tuple[str, int, str], str]:
    return {(each.question.task_id, each.question.sample_idx, each.condition): each.text for each in found}


def test_every_question_is_asked_under_every_condition_and_closed_book_once(tmp_path: Path) -> None:
    server = Server(reads)
    found = answered(working(server), tmp_path)
    assert texts(found) == {
        ("where", 0, "closed"): "no idea",
        ("where", 0, "single"): "Missolonghi",
        ("where", 0, "curated"): "Missolonghi",
        ("where", 1, "single"): "Missolonghi",
        ("where", 1, "curated"): "no idea",
        ("who", 0, "closed"): "no idea",
        ("who", 0, "single"): "Babbage",
        ("who", 0, "curated"): "Babbage",
    }
    sizes = {(each.condition, each.question.sample_idx): len(each.answer.documents) for each in found if each.answer}
    assert sizes[("single", 0)] == sizes[("curated", 0)]
    assert sizes[("single", 1)] == sizes[("curated", 1)] == 1
    assert sizes[("closed", 0)] == 0


def test_bounds_decide_what_is_shown_and_what_was_left_out_is_known(tmp_path: Path) -> None:
    asked = (msgspec.structs.replace(WHERE, delivered=tuple(UnitId(each.doc_id) for each in CORPUS)),)
    (found,) = answered(working(Server(reads), questions=asked, conditions=["curated"], documents=2), tmp_path)
    assert found.answer
    assert (found.answer.documents, found.answer.left_out) == (("ada", "byron"), 3)
    (found,) = answered(working(Server(reads), questions=asked, conditions=["single"], single_size=1), tmp_path)
    assert found.answer
    assert found.answer.documents == ("byron",)


def test_what_is_there_is_not_asked_again(tmp_path: Path) -> None:
    first, judge = Server(reads), Server(judges)
    before = answered(working(first, judge), tmp_path)
    again, judge_again = Server(reads), Server(judges)
    assert texts(answered(working(again, judge_again), tmp_path)) == texts(before)
    assert (again.asked, judge_again.asked) == ([], [])
    assert len((tmp_path / ANSWERS).read_bytes().splitlines()) == len(first.asked) + len(judge.asked) == 16
    more = Server(reads)
    answered(working(more, documents=1), tmp_path)
    assert len(more.asked) == 2  # the prompts of the first sample that held two documents


def test_a_stopped_run_goes_on_with_what_is_missing(tmp_path: Path) -> None:
    stopping = Server(lambda system, user: reads(system, user))

    async def stopped() -> None:
        with ReplyStore(tmp_path) as store:
            task = asyncio.create_task(answer_all(working(stopping), store, 1))
            while len(store.kept) < 3:
                await asyncio.sleep(0)
            task.cancel()
            await task

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(stopped())
    with (tmp_path / ANSWERS).open("ab") as file:
        file.write(b'{"role": "answ')  # a crash cut the last line
    rest = Server(reads)
    whole = answered(working(rest), tmp_path)
    assert len(rest.asked) == 5
    assert texts(whole) == texts(answered(working(Server(reads)), tmp_path / "uninterrupted"))


def test_an_answer_that_does_not_come_is_missing_and_comes_later(tmp_path: Path) -> None:
    def failing(system: str, user: str) -> str | HarnessError:
        return InfrastructureFault("down (3 attempts)") if "Engine?" in user else reads(system, user)

    summary = summarise_answers(answered(working(Server(failing)), tmp_path), resamples=100)
    assert (summary["missing"], summary["faults"]) == (3, ["down (3 attempts)"] * 3)
    curated = summary["conditions"]["curated"]
    assert (curated["tasks"], curated["answers"], curated["missing"]) == (1, 2, 1)
    assert curated["exact_match"]["mean"] == 0.5  # of the task that was answered; the other is no 0
    assert {pair["tasks"] for pair in summary["pairs"]} == {1}
    rest = Server(reads)
    assert summarise_answers(answered(working(rest), tmp_path), resamples=100)["missing"] == 0
    assert len(rest.asked) == 3


def test_what_the_user_must_mend_ends_the_run_at_once(tmp_path: Path) -> None:
    server = Server(lambda *_: UsageError("401: wrong key"))
    with pytest.raises(UsageError, match="wrong key"):
        answered(working(server), tmp_path, places=2)
    assert len(server.asked) <= 2


def test_no_more_are_asked_at_a_time_than_there_are_places(tmp_path: Path) -> None:
    class Counting(Server):
        inside = most = 0

        async def post(self, path: str, body: Any, kind: type[Any]) -> Any:
            self.inside += 1
            self.most = max(self.most, self.inside)
            await asyncio.sleep(0.001)
            self.inside -= 1
            return await super().post(path, body, kind)

    server = Counting(reads)
    answered(working(server), tmp_path, places=3)
    assert server.most == 3


def test_verdicts_that_are_none_are_counted_and_no_score(tmp_path: Path) -> None:
    def unsure(system: str, user: str) -> str:
        return "It depends." if "Babbage" in user else judges(system, user)

    found = answered(working(Server(reads), Server(unsure)), tmp_path)
    curated = summarise_answers(found, resamples=100)["conditions"]["curated"]
    assert curated["unparseable"] == 1
    assert curated["judge"]["mean"] == 0.5
    assert curated["exact_match"]["mean"] == 0.75


def test_a_judge_that_fails_leaves_the_answer(tmp_path: Path) -> None:
    judge = Server(lambda *_: InfrastructureFault("busy"))
    summary = summarise_answers(answered(working(Server(reads), judge), tmp_path), resamples=100)
    assert (summary["missing"], summary["missing_verdicts"]) == (0, 8)
    assert summary["conditions"]["curated"]["judge"] == {"mean": None, "low": None, "high": None}
    assert [pair["metric"] for pair in summary["pairs"]] == ["exact_match"] * 3 + ["f1"] * 3


def test_samples_are_averaged_before_tasks_and_conditions_compared_on_equal_tasks(tmp_path: Path) -> None:
    server = Server(reads, usage={"prompt_tokens": 100, "completion_tokens": 2})
    summary = summarise_answers(answered(working(server), tmp_path), resamples=200)
    assert {name: row["exact_match"]["mean"] for name, row in summary["conditions"].items()} == {
        "closed": 0.0,
        "single": 1.0,
        "curated": 0.75,
    }
    pairs = {(pair["a"], pair["b"]): pair for pair in summary["pairs"] if pair["metric"] == "exact_match"}
    assert pairs[("curated", "single")]["difference"]["mean"] == -0.25
    assert pairs[("curated", "closed")]["p"] == pytest.approx(0.5)  # two tasks, both better: 2 of 4 signs
    assert all(pair["p_holm"] >= pair["p"] for pair in pairs.values())
    assert summary["conditions"]["curated"]["prompt_tokens"] == 300
    assert summary["conditions"]["closed"]["output_tokens"] == 4


def test_the_summary_does_not_depend_on_the_order_in_which_answers_came(tmp_path: Path) -> None:
    asked = [msgspec.structs.replace(WHERE, task_id=f"t{n}", golds=("Missolonghi" + " x" * n,)) for n in range(7)]
    found = answered(working(Server(reads), Server(judges), questions=asked), tmp_path)
    assert summarise_answers(found, resamples=100) == summarise_answers(found[::-1], resamples=100)
    assert as_csv(found) == as_csv(found[::-1])


def test_the_table_has_a_line_for_each_task_and_condition(tmp_path: Path) -> None:
    lines = list(csv.DictReader(io.StringIO(as_csv(answered(working(Server(reads), Server(judges)), tmp_path)))))
    assert len(lines) == 6
    where = next(line for line in lines if (line["task_id"], line["condition"]) == ("where", "curated"))
    assert where == {
        "task_id": "where",
        "condition": "curated",
        "answers": "2",
        "exact_match": "0.5",
        "f1": "0.5",
        "judge": "0.5",
        "answer": "Missolonghi | no idea",
        "right": "Missolonghi",
    }


def test_secret_answers_are_not_in_the_table(tmp_path: Path) -> None:
    table = as_csv(answered(working(Server(lambda *_: "no idea"), None), tmp_path), secret=True)
    assert "no idea" in table
    assert "Missolonghi" not in table


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    (tmp_path / ANSWERS).write_text('{"task_id": 3}\n')
    with pytest.raises(SchemaError, match=r"answers\.jsonl:1: not an answer"):
        ReplyStore(tmp_path)
