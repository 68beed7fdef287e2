"""Attentions for counting memory.

A fused kernel (FlashAttention, arXiv 2205.14135) keeps queries, keys, values, its output, and one logarithm of a sum
per head and query: its memory is linear in the length. `LINEAR` stands for every such kernel. `SDPA` is torch's own
with the mask that transformers gives it when no row is padded; transformers itself cannot tell that without data."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from typing import TYPE_CHECKING, Any, NamedTuple

from harness1.errors import optional
from harness1.model_folder import refusing
from harness1.models.causal_model import Dtype, compute_logits_in_float32

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedConfig, PreTrainedModel


LINEAR, SDPA = "harness1_linear", "harness1_sdpa"


def register_shape_attentions() -> None:
    """Make both known to transformers; models that use them must have no data."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import AttentionMaskInterface

    for name, attention, mask in ((LINEAR, _attend_linear, _no_mask), (SDPA, sdpa_attention_forward, _sdpa_mask)):
        AttentionInterface.register(name, attention)
        AttentionMaskInterface.register(name, mask)


def _no_mask(*_: Any, **__: Any) -> None:
    return None


def _sdpa_mask(batch_size: int, q_length: int, kv_length: int, local_size: int | None = None, **_: Any) -> Any:
    """Return None where the kernel's own causal order is enough, else a mask of booleans."""
    import torch

    if local_size is None or kv_length < local_size:
        return None
    return torch.ones((batch_size, 1, q_length, kv_length), dtype=torch.bool)


def _attend_linear(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Return an output of the shape of transformers' attention, [rows, tokens, heads, width]."""
    import torch

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            rows, heads, tokens, _ = query.shape  # kernels lay heads beside each other, so that no copy follows
            made = query.new_empty(rows, tokens, heads, value.shape[-1]).transpose(1, 2)
            sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
            context.save_for_backward(query, key, value, made, sums)
            return made

        @staticmethod
        def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
            query, key, value, _, sums = context.saved_tensors
            torch.empty_like(sums)  # the inner products of outputs and their gradients
            return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)

    attended: Tensor = Attention.apply(query, key, value)  # type: ignore[no-untyped-call]
    return attended.transpose(1, 2), None


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
