"""Render chat messages as token ids, in the same way as the context of a policy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile

from harness1.env.render.pieces import Piece, Role
from harness1.env.render.view import TurnView
from harness1.hashing import text_digest
from harness1.models.chat_format import ChatFormat, Ids
from harness1.models.formats import CHANNEL, MESSAGE, RETURN
from harness1.records import ModelCall, Record, ToolCall
from harness1.serve.proxy.chat import ChatMessage
from harness1.serve.proxy.memory import Past
from harness1.tools.tool import ToolSpec

Recall = Callable[[Past, ChatMessage], Ids | None]
"""Look up the sampled ids of an assistant's message; None if it was not sampled here."""


class Prompt(Record):
    """The ids of a prompt; `past` digests the messages that the output will follow."""

    ids: Ids
    past: Past


def prompt_of(chat: ChatFormat, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec], recall: Recall) -> Prompt:
    """Render the prompt of a call.

    The leading system messages are joined into one, which exists even if empty because it declares the tools; later
    ones become user messages.
    """
    leading = list(takewhile(lambda message: message.role == "system", messages))
    groups = [[_piece("system", "\n".join(message.text for message in leading))]]
    past = Past()
    for message in leading:
        past = past.then(message)
    names: dict[str, str] = {}
    for message in messages[len(leading) :]:
        groups += ([piece] for piece in _pieces(chat, message, names, past, recall))
        names |= {call.call_id: call.name for call in message.calls}
        past = past.then(message)
    segments = [*chat.messages(groups, tools), chat.prompt_end()]
    return Prompt(tuple(token for segment in segments for token in segment.ids), past)


def text_of_output(chat: ChatFormat, output_ids: Sequence[int]) -> str:
    """Return the text of an output without calls; in Harmony, that of its last message."""
    ids = list(output_ids)
    while ids and ids[-1] in chat.stop_ids:
        ids.pop()
    message = chat.tokenizer.control.get(MESSAGE)
    if message in ids:
        ids = ids[len(ids) - ids[::-1].index(message) :]
    return chat.tokenizer.decode(ids)


def _pieces(
    chat: ChatFormat, message: ChatMessage, names: dict[str, str], past: Past, recall: Recall
) -> Iterator[Piece]:
    match message.role:
        case "system" | "user":
            yield _piece("user", message.text)
        case "tool":
            yield _piece("tool", message.text, TurnView(turn=0, tool=names.get(message.answers, "")))
        case "assistant":
            sampled = recall(past, message)
            for ids in _written(chat, message) if sampled is None else [sampled]:
                yield Piece(f"said#{text_digest(message.text)}", "assistant", "", 0, call=ModelCall("", output_ids=ids))


def _piece(role: Role, text: str, shows: Record | None = None) -> Piece:
    """Return a piece whose text ends with a line break, because a format may write more after it. The key includes the
    role, because a format may write the same text differently in each."""
    closed = f"{text}\n" if text and not text.endswith("\n") and role != "user" else text
    return Piece(f"{role}#{text_digest(closed)}", role, closed, shows=shows)


def _written(chat: ChatFormat, message: ChatMessage) -> Iterator[Ids]:
    """Yield a message that was not sampled here as outputs of the format, one for each call, since no format writes
    several calls in an output."""
    text = message.text
    if not message.calls:
        final = CHANNEL in chat.tokenizer.control
        head, tail = (f"{CHANNEL}final{MESSAGE}", RETURN) if final else ("", "")
        yield (*chat.write(head), *chat.text(text), *(chat.write(tail) or chat.stop_ids[:1]))
    for call in message.calls:
        yield chat.format_action(text, ToolCall(call.name, call.meaning()))
        text = ""
