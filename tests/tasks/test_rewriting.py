"""Questions that a language model writes anew: taken where they ask the same, asked once, and counted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness1.errors import InfrastructureFault
from harness1.http.model_endpoint import Completion, Messages
from harness1.records import DocId, Gold, Task
from harness1.tasks.questions import REPLIES, SYSTEM, QuestionWriter, fault_of
from tests.cli.commands import Command, command_in_process
from tests.serving import imitating

TEMPLATE = "In which year was the director of Harbour Lights born?"
TITLES = {DocId("d0"): "Harbour Lights", DocId("d1"): "Tom Arkwright"}


def task(query: str = TEMPLATE, name: str = "a", kind: str = "bridge") -> Task:
    return Task(name, query, "train", Gold({DocId("d0"): 1, DocId("d1"): 1}, answers=("1921",)), {"kind": kind})


class Writing:
    """Answers with what a function makes of the template; fails after some answers."""

    def __init__(self, says: Callable[[str], str], answers: int = 99) -> None:
        self.says, self.answers, self.asked = says, answers, list[str]()

    async def complete(self, messages: Messages) -> Completion:
        assert messages[0]["content"] == SYSTEM
        if len(self.asked) == self.answers:
            raise InfrastructureFault("the server is away")
        self.asked.append(messages[1]["content"])
        return Completion(self.says(self.asked[-1]), "stop", 100, 10)


@pytest.mark.parametrize(
    ("question", "fault"),
    [
        ("When was the director who made Harbour Lights born?", ""),
        ("", "empty"),
        ("When was ____, the director of Harbour Lights, born?", "empty"),
        (f"When was the director of Harbour Lights born? {'Really? ' * 40}", "too long"),
        ("Was the director of Harbour Lights born in 1921?", "tells the answer"),
        ("When was Tom Arkwright, the director of Harbour Lights, born?", "names gold"),
        ("When was the director born?", "lost a name"),
        ("When was the director of the 1962 Harbour Lights born?", "changed a figure"),
        ("Harbour Lights?", "lost its words"),
    ],
)
def test_a_question_that_asks_something_else_is_refused(question: str, fault: str) -> None:
    assert fault_of(question, task(), TITLES) == fault


def test_a_claim_stays_what_it_claims() -> None:
    claim = task("Is this true? The harbour lights were never lit by Tom Arkwright.", kind="claim")
    assert fault_of("Were the harbour lights never lit by Tom Arkwright?", claim, TITLES) == ""
    assert fault_of("Were the harbour lights lit by Tom Arkwright?", claim, TITLES) == "changed a claim"


def test_a_question_is_taken_with_its_origin_and_the_template_is_kept_where_it_fails(tmp_path: Path) -> None:
    other = task("In which year was the writer of Harbour Lights born?", "b")
    model = Writing(lambda asked: "When was the director of Harbour Lights born?" if "director" in asked else "1921")
    counts: list[tuple[int, int, int]] = []
    (first, second), written = QuestionWriter("m", model).rewrite(
        [task(), other], TITLES, tmp_path, lambda *each: counts.append(each)
    )
    assert first.query == "When was the director of Harbour Lights born?"
    assert (first.metadata["origin"], first.metadata["template"]) == ("m", TEMPLATE)
    assert second == other
    assert (written.written, written.kept) == (1, {"tells the answer": 1})
    assert (written.prompt_tokens, written.output_tokens) == (200, 20)
    assert counts == [(1, 2, 110), (2, 2, 220)]
    assert all("1921" not in asked for asked in model.asked)


def test_what_was_answered_before_a_stop_is_not_asked_again(tmp_path: Path) -> None:
    tasks = [task(f"In which year was the director of Harbour Lights {place} born?", str(place)) for place in range(6)]
    stopped = Writing(lambda asked: asked, answers=4)
    with pytest.raises(InfrastructureFault, match="left 2 of 6 requests unanswered"):
        QuestionWriter("m", stopped).rewrite(tasks, TITLES, tmp_path)
    rest = Writing(lambda asked: asked)
    told, written = QuestionWriter("m", rest).rewrite(tasks, TITLES, tmp_path)
    assert sorted([*stopped.asked, *rest.asked]) == [each.query for each in tasks]
    assert (len(told), written.written) == (6, 6)
    other = Writing(lambda asked: asked)
    QuestionWriter("n", other).rewrite(tasks, TITLES, tmp_path)
    assert len(other.asked) == 6


harness1 = pytest.fixture(command_in_process)


def test_a_served_model_writes_the_questions_of_a_folder_once(tmp_path: Path, harness1: Command) -> None:
    folder, out = tmp_path / "docs", tmp_path / "tasks"
    folder.mkdir()
    for number, film in enumerate(("The Quiet Bay", "Harbour Lights")):
        text = f"# {film}\n\n{film} is a 19{number + 5}1 drama film directed by Ada Fenwick.\n"
        (folder / f"{number}.md").write_text(text)
    asked: list[str] = []

    def answer(method: str, path: str, body: bytes) -> tuple[int, bytes]:
        asked.append(json.loads(body)["messages"][1]["content"])
        said: dict[str, Any] = {"choices": [{"message": {"content": f"Tell me: {asked[-1].replace('____', 'what')}"}}]}
        return 200, json.dumps(said | {"usage": {"prompt_tokens": 7, "completion_tokens": 3}}).encode()

    with imitating(answer) as url:
        spec = f"openai:m@{url}/v1"
        command = ("tasks", "make", str(folder), "--out", str(out), "--cache", str(tmp_path / "cache"), "--count", "4")
        made = harness1(*command, "--writer", spec, "--json")
        again = harness1(*command, "--writer", spec)
    assert made.code == again.code == 0, made
    written = json.loads(made.out)["writer"]
    assert written["written"] == len(asked) == len((out / REPLIES).read_text().splitlines())
    assert (written["prompt_tokens"], written["output_tokens"]) == (7 * len(asked), 3 * len(asked))
    questions = [json.loads(line)["text"] for line in (out / "queries.jsonl").read_text().splitlines()]
    assert all(each.startswith("Tell me: ") for each in questions)
    assert "it differs in writer" in harness1(*command).err
