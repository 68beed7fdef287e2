"""Sampled tokens by session, so that messages that come back as history are not tokenised again."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock
from typing import NamedTuple

from harness1.hashing import digest
from harness1.models.chat_format import Ids
from harness1.serve.proxy.chat import Called, ChatMessage, ChatReply


class Past(NamedTuple):
    """A digest of the messages before a position."""

    digest: str = ""

    def then(self, message: ChatMessage) -> Past:
        """Return the past after a message, ignoring what clients rewrite (arguments, outer whitespace)."""
        ids = [call.call_id for call in message.calls]
        return Past(digest([self.digest, message.role, message.text.strip(), ids, message.answers]))


class _Said(NamedTuple):
    text: str
    calls: list[tuple[str, str, object]]
    ids: array[int]


class Memory:
    """Outputs by session, in RAM only and safe to share between threads; the least recently used are forgotten beyond
    the limits of sessions, of outputs per session (a text counts twice), and of token ids in all."""

    def __init__(self, sessions: int = 2000, outputs: int = 2000, ids: int = 50_000_000) -> None:
        self._most_sessions, self._most_outputs, self._most_ids = sessions, outputs, ids
        self._sessions: OrderedDict[str, OrderedDict[str, _Said]] = OrderedDict()
        self._owners: dict[str, str] = {}
        self._ids = 0
        self._lock = Lock()

    def owner(self, messages: Sequence[ChatMessage]) -> str | None:
        """Return the session of the latest known call in the messages."""
        keys = (_call_key(message.calls) for message in reversed(messages) if message.calls)
        return next((self._owners[key] for key in keys if key in self._owners), None)

    def remember(self, session: str, past: Past, reply: ChatReply, output_ids: Sequence[int]) -> None:
        """Remember an answer by the ids of its calls, which are unique, or by its past and text."""
        said = _Said(reply.text.strip(), _meant(reply.calls), array("i", output_ids))
        with self._lock:
            self._keep(session, past, reply, said)

    def _keep(self, session: str, past: Past, reply: ChatReply, said: _Said) -> None:
        known = self._sessions.setdefault(session, OrderedDict())
        self._sessions.move_to_end(session)
        for key in [_call_key(reply.calls)] if reply.calls else _text_keys(past, said.text):
            self._forget(session, key)
            known[key] = said
            self._ids += len(said.ids)
            if reply.calls:
                self._owners[key] = session
        while len(known) > self._most_outputs:
            self._forget(session, next(iter(known)))
        while len(self._sessions) > self._most_sessions or self._ids > self._most_ids:
            self._forget_session(next(iter(self._sessions)))

    def recall(self, session: str, past: Past, message: ChatMessage) -> Ids | None:
        """Return the sampled ids of a message; None if it was not sampled here, or was edited.

        A text is looked up by its past, then anywhere in the session. A client may leave out the text beside calls.
        """
        text = message.text.strip()
        if not message.calls:
            found = [self._find(session, key) for key in _text_keys(past, text)]
            return next((tuple(said.ids) for said in found if said is not None), None)
        key = _call_key(message.calls)
        said = self._find(self._owners.get(key, session), key)
        if said is None or said.calls != _meant(message.calls) or text not in ("", said.text):
            return None
        return tuple(said.ids)

    def _find(self, session: str, key: str) -> _Said | None:
        with self._lock:
            known = self._sessions.get(session)
            if known is None or key not in known:
                return None
            self._sessions.move_to_end(session)
            known.move_to_end(key)
            return known[key]

    def _forget(self, session: str, key: str) -> None:
        said = self._sessions[session].pop(key, None)
        if said is not None:
            self._ids -= len(said.ids)
            if self._owners.get(key) == session:
                del self._owners[key]

    def _forget_session(self, session: str) -> None:
        for key in list(self._sessions[session]):
            self._forget(session, key)
        del self._sessions[session]


def _call_key(calls: Sequence[Called]) -> str:
    return f"call/{calls[0].call_id}"


def _text_keys(past: Past, text: str) -> tuple[str, str]:
    return f"at/{past.digest}/{digest(text)}", f"text/{digest(text)}"


def _meant(calls: Sequence[Called]) -> list[tuple[str, str, object]]:
    return [(call.call_id, call.name, call.meaning()) for call in calls]
