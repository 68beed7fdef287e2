"""The oracle teacher's reasoning with each action, in a sentence or two: what is known, what is missing, and why this
action. The slots of the sentences in `reasons.toml` are filled with words that a view has shown."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources

import msgspec

SLOT_WORDS = 6
SLOT_CHARACTERS = 60

LINES = msgspec.toml.decode(
    resources.files(__package__).joinpath("reasons.toml").read_bytes(), type=dict[str, tuple[str, ...]]
)


def line(kind: str, choice: int, source: Sequence[str] = (), topic: Sequence[str] = ()) -> str:
    """Return one of the lines of a kind. `source` are handles of shown documents, `topic` are shown names or words."""
    chosen = LINES[kind][choice % len(LINES[kind])]
    return chosen.format(source=_listed(source, 3) or "it", topic=_listed(topic, 2) or "the question")


def _listed(items: Sequence[str], limit: int) -> str:
    """Return the first few items, each cut to a few whole words, as a list in a sentence."""
    short = [_cut(item) for item in items[:limit]]
    return " and ".join(part for part in (", ".join(short[:-1]), *short[-1:]) if part)


def _cut(item: str) -> str:
    words = item.split()[:SLOT_WORDS]
    while len(words) > 1 and len(" ".join(words)) > SLOT_CHARACTERS:
        words.pop()
    return " ".join(words)
