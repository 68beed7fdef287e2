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
from harness1.models.adapters import PEFT, read_adapters
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
from tests.tiny_models import GPT_OSS, save_tiny_model


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
    shape = {"vocab_size": size, "max_position_embeddings": 2048, **GPT_OSS, "sliding_window": 8}
    save_tiny_model(student, "gpt_oss", **shape)
    return save_rows(home, student, tasks=2)


def fine_tuned(place: Place) -> Path:
    """The model with adapters, of experts too, after fine-tuning on the teacher's episodes."""
    out, lora = place.rows.parent / "tuned", Lora(rank=8, experts=True)
    config = msgspec.structs.replace(CONFIG, train=msgspec.structs.replace(QUICK, lora=lora))
    fine_tune(FineTuning(place.rows, place.model, out, config), lambda _step, _of, _values: None)
    losses = [line["held_out/nll"] for line in read_log(out) if "held_out/nll" in line]
    assert losses[-1] < losses[0]
    return out


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
    adapted, out, merged = fine_tuned(place), tmp_path / "out", tmp_path / "merged"
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


def test_all_weights_are_trained_by_reinforcement_and_sampled_as_they_were_saved(place: Place, tmp_path: Path) -> None:
    steps = learned(place.model, tmp_path / "out")
    assert steps[0]["gate/max_difference"] < 1e-4
    assert all(step["k3"] < 1e-6 and step["gradient"] > 0 for step in steps)  # each batch is of the very weights
    folders = place.model, tmp_path / "out"
    before, after = (load_causal_model(each, "cpu", "float32").state_dict() for each in folders)
    for name in ("model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.experts.down_proj"):
        assert not torch.equal(before[name], after[name])
    assert_gate(tmp_path / "out")


def test_in_half_precision_the_start_is_within_its_gate(place: Place, tmp_path: Path) -> None:
    """Rounding may send a token to another expert in another batch, which counts in the mean."""
    steps = learned(place.model, tmp_path / "out", "train.dtype=bfloat16", "rl.batches=1", "train.lora.rank=8")
    assert 0 < steps[0]["gate/mean_k3"] < 1e-3
