"""A chat server that searches, curates and ends, by the number of the last turn in the messages."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TURN = re.compile(r"turn (\d+) of \d+\.")


def shown_in(messages: list[dict[str, Any]]) -> str:
    """Return the texts of messages."""
    return "\n".join(str(message.get("content")) for message in messages)


def next_call(shown: str, searches: int = 1) -> tuple[str, dict[str, Any]]:
    """Return the call that follows a context: the question is searched, then the same without its first words, and the
    first two documents are delivered."""
    done = max(map(int, TURN.findall(shown)), default=0)
    question = shown.partition("Question: ")[2].partition("\n")[0]
    if done < searches:
        return "search_corpus", {"query": " ".join(question.split()[done:])[:200]}
    if done == searches:
        return "curate", {"add_ids": ["D1", "D2"]}
    return "end_search", {"reasoning": "done"}


def _completion(searches: int, path: str, asked: dict[str, Any]) -> dict[str, Any]:
    name, arguments = next_call(shown_in(asked["messages"]), searches)
    call = {"id": "c", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls"}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    return {
        "id": "x",
        "object": "chat.completion",
        "created": 0,
        "model": "fake",
        "choices": [choice],
        "usage": usage,
    }


class _Handler(BaseHTTPRequestHandler):
    def __init__(self, answer: Callable[[str, dict[str, Any]], dict[str, Any]], *connection: Any) -> None:
        self.answer = answer
        super().__init__(*connection)

    def do_GET(self) -> None:
        self._send(404, {})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self._send(200, self.answer(self.path, asked))

    def _send(self, status: int, told: dict[str, Any]) -> None:
        body = json.dumps(told).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        pass


@contextmanager
def answering_json(answer: Callable[[str, dict[str, Any]], dict[str, Any]]) -> Iterator[str]:
    """Yield the address of a server, with /v1, that answers each post by its path and body."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, answer))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def chat_server(searches: int = 1) -> Iterator[str]:
    """Yield the address of the chat server."""
    with answering_json(partial(_completion, searches)) as address:
        yield address
