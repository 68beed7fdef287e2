"""`harness1 ask` with a model that streams, with none, and after another question."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import harness1 as h
from tests.cli.commands import Command, run_in
from tests.support import Ask, replying

pytestmark = pytest.mark.service

NOTES = {
    "tea.md": "# Tea\n\nGreen tea is brewed at 80 degrees.\n\n## Black tea\n\nIt is brewed at 95 degrees.\n",
    "cats.md": "# Cats\n\nCats sleep for most of the day.\n\u202eevil\x1b[31m\n",
    "mail.mbox": "From a Sat Jan  3 01:05:34 2026\nSubject: Soup\n\nSoup boils.\n\n"
    "From b Sat Jan  3 01:05:34 2026\nSubject: Rice\n\nRice simmers at 90 degrees.\n",
    "byron.md": "# Lord Byron\n\nHe died in Missolonghi in 1824 of a fever.\n",
}
SAID = 'Green tea takes 80 degrees [1: "brewed at 80 degrees"]. It is \x1b[2J blue [1: "it is blue"].'


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder with an index of notes."""
    folder = tmp_path_factory.mktemp("ask")
    (folder / "notes").mkdir()
    for name, text in NOTES.items():
        (folder / "notes" / name).write_text(text)
    run_in(folder, "index", "notes", "--out", "index")
    return folder


def streaming(said: str, asked: list[bytes]) -> object:
    """A server that streams one answer, word by word."""

    def reply(got: Ask) -> tuple[int, dict[str, str], bytes]:
        asked.append(got.body)
        words = [{"choices": [{"delta": {"content": f"{word} "}}]} for word in said.split(" ")]
        events = [*words, {"choices": [{"delta": {}, "finish_reason": "stop"}]}]
        body = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
        return 200, {"Content-Type": "text/event-stream"}, body.encode()

    return replying(reply)


def test_an_answer_is_written_then_its_passages_with_what_is_not_found_in_them(harness1: Command, home: Path) -> None:
    asked: list[bytes] = []
    with streaming(SAID, asked) as url:
        ended = harness1("ask", "How hot is green tea brewed?", "--index", "index", "--answerer", f"openai:m@{url}/v1")
    lines = ended.out.splitlines()
    assert lines[0] == SAID.replace("\x1b", "\\u001b")
    source = ["     [1] Tea", str(home / "notes" / "tea.md")]
    first = ["  1  Green tea takes 80 degrees.", *source, '     "brewed at 80 degrees"']
    assert lines[2:] == [*first, "  2  It is \\u001b[2J blue.", *source, '     "it is blue" NOT FOUND there']
    assert json.loads(asked[0])["stream"]
    assert "\x1b" not in ended.out


def test_without_a_model_the_best_sentences_come_with_their_files_and_sections(harness1: Command, home: Path) -> None:
    ended = harness1("ask", "At how many degrees is black tea brewed?", "--index", "index", "--out", "plain")
    lines = ended.out.splitlines()
    assert lines[1:4] == [
        "  1  It is brewed at 95 degrees.",
        "     [1] Tea › Black tea",
        str(home / "notes" / "tea.md"),
    ]
    mail = harness1("ask", "At what degrees does rice simmer?", "--index", "index", "--out", "plain").out.splitlines()
    assert mail[1:4] == [
        "  1  Rice simmers at 90 degrees.",
        "     [1] mail › message 2",
        str(home / "notes" / "mail.mbox"),
    ]
    nothing = harness1("ask", "zyxwv", "--index", "index", "--out", "plain")
    assert "do not suffice" in nothing.out
    assert nothing.code == 0


def test_a_question_that_follows_sees_what_the_last_one_found(harness1: Command, home: Path) -> None:
    first = harness1("ask", "Where did Lord Byron die?", "--index", "index", "--json")
    then = harness1("ask", "When was that?", "--index", "index", "--json", "--follow")
    first, then = json.loads(first.out), json.loads(then.out)
    assert first["run"] == then["run"]
    assert then["question"] == "When was that? (Lord Byron)"
    assert then["passages"][0]["path"] == str(home / "notes" / "byron.md")
    lines = (home / first["run"] / "asked.jsonl").read_text().splitlines()
    assert [json.loads(line)["question"] for line in lines[-2:]] == [first["question"], then["question"]]
    assert str(home) not in "".join(lines), "paths of this machine are not kept"


def test_python_asks_too_and_an_answer_shows_itself(home: Path) -> None:
    said = 'He died in Missolonghi [1: "died in Missolonghi"].'
    with streaming(said, []) as url:
        answer = h.ask("Where did Lord Byron die?", home / "index", f"openai:m@{url}/v1", out=home / "py")
    assert str(answer) == "\n".join(
        [said, "  1  He died in Missolonghi.", "     [1] Lord Byron", "byron.md", '     "died in Missolonghi"']
    )
    assert answer.sufficient
    assert h.ask("When was that?", home / "index", follow=answer).question == "When was that? (Lord Byron)"


def test_what_cannot_be_asked_is_one_line(harness1: Command, home: Path) -> None:
    wrong = [(["", "--answerer", "x"], "empty"), (["q", "--answerer", "gpt"], "names no model")]
    for arguments, said in (*wrong, (["q", "--follow", "--out", "new"], "no answer to follow")):
        ended = harness1("ask", *arguments, "--index", "index")
        assert (ended.code, said in ended.err, ended.err.count("\n")) == (2, True, 1)
