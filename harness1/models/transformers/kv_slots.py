"""Keys and values of the rows that are decoded together, and attention that reads them in place.

A row owns a slot: position i of its sequence is column i of its slot. Rows of any lengths therefore decode in one pass
without left padding, concatenation or copies of grouped heads; a mask hides the columns beyond a row's end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

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
        """Return the slots of a layer, [rows, heads, columns, width] each, with room for `length` tokens in each row.

        Args:
            key, value: new states, which give heads, width, type and device.
            used: number of leading slots whose content is kept.
        """
        old = self._layers.get(index)
        if old is None or old[0].shape[2] < length:
            new = self._empty(key, length), self._empty(value, length)
            for source, target in zip(old or (), new, strict=False):
                target[:used, :, : source.shape[2]] = source[:used]
            self._layers[index] = new
        return self._layers[index]

    def _empty(self, like: Tensor, length: int) -> Tensor:
        # Zeros, because a mask does not hide non-finite values: 0 * nan is nan.
        return like.new_zeros(self._rows, like.shape[1], -(-length // COLUMNS) * COLUMNS, like.shape[3])

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first tokens of one slot to another."""
        for pair in self._layers.values():
            for states in pair:
                states[target, :, :length] = states[source, :, :length]

    def take(self, slot: int, length: int) -> Layers:
        """Return a copy of the first tokens of a slot."""
        return {
            index: (keys[slot, :, :length].clone(), values[slot, :, :length].clone())
            for index, (keys, values) in self._layers.items()
        }

    def put(self, slot: int, layers: Layers, length: int) -> None:
        """Write a copy to the first tokens of a slot. The slots before it keep their content."""
        for index, (key, value) in layers.items():
            keys, values = self.layer(index, key[None], value[None], slot, length)
            keys[slot, :, :length], values[slot, :, :length] = key[:, :length], value[:, :length]

    def wipe(self, slot: int) -> None:
        """Reset a slot to zeros."""
        for pair in self._layers.values():
            for states in pair:
                states[slot].zero_()

    def clear(self) -> None:
        """Free all memory."""
        self._layers.clear()


class SlotPass:
    """One forward pass that appends `new` tokens to each of some neighbouring slots.

    A row with fewer new tokens is padded at its end: no token of its own sees the padding, and the tokens that follow
    later are written over it.

    Args:
        first: the first of the slots; those before it keep their content.
        starts: for each slot, the number of tokens that it holds.
    """

    def __init__(self, slots: KvSlots, first: int, starts: Sequence[int], new: int, device: Any) -> None:
        import torch

        self._slots, self._first, self._starts, self._new = slots, first, starts, new
        self._rows = torch.arange(first, first + len(starts), device=device)
        self.positions = torch.tensor(starts, device=device)[:, None] + torch.arange(new, device=device)
        self._length = max(starts) + new
        self._masks: dict[int | None, Tensor] = {}

    def extend(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append the new states, [slots, heads, new, width], and return everything that the slots hold."""
        last = self._first + len(self._starts)
        keys, values = self._slots.layer(layer, key, value, last, self._length)
        for states, added in ((keys, key), (values, value)):
            if len(self._starts) == 1:
                states[self._first, :, self._starts[0] : self._length] = added[0]
            else:
                states[self._rows[:, None], :, self.positions] = added.transpose(1, 2)
        return keys[self._first : last, :, : self._length], values[self._first : last, :, : self._length]

    @property
    def is_even(self) -> bool:
        """True if all slots hold equally many tokens."""
        return len(set(self._starts)) == 1

    def is_causal(self, window: int | None) -> bool:
        """Return whether the new tokens are the whole sequence, and each sees all tokens before it."""
        return self._new == self._length and self._new > 1 and (window is None or window >= self._length)

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
    """Compute attention over the slots in `options["slot_pass"]`, as transformers' `AttentionInterface` calls it.

    Supported: grouped heads, sliding windows (`sliding_window`), soft-capped scores (`softcap`), attention sinks
    (`s_aux`).

    Args:
        query, key, value: [slots, heads, new, width]; keys and values may have fewer heads.

    Returns:
        [slots, new, heads, width of the values], and no weights.
    """
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    from harness1.models.transformers.block_attention import BlockAttention

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
        mask = None if slot_pass.is_even else slot_pass.visible(window)
        out = BlockAttention.apply(query, keys, values, mask, scale)  # type: ignore[no-untyped-call]
    else:
        keys, values = keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)
        causal = slot_pass.is_causal(window)
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
