"""A memory plan is what the trainer really holds: weights, gradients and moments to the byte, activations closely."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from benchmarks.memory_plan import allocated, take_steps
from harness1.cli.training import advise, batch_of_rows, device_memory, episode_batch
from harness1.config import Config, Lora, Machine, Rl, Train
from harness1.errors import UsageError
from harness1.models.decoding import KvSlots
from harness1.models.fetch import PUBLISHED, model_shape
from harness1.rows import RowFile, TrainRow, write_rows
from harness1.training.algorithm import make_algorithm
from harness1.training.memory_plan import (
    CACHE_ROOM,
    LINEAR,
    BatchSize,
    Devices,
    MemoryPlanner,
    Parts,
    Plan,
    count_in_stacks,
    count_prefill,
    count_step,
)
from harness1.training.trainer import Trainer
from tests.tiny_models import SHAPE

CISPO = make_algorithm("cispo")
MIXTURE = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "qwen3": {"tie_word_embeddings": False},
    "gpt_oss": MIXTURE,
}
GPU = Devices(memory=80 * 10**9)


def shape_of(kind: str, **settings: Any) -> PreTrainedConfig:
    return AutoConfig.for_model(kind, **{**SHAPE, **KINDS[kind], **settings})


def train_of(rank: int, checkpointing: bool = False, experts: bool = False) -> Train:
    return Train(lora=Lora(rank=rank, experts=experts), dtype="float32", checkpointing=checkpointing)


def parameters_of(shape: PreTrainedConfig) -> int:
    return MemoryPlanner(shape, CISPO).step(train_of(4), BatchSize(1, 8, 1))["parameters"]


def size_of(tensors: Any) -> int:
    return sum(each.numel() * each.element_size() for each in tensors)


@pytest.mark.parametrize(
    ("kind", "rank", "experts", "layers"),
    [("qwen3", 0, False, 0), ("gpt_oss", 4, True, 0), ("llama", 4, False, 0), ("llama", 4, False, 2)],
)
def test_weights_gradients_and_moments_are_the_trainers(kind: str, rank: int, experts: bool, layers: int) -> None:
    lora = Lora(rank=rank, experts=experts, layers=layers)
    shape, train = shape_of(kind, **({"num_hidden_layers": 6} if layers else {})), Train(lora=lora, dtype="float32")
    auto: Any = AutoModelForCausalLM
    trainer = Trainer(auto.from_config(shape).eval(), CISPO, train, 1)
    trainer.step([TrainRow((1, 2, 3, 4), (0, 0, 1, 1), (0.0, 0.0, -1.0, -1.0), (1.0,) * 4)])
    held = MemoryPlanner(shape, CISPO).plan(Config(train=train), BatchSize(1, 32, 8), GPU).held
    trained = size_of(trainer.parameters)
    states = [state for each in trainer.optimizer.state.values() for name, state in each.items() if name != "step"]
    frozen = size_of([*trainer.model.parameters(), *trainer.model.buffers()]) - trained
    assert (held["gradients"], held["optimizer"]) == (trained, size_of(states))
    assert held["weights"] + held.get("adapters", 0) == frozen + trained
    assert held.get("adapters") == (trained if rank else None)


@pytest.mark.parametrize(("kind", "rank", "checkpointing"), [("llama", 0, False), ("gpt_oss, experts", 4, True)])
def test_the_whole_is_what_the_allocator_gives_out(kind: str, rank: int, checkpointing: bool) -> None:
    kind, _, experts = kind.partition(", ")
    shape = shape_of(kind, vocab_size=2000, num_hidden_layers=4)
    train = msgspec.structs.replace(train_of(rank, checkpointing, bool(experts)), micro_tokens=128)
    devices = Devices(memory=10**9, kind="cpu")
    needs = MemoryPlanner(shape, CISPO).plan(Config(train=train), BatchSize(1, 128, 32), devices).needs
    assert allocated(lambda: take_steps(shape, train, 128, 32)) == pytest.approx(needs, rel=0.15)


@pytest.mark.parametrize(("kind", "layers", "checkpointing"), [("llama", 5, True), ("gpt_oss", 6, False)])
def test_two_short_stacks_tell_the_bytes_of_a_long_one(kind: str, layers: int, checkpointing: bool) -> None:
    seen: list[int] = []

    def count(shape: PreTrainedConfig) -> Parts:
        seen.append(shape.num_hidden_layers)
        return count_step(shape, train_of(4, checkpointing), CISPO, BatchSize(2, 64, 16))

    shape = shape_of(kind, num_hidden_layers=layers)
    from_short = count_in_stacks(shape, count)
    assert max(seen) < layers
    assert from_short == count(shape)


def test_shipped_shapes_have_the_published_numbers_of_parameters() -> None:
    counted = {name: parameters_of(model_shape(name)) for name in PUBLISHED}
    assert counted == {name: shape.parameters for name, shape in PUBLISHED.items()}


def test_a_quantized_checkpoint_is_planned_as_it_is_trained(tmp_path: Path) -> None:
    packed = {**SHAPE, **MIXTURE, "model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}}
    (tmp_path / "packed.json").write_text(json.dumps(packed))
    assert parameters_of(model_shape(tmp_path / "packed.json")) == parameters_of(shape_of("gpt_oss"))
    with pytest.raises(UsageError, match="gpt-oss-20b"):
        model_shape(tmp_path / "nothing.json")
    (tmp_path / "config.json").write_text('{"model_type": "unheard-of"}')
    with pytest.raises(UsageError, match="not the configuration of a model"):
        model_shape(tmp_path)


def test_attention_is_quadratic_or_linear_in_the_length() -> None:
    def activations(length: int, attention: str) -> int:
        return count_step(shape_of("gpt_oss"), train_of(4), CISPO, BatchSize(1, length, 1), attention)["kept"]

    eager, linear = ([activations(length, name) for length in (2048, 4096)] for name in ("eager", LINEAR))
    assert eager[1] == pytest.approx(4 * eager[0], rel=0.1)
    assert linear[1] == pytest.approx(2 * linear[0], rel=0.01)


def test_a_sampler_holds_its_weights_and_the_slots_of_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = shape_of("llama")
    sampled = count_prefill(shape, "float32", rows=3, tokens=200)
    slots = KvSlots(3)
    for layer in range(SHAPE["num_hidden_layers"]):
        slots.layer(layer, *(torch.zeros(1, 2, 200, 16) for _ in range(2)), 1, 200)
    assert sampled["cache"] == size_of([each for pair in slots._layers.values() for each in pair])
    config = Config(train=train_of(4))
    planner, batch = MemoryPlanner(shape, CISPO), BatchSize(1, 32, 8)
    alone = planner.plan(config, batch, GPU)
    beside = planner.plan(config, batch, msgspec.structs.replace(GPU, sampling="beside"))
    assert beside.held["weights of the sampler"] == sampled["weights"]
    assert set(beside.held) - set(alone.held) == {"weights of the sampler", "keys and values"}
    monkeypatch.setattr("harness1.training.memory_plan.PREFILL_TOKENS", 4 * config.env.context_window)
    prefill = planner.plan(config, batch, msgspec.structs.replace(GPU, sampling="beside")).moments["prefill"]
    assert prefill == 4 * beside.moments["prefill"] > 0
    few = msgspec.structs.replace(config, machine=Machine(concurrency=3))
    prefill = planner.plan(few, batch, msgspec.structs.replace(GPU, sampling="beside")).moments["prefill"]
    assert prefill == 3 * beside.moments["prefill"]


def test_several_trainers_share_weights_and_gather_layers() -> None:
    planner, batch, config = (MemoryPlanner(shape_of("llama"), CISPO), BatchSize(1, 32, 8), Config(train=train_of(0)))
    one, four = (planner.plan(config, batch, msgspec.structs.replace(GPU, trainers=count)) for count in (1, 4))
    for name in ("weights", "gradients", "optimizer"):
        assert four.held[name] == one.held[name] // 4
    assert four.held["layers gathered whole"] > 0
    assert four.moments["forward and backward pass"] == one.moments["forward and backward pass"]


def test_servers_keep_no_more_of_a_layer_than_its_window() -> None:
    apart = msgspec.structs.replace(GPU, sampling="apart", samplers=1)
    config, batch = Config(train=train_of(4)), BatchSize(1, 32, 8)
    plan = MemoryPlanner(shape_of("gpt_oss"), CISPO).plan(config, batch, apart)
    # one of two layers sees the whole context: keys and values of 2 heads of 16 numbers in float32
    assert plan.token == 2 * 2 * 16 * 4
    assert plan.sampler["weights"] + plan.sampler[CACHE_ROOM] == int(0.85 * 80 * 10**9)
    # Where weights take most of a device, servers share them, and the heads.
    small, planner = Devices(memory=300_000, sampling="apart", samplers=4), MemoryPlanner(shape_of("llama"), CISPO)
    alone, shared = (planner.plan(config, batch, msgspec.structs.replace(small, samplers=count)) for count in (1, 4))
    assert (shared.sampler["weights"], shared.token) == (alone.sampler["weights"] // 4, alone.token // 4)


def test_episodes_fill_a_forward_pass_and_train_what_a_turn_may_write() -> None:
    config = Config()
    assert episode_batch(config) == (1, 32768, 2048)
    wide = msgspec.structs.replace(config, train=Train(micro_tokens=65536))
    assert episode_batch(wide) == (2, 32768, 4096)
    chained = msgspec.structs.replace(config, rl=Rl(rows="epoch"))
    assert episode_batch(chained).trained == config.env.rendering.epoch_turns * 2048
    assert episode_batch(config, length=1000, trained=100) == (32, 1000, 3200)


def test_the_largest_pass_over_rows_has_the_most_tokens_padding_included(tmp_path: Path) -> None:
    rows = [TrainRow(tuple(range(length)), (0,) + (1,) * (length - 1)) for length in (10, 4, 4, 4)]
    write_rows(tmp_path / "rows.jsonl", rows)
    file = RowFile(tmp_path / "rows.jsonl")
    assert batch_of_rows(file, Train(micro_tokens=12)) == (3, 4, 9)
    assert batch_of_rows(file, Train(micro_tokens=12, batch_rows=2)) == (1, 10, 9)


def planned(needs: dict[tuple[bool, int], int]) -> Any:
    """A stand-in for a planner, whose plans depend on checkpointing and the rank alone."""

    def make(config: Config, devices: Devices) -> Plan:
        bytes_ = needs[config.train.checkpointing, config.train.lora.rank] // devices.trainers
        return Plan(0, 0, BatchSize(1, 1, 1), devices, {}, {}, 0, {}, bytes_)

    return make


@pytest.mark.parametrize(
    ("plain", "checkpointed", "adapters", "both", "expected"),
    [
        (500, 90, 50, 10, ["--set train.checkpointing=true"]),
        (500, 400, 400, 10, ["--set train.checkpointing=true", "--set train.lora.rank=32"]),
        (500, 500, 500, 500, None),
    ],
)
def test_advises_the_fewest_settings_the_cheapest_first(
    plain: int, checkpointed: int, adapters: int, both: int, expected: list[str] | None
) -> None:
    needs = {(False, 0): plain, (True, 0): checkpointed, (False, 32): adapters, (True, 32): both}
    found = advise(planned(needs), Config(train=Train(lora=Lora(rank=0))), Devices(memory=100, kind="cpu"))
    assert (found and found[0]) == expected
    sharded = advise(
        planned({(True, 32): 300}), Config(train=Train(checkpointing=True, dtype="bfloat16")), Devices(memory=100)
    )
    assert sharded[0] == ["shard over 4 GPUs: torchrun --nproc-per-node 4"]
    assert (device_memory("cpu") > 10**8, device_memory("mps")) == (True, 0)
