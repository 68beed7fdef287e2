"""The proxy: it finds the session of a call, records the call, and replies in the form of the provider."""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from harness1.config import Config
from harness1.errors import InfrastructureFault, Refusal, UsageError, is_unconnected
from harness1.plain import text_digest, without_secrets
from harness1.retrieval.sharing import Batcher
from harness1.rows.calls import ABANDONED, RecordedCall
from harness1.serve.anthropic_dialect import ANTHROPIC
from harness1.serve.chat import Dialect, Memory, Spelled, decode_body
from harness1.serve.openai_dialect import OPENAI
from harness1.serve.service import Access, Bodies, Gate, Json, Refused, ServiceLimits, application
from harness1.serve.upstreams import Answered, Asked, Upstream

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
"""Keys that are plainly names, as `episode-17` and `run_3.task-12`: at most 40 characters, words of at most 12 letters
in one case (the first may be a capital) and numbers of at most 6 digits, between hyphens, underscores and full stops; a
word may end with a number, of at most 10 characters together. A key that begins with `sk-` is not a name."""
LONGEST_NAME = 128
_UNFIT = re.compile(r"[^\w.:@/+=-]", re.ASCII)


def session_of(headers: Mapping[str, str], query: Mapping[str, str]) -> str | None:
    """Return the session that a request names in a header, its query or its key; None if it does not name one.

    A key that is not plainly a name (`NAMES`) may be a real one, which must not be recorded, so its digest is used.

    Args:
        headers: by names in lower case.
    """
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


def fresh_session() -> str:
    """Return a name for a session without one."""
    return f"anonymous-{secrets.token_hex(8)}"


DIALECTS = {"/v1/chat/completions": OPENAI, "/v1/messages": ANTHROPIC}
MOST_IDS = 1 << 31
LONG = 64 << 10
"""Characters of a prompt from which it is tokenised beside the event loop."""
Admit = Callable[[str | None], AbstractContextManager[object]]
EVENTS = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}


def proxy_limits(config: Config) -> ServiceLimits:
    """Return the limits of a proxy: the concurrency and the timeout of its upstream."""
    model = config.machine.model
    return ServiceLimits(
        body_bytes=32 << 20,
        body_s=30.0,
        bodies_bytes=512 << 20,
        running=model.concurrency,
        waiting=1024,
        wait_s=model.timeout_s,
        deadline_s=model.timeout_s,
    )


class Keeps(Protocol):
    """Keeps finished calls, as `Recorder` does; raises OSError if it cannot."""

    def append(self, call: RecordedCall) -> None: ...


class ProxyService:
    """Answer the calls of all agents, and record each before its answer is sent.

    If a record cannot be written, all further calls are refused.

    Args:
        admit: entered for each call with the session that it names, None if it names none; what raises Refused there is
            not recorded.
    """

    def __init__(
        self,
        upstream: Upstream,
        recorder: Keeps,
        limits: ServiceLimits,
        memory: Memory | None = None,
        access: Access | None = None,
        admit: Admit = lambda _: nullcontext(),
    ) -> None:
        self.limits, self._admit = limits, admit
        self._upstream, self._recorder, self._memory = upstream, recorder, memory or Memory()
        self._gate, self._bodies = Gate(limits), Bodies(limits)
        self._tokenising: Batcher[Callable[[], Asked], Asked] = Batcher(
            lambda calls: [call() for call in calls], 0.0, 1
        )
        self._broken = ""
        posts = {path: partial(self._call, dialect) for path, dialect in DIALECTS.items()}
        self.app = application(posts, {"/v1/models": self._models}, _failure, (access or Access()).check)

    async def _models(self, _: Request) -> Response:
        """List the models for the clients of both providers."""
        try:
            names = await self._upstream.models()
        except InfrastructureFault as error:
            raise Refused(502, str(error)) from error
        common = {"owned_by": "harness1", "created": 0, "created_at": "1970-01-01T00:00:00Z"}
        data = [{"id": name, "object": "model", "type": "model", "display_name": name, **common} for name in names]
        return Json({"object": "list", "data": data, "has_more": False})

    async def _call(self, dialect: Dialect, request: Request) -> Response:
        """Carry out one call, from its arrival to its record."""
        if self._broken:
            raise Refused(503, self._broken)
        session = session_of(request.headers, request.query_params)
        retries = request.headers.get("x-stainless-retry-count", "")[:6]
        with self._admit(session):
            call = _Call(
                RecordedCall(
                    call_id=secrets.token_hex(12),
                    session_id=session or fresh_session(),
                    dialect=dialect.name,
                    agent_id=clean_name(request.headers.get("x-agent-id", "")),
                    attempt=int(retries) if retries.isascii() and retries.isdigit() else 0,
                    t_arrived=time.time(),
                )
            )
            try:
                async with self._bodies.read(request) as sent, self._gate:
                    response = await self._answer(dialect, sent, call, named=session is not None)
                call.note(status=200)
            except BaseException as error:
                if (refused := call.note_failure(error)) is not None:
                    raise refused from error
                raise
            finally:
                call.note(t_end=time.time())
                try:
                    self._recorder.append(call.record)
                except OSError as error:
                    self._broken = f"the record cannot be written: {error.strerror}"
                    raise Refused(503, self._broken) from error
            return response

    async def _answer(self, dialect: Dialect, sent: bytes, call: _Call, *, named: bool) -> Response:
        body = decode_body(sent)
        asked = dialect.read(body)
        call.note(model=asked.model)
        if not named and (owner := self._memory.owner(asked.messages)):
            call.note(session_id=owner)
        session, most = call.record.session_id, self.limits.prompt_characters
        if (characters := asked.characters()) > most:
            raise Refused(400, f"messages and tools of {characters} characters; at most {most} are read")
        recall = partial(self._memory.recall, session)
        prepare = partial(self._upstream.prepare, dialect, body, asked, recall)
        ready = prepare() if characters < LONG else (await self._tokenising.submit([prepare]))[0]
        call.note(prompt_ids=ready.prompt_ids, sampling=ready.sampling, request=ready.body, t_start=time.time())
        try:
            async with asyncio.timeout(self.limits.deadline_s):
                answered = _with_valid_ids(await self._upstream.answer(ready, call.record.call_id))
        except TimeoutError as error:
            raise Refused(504, f"no answer within {self.limits.deadline_s:g} s") from error
        call.note_answer(answered)
        spelled = Spelled(answered.prompt_ids, answered.output_ids, answered.output_logprobs)
        made = {"model": asked.model, "created": int(call.record.t_arrived)}
        reply = msgspec.structs.replace(answered.reply, **made, tokens=spelled if asked.token_ids else None)
        if ready.past is not None and answered.output_ids:
            self._memory.remember(session, ready.past, reply, answered.output_ids)
        if asked.stream:
            return Response(dialect.stream(reply, asked.stream_usage), headers=EVENTS)
        return Json(dialect.write(reply))


class _Call:
    """A call in progress. Its record grows, so that a failed call is recorded as far as it got."""

    def __init__(self, record: RecordedCall) -> None:
        self.record = record

    def note(self, **changes: Any) -> None:
        self.record = msgspec.structs.replace(self.record, **changes)

    def note_answer(self, answered: Answered) -> None:
        self.note(
            prompt_ids=answered.prompt_ids,
            output_ids=answered.output_ids,
            output_logprobs=answered.output_logprobs,
            version_start=answered.version_start,
            version_end=answered.version_end,
            finish_reason=answered.finish_reason,
            actions=answered.actions,
            untrainable=answered.untrainable,
            request=self.record.request if answered.untrainable else None,
            reply=answered.message if answered.untrainable else None,
        )

    def note_failure(self, error: BaseException) -> Refused | None:
        """Record why the call failed; return the answer to the agent if the error is not one itself."""
        status, why, refused = 500, f"{type(error).__name__}: {error}", None
        match error:
            case asyncio.CancelledError():
                status, why = ABANDONED, "abandoned before the answer: the client left, or the proxy ended"
            case Refused():
                status, why = error.status_code, error.detail
            case UsageError() | InfrastructureFault():
                blamed = isinstance(error, UsageError | Refusal) and not is_unconnected(error)
                status = 400 if blamed else 502
                why = without_secrets(str(error))
                refused = Refused(status, why)
        self.note(status=status, error=why)
        return refused


def _with_valid_ids(answered: Answered) -> Answered:
    """Return an answer without its ids if one is invalid, because neither record nor memory could store it."""
    ids = answered.prompt_ids + answered.output_ids
    if not ids or (min(ids) >= 0 and max(ids) < MOST_IDS):
        return answered
    reason = "the upstream returns invalid token ids"
    return msgspec.structs.replace(answered, prompt_ids=(), output_ids=(), output_logprobs=None, untrainable=reason)


def _failure(path: str, status: int, message: str) -> dict[str, Any]:
    return DIALECTS.get(path, OPENAI).error(status, message)
