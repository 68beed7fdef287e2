"""From memory and turns to a context within its token budget. An order says which blocks of pieces a context holds, in
which sequence; `fit` drops blocks until they fit the budget. To add an order, write a function that yields layouts, and
name it in `ORDERS` and in `config.Rendering.order`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from types import MappingProxyType
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
from harness1.env.view import BudgetView, HitView, MemoryView, TurnView, View
from harness1.memory.working_memory import WorkingMemory
from harness1.plain import digest
from harness1.records import Episode, UnitId
from harness1.tools.registry import Toolbox
from harness1.tools.tool import ToolSpec

TOOLS = "+tools"  # the key under which the tokens of the tool declarations are counted


@dataclass(frozen=True)
class Budget:
    """Tokens of the whole prompt, its limit, and the number of dropped pieces."""

    used: int
    limit: int
    dropped: int = 0


class CachedCounter:
    """Counts everything once. A replay needs `known`, all counts by key, in its place (`RecordedCounter`)."""

    def __init__(self, counter: TokenCounter) -> None:
        self.counter = counter
        self.known: dict[str, int] = {}

    def piece(self, piece: Piece) -> int:
        if piece.key not in self.known:
            self.known[piece.key] = self.counter.piece(piece)
        return self.known[piece.key]

    def overhead(self, first: Piece) -> int:
        key = overhead_key(first)
        if key not in self.known:
            self.known[key] = self.counter.overhead(first)
        return self.known[key]

    def tools(self, specs: Sequence[ToolSpec]) -> int:
        """Return the tokens of the tool declarations and of everything else outside messages."""
        self.known[TOOLS] = self.counter.tools(specs)
        return self.known[TOOLS]

    def total(self, pieces: Sequence[Piece]) -> int:
        return sum(map(self.piece, pieces)) + sum(self.overhead(group[0]) for group in group_messages(pieces))


def fit(
    blocks: Sequence[Block], limit: int, counts: CachedCounter, room: int = 0
) -> tuple[list[Piece], int, int] | None:
    """Drop whole blocks by class and order until the rest fits; return what is kept, its tokens and the number of
    dropped pieces; None if what must stay is too large. For `room`, only lines of uncurated documents give way."""
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
    """The counts of a recorded episode, so that replay needs no tokenizer; LookupError for what it never had."""

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
    """Return the tokens kept free for the budget line, which comes last: twice its longest form, and its message."""
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
    elif env.rendering.instructions in ("plain", "minimal"):
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
    """A prompt as pieces, with the tools that may be called and its size in tokens."""

    pieces: tuple[Piece, ...]
    tools: tuple[ToolSpec, ...]
    budget: Budget
    hash: str
    turn: int = 1  # the one to be decided
    fresh: int = 0  # tokens behind the longest common prefix with the previous context; all of them for the first
    epoch_start: int = 0  # finished turns when the running epoch began; 0 in orders without epochs

    @cached_property
    def view(self) -> View:
        """The same as typed values: exactly what the pieces show."""
        return View.of([piece.shows for piece in self.pieces if piece.shows is not None])


class Layout(NamedTuple):
    """The blocks of a context before the budget drops any, tokens that should stay free (see `fit`), pieces that were
    dropped before and stay so, and finished turns when the epoch began."""

    blocks: Sequence[Block]
    room: int = 0
    dropped: int = 0
    epoch_start: int = 0


def paper(by: Renderer, memory: WorkingMemory, turns: Sequence[TurnPieces], before: Context | None) -> Iterator[Layout]:
    """Yield the memory, then the last turns; both are rendered anew each turn."""
    shown = turns[-by.env.rendering.window[0] :]
    yield Layout([*by.head(memory), *by.memory(memory, shown), *_turn_blocks(shown)])


def stable_first(
    by: Renderer, memory: WorkingMemory, turns: Sequence[TurnPieces], before: Context | None
) -> Iterator[Layout]:
    """Yield turns first, in a window that grows and is then cut back, for prefix caches; then the memory."""
    shown = turns[-window(turns[-1].turn, by.env.rendering) :] if turns else ()
    yield Layout([*by.head(memory), *_turn_blocks(shown), *by.memory(memory, shown)])


def epoch(by: Renderer, memory: WorkingMemory, turns: Sequence[TurnPieces], before: Context | None) -> Iterator[Layout]:
    """Yield a snapshot of the memory, to which a few turns are appended: inside an epoch each prompt is a token prefix
    of the next. If the running epoch is over, or full with the last turn, a new one begins, in which one more turn of
    the usual size has room: lines of uncurated documents give way to it."""
    if before is not None and memory.turn - before.epoch_start < by.env.rendering.epoch_turns:
        shown = {each.key.partition("#")[0]: each.shows for each in before.pieces}
        now = (set_piece(memory, by.env), *order_and_leads(memory, by.env))
        # What the last action changed without its observation saying so.
        changes = [each for each in now if each.shows != shown.get(each.key.partition("#")[0], MemoryView(leads=()))]
        pieces = (*before.pieces, *turns[-1].pieces(), *changes)
        yield Layout([Block(pieces)], dropped=before.budget.dropped, epoch_start=before.epoch_start)
    blocks = [*by.head(memory), *by.memory(memory, turns[-1:])]
    for turn in turns[-1:]:
        blocks += [Block((turn.head,)), *_last_hits(turn)]
    sizes = [by.counts.total(turn.pieces()) for turn in turns]
    yield Layout(blocks, sum(sizes) // max(1, len(sizes)), epoch_start=memory.turn)


def transcript(
    by: Renderer, memory: WorkingMemory, turns: Sequence[TurnPieces], before: Context | None
) -> Iterator[Layout]:
    """Yield all turns in sequence, minus what was pruned: the harness without a working memory, for comparison."""
    if before is None:
        yield Layout(by.head(memory))
        return
    last = turns[-1]
    gone = last.head.shows.changes.pruned if isinstance(last.head.shows, TurnView) else ()
    kept = [one for one in before.pieces if not (isinstance(one.shows, HitView) and one.shows.document.handle in gone)]
    yield Layout([Block((*kept, last.action, last.head)), *_last_hits(last)], dropped=before.budget.dropped)


Order = Callable[["Renderer", WorkingMemory, Sequence[TurnPieces], Context | None], Iterator[Layout]]
"""Arranges the state of an episode as a context: it yields layouts, of which the first that fits the budget is taken.
The turns are the last finished ones, oldest first; the context is the episode's previous one, if any."""
ORDERS: Mapping[str, Order] = MappingProxyType(
    {"paper": paper, "stable_first": stable_first, "epoch": epoch, "transcript": transcript}
)


def window(turns: int, rendering: Rendering) -> int:
    """Return how many of the finished turns `stable_first` shows: it grows to the second number, and falls back."""
    recent, most = rendering.window
    return turns if turns <= recent else recent + (turns - recent) % (most - recent + 1)


def visible_units(shown: Sequence[TurnPieces]) -> set[UnitId]:
    """Return the units that the hits of the shown turns display."""
    shows = (hit.shows for turn in shown for hit in turn.hits)
    return {hit.document.unit_id for hit in shows if isinstance(hit, HitView)}


def _turn_blocks(shown: Sequence[TurnPieces]) -> list[Block]:
    blocks: list[Block] = []
    for turn in shown[:-1]:
        blocks.append(Block((turn.action, turn.head), Drop.OLD_TURNS, turn.turn))
        blocks += [Block((hit,), Drop.OLD_HITS, turn.turn) for hit in turn.hits]
    for turn in shown[-1:]:
        blocks += [Block((turn.action, turn.head)), *_last_hits(turn)]
    return blocks


def _last_hits(turn: TurnPieces) -> list[Block]:
    """Return the last hits, each a block of its own: a tokenizer may need far more tokens than their tool counted."""
    return [Block((hit,), Drop.LAST_HITS, turn.turn) for hit in turn.hits]


SMALLEST_TURN = 256  # tokens that must remain for memory and last observation beside static prompt, tools and question


class Renderer:
    """Renders the states of one environment. It caches lines and token counts, which change no result."""

    def __init__(self, env: Env, toolbox: Toolbox, counter: TokenCounter) -> None:
        self.env, self.toolbox, self.counter = env, toolbox, counter
        self.static = static_piece(env, toolbox)
        self.counts = CachedCounter(counter)
        self.declared = self.counts.tools(toolbox.specs)
        self.limit = env.prompt_limit - self.declared - marker_room(env, self.counts)
        self._memory_pieces = MemoryPieces(env)

    def smallest_window(self) -> int:
        """Return the smallest context window that holds what every context has, and `SMALLEST_TURN` more."""
        fixed = self.counts.total([self.static, query_piece(WorkingMemory(""), self.env)])
        fixed += self.declared + SMALLEST_TURN + self.env.generation_reserve
        window = fixed + 1
        # The budget line names the window, so that its size depends on it.
        while window < fixed + marker_room(msgspec.structs.replace(self.env, context_window=window), self.counts):
            window += 1
        return window

    def head(self, memory: WorkingMemory) -> list[Block]:
        return [Block((self.static,)), Block((query_piece(memory, self.env),))]

    def memory(self, memory: WorkingMemory, shown: Sequence[TurnPieces]) -> list[Block]:
        return self._memory_pieces.of(memory, visible_units(shown))

    def render(self, memory: WorkingMemory, turns: Sequence[TurnPieces], before: Context | None) -> Context | None:
        """Return the context of a state, or None if even the smallest one does not fit; see `Order`."""
        for layout in ORDERS[self.env.rendering.order](self, memory, turns, before):
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
