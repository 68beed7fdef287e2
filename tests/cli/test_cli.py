"""The command line as a user meets it, in real folders; what signals do is tried in real processes."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness1.config import Config
from harness1.data.open import open_source
from harness1.retrieval.build import build_index
from harness1.runs.journal import read_episodes
from tests.cli.commands import Command, interrupted

LONG = ["eval", "world:2000", "--limit", "200", "--cache", "cache", "--json"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder with an index of a small world."""
    path = tmp_path_factory.mktemp("cli")
    build_index(open_source("world:60").documents(), path / "world", Config().index)
    (path / "damaged").mkdir()
    (path / "damaged" / "stage.json").write_text('{"verb": "run", "inputs": {}, "outputs": {"index": "x"}}')
    return path


def test_a_search_prints_one_json_object_and_records_the_episode(harness1: Command, home: Path) -> None:
    found = harness1("search", "Who founded the company?", "--index", "world", "--json", "--out", "one")
    result = json.loads(found.out)
    assert (found.code, result["status"]) == (0, "completed")
    assert [entry["rank"] for entry in result["curated"]] == list(range(1, len(result["curated"]) + 1))
    assert [entry["path"] for entry in result["curated"]] == [None] * len(result["curated"])
    assert next(iter(read_episodes(home / "one"))).episode_id == result["episode_id"]
    assert json.loads(harness1("replay", "one", "--live", "--json").out)["differences"] == []


def test_a_live_search_shows_actions_the_set_and_where_the_record_lies(harness1: Command) -> None:
    shown = harness1("search", "Who founded the company?", "--index", "world", "--out", "shown").out
    for said in ("turn 1 search_corpus", "budget", "fair", "recorded in shown; to look at it: harness1 view shown"):
        assert said in shown
    nothing = harness1("search", "zyxwv", "--index", "world", "--out", "nothing").out
    assert "No document was found: ask in words that the documents use." in nothing


def test_a_search_says_that_nothing_convincing_was_found_and_shows_the_nearest(harness1: Command, home: Path) -> None:
    question = "Which handball team of Flensburg won the national cup for juniors in spring?"
    (home / "teams").mkdir()
    for number in range(8):
        (home / "teams" / f"{number}.txt").write_text(f"Report {number}: the spring of the door is made in one team.")
    harness1("index", "teams", "--out", "teams.index")
    shown = harness1("search", question, "--index", "teams.index", "--out", "far")
    assert "Nothing convincing was found; the nearest of 8 documents:" in shown.out
    assert (shown.code, shown.out.count(str(home / "teams"))) == (0, 3)
    result = json.loads(harness1("search", question, "--index", "teams.index", "--json", "--out", "far").out)
    assert (result["convincing"], result["message"]) == (False, "Nothing convincing was found.")
    assert len(result["curated"]) == 8, "the nearest are there to be had"
    assert {each["tag"] for each in result["curated"]} == {"fair"}
    near = json.loads(harness1("search", "Report 5: the spring of the door", "--index", "teams.index", "--json").out)
    assert (near["convincing"], near["message"]) == (True, None)
    assert near["curated"][0]["confidence"] > max(each["confidence"] for each in result["curated"])
    asked = harness1("ask", question, "--index", "teams.index").out.splitlines()
    assert asked[1] == "Nothing convincing was found; the nearest sentences:"
    assert asked[-1] == "The passages do not suffice for an answer."


def test_searches_share_a_folder_only_under_one_configuration(harness1: Command) -> None:
    def run_of(*extra: str) -> str:
        found = harness1("search", "Who founded it?", "--index", "world", "--json", *extra)
        return str(json.loads(found.out)["run"]) if found.code == 0 else found.err

    assert run_of() == run_of() != run_of("--set", "env.max_turns=5")
    assert harness1("replay", run_of()).code == 0
    run_of("--out", "fixed")
    assert "another run" in run_of("--out", "fixed", "--set", "env.max_turns=5")


@pytest.mark.slow
def test_an_interrupted_evaluation_stops_with_130_and_is_resumed(harness1: Command, home: Path) -> None:
    record = home / "cut" / "episodes.jsonl"
    code, complaint = interrupted(*LONG, "--out", "cut", cwd=home, record=record, least=1)
    assert code == 130, complaint
    assert "Traceback" not in complaint
    assert "interrupted; the same command continues where it stopped" in complaint
    assert 0 < sum(1 for _ in read_episodes(home / "cut")) < 200
    assert json.loads((home / "cut" / "stage.json").read_text())["status"] == "interrupted"
    assert json.loads(harness1(*LONG, "--out", "cut").out)["tasks"] == 200
    assert len({episode.key for episode in read_episodes(home / "cut")}) == 200


@pytest.mark.slow
def test_a_killed_evaluation_leaves_no_process_behind(home: Path) -> None:
    command = [sys.executable, "-m", "harness1", *LONG, "--out", "killed"]
    process = subprocess.Popen(command, cwd=home, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    episodes, deadline = home / "killed" / "episodes.jsonl", time.monotonic() + 60
    while not (episodes.is_file() and episodes.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.05)
    workers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.kill()
    process.wait()
    assert workers
    while any(Path(f"/proc/{worker}").exists() for worker in workers) and time.monotonic() < deadline + 20:
        time.sleep(0.05)
    assert not [worker for worker in workers if Path(f"/proc/{worker}").exists()]


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["index", "world:3", "--out", "x"], "20"),
        (["search", " ", "--index", "world"], "empty"),
        (["search", "q", "--index", "nowhere"], "nowhere"),
        (["search", "q", "--index", "world", "--policy", "psychic"], "scripted"),
        (["search", "q", "--index", "world", "--policy", "oracle"], "the oracle needs gold"),
        (["search", "q", "--index", "world", "--set", "index.unit=chunk"], "index settings"),
        (["eval", "world:60", "--split", "exam", "--cache", "cache"], "test"),
        (["eval", "world:60", "--policy", "scripted:31", "--cache", "cache"], "scripted:31"),
        (["eval", "world:60", "--cache", "cache", "--out", "world", "--force"], "holds no run"),
        (["replay", "nowhere"], "nowhere"),
        *(
            ([*verb.split(), "x" * 300], "xxx...: File name too long")
            for verb in ("view", "eval", "recipe run --out o")
        ),
        (["replay", "damaged"], "stage.json"),
        (["config", "show", "--set", "nonsense"], "a.b=value"),
        (["config", "show", "--set", "env.max_turn=3"], "max_turn"),
        (["models", "convert", "x.gguf", "--out", "y", "--layers", "one"], "write numbers with commas"),
    ],
)
def test_wrong_use_exits_with_2_and_names_the_cause(harness1: Command, arguments: list[str], word: str) -> None:
    failed = harness1(*arguments)
    assert (failed.code, word in failed.err, "Traceback" in failed.err) == (2, True, False), failed.err


def test_a_torn_last_line_is_told(harness1: Command, home: Path) -> None:
    search = ("search", "Who founded it?", "--index", "world", "--out", "torn")
    harness1(*search)
    with (home / "torn" / "episodes.jsonl").open("ab") as record:
        record.write(b'{"episode')
    assert "torn last line (9 bytes)" in harness1("replay", "torn").err
    assert "torn last line" in harness1(*search).err
    assert "torn" not in harness1("replay", "torn").err


def test_the_configuration_is_printed_with_overrides_and_reads_back(harness1: Command, home: Path) -> None:
    shown = harness1("config", "show", "--set", "env.max_turns=4").out
    assert shown.startswith("# env.max_turns = 4, by default 40\n")
    (home / "mine.toml").write_text(shown)
    assert harness1("config", "show", "--config", "mine.toml").out == shown
    assert json.loads(harness1("config", "show", "--json").out).keys() == {"config", "hashes", "plugins"}
    assert "micro: " in harness1("config", "list").out


def test_the_demo_answers_its_question_from_real_documentation(harness1: Command) -> None:
    shown = harness1("demo")
    assert (shown.code, "3 of 3 were found" in shown.out) == (0, True), shown.err
    assert harness1("replay", "runs/demo/run").code == 0


def test_own_code_cannot_end_a_command_in_silence(harness1: Command, home: Path) -> None:
    (home / "odd.py").write_text("class T:\n    def __getattr__(self, name): raise SystemExit(0)\nf = T()")
    ended = harness1("eval", "world:60", "--limit", "1", "--out", "ends", "--tool", "odd.py:f")
    assert (ended.code, "SystemExit" in ended.err) == (2, True)
