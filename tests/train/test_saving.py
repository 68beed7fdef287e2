"""A checkpoint, whole or of adapters, samples as the trained model does; a stopped writer damages nothing."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from harness1.config import Lora, Train
from harness1.errors import UsageError
from harness1.model_folder import folder_hash
from harness1.models.adapters import ADAPTER_WEIGHTS, adapters_of, merge_state, plain_state, read_adapters, tensors_of
from harness1.models.causal_model import load_causal_model
from harness1.models.checkpoint import CHECKPOINT, Checkpoint, read_checkpoint
from harness1.models.decoding import KvSlots, SlotModel, SlotPass
from harness1.models.transformers_backend import open_transformers
from harness1.records import Sampling
from harness1.rows import TrainRow
from harness1.training.algorithm import NegativeLogLikelihood
from harness1.training.saving import (
    disk_bytes,
    forget_tensors,
    load_state,
    load_tensors,
    save_tensors,
    write_model,
    write_state,
)
from harness1.training.trainable import load_trainable
from harness1.training.trainer import Trainer, collate, compute_logprobs
from tests.tiny_models import save_byte_tokenizer, save_tiny_model
from tests.train.test_trainer import made_rows

CARD = Checkpoint(format="hermes", counter="c", env={"x": 1}, env_hash="e", base="b", step=3)
PROMPT = tuple(range(40, 60))


def trained(base: Path, rank: int = 0, dtype: Any = "float32") -> Trainer:
    """After two steps, which change the weights by much."""
    trainer = begun(base, Train(rate=3e-2, lora=Lora(rank=rank, alpha=8.0), dtype=dtype, schedule="constant"))
    for _ in range(2):
        trainer.step(made_rows((12, 12)))
    return trainer


def begun(base: Path, train: Train) -> Trainer:
    return Trainer(load_trainable(base, train, "cpu"), NegativeLogLikelihood(), train, 20)


def write(out: Path, trainer: Trainer, base: Path) -> None:
    """The checkpoint of a training that began with a model."""
    card = msgspec.structs.replace(CARD, base=folder_hash(base))
    write_model(out, trainer.model, trainer.weights(), base, card)


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("tied", "rank", "dtype"),
    [(True, 0, "float32"), (False, 0, "bfloat16"), (True, 4, "bfloat16"), (False, 4, "float32")],
)
def test_a_checkpoint_samples_as_the_trained_model_does(tmp_path: Path, tied: bool, rank: int, dtype: str) -> None:
    base, out = save_tiny_model(tmp_path / "base", initializer_range=0.1, tie_word_embeddings=tied), tmp_path / "out"
    trainer = trained(base, rank, dtype)
    write(out, trainer, base)
    sampled: Any = dtype if rank else "float32"
    backend = open_transformers(out, device="cpu", dtype=sampled, threads=0, rows=1, cache_tokens=0)
    output = asyncio.run(backend.generate(PROMPT, Sampling(max_tokens=6, seed=1)))
    ids = PROMPT + output.output_ids
    row = TrainRow(ids, (0,) * len(PROMPT) + (1,) * len(output.output_ids))
    with torch.no_grad():
        expected = compute_logprobs(trainer.model, collate([row]))[0]
        before = compute_logprobs(load_causal_model(base, "cpu", "float32"), collate([row]))[0]
    # Frozen weights in bfloat16 are multiplied in it too while they are trained.
    tolerance = 0.04 if (rank, dtype) == (4, "bfloat16") else 1e-4
    torch.testing.assert_close(torch.tensor(output.output_logprobs), expected, rtol=0, atol=tolerance)
    assert (before - expected).abs().max() > 10 * tolerance
    if not rank:
        loaded, kept = AutoModelForCausalLM.from_pretrained(out), trainer.model.state_dict()
        state = loaded.state_dict()
        assert state.keys() == kept.keys()
        assert all(torch.equal(state[name], value) for name, value in kept.items())
        assert (loaded.dtype, kept["lm_head.weight"].dtype) == (torch.float32, torch.float32)
        assert (loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight) == tied


def test_adapters_are_saved_alone_and_in_float32(tmp_path: Path) -> None:
    base, out = save_tiny_model(tmp_path / "base"), tmp_path / "out"
    trainer = trained(base, 4, "bfloat16")
    write(out, trainer, base)
    assert not (out / "model.safetensors").exists()
    card, saved, kept = read_checkpoint(out), read_adapters(out), adapters_of(trainer.model)
    assert card.adapter_base == folder_hash(base)
    assert (saved.rank, saved.alpha) == (4, 8.0)
    assert saved.tensors.keys() == kept.tensors.keys()
    assert all(torch.equal(saved.tensors[name], value) for name, value in kept.tensors.items())
    assert {value.dtype for value in load_file(out / ADAPTER_WEIGHTS).values()} == {torch.float32}


def sampled_loss(model: Any, rows: list[TrainRow]) -> float:
    """The mean loss of rows of equal length under the attention that samples, one token of each at a time."""
    slots, slot_model, total = KvSlots(len(rows)), SlotModel(model), 0.0
    length = len(rows[0].token_ids)
    for at in range(length - 1):
        one_pass = SlotPass(slots, 0, [at] * len(rows), 1, slot_model.device)
        logprobs = slot_model.logits([[row.token_ids[at]] for row in rows], one_pass).log_softmax(-1)
        wanted = torch.tensor([[row.token_ids[at + 1]] for row in rows])
        total -= float(logprobs.gather(-1, wanted).sum())
    return total / (len(rows) * (length - 1))


def test_in_bfloat16_trainer_sampler_and_reloaded_checkpoint_agree(tmp_path: Path) -> None:
    """Merged into the weights, most of what was learned would be lost."""
    base, rows = save_tiny_model(tmp_path / "base", initializer_range=0.1), made_rows((40,) * 8)
    whole = [TrainRow(row.token_ids, (0, *[1] * (len(row.token_ids) - 1))) for row in rows]
    train = Train(rate=1e-4, lora=Lora(rank=8), dtype="bfloat16", schedule="constant", batch_rows=2)
    trainer = begun(base, train)
    before = trainer.loss(whole)
    for step in range(20):
        trainer.step([whole[(2 * step + at) % 8] for at in range(2)])
    learned = trainer.loss(whole)
    write(tmp_path / "out", trainer, base)
    assert before - learned > 0.01
    assert begun(tmp_path / "out", train).loss(whole) == pytest.approx(learned, abs=1e-6)
    sampler = sampled_loss(load_causal_model(tmp_path / "out", "cpu", "bfloat16"), whole)
    assert sampler == pytest.approx(learned, abs=2e-3)


def test_training_goes_on_with_the_adapters_of_a_checkpoint_on_their_base(tmp_path: Path) -> None:
    base, first, second = save_tiny_model(tmp_path / "base"), tmp_path / "first", tmp_path / "second"
    trainer = trained(base, 4)
    write(first, trainer, base)
    again = trained(first, 4)
    write(second, again, first)
    card, rows = read_checkpoint(second), made_rows((12, 12))
    assert (card.base, card.adapter_base) == (folder_hash(first), folder_hash(base))
    assert again.loss(rows) < trainer.loss(rows)
    ready, plain = (load_causal_model(folder, "cpu", "float32") for folder in (second, base))
    assert all(map(torch.equal, plain_state(ready).values(), plain.state_dict().values()))


def test_all_weights_are_trained_with_the_adapters_of_a_checkpoint_merged_in_float32(tmp_path: Path) -> None:
    base, first = save_tiny_model(tmp_path / "base"), tmp_path / "first"
    trainer = trained(base, 4)
    write(first, trainer, base)
    model = load_trainable(first, Train(lora=Lora(rank=0)), "cpu")
    assert adapters_of(model) is None
    assert all(value.requires_grad for value in model.parameters())
    assert all(map(torch.equal, model.state_dict().values(), merge_state(trainer.model).values()))
    with pytest.raises(UsageError, match=r"set train\.lora\.rank=4 train\.lora\.alpha=8.* harness1 models merge"):
        load_trainable(first, Train(lora=Lora(rank=2, alpha=8.0)), "cpu")


def test_what_belongs_to_the_base_is_taken_along_and_what_speaks_of_it_is_not(tmp_path: Path) -> None:
    base, out = save_byte_tokenizer(save_tiny_model(tmp_path / "base")), tmp_path / "out"
    own = ("stage.json", "data_card.json", "README.md", "log.jsonl", CHECKPOINT, "pytorch_model.bin", "model.gguf")
    for name in own:
        (base / name).write_text("of the base")
    (base / "chat_template.jinja").write_text("{{ messages }}")
    (base / "original").mkdir()
    trainer = trained(base)
    write_model(out, trainer.model, trainer.weights(), base, CARD)
    assert (out / "chat_template.jinja").read_text() == "{{ messages }}"
    assert AutoTokenizer.from_pretrained(out).encode("ab") == AutoTokenizer.from_pretrained(base).encode("ab")
    assert "of the base" not in {path.read_text() for path in out.iterdir() if path.name in own}
    assert not {path.name for path in out.iterdir()} & {*own[:4], *own[5:], "original", ".writing"}
    assert read_checkpoint(out) == CARD


def test_a_stopped_writer_leaves_the_checkpoint_that_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, out = save_tiny_model(tmp_path / "base"), tmp_path / "out"
    trainer = trained(base)
    write_model(out, trainer.model, trainer.weights(), base, CARD)
    before = files(out)

    def fill(folder: Path, **_: object) -> None:
        (folder / "model.safetensors").write_bytes(b"torn")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(trainer.model, "save_pretrained", fill)
        with pytest.raises(UsageError, match="No space"):
            write_model(out, trainer.model, trainer.weights(), base, CARD)
    assert files(out) == before
    trainer.step(made_rows())
    later = msgspec.structs.replace(CARD, step=4)
    write_model(out, trainer.model, trainer.weights(), base, later)
    assert files(out).keys() == before.keys()
    assert files(out)["model.safetensors"] != before["model.safetensors"]
    assert read_checkpoint(out) == later


def test_a_state_is_replaced_whole_and_one_that_is_damaged_or_of_another_version_says_what_to_do(
    tmp_path: Path,
) -> None:
    path = tmp_path / "state" / "state.pt"
    assert load_state(path, dict) is None
    write_state(path, {"step": 1, "weights": [torch.ones(1000)]})
    write_state(path, {"step": 2, "weights": [torch.zeros(1000)], "nested": {"best": 0.5}})
    found = load_state(path, dict)
    assert torch.equal(found.pop("weights")[0], torch.zeros(1000))
    assert found == {"step": 2, "nested": {"best": 0.5}}
    assert [each.name for each in path.parent.iterdir()] == ["state.pt"]
    with pytest.raises(UsageError, match=r"state\.pt was written by another version .*begin again with --force"):
        load_state(path, dict[str, int])
    whole = path.read_bytes()
    for broken in (b"words", *(whole[: int(share * len(whole))] for share in (0.0, 0.01, 0.5, 0.99))):
        path.write_bytes(broken)
        with pytest.raises(UsageError, match="damaged: begin again with --force"):
            load_state(path, dict)


@pytest.mark.parametrize("lora", [Lora(rank=0), Lora(rank=4), Lora(rank=4, experts=True)], ids=str)
def test_room_is_asked_for_what_is_written(tmp_path: Path, lora: Lora) -> None:
    base = save_tiny_model(tmp_path / "base", "gpt_oss", num_local_experts=4, num_experts_per_tok=2)
    train = Train(lora=lora, dtype="float32")
    trainer = begun(base, train)
    trainer.step(made_rows((12, 12)))
    written = [*tensors_of(trainer.weights()).values(), *trainer._tensors().values()]
    size = 2 * sum(each.numel() * each.element_size() for each in written if each.ndim)
    embedding = 2 * 16 * lora.rank * sum(trainer.model.get_input_embeddings().weight.shape)
    assert size <= disk_bytes(base, train) <= size + 3 * embedding, "embedding, head and router have no adapters"
    (base / "more.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0not a header")
    with pytest.raises(UsageError, match="damaged"):
        disk_bytes(base, train)


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def tensors(value: float) -> dict[str, Tensor]:
    return {"step": torch.tensor(3), "weight/a.b": torch.full((5, 2), value), "half": torch.ones(3).bfloat16() * value}


def test_tensors_are_filled_in_place_as_they_were_written(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    name = save_tensors(tmp_path, tensors(0.1))
    found = tensors(0.0)
    places = {key: value.data_ptr() for key, value in found.items()}
    load_tensors(tmp_path / name, found)
    assert all(torch.equal(found[key], value) for key, value in tensors(0.1).items())
    assert {key: value.data_ptr() for key, value in found.items()} == places
    step = torch.tensor(0)
    load_tensors(tmp_path / name, {"step": step})  # a part alone
    assert int(step) == 3
    assert not [each for each in recwarn if "torch.distributed" in str(each.message)]


def test_a_save_keeps_the_one_before_it_and_one_that_was_torn_is_followed_by_a_whole_one(tmp_path: Path) -> None:
    (tmp_path / "state.pt").touch()
    first, second, third = (save_tensors(tmp_path, tensors(float(each))) for each in range(3))
    assert (names(tmp_path), len({first, second, third})) == (["state.pt", second, third], 3)
    (tmp_path / third / ".metadata").unlink()
    forget_tensors(tmp_path, second)
    again = save_tensors(tmp_path, tensors(3.0))
    assert names(tmp_path) == ["state.pt", second, again]
    found = tensors(9.0)
    load_tensors(tmp_path / second, found)
    assert torch.equal(found["weight/a.b"], tensors(1.0)["weight/a.b"])
    with pytest.raises(UsageError, match=r"cannot write the state of training to .*state\.pt"):
        save_tensors(tmp_path / "state.pt", tensors(1.0))


@pytest.mark.parametrize("share", [0.3, None])
@pytest.mark.parametrize("file", [".metadata", "__0_0.distcp"])
def test_damaged_tensors_say_what_to_do(tmp_path: Path, file: str, share: float | None) -> None:
    folder = tmp_path / save_tensors(tmp_path, tensors(1.0))
    path = folder / file
    whole = path.read_bytes()
    path.unlink() if share is None else path.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(UsageError, match=f"{folder.name} is damaged: begin again with --force"):
        load_tensors(folder, tensors(0.0))
