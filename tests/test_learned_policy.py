"""The table of learned policies: each system cut to the size of the learned one, and differences paired by task."""

import json
from pathlib import Path

import pytest

from benchmarks import learned_policy
from benchmarks.learned_policy import compared
from harness1.eval.run import Run, read_run
from tests.eval.run_folders import dataset, episode, run_folder


def runs_of(folder: Path, **found: tuple[str, str]) -> dict[str, Run]:
    """Runs over two tasks, by what each delivered for them; the gold is `b` in both."""
    data = dataset(folder / "data", {"t": "?", "u": "?"}, gold="b")
    return {
        name.replace("_", " "): read_run(
            run_folder(folder / name, data, [episode("t", first, turns=1), episode("u", second, turns=1)])
        )
        for name, (first, second) in found.items()
    }


def test_every_other_system_is_cut_to_the_size_of_the_last_model(tmp_path: Path) -> None:
    runs = runs_of(tmp_path, base=("x", "x"), sft=("b", "xb"), single_search=("xb", "xb"), scripted=("bx", "xyb"))
    rows = compared(runs, ["base", "sft"])
    assert rows["sft"]["metrics"]["curated_recall"][0] == 1.0
    assert rows["single search"]["metrics"]["curated_recall"][0] == 1.0
    assert rows["single search"]["at_equal_size"]["curated_recall"]["differences"] == [1.0, 0.0]
    assert rows["scripted"]["at_equal_size"]["curated_recall"]["differences"] == [0.0, 1.0]
    assert "at_equal_size" not in rows["sft"]
    assert rows["sft"]["metrics"]["valid calls"] is None, "a run without a model has no calls"
    assert "over_the_one_before" not in rows["base"]
    gain = rows["sft"]["over_the_one_before"]["curated_f1"]
    assert gain["differences"] == pytest.approx([1.0, 2 / 3])
    assert gain["difference"][0] == pytest.approx(5 / 6)


def test_a_model_is_compared_with_itself_over_a_transcript(tmp_path: Path) -> None:
    runs = runs_of(tmp_path, zero=("b", "b"), over=("x", "b"))
    rows = compared({"zero": runs["zero"], "zero, transcript": runs["over"]}, ["zero"])
    assert rows["zero"]["over_the_transcript"]["curated_f1"]["differences"] == [1.0, 0.0]
    table = learned_policy.markdown({"data": rows}, {})
    assert "Each model minus the same over a transcript:\n\n- zero: F1 +0.500" in table


def test_one_command_plays_what_is_missing_and_nothing_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    played = learned_policy.systems({"sft": "m"}, "small", [], False)
    assert [played[name].policy for name in ("sft", "single search, bm25")] == ["hf:m", "single-shot"]
    assert played["sft"].config.env.max_turns == 12 != played["scripted"].config.env.max_turns
    ranked = {name: played[f"single search, bm25{name}"].config.env.ranks for name in ("", ", by evidence")}
    assert ranked == {"": False, ", by evidence": True}
    both = learned_policy.systems({"zero": "openai:m@http://127.0.0.1:1"}, "small", [], False, transcript=True)
    zero, over = both["zero"], both["zero, transcript"]
    assert zero.policy == over.policy == "openai:m@http://127.0.0.1:1"
    assert (over.config.env.rendering.order, over.config.env.pruning.limits) == ("transcript", (1024, 1638))
    assert over.config.env.context_window == zero.config.env.context_window
    script = {**played, "sft": played["scripted"]}
    monkeypatch.setattr(learned_policy, "systems", lambda *given: script)
    arguments = ["world:40", "--indexes", str(tmp_path / "indexes"), "--out", str(tmp_path / "runs"), "--limit", "2"]
    arguments += ["--model", "sft=m"]
    report = learned_policy.main([*arguments, "--json"])
    assert json.loads(capsys.readouterr().out) == report
    assert report["systems"]["world-40-0"].keys() == played.keys()
    written = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("episodes.jsonl")}
    assert len(written) == len(played)
    learned_policy.main(arguments)
    assert "world-40-0, 2 tasks:" in capsys.readouterr().out
    assert written == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("episodes.jsonl")}
