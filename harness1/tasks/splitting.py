"""Splits tasks so that no document is gold in two splits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from harness1.records import DocId


class Splitter:
    """Gives each task a split as it comes.

    A document belongs to the split of the first task that has it, and that split is the one that lacks most of its
    share.

    Args:
        shares: the share of each split; they add up to 1.
    """

    def __init__(self, shares: Mapping[str, float]) -> None:
        self._shares = shares
        self._owner: dict[DocId, str] = {}
        self._counts = dict.fromkeys(shares, 0)

    def place(self, gold: Sequence[DocId]) -> str | None:
        """Return the split of a task with this gold, or None if documents of it belong to different splits."""
        owners = {self._owner[doc_id] for doc_id in gold if doc_id in self._owner}
        if len(owners) > 1:
            return None
        total = sum(self._counts.values()) + 1
        lacking = max(self._shares, key=lambda name: self._shares[name] * total - self._counts[name])
        split = owners.pop() if owners else lacking
        self._counts[split] += 1
        self._owner.update(dict.fromkeys(gold, split))
        return split
