"""Loading a model for training."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from harness1.config import Train
from harness1.models.transformers.causal_model import Dtype, compute_logits_in_float32, load_causal_model
from harness1.train.attention import use_attention

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def load_trainable(folder: Path, train: Train, device: str, threads: int = 0) -> PreTrainedModel:
    """Load a causal language model for training, without dropout, so that it computes what it will when sampled.

    Trained weights are kept in float32 and multiplied in `train.dtype`; frozen weights are kept in `train.dtype`.
    Logits are always float32.

    Args:
        threads: threads of torch in this process; 0 leaves them unchanged.

    Raises:
        UsageError: the folder does not hold such a model, torch does not know the device, or `train.attention` does not
            fit them.
        MissingExtra: torch or transformers is not installed.
    """
    model = load_causal_model(folder, device, stored_dtype(train))
    import torch

    if threads:
        torch.set_num_threads(threads)
    if train.dtype != stored_dtype(train):
        compute_logits_in_float32(model)
    if train.attention != "auto":
        use_attention(model, train.attention, train.dtype)
    return model


def stored_dtype(train: Train) -> Dtype:
    """Return the type in which a model is kept for training: float32 where its weights are trained themselves."""
    return train.dtype if train.lora.rank else "float32"
