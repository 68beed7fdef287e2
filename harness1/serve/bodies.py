"""Bodies of requests: JSON, inflated in small steps, bounded each and all together.

A body is read before its call takes a place in the line, so that nobody but its own client waits for a slow one.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncGenerator

from starlette.requests import Request

from harness1.serve.service import RETRY_AFTER, Refused, ServiceLimits

JSON = "application/json"
CODINGS = ("gzip", "x-gzip", "deflate")
GZIP_OR_ZLIB = 47
"""The window bits with which zlib detects the compression of a body."""
STEP = 128 << 10
"""Bytes that are inflated between two turns of the event loop."""
SMALL = 64 << 10
"""Bytes of a body that need no room: every connection may send as much."""
PRESSED_S = 2.0
"""Time after which a body that is still arriving is refused if others need its room, the slowest first."""


class Bodies:
    """Reads the bodies of a service's calls and bounds the bytes of those that are not answered yet."""

    def __init__(self, limits: ServiceLimits) -> None:
        self._limits = limits
        self._large: set[Body] = set()
        self._held = 0

    async def read(self, request: Request) -> Body:
        """Read the body of a request, decompressed if necessary; it counts until it is closed as a context.

        The size limit is here because Starlette's own answers in plain text.

        Raises:
            Refused: the body is too large (413), too slow (408), damaged (400), not JSON or in an unknown encoding
                (415), or there is no room for it (503).
        """
        coding, body = _coding(request), Body(self)
        try:
            async with asyncio.timeout(self._limits.body_s) as body.time:
                async for part in _inflated(request.stream()) if coding else request.stream():
                    if part:
                        self._add(part, body)
            body.time = None
        except BaseException as error:
            self.forget(body)
            if isinstance(error, TimeoutError):
                limit = f"within {self._limits.body_s:g} s, or others needed its room"
                raise Refused(408, f"the body did not arrive {limit}") from error
            if isinstance(error, zlib.error):
                raise Refused(400, f"the body cannot be read: {error}") from error
            raise
        return body

    def _add(self, part: bytes, body: Body) -> None:
        body.content += part
        body.size += len(part)
        if body in self._large:
            self._held += len(part)
        elif body.size > SMALL:
            self._held += body.size
            self._large.add(body)
        if body.size > self._limits.body_bytes:
            raise Refused(413, f"the body is larger than {self._limits.body_bytes} bytes")
        if body in self._large and self._held > self._limits.bodies_bytes:
            self._make_room()

    def _make_room(self) -> None:
        """Refuse slow bodies until the rest fits; raise Refused if it still does not."""
        for slow in sorted((each for each in self._large if each.slow), key=Body.pace):
            if self._held > self._limits.bodies_bytes and slow.time is not None:
                slow.time.reschedule(slow.began)
                self.forget(slow)
        if self._held > self._limits.bodies_bytes:
            raise Refused(503, "too many large bodies are arriving", RETRY_AFTER)

    def forget(self, body: Body) -> None:
        """Stop counting a body."""
        if body in self._large:
            self._large.discard(body)
            self._held -= body.size


class Body:
    """A body, which counts until its context ends; `time` is its time limit, None once it is complete."""

    def __init__(self, bodies: Bodies) -> None:
        self.content, self.size, self.began = bytearray(), 0, asyncio.get_running_loop().time()
        self.time: asyncio.Timeout | None = None
        self._bodies = bodies

    def __enter__(self) -> bytes:
        content = bytes(self.content)
        self.content.clear()
        return content

    def __exit__(self, *_: object) -> None:
        self._bodies.forget(self)

    @property
    def age(self) -> float:
        return asyncio.get_running_loop().time() - self.began

    @property
    def slow(self) -> bool:
        return self.time is not None and not self.time.expired() and self.age > PRESSED_S

    def pace(self) -> float:
        return self.size / self.age


def _coding(request: Request) -> str:
    """Return the compression of a body, "" for none; raise Refused if it cannot be read here."""
    kind, coding = "", ""
    for name, value in request.scope["headers"]:
        if name == b"content-type":
            kind = value.decode("latin-1")
        elif name == b"content-encoding":
            coding = value.decode("latin-1").strip().lower()
    if kind != JSON and (kind := kind.partition(";")[0].strip().lower()) != JSON:
        raise Refused(415, f"bodies are JSON: send Content-Type: {JSON}, not {kind[:100] or 'none'}")
    if coding in ("", "identity"):
        return ""
    if coding not in CODINGS:
        raise Refused(415, f"bodies are compressed by {', '.join(CODINGS)} or not at all, not by {coding[:100]}")
    return coding


async def _inflated(parts: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    """Yield a compressed body in pieces of at most `STEP` bytes."""
    inflater = zlib.decompressobj(GZIP_OR_ZLIB)
    async for part in parts:
        while part or not inflater.eof:
            inflated = inflater.decompress(part, STEP)
            yield inflated
            part = inflater.unconsumed_tail
            if inflater.unused_data:
                raise zlib.error("something follows the end of the compressed data")
            if len(inflated) == STEP:
                await asyncio.sleep(0)
            elif not part:
                break
    if not inflater.eof:
        raise zlib.error("the compressed data is incomplete")
