"""Merging the recorded calls of a session into few training rows, by their tokens alone.

The parent of a call is the call whose prompt and output together are the longest token prefix of its own prompt. This
is the stricter of the two published rules (NeMo-Gym's; POLAR, arXiv 2605.24220, compares prompts and replaces
re-tokenised text by the sampled ids): a merged row is exactly what the model saw, or the calls are not merged. Outputs
are never empty, hence a parent's prompt is shorter than its child's, and neither clocks nor the order of records
matter.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from harness1.records import Record
from harness1.rows.calls import CapturedCall
from harness1.rows.row import TrainRow, chained


class Merged(Record):
    """Training rows, and the fate of every call: trained in one row, or in one of the lists of ids."""

    rows: tuple[TrainRow, ...]
    ambiguous: tuple[str, ...]
    """Quarantined: the call, or an ancestor of it, could have either of two calls of equal tokens as its parent."""
    unresolved: tuple[str, ...]
    """Quarantined: the same prompt was sampled several times, and nothing shows which output was used."""
    superseded: tuple[str, ...]
    """Not trained: another output for the same prompt was used."""
    empty: tuple[str, ...]
    """Dropped: no output."""
    output_tokens: int
    """Output tokens of all calls."""

    @property
    def quarantined(self) -> tuple[str, ...]:
        """The calls that must not be trained because their place is unknown."""
        return tuple(sorted(self.ambiguous + self.unresolved))

    @property
    def counts(self) -> dict[str, int]:
        """The number of rows, and of calls by fate."""
        names = ("ambiguous", "unresolved", "superseded", "empty")
        trained = sum(len(row.call_ids) for row in self.rows)
        return {"rows": len(self.rows), "trained": trained} | {name: len(getattr(self, name)) for name in names}

    @property
    def merge_ratio(self) -> float:
        """Trained calls per row: 8.0 if a session of 8 turns became one row; 0.0 if there are no rows."""
        return self.counts["trained"] / len(self.rows) if self.rows else 0.0

    @property
    def delivered_fraction(self) -> float:
        """The share of all sampled tokens that is trained; 1.0 if none was sampled."""
        delivered = sum(sum(row.loss_mask) for row in self.rows)
        return delivered / self.output_tokens if self.output_tokens else 1.0


def prefix_merging(calls: Iterable[CapturedCall], group_id: str | None = None) -> Merged:
    """Merge the calls of each session and agent into rows. The order of the calls has no effect.

    If several calls continue one, the first in lexicographic order continues its row, and each of the others begins a
    row of its own with its whole prompt as context: every output is trained once. (The choice does not matter: the rows
    have the lengths of the leaves of the tree.)

    Of several outputs for one prompt, those that another call continues were used. If there is none, the output of the
    last `attempt` was used, if that is one call; if not, all of them are unresolved. Unused outputs earned nothing of
    the episode's reward, and are not trained.

    Raises:
        ValueError: two calls have the same id.
    """
    given = sorted(calls, key=_order)
    if len({call.call_id for call in given}) != len(given):
        raise ValueError("two calls have the same id")
    agents: dict[tuple[str, str], list[_Node]] = {}
    for call in given:
        if call.output_ids:
            agents.setdefault((call.session_id, call.agent_id), []).append(_Node.of(call))
    nodes = [node for group in agents.values() for node in group]
    for group in agents.values():
        _link(group)
        _quarantine(group)
        _resolve(group)
    return Merged(
        rows=tuple(chained(chain, group_id) for chain in _chains(nodes)),
        ambiguous=_ids(nodes, "ambiguous"),
        unresolved=_ids(nodes, "unresolved"),
        superseded=_ids(nodes, "superseded"),
        empty=tuple(sorted(call.call_id for call in given if not call.output_ids)),
        output_tokens=sum(len(call.output_ids) for call in given),
    )


@dataclass(eq=False)
class _Node:
    """A call in the tree of its agent. Tokens are stored as bytes of fixed width, which compare at memory speed."""

    call: CapturedCall
    prompt: bytes
    tokens: bytes
    """Prompt and output."""
    parent: _Node | None = None
    children: list[_Node] = field(default_factory=list)
    fate: str = "trained"

    @classmethod
    def of(cls, call: CapturedCall) -> _Node:
        prompt = array("q", call.prompt_ids).tobytes()
        return cls(call, prompt, prompt + array("q", call.output_ids).tobytes())

    @property
    def heir(self) -> _Node | None:
        """The child that continues the same row."""
        return next((child for child in self.children if child.fate == "trained"), None)


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


def _quarantine(nodes: list[_Node]) -> None:
    """Mark the descendants of ambiguous calls as ambiguous."""
    reached = [node for node in nodes if node.fate == "ambiguous"]
    while reached:
        node = reached.pop()
        node.fate = "ambiguous"
        reached += node.children


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


def _chains(nodes: Iterable[_Node]) -> Iterator[list[CapturedCall]]:
    """Yield the trained calls as chains from the root or a fork down to a leaf."""
    for node in nodes:
        if node.fate != "trained" or (node.parent is not None and node.parent.heir is node):
            continue
        chain, after = [node.call], node.heir
        while after is not None:
            chain.append(after.call)
            after = after.heir
        yield chain


def _order(call: CapturedCall) -> tuple[object, ...]:
    place = (call.session_id, call.agent_id, len(call.prompt_ids))
    return (*place, call.prompt_ids, call.output_ids, call.attempt, call.call_id)


def _ids(nodes: Iterable[_Node], fate: str) -> tuple[str, ...]:
    return tuple(sorted(node.call.call_id for node in nodes if node.fate == fate))
