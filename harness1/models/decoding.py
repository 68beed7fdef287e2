"""Decoding of many rows at once, without threads: rows join and leave between steps, prefixes are computed once."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from harness1.errors import InfrastructureFault
from harness1.models.backend import FinishReason, draw, process_logprobs
from harness1.models.slots import COLUMNS, KvSlots, Layers, SlotModel, SlotPass
from harness1.records import Sampling

if TYPE_CHECKING:
    from torch import Tensor

    from harness1.models.grammar import GrammarState


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
