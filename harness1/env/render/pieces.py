"""Pieces: the named stretches of text that make up a context.

Every piece starts with a visible character and ends with exactly one newline, so that the token ids of joined pieces
equal the token ids of the whole, for byte-level and word-level tokenizers alike.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from harness1.hashing import text_digest
from harness1.records import ModelCall, Record, ToolCall
from harness1.retrieval.corpus import approximate_tokens
from harness1.tools.tool import ToolSpec, one_line

LONGEST_ACTION = 1000
"""Characters shown of a policy's own call or reasoning where there are no sampled tokens."""

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of a context. `key` names kind and content; `shows` is the value that the text puts into words.

    A piece with `turn_ref` stands for the policy's own output of that turn. `call` is the model call that sampled it:
    a chat format inserts its ids unchanged; for policies without tokens, `text` takes their place.
    """

    key: str
    role: Role
    text: str
    turn_ref: int | None = None
    shows: Record | None = field(default=None, compare=False)
    call: ModelCall | None = field(default=None, compare=False)


def piece(name: str, role: Role, text: str, shows: Record | None = None) -> Piece:
    """Make a piece; its text is stripped and closed by one newline."""
    body = text.strip() + "\n"
    return Piece(f"{name}#{text_digest(body)}", role, body, shows=shows)


def action_piece(turn: int, text: str, shows: Record | None, call: ModelCall | None) -> Piece:
    """Make the piece of a policy's own output, named by the sampled tokens if there are any."""
    body = text.strip() + "\n"
    content = ",".join(map(str, call.output_ids)) if call else body
    return Piece(f"action/{turn}#{text_digest(content)}", "assistant", body, turn, shows, call)


def grouped(pieces: Sequence[Piece]) -> list[list[Piece]]:
    """Group pieces into messages: consecutive pieces of one role form one, and so does each output of the policy."""
    groups: list[list[Piece]] = []
    for each in pieces:
        if groups and groups[-1][0].role == each.role and each.turn_ref is None and groups[-1][0].turn_ref is None:
            groups[-1].append(each)
        else:
            groups.append([each])
    return groups


def action_text(reasoning: str, action: ToolCall | None) -> str:
    """Return a policy's output in words, for policies without sampled tokens."""
    call = "" if action is None else _call_text(action)
    thought = " ".join(reasoning.split())
    lines = [f"Action: {_abbreviated(call)}", f"Reasoning: {_abbreviated(thought)}" if thought else ""]
    return "\n".join(line for line in lines if line)


def shown_call(action: ToolCall) -> ToolCall:
    """Return the call as `action_text` shows it; a call that is cut loses its arguments."""
    fits = len(_call_text(action)) <= LONGEST_ACTION
    return ToolCall(one_line(action.name), action.arguments if fits else {})


def _call_text(action: ToolCall) -> str:
    return f"{one_line(action.name)} {json.dumps(action.arguments, ensure_ascii=False)}"


def _abbreviated(text: str) -> str:
    """Cut a script's output to a length that leaves room for the rest of the context."""
    return text if len(text) <= LONGEST_ACTION else f"{text[:LONGEST_ACTION]} ({len(text)} characters)"


class TokenCounter(Protocol):
    """Counts tokens for the policy's model. Chat formats implement it; `hash` names tokenizer and format."""

    @property
    def hash(self) -> str: ...

    def piece(self, piece: Piece) -> int:
        """Return the tokens of a piece, without what its message adds."""
        ...

    def tools(self, specs: Sequence[ToolSpec]) -> int:
        """Return the tokens of the tool declarations, and of everything else that a prompt holds outside its
        messages."""
        ...

    def overhead(self, first: Piece) -> int:
        """Return the tokens that a message adds around its pieces if it begins with this one."""
        ...


class ApproximateCounter:
    """Counts four characters as a token: for policies without a model, and the same on every machine."""

    hash = "characters/4"

    def piece(self, piece: Piece) -> int:
        return approximate_tokens(piece.text)

    def tools(self, specs: Sequence[ToolSpec]) -> int:
        return sum(
            approximate_tokens(f"{spec.name} {spec.description} {json.dumps(spec.parameters)}") for spec in specs
        )

    def overhead(self, first: Piece) -> int:
        return 4
