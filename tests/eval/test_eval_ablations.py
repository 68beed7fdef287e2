"""Ablations: a mechanism is truly gone, and what it was worth is told task by task."""

import re
from html import escape
from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness1.config import Config, Rendering, load_config
from harness1.config.settings import differences
from harness1.data.open import open_source
from harness1.errors import SchemaError, UsageError
from harness1.eval import compare
from harness1.eval.ablations import (
    ABLATIONS,
    AblationTable,
    Condition,
    ablate,
    ablate_config,
    cells,
    compare_condition,
    markdown,
    percent_of,
)
from harness1.eval.evaluate import Evaluation, Play, ensure_run
from harness1.eval.statistics import Interval
from harness1.retrieval.build import build_index
from harness1.runs.files import read_stage
from harness1.runs.journal import read_episodes
from harness1.viewer.report import ensure_report
from tests.run_folders import repeatable
from tests.support import die_at_fsync
from tests.test_ablations import ABLATIONS as SWITCHES
from tests.test_ablations import played

TURNED = {
    "importance_tags": {"curation.eviction", "curation.tags"},
    "evidence": {"evidence.handles", "evidence.on"},
    "guidance": {"guidance"},
    "rank": {"evidence.rank"},
    "auto_populate_by_evidence": {"auto_populate.by"},
    "read_by_evidence": {"read.by"},
}
"""Settings that an ablation turns, where they are not the switch of its name."""
WAYS = ("env.evidence.handles=true", "env.evidence.rank=true", "env.leads.on=true", "env.auto_populate.by=evidence")
FULL = load_config(overrides=[*WAYS, "env.read.by=evidence"]).env
SOURCE = open_source("world:100")
CONFIG = load_config(None, ["machine.workers=1"])
NAMES = ("fan_out", "dedup")


@pytest.mark.parametrize("name", [name for name in ABLATIONS if name != "all_off"])
def test_an_ablation_turns_its_mechanism_off_and_nothing_else(name: str) -> None:
    changed = differences(*map(msgspec.to_builtins, (FULL, ABLATIONS[name](FULL))))
    assert {setting for setting, _, _ in changed} == TURNED.get(name, {f"{name}.on"})


@pytest.mark.parametrize("order", ["paper", "stable_first", "epoch"])
@pytest.mark.parametrize("instructions", ["full", "brief"])
def test_all_off_leaves_no_word_of_any_mechanism(order: Any, instructions: Any) -> None:
    rendering = Rendering(order=order, instructions=instructions)
    env, _, text = played(ABLATIONS["all_off"](msgspec.structs.replace(FULL, rendering=rendering)))
    assert [spec.name for spec in env.toolbox.specs] == ["search_corpus", "curate", "end_search"]
    assert [each.switch for each in SWITCHES if re.search(each.words, text)] == []
    ways = r"important|Bridge documents|follows the evidence|not found yet|\(E\d+[);]|\bE3\b"
    assert not re.search(ways, text)


def test_a_model_is_played_without_what_it_was_trained_with() -> None:
    assert ablate_config(CONFIG, "history").machine.model.foreign
    with pytest.raises(UsageError, match="unknown ablation 'hope'; choose from: all, importance_tags"):
        ablate_config(CONFIG, "hope")


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("ablations") / "index"
    build_index(SOURCE.documents(), folder, Config().index)
    return str(folder)


def evaluation(index: str, tasks: int = 3, config: Config = CONFIG, samples: int = 1) -> Evaluation:
    return Evaluation("world:100", "train", SOURCE.tasks("train")[:tasks], index, "scripted", config, samples, seed=3)


def counted(played: list[str], *broken: str) -> Play:

    def play(job: Evaluation, folder: Path) -> dict[str, Any]:
        played.append(folder.name)
        metrics = dict(ensure_run(job, folder))
        return metrics | {"failures": {"infra_error": 1}} if folder.name in broken else metrics

    return play


def test_every_condition_is_a_run_of_the_same_tasks_and_seeds_in_a_table(index: str, tmp_path: Path) -> None:
    table = ablate(evaluation(index, samples=2), tmp_path, NAMES)
    assert [each.name for each in table.conditions] == ["base", *NAMES]
    runs = {name: list(read_episodes(tmp_path / name)) for name in ("base", *NAMES)}
    work = [sorted((each.task.task_id, each.sample_idx, each.seed) for each in run) for run in runs.values()]
    assert work[0] == work[1] == work[2]
    assert len(work[0]) == 6
    assert len({run[0].hashes.env for run in runs.values()}) == 3
    assert msgspec.json.decode((tmp_path / "ablations.json").read_bytes(), type=AblationTable) == table
    assert (tmp_path / "ablations.md").read_text() == markdown(table)
    for name in runs:
        assert not (tmp_path / name / "report.html").exists()
        ensure_report(tmp_path / name)
        assert escape(table.verdict) in (tmp_path / name / "report.html").read_text()


def test_finished_ablations_are_left_alone_and_broken_ones_go_on(index: str, tmp_path: Path) -> None:
    again, last = list[str](), list[str]()
    assert ablate(evaluation(index), tmp_path, NAMES, play=counted([], "dedup")).conditions[-1].broken == 1
    table = ablate(evaluation(index), tmp_path, NAMES, play=counted(again))
    assert ablate(evaluation(index), tmp_path, NAMES, play=counted(last)) == table
    assert (again, last) == (["base", *NAMES], [])
    (tmp_path / "ablations.md").unlink()
    assert ablate(evaluation(index), tmp_path, NAMES) == table
    assert (tmp_path / "ablations.md").is_file()
    (tmp_path / "ablations.json").write_text("{}")
    with pytest.raises(SchemaError, match=r"ablations\.json"):
        ablate(evaluation(index), tmp_path, NAMES)


def test_looking_at_several_ablations_makes_each_less_certain(
    index: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compare, "randomisation_test", lambda *_: 0.03)
    table = ablate(evaluation(index, 1), tmp_path, NAMES)
    assert [each.p for each in table.conditions] == [None, 0.06, 0.06]


def test_what_is_off_already_is_skipped_and_said_so(index: str, tmp_path: Path) -> None:
    config = msgspec.structs.replace(CONFIG, env=ABLATIONS["dedup"](CONFIG.env))
    table = ablate(evaluation(index, config=config), tmp_path, NAMES)
    assert ([each.name for each in table.conditions], table.skipped) == (["base", "fan_out"], ("dedup",))
    assert "Skipped, because it is off in the base: dedup." in markdown(table)
    assert not (tmp_path / "dedup").exists()


def test_a_folder_holds_one_ablation_unless_forced(index: str, tmp_path: Path) -> None:
    ablate(evaluation(index), tmp_path, NAMES)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="holds another ablation"):
        ablate(evaluation(index, 2), tmp_path, NAMES)
    with pytest.raises(UsageError, match="holds another ablation"):
        ablate(evaluation(index), tmp_path, NAMES[:1])
    assert ablate(evaluation(index, 2), tmp_path, NAMES[:1], force=True).tasks == 2
    assert (tmp_path / "notes.txt").is_file()
    assert not list((tmp_path / "dedup").iterdir())
    ensure_run(evaluation(index, 1), tmp_path / "run")
    for force in (False, True):
        with pytest.raises(UsageError, match="choose another --out"):
            ablate(evaluation(index), tmp_path / "run", NAMES, force=force)


def test_ablations_that_are_killed_while_they_write_are_completed(index: str, tmp_path: Path) -> None:
    job = evaluation(index, 1)

    def outputs(out: Path) -> list[Any]:
        tables = [(out / name).read_bytes() for name in ("ablations.json", "ablations.md")]
        return [*tables, repeatable(out / "base"), repeatable(out / "grep")]

    ablate(job, tmp_path / "whole", ["grep"])
    for number in range(0, 60, 3):
        out = tmp_path / str(number)
        ended = die_at_fsync(lambda out=out: ablate(job, out, ["grep"]), number)
        ablate(job, out, ["grep"])
        assert outputs(out) == outputs(tmp_path / "whole"), number
        stage = read_stage(out)
        assert stage.status == "finished"
        if ended == 0:
            break
    assert ended == 0


METRICS = {
    "curated_recall": {"mean": 0.25},
    "answer_recall": {"mean": 0.5},
    "turns": {"mean": 4.0},
    "set_size": {"mean": 9.0},
    "tool_mix": {"search_corpus": 0.5, "fan_out_search": 0.25, "curate": 0.25},
    "failures": {"infra_error": 1},
}


def rows(recalls: dict[str, float]) -> dict[str, dict[str, float]]:
    return {task: {"curated_recall": recall, "answer_recall": recall / 2} for task, recall in recalls.items()}


def test_a_line_by_hand() -> None:
    base = rows({"a": 1.0, "b": 0.5, "c": 0.0, "d": 0.5, "gone": 1.0})
    line = compare_condition("x", METRICS, base, rows({"a": 0.0, "b": 0.5, "c": 0.0, "d": 0.25, "new": 1.0}), 100, 0)
    percent, answer = percent_of(line.change, line.base_recall), percent_of(line.answer_change, line.base_answer_recall)
    assert (line.paired, line.hard_failures, line.broken) == (4, 1, 1)
    assert line.change.mean == pytest.approx(-1.25 / 4)
    assert percent.mean == answer.mean == pytest.approx(100 * -1.25 / 2.0)
    assert percent.low < percent.mean < percent.high
    # Of the four sign patterns of the two tasks that differ, two are as extreme.
    assert line.p == pytest.approx(0.5)
    assert (line.search_share, line.turns, line.set_size) == (0.75, 4.0, 9.0)
    line = compare_condition("x", METRICS, rows({"a": 1.0}), rows({"b": 1.0}), 100, 0)
    assert (line.change, line.p, percent_of(line.change, 0.5), line.paired) == (None, None, None, 0)


def table_of(*lines: Condition, tasks: int = 10) -> AblationTable:
    return AblationTable(dataset="d", split="test", policy="p", tasks=tasks, samples=2, seed=0, conditions=lines)


SHARED = {"recall": 0.5, "answer_recall": 0.5, "search_share": 0.5, "turns": 1.0, "set_size": 1.0, "paired": 9}


def test_the_verdict_names_what_helps_what_does_not_and_what_hurts() -> None:
    changes = {
        "base": (0.0, 0.0, None),
        "useful": (-0.3, -0.1, 0.01),
        "idle": (-0.1, 0.1, 0.9),
        "edge": (0.0, 0.2, 0.2),
        "harmful": (0.1, 0.3, 0.07),
        "all_off": (-0.9, -0.8, 0.001),
    }
    lines = [
        Condition(name=name, change=Interval((low + high) / 2, low, high), p=p, base_recall=0.5, **SHARED)
        for name, (low, high, p) in changes.items()
    ]
    table = table_of(*lines)
    assert table.verdict == (
        "Here helps: useful; does not help (the interval contains 0): idle, edge; hurts: harmful;"
        " corrected p < 0.05: useful."
    )
    assert "Not all of the 10 tasks could be compared: base, useful" in table.remarks
    assert list(cells(table))[1] == (
        *("useful", "0.500", "0.500", "-40.0", "-60.0 to -20.0", "0.010", "", "0", "50%", "1.0", "1.0"),
    )
    assert next(cells(table))[3:8] == ("",) * 5


def test_ablations_that_change_nothing_share_one_line() -> None:
    none = Interval(0.0, 0.0, 0.0)
    lines = [
        Condition(**{**SHARED, "name": name, "turns": turns}, change=none, answer_change=none, p=1.0)
        for name, turns in (("base", 4.0), ("idle", 4.0), ("idler", 4.0), ("slower", 5.0))
    ]
    table = table_of(*lines, tasks=9)
    assert [line[0] for line in cells(table)] == ["base", "slower"]
    assert "Nothing changes without: idle, idler." in markdown(table)
