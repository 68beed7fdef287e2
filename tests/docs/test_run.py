"""The commands of the README and the guides, run in the order of their page, each section in a folder of its own that
holds what its placeholders name."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness1.data import beir
from harness1.data.open import open_source
from tests.cli.commands import Command, command_in_process
from tests.data.benchmarks import official
from tests.docs.blocks import PAGES, ROOT, Block, blocks, commands
from tests.docs.test_commands import OWN, plain
from tests.viewer.recordings import save_student, write_recording

pytestmark = pytest.mark.docs

TABLE = tomllib.loads(Path(__file__).with_name("commands.toml").read_text())

MINE = '''
from harness1 import ToolCall

def lookup_price(ticker: str) -> str:
    """Return the last closing price of a stock."""
    return "12.30"

def brevity(case) -> float:
    return -len(case.curated) / 30

class MyPolicy:
    def act(self, context):
        return ToolCall("end_search", {"reasoning": "done"})

def search(query, count):
    return [{"id": "d1", "text": "The bridge was built in 1931."}][:count]
'''
"""What docs/own_code.md takes for granted."""


def sections(page: Path) -> Iterator[list[Block]]:
    starts = [at for at, line in enumerate(page.read_text().splitlines(), 1) if line.startswith("## ")]
    for first, last in zip([0, *starts], [*starts, 1 << 30], strict=True):
        yield [block for block in blocks(page) if first <= block.line < last]


def elsewhere(command: str) -> str | None:
    """The test that runs the verb of a command, if it is not run here."""
    return next((test for part, test in TABLE["elsewhere"].items() if part in command), None)


def needs_more(block: Block) -> str | None:
    """The test that runs a block of code whose package is not installed beside the tests, if it is such a block."""
    code = "\n".join(block.lines)
    return next((test for package, test in TABLE["packages"].items() if f"from {package}" in code), None)


def own(block: Block) -> list[str]:
    return [each for each in commands(block) if each.startswith("harness1 ")] if block.language == "" else []


SECTIONS = {
    f"{page.name}-{number}": found
    for page in PAGES
    for number, found in enumerate(sections(page))
    if any(elsewhere(command) is None for block in found for command in own(block))
}


@pytest.fixture
def harness1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return command_in_process(monkeypatch, capsys)


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("given")
    (folder / "mine.py").write_text(MINE)
    (folder / "SOURCE").mkdir()
    for number in range(10):
        (folder / "SOURCE" / f"note{number}.md").write_text(f"# Bridge {number}\n\nA question about bridge {number}.\n")
    (folder / "MORE").mkdir()
    (folder / "MORE" / "ID.md").write_text("# Another\n\nMore about bridges.\n")
    source = open_source("world:60")
    for place in ("DATASET", "cache/scifact"):
        beir.write(
            folder / place, source.documents(), [task for split in source.splits for task in source.tasks(split)]
        )
    write_recording(folder / "runs" / "agent", folder / "student", save_student(folder / "student"))
    shutil.copytree(ROOT / "examples" / "notes", folder / "examples" / "notes")
    official.HOTPOTQA.make(folder / "FOLDER")
    official.HOTPOTQA.make(folder / "hotpot")
    return folder


@pytest.mark.parametrize("section", SECTIONS)
def test_the_commands_of_a_section_run_in_their_order(
    section: str, given: Path, harness1: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(given, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for block in SECTIONS[section]:
        for command in own(block):
            if elsewhere(command):
                continue
            before = [each for each in TABLE["before"].get(command, ()) if not Path(plain(each)[-1]).exists()]
            for each in (*before, TABLE["instead"].get(command, command)):
                verb = " ".join(each.split()[:2])
                more = shlex.split(TABLE["quick"].get(verb, "")) if "--limit" not in each else []
                ended = harness1(*plain(each)[1:], *more)
                assert ended.code == 0, (each, ended.err)


@pytest.mark.parametrize("page", ["README.md", "docs/evaluation.md", "docs/integrations.md", "docs/policies.md"])
def test_the_code_of_a_page_runs(
    page: str, given: Path, harness1: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(given, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    for command in TABLE["code"][page]:
        assert harness1(*shlex.split(command)[1:]).code == 0
    found = [block for block in blocks(ROOT / page) if block.language == "python" and not needs_more(block)]
    assert found
    for block in found:  # as a file, because what is a user's own is found by its file
        Path("page.py").write_text("\n".join(block.lines))
        ended = subprocess.run([sys.executable, "page.py"], capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stderr


def test_all_code_is_run() -> None:
    """That of CONTRIBUTING.md by tests/test_contributing.py."""
    pages = {block.page for page in PAGES for block in blocks(page) if block.language == "python"}
    assert pages == {*TABLE["code"], "CONTRIBUTING.md"}


@pytest.mark.parametrize("kind", ["before", "instead", "elsewhere"])
def test_the_table_speaks_of_commands_that_are_there(kind: str) -> None:
    assert len([command for command in OWN if not elsewhere(command)]) > 30, "the parser of pages finds no commands"
    for entry, said in TABLE[kind].items():
        assert any(entry in command for command in OWN), entry
        if kind == "elsewhere":
            assert (ROOT / said).is_file(), said
            verb = re.match(r"harness1 ((?:sft|rl|serve|models|data)? ?\w+)", entry)
            text = (ROOT / said).read_text() + "".join(map(Path.read_text, (ROOT / "docs" / "tutorials").glob("*.md")))
            assert verb is None or verb[1].split()[-1] in text, entry


def test_code_that_is_run_elsewhere_is_there() -> None:
    code = [block for page in PAGES for block in blocks(page) if block.language == "python"]
    assert {needs_more(block) for block in code} == {None, *TABLE["packages"].values()}
    for package, test in TABLE["packages"].items():
        assert package in (ROOT / test).read_text()
