"""An answer of chat completions that comes as a stream of server-sent events, put together as it comes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from harness1.errors import MALFORMED

Ended = Callable[[dict[str, Any]], bool]
"""Decides by a message, as far as it is known, that nothing more of it is wanted."""
_JOINED = ("content", "reasoning", "reasoning_content")
LONGEST_EVENT = 1 << 22  # bytes of an event that has not ended; a longer one is no event


class ChatStream:
    """Joins the events of one answer into the completion that a server without streams would send."""

    def __init__(self, ended: Ended) -> None:
        self._ended, self._rest, self._calls = ended, b"", list[dict[str, Any]]()
        self.message: dict[str, Any] = {"role": "assistant", "content": None}
        self.finish: str | None = None
        self.error: Any = None  # what the server said of a failure after it began to answer

    def feed(self, block: bytes) -> bool:
        """Add bytes; return True if the rest is not wanted."""
        *lines, self._rest = (self._rest + block).split(b"\n")
        if len(self._rest) > LONGEST_EVENT:
            raise ValueError(f"an event of more than {LONGEST_EVENT} bytes")
        for line in lines:  # each for itself, so that an answer ends alike however its bytes are divided
            grown = line.startswith(b"data:") and self._add(line[5:].strip())
            if self.error is None and self.finish is None and grown and self._ended(self.message):
                self.finish = "stop"
                return True
        return self.error is not None

    def completion(self) -> dict[str, Any]:
        """Return the whole answer; raise ValueError if it broke off."""
        if self.finish is None:
            raise ValueError("the stream of the answer broke off")
        return {"choices": [{"index": 0, "message": self.message, "finish_reason": self.finish}]}

    def _add(self, line: bytes) -> bool:
        if line == b"[DONE]":
            return False
        try:
            event = msgspec.json.decode(line, type=dict[str, Any])
        except MALFORMED as error:
            raise ValueError(f"an event that is no JSON object: {error}") from error
        self.error = self.error or event.get("error")
        choices = event.get("choices")
        choice = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
        if isinstance(reason := choice.get("finish_reason"), str):
            self.finish = reason
        delta = choice.get("delta")
        for name, value in delta.items() if isinstance(delta, dict) else ():
            if name == "tool_calls":
                for call in value if isinstance(value, list) else ():
                    self._add_call(call if isinstance(call, dict) else {})
            elif name in _JOINED and isinstance(value, str) and isinstance(before := self.message.get(name), str):
                self.message[name] = before + value
            elif isinstance(value, list) and isinstance(before := self.message.get(name), list):
                self.message[name] = [*before, *value]
            elif value is not None:
                self.message[name] = value
        return bool(delta)

    def _add_call(self, part: dict[str, Any]) -> None:
        # Gemini gives all calls of a message the same index, and each an id.
        place, name = part.get("index"), part.get("id")
        same = [call for call in self._calls if call["index"] == place and name in (None, "", call.get("id"))]
        if not same:
            same = [{"index": place, "type": "function", "function": {"name": "", "arguments": ""}}]
            self._calls.append(same[0])
            self.message["tool_calls"] = self._calls
        call, function = same[-1], part.get("function")
        call |= {key: value for key, value in part.items() if key != "function" and value is not None}
        for key, value in function.items() if isinstance(function, dict) else ():
            before = call["function"].get(key)
            joined = key == "arguments" and isinstance(value, str) and isinstance(before, str)
            if value is not None and (joined or value != ""):
                call["function"][key] = before + value if joined else value
