"""The proxy: it finds the session of a call, records the call, and replies in the form of the provider."""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from harness1.config import Config
from harness1.errors import InfrastructureFault, Refusal, UsageError, is_unconnected
from harness1.http.model_endpoint import LEAST_REQUESTS
from harness1.plain import text_digest, without_secrets
from harness1.retrieval.sharing import Batcher
from harness1.rows.calls import ABANDONED, RecordedCall
from harness1.serve.anthropic_dialect import ANTHROPIC
from harness1.serve.chat import ChatRequest, Dialect, Memory, decode_body
from harness1.serve.openai_dialect import OPENAI
from harness1.serve.responses_dialect import RESPONSES, Responses
from harness1.serve.service import Access, Bodies, Gate, Json, Refused, ServiceLimits, application
from harness1.serve.upstreams import Upstream

Made = TypeVar("Made")
HEADERS = ("x-session-id", "x-harness-session")
QUERY = "session"
PLACEHOLDERS = re.compile(
    r"\W*|[x*.]+|(sk-)?(1234|anything|changeme|dummy|empty|fake|key|local|none?|null|placeholder|secret|test|token|unused)"
    r"|na|(your|my|no|sk-no)?[-_]?(api)?[-_]?key([-_]?(here|required))?|not[-_](needed|used|required|set)",
    re.IGNORECASE,
)
"""Placeholder keys, which people write where a client insists on a key."""
_WORD = r"([A-Z]?[a-z]{1,11}|[A-Z]{1,12}|([A-Z]?[a-z]{1,6}|[A-Z]{1,6})\d{1,4}|\d{1,6})"
NAMES = re.compile(rf"(?=.{{1,40}}$)(?!sk[-_]){_WORD}([-_.]{_WORD})*", re.ASCII)
"""Keys that are plainly names, as `episode-17` and `run_3.task-12`: short words in one case, and short numbers."""
LONGEST_NAME = 128
_UNFIT = re.compile(r"[^\w.:@/+=-]", re.ASCII)


def session_of(headers: Mapping[str, str], query: Mapping[str, str]) -> str | None:
    """Return the session that a request names in a header (by its name in lower case), its query or its key; None if it
    does not. A key that is not plainly a name (`NAMES`) may be real and must not be recorded: its digest is used."""
    named = [headers.get(name, "") for name in HEADERS] + [query.get(QUERY, "")]
    if found := next((name.strip() for name in named if name.strip()), None):
        return clean_name(found)
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    key = bearer.strip() if scheme.lower() == "bearer" else ""
    key = key or headers.get("x-api-key", "").strip()
    if not key or PLACEHOLDERS.fullmatch(key):
        return None
    return key if NAMES.fullmatch(key) else f"key-{text_digest(key)}"


def clean_name(name: str) -> str:
    """Return a name with plain characters and bounded length; a digest distinguishes names that had to change."""
    plain = _UNFIT.sub("_", name)[:LONGEST_NAME]
    return plain if plain == name else f"{plain[:96]}~{text_digest(name)}"


COUNT = "/v1/messages/count_tokens"
DIALECTS = {"/v1/chat/completions": OPENAI, "/v1/responses": RESPONSES, "/v1/messages": ANTHROPIC}
RECORDED = (
    *("prompt_ids", "output_ids", "output_logprobs", "version_start", "version_end"),
    *("finish_reason", "actions", "untrainable"),
)
"""What a record takes from an answer."""
MOST_IDS = 1 << 31
LONG = 64 << 10
"""Bytes of a body from which its prompt is tokenised beside the event loop, also one of many empty messages."""
EVENTS = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}


def proxy_limits(config: Config) -> ServiceLimits:
    """Return the limits of a proxy: the concurrency and the timeout of its upstream."""
    at_once, seconds = max(LEAST_REQUESTS, config.machine.concurrency), config.machine.model.timeout_s
    sizes = {"body_bytes": 32 << 20, "bodies_bytes": 512 << 20}
    return ServiceLimits(**sizes, body_s=30.0, running=at_once, wait_s=seconds, deadline_s=seconds)


class ProxyService:
    """Answers the calls of all agents. `keep` records each before its answer is sent; once it raises OSError, all
    further calls are refused. `admit` is entered with the session that a call names; what raises Refused there is not
    recorded."""

    def __init__(
        self,
        upstream: Upstream,
        keep: Callable[[RecordedCall], object],
        limits: ServiceLimits,
        access: Access | None = None,
        admit: Callable[[str | None], AbstractContextManager[object]] = lambda _: nullcontext(),
    ) -> None:
        self.limits, self._admit = limits, admit
        self._upstream, self._keep, self._memory, self._responses = upstream, keep, Memory(), Responses()
        self._gate, self._bodies = Gate(limits), Bodies(limits)
        self._tokenising: Batcher[Callable[[], Any], Any] = Batcher(lambda calls: [call() for call in calls], 0.0, 1)
        self._broken = ""
        posts = {path: partial(self._call, dialect) for path, dialect in DIALECTS.items()} | {COUNT: self._count}
        forms = DIALECTS | {COUNT: ANTHROPIC}
        failure = lambda path, status, reason: forms.get(path, OPENAI).error(status, reason)  # noqa: E731
        self.app = application(posts, {"/v1/models": self._models}, failure, (access or Access()).check)

    async def _models(self, _: Request) -> Response:
        try:
            names = await self._upstream.models()
        except InfrastructureFault as error:
            raise Refused(502, str(error)) from error
        common = {"owned_by": "harness1", "created": 0, "created_at": "1970-01-01T00:00:00Z"}
        data = [{"id": name, "object": "model", "type": "model", "display_name": name, **common} for name in names]
        return Json({"object": "list", "data": data, "has_more": False})

    async def _count(self, request: Request) -> Response:
        """Tell how long the prompt of a call would be. Nothing is sampled and nothing recorded, but it counts as a call
        of its session."""
        with self._admit(session_of(request.headers, request.query_params)):
            async with self._bodies.read(request) as sent, self._gate:
                asked = ANTHROPIC.read(decode_body(sent))
                self._measure(asked)
                return Json({"input_tokens": await self._tokenise(partial(self._upstream.count, asked), len(sent))})

    def _measure(self, asked: ChatRequest) -> None:
        if (characters := asked.characters()) > (most := self.limits.prompt_characters):
            raise Refused(400, f"messages and tools of {characters} characters; at most {most} are read")

    async def _tokenise(self, work: Callable[[], Made], size: int) -> Made:
        """Do what tokenises a body of so many bytes, beside the event loop if that takes long."""
        if size < LONG:
            return work()
        made: Made = (await self._tokenising.submit([work]))[0]
        return made

    async def _call(self, dialect: Dialect, request: Request) -> Response:
        """Carry out one call, from its arrival to its record, which grows with it: a failed call is recorded as far as
        it got."""
        if self._broken:
            raise Refused(503, self._broken)
        session = session_of(request.headers, request.query_params)
        retries = request.headers.get("x-stainless-retry-count", "")[:6]
        with self._admit(session):
            record: dict[str, Any] = {
                "call_id": secrets.token_hex(12),
                "session_id": session or f"anonymous-{secrets.token_hex(8)}",
                "dialect": dialect.name,
                "agent_id": clean_name(request.headers.get("x-agent-id", "")),
                "attempt": int(retries) if retries.isascii() and retries.isdigit() else 0,
                "t_arrived": time.time(),
            }
            try:
                async with self._bodies.read(request) as sent, self._gate:
                    response = await self._answer(dialect, sent, record, named=session is not None)
                record["status"] = 200
            except BaseException as error:
                record["status"], record["error"] = _blame(error)
                if isinstance(error, UsageError | InfrastructureFault):
                    raise Refused(record["status"], record["error"]) from error
                raise
            finally:
                record["t_end"] = time.time()
                try:
                    self._keep(RecordedCall(**record))
                except OSError as error:
                    self._broken = f"the record cannot be written: {error.strerror}"
                    raise Refused(503, self._broken) from error
            return response

    async def _answer(self, dialect: Dialect, sent: bytes, record: dict[str, Any], *, named: bool) -> Response:
        body, given = decode_body(sent), list[bytes]()
        if dialect is RESPONSES:
            if not named and (owner := self._responses.owner(body)):
                record["session_id"], named = owner, True
            body, given = self._responses.expand(body, record["session_id"])
        asked = dialect.read(body)
        record["model"] = asked.model
        if not named and (owner := self._memory.owner(asked.messages)):
            record["session_id"] = owner
        session = record["session_id"]
        self._measure(asked)
        recall = partial(self._memory.recall, session)
        ready = await self._tokenise(partial(self._upstream.prepare, dialect, body, asked, recall), len(sent))
        record |= {"prompt_ids": ready.prompt_ids, "sampling": ready.sampling, "request": ready.body}
        record |= {"unmet": ready.unmet, "t_start": time.time()}
        try:
            async with asyncio.timeout(self.limits.deadline_s):
                answered = await self._upstream.answer(ready, record["call_id"])
        except TimeoutError as error:
            raise Refused(504, f"no answer within {self.limits.deadline_s:g} s") from error
        ids = answered.prompt_ids + answered.output_ids
        if ids and (min(ids) < 0 or max(ids) >= MOST_IDS):  # which neither record nor memory could store
            none: dict[str, Any] = {"prompt_ids": (), "output_ids": (), "output_logprobs": None}
            reason = "the upstream returns invalid token ids"
            answered = msgspec.structs.replace(answered, **none, untrainable=reason)
        record |= {name: getattr(answered, name) for name in RECORDED}
        record["unmet"] = ready.unmet | answered.unmet
        record["request"] = ready.body if answered.untrainable else None
        record["reply"] = answered.message if answered.untrainable else None
        reply = msgspec.structs.replace(answered.reply, model=asked.model, created=int(record["t_arrived"]))
        if ready.past is not None and answered.output_ids:
            self._memory.remember(session, ready.past, reply, answered.output_ids)
        if dialect is RESPONSES:
            self._responses.keep(body, given, session, reply)
        if asked.stream:
            return Response(dialect.stream(reply, asked.stream_usage), headers=EVENTS)
        return Json(dialect.write(reply))


def _blame(error: BaseException) -> tuple[int, str]:
    match error:
        case asyncio.CancelledError():
            return ABANDONED, "abandoned before the answer: the client left, or the proxy ended"
        case Refused():
            return error.status_code, error.detail
        case UsageError() | InfrastructureFault():
            blamed = isinstance(error, UsageError | Refusal) and not is_unconnected(error)
            return 400 if blamed else 502, without_secrets(str(error))
    return 500, f"{type(error).__name__}: {error}"
