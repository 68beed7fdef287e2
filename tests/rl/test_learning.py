"""The whole loop of reinforcement learning, on a game that a small model learns in seconds."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, cast

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from harness1.config import Config, load_config
from harness1.engines.loop import STATE
from harness1.episodes.jobs import EpisodeJob, EpisodeSetup
from harness1.errors import ConfigError, InfrastructureFault, UsageError
from harness1.models.causal_model import load_causal_model
from harness1.models.checkpoint import Checkpoint, read_checkpoint
from harness1.models.weight_gate import WeightGate
from harness1.records import Episode
from harness1.rl.groups import training_rows
from harness1.rl.rollouts import publish_to, reserve_devices, write_version
from harness1.rl.train import EPISODES, Training, train_policy
from harness1.rows import TrainRow
from harness1.runs.files import read_stage
from harness1.runs.journal import EpisodeStore, read_episodes
from harness1.training.log import read_log
from harness1.training.saving import load_state
from tests.models.test_token_server import sglang, vllm
from tests.rl.toy import ToyRollouts, open_toy, share_of_good, toy_config, toy_tasks
from tests.support import run
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
    rollouts: ToyRollouts | None = None,
    **fields: Any,
) -> Checkpoint:
    def on_step(batch: int, batches: int, values: Mapping[str, float]) -> None:
        if batch == stop_at and "loss" in values:
            raise Stopped

    work = work_in(out, base, toy_config(overrides), **fields)
    return train_policy(work, nullcontext(rollouts or ToyRollouts(open_toy(base))), CHAT, "toy", on_step)


def one_by_one(folder: Path, **fields: Any) -> ToyRollouts:
    """Nothing is decoded beside a call: equal to the bit, whatever the time."""
    return ToyRollouts(open_toy(folder, rows=1), **fields)


def held_out_rewards(out: Path) -> list[float]:
    return [line["held_out/reward"] for line in read_log(out) if "held_out/reward" in line]


def steps(out: Path) -> list[dict[str, Any]]:
    return [line for line in read_log(out) if "loss" in line]


def test_a_policy_learns_what_is_rewarded(tmp_path: Path, base: Path) -> None:
    done = trained(tmp_path / "out", base)
    before, after = held_out_rewards(tmp_path / "out")
    assert after - before > 0.25
    assert (done.metrics["reward"], done) == (after, read_checkpoint(tmp_path / "out"))
    assert done.origins == read_stage(tmp_path / "out" / "episodes").origins
    assert done.origins == (f"unknown:{base.name}", "unknown:questions")
    lines = steps(tmp_path / "out")
    assert [line["step"] for line in lines] == list(range(1, 11))
    assert {line["staleness_max"] for line in lines} == {0.0}
    assert all(abs(line["k3"]) < 1e-6 for line in lines)  # one step on what the very weights sampled


def test_a_resumed_training_equals_the_uninterrupted_one(tmp_path: Path, base: Path) -> None:
    few = ["rl.batches=5"]
    trained(tmp_path / "whole", base, few, rollouts=one_by_one(base))
    with pytest.raises(Stopped):
        trained(tmp_path / "cut", base, few, stop_at=3, rollouts=one_by_one(base))
    trained(tmp_path / "cut", base, few, rollouts=one_by_one(base))
    stage = read_stage(tmp_path / "whole")
    assert stage.inputs["rl"]["anchors"] == stage.inputs["rl"]["kl"] == 0.0  # so that older records resume
    whole, cut = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "cut"))
    assert all(torch.equal(whole[name], cut[name]) for name in whole)
    logs = [  # without what is of a process, and not of the training
        [[each for each in line.items() if "gate/" not in each[0] and "seconds" not in each[0]] for line in steps(out)]
        for out in (tmp_path / "whole", tmp_path / "cut")
    ]
    assert logs[0] == logs[1]


def test_a_batch_may_be_some_batches_old_and_no_older(tmp_path: Path, base: Path) -> None:
    slow = ToyRollouts(open_toy(base), latency=lambda job: 0.2 * (int(job.group_id or 0) % 3))
    trained(tmp_path / "out", base, ["rl.staleness=2", "rl.batches=8", "train.watch.tasks=0"], rollouts=slow)
    ages = [line["staleness_max"] for line in steps(tmp_path / "out")]
    assert 0 < max(ages) <= 2


def test_weights_that_did_not_sample_are_refused_before_the_first_step(tmp_path: Path, base: Path) -> None:
    other = save_tiny_model(tmp_path / "other", seed=7, initializer_range=0.05)
    shutil.copy(base / "tokenizer.json", other)
    with pytest.raises(UsageError, match="rollouts are not from the model"):
        trained(tmp_path / "out", base, rollouts=Deaf(other))
    assert steps(tmp_path / "out") == []
    # It begins with its own weights, whatever was sampled by before; and so does one that is resumed.
    trained(tmp_path / "own", base, ["rl.batches=1"], rollouts=ToyRollouts(open_toy(other)))
    assert steps(tmp_path / "own")[0]["gate/max_difference"] < 1e-4
    with pytest.raises(Stopped):
        trained(tmp_path / "cut", base, stop_at=2)
    with pytest.raises(UsageError, match="rollouts are not from the model"):
        trained(tmp_path / "cut", base, rollouts=Deaf(base))


class Interrupted(ToyRollouts):
    """Presses Ctrl-C while the third version is published."""

    async def publish(self, state: Mapping[str, Any], version: int) -> None:
        if version == 3:
            signal.raise_signal(signal.SIGINT)
        await asyncio.sleep(0)
        await super().publish(state, version)


@pytest.mark.parametrize("within", [0, 1, 2, 3], ids=["between", "within one", "twice within one", "publishing"])
def test_an_interrupt_loses_no_batch(tmp_path: Path, base: Path, within: int) -> None:
    settings, latency = ["train.save_every=0", "rl.batches=5"], interrupting(1000 if within else 14)
    rollouts = Interrupted(open_toy(base)) if within == 3 else ToyRollouts(open_toy(base), latency=latency)
    rows = interrupting_rows(8, within) if within in (1, 2) else training
    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path, base, settings, rollouts=rollouts, make_rows=rows)
    stage, state = read_stage(tmp_path), load_state(tmp_path / STATE, dict)
    assert stage.status == "interrupted"
    done = [line["step"] for line in steps(tmp_path)]
    assert done == list(range(1, state["version"] + 1))
    assert len(done) == (3 if within else len(done)) > 0
    trained(tmp_path, base, settings)
    assert [line["step"] for line in steps(tmp_path)] == [1, 2, 3, 4, 5]


def test_a_training_under_way_elsewhere_keeps_its_log(tmp_path: Path, base: Path) -> None:
    with pytest.raises(Stopped):
        trained(tmp_path, base, stop_at=1)
    before = read_log(tmp_path)
    assert before
    with EpisodeStore(tmp_path / EPISODES), pytest.raises(UsageError, match="another process"):
        trained(tmp_path, base)
    assert read_log(tmp_path) == before


def test_a_validation_that_faults_broke_is_played_again_and_else_chooses_nothing(tmp_path: Path, base: Path) -> None:
    """Of four held-out tasks one fails once, and from the second batch on another one always. Rewards rise with each
    batch."""
    played = list[str]()

    def broken(job: EpisodeJob) -> bool:
        if job.group_id is not None:
            return False
        played.append(name := job.task.task_id)
        return played.count(name) == 1 if name == "toy-8" else name == "toy-9" and rollouts.published[-1] > 1

    def price(episode: Episode) -> float:
        return share_of_good(episode) + rollouts.published[-1]

    rollouts = ToyRollouts(open_toy(base), broken=broken, price=price)
    done = trained(tmp_path, base, ["rl.batches=4", "train.watch.every=1"], rollouts=rollouts)
    looks = [line for line in read_log(tmp_path) if "held_out/reward" in line]
    assert ([line.get("held_out/faults") for line in looks], done.step) == ([None, None, 1.0, 1.0, 1.0], 1)
    assert (done.metrics["reward"], played.count("toy-8")) == (looks[1]["held_out/reward"], 6)


def test_batches_of_a_training_in_turns_do_not_depend_on_what_finishes_first(tmp_path: Path, base: Path) -> None:
    def trace(name: str, latency: Callable[[EpisodeJob], float]) -> tuple[list[TrainRow], bytes]:
        seen: list[TrainRow] = []

        def rows(groups: Any, config: Config) -> list[TrainRow]:
            made = training(groups, config)
            seen.extend(made)
            return made

        trained(tmp_path / name, base, ["rl.batches=3"], rollouts=one_by_one(base, latency=latency), make_rows=rows)
        return seen, (tmp_path / name / "model.safetensors").read_bytes()

    def late(job: EpisodeJob) -> float:
        return Random(f"{job.task.task_id}/{job.sample_idx}").uniform(0.0, 0.05)

    assert trace("at once", lambda _: 0.0) == trace("shuffled", late)


def test_broken_episodes_are_left_out_and_broken_or_equal_groups_replaced(tmp_path: Path, base: Path) -> None:
    def flat(episode: Any) -> float:
        return 0.5 if int(episode.group_id or 0) == 0 else share_of_good(episode) + episode.sample_idx

    def broken(job: EpisodeJob) -> bool:
        group = int(job.group_id or 0)
        return job.group_id is not None and (group == 1 or (group == 2 and job.sample_idx % 4 == 0))

    trained(tmp_path / "out", base, ["rl.batches=1"], rollouts=ToyRollouts(open_toy(base), broken=broken, price=flat))
    (line,) = steps(tmp_path / "out")
    assert (line["groups/trained"], line["groups/filtered"], line["groups/faulty"]) == (4.0, 1.0, 1.0)
    assert line["rows"] == 2 * (4 * 4 - 1)
    groups = {int(episode.group_id or 0) for episode in read_episodes(tmp_path / "out" / EPISODES) if episode.group_id}
    assert set(range(6)) <= groups


@pytest.mark.parametrize(
    ("kind", "fields", "error", "says"),
    [
        (Forgetful, {}, InfrastructureFault, "old versions"),
        (ToyRollouts, {"broken": lambda job: bool(job.group_id)}, InfrastructureFault, "planted"),
        (ToyRollouts, {"price": lambda _: 1.0}, UsageError, "same reward"),
    ],
    ids=["stale", "faults", "no difference"],
)
def test_training_stops_when_nothing_usable_comes(
    tmp_path: Path, base: Path, kind: type[ToyRollouts], fields: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        trained(tmp_path / "out", base, rollouts=kind(open_toy(base), **fields))


Asleep = Callable[[], AbstractAsyncContextManager[None]]


def train(out: Path, base: Path, rollouts: ToyRollouts, asleep: Asleep, seen: list[str], *settings: str) -> None:
    """Two batches without validation."""
    config = toy_config(["rl.batches=2", "train.watch.tasks=0", "train.watch.metric=reward", *settings])
    work = replace(work_in(out, base, config), held_out=[], undisturbed=asleep)

    def on_step(batch: int, batches: int, values: Mapping[str, float]) -> None:
        seen.extend(["stepped"] if "loss" in values else [])

    train_policy(work, nullcontext(rollouts), CHAT, "toy", on_step)


def test_a_sampler_sleeps_only_where_it_is_asked_to_and_can() -> None:
    sleeping = "machine.model.sleep=true"
    (sampler, endpoint), config = vllm(lambda path, body: ""), load_config("rl/small", [sleeping])
    fleet = load_config("rl/small", [sleeping, "machine.fleet.workers=2"])
    for other, asked, processes, said in (
        (sglang(lambda path, body: "")[0], config, 1, "vllm:PATH"),
        (sampler, config, 2, "one process"),
        (sampler, fleet, 1, "fleet"),
    ):
        with pytest.raises(ConfigError, match=said):
            reserve_devices(other, asked, "cpu", processes)

    async def step(config: Config) -> None:
        async with reserve_devices(sampler, config, "cpu")():
            endpoint.asked.append(("step", {}))

    run(step(load_config("rl/small")))
    assert endpoint.paths == ["step"]
    run(step(config))
    assert endpoint.paths == ["step", "/sleep?level=1&mode=wait", "step", "/wake_up"]


def test_the_sampler_is_awake_whenever_it_plays_or_takes_weights(tmp_path: Path, base: Path) -> None:
    """It is also put to sleep once before anything is played."""
    seen: list[str] = []

    @asynccontextmanager
    async def asleep() -> AsyncIterator[None]:
        seen.append("asleep")
        yield
        seen.append("awake")

    class Watched(ToyRollouts):
        async def publish(self, state: Mapping[str, Any], version: int) -> None:
            seen.append("publish")
            await super().publish(state, version)

        async def play(self, job: Any) -> Episode:
            if seen[-1] != "play":
                seen.append("play")
            return await super().play(job)

    train(tmp_path, base, Watched(open_toy(base)), asleep, seen)
    batch = ["play", "asleep", "awake", "publish", "stepped"]
    assert seen[:13] == ["asleep", "awake", "publish", *batch, *batch]
    assert set(seen[13:]) <= {"play"}  # what was begun when the training ended


def test_episodes_that_a_step_interrupts_wait_for_its_end_and_go_on(tmp_path: Path, base: Path) -> None:
    """With staleness, more episodes are begun than a batch needs; the gate is that of every sampler that sleeps."""
    gate, waited, seen, sleeping = WeightGate(), list[str](), list[str](), False

    @asynccontextmanager
    async def asleep() -> AsyncIterator[None]:
        nonlocal sleeping
        async with gate.change(gate.version):
            sleeping = True
            yield
            sleeping = False

    class Gated(ToyRollouts):
        async def play(self, job: Any) -> Episode:
            if sleeping:
                waited.append(job.task.task_id)
            async with gate.call():
                assert not sleeping
                episode = await super().play(job)
                assert not sleeping
            return episode

    train(tmp_path, base, Gated(open_toy(base)), asleep, seen, "rl.staleness=1")
    assert seen == ["stepped"] * 2
    assert waited


def test_a_sampler_that_cannot_sleep_ends_the_training_before_it_plays(tmp_path: Path, base: Path) -> None:
    @asynccontextmanager
    async def asleep() -> AsyncIterator[None]:
        raise UsageError("start vLLM with --enable-sleep-mode")
        yield

    rollouts = ToyRollouts(open_toy(base))
    with pytest.raises(UsageError, match="enable-sleep-mode"):
        train(tmp_path, base, rollouts, asleep, [])
    assert rollouts.published == []


class Server:
    """Loads weights by path, as an engine does."""

    async def load_weights(self, folder: Path, version: int) -> None:
        self.loaded = folder, version


def test_a_server_gets_new_weights_by_path_and_the_last_two_versions_are_kept(tmp_path: Path) -> None:
    base = save_tiny_model(save_byte_tokenizer(tmp_path / "base"), tie_word_embeddings=True)
    model, server = load_causal_model(base, "cpu", "float32"), Server()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.25)
    state = model.state_dict()
    asyncio.run(publish_to(cast(Any, server), state, 2, base, tmp_path / "versions"))
    folder, version = server.loaded
    again = load_causal_model(folder, "cpu", "float32").state_dict()
    assert version == 2
    assert all(torch.equal(state[name], again[name]) for name in state)
    assert (folder / "tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()
    # The last two are kept, and none of a training that was cut short later than where it goes on.
    for version, kept in ((8, {8}), (5, {5}), (6, {5, 6}), (8, {8}), (9, {8, 9})):
        write_version(tmp_path / "versions", base, state, version)
        assert {path.name for path in (tmp_path / "versions").iterdir()} == {f"version-{each}" for each in kept}
