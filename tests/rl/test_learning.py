"""The whole loop of reinforcement learning, on a game that a small model learns in seconds."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from harness1.config import Config
from harness1.engines.loop import STATE
from harness1.episodes.jobs import EpisodeJob, EpisodeSetup
from harness1.errors import InfrastructureFault, UsageError
from harness1.models.causal_model import load_causal_model
from harness1.models.checkpoint import Checkpoint, read_checkpoint
from harness1.records import Episode
from harness1.rl.rows import training_rows
from harness1.rl.train import EPISODES, Training, train_policy
from harness1.rows import TrainRow
from harness1.runs.files import read_stage
from harness1.runs.journal import EpisodeStore, read_episodes
from harness1.training.log import read_log
from harness1.training.saving import read_state
from tests.rl.toy import ToyRollouts, open_toy, share_of_good, toy_config, toy_tasks
from tests.tiny_models import save_byte_tokenizer, save_tiny_model
from tests.vocabularies import chat_format

CHAT = chat_format("compact", "chatml")


class Deaf(ToyRollouts):
    """Takes its first weights for new ones."""

    def __init__(self, folder: Path) -> None:
        super().__init__(open_toy(folder))
        self.first = load_causal_model(folder, "cpu", "float32").state_dict()

    async def publish(self, state: Mapping[str, Any], version: int) -> None:
        await super().publish(self.first, version)


class Forgetful(ToyRollouts):
    """Records every call under the first version."""

    async def play(self, job: EpisodeJob) -> Episode:
        return msgspec.structs.replace(await super().play(job), policy_versions=(0, 0))


def interrupting(group: int) -> Callable[[EpisodeJob], float]:
    """A latency that presses Ctrl-C when a group is begun, once, and lets the group wait."""

    def latency(job: EpisodeJob) -> float:
        if job.group_id != str(group):
            return 0.0
        if job.sample_idx % 4 == 0:
            signal.raise_signal(signal.SIGINT)
        return 5.0

    return latency


def interrupting_rows(group: int, times: int = 1) -> Callable[..., list[TrainRow]]:
    """Rows that press Ctrl-C while they are made of a batch with this group."""

    def rows(groups: Any, config: Config) -> list[TrainRow]:
        for _ in range(times if any(each.index == group for each in groups) else 0):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.3)
        return training(groups, config)

    return rows


def training(groups: Any, config: Config) -> list[TrainRow]:
    return training_rows(groups, config.rl)


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """Ctrl-C works, also where a shell started the tests in the background and they ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Stopped(Exception):
    """A crash, planted."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    save_byte_tokenizer(folder)
    return save_tiny_model(folder, initializer_range=0.05)


def work_in(out: Path, base: Path, config: Config, **fields: Any) -> Training:
    tasks = toy_tasks(12)
    return Training(tasks[:8], tasks[8:], [EpisodeSetup(config, "", "hf:toy")], base, out, config, **fields)


def trained(
    out: Path,
    base: Path,
    overrides: list[str] | None = None,
    stop_at: int | None = None,
    rollouts: Callable[[Path], ToyRollouts] = lambda folder: ToyRollouts(open_toy(folder)),
    **fields: Any,
) -> Checkpoint:
    def on_step(batch: int, batches: int, values: Mapping[str, float]) -> None:
        if batch == stop_at and "loss" in values:
            raise Stopped

    config = toy_config(overrides)
    work = work_in(out, base, config, **fields)
    return train_policy(work, nullcontext(rollouts(base)), CHAT, "toy", on_step)


def one_by_one(folder: Path) -> ToyRollouts:
    """Nothing is decoded beside a call: equal to the bit, whatever the time."""
    return ToyRollouts(open_toy(folder, rows=1))


def held_out_rewards(out: Path) -> list[float]:
    return [line["held_out/reward"] for line in read_log(out) if "held_out/reward" in line]


def steps(out: Path) -> list[dict[str, Any]]:
    return [line for line in read_log(out) if "loss" in line]


TIMES = ("seconds", "wait_seconds", "train_seconds")
GATE = ("max_difference", "mean_k3", "beyond_bounds", "effective_share", "largest_ratio")
OWN = (*TIMES, *(f"gate/{name}" for name in GATE))
"""Of a process, not of the training."""


def test_a_policy_learns_what_is_rewarded(tmp_path: Path, base: Path) -> None:
    done = trained(tmp_path / "out", base)
    before, after = held_out_rewards(tmp_path / "out")
    assert after - before > 0.25
    assert done.metrics["reward"] == after
    assert done == read_checkpoint(tmp_path / "out")
    lines = steps(tmp_path / "out")
    assert [line["step"] for line in lines] == list(range(1, 11))
    assert {line["staleness_max"] for line in lines} == {0.0}
    assert all(abs(line["k3"]) < 1e-6 for line in lines)  # one step on what the very weights sampled


def test_shuffled_advantages_do_not_learn(tmp_path: Path, base: Path) -> None:
    def shuffled(groups: Any, config: Config) -> list[TrainRow]:
        rows = training_rows(groups, config.rl)
        values = [max(row.advantages or (0.0,), key=abs) for row in rows]
        turned = values[1::2] + values[::2]
        return [
            msgspec.structs.replace(row, advantages=tuple(value * mask for mask in row.loss_mask))
            for row, value in zip(rows, turned, strict=True)
        ]

    trained(tmp_path / "out", base, make_rows=shuffled)
    before, after = held_out_rewards(tmp_path / "out")
    assert after - before < 0.1


def test_a_resumed_training_equals_the_uninterrupted_one(tmp_path: Path, base: Path) -> None:
    trained(tmp_path / "whole", base, rollouts=one_by_one)
    with pytest.raises(Stopped):
        trained(tmp_path / "cut", base, stop_at=4, rollouts=one_by_one)
    trained(tmp_path / "cut", base, rollouts=one_by_one)
    stage = read_stage(tmp_path / "whole")
    assert stage.inputs["rl"]["anchors"] == stage.inputs["rl"]["kl"] == 0.0  # so that older records resume
    whole, cut = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "cut"))
    assert all(torch.equal(whole[name], cut[name]) for name in whole)
    for one, other in zip(steps(tmp_path / "whole"), steps(tmp_path / "cut"), strict=True):
        assert {name: value for name, value in one.items() if name not in OWN} == {
            name: value for name, value in other.items() if name not in OWN
        }


def test_a_batch_may_be_some_batches_old_and_no_older(tmp_path: Path, base: Path) -> None:
    def slow(folder: Path) -> ToyRollouts:
        return ToyRollouts(open_toy(folder), latency=lambda job: 0.2 * (int(job.group_id or 0) % 3))

    trained(tmp_path / "out", base, ["rl.staleness=2", "rl.batches=20"], rollouts=slow)
    ages = [line["staleness_max"] for line in steps(tmp_path / "out")]
    assert 0 < max(ages) <= 2
    before, after = held_out_rewards(tmp_path / "out")
    assert after - before > 0.2


def test_weights_that_did_not_sample_are_refused_before_the_first_step(tmp_path: Path, base: Path) -> None:
    other = save_tiny_model(tmp_path / "other", seed=7, initializer_range=0.05)
    shutil.copy(base / "tokenizer.json", other)
    with pytest.raises(UsageError, match="rollouts are not from the model"):
        trained(tmp_path / "out", base, rollouts=lambda _: Deaf(other))
    assert steps(tmp_path / "out") == []
    # It begins with its own weights, whatever was sampled by before; and so does one that is resumed.
    trained(tmp_path / "own", base, ["rl.batches=1"], rollouts=lambda _: ToyRollouts(open_toy(other)))
    assert steps(tmp_path / "own")[0]["gate/max_difference"] < 1e-4
    with pytest.raises(Stopped):
        trained(tmp_path / "cut", base, stop_at=4)
    with pytest.raises(UsageError, match="rollouts are not from the model"):
        trained(tmp_path / "cut", base, rollouts=Deaf)


class Interrupted(ToyRollouts):
    """Presses Ctrl-C while the third version is published."""

    async def publish(self, state: Mapping[str, Any], version: int) -> None:
        if version == 3:
            signal.raise_signal(signal.SIGINT)
        await asyncio.sleep(0)
        await super().publish(state, version)


@pytest.mark.parametrize("within", [0, 1, 2, 3], ids=["between", "within one", "twice within one", "publishing"])
def test_an_interrupt_loses_no_batch(tmp_path: Path, base: Path, within: int) -> None:
    settings = ["train.save_every=0"]

    def rollouts(folder: Path) -> ToyRollouts:
        latency = interrupting(1000 if within else 14)
        return Interrupted(open_toy(folder)) if within == 3 else ToyRollouts(open_toy(folder), latency=latency)

    with pytest.raises(KeyboardInterrupt):
        trained(
            tmp_path,
            base,
            settings,
            rollouts=rollouts,
            make_rows=interrupting_rows(8, within) if within in (1, 2) else training,
        )
    stage, state = read_stage(tmp_path), read_state(tmp_path / STATE)
    assert stage.status == "interrupted"
    done = [line["step"] for line in steps(tmp_path)]
    assert done == list(range(1, state["version"] + 1))
    assert len(done) == (3 if within else len(done)) > 0
    trained(tmp_path, base, settings)
    assert [line["step"] for line in steps(tmp_path)] == list(range(1, 11))


def test_a_training_under_way_elsewhere_keeps_its_log(tmp_path: Path, base: Path) -> None:
    with pytest.raises(Stopped):
        trained(tmp_path, base, stop_at=2)
    before = read_log(tmp_path)
    assert before
    with EpisodeStore(tmp_path / EPISODES), pytest.raises(UsageError, match="another process"):
        trained(tmp_path, base)
    assert read_log(tmp_path) == before


def test_a_validation_that_faults_broke_is_played_again_and_chooses_nothing_if_they_stay(
    tmp_path: Path, base: Path
) -> None:
    """Of four held-out tasks one fails once, and from the second batch on another one always. Rewards rise with each
    batch."""
    played, opened = list[str](), list[ToyRollouts]()

    def broken(job: EpisodeJob) -> bool:
        if job.group_id is not None:
            return False
        played.append(name := job.task.task_id)
        return played.count(name) == 1 if name == "toy-8" else name == "toy-9" and opened[0].published[-1] > 1

    def price(episode: Episode) -> float:
        return share_of_good(episode) + opened[0].published[-1]

    def rollouts(folder: Path) -> ToyRollouts:
        opened.append(ToyRollouts(open_toy(folder), broken=broken, price=price))
        return opened[0]

    settings = ["rl.batches=4", "train.watch.every=1"]
    done = trained(tmp_path, base, settings, rollouts=rollouts)
    looks = [line for line in read_log(tmp_path) if "held_out/reward" in line]
    assert [line.get("held_out/faults") for line in looks] == [None, None, 1.0, 1.0, 1.0]
    assert done.step == 1
    assert done.metrics["reward"] == looks[1]["held_out/reward"]
    assert played.count("toy-8") == 6


def test_batches_of_a_training_in_turns_do_not_depend_on_what_finishes_first(tmp_path: Path, base: Path) -> None:
    def trace(name: str, latency: Callable[[EpisodeJob], float]) -> tuple[list[TrainRow], bytes]:
        seen: list[TrainRow] = []

        def rows(groups: Any, config: Config) -> list[TrainRow]:
            made = training(groups, config)
            seen.extend(made)
            return made

        def rollouts(folder: Path) -> ToyRollouts:
            return ToyRollouts(open_toy(folder, rows=1), latency=latency)

        trained(tmp_path / name, base, ["rl.batches=3"], rollouts=rollouts, make_rows=rows)
        return seen, (tmp_path / name / "model.safetensors").read_bytes()

    def late(job: EpisodeJob) -> float:
        return Random(f"{job.task.task_id}/{job.sample_idx}").uniform(0.0, 0.05)

    assert trace("at once", lambda _: 0.0) == trace("shuffled", late)


def test_broken_episodes_are_left_out_and_groups_that_broke_or_have_no_difference_replaced(
    tmp_path: Path, base: Path
) -> None:
    def flat(episode: Any) -> float:
        return 0.5 if int(episode.group_id or 0) == 0 else share_of_good(episode) + episode.sample_idx

    def broken(job: EpisodeJob) -> bool:
        group = int(job.group_id or 0)
        return job.group_id is not None and (group == 1 or (group == 2 and job.sample_idx % 4 == 0))

    def rollouts(folder: Path) -> ToyRollouts:
        return ToyRollouts(open_toy(folder), broken=broken, price=flat)

    trained(tmp_path / "out", base, ["rl.batches=1"], rollouts=rollouts)
    (line,) = steps(tmp_path / "out")
    assert (line["groups/trained"], line["groups/filtered"], line["groups/faulty"]) == (4.0, 1.0, 1.0)
    assert line["rows"] == 2 * (4 * 4 - 1)
    groups = {int(episode.group_id or 0) for episode in read_episodes(tmp_path / "out" / EPISODES) if episode.group_id}
    assert set(range(6)) <= groups


@pytest.mark.parametrize(
    ("rollouts", "error", "says"),
    [
        (lambda folder: Forgetful(open_toy(folder)), InfrastructureFault, "old versions"),
        (
            lambda folder: ToyRollouts(open_toy(folder), broken=lambda job: bool(job.group_id)),
            InfrastructureFault,
            "planted",
        ),
        (lambda folder: ToyRollouts(open_toy(folder), price=lambda _: 1.0), UsageError, "same reward"),
    ],
    ids=["stale", "faults", "no difference"],
)
def test_training_stops_when_nothing_usable_comes(
    tmp_path: Path, base: Path, rollouts: Callable[[Path], ToyRollouts], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        trained(tmp_path / "out", base, rollouts=rollouts)
