"""Text from outside is shown, never obeyed: nothing in it is markup, and no character of it acts on the terminal."""

import ast
import io
import json
import re
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.panel import Panel
from rich.progress import Progress, TextColumn
from rich.table import Table
from rich.text import Text

from harness1.cli.evaluate import print_answers
from harness1.cli.printing import print_json, program, put, say
from harness1.cli.progress import Terminal
from harness1.cli.search import AGAIN, Watcher, show_result
from harness1.episodes.rollout import rollout
from harness1.plain import printable
from harness1.policy.policy import Decision
from harness1.policy.scripted import RuleSession
from harness1.records import Task, ToolCall
from tests.cli.commands import Command
from tests.support import END, Script, chunk, curate, make_env, run, search

PACKAGE = Path(__file__).parent.parent.parent / "harness1"
OUTPUT = {PACKAGE / "cli" / "printing.py", PACKAGE / "cli" / "terminal.py"}
"""The only files that write to a terminal."""
HOSTILE = "[/x] [red]a[/] \x1b]0;owned\x07 \x1b[2J \0 \x9b31m \u202egnp.exe \u2028 \u200b \ud800 \U000e0041 :smile: é"


def acting(text: str) -> set[str]:
    """The characters of a text that a terminal would act on, or that cannot be seen."""
    kinds = ("Cc", "Cf", "Cs", "Zl", "Zp")
    return {each for each in text if unicodedata.category(each) in kinds and each not in "\n\t"}


def writers_in(path: Path) -> list[str]:
    """The calls in a file that write past the one place, or that read text as markup."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rich"):
            found += [name.name for name in node.names if name.name in ("print", "print_json", "escape")]
        if isinstance(node, ast.Attribute) and node.attr in ("stdout", "stderr", "__stdout__", "__stderr__"):
            found += [node.attr] * (isinstance(node.value, ast.Name) and node.value.id == "sys")
        if isinstance(node, ast.Attribute) and node.attr in ("from_markup", "from_ansi", "echo", "secho"):
            found.append(node.attr)
        if isinstance(node, ast.Call):
            name = node.func.id if isinstance(node.func, ast.Name) else ""
            given = {word.arg: word.value for word in node.keywords}
            markup = given.get("markup")
            found += [name] * (name in ("print", "Console", "input"))
            found += ["markup"] * (isinstance(markup, ast.Constant) and markup.value is True)
            found += ["Progress"] * (name in ("Progress", "track", "Live", "Status") and "console" not in given)
    return found


def test_all_output_goes_through_one_place() -> None:
    allowed = {PACKAGE / "cli" / "main.py": ["stderr"]}  # which closes it
    files = [path for path in PACKAGE.rglob("*.py") if path not in OUTPUT]
    found = {path: [name for name in writers_in(path) if name not in allowed.get(path, ())] for path in files}
    assert {path: names for path, names in found.items() if names} == {}


def test_the_search_for_writers_finds_them(tmp_path: Path) -> None:
    lines = "print(1)|from rich import print|Console()|sys.stdout.write('a')|Text.from_markup('a')|Progress()"
    for line in f"{lines}|console.print('a', markup=True)".split("|"):
        (tmp_path / "a.py").write_text(line)
        assert writers_in(tmp_path / "a.py"), line


@given(st.text(st.characters(), max_size=40))
def test_whatever_acts_on_a_terminal_becomes_an_escape(text: str) -> None:
    shown = printable(text)
    assert not acting(shown)
    assert printable(shown) == shown
    if not acting(text):
        assert shown == text
    if not any(unicodedata.category(each) == "Cs" for each in text):
        encoded = printable(json.dumps(text, ensure_ascii=False))
        assert json.loads(encoded) == text


def test_escapes_name_the_character() -> None:
    assert printable("a\x1b[2J\u202e\0\x9b\ud800\U000e0041\r\n\té") == (
        "a\\u001b[2J\\u202e\\u0000\\u009b\\ud800\\udb40\\udc41\\u000d\n\té"
    )


def test_lines_and_json_hold_no_acting_characters(capsys: pytest.CaptureFixture[str]) -> None:
    text = HOSTILE.replace("\ud800", "")
    put(HOSTILE)
    say(HOSTILE)
    print_json({"title": text, text: 1})
    out, err = capsys.readouterr()
    assert not acting(out + err)
    assert json.loads(out.splitlines()[1]) == {"title": text, text: 1}
    assert "[/x] [red]a[/]" in out
    assert "[/x] [red]a[/]" in err
    say("a\nharness1: forged")
    assert capsys.readouterr().err == "harness1: a\\u000aharness1: forged\n"


def terminal(width: int = 400) -> tuple[Terminal, io.StringIO]:
    """A terminal that keeps what is written to it."""
    made, file = Terminal(width=width), io.StringIO()
    made.file = file
    return made, file


def test_tables_panels_and_bars_hold_no_acting_characters() -> None:
    console, file = terminal()
    table = Table(title=HOSTILE)
    table.add_column(HOSTILE)
    table.add_row(HOSTILE)
    table.add_row(Text(HOSTILE))
    bar = Progress(TextColumn("{task.description}", markup=False), console=console)
    bar.add_task(HOSTILE)
    console.print(table, Panel(Text(HOSTILE), title=Text(HOSTILE)), HOSTILE, bar.get_renderable())
    console.print(HOSTILE, style="bold")
    assert not acting(file.getvalue())
    assert file.getvalue().count("[red]a[/]") == 9
    assert ":smile:" in file.getvalue()


class Hostile:
    """Sends names and arguments that a terminal would obey."""

    name = hash = "hostile"

    def open(self, task: Task, seed: int) -> RuleSession:
        turns = [ToolCall(HOSTILE, {"query": HOSTILE}), search("river"), curate(add_ids=["D1", HOSTILE])]
        turns += [ToolCall("verify", {"doc_ids": ["D1"], "claim": f"The river {HOSTILE}"}), ToolCall("end_search", {})]
        return RuleSession(lambda at, context: Decision((turns[at],), HOSTILE))


def test_a_live_episode_shows_hostile_text_and_goes_on() -> None:
    text = HOSTILE.replace("\ud800", "")
    chunks = [chunk(f"d{text}", f"river {text}", f"river {text}" * 9), chunk("e", f"river {text}")]
    env = make_env(chunks=chunks)
    console, file = terminal()
    episode = run(rollout(env, Hostile(), Task("t", text), on_step=Watcher(env, console)))
    show_result(env, episode, console, lambda _: None)
    assert not acting(file.getvalue())
    assert "turn 1 [/x] [red]a[/]" in file.getvalue()
    assert "end_search" in file.getvalue()


def test_an_argument_that_is_not_utf8_is_refused(harness1: Command) -> None:
    ended = harness1("view", "a", "--out", "\udcff.html")
    assert (ended.code, ended.err) == (2, "harness1: the argument \\udcff.html is not UTF-8\n")


def test_errors_of_wrong_use_hold_no_acting_characters(harness1: Command) -> None:
    for words in (
        (HOSTILE,),
        ("rl", HOSTILE),
        ("eval", HOSTILE),
        ("replay", HOSTILE, HOSTILE),
        ("view", f"--{HOSTILE}"),
    ):
        ended = harness1(*(word.replace("\0", "").replace("\ud800", "") for word in words))
        assert (ended.code, acting(ended.out + ended.err)) == (2, set()), words
        assert "red" in ended.err


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_delivered_document_is_shown_by_its_whole_path_or_id_on_a_line_of_its_own(is_terminal: bool) -> None:
    deep = "notes/" + "rivers-of-the-world/" * 8 + "danube.md"
    env = make_env(chunks=[chunk(deep, "the river " * 30, "Rivers"), chunk("rhine.txt", "a river")])
    file = io.StringIO()
    console = Terminal(width=80)
    console.file, console._force_terminal = file, is_terminal
    policy = Script(search("river"), curate(add_ids=["D1", "D2"]))
    files = {deep: Path("/home/ada") / deep}
    show_result(env, run(rollout(env, policy, Task("t", "river"))), console, files.get)
    lines = [re.sub(r"\x1b\[[\d;]*m", "", line) for line in file.getvalue().splitlines()]
    assert f"/home/ada/{deep}" in lines
    assert "rhine.txt" in lines
    below = lines[lines.index(f"/home/ada/{deep}") + 1 :]
    assert below[0].endswith("Rivers")
    assert (len(below[1]) == 80) == is_terminal
    assert below[1].endswith("…") == is_terminal


def test_the_program_is_named_as_the_shell_finds_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    installed = tmp_path / "bin" / "harness1"
    installed.parent.mkdir()
    installed.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sys.argv", [str(installed)])
    assert program() == str(installed)
    monkeypatch.setenv("PATH", str(installed.parent))
    assert program() == "harness1"
    monkeypatch.setattr("sys.argv", [str(PACKAGE / "__main__.py")])
    assert program() == "harness1"


def summary(run: str, model: str) -> dict[str, Any]:
    none = {"mean": None, "low": None, "high": None}
    row = {"exact_match": {"mean": 0.25, "low": 0.125, "high": 0.5}, "f1": none, "judge": none}
    row |= {"tasks": 4, "documents": 3.0, "empty": 0, "cut": 2, "unparseable": 0, "left_out": 0}
    pair = {"a": "curated", "b": "closed", "metric": "exact_match", "p": 0.5, "p_holm": 1.0}
    counts = dict.fromkeys(("missing", "missing_verdicts", "without_answers", "broken_episodes"), 0)
    return {
        "answerer": {"model": model},
        "run": run,
        "conditions": {"curated": row},
        "pairs": [pair | {"difference": {"mean": 0.125, "low": -0.25, "high": 0.5}}],
        "tasks": 4,
        **counts,
    }


def test_differences_have_a_sign_and_names_are_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    print_answers(summary("runs/n[/x]:tea:", "openai:m[b]@http://h/v1"), Path("out[/x]:tea:"))
    shown = capsys.readouterr().out
    assert shown.startswith("openai:m[b]@http://h/v1 on runs/n[/x]:tea:\n")
    assert all(said in shown for said in (" 0.125 to 0.500 ", " +0.125 ", " -0.250 to +0.500 "))
    assert "4 tasks; 2 answers cut off. Everything is in out[/x]:tea:." in shown


LONG = "Which of the " + "extraordinarily " * 30 + "old castles stands on the river?"


def shown(*actions: ToolCall) -> str:
    console, file = terminal(2000)
    chunks = [chunk(f"d{at}", f"A castle on the river {at}.", f"Castle {at}") for at in range(30)]
    env = make_env(None, chunks)
    run(rollout(env, Script(*actions), Task("t", "Which castle?", "test"), on_step=Watcher(env, console)))
    return file.getvalue()


def test_a_long_query_is_cut_between_words_and_a_repeated_call_is_not_repeated() -> None:
    actions = (search(LONG), search("castle river"), search("castle river"), search("castle"), END)
    turns = [line.split(" ", 3)[3] for line in shown(*actions).splitlines() if line.startswith("turn")]
    assert turns[0].endswith(" extraordinarily ...")
    assert len(turns[0]) < len(LONG)
    assert turns[1:4] == ["castle river", AGAIN, "castle"]
