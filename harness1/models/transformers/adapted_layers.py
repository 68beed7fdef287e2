"""Layers with low-rank adapters (Hu et al., arXiv 2106.09685): W x + (alpha / rank) B A x, with A and B in float32.

Parts are named as in peft: `base_layer`, `lora_A`, `lora_B`. The update is applied beside the weights and in float32,
also under automatic mixed precision, so that it is never rounded to the precision of the weights. Only linear layers
with weights in bfloat16 on a GPU multiply rounded copies of A and B: launching kernels takes the time there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

Shape = tuple[int, int]
DOWN, UP, BASE = "lora_A", "lora_B", "base_layer"
EXPERTS = ("gate_up_proj", "down_proj")
"""The parameters of a mixture's experts, each [experts, rows, columns]."""
ROUNDED_ON = ("cuda",)
"""Types of devices on which factors are rounded beside weights in bfloat16."""


def is_mixture(module: nn.Module) -> bool:
    """Return True for the experts of a mixture in two 3-D parameters, as transformers builds them for all models."""
    return all(getattr(getattr(module, name, None), "ndim", 0) == 3 for name in EXPERTS)


def factor_shapes(layer: Any, rank: int) -> list[tuple[Shape, Shape]]:
    """Return the shapes of A and B of each adapter that a layer can have: one of a linear layer, two of a mixture's
    experts, none of other layers. As in peft (`target_parameters`), the A of experts is [experts * rank, in], ordered
    by expert, and B is [out, rank * experts], ordered by rank."""
    import torch

    if isinstance(layer, torch.nn.Linear):
        return [((rank, layer.in_features), (layer.out_features, rank))]
    shapes = []
    for name in EXPERTS if is_mixture(layer) else ():
        count, rows, columns = getattr(layer, name).shape
        inputs, outputs = (rows, columns) if _is_transposed(layer) else (columns, rows)
        shapes.append(((rank * count, inputs), (outputs, rank * count)))
    return shapes


def adapted(layer: nn.Module, rank: int, alpha: float) -> nn.Module:
    """Return a layer with adapters of zeros; experts get one for each parameter, each layer around the one before. An
    adapted layer has a `rank` and an `alpha`; `target` names its parameter, and `update()` returns what the adapter
    adds to that, in float32."""
    shapes = factor_shapes(layer, rank)
    if not is_mixture(layer):
        return _adapted_linear(layer, rank, alpha, *shapes[0])
    around = layer
    for name, pair in zip(EXPERTS, shapes, strict=True):
        around = _adapted_parameter(around, layer, name, rank, alpha, *pair)
    return around


def _adapted_linear(layer: Any, rank: int, alpha: float, down: Shape, up: Shape) -> nn.Module:
    import torch

    scale = alpha / rank

    class AdaptedLinear(torch.nn.Module):
        target = "weight"

        def __init__(self) -> None:
            super().__init__()
            self.base_layer, self.rank, self.alpha = layer, rank, alpha
            self.lora_A, self.lora_B = _factor(down, layer), _factor(up, layer)
            self._kept: tuple[Tensor, Tensor] | None = None

        def forward(self, hidden: Tensor) -> Tensor:
            plain: Tensor = self.base_layer(hidden)
            with torch.autocast(hidden.device.type, enabled=False):
                if plain.dtype == torch.bfloat16 and plain.device.type in ROUNDED_ON:
                    first, second = self._kept or self._rounded()
                    inner = hidden.to(torch.bfloat16).flatten(0, -2) @ first.T
                    return torch.addmm(plain.flatten(0, -2), inner, second.T).view_as(plain)
                change = scale * self.lora_B(self.lora_A(hidden.float()))
                adapted: Tensor = plain + change.to(plain.dtype)
            return adapted

        def keep_rounded(self) -> None:
            """Round A and B now, and no more until the next call: for a model that is only sampled."""
            with torch.no_grad():
                self._kept = self._rounded()

        def _rounded(self) -> tuple[Tensor, Tensor]:
            return self.lora_A.weight.to(torch.bfloat16), (scale * self.lora_B.weight).to(torch.bfloat16)

        def update(self) -> Tensor:
            made: Tensor = scale * (self.lora_B.weight @ self.lora_A.weight)
            return made

    return AdaptedLinear()


def _adapted_parameter(
    around: nn.Module, experts: Any, name: str, rank: int, alpha: float, down: Shape, up: Shape
) -> nn.Module:
    import torch

    transposed, scale, count = _is_transposed(experts), alpha / rank, len(getattr(experts, name))

    class AdaptedParameter(torch.nn.Module):
        target = name

        def __init__(self) -> None:
            super().__init__()
            self.base_layer, self.rank, self.alpha = around, rank, alpha
            self.lora_A, self.lora_B = _factor(down, experts), _factor(up, experts)

        def forward(self, hidden: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
            return _mixed(experts, self.base_layer.product, self.product, hidden, indices, weights)

        def product(self, hidden: Tensor, expert: int) -> Tensor:
            """Return the product of one expert's matrix and its tokens, [tokens, in] -> [tokens, out]."""
            own, bias = getattr(experts, name)[expert], getattr(experts, f"{name}_bias", None)
            plain = hidden @ (own if transposed else own.T)
            if bias is not None:
                plain = plain + bias[expert]
            with torch.autocast(hidden.device.type, enabled=False):
                first, second = (factor[expert] for factor in self.factors())
                change = scale * (hidden.float() @ first.T @ second.T)
            adapted: Tensor = plain + change.to(plain.dtype)
            return adapted

        def factors(self) -> tuple[Tensor, Tensor]:
            """Return A, [experts, rank, in], and B, [experts, out, rank]."""
            first = self.lora_A.weight.reshape(count, rank, down[1])
            return first, self.lora_B.weight.reshape(up[0], rank, count).permute(2, 0, 1)

        def update(self) -> Tensor:
            first, second = self.factors()
            made = scale * (second @ first)
            return made.transpose(1, 2) if transposed else made

    return AdaptedParameter()


def _mixed(experts: Any, first: Any, second: Any, hidden: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum of each token's experts, [tokens, width], one expert at a time.

    Args:
        first, second: compute the products of an expert's two matrices.
        indices, weights: of each token's experts, [tokens, chosen].
    """
    import torch

    total = torch.zeros_like(hidden)
    for expert, token, place in _routes(indices, len(getattr(experts, EXPERTS[0]))):
        out = second(experts._apply_gate(first(hidden[token], expert)), expert)
        total.index_add_(0, token, (out * weights[token, place, None]).to(total.dtype))
    return total


def _routes(indices: Tensor, count: int) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield each chosen expert with its tokens and its places among their choices. Where tensors have no data, as in a
    memory plan, experts share the tokens equally."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensor

    if isinstance(indices, FakeTensor):
        used = min(count, indices.numel())
        for expert in range(used):
            some = indices.new_zeros(-(-indices.numel() // used))
            yield expert, some, some
        return
    for expert in sorted(set(indices.flatten().tolist())):
        token, place = torch.where(indices == expert)
        yield expert, token, place


def _is_transposed(experts: Any) -> bool:
    """Return True for parameters of [experts, in, out], as gpt-oss has them; others are [experts, out, in]."""
    return bool(getattr(experts, "is_transposed", False))


def _factor(shape: Shape, beside: nn.Module) -> nn.Linear:
    import torch

    device = next(beside.parameters()).device
    layer = torch.nn.Linear(shape[1], shape[0], bias=False, device=device, dtype=torch.float32)
    torch.nn.init.zeros_(layer.weight)
    return layer
