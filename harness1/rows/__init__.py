"""Training rows: sequences of tokens, some of them trained, made from recorded calls without re-tokenising."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any, Literal, overload

import msgspec
import numpy as np

from harness1.errors import MALFORMED, SchemaError, UsageError
from harness1.records import Record
from harness1.rows.calls import CapturedCall
from harness1.runs.files import replacing


class TrainRow(Record):
    """One sequence for a trainer, with an entry per token in all tuples of numbers; ValueError if they cannot be one.
    Log probabilities are natural logarithms as sampled, 0.0 where the mask is 0, None if some are unknown;
    `token_weight` is that of each trained token in a policy gradient's mean, 1 unless one's own code sets it."""

    token_ids: tuple[int, ...]
    loss_mask: tuple[int, ...]  # 1: the policy sampled this token, and it is trained
    rollout_logprobs: tuple[float, ...] | None = None
    advantages: tuple[float, ...] | None = None
    episode_id: str = ""
    group_id: str | None = None
    versions: tuple[int, int] = (0, 0)  # the smallest and the largest of the weights that sampled
    call_ids: tuple[str, ...] = ()  # the calls whose outputs are trained here, in order
    metadata: dict[str, Any] = {}  # the origin of the row; no algorithm reads it
    token_weight: float = 1.0

    def __post_init__(self) -> None:
        for name in ("loss_mask", "rollout_logprobs", "advantages"):
            numbers = getattr(self, name)
            if numbers is not None and len(numbers) != len(self.token_ids):
                raise ValueError(f"{len(numbers)} {name} for {len(self.token_ids)} tokens")
            if numbers is not None and not all(map(isfinite, numbers)):
                raise ValueError(f"{name} has a number that is not finite")
        if not {0, 1}.issuperset(self.loss_mask):
            raise ValueError("loss_mask has values other than 0 and 1")
        if any(known and not mask for known, mask in zip(self.rollout_logprobs or (), self.loss_mask, strict=False)):
            raise ValueError("rollout_logprobs has a value for a token that is not trained")


def make_rows(
    calls: Iterable[CapturedCall],
    kind: Literal["turn", "epoch"],
    advantages: Mapping[str, float],
    group_id: str | None = None,
) -> list[TrainRow]:
    """Return the rows of an episode's calls, in the order of the calls: one of each, or one of each chain (`epoch`).
    `advantages` are those of the outputs, by the ids of the calls; the tokens between outputs have 0."""
    known = {call.call_id: call for call in calls}
    rows = per_request(known.values(), group_id) if kind == "turn" else prefix_merging(known.values(), group_id).rows
    order = {name: place for place, name in enumerate(known)}
    found = []
    for row in sorted(rows, key=lambda row: order[row.call_ids[0]]):
        values = [0.0] * len(row.token_ids)
        for name in row.call_ids:
            begin, outputs = len(known[name].prompt_ids), len(known[name].output_ids)
            values[begin : begin + outputs] = [advantages[name]] * outputs
        found.append(msgspec.structs.replace(row, advantages=tuple(values)))
    return found


def per_request(calls: Iterable[CapturedCall], group_id: str | None = None) -> tuple[TrainRow, ...]:
    """Return one row for each call that has an output, in the given order."""
    return tuple(chain_row([call], group_id) for call in calls if call.output_ids)


def chain_row(chain: Sequence[CapturedCall], group_id: str | None = None) -> TrainRow:
    """Return the row of a chain of calls, each continuing the prompt and output of the one before: the last prompt and
    output, trained wherever one of them sampled. Raise AssertionError if the calls are not such a chain."""
    last = chain[-1]
    token_ids = last.prompt_ids + last.output_ids
    mask, logprobs, done = [0] * len(token_ids), [0.0] * len(token_ids), 0
    for call in chain:
        begin, end = len(call.prompt_ids), len(call.prompt_ids) + len(call.output_ids)
        if begin < done or token_ids[:begin] != call.prompt_ids or token_ids[begin:end] != call.output_ids:
            raise AssertionError(f"call {call.call_id} does not continue the calls before it")
        mask[begin:end] = [1] * len(call.output_ids)
        logprobs[begin:end] = call.output_logprobs or [0.0] * len(call.output_ids)
        done = end
    return TrainRow(
        token_ids=token_ids,
        loss_mask=tuple(mask),
        rollout_logprobs=None if any(call.output_logprobs is None for call in chain) else tuple(logprobs),
        episode_id=last.session_id,
        group_id=group_id,
        versions=(min(call.version_start for call in chain), max(call.version_end for call in chain)),
        call_ids=tuple(call.call_id for call in chain),
    )


class Merged(Record):
    """Training rows, and the fate of every call: trained in one row, or in one of the lists of ids."""

    rows: tuple[TrainRow, ...]
    ambiguous: tuple[str, ...]  # they, or an ancestor, could have either of two calls of equal tokens as their parent
    unresolved: tuple[str, ...]  # nothing shows which of several outputs for a prompt was used
    superseded: tuple[str, ...]  # another output for the same prompt was used
    empty: tuple[str, ...]  # no output

    @property
    def quarantine(self) -> tuple[str, ...]:
        """The calls that must not be trained because their place is unknown."""
        return tuple(sorted(self.ambiguous + self.unresolved))

    @property
    def counts(self) -> dict[str, int]:
        names = ("ambiguous", "unresolved", "superseded", "empty")
        trained = sum(len(row.call_ids) for row in self.rows)
        return {"rows": len(self.rows), "trained": trained} | {name: len(getattr(self, name)) for name in names}

    @property
    def merge_ratio(self) -> float:
        """Trained calls per row: 8.0 if a session of 8 turns became one row; 0.0 if there are no rows."""
        return self.counts["trained"] / len(self.rows) if self.rows else 0.0


@dataclass(eq=False)
class _Node:
    """A call in the tree of its agent. Tokens are stored as bytes of fixed width, which compare at memory speed."""

    call: CapturedCall
    prompt: bytes
    tokens: bytes  # prompt and output
    parent: _Node | None = None
    children: list[_Node] = field(default_factory=list)
    fate: str = "trained"

    @property
    def heir(self) -> _Node | None:
        return next((child for child in self.children if child.fate == "trained"), None)


def prefix_merging(calls: Iterable[CapturedCall], group_id: str | None = None) -> Merged:
    """Merge the calls of each session and agent into rows, by their tokens alone, whatever their order; raise
    ValueError if two have the same id. The parent of a call is the call whose prompt and output together are the
    longest token prefix of its own prompt: NeMo-Gym's rule, stricter than POLAR's (arXiv 2605.24220), so that a merged
    row is exactly what the model saw. If several calls continue one, the first in lexicographic order continues its
    row, and each of the others begins a row of its own with its whole prompt as context: every output is trained once.
    Of several outputs for one prompt, those that another call continues were used, or else that of the last `attempt`,
    if it is one call; the unused earned nothing, and are not trained."""
    given = sorted(
        calls,
        key=lambda call: (
            *(call.session_id, call.agent_id, len(call.prompt_ids)),
            *(call.prompt_ids, call.output_ids, call.attempt, call.call_id),
        ),
    )
    if len({call.call_id for call in given}) != len(given):
        raise ValueError("two calls have the same id")
    agents: dict[tuple[str, str], list[_Node]] = {}
    for call in given:
        if call.output_ids:
            prompt, output = (array("q", ids).tobytes() for ids in (call.prompt_ids, call.output_ids))
            agents.setdefault((call.session_id, call.agent_id), []).append(_Node(call, prompt, prompt + output))
    nodes = [node for group in agents.values() for node in group]
    for group in agents.values():
        _link(group)
        reached = [node for node in group if node.fate == "ambiguous"]
        while reached:  # so are all that continue them
            node = reached.pop()
            node.fate = "ambiguous"
            reached += node.children
        _resolve(group)

    rows = []
    for node in nodes:
        if node.fate == "trained" and (node.parent is None or node.parent.heir is not node):
            chain, after = [node.call], node.heir  # from the root or a fork down to a leaf
            while after is not None:
                chain.append(after.call)
                after = after.heir
            rows.append(chain_row(chain, group_id))
    apart: dict[str, list[str]] = {"ambiguous": [], "unresolved": [], "superseded": [], "trained": []}
    for node in nodes:
        apart[node.fate].append(node.call.call_id)
    del apart["trained"]
    empty = sorted(call.call_id for call in given if not call.output_ids)
    return Merged(tuple(rows), empty=tuple(empty), **{fate: tuple(sorted(ids)) for fate, ids in apart.items()})


def _link(nodes: list[_Node]) -> None:
    """Find every parent in one pass over all sequences in lexicographic order. Sequences with a common prefix directly
    follow it, hence the prefixes of the current sequence form a stack, the longest on top."""
    known = [(node.tokens, 0, place) for place, node in enumerate(nodes)]
    prompts = [(node.prompt, 1, place) for place, node in enumerate(nodes)]
    prefixes: list[tuple[bytes, list[_Node]]] = []
    for sequence, is_prompt, place in sorted(known + prompts):
        node = nodes[place]
        while prefixes and not sequence.startswith(prefixes[-1][0]):
            prefixes.pop()
        longest, candidates = prefixes[-1] if prefixes else (b"", [])
        if is_prompt and len(candidates) > 1:
            node.fate = "ambiguous"
        elif is_prompt and candidates:
            node.parent = candidates[0]
            node.parent.children.append(node)
        elif not is_prompt and longest == sequence:
            candidates.append(node)
        elif not is_prompt:
            prefixes.append((sequence, [node]))


def _resolve(nodes: list[_Node]) -> None:
    """Find the used outputs of each prompt. Those with children were used: no quarantine begins above another call."""
    tries: dict[bytes, list[_Node]] = {}
    for node in nodes:
        if node.fate == "trained":
            tries.setdefault(node.prompt, []).append(node)
    for group in tries.values():
        last = max(node.call.attempt for node in group)
        used = [node for node in group if node.children] or [node for node in group if node.call.attempt == last]
        known = len(used) == 1 or any(node.children for node in used)
        for node in group:
            node.fate = ("trained" if node in used else "superseded") if known else "unresolved"


TOKEN_BYTES = 6  # at least, on disk: three digits of a token's id, one of its mask, two commas


def write_rows(path: Path, rows: Iterable[TrainRow]) -> int:
    """Write rows to a file atomically and return their number; OSError if it cannot be written. All lines have all
    fields, `null` if there is no value: other readers of JSON see one type."""
    count = 0
    with replacing(path) as file:
        for row in rows:
            file.write(msgspec.json.encode(msgspec.structs.asdict(row)) + b"\n")
            count += 1
    return count


class RowFile(Sequence[TrainRow]):
    """The rows of a file: their offsets, and `lengths` and `trained` tokens of each, int64 of shape (rows,). All are
    checked once, on opening; UsageError if there is no file; SchemaError if a line is torn or not a row."""

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise UsageError(f"there is no {path.name} in {path.parent}")
        self.path = path
        counts: list[tuple[int, int, int]] = []
        with path.open("rb") as file:
            for at, line in enumerate(file):
                row = self._row(line, at)
                counts.append((len(line), len(row.token_ids), sum(row.loss_mask)))
        sizes, self.lengths, self.trained = np.array(counts, np.int64).reshape(-1, 3).T
        self._starts = np.concatenate(([0], sizes.cumsum()))

    def __len__(self) -> int:
        return len(self.lengths)

    @overload
    def __getitem__(self, place: int) -> TrainRow: ...
    @overload
    def __getitem__(self, place: slice) -> list[TrainRow]: ...
    def __getitem__(self, place: int | slice) -> TrainRow | list[TrainRow]:
        if isinstance(place, slice):
            return [self[each] for each in range(*place.indices(len(self)))]
        at = range(len(self))[place]
        with self.path.open("rb") as file:
            file.seek(int(self._starts[at]))
            return self._row(file.read(int(self._starts[at + 1] - self._starts[at])), at)

    def _row(self, line: bytes, at: int) -> TrainRow:
        try:
            if not line.endswith(b"\n"):
                raise SchemaError(f"{self.path}:{at + 1}: the line is torn")
            return msgspec.json.decode(line, type=TrainRow)
        except MALFORMED as error:
            raise SchemaError(f"{self.path}:{at + 1}: not a training row: {error}") from error
