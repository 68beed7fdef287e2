"""Decoding of many rows at once, without threads: rows join and leave between steps, prefixes are computed once.

A row owns a slot: position i of its sequence is column i of its slot. Rows of any lengths therefore decode in one pass
without left padding, concatenation or copies of grouped heads; a mask hides the columns beyond a row's end."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from harness1.errors import InfrastructureFault, UsageError
from harness1.model_folder import first_line
from harness1.models.backend import FinishReason, draw, process_logprobs
from harness1.models.causal_model import logits_at
from harness1.records import Sampling

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedModel

    from harness1.models.grammar import GrammarState


COLUMNS = 256  # tokens by which slots grow

Layers = dict[int, tuple["Tensor", "Tensor"]]  # keys and values of one sequence by layer, each [heads, tokens, width]


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

    @property
    def prefill_tokens(self) -> int:
        """The most tokens of several prompts in one pass, 0 for one prompt a pass."""
        if self.device.type != "cpu":
            return PREFILL_TOKENS
        return SMALL_PREFILL_TOKENS if self.model.num_parameters() < SMALL_WEIGHTS else 0

    def logits(self, ids: list[list[int]], slot_pass: SlotPass) -> Tensor:
        """Return the logits after each row's last of its new tokens, [rows, vocabulary] in float32."""
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


class DecodingRow:
    """An unfinished output: ids, log probabilities, generator, grammar state; `fault` is an error of this row alone."""

    def __init__(self, prompt: NDArray[np.int64], sampling: Sampling, grammar: GrammarState | None = None) -> None:
        import torch

        self.prompt, self.sampling, self.grammar = prompt, sampling, grammar
        self.ids, self.logprobs = list[int](prompt.tolist()), list[float]()
        self.generator = torch.Generator()
        if sampling.seed is None:
            self.generator.seed()
        else:
            self.generator.manual_seed(sampling.seed)
        self.fault: InfrastructureFault | None = None

    @property
    def output_ids(self) -> tuple[int, ...]:
        return tuple(self.ids[len(self.prompt) :])

    @property
    def finish_reason(self) -> FinishReason | None:
        """None until the output ends."""
        if self.logprobs and self.ids[-1] in self.sampling.stop_ids:
            return "stop"
        return "length" if len(self.logprobs) >= self.sampling.max_tokens else None

    def append(self, token: int, logprob: float) -> None:
        """Append the next token; one whose log probability is not finite is a fault instead."""
        if not math.isfinite(logprob):
            self.fault = InfrastructureFault("the model's log probabilities are not finite")
            return
        self.ids.append(token)
        self.logprobs.append(logprob)
        if self.grammar is not None and self.fault is None:
            try:
                self.grammar.accept(token)
            except InfrastructureFault as fault:
                self.fault = fault

    def mask(self, free: Tensor) -> Tensor:
        """Return the tokens that its grammar allows next; all (`free`) if it has no grammar or the grammar failed."""
        if self.grammar is not None and self.fault is None:
            try:
                return self.grammar.mask()
            except InfrastructureFault as fault:
                self.fault = fault
        return free


PREFILL_TOKENS = 16384
"""Most tokens of several prompts in one pass on a GPU, with padding and with what is cached of them."""
SMALL_PREFILL_TOKENS = 2048  # the same on a CPU, for models of fewer than `SMALL_WEIGHTS`
SMALL_WEIGHTS = 10_000_000
"""With fewer, a pass on a CPU costs more to begin than to compute; with more, padding costs more than it saves."""


class Decoder:
    """A decoder of up to `rows` rows together; row i owns slot i. It keeps the keys and values of `cache_tokens` tokens
    of finished outputs, least recently used dropped first: the prefix that a new prompt shares with one of them, or
    with a running row, is not computed again. Several prompts share a pass of at most `prefill_tokens`, with padding
    and what is computed already; 0: one prompt a pass. It counts the tokens of prompts that were computed and those
    that were not, and the tokens drawn after the first of each output."""

    def __init__(self, model: SlotModel, rows: int, cache_tokens: int, prefill_tokens: int = 0) -> None:
        self._model, self._most, self._prefill_tokens = model, rows, prefill_tokens
        self._slots, self._rows = KvSlots(rows), list[DecodingRow]()
        self._kept, self._most_kept = list[tuple[NDArray[np.int64], Layers]](), cache_tokens
        self.prefilled_tokens = self.reused_tokens = self.decoded_tokens = 0

    @property
    def free(self) -> int:
        return self._most - len(self._rows)

    def next_pass(self, prompts: Sequence[NDArray[np.int64]]) -> list[int]:
        """Return the places of prompts to `admit` together; one that begins as a chosen one waits, to copy it."""
        if not self._prefill_tokens:
            return [0]
        chosen, starts, lengths = list[int](), list[int](), list[int]()
        for place, prompt in enumerate(prompts):
            if chosen and (len(chosen) + 1) * _reach(starts, lengths) > self._prefill_tokens:
                break
            start, _ = self._find_shared(prompt[:-1])
            begins = max((_common_prefix(prompt, prompts[other]) for other in chosen), default=0)
            waits = min(begins, len(prompt) - 1) - start > (len(prompt) - start) / 2
            # Neither slots nor positions may go beyond what the longest needs or the model has.
            room = -(-max([*lengths, len(prompt)]) // COLUMNS) * COLUMNS
            reach = _reach([*starts, start], [*lengths, len(prompt)])
            fits = (len(chosen) + 1) * reach <= self._prefill_tokens and reach <= min(room, self._model.window or room)
            if not chosen or (not waits and fits):
                chosen.append(place)
                starts.append(start)
                lengths.append(len(prompt))
        return chosen

    def admit(self, rows: Sequence[DecodingRow]) -> None:
        """Compute the new parts of the prompts in one pass, draw their first tokens, and add the rows."""
        first = len(self._rows)
        try:
            reused = [self._reuse(row.prompt[:-1], first + at) for at, row in enumerate(rows)]
            new = [row.ids[start:] for row, start in zip(rows, reused, strict=True)]
            slot_pass = SlotPass(self._slots, first, reused, max(map(len, new)), self._model.device)
            self._draw(rows, self._model.logits(new, slot_pass))
        except BaseException:
            for at in range(len(rows)):
                self._slots.wipe(first + at)
            raise
        self._rows += rows
        self.prefilled_tokens += sum(map(len, new))
        self.reused_tokens += sum(reused)

    def step(self) -> None:
        """Draw one more token for each running row. Raises what `admit` raises; call `reset` after that."""
        starts = [len(row.ids) - 1 for row in self._rows]
        slot_pass = SlotPass(self._slots, 0, starts, 1, self._model.device)
        self._draw(self._rows, self._model.logits([[row.ids[-1]] for row in self._rows], slot_pass))
        self.decoded_tokens += len(starts)

    def release(self, row: DecodingRow) -> None:
        """Remove a row, keep its computed states for others unless it failed, and move the last row to its slot."""
        slot, last = self._rows.index(row), len(self._rows) - 1
        computed = len(row.ids) - 1
        if row.fault is not None:
            self._slots.wipe(slot)
        else:
            self._keep(np.asarray(row.ids[:computed], dtype=np.int64), slot)
        if slot != last:
            self._slots.copy(last, slot, len(self._rows[last].ids) - 1)
            self._rows[slot] = self._rows[last]
        self._rows.pop()

    def reset(self) -> None:
        self._rows.clear()
        self._slots.clear()
        self._kept.clear()

    def _reuse(self, ids: NDArray[np.int64], slot: int) -> int:
        length, source = self._find_shared(ids)
        if isinstance(source, dict):
            self._slots.put(slot, source, length)
        elif length:
            self._slots.copy(source, slot, length)
        return length

    def _find_shared(self, ids: NDArray[np.int64]) -> tuple[int, int | Layers]:
        """Return the length of the longest computed prefix and where it is: a slot, or states that are kept."""
        shared = [_common_prefix(ids, row.prompt) for row in self._rows]
        kept = [_common_prefix(ids, known) for known, _ in self._kept]
        length, kept_length = max(shared, default=0), max(kept, default=0)
        if kept_length:
            self._kept.append(self._kept.pop(kept.index(kept_length)))
        if kept_length > length:
            return kept_length, self._kept[-1][1]
        return length, shared.index(length) if shared else 0

    def _keep(self, ids: NDArray[np.int64], slot: int) -> None:
        """Keep the states of a sequence in place of its prefixes; those used longest ago make room."""
        shared = [_common_prefix(ids, known) for known, _ in self._kept]
        if not 0 < len(ids) <= self._most_kept or len(ids) in shared:
            return
        others = [entry for entry, length in zip(self._kept, shared, strict=True) if length < len(entry[0])]
        self._kept = [*others, (ids, self._slots.take(slot, len(ids)))]
        while sum(len(known) for known, _ in self._kept) > self._most_kept:
            self._kept.pop(0)

    def _draw(self, rows: Sequence[DecodingRow], logits: Tensor) -> None:
        """Draw a token for each row from its own generator; rows with equal sampling are computed together."""
        import torch

        alike: dict[tuple[float, float, int], list[int]] = defaultdict(list)
        for at, row in enumerate(rows):
            alike[row.sampling.temperature, row.sampling.top_p, row.sampling.top_k].append(at)
        for places in alike.values():
            group = [rows[at] for at in places]
            own = logits if len(places) == len(rows) else logits[places]
            mask = None
            if any(row.grammar is not None for row in group):
                free = torch.ones(own.shape[-1], dtype=torch.bool)
                mask = torch.stack([row.mask(free) for row in group]).to(own.device)
            logprobs = process_logprobs(own, group[0].sampling, mask)
            uniforms = torch.stack([torch.rand((), generator=row.generator, dtype=torch.float64) for row in group])
            ids = draw(logprobs, uniforms.to(logprobs.device))
            chosen = logprobs.gather(-1, ids[:, None])[:, 0].tolist()
            for row, token, logprob in zip(group, ids.tolist(), chosen, strict=True):
                row.append(token, logprob)


def _reach(starts: Sequence[int], lengths: Sequence[int]) -> int:
    """Return the columns of each slot that a pass reads: the widest new part is appended to every computed start."""
    return max(starts) + max(length - start for start, length in zip(starts, lengths, strict=True))


def _common_prefix(one: NDArray[np.int64], other: NDArray[np.int64]) -> int:
    size = min(len(one), len(other))
    differing = np.flatnonzero(one[:size] != other[:size])
    return int(differing[0]) if len(differing) else size
