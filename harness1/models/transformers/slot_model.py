"""A causal language model whose attention reads slots, checked against its own attention before use."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from harness1.errors import UsageError
from harness1.model_folder import first_line
from harness1.models.transformers.causal_model import logits_at
from harness1.models.transformers.kv_slots import KvSlots, SlotPass, attend

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

ATTENTION = "harness1_slots"
LAYERS = {"full_attention", "sliding_attention"}
MOVING_ROPE = {"dynamic", "longrope"}
"""Rotary embeddings that depend on the length of the sequence: kept keys would be wrong at any other length."""
PROBE_TOKENS, PROBE_REUSED, PROBE_SHORT = 12, 6, 9
PROBE_BOUNDS = {"float32": 1e-3, "bfloat16": 0.3}
"""Largest distance of logits from those of the model's own attention, as a share of their norm. A layer that needs what
slots lack is off by about 1; a mixture of experts in half precision by less, but still noticeably."""


class SlotModel:
    """A model that computes next-token logits for sequences whose keys and values are in slots.

    Args:
        model: it is switched to slot attention, and must not be used otherwise from then on.

    Raises:
        UsageError: slots do not support its attention.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        from transformers import AttentionInterface

        self.model, self.device = model, model.device
        config = model.config.get_text_config()
        _refuse_unlike(model, config)
        self.vocabulary = int(config.vocab_size)
        self.window: int | None = getattr(config, "max_position_embeddings", None)
        ids = [3 * at % self.vocabulary for at in range(PROBE_TOKENS)]
        expected = self._own_logits(ids)
        AttentionInterface.register(ATTENTION, attend)
        model.set_attn_implementation(ATTENTION)
        self._probe(ids, expected)

    def logits(self, ids: list[list[int]], slot_pass: SlotPass) -> Tensor:
        """Return the logits after the last new token of each row, [rows, vocabulary] in float32.

        Args:
            ids: the new tokens of each row; those of the longest are as many as `slot_pass` appends.
        """
        import torch

        longest = max(map(len, ids))
        padded = torch.tensor([row + [0] * (longest - len(row)) for row in ids], device=self.device)
        ends = torch.tensor([len(row) - 1 for row in ids], device=self.device)
        with torch.no_grad(), logits_at(self.model, torch.arange(len(ids), device=self.device), ends):
            out = self.model(padded, position_ids=slot_pass.positions, use_cache=False, slot_pass=slot_pass)
        logits: Tensor = out.logits[0].float()
        return logits

    def _own_logits(self, ids: list[int]) -> Tensor:
        import torch

        with torch.no_grad():
            logits: Tensor = self.model(torch.tensor([ids], device=self.device), use_cache=False).logits[0].float()
        return logits

    def _probe(self, ids: list[int], expected: Tensor) -> None:
        """Prefill, continue after a kept prefix, and decode two rows of different lengths: the logits must be equal."""
        slots = KvSlots(2)
        try:
            self.logits([ids[:PROBE_REUSED]], SlotPass(slots, 0, [0], PROBE_REUSED, self.device))
            slots.copy(0, 1, PROBE_REUSED)
            starts = [PROBE_TOKENS - 1, PROBE_SHORT]
            for slot, start in enumerate(starts):
                new = start - PROBE_REUSED
                self.logits([ids[PROBE_REUSED:start]], SlotPass(slots, slot, [PROBE_REUSED], new, self.device))
            logits = self.logits([[ids[start]] for start in starts], SlotPass(slots, 0, starts, 1, self.device))
        except (RuntimeError, TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
            reason = f"does not run with attention over slots ({first_line(error)})"
            raise UsageError(f"{_name(self.model)} {reason}; use vLLM for it") from error
        wanted = expected[starts]
        bound = PROBE_BOUNDS[str(self.model.dtype).removeprefix("torch.")]
        if not float((logits - wanted).norm() / wanted.norm()) <= bound:
            raise UsageError(
                f"{_name(self.model)} needs an attention or a state that slots do not have; use vLLM for it"
            )


def _refuse_unlike(model: PreTrainedModel, config: Any) -> None:
    unlike = set(getattr(config, "layer_types", None) or ()) - LAYERS
    if unlike:
        raise UsageError(f"{_name(model)} has layers of {', '.join(sorted(unlike))}; use vLLM for it")
    moving = set(_rope_types(getattr(config, "rope_parameters", None))) & MOVING_ROPE
    if moving:
        raise UsageError(f"{_name(model)} has rotary positions of type {', '.join(sorted(moving))}; use vLLM for it")
    if not model._can_set_attn_implementation():
        raise UsageError(f"transformers cannot replace the attention of {_name(model)}; use vLLM for it")


def _rope_types(parameters: Any) -> Iterator[str]:
    """Yield every `rope_type` in the settings, which some models have once for each type of layer."""
    if isinstance(parameters, dict):
        if "rope_type" in parameters:
            yield str(parameters["rope_type"])
        for value in parameters.values():
            yield from _rope_types(value)


def _name(model: PreTrainedModel) -> str:
    return type(model).__name__
