"""The command line as a user meets it, in real folders; what signals do is tried in real processes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness1.runs.journal import read_episodes
from tests.cli.commands import harness1
from tests.support import hear_interrupts

COMMAND = [sys.executable, "-m", "harness1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder with an index of a small world."""
    path = tmp_path_factory.mktemp("cli")
    made = harness1("index", "world:60", "--out", "world", "--json", cwd=path)
    assert made.returncode == 0, made.stderr
    assert json.loads(made.stdout)["documents"] == 60
    (path / "damaged").mkdir()
    (path / "damaged" / "stage.json").write_text('{"verb": "run", "inputs": {}, "outputs": {"index": "x"}}')
    return path


def test_a_search_prints_one_json_object_and_records_the_episode(folder: Path) -> None:
    found = harness1("search", "Who founded the company?", "--index", "world", "--json", "--out", "one", cwd=folder)
    result = json.loads(found.stdout)
    assert (found.returncode, result["status"]) == (0, "completed")
    assert [entry["rank"] for entry in result["curated"]] == list(range(1, len(result["curated"]) + 1))
    assert [entry["path"] for entry in result["curated"]] == [None] * len(result["curated"])
    assert next(iter(read_episodes(folder / "one"))).episode_id == result["episode_id"]
    replayed = harness1("replay", "one", "--live", "--json", cwd=folder)
    assert json.loads(replayed.stdout)["differences"] == []


def test_a_live_search_shows_actions_the_set_and_where_the_record_lies(folder: Path) -> None:
    shown = harness1("search", "Who founded the company?", "--index", "world", "--out", "shown", cwd=folder).stdout
    assert "turn 1 search_corpus" in shown
    assert "budget" in shown
    assert "fair" in shown
    assert "recorded in shown" in shown


def test_a_search_that_finds_nothing_says_what_to_do(folder: Path) -> None:
    shown = harness1("search", "zyxwv", "--index", "world", "--out", "nothing", cwd=folder).stdout
    assert "No document was found: ask in words that the documents use." in shown
    assert "to look at it: harness1 view nothing" in shown


def test_searches_share_a_folder_only_under_one_configuration(folder: Path) -> None:
    def run_of(*extra: str) -> str:
        found = harness1("search", "Who founded it?", "--index", "world", "--json", *extra, cwd=folder)
        return str(json.loads(found.stdout)["run"]) if found.returncode == 0 else found.stderr

    assert run_of() == run_of() != run_of("--set", "env.max_turns=5")
    assert harness1("replay", run_of(), cwd=folder).returncode == 0
    run_of("--out", "fixed")
    assert "another run" in run_of("--out", "fixed", "--set", "env.max_turns=5")


def test_an_evaluation_writes_metrics_and_is_not_done_twice(folder: Path) -> None:
    arguments = ["eval", "world:60", "--policy", "oracle", "--out", "run", "--cache", "cache", "--json"]
    first = harness1(*arguments, "--limit", "6", cwd=folder)
    metrics = json.loads(first.stdout)
    assert set(metrics["curated_recall"]) == {"mean", "low", "high"}
    assert (metrics["tasks"], metrics["failures"]["infra_error"]) == (6, 0)
    assert json.loads((folder / "run" / "metrics.json").read_text()) == metrics
    written = (folder / "run" / "episodes.jsonl").stat().st_mtime_ns
    assert json.loads(harness1(*arguments, "--limit", "6", cwd=folder).stdout) == metrics
    assert (folder / "run" / "episodes.jsonl").stat().st_mtime_ns == written


def test_another_evaluation_into_the_same_folder_is_refused_unless_forced(folder: Path) -> None:
    arguments = ["eval", "world:60", "--out", "mine", "--cache", "cache", "--limit", "2", "--json", "--policy"]
    assert harness1(*arguments, "single-shot", cwd=folder).returncode == 0
    other = harness1(*arguments, "random", cwd=folder)
    assert other.returncode == 2
    assert "policy" in other.stderr
    assert harness1(*arguments, "random", "--force", cwd=folder).returncode == 0


@pytest.mark.slow
def test_an_interrupted_evaluation_stops_with_130_and_is_resumed(folder: Path) -> None:
    arguments = ["eval", "world:2000", "--limit", "200", "--out", "cut", "--cache", "cache", "--json"]
    process = subprocess.Popen(
        [*COMMAND, *arguments],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=hear_interrupts,
    )
    episodes = folder / "cut" / "episodes.jsonl"
    deadline = time.monotonic() + 60
    while not (episodes.is_file() and episodes.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, complaint = process.communicate(timeout=60)
    assert process.returncode == 130, complaint
    assert "Traceback" not in complaint
    assert "interrupted; the same command continues where it stopped" in complaint
    finished = sum(1 for _ in read_episodes(folder / "cut"))
    assert 0 < finished < 200
    assert json.loads((folder / "cut" / "stage.json").read_text())["status"] == "interrupted"
    assert json.loads(harness1(*arguments, cwd=folder).stdout)["tasks"] == 200
    assert len({episode.key for episode in read_episodes(folder / "cut")}) == 200


@pytest.mark.slow
def test_a_killed_evaluation_leaves_no_process_behind(folder: Path) -> None:
    arguments = ["eval", "world:2000", "--out", "killed", "--cache", "cache", "--json"]
    process = subprocess.Popen([*COMMAND, *arguments], cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    episodes = folder / "killed" / "episodes.jsonl"
    deadline = time.monotonic() + 60
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
        (["index", "nowhere", "--out", "x"], "nowhere"),
        (["index", "world:3", "--out", "x"], "20"),
        (["search", " ", "--index", "world"], "empty"),
        (["search", "q", "--index", "nowhere"], "nowhere"),
        (["search", "q", "--index", "world", "--policy", "psychic"], "scripted"),
        (["search", "q", "--index", "world", "--set", "env.max_turn=3"], "max_turn"),
        (["eval", "world:60", "--split", "exam", "--cache", "cache"], "test"),
        (["replay", "nowhere"], "nowhere"),
        (["config", "show", "--set", "nonsense"], "a.b=value"),
        (["search", "q", "--index", "world", "--set", "index.unit=chunk"], "index settings"),
        (["eval", "world:60", "--policy", "scripted:31", "--cache", "cache"], "scripted:31"),
        (["eval", "world:60", "--cache", "cache", "--out", "world"], "holds no run"),
        (["eval", "world:60", "--cache", "cache", "--out", "world", "--force"], "holds no run"),
        (["replay", "damaged"], "stage.json"),
    ],
)
def test_wrong_use_exits_with_2_and_one_line_that_names_the_cause(
    folder: Path, arguments: list[str], word: str
) -> None:
    failed = harness1(*arguments, cwd=folder)
    assert failed.returncode == 2
    assert word in failed.stderr
    assert "Traceback" not in failed.stderr


def test_a_run_is_not_written_among_other_files(folder: Path) -> None:
    (folder / "mine.d").mkdir()
    (folder / "mine.d" / "letter.txt").write_text("Dear reader")
    for verb in (["eval", "world:60", "--cache", "cache"], ["search", "q", "--index", "world"]):
        assert "choose another --out" in harness1(*verb, "--out", "mine.d", cwd=folder).stderr
    assert [path.name for path in (folder / "mine.d").iterdir()] == ["letter.txt"]


def test_a_torn_last_line_is_told(folder: Path) -> None:
    harness1("search", "Who founded it?", "--index", "world", "--out", "torn", cwd=folder)
    with (folder / "torn" / "episodes.jsonl").open("ab") as record:
        record.write(b'{"episode')
    assert "torn last line (9 bytes)" in harness1("replay", "torn", cwd=folder).stderr
    assert (
        "torn last line" in harness1("search", "And who else?", "--index", "world", "--out", "torn", cwd=folder).stderr
    )
    assert "torn" not in harness1("replay", "torn", cwd=folder).stderr


def test_an_empty_corpus_is_refused_and_leaves_no_index(folder: Path) -> None:
    (folder / "empty.jsonl").write_text("")
    failed = harness1("index", "empty.jsonl", "--out", "none", cwd=folder)
    assert failed.returncode == 2
    assert "no documents" in failed.stderr
    assert harness1("search", "q", "--index", "none", cwd=folder).returncode == 2


def test_a_folder_of_notes_can_be_indexed_and_searched(folder: Path) -> None:
    notes = folder / "notes"
    notes.mkdir()
    (notes / "tea.md").write_text("# Tea\nGreen tea is brewed at 80 degrees.")
    (notes / "coffee.txt").write_text("Coffee is brewed with hotter water.")
    assert harness1("index", "notes", "--out", "notes.index", cwd=folder).returncode == 0
    found = harness1("search", "How hot is green tea brewed?", "--index", "notes.index", "--json", cwd=folder)
    assert json.loads(found.stdout)["curated"][0]["id"] == "tea.md"


def test_every_verb_has_help_with_an_example(folder: Path) -> None:
    for verb in (["demo"], ["index"], ["search"], ["eval"], ["replay"], ["config", "show"]):
        helped = harness1(*verb, "--help", cwd=folder)
        assert helped.returncode == 0
        assert "Example: harness1 " + " ".join(verb) in helped.stdout


def test_the_configuration_is_printed_with_overrides_and_reads_back(folder: Path) -> None:
    shown = harness1("config", "show", "--set", "env.max_turns=4", cwd=folder)
    assert "max_turns = 4" in shown.stdout
    (folder / "mine.toml").write_text(shown.stdout)
    assert shown.stdout.startswith("# env.max_turns = 4, by default 40\n")
    again = harness1("config", "show", "--config", "mine.toml", cwd=folder)
    assert again.stdout == shown.stdout


def test_the_demo_answers_its_question_from_real_documentation(tmp_path: Path) -> None:
    shown = harness1("demo", cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert "3 of 3 were found" in shown.stdout.replace("\n", " ")
    assert harness1("replay", "runs/demo/run", cwd=tmp_path).returncode == 0
