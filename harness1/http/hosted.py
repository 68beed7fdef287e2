"""Hosted models, asked by the client library of OpenAI."""

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
"""Headers that leave this machine. The library would also send those of environment variables, which may be keys for
another server, and tell what machine this is."""


class HostedClient(HttpClient):
    """`HttpClient` over `openai.AsyncOpenAI`, which sends by our session.

    Its retries are off and its answers are taken as bytes: how long to wait, and what counts as an answer, is decided
    by the callers of this package.

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
        session.event_hooks = {"request": [_only_sent]}
        ours: Any = session  # openai 2 takes a client of httpx, and openai 3 one of httpx2 or httpx
        return self._openai.AsyncOpenAI(base_url=self.url, api_key="in our session", http_client=ours, max_retries=0)

    async def exchange(
        self, path: str, body: bytes | None, limit: int, headers: Mapping[str, str] | None = None
    ) -> tuple[int, Mapping[str, str], bytes]:
        """As `HttpClient.exchange`, but that the whole answer is read before it is cut."""
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
            raise error.__cause__ or error from None
        return response.status_code, response.headers, response.content[: limit + 1]


async def _only_sent(request: Request) -> None:
    for name in set(request.headers) - SENT:
        del request.headers[name]
