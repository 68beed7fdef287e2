"""What is made of the episodes of a run."""

import csv
import io
import json
import random
from collections.abc import Sequence
from pathlib import Path

import ir_measures
import msgspec
import pytest
from ir_measures import Qrel, SetP, SetR

import harness1
from harness1.config import load_config
from harness1.errors import SchemaError, UsageError
from harness1.eval import outputs
from harness1.eval.answer_run import as_csv
from harness1.eval.answers import Answered, AnswerItem, Reply
from harness1.eval.metrics import MeasuredRun
from harness1.records import DocId, Episode, Gold, Hit, Observation, StopReason, Task, ToolCall, Turn
from harness1.runs.files import Stage
from harness1.runs.folder import clear_run
from harness1.runs.journal import EpisodeStore
from tests.eval.run_folders import episode as finished
from tests.support import read_run
from tests.viewer.making import script, some_tasks, write_dataset, write_run

CONFIG = load_config()
GOLD = Gold(relevant={"a": 1, "b": 1, "c": 1})
NAMES = ("t1", "t2", "t3", "t4")


def task(name: str, query: str = "who?") -> Task:
    return Task(name, query, gold=GOLD)


RUN = [
    finished("t1", "ba", "xbayz"),
    finished("t1", "a", "a", sample=1),
    finished("t2", "c", "xy", aliases={"c": "x"}),
    finished("t3", "ab", "abc", StopReason.FORMAT_LIMIT),
    finished("t4", "ab", "ab", StopReason.FAULT),
]
TASKS = {name: task(name) for name in NAMES}


def written(out: Path, episodes: Sequence[Episode], tasks: dict[str, Task] | None = None) -> bool:
    tasks = tasks or TASKS
    measured = MeasuredRun(episodes, tasks, CONFIG, finished=True)
    return outputs.write_outputs(out, episodes, measured, CONFIG, measured.summary())


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_there_is_every_promised_file_and_no_other(tmp_path: Path) -> None:
    written(tmp_path, [*RUN, *(finished(name, sample=1) for name in ("t2", "t3", "t4"))])
    assert set(contents(tmp_path)) == set(outputs.output_names(NAMES, 2)) - {"provenance.json"}


def test_deliveries_and_pools_are_runs_that_others_can_score(tmp_path: Path) -> None:
    written(tmp_path, RUN)
    assert read_run(tmp_path / "curated.trec") == [("t1", [("b", 2.0), ("a", 1.0)]), ("t2", [("c", 1.0)])]
    assert read_run(tmp_path / "curated.sample1.trec") == [("t1", [("a", 1.0)])]
    pools = dict(read_run(tmp_path / "pool.trec"))
    assert [unit for unit, _ in pools["t1"]] == list("xbayz")
    assert pools["t2"] == [("x", 3.0), ("y", 2.0), ("c", 1.0)]
    assert "t4" not in pools


def test_the_runs_score_as_the_metrics_do(tmp_path: Path) -> None:
    rng = random.Random(0)
    parts = [[rng.sample("abcdefgh", rng.randint(0, most)) for most in (5, 8)] for _ in NAMES]
    written(tmp_path, [finished(name, *part) for name, part in zip(NAMES, parts, strict=True)])
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    qrels = [Qrel(name, unit, 1) for name in NAMES for unit in GOLD.relevant]
    measures = ("curated", SetR, "curated_recall"), ("curated", SetP, "curated_precision")
    for file, measure, name in (*measures, ("pool", SetR, "trajectory_recall")):
        run = list(ir_measures.read_trec_run(str(tmp_path / f"{file}.trec")))
        assert ir_measures.calc_aggregate([measure], qrels, run)[measure] == pytest.approx(metrics[name]["mean"])


def test_ids_that_hold_white_space_are_encoded_without_becoming_one(tmp_path: Path) -> None:
    units = ["a b", "a%20b", "a\u00a0b", ""]
    assert written(tmp_path, [finished("t 1", units, units)], {"t 1": task("t 1")})
    ((name, ranked),) = read_run(tmp_path / "curated.trec")
    assert (name, [unit for unit, _ in ranked]) == ("t%201", ["a%20b", "a%2520b", "a%C2%A0b", "%"])
    # The judgements to score it with have the same ids.
    first, *_ = (tmp_path / "qrels.trec").read_text().splitlines()
    assert first == "t%201 0 a 1"
    spaced = msgspec.structs.replace(task("t 1"), gold=Gold({DocId("a b"): 2}))
    written(tmp_path, [finished("t 1", units, units)], {"t 1": spaced})
    assert (tmp_path / "qrels.trec").read_text() == "t%201 0 a%20b 2\n"
    assert not written(tmp_path, [finished("t%201", ["a%20b"])], {"t%201": task("t%201")})
    assert read_run(tmp_path / "curated.trec") == [("t%201", [("a%20b", 1.0)])]
    assert not (tmp_path / "qrels.trec").exists()


def test_the_table_has_a_line_for_every_task() -> None:
    rows = list(csv.DictReader(io.StringIO(outputs.task_table(RUN, MeasuredRun(RUN, TASKS, CONFIG, finished=True)))))
    assert [(row["task_id"], row["samples"]) for row in rows] == [("t1", "2"), ("t2", "1"), ("t3", "1"), ("t4", "0")]
    assert float(rows[0]["curated_recall"]) == pytest.approx((2 / 3 + 1 / 3) / 2)
    assert rows[3]["curated_recall"] == ""


def test_a_submission_is_what_the_benchmark_evaluates() -> None:
    names = ("search_corpus", "fan_out_search", "read_document", "curate", "end_search")
    turns = tuple(Turn(i, action=ToolCall(name), observation=Observation(name)) for i, name in enumerate(names))
    assert outputs.submission(finished("7", "b", "ab", turns=turns)) == {
        "query_id": "7",
        "tool_call_counts": {"curate": 1, "get_document": 1, "search": 2},
        "status": "completed",
        "retrieved_docids": ["a", "b"],
        "result": [{"type": "output_text", "output": ""}],
    }
    assert outputs.submission(RUN[3])["status"] == outputs.submission(RUN[4])["status"] == "incomplete"
    # Chunks are submitted as their documents.
    hits = (Hit("c1", "doc", 0, "", "", 1.0, 0, 1), Hit("c2", "doc", 1, "", "", 1.0, 1, 1))
    turn = Turn(0, action=ToolCall("search_corpus"), observation=Observation("search_corpus", hits=hits))
    episode = finished("7", "", ("c1", "c2", "other#3", "whole"), turns=(turn,), unit="chunk")
    assert outputs.submission(episode)["retrieved_docids"] == ["doc", "other", "whole"]
    assert outputs.seen_units(episode) == ("c1", "c2", "other#3", "whole")


@pytest.mark.parametrize("name", ["../../etc", "a/b", "q\0", "ß" * 200, ".", "Wer? Was!"])
def test_any_id_is_a_safe_file_name(name: str, tmp_path: Path) -> None:
    written(tmp_path, [finished(name)], {name: task(name)})
    (path,) = (tmp_path / "browsecomp_plus").iterdir()
    assert path.name == outputs.submission_name(name)
    assert json.loads(path.read_text())["query_id"] == name
    assert outputs.submission_name(name) != outputs.submission_name(f"{name}x" * 9)


def test_clearing_removes_all_of_a_run_and_nothing_else_and_not_while_another_process_writes(tmp_path: Path) -> None:
    Stage("run", {}).write(tmp_path)
    for name in ("episodes.jsonl", "tokens.bin"):
        (tmp_path / name).write_text("")
    written(tmp_path, RUN)
    mine = ("notes.txt", "curated-by-hand.trec", "browsecomp_plus.sample1/notes", ".tasks.csv.old", ".12")
    kept = dict.fromkeys(mine, b"mine")
    for name, data in kept.items():
        (tmp_path / name).write_bytes(data)
    for name in ("report.html", "provenance.json", ".metrics.json.123", "browsecomp_plus/.run_x.json.7"):
        (tmp_path / name).write_text("")
    before = contents(tmp_path)
    with EpisodeStore(tmp_path), pytest.raises(UsageError, match="is being written by another process"):
        clear_run(tmp_path)
    assert contents(tmp_path) == before
    clear_run(tmp_path)
    assert contents(tmp_path) == kept
    assert not (tmp_path / "browsecomp_plus").exists()


def cells(table: str) -> list[list[str]]:
    return list(csv.reader(io.StringIO(table, newline="")))


@pytest.mark.parametrize("prefix", [*outputs.FORMULA, " =", "'="])
def test_a_text_is_never_a_formula_and_different_texts_stay_different(prefix: str) -> None:
    text = f"{prefix}cmd|' /C calc'!A0"
    ((_,), (cell,), (escaped,)) = cells(outputs.csv_table(["text"], [[text], [f"'{text}"]]))
    assert (cell, escaped) == (f"'{text}", f"''{text}")


def test_numbers_stay_numbers_and_answers_are_inert() -> None:
    assert cells(outputs.csv_table(["-a"], [[-0.5, -3, "-3"]])) == [["'-a"], ["-0.5", "-3", "'-3"]]
    question = AnswerItem("=id", 0, "?", ("@right",), ())
    reply = Reply(task_id="=id", condition="closed", model="m", prompt="p", text="=1+1")
    _, row = cells(as_csv([Answered(question, "closed", reply)]))
    assert (row[0], row[-2:]) == ("'=id", ["'=1+1", "'@right"])


def test_a_run_is_read_back_also_by_the_folder_of_its_training(tmp_path: Path) -> None:
    tasks = some_tasks(2)
    write_run(tmp_path / "run", [script()], tasks, write_dataset(tmp_path / "data", tasks))
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "stage.json").write_bytes(msgspec.json.encode({"verb": "rl train", "inputs": {}}))
    (tmp_path / "train" / "episodes").symlink_to(tmp_path / "run")
    for folder in ("run", "train"):
        found = harness1.load_run(tmp_path / folder)
        assert [each.task.task_id for each in found.episodes] == ["task-0", "task-1"]
        assert found.metrics["curated_recall"]["mean"] == 0.5


@pytest.mark.parametrize("plugins", [7, ["tools"], {"tools": ["x"]}, {"rewards": {"x": 7}}])
def test_a_card_that_does_not_say_what_a_run_was_made_with_is_refused(tmp_path: Path, plugins: object) -> None:
    card = {"verb": "run", "inputs": {}, "outputs": {"plugins": plugins}}
    (tmp_path / "stage.json").write_bytes(msgspec.json.encode(card))
    with pytest.raises(SchemaError, match=r"stage\.json does not say what the run was made with"):
        harness1.load_run(tmp_path)
