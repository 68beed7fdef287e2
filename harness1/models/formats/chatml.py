"""ChatML: `<|im_start|>ROLE`, a newline, the text, `<|im_end|>`: the message frame of Qwen, SmolLM and many others."""

from __future__ import annotations

from collections.abc import Sequence

from harness1.env.render.pieces import Piece
from harness1.models.formats.chat_format import ChatFormat, Ids
from harness1.models.formats.reading import LONGEST

START, END = "<|im_start|>", "<|im_end|>"
_BRACKETS = str.maketrans("{}<>", "()()")


class ChatML(ChatFormat):
    """A base class of formats whose messages are ChatML."""

    control = (START, END)

    @property
    def stop_ids(self) -> Ids:
        return (self.tokenizer.control[END],)

    def opening(self, first: Piece) -> str:
        role = "user" if first.role == "tool" else first.role
        return f"{START}{role}\n"

    def closing(self, first: Piece) -> str:
        return "\n" if first.turn_ref is not None else f"{END}\n"

    def generation_prompt(self) -> str:
        return f"{START}assistant\n"

    def said(self, output_ids: Sequence[int]) -> str:
        """Return the text of an output up to its first stop token."""
        stops = self.stop_ids
        end = next((place for place, token in enumerate(output_ids) if token in stops), len(output_ids))
        return self.tokenizer.decode(output_ids[:end])[:LONGEST]


def as_words(reasoning: str) -> str:
    """Return reasoning as one line without the brackets of calls and tags, or nothing if it is empty. With brackets, a
    call that is only mentioned would be carried out, and an unclosed thought would swallow the call."""
    words = " ".join(reasoning.translate(_BRACKETS).split())
    return f"{words}\n" if words else ""
