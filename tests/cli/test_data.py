"""harness1 data: the verbs, and evaluations straight from official files."""

import json
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import huggingface_hub
import pytest

from harness1.data.benchmarks import BENCHMARKS
from harness1.eval.run import read_run
from harness1.viewer.run_page import RunSource
from tests.cli.commands import Command
from tests.data.benchmarks import official
from tests.data.benchmarks.official import SECRET


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


def test_hotpotqa_is_checked_imported_and_evaluated(harness1: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    official.HOTPOTQA.make(Path("n[/x]"))  # a path is no markup
    checked = harness1("data", "check", "hotpotqa:n[/x]")
    assert (checked.code, "checking hotpotqa:n[/x] " in checked.err) == (0, True)
    assert checked.out == "hotpotqa:n[/x]: 4 documents, tasks: 2 dev\nNothing is wrong with it.\n"
    made = harness1("data", "import", "hotpotqa", "n[/x]", "--out", "m[/x]")
    assert made.out == "m[/x]: 4 documents, tasks: 2 dev\nNext: harness1 eval m[/x]\n"
    assert harness1("data", "check", "m[/x]", "--json").code == 0
    direct = evaluate(harness1, "hotpotqa:n[/x]", "--split", "dev")
    assert (direct["tasks"], direct["curated_recall"]["mean"]) == (2, 1.0)


def test_facts_are_scored_by_the_chunks_of_the_benchmark(harness1: Command) -> None:
    official.SEC.make(Path("sec"))
    made = harness1("data", "import", "sec", "sec", "--out", "made")
    assert "Next: harness1 eval made --set index.unit=chunk" in made.out
    metrics = evaluate(harness1, "made", "--set", "index.unit=chunk", "--set", "env.dedup.on=false")
    assert metrics["curated_recall"]["mean"] == metrics["answer_recall"]["mean"] == 1.0
    episode = json.loads(Path("run/episodes.jsonl").read_text().splitlines()[0])
    assert (episode["unit"], set(episode["pool"])) == ("chunk", {"a-24_0", "a-24_1", "b-25_0", "c-26_0"})


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


def test_a_check_ends_with_one_where_something_is_wrong(harness1: Command) -> None:
    official.WEB.make(Path("web"), official.lose_gold)
    checked = harness1("data", "check", "web:web")
    assert checked.code == 1
    assert "absent_gold: 1\n    web/test.jsonl:2: query '2' should find '44'" in checked.out
    report = json.loads(harness1("data", "check", "web:web", "--json").out)
    assert [finding["kind"] for finding in report["findings"]] == ["absent_gold"]
    assert harness1("data", "check", "web:web", "--ignore", "absent_gold").code == 0
    assert harness1("data", "check", "absent").code == 2
    refused = harness1("data", "check", "web:web", "--ignore", "absent_gold", "--ignore", "absentgold")
    assert (refused.code, refused.out) == (2, "")
    assert refused.err.startswith("harness1: --ignore takes a kind of finding, not 'absentgold'; there are: malformed,")


def test_an_import_says_what_it_left_out(harness1: Command) -> None:
    official.WEB.make(Path("web"), official.lose_gold)
    refused = harness1("data", "import", "web", "web", "--out", "made")
    assert (refused.code, "test.jsonl:2" in refused.err) == (2, True)
    made = harness1("data", "import", "web", "web", "--out", "made", "--leave-out")
    assert made.out.startswith("made: 2 documents, tasks: 1 test\n")
    assert made.err.startswith("harness1: left out: web/test.jsonl:2: query '2' should find '44'")
    unknown = harness1("data", "import", "wbe", "web", "--out", "x").err
    assert unknown.startswith("harness1: there is no benchmark 'wbe'; there are: browsecomp_plus, web, patents,")


@pytest.mark.parametrize(
    ("info", "code", "said"),
    [
        (ConnectionError("no route"), 3, ("the hub cannot be reached", "harness1 data import frames PATH")),
        (SimpleNamespace(sha="abc"), 2, ("does not have them any more",)),
    ],
)
def test_a_hub_that_is_gone_or_lost_the_files_is_told_in_one_line(
    harness1: Command, monkeypatch: pytest.MonkeyPatch, info: object, code: int, said: tuple[str, ...]
) -> None:
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", Mock(side_effect=[info]))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: None)
    ended = harness1("data", "get", "frames", "--out", "frames")
    assert (ended.code, ended.err.count("\n"), all(each in ended.err for each in said)) == (code, 1, True), ended.err


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
