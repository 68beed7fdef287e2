"""From memory and turns to a context within its token budget.

An order says which blocks of pieces a context holds, in which sequence; `fit` drops blocks until they fit the budget.
To add an order, write a class with `layouts` and name it in `ORDERS` and in `config.Rendering.order`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from typing import NamedTuple

import msgspec

from harness1.config import Env, Rendering
from harness1.env.memory_pieces import MemoryPieces, TurnPieces, order_and_leads, set_piece
from harness1.env.pieces import (
    CRITICAL,
    HALFWAY,
    WARNING,
    Block,
    Drop,
    Piece,
    TokenCounter,
    group_messages,
    piece,
    query_piece,
    static_piece,
)
from harness1.env.view import BudgetView, HitView, LeadsView, TurnView, View
from harness1.memory.working_memory import WorkingMemory
from harness1.plain import digest
from harness1.records import Episode, UnitId
from harness1.tools.registry import Toolbox
from harness1.tools.tool import ToolSpec

TOOLS = "+tools"
"""The key under which the tokens of the tool declarations are counted."""


@dataclass(frozen=True)
class Budget:
    """Tokens of the whole prompt, its limit, and the number of dropped pieces."""

    used: int
    limit: int
    dropped: int = 0


class CachedCounter:
    """Counts everything once, so that a turn costs only its new text. A replay needs `known`, all counts by key, in
    place of the counter (`RecordedCounter`)."""

    def __init__(self, counter: TokenCounter) -> None:
        self.counter = counter
        self.known: dict[str, int] = {}

    def piece(self, piece: Piece) -> int:
        count = self.known.get(piece.key)
        if count is None:
            count = self.known[piece.key] = self.counter.piece(piece)
        return count

    def overhead(self, first: Piece) -> int:
        """Return the tokens that a message adds if it begins with this piece."""
        key = overhead_key(first)
        count = self.known.get(key)
        if count is None:
            count = self.known[key] = self.counter.overhead(first)
        return count

    def tools(self, specs: Sequence[ToolSpec]) -> int:
        """Return the tokens of the tool declarations and of everything else outside messages."""
        self.known[TOOLS] = count = self.counter.tools(specs)
        return count

    def total(self, pieces: Sequence[Piece]) -> int:
        """Return the tokens of joined pieces and of their messages."""
        return sum(map(self.piece, pieces)) + sum(self.overhead(group[0]) for group in group_messages(pieces))


def fit(
    blocks: Sequence[Block], limit: int, counts: CachedCounter, room: int = 0
) -> tuple[list[Piece], int, int] | None:
    """Drop whole blocks by class and order until the rest fits. Return the kept pieces, their tokens and the number of
    dropped pieces; None if what must stay is too large. `room` tokens should stay free below the limit; only lines of
    uncurated documents give way to that."""
    kept = [piece for block in blocks for piece in block.pieces]
    used = counts.total(kept)
    if used <= limit - room:
        return kept, used, 0
    gone: set[int] = set()
    excess = used - limit
    for place in sorted(range(len(blocks)), key=lambda at: (blocks[at].drop, blocks[at].turn, -at)):
        wanted = excess + room if blocks[place].drop <= Drop.POOL else excess
        if wanted <= 0 or blocks[place].drop is Drop.NEVER:
            break
        gone.add(place)
        # What a message adds may stay behind with its neighbours, so only the pieces themselves count as saved.
        excess -= sum(counts.piece(each) for each in blocks[place].pieces)
    kept = [piece for at, block in enumerate(blocks) if at not in gone for piece in block.pieces]
    used = counts.total(kept)
    dropped = sum(len(blocks[at].pieces) for at in gone)
    return (kept, used, dropped) if used <= limit else None


def overhead_key(first: Piece) -> str:
    """Return the key of what a message adds: its role, and the tool that answers in it."""
    return f"+{first.role}/{first.shows.tool}" if isinstance(first.shows, TurnView) else f"+{first.role}"


class RecordedCounter:
    """The counts of a recorded episode, so that replay needs no tokenizer.

    Raises:
        LookupError: the episode never had what is counted; its record or the code was changed.
    """

    def __init__(self, episode: Episode) -> None:
        self.hash = episode.hashes.counter
        self._counts = {key: len(ids) for key, ids in episode.segments.items()} | episode.counts

    def piece(self, piece: Piece) -> int:
        return self._counts[piece.key]

    def tools(self, specs: Sequence[ToolSpec]) -> int:
        return self._counts[TOOLS]

    def overhead(self, first: Piece) -> int:
        return self._counts[overhead_key(first)]


def marker_room(env: Env, counts: CachedCounter) -> int:
    """Return the tokens kept free for the budget line, which states the size of the rest and is written last: twice its
    longest form, as other digits may need more tokens, and what its message adds."""
    if not env.has("budget_marker"):
        return 0
    longest = marker(env, env.prompt_limit, env.max_turns)
    return 2 * counts.piece(longest) + counts.overhead(longest)


def marker(env: Env, used: int, turn: int) -> Piece:
    """Return the budget line, or the turns alone under minimal instructions, unless the policy has to prune."""
    if env.has("pruning"):
        limit = env.pruning.limits[0]
        level = "Prune what is useless with prune_chunks, or conclude." if used > limit else ""
        if used > env.pruning.limits[1]:
            level = "Only prune_chunks, curate and end_search are carried out now."
        text = f"Budget: {used} of {limit} tokens, turn {turn} of {env.max_turns}. {level}"
    elif env.rendering.instructions == "minimal":
        return piece("budget", "user", f"Turn {turn}/{env.max_turns}", BudgetView(0, 0, turn, env.max_turns))
    else:
        limit = env.prompt_limit
        share = used / max(1, limit)
        levels = {"critical: end_search now": CRITICAL, "finish soon": WARNING, "over halfway": HALFWAY}
        level = next((words for words, bound in levels.items() if share >= bound), "")
        text = f"Budget: {used} of {limit} tokens ({share:.0%}), turn {turn} of {env.max_turns}."
        text += f" {level}." if level else ""
    return piece("budget", "user", text, BudgetView(used, limit, turn, env.max_turns, level))


@dataclass(frozen=True)
class Context:
    """A prompt as pieces, with the tools that may be called and its size in tokens.

    Attributes:
        turn: the turn to be decided, from 1.
        fresh: tokens behind the longest common prefix with the previous context; all of them for the first.
        epoch_start: finished turns when the running epoch began; 0 in orders without epochs.
    """

    pieces: tuple[Piece, ...]
    tools: tuple[ToolSpec, ...]
    budget: Budget
    hash: str
    turn: int = 1
    fresh: int = 0
    epoch_start: int = 0

    @cached_property
    def view(self) -> View:
        """The same as typed values: exactly what the pieces show."""
        return View.of([piece.shows for piece in self.pieces if piece.shows is not None])


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
        """Yield layouts, the preferred one first; the renderer takes the first that fits the budget. `turns` are the
        last finished ones, oldest first, and `before` is the previous context of the episode, if there is one."""

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
        """Yield the running epoch with the last turn appended, then, if it is over or full, a new epoch, in which one
        more turn of the usual size has room: lines of uncurated documents give way to it."""
        if before is not None and memory.turn - before.epoch_start < self.env.rendering.epoch_turns:
            shown = {_kind(each): each.shows for each in before.pieces}
            now = (set_piece(memory, self.env), *order_and_leads(memory, self.env))
            # What the last action changed without its observation saying so.
            changes = [each for each in now if each.shows != shown.get(_kind(each), LeadsView(()))]
            pieces = (*before.pieces, *turns[-1].pieces(), *changes)
            yield Layout([Block(pieces)], dropped=before.budget.dropped, epoch_start=before.epoch_start)
        last = turns[-1:]
        blocks = [*self._head(memory), *self._memory(memory, last)]
        for turn in last:
            blocks += [Block((turn.head,)), *_last_hits(turn)]
        sizes = [self.counts.total(turn.pieces()) for turn in turns]
        yield Layout(blocks, sum(sizes) // max(1, len(sizes)), epoch_start=memory.turn)


class Transcript(Order):
    """The harness without a working memory, for comparison: all turns in sequence, minus what the policy pruned."""

    def layouts(self, memory: WorkingMemory, turns: Sequence[TurnPieces], before: Context | None) -> Iterator[Layout]:
        """Yield the previous context without what was pruned, and the last turn."""
        if before is None:
            yield Layout(self._head(memory))
            return
        last = turns[-1]
        gone = last.head.shows.changes.pruned if isinstance(last.head.shows, TurnView) else ()
        pieces = [
            each
            for each in before.pieces
            if not (isinstance(each.shows, HitView) and each.shows.document.handle in gone)
        ]
        yield Layout([Block((*pieces, last.action, last.head)), *_last_hits(last)], dropped=before.budget.dropped)


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


SMALLEST_TURN = 256
"""Tokens that must remain for memory and last observation beside static prompt, tools and question."""


class Renderer:
    """Renders the states of one environment. It caches lines and token counts, which change no result."""

    def __init__(self, env: Env, toolbox: Toolbox, counter: TokenCounter) -> None:
        self.env, self.toolbox, self.counter = env, toolbox, counter
        self.static = static_piece(env, toolbox)
        self.counts = CachedCounter(counter)
        self.declared = self.counts.tools(toolbox.specs)
        self.limit = env.prompt_limit - self.declared - marker_room(env, self.counts)
        self.order = ORDERS[env.rendering.order](env, self.static, self.counts, MemoryPieces(env))

    def smallest_window(self) -> int:
        """Return the smallest context window that holds what every context has, and `SMALLEST_TURN` more."""
        fixed = self.counts.total([self.static, query_piece(WorkingMemory(""), self.env)])
        fixed += self.declared + SMALLEST_TURN + self.env.generation_reserve
        window = fixed + 1
        # The budget line names the window, so that its size depends on it.
        while window < fixed + marker_room(msgspec.structs.replace(self.env, context_window=window), self.counts):
            window += 1
        return window

    def render(self, memory: WorkingMemory, turns: Sequence[TurnPieces], before: Context | None) -> Context | None:
        """Return the context of a state, or None if even the smallest one does not fit; see `Order.layouts`."""
        for layout in self.order.layouts(memory, turns, before):
            fitted = fit(layout.blocks, self.limit, self.counts, layout.room)
            if fitted is None:
                continue
            kept, used, dropped = fitted
            used += self.env.prompt_limit - self.limit
            pieces = (*kept, marker(self.env, used, memory.turn)) if self.env.has("budget_marker") else tuple(kept)
            pairs = zip(pieces, before.pieces if before else (), strict=False)
            common = [now for now, _ in takewhile(lambda pair: pair[0].key == pair[1].key, pairs)]
            return Context(
                pieces=pieces,
                tools=self.toolbox.specs,
                budget=Budget(used, self.env.prompt_limit, layout.dropped + dropped),
                hash=digest([[each.key for each in pieces], self.counter.hash]),
                turn=memory.turn + 1,
                fresh=used - self.declared - self.counts.total(common) if common else used,
                epoch_start=layout.epoch_start,
            )
        return None
