"""From state to context: the orders, always within the budget.

`paper` puts the memory before the last turns and renders both anew each turn. `stable_first` puts the turns first, in
a window that grows and is cut back, so that a prefix cache keeps most of them. `epoch` appends to a snapshot of the
memory for a few turns, so that inside an epoch each prompt is a token prefix of the next. `transcript` is the harness
without a working memory, to compare with: all turns one after the other, and the policy prunes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile

import msgspec

from harness1.config import Env
from harness1.env.render.budget import Block, Budget, CachedCounter, Drop, fit, marker, marker_room
from harness1.env.render.memory_pieces import MemoryPieces, curated_piece
from harness1.env.render.pieces import Piece, TokenCounter, piece
from harness1.env.render.prompt import static_piece
from harness1.env.render.turn_pieces import TurnPieces
from harness1.env.render.view import HitView, QueryView, TurnView, View
from harness1.hashing import digest
from harness1.memory.working_memory import WorkingMemory
from harness1.records import UnitId
from harness1.tools.registry import Toolbox
from harness1.tools.tool import ToolSpec

SMALLEST_TURN = 256
"""Tokens that must remain for memory and last observation beside static prompt, tools and question."""


@dataclass(frozen=True)
class Context:
    """What a policy sees at one turn."""

    pieces: tuple[Piece, ...]
    tools: tuple[ToolSpec, ...]
    budget: Budget
    hash: str
    turn: int = 1
    """The turn that is to be decided, from 1."""
    fresh: int = 0
    """Tokens behind the longest common prefix with the context before it; all of them for the first."""

    @cached_property
    def view(self) -> View:
        """The same as typed values; exactly what the kept pieces show."""
        return View.of(self.pieces)


@dataclass(frozen=True)
class EpochState:
    """The pieces of the running epoch, the turn before which it began, and its tokens."""

    start: int
    pieces: tuple[Piece, ...]
    dropped: int = 0


class Renderer:
    """Renders one environment's states. It remembers lines and token counts, and nothing that changes a result."""

    def __init__(self, env: Env, toolbox: Toolbox, counter: TokenCounter) -> None:
        self.env, self.toolbox, self.counter = env, toolbox, counter
        self.static = static_piece(env, toolbox)
        self.memory_pieces = MemoryPieces(env)
        self.counts = CachedCounter(counter)
        self.declared = self.counts.tools(toolbox.specs)
        self.limit = env.prompt_limit - self.declared - marker_room(env, self.counts)

    def smallest_window(self) -> int:
        """The smallest context window that holds what every context has, and an observation of `SMALLEST_TURN`."""
        fixed = self.counts.total([self.static, self._query(WorkingMemory(""))])
        fixed += self.declared + SMALLEST_TURN + self.env.generation_reserve
        window = fixed + 1
        # The budget line names the window, so that its size depends on it.
        while window < fixed + marker_room(msgspec.structs.replace(self.env, context_window=window), self.counts):
            window += 1
        return window

    def fresh(self, context: Context, before: Context | None) -> int:
        """Tokens of a context that no cache of the one before it holds."""
        pairs = zip(context.pieces, before.pieces if before else (), strict=False)
        common = [now for now, _ in takewhile(lambda pair: pair[0].key == pair[1].key, pairs)]
        if not common:
            return context.budget.used
        return context.budget.used - self.declared - self.counts.total(common)

    def render(
        self, memory: WorkingMemory, turns: Sequence[TurnPieces], epoch: EpochState | None
    ) -> tuple[Context, EpochState | None] | None:
        """The context of a state, and the epoch to go on with; None if even the smallest context does not fit."""
        if self.env.rendering.order == "epoch":
            return self._epoch(memory, turns, epoch)
        if self.env.rendering.order == "transcript":
            return self._transcript(memory, turns, epoch)
        shown = turns[len(turns) - window(len(turns) and turns[-1].turn, self.env) :] if turns else []
        recent = self._turns(shown)
        head = [Block((self.static,)), Block((self._query(memory),))]
        state = self._memory(memory, shown)
        blocks = head + (recent + state if self.env.rendering.order == "stable_first" else state + recent)
        fitted = fit(blocks, self.limit, self.counts)
        if fitted is None:
            return None
        pieces, used, dropped = fitted
        return self._context(pieces, used, dropped, memory.turn), None

    def _epoch(
        self, memory: WorkingMemory, turns: Sequence[TurnPieces], epoch: EpochState | None
    ) -> tuple[Context, EpochState] | None:
        if epoch is not None and memory.turn - epoch.start < self.env.rendering.epoch_turns:
            last = turns[-1]
            pieces = [*epoch.pieces, last.action, last.head, *last.hits, *self._delta(memory, epoch)]
            used = self.counts.total(pieces)
            if used <= self.limit:
                context = self._context(pieces, used, epoch.dropped, memory.turn)
                return context, EpochState(epoch.start, context.pieces, epoch.dropped)
        shown = turns[-1:]
        blocks = [Block((self.static,)), Block((self._query(memory),)), *self._memory(memory, shown)]
        blocks += [Block((last.head, *last.hits)) for last in shown]
        fitted = fit(blocks, self.limit, self.counts, self._turn_room(turns))
        if fitted is None:
            return None
        kept, used, dropped = fitted
        context = self._context(kept, used, dropped, memory.turn)
        return context, EpochState(memory.turn, context.pieces, dropped)

    def _transcript(
        self, memory: WorkingMemory, turns: Sequence[TurnPieces], before: EpochState | None
    ) -> tuple[Context, EpochState] | None:
        """Everything that was said, but for what the policy pruned; no memory is shown."""
        pieces = [self.static, self._query(memory)]
        if before is not None:
            last = turns[-1]
            pieces = [*_unpruned(before.pieces, last.head), last.action, last.head, *last.hits]
        used = self.counts.total(pieces)
        if used > self.limit:
            return None
        context = self._context(pieces, used, 0, memory.turn)
        return context, EpochState(0, context.pieces)

    def _turn_room(self, turns: Sequence[TurnPieces]) -> int:
        """Tokens of a turn as the last ones were: a new epoch keeps so much free, or it would end with the next turn.
        As in the other orders, lines of uncurated documents give way to turns."""
        sizes = [self.counts.total((turn.action, turn.head, *turn.hits)) for turn in turns]
        return sum(sizes) // max(1, len(sizes))

    def _delta(self, memory: WorkingMemory, epoch: EpochState) -> list[Piece]:
        """What the last action changed in the memory, as far as its observation does not say it."""
        now = curated_piece(memory, self.env)
        before = next(each for each in reversed(epoch.pieces) if each.key.startswith("curated#"))
        return [] if now.key == before.key else [now]

    def _context(self, kept: Sequence[Piece], used: int, dropped: int, turn: int) -> Context:
        pieces = list(kept)
        used += self.env.prompt_limit - self.limit
        if self.env.budget_marker.on:
            pieces.append(marker(self.env, used, turn))
        keys = [each.key for each in pieces]
        name = digest([keys, self.counter.hash])
        return Context(tuple(pieces), self.toolbox.specs, Budget(used, self.env.prompt_limit, dropped), name, turn + 1)

    def _query(self, memory: WorkingMemory) -> Piece:
        query = shown_question(memory.query)
        text, entities = memory.entities.marked(query, self.env.evidence.characters)
        return piece("query", "user", f"Question: {text}", QueryView(query, entities))

    def _memory(self, memory: WorkingMemory, shown: Sequence[TurnPieces]) -> list[Block]:
        return self.memory_pieces.of(memory, visible_units(shown))

    def _turns(self, shown: Sequence[TurnPieces]) -> list[Block]:
        blocks = []
        for turn in shown:
            last = turn is shown[-1]
            blocks.append(Block((turn.action, turn.head), Drop.NEVER if last else Drop.OLD_TURNS, turn.turn))
            if last:
                blocks.append(Block(turn.hits))
            else:
                blocks += [Block((hit,), Drop.OLD_HITS, turn.turn) for hit in turn.hits]
        return blocks


def _unpruned(pieces: Sequence[Piece], head: Piece) -> list[Piece]:
    """The pieces that are left when a turn has taken out the hits of some documents."""
    gone = head.shows.changes.pruned if isinstance(head.shows, TurnView) else ()
    return [each for each in pieces if not (isinstance(each.shows, HitView) and each.shows.document.handle in gone)]


def shown_question(query: str) -> str:
    """A question on one line, as contexts show it."""
    return " ".join(query.split())


def window(turns: int, env: Env) -> int:
    """How many turns are shown in full. In `stable_first` the number grows to `recent_max`, then falls back."""
    recent, most = env.rendering.recent, env.rendering.recent_max
    if env.rendering.order != "stable_first" or turns <= recent:
        return min(recent, turns)
    return recent + (turns - recent) % (most - recent + 1)


def visible_units(shown: Sequence[TurnPieces]) -> set[UnitId]:
    """The units that the hits of the shown turns put before the policy."""
    shows = (hit.shows for turn in shown for hit in turn.hits)
    return {hit.document.unit_id for hit in shows if isinstance(hit, HitView)}
