"""From state to context, always within the budget. The order of the pieces is that of `orders.py`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

import msgspec

from harness1.config import Env
from harness1.env.render.budget import Budget, CachedCounter, fit, marker, marker_room
from harness1.env.render.context import Context
from harness1.env.render.memory_pieces import MemoryPieces
from harness1.env.render.orders import ORDERS
from harness1.env.render.pieces import Piece, TokenCounter
from harness1.env.render.prompt import query_piece, static_piece
from harness1.env.render.turn_pieces import TurnPieces
from harness1.hashing import digest
from harness1.memory.working_memory import WorkingMemory
from harness1.tools.registry import Toolbox

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
        """Return the smallest context window that holds what every context has, and an observation of
        `SMALLEST_TURN`."""
        fixed = self.counts.total([self.static, query_piece(WorkingMemory(""), self.env)])
        fixed += self.declared + SMALLEST_TURN + self.env.generation_reserve
        window = fixed + 1
        # The budget line names the window, so that its size depends on it.
        while window < fixed + marker_room(msgspec.structs.replace(self.env, context_window=window), self.counts):
            window += 1
        return window

    def render(self, memory: WorkingMemory, turns: Sequence[TurnPieces], before: Context | None) -> Context | None:
        """Return the context of a state, or None if even the smallest one does not fit.

        Args:
            turns: the last finished turns, oldest first.
            before: the previous context of the episode; None for the first.
        """
        for layout in self.order.layouts(memory, turns, before):
            fitted = fit(layout.blocks, self.limit, self.counts, layout.room)
            if fitted is None:
                continue
            kept, used, dropped = fitted
            used += self.env.prompt_limit - self.limit
            pieces = (*kept, marker(self.env, used, memory.turn)) if self.env.budget_marker.on else tuple(kept)
            return Context(
                pieces=pieces,
                tools=self.toolbox.specs,
                budget=Budget(used, self.env.prompt_limit, layout.dropped + dropped),
                hash=digest([[each.key for each in pieces], self.counter.hash]),
                turn=memory.turn + 1,
                fresh=self._fresh(pieces, used, before),
                epoch_start=layout.epoch_start,
            )
        return None

    def _fresh(self, pieces: Sequence[Piece], used: int, before: Context | None) -> int:
        """Return how many tokens of a prompt no cache of the previous one holds."""
        pairs = zip(pieces, before.pieces if before else (), strict=False)
        common = [now for now, _ in takewhile(lambda pair: pair[0].key == pair[1].key, pairs)]
        return used - self.declared - self.counts.total(common) if common else used
