"""The folder of a recipe in the viewer: what its page is told of stages, gates, runs and trainings, then and live."""

import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness1.errors import SchemaError
from harness1.recipe.gates import GateRuling
from harness1.recipe.run import JOURNAL, RecipeState, StagePlan, StageRecord, hold_folder
from harness1.rows.calls import RecordedCall, recording
from harness1.runs.files import write_json
from harness1.viewer.live import Watched
from harness1.viewer.pages import write_view
from harness1.viewer.work import hold_sessions, is_recording, read_sessions, recipe_card
from tests.viewer.making import script, some_tasks, write_dataset, write_run, write_training
from tests.viewer.recordings import FIRST, SECOND, save_student, write_recording
from tests.viewer.test_pages import opened

HELD = GateRuling("recall", 0.6, 0.3, True, "mean curated recall", "")
MISSED = GateRuling("progress", -0.1, 0.0, False, "gain since the start", "harness1 view work/rl")
PLAN = {
    "world": StagePlan("a world"),
    "before": StagePlan("what an agent has to beat", 10.0),
    "rl": StagePlan("learning", 30.0),
    "after": StagePlan("the model", 20.0),
}


def record(verb: str, status: Any = "passed", **more: Any) -> StageRecord:
    return StageRecord(words=(*verb.split(), "--out", "a b"), needs={}, status=status, **more)


def write_recipe(work: Path, **changes: StageRecord) -> Path:
    """A recipe whose training failed at a gate, after an evaluation of three tasks."""
    tasks = some_tasks(3)
    work.mkdir()
    write_run(work / "before", [script()], tasks, write_dataset(work / "world", tasks))
    write_training(work / "rl")
    stages = {
        "world": record("data copy", seconds=1.0),
        "before": record("eval", seconds=20.0, findings=(HELD,), metrics={"reward": 1.5, "curated_recall": 0.6}),
        "rl": record("rl train", "failed", seconds=40.0, findings=(MISSED,), exit=0),
    }
    write_json(
        work / JOURNAL, RecipeState(title="a <b>chain</b>", recipe="", inputs={}, stages=stages | changes, plan=PLAN)
    )
    return work


def test_a_recipe_is_its_stages_with_their_gates_times_and_commands(tmp_path: Path) -> None:
    card = recipe_card(write_recipe(tmp_path / "work"))
    world, before, rl, after = card["stages"]
    assert (card["name"], card["title"], world["says"]) == ("work", "a <b>chain</b>", "a world")
    assert [each["status"] for each in card["stages"]] == ["passed", "passed", "failed", "to come"]
    assert before["command"] == "harness1 eval --out 'a b'"
    assert before["metrics"]["reward"] == 1.5
    assert list(rl["findings"]) == [msgspec.to_builtins(MISSED)]
    assert (before["expected"], after["expected"]) == (0.0, 32.5), "slower than the recipe says"
    work = write_recipe(tmp_path / "again", rl=record("rl train", "running", began=time.time()))
    assert recipe_card(work)["stages"][2]["status"] == "stopped", "nobody works at it"
    with hold_folder(work):
        assert recipe_card(work)["stages"][2]["status"] == "running"


def test_a_file_of_a_recipe_holds_the_runs_and_trainings_of_its_stages(tmp_path: Path) -> None:
    work = write_recipe(tmp_path / "work", after=record("eval", "running"))  # which has written nothing yet
    write_run(work / "after", [script()], some_tasks(1), work / "world")
    written = write_view([work], tmp_path / "view.html", workers=1)
    index = opened(tmp_path / "view.html")
    assert written.episodes == 4
    assert [run["name"] for run in index["runs"]] == ["after", "before"], "what was trained stands first"
    assert index["trainings"] == [{"name": "rl", "folder": str(work / "rl")}]
    assert [recipe["name"] for recipe in index["recipes"]] == ["work"]


def test_a_damaged_journal_is_named(tmp_path: Path) -> None:
    (tmp_path / JOURNAL).write_text("{")
    with pytest.raises(SchemaError, match=JOURNAL):
        write_view([tmp_path], tmp_path / "view.html")
    assert JOURNAL in Watched([tmp_path]).news("", 0)["problems"][0]


def test_a_page_is_told_how_a_recipe_goes_on(tmp_path: Path) -> None:
    work = tmp_path / "work"
    watched = Watched([work, work / "rl"])
    assert watched.news("", 0)["waiting"] == [str(work), str(work / "rl")]
    write_recipe(work, rl=record("rl train", "running"))
    found = watched.news("", 0)
    assert [recipe["name"] for recipe in found["recipes"]] == ["work"]
    assert [run["name"] for run in found["runs"]] == ["before"]
    assert [training["name"] for training in found["trainings"]] == ["rl"]
    assert (len(found["rows"]), found["problems"]) == (3, [])

    write_run(work / "after", [script()], some_tasks(2), work / "world")
    assert [run["name"] for run in watched.news("", 0)["runs"]] == ["before"], "its stage has not begun"
    later = RecipeState(title="a chain", recipe="", inputs={}, stages={"after": record("eval")}, plan=PLAN)
    write_json(work / JOURNAL, later)
    found = watched.news("", 0)
    assert [run["name"] for run in found["runs"]] == ["before", "after"]
    assert (len(found["rows"]), found["recipes"][0]["title"]) == (5, "a chain")


def test_a_session_holds_its_calls_in_order_and_what_each_added(tmp_path: Path) -> None:
    chat = save_student(tmp_path / "student")
    folder = write_recording(tmp_path / "agent", tmp_path / "student", chat)
    assert is_recording(folder)
    talk, other = read_sessions(folder)
    first, second, failed = talk["calls"]
    assert (first["prompt"], first["output"], first["reused"]) == (FIRST, "A poet's daughter.", None)
    assert (second["prompt"], second["reused"]) == (SECOND, first["prompt_tokens"] + first["output_tokens"])
    assert (first["waited"], first["seconds"], first["mean_logprob"]) == (0.5, 1.5, -0.5)
    assert (failed["error"], failed["seconds"], failed["output"], failed["output_tokens"]) == ("gone", None, None, None)
    (plain,) = other["calls"]
    assert plain["messages"] == [{"role": "user", "content": FIRST}]
    assert (plain["reply"]["content"], plain["prompt"], plain["versions"]) == ("A countess.", None, None)


def test_a_chat_without_tokens_shows_what_is_new_in_each_call(tmp_path: Path) -> None:
    messages: list[Any] = [{"role": "user", "content": FIRST}, "no message", None]
    reply, asked = {"role": "assistant", "content": "A countess."}, {"role": "user", "content": SECOND}
    made = {"session_id": "chat", "dialect": "openai", "status": 200, "reply": reply}
    with recording(tmp_path / "agent", {}) as recorder:
        for name, arrived, sent in (("a", 1.0, messages), ("b", 3.0, [*messages, reply, asked])):
            recorder.append(RecordedCall(call_id=name, t_arrived=arrived, request={"messages": sent}, **made))
    ((first, second),) = (session["calls"] for session in read_sessions(tmp_path / "agent"))
    assert (first["earlier"], first["messages"]) == (0, messages)
    assert (second["earlier"], second["messages"]) == (4, [asked])


def test_tokens_of_another_tokenizer_are_not_decoded_and_sessions_without_room_are_only_listed(tmp_path: Path) -> None:
    chat = save_student(tmp_path / "student")
    folder = write_recording(tmp_path / "agent", tmp_path / "student", chat, form="another")
    first = read_sessions(folder)[0]["calls"][0]
    assert (first["prompt"], first["output"], first["output_tokens"] > 0) == (None, None, True)
    whole = hold_sessions([folder], 1_000_000)
    assert [row["held"] for row, _ in whole] == [True, True]
    small = hold_sessions([folder], len(whole[1][1]))
    assert [(row["held"], bool(text)) for row, text in small] == [(False, False), (True, True)]


def test_a_recording_is_viewed_beside_runs(tmp_path: Path) -> None:
    chat = save_student(tmp_path / "student")
    folder = write_recording(tmp_path / "agent", tmp_path / "student", chat)
    write_run(tmp_path / "run", [script()], some_tasks(1), None)
    out = tmp_path / "view.html"
    assert write_view([folder], out, workers=1).episodes == 0
    told = [(row["name"], row["calls"], row["failed"]) for row in opened(out)["sessions"]]
    assert told == [("talk", 3, 1), ("chat", 1, 0)]
    write_view([folder, tmp_path / "run"], out, workers=1)
    assert {"s0", "s1", "e0"} <= set(opened(out)["tags"])
