"""Blocks: what the budget keeps or drops whole, and in which order it drops."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from harness1.env.pieces import Piece


class Drop(IntEnum):
    """The order in which pieces are dropped when a context is over its budget; `NEVER` never is."""

    OLDER = 0
    POOL = 1
    HISTORY = 2
    EVIDENCE = 3
    OLD_HITS = 4
    CURATED_LINES = 5
    OLD_TURNS = 6
    NEVER = 7


class Block(NamedTuple):
    """Pieces that are kept or dropped together. Within a class earlier turns go first, then what stands last: pool
    lines come newest first and curated lines most important first."""

    pieces: tuple[Piece, ...]
    drop: Drop = Drop.NEVER
    turn: int = 0
