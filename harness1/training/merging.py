"""Merging adapters into the weights of their base, and what rounding loses of them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from harness1.errors import UsageError
from harness1.model_folder import base_folder, holds_adapters, refusing
from harness1.models.adapters import adapted_weights, drop_adapters, merged_state
from harness1.models.causal_model import Dtype, load_causal_model
from harness1.models.checkpoint import read_checkpoint
from harness1.training.saving import copy_beside_weights, save_whole, write_card

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class RoundingLoss(NamedTuple):
    """What rounding merged weights loses: |rounded - exact| / |update|, norms over all adapted weights, and the largest
    of a single one. About 0 keeps everything; near or above 1 the update is lost in rounding."""

    total: float
    largest: float
    layer: str
    """The name of the weight that loses most."""


class _Stored(msgspec.Struct):
    dtype: str | None = None
    torch_dtype: str | None = None


def rounding_loss(model: PreTrainedModel, dtype: Dtype) -> RoundingLoss:
    """Return what is lost by merging the adapters of a model in float32 and rounding the sums to a type."""
    import torch

    lost = update = 0.0
    largest, layer = 0.0, ""
    with torch.no_grad():
        for name, weight, change in adapted_weights(model):
            exact = weight.double() + change.double()
            error = float((exact.float().to(getattr(torch, dtype)).double() - exact).norm())
            size = float(change.double().norm())
            lost, update = lost + error**2, update + size**2
            share = error / size if size else 0.0
            if share >= largest:
                largest, layer = share, name
    return RoundingLoss((lost / update) ** 0.5 if update else 0.0, largest, layer)


def merge(adapters: Path, out: Path, dtype: Dtype) -> RoundingLoss:
    """Write the model that a folder of adapters describes as a plain one: added in float32, then rounded to a type.

    Raises:
        UsageError: the folder holds no adapters, `out` holds something or cannot be written, or the base is missing or
            another.
        MissingExtra: torch or transformers is not installed.
    """
    if not holds_adapters(adapters):
        raise UsageError(f"{adapters} holds no adapters: there is nothing to merge")
    if out.exists() and any(out.iterdir()):
        raise UsageError(f"{out} is not empty: choose another --out")
    model = load_causal_model(adapters, "cpu", _stored_type(base_folder(adapters)))
    lost = rounding_loss(model, dtype)
    state = merged_state(model, dtype)
    drop_adapters(model)
    copy_beside_weights(adapters, out)
    save_whole(out, _cast(model, dtype), state)
    card = read_checkpoint(adapters)
    if card is not None:
        write_card(out, msgspec.structs.replace(card, adapter_base=""))
    return lost


def _cast(model: PreTrainedModel, dtype: Dtype) -> PreTrainedModel:
    """Return the model in a type, which its configuration then names."""
    import torch

    cast: PreTrainedModel = model.to(getattr(torch, dtype))
    return cast


def _stored_type(base: Path) -> Dtype:
    """Return the type in which the weights of a model lose nothing."""
    with refusing(f"{base} has no readable config.json"):
        found = msgspec.json.decode((base / "config.json").read_bytes(), type=_Stored)
    return "bfloat16" if "bfloat16" in (found.dtype, found.torch_dtype) else "float32"
