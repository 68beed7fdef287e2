"""A connection of the server on which every failure is JSON, those included that aiohttp answers by itself."""

from __future__ import annotations

import msgspec
from aiohttp import web

from harness1.retrieval.wire import Failure

FAILED = 400
"""The first status that says that a request failed."""


class Connection(web.RequestHandler):
    """Answers a request that is no HTTP, and an exception that nobody foresaw, with a `Failure` that says the status in
    words and nothing of what is inside. The traceback goes to the log of aiohttp (`aiohttp.server`).
    """

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Send a response, in place of one that failed without JSON a `Failure`, and close the connection then."""
        if resp.status >= FAILED and resp.content_type != "application/json":
            body = msgspec.json.encode(Failure(resp.reason))
            resp = web.Response(status=resp.status, body=body, content_type="application/json")
            resp.force_close()
        return await super().finish_response(request, resp, start_time)
