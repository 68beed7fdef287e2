"""Loading of a Hugging Face causal language model from a local folder, for sampling and for training."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from harness1.errors import UsageError, optional
from harness1.model_folder import (
    CONFIG,
    base_folder,
    checked_base,
    first_line,
    holds_adapters,
    no_progress_bars,
    refusing,
)
from harness1.models.adapters import plain_state, put_adapters, read_adapters

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel


Dtype = Literal["float32", "bfloat16"]
HEAD_ROWS = 2048
"""Rows of the output head that are converted to float32 at a time: a few megabytes, which stay in a core's cache."""


def context_window(folder: Path) -> int | None:
    """Return the tokens that a model, or the base of adapters, reads by its `config.json`; None if it does not say."""
    folder = base_folder(folder)
    with refusing(f"{folder} has no readable config.json"):
        config = msgspec.json.decode((folder / CONFIG).read_bytes(), type=dict[str, Any])
        return msgspec.convert(config.get("max_position_embeddings"), int | None)


def load_causal_model(folder: Path, device: str, dtype: Dtype) -> PreTrainedModel:
    """Return the model in a folder (`config.json` and safetensors), without dropout, with logits in float32: rounding
    them would distort a log probability more than all the layers below. For a folder of adapters it is their base with
    the adapters beside its weights, unmerged. Raise UsageError if the folder holds no such model or lacks weights of
    it, the base of its adapters is missing or another, or torch has no such device; MissingExtra without torch."""
    base = checked_base(folder)
    with optional("train"):
        import torch
        from transformers import AutoModelForCausalLM
    auto: Any = AutoModelForCausalLM
    options = {"dtype": getattr(torch, dtype), "local_files_only": True, "output_loading_info": True}
    with refusing(f"{base} is not a causal language model that transformers loads"), no_progress_bars():
        model, loading = auto.from_pretrained(base, **options)
    if missing := loading["missing_keys"]:
        raise UsageError(f"{base} lacks weights of its model: {', '.join(sorted(missing)[:3])}")
    try:
        model.to(device)
    except (RuntimeError, AssertionError) as error:  # which of them depends on the kind of device
        raise UsageError(f"{base} does not load on the device {device!r}: {first_line(error)}") from error
    if getattr(model.config.get_text_config(), "attn_logit_softcapping", None) is not None:
        model.set_attn_implementation("eager")  # torch's fused attention, the default, silently ignores soft caps
    if dtype != "float32":
        compute_logits_in_float32(model)
    ready: PreTrainedModel = model.eval()
    if holds_adapters(folder):
        put_adapters(ready, read_adapters(folder))
    return ready


def output_head(model: PreTrainedModel) -> Any:
    """Return the layer that computes logits."""
    return model.get_output_embeddings()  # type: ignore[no-untyped-call]


@contextmanager
def logits_at(model: PreTrainedModel, row: Tensor, column: Tensor) -> Iterator[None]:
    """Let the model return [1, tokens, vocabulary] logits at rows and columns alone, by a hook on the head's input."""
    handle = output_head(model).register_forward_pre_hook(lambda _, given: (given[0][row, column][None],))
    try:
        yield
    finally:
        handle.remove()


def compute_logits_in_float32(model: PreTrainedModel) -> None:
    """Make the output head compute in float32 whatever the layers below do, even under automatic mixed precision."""
    import torch

    class Float32Head(torch.nn.Module):
        def __init__(self, weight: torch.nn.Parameter, bias: torch.nn.Parameter | None) -> None:
            super().__init__()
            self.weight, self.bias = weight, bias

        def forward(self, hidden: Tensor) -> Tensor:
            bias = None if self.bias is None else self.bias.float()
            with torch.autocast(hidden.device.type, enabled=False):
                hidden = hidden.float()
                if hidden.device.type != "cpu" or torch.is_grad_enabled():
                    return torch.nn.functional.linear(hidden, self.weight.float(), bias)
                # A whole copy of the weight would cost more than all layers in a step of decoding.
                logits = hidden.new_empty(*hidden.shape[:-1], len(self.weight))
                for start in range(0, len(self.weight), HEAD_ROWS):
                    block = slice(start, start + HEAD_ROWS)
                    logits[..., block] = torch.nn.functional.linear(hidden, self.weight[block].float())
                return logits if bias is None else logits.add_(bias)

    head = output_head(model)
    model.set_output_embeddings(Float32Head(head.weight, head.bias))  # type: ignore[no-untyped-call]


def check_weights(model: PreTrainedModel, state: Mapping[str, Tensor]) -> None:
    """Raise UsageError unless a state dictionary has the plain model's names, of tied weights any, and shapes."""
    own = plain_state(model)
    given = {own[name].data_ptr() for name in own.keys() & state.keys()}
    wrong = sorted(
        [name for name, value in own.items() if name not in state and value.data_ptr() not in given]
        + [name for name, value in state.items() if name not in own or own[name].shape != value.shape]
    )
    if wrong:
        raise UsageError(f"these are not the weights of this model: {', '.join(wrong[:3])}")


class MemoryReturns:
    """Returns freed memory that glibc keeps to the system at intervals: a process that used 4.9 GB had held 11.0."""

    def __init__(self, interval_s: float = 30.0) -> None:
        self._interval_s, self._last = interval_s, time.monotonic()

    def tick(self) -> None:
        if time.monotonic() - self._last >= self._interval_s:
            with suppress(AttributeError, OSError):  # other libraries of C do not need it
                ctypes.CDLL(None).malloc_trim(0)
            self._last = time.monotonic()
