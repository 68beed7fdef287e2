"""A chat server that searches, curates and ends, by the number of its own outputs in the messages."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


def next_call(messages: list[dict[str, Any]]) -> tuple[str, dict[str, Any]]:
    """Return the call that follows: the words of the question are searched, and the first two documents delivered."""
    done = sum(message["role"] == "assistant" for message in messages)
    shown = "".join(str(message.get("content")) for message in messages)
    question = shown.partition("Question: ")[2].partition("\n")[0]
    calls = [("search_corpus", {"query": question[:200]}), ("curate", {"add_ids": ["D1", "D2"]})]
    return calls[done] if done < len(calls) else ("end_search", {"reasoning": "done"})


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        name, arguments = next_call(asked["messages"])
        call = {"id": "c", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        message = {"role": "assistant", "content": None, "tool_calls": [call]}
        choice = {"index": 0, "message": message, "finish_reason": "tool_calls"}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        body = json.dumps(
            {"id": "x", "object": "chat.completion", "created": 0, "model": "fake", "choices": [choice], "usage": usage}
        ).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        pass


@contextmanager
def chat_server() -> Iterator[str]:
    """Yield the address of a server, with /v1."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
