"""The recipe `tiny` at toy size: the whole chain, nothing done twice, and a fault planted for
each gate, which is found at its own stage."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from harness1.cli.recipe import parse_command
from harness1.data import beir
from harness1.models.checkpoint import CHECKPOINT, read_checkpoint
from harness1.models.tokenizer import TOKENIZER
from harness1.recipe.gates import EPISODES as OWN
from harness1.recipe.gates import StageCase, judge_stage
from harness1.recipe.run import RecipeState, read_recipe_state
from harness1.records import Episode, RewardRecord
from harness1.rl.admission import REPORT, read_report
from harness1.rows import RowFile, write_rows
from harness1.runs.files import read_stage
from harness1.runs.journal import EPISODES, LINES, read_episodes
from harness1.sft.data_card import TRAIN
from harness1.training.log import LOG

TOY = ["documents=200", "samples=1", "epochs=8", "checked=20", "batches=2", "tasks=10", "threads=1"]
TOY += ["rl.gates.progress=false", "compare.gates.better=false"]
"""Settings of two minutes, too short to be sure of progress."""
Plant = Callable[[Path], object]


def tiny(out: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "harness1", "recipe", "run", "tiny", "--out", out, *(f"--set={each}" for each in TOY)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("tiny") / "work"
    ended = tiny(out)
    assert ended.returncode == 0, ended.stderr[-2000:]
    return out


def journal_of(work: Path) -> RecipeState:
    journal = read_recipe_state(work)
    assert journal is not None
    return journal


def failing(work: Path, only: str = "", asked: str = "") -> dict[str, list[str]]:
    """The gates that fail now, by stage, judged as when it has just ended: of `only` one stage, or of all. The toy asks
    less than the recipe: gate `asked` has its own bound again."""
    found = {}
    for name, record in journal_of(work).stages.items():
        if only in ("", name):
            bounds = {gate: bound for gate, bound in record.gates.items() if gate != asked}
            findings = judge_stage(StageCase(*parse_command(record.words), work / name), bounds)
            if failed := [each.gate for each in findings if not each.passed]:
                found[name] = failed
    return found


@pytest.mark.service
def test_the_recipe_goes_the_whole_way_and_does_nothing_twice(finished: Path) -> None:
    stages = journal_of(finished).stages
    played = ["random", "single-shot", "scripted", "oracle"]
    taught = ["teacher", "rows", "sft", "admission", "rl"]
    assert [*stages][:12] == ["world", "index", "model", *played, *taught]
    assert {record.status for record in stages.values()} == {"passed"}
    assert all(read_checkpoint(finished / name) is not None for name in ("sft", "rl"))
    assert len(list(read_episodes(finished / "rl" / OWN))) >= 2 * 16 * 8
    assert [len(list(read_episodes(finished / name))) for name in ("eval-sft", "eval-rl")] == [10, 20]
    assert {len(list(read_episodes(finished / name))) for name in played} == {10}
    windows = {read_stage(finished / name).hashes["tokenizer"] for name in (*played, "eval-rl")}
    assert len(windows) == 1
    made = {path: path.stat().st_mtime_ns for path in finished.rglob("*") if path.name in (CHECKPOINT, EPISODES)}
    again = tiny(finished)
    assert again.returncode == 0, again.stderr[-2000:]
    assert again.stderr.count("passed before") == len(stages)
    assert {path: path.stat().st_mtime_ns for path in made} == made


@pytest.mark.service
def test_without_a_fault_no_gate_fails(finished: Path) -> None:
    assert failing(finished) == {}


def card(folder: Path, field: str, **changes: object) -> None:
    stage = read_stage(folder)
    stage.write(folder, **{field: getattr(stage, field) | changes})


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def rewrite(folder: Path, change: Callable[[Episode], Episode]) -> None:
    """Change the first episode of a run as somebody would who also removes the digests."""
    episodes = list(read_episodes(folder))
    episodes[0] = change(episodes[0])
    plain = [msgspec.to_builtins(each) for each in episodes]
    for each in plain:
        each.pop("digest", None)
    (folder / EPISODES).write_bytes(b"".join(msgspec.json.encode(each) + b"\n" for each in plain))
    stage = read_stage(folder)
    stage.write(folder, outputs={key: value for key, value in stage.outputs.items() if key != LINES})


def add_to_reward(folder: Path, more: float) -> None:
    def change(episode: Episode) -> Episode:
        reward = RewardRecord(episode.reward.total + more, episode.reward.terms)
        return msgspec.structs.replace(episode, reward=reward)

    rewrite(folder, change)


def log(folder: Path, **values: float | None) -> None:
    lines = [json.loads(line) for line in (folder / LOG).read_text().splitlines()]
    lines = [line | {name: value for name, value in values.items() if name in line} for line in lines]
    (folder / LOG).write_text("".join(json.dumps(line) + "\n" for line in lines))


def flip_byte(folder: Path) -> None:
    path = max((each for each in folder.rglob("*") if each.is_file()), key=lambda each: each.stat().st_size)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def share_gold(folder: Path) -> None:
    test = (folder / beir.QRELS / "test.tsv").read_text().splitlines()
    query = test[1].partition("\t")[0]
    gold = [line.partition("\t")[2] for line in test if line.startswith(f"{query}\t")]
    lines = (folder / beir.QRELS / "train.tsv").read_text().splitlines()
    first = lines[1].split("\t")[0]
    kept = [line for line in lines if not line.startswith(f"{first}\t")]
    (folder / beir.QRELS / "train.tsv").write_text("\n".join([*kept, *(f"{first}\t{each}" for each in gold)]) + "\n")


def poison_mask(folder: Path) -> None:
    rows = list(RowFile(folder / TRAIN))
    mask = list(rows[0].loss_mask)
    mask[0] = 1 - mask[0]
    rows[0] = msgspec.structs.replace(rows[0], loss_mask=tuple(mask), rollout_logprobs=None)
    write_rows(folder / TRAIN, rows)


def change_tokenizer(folder: Path) -> None:
    (folder / TOKENIZER).write_text((folder / TOKENIZER).read_text() + " ")


def admit_nothing(folder: Path) -> None:
    report = read_report(folder)
    tasks = tuple(msgspec.structs.replace(each, rejected=("solved",)) for each in report.tasks)
    (folder / REPORT).write_bytes(msgspec.json.encode(msgspec.structs.replace(report, tasks=tasks)))


def drop_actions(folder: Path) -> None:
    def change(episode: Episode) -> Episode:
        turns = tuple(msgspec.structs.replace(turn, action=None) for turn in episode.turns)
        return msgspec.structs.replace(episode, turns=turns * 400)

    rewrite(folder, change)


NAN_IN_LOG: Plant = lambda folder: log(folder, loss=None)  # noqa: E731 - as NaN is written
FOREIGN: Plant = lambda folder: edit(folder / CHECKPOINT, base="0" * 64)  # noqa: E731
WORSE: Plant = lambda folder: edit(folder / CHECKPOINT, metrics={"nll": 99.0, "reward": -9.0})  # noqa: E731
LOW_RECALL: Plant = lambda folder: edit(folder / "metrics.json", curated_recall={"mean": 0.1})  # noqa: E731
PLANTS: list[tuple[str, str, Plant]] = [
    ("world", "tasks", lambda folder: (folder / beir.QRELS / "train.tsv").unlink()),
    ("world", "shared_gold", share_gold),
    ("index", "documents", lambda folder: card(folder, "outputs", documents=0)),
    ("index", "damaged", flip_byte),
    ("teacher", "faults", lambda folder: card(folder, "gates", failures={"infra_error": 1})),
    ("teacher", "terms", lambda folder: add_to_reward(folder, 0.01)),
    ("teacher", "valid", drop_actions),
    ("teacher", "recall", LOW_RECALL),
    ("rows", "rows", lambda folder: (folder / TRAIN).write_bytes(b"")),
    ("rows", "masks", poison_mask),
    ("sft", "tokenizer", change_tokenizer),
    ("sft", "finite", NAN_IN_LOG),
    ("sft", "origin", FOREIGN),
    ("sft", "progress", WORSE),
    ("admission", "admitted", admit_nothing),
    ("rl", "finite", NAN_IN_LOG),
    ("rl", "origin", FOREIGN),
    ("rl", "progress", WORSE),
    ("rl", "start", lambda folder: log(folder, **{"gate/mean_k3": 0.1})),
    ("rl", "signal", lambda folder: log(folder, zero_variance=1.0)),
    ("rl", "terms", lambda folder: add_to_reward(folder / OWN, 0.01)),
    ("oracle", "oracle", LOW_RECALL),
]


@pytest.mark.service
@pytest.mark.parametrize(("stage", "gate", "plant"), PLANTS, ids=[f"{stage}-{gate}" for stage, gate, _ in PLANTS])
def test_a_planted_fault_is_found_by_its_gate_at_its_stage(
    finished: Path, tmp_path: Path, stage: str, gate: str, plant: Plant
) -> None:
    kept = tmp_path / "kept"
    shutil.copytree(finished / stage, kept)
    try:
        plant(finished / stage)
        assert gate in failing(finished, stage, gate)[stage]
    finally:
        shutil.rmtree(finished / stage)
        shutil.move(kept, finished / stage)


@pytest.mark.service
def test_a_file_that_was_changed_since_stops_the_recipe(finished: Path, tmp_path: Path) -> None:
    work = tmp_path / "work"
    shutil.copytree(finished, work)
    poison_mask(work / "rows")
    for named in (work / "recipe.json", work / "rows" / "card.json"):  # which say where the work folder is
        named.write_text(named.read_text().replace(str(finished), str(work)))
    ended = tiny(work)
    assert ended.returncode == 1
    assert "stage rows failed: gate unchanged: changes to rows" in ended.stderr
