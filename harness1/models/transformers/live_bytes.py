"""Count the bytes that a model would hold, without holding them: its own code runs on tensors that have shapes but no
data, so no formula of an architecture is needed, and whatever transformers builds can be counted.

Stacks of equal layers are not run whole: two short ones give the bytes of each further layer. This is exact, because
what a layer needs for itself is freed before the next begins.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from typing import TYPE_CHECKING, Any, NamedTuple

from harness1.errors import optional
from harness1.model_folder import refusing
from harness1.models.transformers.causal_model import Dtype, compute_logits_in_float32
from harness1.models.transformers.shape_attention import SDPA, register_shape_attentions

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedConfig, PreTrainedModel

Parts = Mapping[str, int]
"""Bytes by name."""


class Weights(NamedTuple):
    """Bytes of a model's weights."""

    frozen: int
    trained: int
    layer: int
    """Of the largest layer of the stack, frozen and trained."""
    outside: int
    """Of everything but the layers: embedding, head, last norm."""


@contextmanager
def without_data(shape: PreTrainedConfig) -> Iterator[None]:
    """Give every tensor made in this context a shape, a type and the device "cpu", but no data.

    Raises:
        UsageError: a model of this shape cannot be built, or needs data to be computed.
        MissingExtra: torch is not installed.
    """
    with optional("train"):
        from torch._subclasses.fake_tensor import FakeTensorMode
    with refusing(f"the memory of a {shape.model_type} model cannot be computed"), FakeTensorMode():
        yield


def shaped_model(shape: PreTrainedConfig, dtype: Dtype, attention: str = "") -> PreTrainedModel:
    """Return a model as `load_causal_model` does, without data. Call it in `without_data`.

    Args:
        attention: the name of an attention of transformers; empty: the one that transformers chooses.
    """
    import torch
    from transformers import AutoModelForCausalLM

    register_shape_attentions()
    auto: Any = AutoModelForCausalLM
    model: PreTrainedModel = auto.from_config(deepcopy(shape), dtype=getattr(torch, dtype)).eval()
    if getattr(shape.get_text_config(), "attn_logit_softcapping", None) is not None:
        attention = attention or "eager"
    attention = attention or model.config._attn_implementation
    model.set_attn_implementation(SDPA if attention == "sdpa" else attention)
    if dtype != "float32":
        compute_logits_in_float32(model)
    return model


def weights_of(model: PreTrainedModel) -> Weights:
    """Return the bytes of a model's weights and buffers; tied ones count once."""
    frozen = trained = 0
    for tensor in (*model.parameters(), *model.buffers()):
        size = tensor.numel() * tensor.element_size()
        frozen, trained = (frozen, trained + size) if tensor.requires_grad else (frozen + size, trained)
    layers = [_size(layer) for layer in layers_of(model)]
    return Weights(frozen, trained, max(layers, default=0), frozen + trained - sum(layers))


def layers_of(model: PreTrainedModel) -> list[nn.Module]:
    """Return the layers of a model's stack."""
    import torch

    layers = model.config.get_text_config().num_hidden_layers
    stacks = [list(module) for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    return next((stack for stack in stacks if len(stack) == layers), [])


def of_all_layers(shape: PreTrainedConfig, count: Callable[[PreTrainedConfig], Parts]) -> Parts:
    """Return what `count` returns for the whole shape, computed from two short stacks where its layers repeat."""
    text = shape.get_text_config()
    layers, period = text.num_hidden_layers, _period(shape)
    short = max(period, 2)  # the input of a single layer needs no gradient
    longer = short + period
    if layers <= longer or layers % period:
        return count(shape)
    first, second = (count(_with_layers(shape, some)) for some in (short, longer))
    more = (layers - longer) // period
    return {name: second[name] + more * (second[name] - first[name]) for name in second}


def live_bytes(model: PreTrainedModel) -> Any:
    """Return a context that counts the bytes of storages made in it, beyond those of the model: `now`, and `peak`, the
    most since it was last set."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __init__(self) -> None:
            super().__init__()  # type: ignore[no-untyped-call]
            self.now = self.peak = 0
            own = [*model.parameters(), *model.buffers()]
            own += [each.grad for each in own if each.grad is not None]
            self._sizes = {each.untyped_storage()._cdata: 0 for each in own}

        def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            grouped = call is torch.ops.aten._grouped_mm.default and args[0].dtype == torch.float32
            made = _grouped_product(*args, **kwargs) if grouped else call(*args, **(kwargs or {}))
            for each in tree_leaves(made):
                if isinstance(each, torch.Tensor):
                    self._count(each.untyped_storage())
            return made

        def _count(self, storage: Any) -> None:
            if (key := storage._cdata) not in self._sizes:
                self._sizes[key] = storage.nbytes()
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._free, key)

        def _free(self, key: int) -> None:
            self.now -= self._sizes.pop(key)

    return LiveBytes()


def _grouped_product(left: Tensor, right: Tensor, offs: Tensor, **_: Any) -> Tensor:
    """Return what a grouped matrix product returns; without data, torch knows its shape in bfloat16 only."""
    if left.dim() == right.dim() == 2:
        return left.new_empty(len(offs), left.shape[0], right.shape[1])
    return left.new_empty(left.shape[-2], right.shape[-1])


def _size(module: nn.Module) -> int:
    return sum(each.numel() * each.element_size() for each in module.parameters())


def _period(shape: PreTrainedConfig) -> int:
    """Return the number of layers after which their types repeat."""
    kinds = list(getattr(shape.get_text_config(), "layer_types", None) or [""])
    return next(period for period in range(1, len(kinds) + 1) if kinds == (kinds[:period] * len(kinds))[: len(kinds)])


def _with_layers(shape: PreTrainedConfig, layers: int) -> PreTrainedConfig:
    short = deepcopy(shape)
    text = short.get_text_config()
    text.num_hidden_layers = layers
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:layers]
    return short
