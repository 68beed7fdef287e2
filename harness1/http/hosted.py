"""Requests to hosted models through OpenAI's client library."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from harness1.errors import MissingExtra
from harness1.http.client import CONNECTIONS, HttpClient

if TYPE_CHECKING:
    from httpx import AsyncClient, Request

SENT = frozenset(
    ["host", "authorization", "user-agent", "accept", "accept-encoding", "connection", "content-type", "content-length"]
)
"""Headers that may be sent. The library would add those of environment variables, which may be keys for another
server, and a description of this machine."""


class HostedClient(HttpClient):
    """An `HttpClient` on `openai.AsyncOpenAI`, which uses our session.

    Its retries are off and its answers are read as bytes: callers decide how long to wait and what to accept.

    Raises:
        MissingExtra: httpx or openai is not installed.
    """

    def __init__(self, url: str, headers: Mapping[str, str] | None = None, connections: int = CONNECTIONS) -> None:
        super().__init__(url, headers, connections)
        try:
            import openai
        except ImportError as error:
            raise MissingExtra("openai", "serve") from error
        self._openai = openai

    def sender(self, session: AsyncClient) -> Any:
        session.event_hooks = {**session.event_hooks, "request": [_only_sent]}
        ours: Any = session  # openai 2 takes a client of httpx, and openai 3 one of httpx2 or httpx
        return self._openai.AsyncOpenAI(base_url=self.url, api_key="in our session", http_client=ours, max_retries=0)

    async def exchange(
        self, path: str, body: bytes | None, limit: int, headers: Mapping[str, str] | None = None
    ) -> tuple[int, Mapping[str, str], bytes]:
        """Do as `HttpClient.exchange` does, but read the whole answer before cutting it."""
        from httpx import Response

        sender, openai = (await self._line()).sender, self._openai
        options: Any = {"headers": {"Authorization": openai.Omit(), **(headers or {})}}
        try:
            if body is None:
                response = await sender.get(path, cast_to=Response, options=options)
            else:
                response = await sender.post(path, cast_to=Response, content=body, options=options)
        except openai.APIStatusError as error:
            response = error.response
        except openai.APIConnectionError as error:
            failed = error.__cause__ or error
            raise failed from failed.__cause__  # which says why there was no connection
        return response.status_code, response.headers, response.content[: limit + 1]


async def _only_sent(request: Request) -> None:
    for name in set(request.headers) - SENT:
        del request.headers[name]
