"""harness1 rl check: a report of a task set, made once, resumed, and not mixed with another."""

import json
import re
from pathlib import Path

import pytest

from harness1.data import beir
from harness1.data.open import open_source
from harness1.data.source import Source
from harness1.errors import UsageError
from harness1.rl.admission import POLICIES, README, REPORT, RUNS, read_report
from harness1.runs.files import read_stage
from harness1.runs.journal import EPISODES
from tests.cli.commands import Command
from tests.serving import imitating

SOURCE = open_source("world:60")
CHECK = ["rl", "check", "world:60", "--limit", "2", "--cache", "cache", "--out", "checked"]
CHECK += ["--set", "machine.workers=1", "--easy", "1"]


def test_a_check_writes_a_report_once(harness1: Command, tmp_path: Path) -> None:
    done = harness1(*CHECK, "--json")
    assert done.code == 0, done.err
    folder = tmp_path / "checked"
    report = read_report(folder)
    assert json.loads(done.out) == json.loads((folder / REPORT).read_bytes())
    assert len(report.tasks) == 2
    assert [each.policy for each in report.policies] == list(POLICIES)
    assert (report.split, report.recipe) == ("train", "paper")
    assert "curate-everything" in (folder / README).read_text()
    stage = read_stage(folder)
    assert (stage.verb, stage.status) == ("rl check", "finished")
    before = (folder / REPORT).stat().st_mtime_ns
    again = harness1(*CHECK)
    assert (again.code, (folder / REPORT).stat().st_mtime_ns) == (0, before)
    assert "2 tasks" in again.out
    assert "answer_found" in again.out
    other = harness1(*CHECK, "--set", "reward.recipe=robust")
    assert other.code == 2
    assert "--force" in other.err
    assert harness1(*CHECK, "--set", "reward.recipe=robust", "--force").code == 0
    assert read_report(folder).recipe == "robust"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("precious")
    foreign = harness1(*CHECK, "--force", "--out", "mine")
    assert (foreign.code, "holds nothing of `harness1 rl check`" in foreign.err) == (2, True)


def test_tasks_on_which_a_policy_that_does_not_think_comes_far_enough_are_refused(harness1: Command) -> None:
    refused = harness1(*CHECK, "--limit", "10", "--easy", "0.7")
    assert refused.code == 1, refused.err
    assert "TOO EASY: scripted, which does not think, earns 2.851, 88% of what the oracle gains" in refused.err
    assert "10 admitted" in refused.out  # the report is written, and shown again
    for bound, code in (("0.9", 0), ("0", 1), ("1", 0)):
        assert harness1(*CHECK, "--limit", "10", "--easy", bound, "--json").code == code


def test_a_stopped_check_goes_on(harness1: Command, tmp_path: Path) -> None:
    assert harness1(*CHECK).code == 0
    folder = tmp_path / "checked"
    stage, report = read_stage(folder), read_report(folder)
    stage.write(folder, status="interrupted")
    kept, lost = (folder / RUNS / policy / EPISODES for policy in ("oracle", "scripted"))
    lines, before = lost.read_bytes().splitlines(keepends=True), kept.read_bytes()
    assert len(lines) == 2 * len(report.tasks)  # it plays twice
    lost.write_bytes(b"".join(lines[:1]))
    assert harness1(*CHECK).code == 0
    assert read_report(folder) == report
    assert kept.read_bytes() == before
    assert len(lost.read_bytes().splitlines()) == len(lines)


def test_the_split_is_one_that_is_learned_from() -> None:
    def split_of(*splits: str) -> str:
        return Source("data", "beir", lambda: iter(()), splits, lambda _: []).training_split()

    assert open_source("world:60").training_split() == "train"
    assert (split_of("dev", "test"), split_of("test")) == ("dev", "test")
    for splits, said in ((("easy", "test"), "--split"), ((), "none")):
        with pytest.raises(UsageError, match=said):
            split_of(*splits)


def test_tasks_that_a_training_would_leave_out_are_not_judged(harness1: Command, tmp_path: Path) -> None:
    beir.write(tmp_path / "set", SOURCE.documents(), SOURCE.tasks("train")[:2])
    done = harness1(*CHECK, "--against", "set:train", "--share", "rl")
    assert done.code == 0, done.err
    report = read_report(tmp_path / "checked")
    assert (report.selection.share, report.selection.near) == ("rl", 2)
    assert report.selection.learned == tuple(task.task_id for task in report.tasks)
    assert not {each.task_id for each in report.tasks} & {task.task_id for task in SOURCE.tasks("train")[:2]}
    said = f"{SOURCE.name} train: left out 18 tasks of the other share, 2 tasks near a dev or test or set:train query"
    assert said in done.err
    assert said in (tmp_path / "checked" / README).read_text()
    assert harness1(*CHECK, "--split", "test", "--out", "test").code == 0
    assert read_report(tmp_path / "test").selection is None
    refused = harness1(*CHECK, "--against", "world:60:train", "--force")
    assert refused.code == 2
    assert "0 of 60 tasks are taken" in refused.err
    assert harness1(*CHECK, "--exclude", "checked").code == 2  # of other tasks than those in the folder


def flagging(method: str, path: str, body: bytes) -> tuple[int, bytes]:
    """Calls it a dump where everything is curated, and says nothing that can be read of a random walk."""
    asked = json.loads(body)["messages"][1]["content"]
    quote = re.search(r"Delivers \S+, tagged \S+", asked)
    delivered = asked.count("Delivers ")
    trick = {"verdict": "trick", "kind": "dump", "turn": 1, "quote": quote[0] if quote else ""}
    said = json.dumps(trick) if delivered > 3 else "no idea" if delivered == 0 else '{"verdict": "honest"}'
    choice = {"message": {"role": "assistant", "content": said}, "finish_reason": "stop"}
    return 200, json.dumps({"choices": [choice], "usage": {"prompt_tokens": 50, "completion_tokens": 5}}).encode()


@pytest.mark.service
def test_a_judge_reads_what_earned_most_and_is_asked_once(harness1: Command, tmp_path: Path) -> None:
    run = str(tmp_path / "checked" / RUNS / "scripted")
    with imitating(flagging) as url:
        asked = (*CHECK, "--judge", f"openai:reader@{url}/v1", "--judged", "9")
        done = harness1(*asked, "--json")
        found = json.loads(done.out)["judge"]
        assert found == json.loads((tmp_path / "checked" / "judge.json").read_bytes())
        assert found["episodes"] == found["honest"] + found["tricks"] + found["invalid"] == 9
        assert "curate-everything" in {Path(each["run"]).name for each in found["findings"]}
        kept = (tmp_path / "checked" / "judge.jsonl").read_bytes()
        again = harness1(*asked)
        assert all(said in again.out for said in ("with a trick", "dump: curate-everything")), again.err
        assert (tmp_path / "checked" / "judge.jsonl").read_bytes() == kept
        alone = harness1(*asked, "--run", run, "--json")
        assert {each["run"] for each in json.loads(alone.out)["judge"]["findings"]} <= {run}
    refused = harness1(*CHECK, "--run", run)
    assert (refused.code, "--judge" in refused.err) == (2, True)
