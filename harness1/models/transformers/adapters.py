"""Low-rank adapters of a model: adding them, their state, and merging. Trainer and sampler share these layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from harness1.config import Lora
from harness1.errors import UsageError
from harness1.models.transformers.adapted_layers import BASE, DOWN, UP, adapted, factor_shapes, is_mixture

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

PEFT = "base_model.model."
"""What peft puts before the name of each tensor."""


@dataclass(frozen=True)
class Adapters:
    """The adapters of a model: their tensors by peft's names, in float32, each [rank, in] (A) or [out, rank] (B)."""

    rank: int
    alpha: float
    tensors: Mapping[str, Tensor]

    @property
    def lora(self) -> Lora:
        """The settings that adapters of this form are trained with."""
        return Lora(rank=self.rank, alpha=self.alpha, experts=any(f".{BASE}." in name for name in self.tensors))


if TYPE_CHECKING:
    Weights = Adapters | Mapping[str, Tensor]
    """Adapters on a base that the reader has, or a whole state dictionary."""


def add_adapters(model: PreTrainedModel, lora: Lora, seed: int) -> None:
    """Freeze a model and add an adapter to each linear layer except the output head and, with `lora.experts`, to the
    experts of a mixture; with `lora.layers`, only in so many of its last layers. B starts at zero, which leaves the
    model's outputs unchanged.

    Raises:
        UsageError: the model has no linear layer, no such experts, or fewer layers.
    """
    import torch

    model.requires_grad_(False)
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    linear = [name for name, layer in model.named_modules() if isinstance(layer, torch.nn.Linear) and layer is not head]
    mixtures = [name for name, layer in model.named_modules() if lora.experts and is_mixture(layer)]
    if not linear:
        raise UsageError(f"{type(model).__name__} has no linear layers for adapters: train.lora.rank=0 trains all")
    if lora.experts and not mixtures:
        raise UsageError(f"{type(model).__name__} has no mixture of experts: set train.lora.experts=false")
    first = _first_adapted(model, lora)
    generator = torch.Generator().manual_seed(seed)
    for name in linear + mixtures:
        if layer_of(name) >= first:
            _wrap(model, name, lora)
    for _, layer in adapted_layers(model):
        drawn = torch.rand(layer.lora_A.weight.shape, generator=generator)
        with torch.no_grad():
            layer.lora_A.weight.copy_((2 * drawn - 1) * layer.lora_A.in_features**-0.5)


def layer_of(name: str) -> int:
    """Return the number of the transformer layer that a part of a model, or a tensor, belongs to; -1: to none."""
    return next((int(part) for part in name.split(".") if part.isdecimal()), -1)


def adapted_layers(model: PreTrainedModel) -> Iterator[tuple[str, Any]]:
    """Yield every layer with an adapter, and its name."""
    for name, layer in model.named_modules():
        if hasattr(layer, DOWN) and hasattr(layer, BASE):
            yield name, layer


def adapters_of(model: PreTrainedModel, state: Mapping[str, Tensor] | None = None) -> Adapters | None:
    """Return the adapters of a model, which share memory with it, or None if it has none.

    Args:
        state: its tensors, if they have been gathered from several processes.
    """
    first = next(adapted_layers(model), None)
    if first is None:
        return None
    found = {name: value for name, value in (state or model.state_dict()).items() if _is_part(name)}
    return Adapters(first[1].rank, first[1].alpha, {f"{PEFT}{name}": value.detach() for name, value in found.items()})


def adapted_names(adapters: Adapters) -> list[str]:
    """Return the names of the layers that the tensors belong to."""
    return list(dict.fromkeys(name.removeprefix(PEFT).rsplit(".", 2)[0] for name in adapters.tensors))


def tensors_of(weights: Weights) -> Mapping[str, Tensor]:
    """Return the tensors of adapters, or of a state dictionary, by name."""
    return weights.tensors if isinstance(weights, Adapters) else weights


def on_cpu(weights: Weights) -> Weights:
    """Return weights in the memory of the CPU, without gradients."""
    moved = {name: value.detach().cpu() for name, value in tensors_of(weights).items()}
    return replace(weights, tensors=moved) if isinstance(weights, Adapters) else moved


def put_adapters(model: PreTrainedModel, adapters: Adapters) -> None:
    """Give adapters to a model, in place of those that it has; copy their tensors and freeze everything else.

    Raises:
        UsageError: as `check_adapters`; the model is then unchanged.
    """
    check_adapters(model, adapters)
    present = adapters_of(model)
    if present is None or (present.lora, present.tensors.keys()) != (adapters.lora, adapters.tensors.keys()):
        drop_adapters(model)
        model.requires_grad_(False)
        for name in adapted_names(adapters):
            if not name.endswith(f".{BASE}"):
                _wrap(model, name, adapters.lora)
    own = model.state_dict()
    for name, value in adapters.tensors.items():
        own[name.removeprefix(PEFT)].copy_(value)


def keep_rounded(model: PreTrainedModel) -> None:
    """Let the adapters of a model that is only sampled be rounded once, not in every pass; call it after every change
    of them."""
    for _, layer in adapted_layers(model):
        if hasattr(layer, "keep_rounded"):
            layer.keep_rounded()


def check_adapters(model: PreTrainedModel, adapters: Adapters) -> None:
    """Refuse adapters of another model.

    Raises:
        UsageError: a layer is missing, cannot be adapted, or has another shape.
    """
    modules = {_plain(name): layer for name, layer in model.named_modules()}  # of equal names, the innermost
    expected: dict[str, tuple[int, ...]] = {}
    for name in map(_plain, adapted_names(adapters)):
        pairs = factor_shapes(modules.get(name), adapters.rank)
        for at, shapes in enumerate(pairs):
            inside = f".{BASE}" * (len(pairs) - 1 - at)
            expected |= {f"{PEFT}{name}{inside}.{part}.weight": s for part, s in zip((DOWN, UP), shapes, strict=True)}
    found = {name: tuple(value.shape) for name, value in adapters.tensors.items()}
    if found != expected:
        wrong = min(name for name, _ in found.items() ^ expected.items())
        raise UsageError(f"these adapters do not fit {type(model).__name__}: {wrong}")


def drop_adapters(model: PreTrainedModel) -> None:
    """Take all adapters off a model; its weights are those of the base, and stay frozen."""
    for name, layer in list(adapted_layers(model)):
        if not name.endswith(f".{BASE}"):
            while hasattr(layer, BASE):
                layer = layer.base_layer
            model.set_submodule(name, layer)


def plain_state(model: PreTrainedModel, state: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Return the state dictionary of the model without its adapters, which shares memory with it."""
    own = model.state_dict() if state is None else state
    return {_plain(name): value for name, value in own.items() if not _is_part(name)}


def merged_state(model: PreTrainedModel, dtype: str | None = None) -> dict[str, Tensor]:
    """Return the state dictionary of the plain model, with adapters merged: added in float32, then rounded to the type
    of the weights, or to `dtype`. Only tensors without an adapter are shared with the model and follow its later
    steps."""
    import torch

    merged = plain_state(model)
    with torch.no_grad():
        for name, weight, change in adapted_weights(model):
            merged[name] = (weight.float() + change).to(weight.dtype if dtype is None else getattr(torch, dtype))
    return merged if dtype is None else {name: value.to(getattr(torch, dtype)) for name, value in merged.items()}


def adapted_weights(model: PreTrainedModel) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield every weight with an adapter, by its name in the plain model, and what the adapter adds, in float32."""
    own = plain_state(model)
    for name, layer in adapted_layers(model):
        target = f"{_plain(name)}.{layer.target}"
        yield target, own[target], layer.update()


def merge_adapters(model: PreTrainedModel) -> None:
    """Merge the adapters of a model into its weights, in place."""
    merged = merged_state(model)
    drop_adapters(model)
    model.load_state_dict(merged, strict=False)


def _first_adapted(model: PreTrainedModel, lora: Lora) -> int:
    """Return the number of the first layer that gets adapters; -1: everything does."""
    count = int(model.config.get_text_config().num_hidden_layers)
    if lora.layers > count:
        raise UsageError(f"{type(model).__name__} has {count} layers: train.lora.layers={lora.layers} is too many")
    return count - lora.layers if lora.layers else -1


def _wrap(model: PreTrainedModel, name: str, lora: Lora) -> None:
    model.set_submodule(name, adapted(model.get_submodule(name), lora.rank, lora.alpha))


def _is_part(name: str) -> bool:
    return f".{DOWN}." in name or f".{UP}." in name


def _plain(name: str) -> str:
    """Return a name within the model without adapters."""
    return name.replace(f".{BASE}", "")
