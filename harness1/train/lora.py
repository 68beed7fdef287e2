"""Low-rank adapters (Hu et al., arXiv 2106.09685): W x + (alpha / rank) B A x, with A and B trained and W frozen."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from harness1.config import Lora
from harness1.errors import UsageError
from harness1.models.transformers.causal_model import output_head
from harness1.train.sharding import gathered

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedModel

DOWN, UP, BASE = "lora_A", "lora_B", "base"
"""Names of the parts of an adapted layer; A and B are named as in peft."""


def add_adapters(model: PreTrainedModel, lora: Lora, seed: int) -> None:
    """Freeze a model and add an adapter to each linear layer except the output head. B starts at zero, which leaves the
    model's outputs unchanged. Raise UsageError if the model has no linear layer."""
    import torch

    model.requires_grad_(False)
    head = output_head(model)
    found = [
        (parent, name, layer)
        for parent in model.modules()
        for name, layer in parent.named_children()
        if isinstance(layer, torch.nn.Linear) and layer is not head
    ]
    if not found:
        raise UsageError(f"{type(model).__name__} has no linear layers for adapters: train.lora.rank=0 trains all")
    generator = torch.Generator().manual_seed(seed)
    for parent, name, layer in found:
        setattr(parent, name, _adapted(layer, lora.rank, lora.alpha / lora.rank, generator))


def merged_state(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the state dictionary of the plain model, with adapters merged. Only tensors without an adapter are shared
    with the model and follow its later steps. That of a sharded model is as `gathered` has it."""
    import torch

    merged = gathered(model)
    if not merged:
        return merged
    with torch.no_grad():
        for name, layer in _adapters(model):
            down, up = (merged.pop(f"{name}.{part}.weight") for part in (DOWN, UP))
            for part in ("weight", "bias"):
                if f"{name}.{BASE}.{part}" in merged:
                    merged[f"{name}.{part}"] = merged.pop(f"{name}.{BASE}.{part}")
            update = layer.scale * (up @ down)
            weight = merged[f"{name}.weight"]
            merged[f"{name}.weight"] = (weight.float() + update).to(weight.dtype)
    return merged


def _adapters(model: PreTrainedModel) -> Iterator[tuple[str, Any]]:
    for name, layer in model.named_modules():
        if hasattr(layer, DOWN) and hasattr(layer, BASE):
            yield name, layer


def _adapted(layer: nn.Linear, rank: int, scale: float, generator: Any) -> nn.Module:
    import torch

    class AdaptedLinear(torch.nn.Module):
        """A frozen linear layer with an adapter in float32."""

        def __init__(self) -> None:
            super().__init__()
            self.base, self.scale = layer, scale
            device = layer.weight.device
            self.lora_A = torch.nn.Linear(layer.in_features, rank, bias=False, device=device, dtype=torch.float32)
            self.lora_B = torch.nn.Linear(rank, layer.out_features, bias=False, device=device, dtype=torch.float32)
            with torch.no_grad():
                bound = layer.in_features**-0.5
                drawn = torch.rand((rank, layer.in_features), generator=generator)
                self.lora_A.weight.copy_((2 * drawn - 1) * bound)
                self.lora_B.weight.zero_()

        def forward(self, hidden: Tensor) -> Tensor:
            change = self.lora_B(self.lora_A(hidden.to(self.lora_A.weight.dtype)))
            plain: Tensor = self.base(hidden)
            adapted: Tensor = plain + (self.scale * change).to(plain.dtype)
            return adapted

    return AdaptedLinear()
