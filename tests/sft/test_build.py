"""From teachers' runs to a dataset folder, and what is refused on the way."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import typer
from typer.testing import CliRunner

from harness1.cli.sft import build as build_command
from harness1.config import Config, Data, Gates, Sft, load_config, present_tree
from harness1.config.env import read_env
from harness1.data import beir
from harness1.data.open import open_source
from harness1.env.environment import SearchEnv, env_hash
from harness1.env.pieces import counter_of
from harness1.episodes.rollout import rollout
from harness1.errors import SchemaError, UsageError
from harness1.models.chat_format import ChatFormat
from harness1.models.checkpoint import CHECKPOINT, Checkpoint
from harness1.models.formats import open_format
from harness1.models.tokenizer import open_tokenizer
from harness1.policy.policy import Policy
from harness1.policy.scripted import ScriptedPolicy
from harness1.policy.wrappers import StudentFormatPolicy
from harness1.records import Episode, Status
from harness1.retrieval.build import build_index
from harness1.retrieval.open import open_retriever
from harness1.rows import RowFile
from harness1.rows.calls import calls_of, prompt_ids
from harness1.runs.files import STAGE, read_stage
from harness1.runs.folder import run_stage
from harness1.runs.journal import EPISODES, read_episodes
from harness1.sft.build import Build, build
from harness1.sft.collect import tasks_of_runs
from harness1.sft.data_card import CARD, HELD_OUT, README, TRAIN, read_card
from tests.support import run
from tests.viewer.making import write_episodes
from tests.vocabularies import chat_format, vocabulary

DATASET = "world:100"
SOURCE = open_source(DATASET)
CONFIG = load_config(None, ["env.rendering.order=epoch", "env.max_turns=6"])
CHAT = chat_format("hermes", "chatml")
TASKS = 8
SFT = Sft(gates=Gates(recall=0.0, near=1.0), held_out=0.25)
"""Gates that let the scripted policy pass."""


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("build") / "index"
    build_index(SOURCE.documents(), folder, CONFIG.index)
    return str(folder)


def collect(
    folder: Path, index: str, config: Config = CONFIG, chat: ChatFormat | None = CHAT, tasks: int = TASKS, step: int = 1
) -> Path:
    """A run folder of the scripted policy, as a collection leaves it; with `step` -1 the last task ended first."""
    policy: Policy = ScriptedPolicy() if chat is None else StudentFormatPolicy(ScriptedPolicy(), chat)
    env = SearchEnv(config.env, open_retriever(index, config), counter=counter_of(policy))
    hashes = {"env": env.hash, "policy": policy.hash, "index": env.retriever.info.index_hash}
    spoken = {} if chat is None else {"format": chat.name, "tokenizer": "/models/student"}
    inputs = {"dataset": DATASET, "split": "train", **hashes}
    stage = run_stage(config, "scripted", inputs, index, {**hashes, "counter": env.counter.hash}, spoken)
    stage.write(folder, status="finished")
    write_episodes(folder, [run(rollout(env, policy, task)) for task in SOURCE.tasks("train")[:tasks][::step]])
    return folder


@pytest.fixture(scope="module")
def teacher(index: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return collect(tmp_path_factory.mktemp("build") / "teacher", index)


@pytest.fixture(scope="module")
def approximate(index: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return collect(tmp_path_factory.mktemp("build") / "approximate", index, chat=None)


@pytest.fixture
def run_copy(teacher: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(teacher, tmp_path / "run"))


def rewritten(folder: Path, change: Callable[[Sequence[Episode]], Sequence[Episode]]) -> Path:
    episodes = change(list(read_episodes(folder)))
    for name in (EPISODES, "tokens.bin"):
        (folder / name).unlink()
    write_episodes(folder, episodes)
    return folder


def changed(folder: Path, inputs: Mapping[str, Any] = {}, outputs: Mapping[str, Any] = {}, **more: Any) -> None:
    stage = read_stage(folder)
    merged = {"inputs": {**stage.inputs, **inputs}, "outputs": {**stage.outputs, **outputs}}
    stage.write(folder, **merged, **more)


def test_a_dataset_holds_the_rows_of_every_turn_and_its_card(teacher: Path, tmp_path: Path) -> None:
    card = build(Build([teacher], SFT), tmp_path / "out")
    train, held_out = RowFile(tmp_path / "out" / TRAIN), RowFile(tmp_path / "out" / HELD_OUT)
    calls = {
        f"{episode.episode_id}/{call.call_id}": (*prompt_ids(episode, call), *call.output_ids)
        for episode in read_episodes(teacher)
        for call in calls_of(episode)
    }
    assert {row.call_ids[0]: row.token_ids for row in [*train, *held_out]} == calls
    assert (len(train), len(held_out)) == (card.train.rows, card.held_out.rows)
    assert (train.trained.sum(), train.lengths.sum()) == (card.train.trained_tokens, card.train.tokens)
    tasks = [{row.metadata["task_id"] for row in rows} for rows in (train, held_out)]
    assert (len(tasks[0]), len(tasks[1]), tasks[0] & tasks[1]) == (6, 2, set())
    assert card.held_out_tasks == {SOURCE.name: tuple(sorted(tasks[1]))}
    order = [(row.metadata["task_id"], row.metadata["turns"]) for row in train]
    assert order == sorted(order)


def test_the_card_says_what_a_checkpoint_must_know(teacher: Path, index: str, tmp_path: Path) -> None:
    card = build(Build([teacher], SFT, licences=["as it is"]), tmp_path)
    assert (card.format, card.format_hash, card.tokenizer) == ("hermes", CHAT.hash, "/models/student")
    assert (card.tokenizer_hash, read_env(card.env)) == (CHAT.tokenizer.hash, CONFIG.env)
    (collected,) = card.runs
    assert (collected.dataset, collected.split, collected.teacher) == (DATASET, "train", "scripted")
    assert (collected.index, collected.episodes) == (str(Path(index).resolve()), TASKS)
    assert msgspec.convert(present_tree(collected.config), Config) == CONFIG
    assert card.env_hash == collected.hashes["env"]
    assert card.compared == {f"{SOURCE.name}:dev": 25, f"{SOURCE.name}:test": 25}
    assert (card.licences, [gate.entered for gate in card.gates]) == ({SOURCE.name: "as it is"}, [TASKS] * 10)
    assert card.curated_recall.count == card.turns.count == TASKS
    assert read_card(tmp_path) == card


def test_hugging_face_datasets_reads_the_folder(teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    settings = msgspec.structs.replace(SFT, rows="epoch", useless_weight=0.5)
    build(Build([teacher], settings), tmp_path / "out")
    loaded = datasets.load_dataset(str(tmp_path / "out"), cache_dir=str(tmp_path / "cache"))
    assert set(loaded) == {"train", "validation"}
    for split, name in (("train", TRAIN), ("validation", HELD_OUT)):
        rows = RowFile(tmp_path / "out" / name)
        assert loaded[split]["token_ids"] == [list(row.token_ids) for row in rows]
        assert loaded[split]["loss_mask"] == [list(row.loss_mask) for row in rows]
        assert loaded[split]["metadata"] == [row.metadata for row in rows]
        weights = [None if row.advantages is None else list(row.advantages) for row in rows]
        assert (loaded[split]["advantages"], loaded[split]["rollout_logprobs"]) == (weights, [None] * len(rows))


def test_rows_are_in_the_order_of_the_tasks_whichever_ended_first(teacher: Path, index: str, tmp_path: Path) -> None:
    backwards = collect(tmp_path / "backwards", index, step=-1)
    for name, source in (("one", teacher), ("other", backwards)):
        build(Build([source], msgspec.structs.replace(SFT, held_out=0.0)), tmp_path / name)
    assert len(RowFile(tmp_path / "one" / HELD_OUT)) == 0
    assert "validation" not in (tmp_path / "one" / README).read_text()
    one, other = (RowFile(tmp_path / name / TRAIN) for name in ("one", "other"))
    assert [row.token_ids for row in one] == [row.token_ids for row in other]
    assert [row.metadata["task_id"] for row in one] == [row.metadata["task_id"] for row in other]


def test_a_finished_folder_is_left_alone_and_another_kept_unless_forced(teacher: Path, tmp_path: Path) -> None:
    job = Build([teacher], SFT)
    card = build(job, tmp_path)
    written = (tmp_path / TRAIN).stat().st_mtime_ns
    assert (build(job, tmp_path), (tmp_path / TRAIN).stat().st_mtime_ns) == (card, written)
    assert build(job, tmp_path, force=True) == card
    assert (tmp_path / TRAIN).stat().st_mtime_ns > written
    (tmp_path / TRAIN).unlink()  # a folder that lost its rows is made again
    build(job, tmp_path)
    assert len(RowFile(tmp_path / TRAIN)) == card.train.rows
    other = Build([teacher], msgspec.structs.replace(SFT, rows="epoch"), licences=["x"])
    with pytest.raises(UsageError, match="differs in settings, licences"):
        build(other, tmp_path)
    with pytest.raises(UsageError, match="holds nothing of `harness1 sft build`"):
        build(job, teacher, force=True)
    assert build(other, tmp_path, force=True).sft["rows"] == "epoch"


def bare(episode: Episode) -> Episode:
    turns = tuple(msgspec.structs.replace(turn, calls=()) for turn in episode.turns)
    return msgspec.structs.replace(episode, turns=turns)


def stray(episode: Episode) -> Episode:
    return msgspec.structs.replace(episode, hashes=msgspec.structs.replace(episode.hashes, env="other"))


def without_hash(run: Path) -> None:
    card = json.loads((run / STAGE).read_text())
    del card["hashes"]["counter"]
    (run / STAGE).write_text(json.dumps(card))


def over(run: Path, name: str, *fields: str) -> None:
    """Put another dataset in the place of the run's: of another name, or with other tasks."""
    taught = SOURCE.tasks("train")
    tasks = [msgspec.structs.replace(task, **dict.fromkeys(fields, f"other {task.task_id}")) for task in taught]
    beir.write(run.parent / name, SOURCE.documents(), tasks)
    changed(run, outputs={"source": str(run.parent / name)})


@pytest.mark.parametrize(
    ("break_it", "error", "says"),
    [
        (shutil.rmtree, UsageError, "is not a run folder"),
        (lambda run: (run / EPISODES).write_bytes(b""), UsageError, "holds no episodes"),
        (lambda run: read_stage(run).write(run, inputs={"query": "why?"}), UsageError, "not a collection"),
        (lambda run: changed(run, inputs={"split": "test"}), UsageError, "run: split test is for testing"),
        (lambda run: changed(run, outputs={"policy": "corrected:hf:s"}), UsageError, "turns would be taught"),
        (lambda run: changed(run, status="interrupted"), UsageError, "run is not finished: .* with --partial"),
        (lambda run: changed(run, status="running"), UsageError, "run is not finished"),
        (lambda run: over(run, SOURCE.name), UsageError, "another dataset named"),
        (lambda run: over(run, "set", "task_id"), UsageError, "set has no task .*it is not the dataset"),
        (lambda run: over(run, "set", "query"), UsageError, "set has .* that asks .*it is not the dataset"),
        (lambda run: rewritten(run, lambda all_: [all_[0], stray(all_[1])]), UsageError, "another configuration"),
        (lambda run: rewritten(run, lambda all_: list(map(bare, all_))), UsageError, "episode .* no token ids"),
        (without_hash, SchemaError, "lacks hashes of the run"),
        (lambda run: (run / "tokens.bin").write_bytes(bytes(100)), SchemaError, r"episodes\.jsonl:1"),
        (lambda run: (run / EPISODES).write_bytes(b"{}\n"), SchemaError, r"episodes\.jsonl:1"),
    ],
)
def test_a_run_that_cannot_be_learned_from_is_refused_before_anything_is_written(
    run_copy: Path, teacher: Path, tmp_path: Path, break_it: Callable[[Path], Any], error: type[UsageError], says: str
) -> None:
    break_it(run_copy)
    with pytest.raises(error, match=says):
        build(Build([teacher, run_copy], SFT), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_runs_that_differ_are_refused_with_what_differs(teacher: Path, index: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="at least one run"):
        build(Build([], SFT), tmp_path / "out")
    other = collect(tmp_path / "other", index, load_config(None, ["env.search.hits=3"]), tasks=1)
    with pytest.raises(UsageError, match=r"other was collected .* env\.max_turns: 6 != 40; env\.search\.hits: 10 != 3"):
        build(Build([teacher, other], SFT), tmp_path / "out")
    compact = collect(tmp_path / "compact", index, chat=chat_format("compact", "chatml"), tasks=1)
    with pytest.raises(UsageError, match="format: hermes != compact"):
        build(Build([teacher, compact], SFT), tmp_path / "out")


def test_a_part_of_a_collection_is_taken_and_the_card_says_so(run_copy: Path, teacher: Path, tmp_path: Path) -> None:
    asked = [task.task_id for task in SOURCE.tasks("train")[: TASKS + 3]]
    changed(run_copy, status="interrupted", inputs={"tasks": asked, "samples": 1})
    card = build(Build([run_copy], SFT, partial=True), tmp_path / "part")
    assert [(each.episodes, each.missing) for each in card.runs] == [(TASKS, 3)]
    changed(run_copy, inputs={"samples": 2})
    (found,) = build(Build([run_copy], SFT, partial=True), tmp_path / "samples").runs
    assert found.missing == TASKS + 3
    (whole,) = build(Build([teacher], SFT), tmp_path / "whole").runs
    assert whole.missing == 0


def test_a_dataset_is_found_from_any_directory(run_copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    beir.write(tmp_path / "set", SOURCE.documents(), SOURCE.tasks("train"))
    changed(run_copy, inputs={"dataset": "set"})
    monkeypatch.chdir(tmp_path)
    (older,) = build(Build([run_copy], SFT), tmp_path / "older").runs
    changed(run_copy, outputs={"source": str(tmp_path / "set")})
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    (found,) = build(Build([run_copy], SFT), tmp_path / "out").runs
    assert older.dataset == found.dataset == str(tmp_path / "set")


def test_a_tokenizer_that_loses_text_is_refused_before_any_gate(approximate: Path, tmp_path: Path) -> None:
    lossy = json.loads(vocabulary("chatml")) | {"normalizer": {"type": "Lowercase"}}
    (tmp_path / "lossy").mkdir()
    (tmp_path / "lossy" / "tokenizer.json").write_text(json.dumps(lossy))
    student = open_format("hermes", open_tokenizer(tmp_path / "lossy"))
    with pytest.raises(UsageError, match="cannot round-trip"):
        build(Build([approximate], Sft(gates=Gates(precision=1.0)), student=student), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_the_gates_refuse_is_refused_at_once_and_what_has_no_row_in_the_end(teacher: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"none of {TASKS} episodes is left: precision dropped {TASKS}; for example"):
        build(Build([teacher], Sft(gates=Gates(recall=0.0, near=1.0, precision=1.0))), tmp_path / "out")
    with pytest.raises(UsageError, match="leak dropped"):
        build(Build([teacher], SFT, against=[f"{DATASET}:train"]), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(UsageError, match=r"no row is left of 8 kept episodes; turns dropped: \d+ too_long"):
        build(Build([teacher], msgspec.structs.replace(SFT, max_tokens=10)), tmp_path / "out")
    assert read_stage(tmp_path / "out").status == "interrupted"
    assert build(Build([teacher], SFT), tmp_path / "out").train.rows


def test_a_run_without_token_ids_is_refused_unless_rendered_again(approximate: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no token ids .* --rerender"):
        build(Build([approximate], SFT), tmp_path)
    card = build(Build([approximate], SFT, student=CHAT, tokenizer="/models/other"), tmp_path)
    assert (card.rerendered, card.format, card.tokenizer) == (True, "hermes", "/models/other")
    assert (card.format_hash, card.tokenizer_hash) == (CHAT.hash, CHAT.tokenizer.hash)
    assert card.train.turns + card.held_out.turns == sum(len(each.turns) for each in read_episodes(approximate))


def test_an_episode_counts_once_as_it_ended_last_a_torn_line_not(teacher: Path, run_copy: Path, tmp_path: Path) -> None:
    def again(episodes: Sequence[Episode]) -> Sequence[Episode]:
        return [msgspec.structs.replace(episodes[0], status=Status.INFRA_ERROR), *episodes]

    card = build(Build([teacher, rewritten(run_copy, again)], SFT), tmp_path / "out")
    gates = {gate.name: (gate.entered, gate.passed) for gate in card.gates}
    assert (gates["fault"], gates["duplicate"]) == ((2 * TASKS, 2 * TASKS), (2 * TASKS, TASKS))
    assert card.train.rows == build(Build([teacher], SFT), tmp_path / "one").train.rows
    (run_copy / EPISODES).write_bytes((run_copy / EPISODES).read_bytes()[:-20])
    heard: list[Path] = []
    card = build(Build([run_copy], SFT), tmp_path / "torn", on_torn=lambda folder, _: heard.append(folder))
    assert (card.gates[0].entered, heard) == (TASKS - 1, [run_copy])


def test_rows_beyond_the_disk_are_refused(teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage(NamedTuple):
        free: int = 1000

    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage())
    with pytest.raises(UsageError, match="no space left"):
        build(Build([teacher], SFT), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def command(*arguments: Any) -> Any:
    app = typer.Typer()
    app.command()(build_command)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_the_command_prints_the_gates_or_the_card(teacher: Path, run_copy: Path, tmp_path: Path) -> None:
    settings = [f"--set=sft.gates.{each}" for each in ("recall=0.0", "near=1.0")]
    shown = command(teacher, "--out", tmp_path / "out", *settings)
    assert shown.exit_code == 0
    assert f"{read_card(tmp_path / 'out').train.rows} rows of 7 tasks" in shown.stdout
    printed = command(teacher, "--out", tmp_path / "out", "--json", *settings)
    assert msgspec.json.decode(printed.stdout) == msgspec.json.decode((tmp_path / "out" / CARD).read_bytes())
    changed(run_copy, status="interrupted", inputs={"tasks": ["one", "two"]})
    part = command(run_copy, "--out", tmp_path / "part", "--partial", *settings)
    assert "2 of its tasks are missing" in " ".join(part.stdout.split())


def test_the_command_renders_again_for_a_tokenizer_or_a_checkpoint_in_the_environment_of_the_runs(
    approximate: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "student"
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes(vocabulary("chatml"))
    monkeypatch.chdir(tmp_path)
    gates = [f"--set=sft.gates.{each}" for each in ("recall=0.0", "near=1.0")]
    plain = ("--out", "plain", "--rerender", "--format", "compact", "--tokenizer", "./student")
    assert command(approximate, *gates, *plain).exit_code == 0
    assert read_card(Path("plain")).format == "compact" != CONFIG.policy.format
    env = CONFIG.env.plain()
    card = Checkpoint(format="compact", counter="c", env=env, env_hash=env_hash(CONFIG.env), base="b")
    (folder / CHECKPOINT).write_bytes(msgspec.json.encode(card))
    options = (*gates, "--out", "out", "--tokenizer", "./student")
    assert "--rerender" in str(command(approximate, *options).exception)
    assert "--tokenizer" in str(command(approximate, "--out", "out", "--rerender").exception)
    done = command(approximate, *options, "--rerender")
    assert done.exit_code == 0, done.exception
    made = read_card(tmp_path / "out")
    assert (made.format, made.tokenizer) == ("compact", str(folder))
    stranger = msgspec.structs.replace(card, env={**env, "max_turns": 7}, env_hash="other")
    (folder / CHECKPOINT).write_bytes(msgspec.json.encode(stranger))
    assert "env.max_turns=6 (trained: 7)" in str(command(approximate, *options, "--rerender").exception)


def test_tasks_of_earlier_work_are_left_out(teacher: Path, run_copy: Path, tmp_path: Path) -> None:
    first = SOURCE.tasks("train")[0].task_id
    changed(run_copy, inputs={"tasks": [first]})
    card = build(Build([teacher], SFT, exclude=[run_copy]), tmp_path / "out")
    (gate,) = (gate for gate in card.gates if gate.name == "excluded")
    assert (gate.entered - gate.passed, first in card.tasks[SOURCE.name]) == (1, False)
    assert tasks_of_runs([tmp_path / "out"]) == {(SOURCE.name, task.task_id) for task in SOURCE.tasks("train")[1:TASKS]}
    with pytest.raises(UsageError, match="excluded dropped 8; for example"):
        build(Build([teacher], SFT, exclude=[tmp_path / "out", run_copy]), tmp_path / "none")
    with pytest.raises(UsageError, match="another dataset"):
        build(Build([teacher], SFT), tmp_path / "out")


def test_an_episode_whose_gold_set_is_that_of_an_evaluation_task_is_left_out(teacher: Path, tmp_path: Path) -> None:
    taught = SOURCE.tasks("train")[1]
    asked = msgspec.structs.replace(taught, task_id="q", query="Something quite different?", split="test")
    beir.write(tmp_path / SOURCE.name, SOURCE.documents(), [asked])
    card = build(Build([teacher], SFT, against=[str(tmp_path / SOURCE.name)]), tmp_path / "out")
    (gate,) = (gate for gate in card.gates if gate.name == "leak")
    (dropped,) = gate.dropped
    assert dropped.startswith(f"{SOURCE.name}/{taught.task_id} ")
    assert dropped.endswith(f"has the gold set of {SOURCE.name}:test/q")
    kept = build(Build([teacher], SFT, Data(leaks="keep")), tmp_path / "kept")
    assert kept.compared == {}
    assert taught.task_id in kept.tasks[SOURCE.name]
