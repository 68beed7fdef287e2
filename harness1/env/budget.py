"""The token budget: how a context is made to fit, and the line that tells the policy how full it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from harness1.config import Env
from harness1.env.blocks import Block, Drop
from harness1.env.pieces import Piece, TokenCounter, piece
from harness1.env.view import BudgetView


@dataclass(frozen=True)
class Budget:
    """Tokens of the whole prompt, its limit, and how many pieces had to be dropped."""

    used: int
    limit: int
    dropped: int = 0


class Measure:
    """Counts pieces once each and remembers, so that a turn costs only its new text."""

    def __init__(self, counter: TokenCounter) -> None:
        self.counter = counter
        self._known: dict[str, int] = {}

    def piece(self, piece: Piece) -> int:
        count = self._known.get(piece.key)
        if count is None:
            count = self._known[piece.key] = self.counter.piece(piece)
        return count

    def total(self, pieces: Sequence[Piece]) -> int:
        """Tokens of joined pieces; consecutive pieces of one role are one message."""
        count = 0
        role = None
        for each in pieces:
            if each.role != role or each.turn_ref is not None:
                role = each.role
                count += self.counter.overhead(each.role)
            count += self.piece(each)
        return count


def fit(blocks: Sequence[Block], limit: int, measure: Measure, room: int = 0) -> tuple[list[Piece], int, int] | None:
    """Drop whole blocks by class and order until the rest fits.

    Args:
        room: tokens that should stay free below the limit; only lines of uncurated documents give way to that.

    Returns:
        The kept pieces, their tokens and the number of dropped pieces; None if what must stay is too large.
    """
    kept = [piece for block in blocks for piece in block.pieces]
    used = measure.total(kept)
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
        excess -= sum(measure.piece(each) for each in blocks[place].pieces)
    kept = [piece for at, block in enumerate(blocks) if at not in gone for piece in block.pieces]
    used = measure.total(kept)
    dropped = sum(len(blocks[at].pieces) for at in gone)
    return (kept, used, dropped) if used <= limit else None


def marker_room(env: Env, counter: TokenCounter) -> int:
    """Tokens kept free for the budget line, which is written last because it says how large the rest is: its longest
    form, twice, for other digits may need more tokens, and what its message adds."""
    if not env.budget_marker.on:
        return 0
    return 2 * counter.piece(marker(env, env.prompt_limit, env.max_turns)) + counter.overhead("user")


def marker(env: Env, used: int, turn: int) -> Piece:
    """The budget line. It is a piece of its own, so that nothing can cut it off."""
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
