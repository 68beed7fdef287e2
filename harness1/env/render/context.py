"""The context: what a policy sees at one turn."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from harness1.env.render.budget import Budget
from harness1.env.render.pieces import Piece
from harness1.env.render.view import View
from harness1.tools.tool import ToolSpec


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
        return View.of(self.pieces)
