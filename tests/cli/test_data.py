"""harness1 data: the verbs, and evaluations straight from official files."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest

from harness1.data.benchmarks import BENCHMARKS
from harness1.eval.run import read_run
from harness1.runs.files import read_stage
from harness1.viewer.run_page import RunSource
from tests.cli.commands import Command, command_in_process
from tests.data.benchmarks import official
from tests.data.benchmarks.official import SECRET, write_jsonl


@pytest.fixture
def harness1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Command:
    monkeypatch.chdir(tmp_path)
    return command_in_process(monkeypatch, capsys)


def evaluate(harness1: Command, *arguments: str) -> dict:
    ended = harness1("eval", *arguments, "--cache", "cache", "--out", "run", "--json")
    assert ended.code == 0, ended.err
    return json.loads(ended.out)


def test_the_list_tells_everything_of_each_benchmark(harness1: Command) -> None:
    rows = json.loads(harness1("data", "list", "--json").out)["benchmarks"]
    assert [row["name"] for row in rows] == list(BENCHMARKS)
    fields = {"name", "what", "size", "licence", "origin", "files", "verified", "unit"}
    assert all(row.keys() == fields and all(row.values()) for row in rows)
    shown = harness1("data", "list").out
    assert all(f"{name}: " in shown for name in BENCHMARKS)
    assert shown.count("    verified  ") == 8


def test_hotpotqa_is_checked_imported_and_evaluated(harness1: Command) -> None:
    official.HOTPOTQA.make(Path("hotpot"))
    checked = harness1("data", "check", "hotpotqa:hotpot")
    assert checked.code == 0
    assert checked.out == "hotpotqa:hotpot: 4 documents, tasks: 2 dev\nNothing is wrong with it.\n"
    direct = evaluate(harness1, "hotpotqa:hotpot", "--split", "dev")
    assert (direct["tasks"], direct["curated_recall"]["mean"]) == (2, 1.0)
    made = harness1("data", "import", "hotpotqa", "hotpot", "--out", "made")
    assert made.out == "made: 4 documents, tasks: 2 dev\nNext: harness1 eval made\n"
    assert harness1("data", "check", "made", "--json").code == 0


def test_facts_are_scored_by_the_chunks_of_the_benchmark(harness1: Command) -> None:
    official.SEC.make(Path("sec"))
    metrics = evaluate(harness1, "sec:sec", "--set", "index.unit=chunk", "--set", "env.dedup.on=false")
    assert metrics["curated_recall"]["mean"] == metrics["answer_recall"]["mean"] == 1.0
    episode = json.loads(Path("run/episodes.jsonl").read_text().splitlines()[0])
    assert set(episode["pool"]) == {"a-24_0", "a-24_1", "b-25_0", "c-26_0"}
    assert episode["unit"] == "chunk"


def test_an_imported_benchmark_keeps_its_chunks_in_the_index(harness1: Command) -> None:
    official.SEC.make(Path("sec"))
    assert (
        "Next: harness1 eval made --set index.unit=chunk"
        in harness1("data", "import", "sec", "sec", "--out", "made").out
    )
    settings = ("--set", "index.unit=chunk", "--set", "index.chunk_tokens=4")
    info = json.loads(harness1("index", "made", "--out", "index", *settings, "--json").out)
    assert (info["documents"], info["chunks"]) == (3, 4)


def test_secret_answers_are_in_no_file_of_a_run(harness1: Command) -> None:
    official.BROWSECOMP_PLUS.make(Path("bcp"))
    assert evaluate(harness1, "browsecomp_plus:bcp", "--split", "all")["tasks"] == 2
    files = [path for folder in ("run", "cache") for path in Path(folder).rglob("*") if path.is_file()]
    assert Path("run/episodes.jsonl") in files
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []
    # What is made of the run later is compressed, or asks a server: there, what it is made of counts.
    golds = RunSource.open(Path("run")).known_gold[0]
    assert [gold.answers for gold in golds.values()] == [(), ()]
    assert read_run(Path("run")).secret_answers


def test_secret_answers_are_in_no_copy(harness1: Command) -> None:
    official.BROWSECOMP_PLUS.make(Path("bcp"))
    assert harness1("data", "copy", "browsecomp_plus:bcp", "--out", "copied").code == 0
    assert SECRET.encode() not in Path("copied/queries.jsonl").read_bytes()
    stage = read_stage(Path("copied"))
    assert stage.inputs["benchmark"] == "browsecomp_plus"


def test_questions_without_documents_need_an_index(harness1: Command) -> None:
    official.SEAL0.make(Path("seal"), lambda questions, corpus: corpus.clear())
    write_jsonl(Path("pages.jsonl"), official.SEAL0.corpus)
    refused = harness1("eval", "seal0:seal", "--cache", "cache")
    assert (refused.code, "they are on the web" in refused.err) == (2, True)
    assert harness1("index", "pages.jsonl", "--out", "pages").code == 0
    assert evaluate(harness1, "seal0:seal", "--index", "pages")["curated_recall"]["mean"] == 1.0


def test_a_check_ends_with_one_where_something_is_wrong(harness1: Command) -> None:
    official.WEB.make(Path("web"), official.lose_gold)
    checked = harness1("data", "check", "web:web")
    assert checked.code == 1
    assert "absent_gold: 1\n    web/test.jsonl:2: query '2' should find '44'" in checked.out
    report = json.loads(harness1("data", "check", "web:web", "--json").out)
    assert [finding["kind"] for finding in report["findings"]] == ["absent_gold"]
    assert harness1("data", "check", "web:web", "--ignore", "absent_gold").code == 0
    assert harness1("data", "check", "absent").code == 2


def test_only_kinds_that_there_are_can_be_ignored(harness1: Command) -> None:
    official.WEB.make(Path("web"), official.lose_gold)
    refused = harness1("data", "check", "web:web", "--ignore", "absent_gold", "--ignore", "absentgold")
    assert (refused.code, refused.out) == (2, "")
    assert refused.err == (
        "harness1: --ignore takes a kind of finding, not 'absentgold'; there are: malformed, duplicate_id, empty_text,"
        " absent_gold, no_gold, duplicate_text, leak_exact, leak_near, left_out\n"
    )


def test_a_path_is_no_markup(harness1: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    official.HOTPOTQA.make(Path("n[/x]"))
    checked = harness1("data", "check", "hotpotqa:n[/x]")
    assert checked.code == 0
    assert "checking hotpotqa:n[/x]: " in checked.err
    assert harness1("data", "import", "hotpotqa", "n[/x]", "--out", "m[/x]").out.startswith("m[/x]: 4 documents")


def test_an_import_says_what_it_left_out(harness1: Command) -> None:
    official.WEB.make(Path("web"), official.lose_gold)
    refused = harness1("data", "import", "web", "web", "--out", "made")
    assert (refused.code, "test.jsonl:2" in refused.err) == (2, True)
    made = harness1("data", "import", "web", "web", "--out", "made", "--leave-out")
    assert made.out.startswith("made: 2 documents, tasks: 1 test\n")
    assert made.err.startswith("harness1: left out: web/test.jsonl:2: query '2' should find '44'")
    assert harness1("data", "import", "wbe", "web", "--out", "x").err == (
        "harness1: there is no benchmark 'wbe'; there are: browsecomp_plus, web, patents, sec, longseal, seal0, frames,"
        " hotpotqa\n"
    )


def test_without_a_hub_one_line_names_the_import(harness1: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(self: object, repository: str) -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", unreachable)
    ended = harness1("data", "get", "frames", "--out", "frames")
    assert (ended.code, ended.err.count("\n")) == (3, 1)
    assert "the hub cannot be reached" in ended.err
    assert "harness1 data import frames PATH" in ended.err
    assert not Path("frames").exists()


def test_official_files_are_got_once_and_by_their_revision(harness1: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def download(repository: str, *, local_dir: Path, revision: str, allow_patterns: list[str], **_: object) -> None:
        asked.append((repository, revision, allow_patterns))
        official.FRAMES.make(local_dir)

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda self, repository: SimpleNamespace(sha="abc"))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    for _ in range(2):
        ended = harness1("data", "get", "frames", "--out", "frames")
        assert (ended.code, ended.out.splitlines()[-1]) == (0, "Next: harness1 data check frames:frames")
    assert asked == [("google/frames-benchmark", "abc", ["test.tsv"])]
    assert json.loads(Path("frames/stage.json").read_text())["hashes"] == {"google/frames-benchmark": "abc"}
    assert harness1("data", "check", "frames:frames").code == 0


def test_a_hub_that_lost_the_files_is_told(harness1: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda self, repository: SimpleNamespace(sha="abc"))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: None)
    ended = harness1("data", "get", "seal0", "--out", "seal")
    assert (ended.code, "does not have them any more" in ended.err) == (2, True)
