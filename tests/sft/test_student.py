"""A student beside its dataset: what it cannot learn is refused, and held-out tasks are run as the teacher's were."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from harness1.config import Config, Lora, Validation, load_config
from harness1.data.open import open_source
from harness1.engines.engine import LocalEngine, TrainerJob, open_local_engine
from harness1.errors import SchemaError, UsageError
from harness1.models.transformers_backend import TransformersBackend, open_transformers
from harness1.policy.scripted import ScriptedPolicy
from harness1.policy.wrappers import StudentFormatPolicy
from harness1.records import Sampling, Task
from harness1.rows import RowFile
from harness1.runs.files import read_stage
from harness1.sft import train as held_out
from harness1.sft.data_card import CARD, HELD_OUT, TRAIN, read_card
from harness1.sft.train import HeldOutValidation, Student, fine_tune, pick_turns
from harness1.training.algorithm import NegativeLogLikelihood
from harness1.training.saving import disk_bytes
from harness1.training.trainable import load_trainable
from tests.sft.test_fine_tuning import CONFIG, QUICK, WORLD, Place, save_student, silent, tuning
from tests.support import run

NAME = open_source(WORLD).name


@pytest.fixture(scope="module")
def student(place: Place) -> Student:
    return Student.of(place.model, read_card(place.rows))


def taught_in(student: Student, *tasks: tuple[str, str, list[Task]]) -> Student:
    (one,) = student.card.runs
    runs = tuple(msgspec.structs.replace(one, name=name, dataset=dataset) for name, dataset, _ in tasks)
    held = {name: tuple(sorted(task.task_id for task in chosen)) for name, _, chosen in tasks}
    card = msgspec.structs.replace(student.card, runs=runs, held_out_tasks=held)
    return Student(student.folder, card, student.chat, student.env)


@pytest.mark.usefixtures("unloaded")
def test_rows_may_be_as_long_as_the_model_reads_and_no_longer(place: Place, tmp_path: Path) -> None:
    rows, card = RowFile(place.rows / TRAIN), read_card(place.rows)
    longest = int(rows.lengths.max())
    models = {
        window: save_student(tmp_path / str(window), max_position_embeddings=window)
        for window in (longest, longest - 1)
    }
    Student.of(models[longest], card).check_length(rows)
    with pytest.raises(UsageError, match=f"a row has {longest} tokens, but {longest - 1} reads {longest - 1}: build"):
        fine_tune(tuning(place, tmp_path / "out", model=models[longest - 1]), silent)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("config", [None, "{", '{"max_position_embeddings": "many"}'])
def test_a_folder_without_a_models_shape_is_refused(place: Place, tmp_path: Path, config: str | None) -> None:
    (tmp_path / "tokenizer.json").write_bytes((place.model / "tokenizer.json").read_bytes())
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    with pytest.raises(UsageError, match=r"has no readable config\.json"):
        Student.of(tmp_path, read_card(place.rows)).check_length(RowFile(place.rows / TRAIN))
    (tmp_path / "config.json").write_text("{}")  # a model that names no window reads every row
    Student.of(tmp_path, read_card(place.rows)).check_length(RowFile(place.rows / TRAIN))


def test_held_out_tasks_are_those_of_no_trained_row_of_each_dataset_in_turn(place: Place, student: Student) -> None:
    found = student.list_held_out(100)
    tasks = {task.task_id for _, task in found}
    assert tasks == {row.metadata["task_id"] for row in RowFile(place.rows / HELD_OUT)}
    assert not tasks & {row.metadata["task_id"] for row in RowFile(place.rows / TRAIN)}
    assert all(task.gold is not None for _, task in found)
    assert (student.list_held_out(1), student.list_held_out(0)) == (found[:1], [])
    many, few = open_source("world:60").tasks("train")[3:6], open_source("world:80").tasks("train")[1:2]
    both = taught_in(student, ("small", "world:60", many), ("large", "world:80", few))
    named = [(run.name, task.task_id) for run, task in both.list_held_out(3)]
    assert named == [("small", many[0].task_id), ("large", few[0].task_id), ("small", many[1].task_id)]
    twice = taught_in(student, (NAME, WORLD, many[:2]), (NAME, WORLD, many[:2]))
    assert len(twice.list_held_out(10)) == 2  # of two runs over one dataset, once


def test_episodes_are_run_as_the_teachers_were_where_its_dataset_and_index_still_are(
    place: Place, student: Student, tmp_path: Path
) -> None:
    def watch(student: Student) -> HeldOutValidation:
        train = msgspec.structs.replace(QUICK, watch=Validation(turns=0, tasks=1))
        config = msgspec.structs.replace(load_config(None, ["env.max_turns=2"]), train=train)
        return HeldOutValidation(student, RowFile(place.rows / HELD_OUT), config, "cpu")

    (one,) = student.card.runs
    (setup,) = watch(student)._setups
    env = setup.environment(setup.open_retriever(), StudentFormatPolicy(ScriptedPolicy(), student.chat))
    assert setup.config.env == student.env == CONFIG.env != Config().env
    assert (env.hash, env.counter.hash) == (student.card.env_hash, student.card.format_hash)
    assert env.retriever.info.index_hash == one.hashes["index"]
    for gone in ({"index": str(tmp_path / "nowhere")}, {"dataset": str(tmp_path / "nowhere")}):
        card = msgspec.structs.replace(student.card, runs=(msgspec.structs.replace(one, **gone),))
        with pytest.raises(UsageError, match="nowhere"):
            watch(Student(student.folder, card, student.chat, student.env))


def of_another_environment(rows: Path) -> None:
    card = json.loads((rows / CARD).read_text())
    (rows / CARD).write_text(json.dumps(card | {"env": {"max_turns": "many"}}))


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch) -> None:

    def load(*_: object, **__: object) -> None:
        pytest.fail("the model was loaded")

    monkeypatch.setattr("harness1.engines.engine.load_trainable", load)
    monkeypatch.setattr("harness1.sft.train.train_with_trl", load)
    monkeypatch.setattr("harness1.sft.train.open_transformers", load)


@pytest.mark.usefixtures("unloaded")
@pytest.mark.parametrize(
    ("break_it", "error", "says"),
    [
        (shutil.rmtree, UsageError, "rows is not a finished dataset: run harness1 sft build"),
        (lambda rows: read_stage(rows).write(rows, status="interrupted"), UsageError, "rows is not a finished dataset"),
        (lambda rows: (rows / TRAIN).write_bytes(b""), UsageError, "rows has no rows to train on"),
        (lambda rows: (rows / TRAIN).unlink(), UsageError, "there is no train.jsonl in .*rows"),
        (lambda rows: (rows / CARD).unlink(), UsageError, "it has no card.json"),
        (lambda rows: (rows / CARD).write_text('{"runs": 3}'), SchemaError, "card.json is not a data card"),
        (of_another_environment, SchemaError, "environment cannot be read: Expected `int`"),
        (lambda rows: (rows / TRAIN).write_text('{"token_ids": [1]\n'), SchemaError, r"jsonl:1: not a training row"),
    ],
)
def test_a_dataset_that_is_none_is_refused_before_a_model_is_loaded(
    place: Place, tmp_path: Path, break_it: Callable[[Path], None], error: type[UsageError], says: str
) -> None:
    rows = Path(shutil.copytree(place.rows, tmp_path / "rows"))
    break_it(rows)
    with pytest.raises(error, match=says):
        fine_tune(tuning(place, tmp_path / "out", dataset=rows), silent)
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("unloaded")
@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("qwen", "made with the tokenizer of .*model in the format compact, but .* has another"),
        ("harmony", r"compact format needs a tokenizer with <\|im_start\|>"),
    ],
)
def test_a_model_that_cannot_learn_the_rows_is_refused(place: Place, tmp_path: Path, kind: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        fine_tune(tuning(place, tmp_path / "out", model=save_student(tmp_path / "other", kind)), silent)
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("unloaded")
def test_a_full_disk_is_refused_first(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage, work = shutil.disk_usage(tmp_path), tuning(place, tmp_path / "out")
    needed = disk_bytes(place.model, work.config.train)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=needed))
    work.student()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=needed - 1))
    with pytest.raises(UsageError, match=r"no space left for .*out: it takes about \d+ MB of \d+ free"):
        fine_tune(work, silent)
    assert not (tmp_path / "out").exists()


def watching(student: Student, place: Place, watch: Validation) -> HeldOutValidation:
    config: Config = msgspec.structs.replace(CONFIG, train=msgspec.structs.replace(QUICK, watch=watch))
    return HeldOutValidation(student, RowFile(place.rows / HELD_OUT), config, "cpu")


def training(place: Place, rank: int = 0) -> LocalEngine:
    train = msgspec.structs.replace(QUICK, lora=Lora(rank=rank), rate=1e-2)
    return open_local_engine(TrainerJob(place.model, NegativeLogLikelihood(), train, 3))


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[TransformersBackend]:
    found: list[TransformersBackend] = []

    def opening(*arguments: Any, **options: Any) -> TransformersBackend:
        found.append(open_transformers(*arguments, **options))
        return found[-1]

    monkeypatch.setattr(held_out, "open_transformers", opening)
    return found


def test_a_look_at_rows_alone_needs_no_second_model_and_without_rows_nothing_is_seen(
    place: Place, student: Student, tmp_path: Path, opened: list[TransformersBackend]
) -> None:
    engine = training(place)
    found = run(watching(student, place, Validation(rows=1, turns=0)).validate(engine))
    assert found == {"nll": pytest.approx(engine.loss([RowFile(place.rows / HELD_OUT)[0]]))}
    (tmp_path / HELD_OUT).write_bytes(b"")
    watch = HeldOutValidation(
        student, RowFile(tmp_path / HELD_OUT), msgspec.structs.replace(CONFIG, train=QUICK), "cpu"
    )
    assert run(watch.validate(training(place))) == {}
    assert opened == []


def test_a_look_measures_rows_turns_and_episodes(place: Place, student: Student) -> None:
    found = run(watching(student, place, Validation(rows=2, turns=1, tasks=1)).validate(training(place)))
    assert found.keys() >= {"nll", "valid", "tool_agreement", "action_agreement", "set_size", "turns", "reward"}
    assert (found["valid"], found["format_failures"], found["curated_recall"]) == (0.0, 1.0, 0.0)


@pytest.mark.parametrize("rank", [0, 2])
def test_each_look_samples_from_the_weights_of_that_step_and_changes_none(
    place: Place, student: Student, opened: list[TransformersBackend], rank: int
) -> None:
    rows = list(RowFile(place.rows / TRAIN))
    (turn,) = pick_turns(rows, 1)
    watch, engine = watching(student, place, Validation(rows=1, turns=1)), training(place, rank)
    before = [parameter.detach().clone() for parameter in engine.parameters]
    run(watch.validate(engine))
    assert all(map(torch.equal, before, engine.parameters))
    engine.step(rows)
    run(watch.validate(engine))
    (backend,) = opened
    said = asyncio.run(backend.generate(turn.prompt_ids, Sampling(max_tokens=1, seed=1)))

    def logprob(model: Any) -> float:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([turn.prompt_ids]), use_cache=False).logits[0, -1]
        return float(logits.log_softmax(-1)[said.output_ids[0]])

    assert said.output_logprobs[0] == pytest.approx(logprob(engine.model), abs=1e-4)
    assert abs(logprob(engine.model) - logprob(load_trainable(place.model, QUICK, "cpu"))) > 1e-2
    assert (said.version_start, said.version_end) == (1, 1)
