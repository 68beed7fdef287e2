"""The token budget: fits a context to it, and writes the line that tells the policy how full it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from harness1.config import Env
from harness1.env.render.pieces import Piece, TokenCounter, grouped, piece
from harness1.env.render.view import BudgetView, TurnView
from harness1.records import Episode
from harness1.tools.tool import ToolSpec


class Drop(IntEnum):
    """Classes of pieces in the order in which a context over its budget drops them; `NEVER` is kept."""

    OLDER = 0
    POOL = 1
    HISTORY = 2
    EVIDENCE = 3
    OLD_HITS = 4
    CURATED_LINES = 5
    OLD_TURNS = 6
    LAST_HITS = 7
    NEVER = 8


class Block(NamedTuple):
    """Pieces that are kept or dropped together. Within a class earlier turns go first, then later blocks: pool lines
    come newest first and curated lines most important first."""

    pieces: tuple[Piece, ...]
    drop: Drop = Drop.NEVER
    turn: int = 0


TOOLS = "+tools"
"""The key under which the tokens of the tool declarations are counted."""


@dataclass(frozen=True)
class Budget:
    """Tokens of the whole prompt, its limit, and the number of dropped pieces."""

    used: int
    limit: int
    dropped: int = 0


class CachedCounter:
    """Counts everything once, so that a turn costs only its new text.

    Attributes:
        known: all counts by key: what a replay needs in place of the counter (`RecordedCounter`).
    """

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
        return sum(map(self.piece, pieces)) + sum(self.overhead(group[0]) for group in grouped(pieces))


def fit(
    blocks: Sequence[Block], limit: int, counts: CachedCounter, room: int = 0
) -> tuple[list[Piece], int, int] | None:
    """Drop whole blocks by class and order until the rest fits.

    Args:
        room: tokens that should stay free below the limit; only lines of uncurated documents give way to that.

    Returns:
        The kept pieces, their tokens and the number of dropped pieces; None if what must stay is too large.
    """
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
    """Return the tokens kept free for the budget line, which is written last because it states the size of the rest:
    twice its longest form, as other digits may need more tokens, and what its message adds."""
    if not env.budget_marker.on:
        return 0
    longest = marker(env, env.prompt_limit, env.max_turns)
    return 2 * counts.piece(longest) + counts.overhead(longest)


def marker(env: Env, used: int, turn: int) -> Piece:
    """Return the budget line, or the turns alone under minimal instructions, unless the policy has to prune. It is a
    piece of its own, so that nothing can cut it off."""
    if env.pruning.on:
        return _transcript_marker(env, used, turn)
    if env.rendering.instructions == "minimal":
        return piece("budget", "user", f"Turn {turn}/{env.max_turns}", BudgetView(0, 0, turn, env.max_turns))
    limit = env.prompt_limit
    share = used / max(1, limit)
    levels = ((env.budget_marker.critical, "critical: end_search now"), (env.budget_marker.warning, "finish soon"))
    level = next((words for bound, words in levels if share >= bound), "")
    if not level and share >= env.budget_marker.halfway:
        level = "over halfway"
    text = f"Budget: {used} of {limit} tokens ({share:.0%}), turn {turn} of {env.max_turns}." + (
        f" {level}." if level else ""
    )
    return piece("budget", "user", text, BudgetView(used, limit, turn, env.max_turns, level))


def _transcript_marker(env: Env, used: int, turn: int) -> Piece:
    """Return the line that compares the size of a transcript with the size at which pruning should begin."""
    soft = env.pruning.tokens
    level = "Prune what is useless with prune_chunks, or conclude." if used > soft else ""
    if used > env.pruning.refusal:
        level = "Only prune_chunks, curate and end_search are carried out now."
    text = f"Budget: {used} of {soft} tokens, turn {turn} of {env.max_turns}. {level}"
    return piece("budget", "user", text, BudgetView(used, soft, turn, env.max_turns, level))
