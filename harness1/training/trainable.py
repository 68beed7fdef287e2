"""The implementation of attention that a model is trained with, checked before it is trusted."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from harness1.config import Train
from harness1.data.origins import origins_of
from harness1.errors import UsageError
from harness1.model_folder import CONFIG, base_folder, first_line, holds_adapters, refusing
from harness1.models.adapters import drop_adapters, list_updates, merge_adapters, merge_state, read_adapter_config
from harness1.models.causal_model import Dtype, compute_logits_in_float32, load_causal_model
from harness1.models.checkpoint import read_checkpoint
from harness1.runs.files import Stage
from harness1.training.saving import copy_beside_weights, save_whole, write_card
from harness1.training.trainer import precision

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel


PROBE = (12, 9)  # lengths of the rows of the probe, the second with padding
BOUNDS = {"float32": 1e-3, "bfloat16": 0.1}
"""Largest distance of logits from those of eager attention, as a share of their norm. Leaving out a feature, such as
soft caps, changes those of a random model by more."""


def use_attention(model: PreTrainedModel, name: str, dtype: Dtype) -> None:
    """Switch a model to one of transformers' implementations of attention. A small forward and backward pass compares
    it with eager attention, which computes every feature as it is written. Raise UsageError if the model, the device or
    the installation cannot run it, or it computes something else."""
    refusal = f"train.attention={name} does not train {type(model).__name__} on {model.device.type}"
    model.set_attn_implementation("eager")
    expected = _probe(model, dtype)
    try:
        model.set_attn_implementation(name)
        if (used := model.config._attn_implementation) != name:
            raise UsageError(f"{refusal}: transformers would use {used} instead")
        found = _probe(model, dtype)
    except (RuntimeError, ValueError, KeyError, TypeError, ImportError, AttributeError) as error:
        raise UsageError(f"{refusal}: {first_line(error)}") from error
    if not float((found - expected).norm() / expected.norm()) <= BOUNDS[dtype]:
        raise UsageError(f"{refusal}: it leaves out something that this model's attention has; try eager")


def _probe(model: PreTrainedModel, dtype: Dtype) -> Tensor:
    import torch

    vocabulary = int(model.config.get_text_config().vocab_size)
    ids = (3 * torch.arange(len(PROBE) * max(PROBE)) % vocabulary).view(len(PROBE), -1).to(model.device)
    mask = (torch.arange(max(PROBE)) < torch.tensor(PROBE)[:, None]).long().to(model.device)
    embed = model.get_input_embeddings()
    inputs = embed(ids).detach().requires_grad_()
    with precision(model, dtype):
        logits: Tensor = model(inputs_embeds=inputs, attention_mask=mask, use_cache=False).logits[mask.bool()].float()
    torch.autograd.grad(logits.sum(), inputs)
    return logits.detach()


def load_trainable(folder: Path, train: Train, device: str, threads: int = 0) -> PreTrainedModel:
    """Load a causal language model for training, without dropout, so that it computes what it will when sampled.
    Trained weights are kept in float32 and multiplied in `train.dtype`; frozen weights are kept in `train.dtype`;
    logits are float32. The adapters of a checkpoint are trained further on their base, or merged into it in float32 if
    all weights are trained. Torch gets `threads` in this process, unless 0. Raise UsageError if the folder holds no
    such model, torch does not know the device, or the attention or the form of the adapters does not fit."""
    goes_on = holds_adapters(folder)
    if goes_on and train.lora.rank:
        check_form(folder, train)
    model = load_causal_model(folder, device, choose_stored_dtype(train))
    import torch

    if threads:
        torch.set_num_threads(threads)
    if goes_on and not train.lora.rank:
        merge_adapters(model)
        model.requires_grad_(True)
    if train.dtype != choose_stored_dtype(train):
        compute_logits_in_float32(model)
    # With cuDNN's attention, gradients became NaN in step 12, twice (H100, torch 2.11, Qwen2.5-0.5B in bfloat16, padded
    # rows). Off for the whole process: a context around a pass does not cover what checkpointing computes again.
    torch.backends.cuda.enable_cudnn_sdp(False)
    if train.attention != "auto":
        use_attention(model, train.attention, train.dtype)
    elif (model.device.type, train.dtype, model.config._attn_implementation) == ("cpu", "bfloat16", "sdpa"):
        from harness1.models.block_attention import NAME, register

        register()
        with suppress(UsageError):  # it is faster there, if it computes the same
            use_attention(model, NAME, train.dtype)
            return model
        model.set_attn_implementation("sdpa")
    return model


def choose_stored_dtype(train: Train) -> Dtype:
    """Return the type in which a model is kept for training: float32 where its weights are trained themselves."""
    return train.dtype if train.lora.rank else "float32"


def check_form(folder: Path, train: Train) -> None:
    """Refuse to train adapters of one form from a checkpoint with adapters of another, with a UsageError: weights in
    bfloat16 cannot take up the old ones without loss."""
    found = read_adapter_config(folder)
    layers = len(found.layers_to_transform or ())
    theirs = {"rank": found.r, "alpha": found.lora_alpha, "layers": layers, "experts": bool(found.target_parameters)}
    lora = train.lora
    ours = {"rank": lora.rank, "alpha": lora.alpha, "layers": lora.layers, "experts": lora.experts}
    if theirs != ours:
        wanted = " ".join(f"train.lora.{name}={str(value).lower()}" for name, value in theirs.items())
        anew = "or begin with others on the model that harness1 models merge makes of it"
        raise UsageError(f"training from {folder} goes on with its adapters: set {wanted}; {anew}")


def rounding_loss(model: PreTrainedModel, dtype: Dtype) -> float:
    """Return what is lost by merging the adapters of a model in float32 and rounding the sums to a type: |rounded -
    exact| / |update|, of norms over all adapted weights. Near or above 1 the update is lost."""
    import torch

    lost = update = 0.0
    with torch.no_grad():
        for _, weight, change in list_updates(model):
            exact = weight.double() + change.double()
            lost += float((exact.float().to(getattr(torch, dtype)).double() - exact).norm()) ** 2
            update += float(change.double().norm()) ** 2
    return (lost / update) ** 0.5 if update else 0.0


def merge(adapters: Path, out: Path, dtype: Dtype) -> float:
    """Write the model of a folder of adapters as a plain one, added in float32 and rounded to a type; return what that
    lost. UsageError if the folder holds no adapters, `out` is not empty, or the base is missing."""
    if not holds_adapters(adapters):
        raise UsageError(f"{adapters} holds no adapters: there is nothing to merge")
    if out.exists() and any(out.iterdir()):
        raise UsageError(f"{out} is not empty: choose another --out")
    base = base_folder(adapters)
    with refusing(f"{base} has no readable config.json"):
        found = msgspec.json.decode((base / CONFIG).read_bytes(), type=dict[str, Any])
    types = found.get("dtype"), found.get("torch_dtype")
    stored: Dtype = "bfloat16" if "bfloat16" in types else "float32"  # which loses nothing
    model = load_causal_model(adapters, "cpu", stored)
    import torch

    lost = rounding_loss(model, dtype)
    state = merge_state(model, dtype)
    drop_adapters(model)
    copy_beside_weights(adapters, out)
    merged = Stage("models merge", {"dtype": dtype}, origins=origins_of(adapters, base)).write(out)
    cast: PreTrainedModel = model.to(getattr(torch, dtype))  # its configuration then names the type
    save_whole(out, cast, state)
    card = read_checkpoint(adapters)
    if card is not None:
        write_card(out, msgspec.structs.replace(card, adapter_base=""))
    merged.write(out, status="finished")
    return lost
