"""Keys and values of the rows that are decoded together, attention that reads them in place, and a model with it.

A row owns a slot: position i of its sequence is column i of its slot. Rows of any lengths therefore decode in one pass
without left padding, concatenation or copies of grouped heads; a mask hides the columns beyond a row's end.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from harness1.errors import UsageError
from harness1.model_folder import first_line
from harness1.models.causal_model import logits_at

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedModel


COLUMNS = 256
"""Tokens by which slots grow."""

Layers = dict[int, tuple["Tensor", "Tensor"]]
"""Keys and values of one sequence by layer, each [heads, tokens, width]."""


class KvSlots:
    """The slots of `rows` rows; each layer is allocated when its first keys arrive, and grows with the longest row."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def layer(self, index: int, key: Tensor, value: Tensor, used: int, length: int) -> tuple[Tensor, Tensor]:
        """Return a layer's slots, [rows, heads, columns, width], with room for `length`; the first `used` are kept."""
        old = self._layers.get(index)
        if old is None or old[0].shape[2] < length:
            # Zeros, because a mask does not hide non-finite values: 0 * nan is nan.
            shape = (self._rows, key.shape[1], -(-length // COLUMNS) * COLUMNS)
            new = key.new_zeros(*shape, key.shape[3]), value.new_zeros(*shape, value.shape[3])
            for source, target in zip(old or (), new, strict=False):
                target[:used, :, : source.shape[2]] = source[:used]
            self._layers[index] = new
        return self._layers[index]

    def copy(self, source: int, target: int, length: int) -> None:
        for pair in self._layers.values():
            for states in pair:
                states[target, :, :length] = states[source, :, :length]

    def take(self, slot: int, length: int) -> Layers:
        return {
            at: (keys[slot, :, :length].clone(), values[slot, :, :length].clone())
            for at, (keys, values) in self._layers.items()
        }

    def put(self, slot: int, layers: Layers, length: int) -> None:
        """Write a copy to the first tokens of a slot. The slots before it keep their content."""
        for index, (key, value) in layers.items():
            keys, values = self.layer(index, key[None], value[None], slot, length)
            keys[slot, :, :length], values[slot, :, :length] = key[:, :length], value[:, :length]

    def wipe(self, slot: int) -> None:
        for pair in self._layers.values():
            for states in pair:
                states[slot].zero_()

    def clear(self) -> None:
        self._layers.clear()


class SlotPass:
    """One forward pass that appends `new` tokens to each of some neighbouring slots, which hold `starts` tokens; those
    before the `first` keep their content. A row with fewer new tokens is padded at its end: no token of its own sees
    the padding, and the tokens that follow later are written over it."""

    def __init__(self, slots: KvSlots, first: int, starts: Sequence[int], new: int, device: Any) -> None:
        import torch

        self._slots, self._first, self.starts = slots, first, starts
        self._rows = torch.arange(first, first + len(starts), device=device)
        self.positions = torch.tensor(starts, device=device)[:, None] + torch.arange(new, device=device)
        self._length = max(starts) + new
        self._masks: dict[int | None, Tensor] = {}

    def extend(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append the new states, [slots, heads, new, width], and return everything that the slots hold."""
        last = self._first + len(self.starts)
        keys, values = self._slots.layer(layer, key, value, last, self._length)
        for states, added in ((keys, key), (values, value)):
            if len(self.starts) == 1:
                states[self._first, :, self.starts[0] : self._length] = added[0]
            else:
                states[self._rows[:, None], :, self.positions] = added.transpose(1, 2)
        return keys[self._first : last, :, : self._length], values[self._first : last, :, : self._length]

    def visible(self, window: int | None) -> Tensor:
        """Return the positions that each token sees, `window` up to its own: bool, [slots, 1, new, length]."""
        import torch

        if window not in self._masks:
            columns, own = torch.arange(self._length, device=self.positions.device), self.positions[:, None, :, None]
            mask = columns <= own
            self._masks[window] = mask if window is None else mask & (columns > own - window)
        return self._masks[window]


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Compute attention over the slots in `options["slot_pass"]`, as transformers' `AttentionInterface` calls it, with
    grouped heads, sliding windows (`sliding_window`), soft-capped scores (`softcap`) and attention sinks (`s_aux`).
    Query, key and value are [slots, heads, new, width]; return [slots, new, heads, width], and no weights."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    from harness1.models.block_attention import BlockAttention

    slot_pass: SlotPass = options["slot_pass"]
    scale, window = options.get("scaling") or query.shape[-1] ** -0.5, options.get("sliding_window")
    keys, values = slot_pass.extend(int(module.layer_idx), key, value)  # type: ignore[arg-type]
    rows, heads, new, width = query.shape
    groups = heads // keys.shape[1]
    softcap, sinks = options.get("softcap"), options.get("s_aux")
    if softcap is not None or sinks is not None:
        grouped = query.reshape(rows, -1, groups * new, width)
        out = _explicit(grouped, keys, values, slot_pass.visible(window), scale, softcap, sinks)
    elif new == 1:  # the heads of a group are separate queries to the same keys
        grouped = query.reshape(rows, -1, groups, width)
        out = scaled_dot_product_attention(grouped, keys, values, slot_pass.visible(window), scale=scale)
    elif query.device.type == "cpu" and query.dtype == torch.bfloat16 and (window is None or window >= keys.shape[2]):
        mask = None if len(set(slot_pass.starts)) == 1 else slot_pass.visible(window)
        out = BlockAttention.apply(query, keys, values, mask, scale)  # type: ignore[no-untyped-call]
    else:
        keys, values = keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)
        # The new tokens may be the whole sequence, of which each sees all tokens before it.
        causal = 1 < new == keys.shape[2] and (window is None or window >= new)
        mask = None if causal else slot_pass.visible(window)
        out = scaled_dot_product_attention(query, keys, values, mask, is_causal=causal, scale=scale)
    return out.reshape(rows, heads, new, -1).transpose(1, 2).contiguous(), None


def _explicit(
    query: Tensor, keys: Tensor, values: Tensor, visible: Tensor, scale: float, softcap: float | None, sinks: Any
) -> Tensor:
    """Compute attention with features that the fused kernel lacks. `sinks` [heads] score a token without a value."""
    import torch

    rows, kv_heads, queries, _ = query.shape
    new = visible.shape[2]
    scores = (query @ keys.transpose(-1, -2)).float() * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.view(rows, kv_heads, queries // new, new, -1).masked_fill(~visible[:, None], -torch.inf)
    if sinks is not None:
        sink = sinks.float().view(1, kv_heads, -1, 1, 1).expand(rows, -1, -1, new, 1)
        weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return weights.view(rows, kv_heads, queries, -1).to(values.dtype) @ values


ATTENTION = "harness1_slots"
LAYERS = {"full_attention", "sliding_attention"}
MOVING_ROPE = {"dynamic", "longrope"}
"""Rotary embeddings that depend on the length of the sequence: kept keys would be wrong at any other length."""
PROBE_TOKENS, PROBE_REUSED, PROBE_SHORT = 12, 6, 9
PROBE_BOUNDS = {"float32": 1e-3, "bfloat16": 0.3}
"""Largest distance of logits from those of the model's own attention, as a share of their norm. A layer that needs what
slots lack is off by about 1; a mixture of experts in half precision by less, but still noticeably."""


class SlotModel:
    """A model of next-token logits over slots alone. Raises UsageError unless they equal those of its own attention."""

    def __init__(self, model: PreTrainedModel) -> None:
        import torch
        from transformers import AttentionInterface

        self.model, self.device = model, model.device
        config = model.config.get_text_config()
        unlike = set(getattr(config, "layer_types", None) or ()) - LAYERS
        if unlike:
            raise self._refusal(f"has layers of {', '.join(sorted(unlike))}")
        ropes = re.findall(r'"rope_type": "(\w+)"', config.to_json_string(use_diff=False))
        if moving := MOVING_ROPE.intersection(ropes):
            raise self._refusal(f"has rotary positions of type {', '.join(sorted(moving))}")
        if not model._can_set_attn_implementation():
            raise self._refusal("has an attention that transformers cannot replace")
        self.vocabulary = int(config.vocab_size)
        self.window: int | None = getattr(config, "max_position_embeddings", None)
        ids = [3 * at % self.vocabulary for at in range(PROBE_TOKENS)]
        with torch.no_grad():
            expected = model(torch.tensor([ids], device=self.device), use_cache=False).logits[0].float()
        AttentionInterface.register(ATTENTION, attend)
        model.set_attn_implementation(ATTENTION)
        self._probe(ids, expected)

    def logits(self, ids: list[list[int]], slot_pass: SlotPass) -> Tensor:
        """Return the logits after each row's last new token, [rows, vocabulary] in float32; `ids` are the new
        tokens."""
        import torch

        longest = max(map(len, ids))
        padded = torch.tensor([row + [0] * (longest - len(row)) for row in ids], device=self.device)
        ends = torch.tensor([len(row) - 1 for row in ids], device=self.device)
        with torch.no_grad(), logits_at(self.model, torch.arange(len(ids), device=self.device), ends):
            out: Any = self.model(padded, position_ids=slot_pass.positions, use_cache=False, slot_pass=slot_pass)
        logits: Tensor = out.logits[0].float()
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
            raise self._refusal(f"does not run with attention over slots ({first_line(error)})") from error
        wanted = expected[starts]
        bound = PROBE_BOUNDS[str(self.model.dtype).removeprefix("torch.")]
        if not float((logits - wanted).norm() / wanted.norm()) <= bound:
            raise self._refusal("needs an attention or a state that slots do not have")

    def _refusal(self, reason: str) -> UsageError:
        return UsageError(f"{type(self.model).__name__} {reason}; use vLLM for it")
