"""The base class of chat formats: a counter, a renderer and a parser over one tokenizer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from functools import cached_property, lru_cache
from itertools import chain
from typing import ClassVar, NamedTuple

from harness1.env.pieces import Piece, Role, group_messages
from harness1.env.render import Context
from harness1.errors import UsageError
from harness1.models.backend import Grammar
from harness1.models.tokenizer import Tokenizer, split_at_control
from harness1.plain import digest, text_digest
from harness1.records import Record, ToolCall
from harness1.tools.tool import ToolSpec

CACHED_PIECES, CACHED_IDS = 20_000, 4_000_000
"""Pieces whose ids are cached, for all episodes of a policy together, and their ids: a proxy renders any lengths."""
CACHED_TEXTS = 1_000  # texts of the format itself whose ids are cached

Ids = tuple[int, ...]
_PROBE = ToolSpec("tool", "Does it.", {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]})
_PROBED = ToolCall("tool", {"x": "y"})


class Parsed(Record):
    """A parsed output: actions in the order written, or the reason why there is none."""

    reasoning: str = ""
    actions: tuple[ToolCall, ...] = ()
    error: str | None = None


class PromptSpan(NamedTuple):
    """A named stretch of a prompt. An episode stores each name once, and none that is `call/ID`, an output."""

    key: str
    ids: Ids


def join_spans(spans: Iterable[PromptSpan]) -> list[int]:
    """Return the ids of a prompt."""
    return list(chain.from_iterable([span.ids for span in spans]))


class ChatFormat(ABC):
    """A chat format: messages over one tokenizer, and the `TokenCounter` of environments whose policy uses it.

    A message is an opening, the ids of its pieces, and a closing. Consecutive pieces of one role are one message; each
    output of the policy is its own. Texts are encoded as texts: nothing in a document becomes a control token. Raises
    UsageError if the tokenizer lacks a control token of the format."""

    name: ClassVar[str]
    instruction: ClassVar[str]  # the required form of an output, shown to a policy whose last output had no call
    control: ClassVar[tuple[str, ...]] = ()  # the names of the control tokens that it needs

    def __init__(self, tokenizer: Tokenizer) -> None:
        if missing := [name for name in self.control if name not in tokenizer.control]:
            raise UsageError(f"the {self.name} format needs a tokenizer with {', '.join(missing)}")
        self.tokenizer = tokenizer
        self._pieces: dict[str, Ids] = {}
        self._cached_ids = 0
        self.write = lru_cache(CACHED_TEXTS)(self._write)
        self._frame = lru_cache(CACHED_TEXTS)(lambda text: PromptSpan(f"={text_digest(text)}", self.write(text)))
        self._tools: tuple[tuple[ToolSpec, ...], PromptSpan] | None = None

    @cached_property
    def hash(self) -> str:
        """The hash of the tokenizer and of everything that the format itself writes: new wording is a new format."""
        roles: tuple[Role, ...] = ("system", "user", "assistant", "tool")
        pieces = [Piece("", role, "x\n") for role in roles]
        frame = [(self.opening(each), self.closing(each)) for each in pieces]
        said = self.generation_prompt(), self.instruction, self.declarations([_PROBE]), self.format_action("a", _PROBED)
        return digest([self.name, self.tokenizer.hash, frame, said])

    @property
    @abstractmethod
    def stop_ids(self) -> Ids:
        """The tokens that end an output; the first one is appended to an output that was cut."""

    @abstractmethod
    def opening(self, first: Piece) -> str:
        """Return the text before the pieces of a message, with control tokens by name."""

    @abstractmethod
    def closing(self, first: Piece) -> str:
        """Return the text after the pieces of a message (after the stop token of an output), control tokens by name."""

    @abstractmethod
    def declarations(self, specs: Sequence[ToolSpec]) -> Ids:
        """Return the tools and how to call them, the end of the system message; it begins with a visible character."""

    @abstractmethod
    def generation_prompt(self) -> str:
        """Return the end of a prompt, the opening of the policy's own message, with control tokens by name."""

    @abstractmethod
    def parse(self, output_ids: Sequence[int], specs: Sequence[ToolSpec]) -> Parsed:
        """Parse an output. Any ids are accepted: the result has the actions, or says why there is none."""

    @abstractmethod
    def format_action(self, reasoning: str, action: ToolCall) -> Ids:
        """Return the output that expresses this reasoning and action, stop token included."""

    @abstractmethod
    def grammar(self, specs: Sequence[ToolSpec]) -> Grammar:
        """Return a grammar of the outputs that are valid calls of one of the tools."""

    def piece(self, piece: Piece) -> int:
        return len(self.ids(piece))

    def tools(self, specs: Sequence[ToolSpec]) -> int:
        declared = self._declare(specs).ids if specs else ()
        return len(declared) + len(self.write(self.generation_prompt()))

    def write_piece(self, piece: Piece) -> str:
        """Return the text of a piece as this format writes it, for pieces that are not recorded outputs."""
        return piece.text

    def overhead(self, first: Piece) -> int:
        return len(self.write(self.opening(first))) + len(self.write(self.closing(first)))

    def ids(self, piece: Piece) -> Ids:
        """Return the ids of a piece; for an output the sampled ones, with a stop token if it was cut."""
        if piece.call is not None:
            output = piece.call.output_ids
            return output if output and output[-1] in self.stop_ids else (*output, self.stop_ids[0])
        if (ids := self._pieces.get(piece.key)) is None:
            ids = tuple(self.tokenizer.encode(self.write_piece(piece)))
            if piece.turn_ref is not None:
                ids = (*ids, self.stop_ids[0])
            self._cached_ids += len(ids)
            if len(self._pieces) >= CACHED_PIECES or self._cached_ids > CACHED_IDS:
                self._pieces.clear()
                self._cached_ids = len(ids)
            self._pieces[piece.key] = ids
        return ids

    def segments(self, context: Context) -> list[PromptSpan]:
        """Return a prompt up to the generation prompt, as named spans."""
        return self.messages(group_messages(context.pieces), context.tools)

    def messages(self, groups: Sequence[Sequence[Piece]], specs: Sequence[ToolSpec]) -> list[PromptSpan]:
        """Return groups of pieces as messages, in named spans; the first declares the tools if its role is `system`."""
        found: list[PromptSpan] = []
        for place, group in enumerate(groups):
            found.append(self._frame(self.opening(group[0])))
            for each in group:
                ids = self.ids(each)
                if each.call is None:
                    found.append(PromptSpan(each.key, ids))
                else:
                    output = each.call.output_ids
                    found += [PromptSpan(f"call/{each.call.call_id}", output), PromptSpan("=stop", ids[len(output) :])]
            if place == 0 and group[0].role == "system" and specs:
                found.append(self._declare(specs))
            found.append(self._frame(self.closing(group[0])))
        return [span for span in found if span.ids]

    def prompt_end(self) -> PromptSpan:
        """Return the generation prompt."""
        return self._frame(self.generation_prompt())

    def text(self, text: str) -> Ids:
        """Return the ids of any other text; nothing in it is encoded as a control token."""
        return tuple(self.tokenizer.encode(text))

    def _write(self, text: str) -> Ids:
        """Return the ids of a text that the format itself writes; a control token's name is encoded as that token."""
        parts = split_at_control(text, self.tokenizer.control)
        return tuple(
            token for part in parts for token in ([part] if isinstance(part, int) else self.tokenizer.encode(part))
        )

    def _declare(self, specs: Sequence[ToolSpec]) -> PromptSpan:
        known, kept = tuple(specs), self._tools  # kept, because the tools of an episode never change
        if kept is None or kept[0] != known:
            ids = self.declarations(known)
            kept = self._tools = known, PromptSpan(f"=tools/{text_digest(str(ids))}", ids)
        return kept[1]
