"""A sampler that shares its GPUs with the trainer: it sleeps while the trainer steps, and only then."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from harness1.config import load_config
from harness1.errors import ConfigError, UsageError
from harness1.models.causal_model import load_causal_model
from harness1.models.model_servers import VllmServer
from harness1.models.token_server import WeightGate
from harness1.records import Episode
from harness1.rl.rollouts import publish_to, reserve_devices, write_version
from harness1.rl.train import Training, train_policy
from tests.models.test_token_server import sglang, vllm
from tests.rl.test_learning import CHAT, work_in
from tests.rl.toy import ToyRollouts, open_toy, toy_config
from tests.support import run
from tests.tiny_models import save_byte_tokenizer, save_tiny_model

TWO_BATCHES = ["rl.batches=2", "train.watch.tasks=0", "train.watch.metric=reward"]


def without_validation(*args: Any, **fields: Any) -> Training:
    return replace(work_in(*args, **fields), held_out=[])


def save_base(folder: Path) -> Path:
    save_byte_tokenizer(folder)
    return save_tiny_model(folder, initializer_range=0.05)


def server() -> VllmServer:
    return vllm(lambda path, body: "")[0]


def test_other_samplers_fleets_and_several_processes_are_refused() -> None:
    config = load_config("rl/small", ["machine.model.sleep=true"])
    with pytest.raises(ConfigError, match="vllm:PATH"):
        reserve_devices(sglang(lambda path, body: "")[0], config, "cpu")
    with pytest.raises(ConfigError, match="one process"):
        reserve_devices(server(), config, "cpu", processes=2)
    fleet = load_config("rl/small", ["machine.model.sleep=true", "machine.fleet.workers=2"])
    with pytest.raises(ConfigError, match="fleet"):
        reserve_devices(server(), fleet, "cpu")


def test_nothing_sleeps_unless_it_is_asked_to() -> None:
    sampler, endpoint = vllm(lambda path, body: "")

    async def step(*settings: str) -> None:
        async with reserve_devices(sampler, load_config("rl/small", [*settings]), "cpu")():
            endpoint.asked.append(("step", {}))

    run(step())
    assert endpoint.paths == ["step"]
    run(step("machine.model.sleep=true"))
    assert endpoint.paths == ["step", "/sleep?level=1&mode=wait", "step", "/wake_up"]


def test_the_sampler_is_awake_whenever_it_plays_or_takes_weights(tmp_path: Path) -> None:
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

    base = save_base(tmp_path / "base")
    work = without_validation(tmp_path / "out", base, toy_config(TWO_BATCHES), undisturbed=asleep)

    def on_step(batch: int, batches: int, values: Mapping[str, float]) -> None:
        if "loss" in values:
            seen.append("stepped")

    train_policy(work, nullcontext(Watched(open_toy(base))), CHAT, "toy", on_step)
    batch = ["play", "asleep", "awake", "publish", "stepped"]
    assert seen == ["asleep", "awake", "publish", *batch, *batch]


def test_episodes_that_a_step_interrupts_wait_for_its_end_and_go_on(tmp_path: Path) -> None:
    """With staleness, more episodes are begun than a batch needs; the gate is that of every sampler that sleeps."""
    gate, waited, sleeping = WeightGate(), list[str](), False

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

    base = save_base(tmp_path / "base")
    config = toy_config([*TWO_BATCHES, "rl.staleness=1"])
    work = without_validation(tmp_path / "out", base, config, undisturbed=asleep)
    losses: list[float] = []
    train_policy(
        work,
        nullcontext(Gated(open_toy(base))),
        CHAT,
        "toy",
        lambda batch, batches, values: losses.extend([values["loss"]] if "loss" in values else []),
    )
    assert len(losses) == 2
    assert waited


def test_a_sampler_that_cannot_sleep_ends_the_training_before_it_plays(tmp_path: Path) -> None:
    @asynccontextmanager
    async def asleep() -> AsyncIterator[None]:
        raise UsageError("start vLLM with --enable-sleep-mode")
        yield

    base = save_base(tmp_path / "base")
    work = without_validation(tmp_path / "out", base, toy_config(TWO_BATCHES), undisturbed=asleep)
    rollouts = ToyRollouts(open_toy(base))
    with pytest.raises(UsageError, match="enable-sleep-mode"):
        train_policy(work, nullcontext(rollouts), CHAT, "toy", lambda *_: None)
    assert rollouts.published == []


class Server:
    """Loads weights by path, as an engine does."""

    def __init__(self) -> None:
        self.loaded: list[tuple[Path, int]] = []

    async def load_weights(self, folder: Path, version: int) -> None:
        self.loaded.append((folder, version))


def test_a_server_gets_new_weights_by_path(tmp_path: Path) -> None:
    base = save_tiny_model(save_byte_tokenizer(tmp_path / "base"), tie_word_embeddings=True)
    model, server = load_causal_model(base, "cpu", "float32"), Server()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.25)
    state = model.state_dict()
    for version in (1, 2):
        asyncio.run(publish_to(cast(Any, server), state, version, base, tmp_path / "versions"))
    assert [version for _, version in server.loaded] == [1, 2]
    again = load_causal_model(server.loaded[1][0], "cpu", "float32").state_dict()
    assert all(torch.equal(state[name], again[name]) for name in state)
    assert (server.loaded[1][0] / "tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()


def test_a_training_that_goes_on_from_an_earlier_version_has_it_and_none_of_the_later_ones(tmp_path: Path) -> None:
    base = save_tiny_model(tmp_path / "base")
    state = load_causal_model(base, "cpu", "float32").state_dict()
    for version in (7, 8, 5):
        folder = write_version(tmp_path / "versions", base, state, version)
    assert list((tmp_path / "versions").iterdir()) == [folder]
    write_version(tmp_path / "versions", base, state, 6)
    assert {path.name for path in (tmp_path / "versions").iterdir()} == {"version-5", "version-6"}
    for version in (8, 9, 10):
        write_version(tmp_path / "versions", base, state, version)
    assert {path.name for path in (tmp_path / "versions").iterdir()} == {"version-9", "version-10"}
