"""The orders of a context: which pieces it holds, and in which sequence.

To add one, write a class with `layouts` and name it in `ORDERS` and in `config.Rendering.order`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from harness1.config import Env, Rendering
from harness1.env.render.budget import Block, CachedCounter, Drop
from harness1.env.render.context import Context
from harness1.env.render.memory_pieces import MemoryPieces, curated_piece, told_evidence
from harness1.env.render.pieces import Piece
from harness1.env.render.prompt import query_piece
from harness1.env.render.turn_pieces import TurnPieces
from harness1.env.render.view import NO_LEADS, HitView, TurnView
from harness1.memory.working_memory import WorkingMemory
from harness1.records import UnitId


class Layout(NamedTuple):
    """The blocks of a context before the budget drops any.

    Attributes:
        room: tokens that should stay free below the limit (see `fit`).
        dropped: pieces that an earlier context dropped and this one goes on without.
        epoch_start: finished turns when the epoch of this context began.
    """

    blocks: Sequence[Block]
    room: int = 0
    dropped: int = 0
    epoch_start: int = 0


@dataclass(frozen=True)
class Order(ABC):
    """Arranges the state of an episode as a context."""

    env: Env
    static: Piece
    counts: CachedCounter
    memory_pieces: MemoryPieces

    @abstractmethod
    def layouts(self, memory: WorkingMemory, turns: Sequence[TurnPieces], before: Context | None) -> Iterator[Layout]:
        """Yield layouts, the preferred one first; the renderer takes the first that fits the budget.

        Args:
            turns: the last finished turns, oldest first.
            before: the previous context of the episode; None for the first.
        """

    def _head(self, memory: WorkingMemory) -> list[Block]:
        return [Block((self.static,)), Block((query_piece(memory, self.env),))]

    def _memory(self, memory: WorkingMemory, shown: Sequence[TurnPieces]) -> list[Block]:
        return self.memory_pieces.of(memory, visible_units(shown))


class Paper(Order):
    """The memory, then the last turns; both are rendered anew each turn."""

    def layouts(self, memory: WorkingMemory, turns: Sequence[TurnPieces], before: Context | None) -> Iterator[Layout]:
        shown = turns[-self.env.rendering.recent :]
        yield Layout([*self._head(memory), *self._memory(memory, shown), *_turn_blocks(shown)])


class StableFirst(Order):
    """Turns first, then the memory. The window of turns grows and is then cut back, so that a prefix cache keeps most
    of them."""

    def layouts(self, memory: WorkingMemory, turns: Sequence[TurnPieces], before: Context | None) -> Iterator[Layout]:
        shown = turns[-window(turns[-1].turn, self.env.rendering) :] if turns else ()
        yield Layout([*self._head(memory), *_turn_blocks(shown), *self._memory(memory, shown)])


class Epoch(Order):
    """A snapshot of the memory, to which a few turns are appended: inside an epoch each prompt is a token prefix of the
    next."""

    def layouts(self, memory: WorkingMemory, turns: Sequence[TurnPieces], before: Context | None) -> Iterator[Layout]:
        """Yield the running epoch with the last turn appended, then, if it is over or full, a new epoch."""
        if before is not None and memory.turn - before.epoch_start < self.env.rendering.epoch_turns:
            pieces = (*before.pieces, *turns[-1].pieces(), *self._changed(memory, before))
            yield Layout([Block(pieces)], dropped=before.budget.dropped, epoch_start=before.epoch_start)
        last = turns[-1:]
        blocks = [*self._head(memory), *self._memory(memory, last)]
        for turn in last:
            blocks += [Block((turn.head,)), *_last_hits(turn)]
        yield Layout(blocks, self._turn_room(turns), epoch_start=memory.turn)

    def _changed(self, memory: WorkingMemory, before: Context) -> list[Piece]:
        """Return what the last action changed without its observation saying so: the curated set, and the evidence."""
        shown = {_kind(each): each.shows for each in before.pieces}
        now = (curated_piece(memory, self.env), *told_evidence(memory, self.env))
        return [each for each in now if each.shows != shown.get(_kind(each), NO_LEADS)]

    def _turn_room(self, turns: Sequence[TurnPieces]) -> int:
        """Return the mean tokens of the last turns: a new epoch keeps that much free, or it would end with the next
        turn. As in the other orders, lines of uncurated documents give way to turns."""
        sizes = [self.counts.total(turn.pieces()) for turn in turns]
        return sum(sizes) // max(1, len(sizes))


class Transcript(Order):
    """The harness without a working memory, for comparison: all turns in sequence, minus what the policy pruned."""

    def layouts(self, memory: WorkingMemory, turns: Sequence[TurnPieces], before: Context | None) -> Iterator[Layout]:
        if before is None:
            yield Layout(self._head(memory))
        else:
            last = turns[-1]
            pieces = (*_unpruned(before.pieces, last.head), last.action, last.head)
            yield Layout([Block(pieces), *_last_hits(last)], dropped=before.budget.dropped)


ORDERS: dict[str, type[Order]] = {"paper": Paper, "stable_first": StableFirst, "epoch": Epoch, "transcript": Transcript}


def window(turns: int, rendering: Rendering) -> int:
    """Return how many of the finished turns `stable_first` shows: it grows to `recent_max`, then falls to `recent`."""
    recent, most = rendering.recent, rendering.recent_max
    return turns if turns <= recent else recent + (turns - recent) % (most - recent + 1)


def visible_units(shown: Sequence[TurnPieces]) -> set[UnitId]:
    """Return the units that the hits of the shown turns display."""
    shows = (hit.shows for turn in shown for hit in turn.hits)
    return {hit.document.unit_id for hit in shows if isinstance(hit, HitView)}


def _kind(piece: Piece) -> str:
    return piece.key.partition("#")[0]


def _turn_blocks(shown: Sequence[TurnPieces]) -> list[Block]:
    """Return turns as blocks. Older ones lose their hits first; the last loses hits only where all else is gone."""
    blocks: list[Block] = []
    for turn in shown[:-1]:
        blocks.append(Block((turn.action, turn.head), Drop.OLD_TURNS, turn.turn))
        blocks += [Block((hit,), Drop.OLD_HITS, turn.turn) for hit in turn.hits]
    for turn in shown[-1:]:
        blocks += [Block((turn.action, turn.head)), *_last_hits(turn)]
    return blocks


def _last_hits(turn: TurnPieces) -> list[Block]:
    """Return the hits of the last turn, each a block of its own: a tokenizer may need far more tokens for them than
    their tool counted, and that must not end the episode."""
    return [Block((hit,), Drop.LAST_HITS, turn.turn) for hit in turn.hits]


def _unpruned(pieces: Sequence[Piece], head: Piece) -> list[Piece]:
    """Return the pieces that remain after a turn that took out the hits of some documents."""
    gone = head.shows.changes.pruned if isinstance(head.shows, TurnView) else ()
    return [each for each in pieces if not (isinstance(each.shows, HitView) and each.shows.document.handle in gone)]
