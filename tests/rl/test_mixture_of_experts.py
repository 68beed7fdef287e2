"""A model shaped like gpt-oss (experts as 3-D parameters, attention sinks, sliding windows in every second layer) is
fine-tuned, learns by reinforcement, is saved, loaded, merged and sampled: whole and by adapters, also of experts."""

from __future__ import annotations

import asyncio
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from harness1.config import Lora
from harness1.episodes.jobs import EpisodeSetup
from harness1.model_folder import base_folder
from harness1.models.adapters import PEFT, merge_state, read_adapters
from harness1.models.causal_model import load_causal_model
from harness1.models.transformers_backend import TransformersBackend, open_transformers
from harness1.records import Episode, Sampling
from harness1.rl.logprobs import SampledCall, compare_calls
from harness1.rl.train import Training, train_policy
from harness1.sft.train import FineTuning, fine_tune
from harness1.training.log import read_log
from harness1.training.trainable import merge
from tests.rl.test_learning import CHAT
from tests.rl.toy import ToyRollouts, toy_config, toy_tasks
from tests.sft.test_fine_tuning import CONFIG, QUICK, Place, save_rows, save_student
from tests.tiny_models import save_tiny_model

GPT_OSS = {
    "sliding_window": 8,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}


def opened(folder: Path, dtype: Any = "float32") -> TransformersBackend:
    return open_transformers(folder, device="cpu", dtype=dtype, threads=1, rows=16, cache_tokens=0)


def share_of_even(episode: Episode) -> float:
    ids = [token for turn in episode.turns for call in turn.calls for token in call.output_ids]
    return sum(token % 2 == 0 for token in ids) / len(ids)


def sampled(folder: Path) -> list[SampledCall]:
    """Calls of several lengths, decoded together."""
    backend = opened(folder)
    asked = [(tuple(range(40, 46 + 7 * at)), Sampling(max_tokens=8, seed=at)) for at in range(6)]

    async def together() -> list[SampledCall]:
        outs = await asyncio.gather(*[backend.generate(ids, how) for ids, how in asked])
        made = zip(asked, outs, strict=True)
        return [SampledCall(ids, out.output_ids, out.output_logprobs, how) for (ids, how), out in made]

    return asyncio.run(together())


def assert_gate(folder: Path) -> None:
    report = compare_calls(load_causal_model(folder, "cpu", "float32"), sampled(folder))
    assert report.passes("float32"), report


def learned(base: Path, out: Path, *settings: str) -> list[dict[str, Any]]:
    """A short training; the log of its steps."""
    config = toy_config(["rl.batches=3", "train.watch.tasks=0", *settings])
    tasks = toy_tasks(12)
    work = Training(tasks[:8], tasks[8:], [EpisodeSetup(config, "", "hf:toy")], base, out, config)
    rollouts = ToyRollouts(opened(base, config.train.dtype), price=share_of_even)
    train_policy(work, nullcontext(rollouts), CHAT, "toy", lambda _batch, _of, _values: None)
    return [line for line in read_log(out) if "loss" in line]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """A random model, and a dataset of a teacher's episodes for it."""
    home = tmp_path_factory.mktemp("experts")
    student = save_student(home / "model")
    size = json.loads((student / "config.json").read_bytes())["vocab_size"]
    save_tiny_model(student, "gpt_oss", vocab_size=size, max_position_embeddings=2048, **GPT_OSS)
    return save_rows(home, student, tasks=2)


def fine_tuned(place: Place, lora: Lora) -> Path:
    """The model after fine-tuning on the teacher's episodes."""
    out = place.rows.parent / f"tuned {lora.rank}"
    config = msgspec.structs.replace(CONFIG, train=msgspec.structs.replace(QUICK, lora=lora))
    fine_tune(FineTuning(place.rows, place.model, out, config), lambda _step, _of, _values: None)
    losses = [line["held_out/nll"] for line in read_log(out) if "held_out/nll" in line]
    assert losses[-1] < losses[0]
    return out


@pytest.fixture(scope="module")
def tuned(place: Place) -> Path:
    return fine_tuned(place, Lora(rank=0))


def logprobs(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(torch.tensor([list(range(40, 70))])).logits.log_softmax(-1)
    return found


def changed(before: Path, after: Path) -> set[str]:
    """The last names of the adapted layers whose adapters differ."""
    first, second = read_adapters(before), read_adapters(after)
    assert first.tensors.keys() == second.tensors.keys()
    moved = {name for name, value in second.tensors.items() if not torch.equal(value, first.tensors[name])}
    return {name.removeprefix(PEFT).split(".lora_")[0].split("layers.1.")[-1] for name in moved if "layers.1." in name}


def test_adapters_of_experts_are_fine_tuned_learn_and_stay_what_they_are_on_disk(place: Place, tmp_path: Path) -> None:
    adapted, out, merged = fine_tuned(place, Lora(rank=8, experts=True)), tmp_path / "out", tmp_path / "merged"
    steps = learned(adapted, out, "train.lora.rank=8", "train.lora.experts=true")
    assert steps[0]["gate/max_difference"] < 1e-4
    assert all(step["k3"] < 1e-6 and step["gradient"] > 0 for step in steps)
    assert not (out / "model.safetensors").exists()
    experts = {"mlp.experts", "mlp.experts.base_layer"}
    assert changed(adapted, out) == experts | {f"self_attn.{name}_proj" for name in "qkvo"}
    assert_gate(out)
    loaded = logprobs(load_causal_model(out, "cpu", "float32"))
    assert (loaded - logprobs(load_causal_model(adapted, "cpu", "float32"))).abs().max() > 1e-2
    plain: Any = AutoModelForCausalLM.from_pretrained(base_folder(out), dtype=torch.float32)
    torch.testing.assert_close(logprobs(PeftModel.from_pretrained(plain, str(out))), loaded, rtol=0, atol=1e-4)
    merge(out, merged, "float32")
    torch.testing.assert_close(logprobs(load_causal_model(merged, "cpu", "float32")), loaded, rtol=0, atol=1e-4)
    assert_gate(merged)


@pytest.mark.parametrize("rank", [0, 8], ids=["whole", "adapters"])
def test_it_is_trained_by_reinforcement_and_is_sampled_as_it_was_saved(tuned: Path, tmp_path: Path, rank: int) -> None:
    assert_gate(tuned)
    steps = learned(tuned, tmp_path / "out", f"train.lora.rank={rank}")
    assert steps[0]["gate/max_difference"] < 1e-4
    assert all(step["k3"] < 1e-6 and step["gradient"] > 0 for step in steps)  # each batch is of the very weights
    before, after = (merge_state(load_causal_model(folder, "cpu", "float32")) for folder in (tuned, tmp_path / "out"))
    moved = {name: not torch.equal(weight, before[name]) for name, weight in after.items()}
    assert moved["model.layers.0.self_attn.q_proj.weight"]
    assert moved["model.layers.1.mlp.experts.down_proj"] is (rank == 0)  # without train.lora.experts
    assert_gate(tmp_path / "out")


def test_in_half_precision_the_start_is_within_its_gate(tuned: Path, tmp_path: Path) -> None:
    """Rounding may send a token to another expert in another batch, which counts in the mean."""
    steps = learned(tuned, tmp_path / "out", "train.dtype=bfloat16", "rl.batches=1", "train.lora.rank=8")
    assert 0 < steps[0]["gate/mean_k3"] < 1e-3
