"""A model as the trainer takes it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from harness1.config import Train
from harness1.models.transformers.causal_model import compute_logits_in_float32, load_causal_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def load_trainable(folder: Path, train: Train, device: str, threads: int = 0) -> PreTrainedModel:
    """Load a causal language model for training, without dropout: what is trained is what will be sampled.

    Weights that are trained are float32, and bfloat16 is what they are multiplied in; frozen ones beside adapters are
    kept in bfloat16 as a whole. Logits are float32 in every case.

    Args:
        threads: of torch, in the whole process; 0 leaves them as they are.

    Raises:
        UsageError: the folder holds no such model, or torch has no such device.
        MissingExtra: torch or transformers is not installed.
    """
    frozen = train.lora.rank > 0
    model = load_causal_model(folder, device, train.dtype if frozen else "float32")
    import torch

    if threads:
        torch.set_num_threads(threads)
    if train.dtype == "bfloat16" and not frozen:
        compute_logits_in_float32(model)
    return model
