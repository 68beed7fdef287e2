"""Loading a model for training."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from harness1.config import Train
from harness1.errors import UsageError
from harness1.model_folder import holds_adapters
from harness1.models.adapters import merge_adapters, read_adapter_config
from harness1.models.causal_model import Dtype, compute_logits_in_float32, load_causal_model
from harness1.training.attention import turn_off_cudnn_attention, use_attention, use_default_attention

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def load_trainable(folder: Path, train: Train, device: str, threads: int = 0) -> PreTrainedModel:
    """Load a causal language model for training, without dropout, so that it computes what it will when sampled.

    Trained weights are kept in float32 and multiplied in `train.dtype`; frozen weights are kept in `train.dtype`.
    Logits are always float32.

    The adapters of a checkpoint are trained further on their base; if all weights are trained (`train.lora.rank=0`)
    they are merged into them, in float32.

    Args:
        threads: threads of torch in this process; 0 leaves them unchanged.

    Raises:
        UsageError: the folder does not hold such a model, torch does not know the device, `train.attention` does not
            fit them, or the adapters of the checkpoint have another form than those to train.
        MissingExtra: torch or transformers is not installed.
    """
    goes_on = holds_adapters(folder)
    if goes_on and train.lora.rank:
        check_form(folder, train)
    model = load_causal_model(folder, device, stored_dtype(train))
    import torch

    if threads:
        torch.set_num_threads(threads)
    if goes_on and not train.lora.rank:
        merge_adapters(model)
        model.requires_grad_(True)
    if train.dtype != stored_dtype(train):
        compute_logits_in_float32(model)
    turn_off_cudnn_attention()
    if train.attention == "auto":
        use_default_attention(model, train.dtype)
    else:
        use_attention(model, train.attention, train.dtype)
    return model


def stored_dtype(train: Train) -> Dtype:
    """Return the type in which a model is kept for training: float32 where its weights are trained themselves."""
    return train.dtype if train.lora.rank else "float32"


def check_form(folder: Path, train: Train) -> None:
    """Refuse to train adapters of one form from a checkpoint with adapters of another: weights in bfloat16 cannot take
    up the old ones without loss.

    Raises:
        UsageError: their rank, scale or layers differ from the settings.
    """
    found = read_adapter_config(folder)
    layers = len(found.layers_to_transform or ())
    theirs = {"rank": found.r, "alpha": found.lora_alpha, "layers": layers, "experts": bool(found.target_parameters)}
    lora = train.lora
    ours = {"rank": lora.rank, "alpha": lora.alpha, "layers": lora.layers, "experts": lora.experts}
    if theirs != ours:
        wanted = " ".join(f"train.lora.{name}={str(value).lower()}" for name, value in theirs.items())
        raise UsageError(
            f"training from {folder} goes on with its adapters: set {wanted}; or begin with others on the model that"
            " harness1 models merge makes of it"
        )
