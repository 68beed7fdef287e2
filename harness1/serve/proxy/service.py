"""The proxy without a socket: a request in, a recorded call, a reply in the provider's own form out."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from harness1.config import Config
from harness1.errors import InfrastructureFault, Refusal, UsageError
from harness1.redaction import without_secrets
from harness1.serve.proxy.anthropic_dialect import ANTHROPIC
from harness1.serve.proxy.chat import ChatReply, Spelled, decoded
from harness1.serve.proxy.dialect import Dialect
from harness1.serve.proxy.memory import Memory
from harness1.serve.proxy.openai_dialect import OPENAI
from harness1.serve.proxy.record import ABANDONED, RecordedCall, Recorder
from harness1.serve.proxy.sessions import clean_name, fresh_session, session_of
from harness1.serve.proxy.upstream import Answered, Upstream
from harness1.serve.server import Request
from harness1.serve.service import Gate, Refused, Reply, ServiceLimits

DIALECTS = {"/v1/chat/completions": OPENAI, "/v1/messages": ANTHROPIC}
JSON = {"Content-Type": "application/json"}
MOST_IDS = 1 << 31
EVENTS = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}


def proxy_limits(config: Config) -> ServiceLimits:
    """What a proxy takes on: as many calls at a time as its upstream, and each for so long."""
    model = config.machine.model
    return ServiceLimits(
        body_bytes=32 << 20,
        body_s=30.0,
        running=model.concurrency,
        waiting=1024,
        wait_s=model.timeout_s,
        deadline_s=model.timeout_s,
    )


class ProxyService:
    """Answers the calls of all agents, and records every one before its answer leaves.

    A record that cannot be written ends the work: from then on every call is refused.
    """

    def __init__(
        self, upstream: Upstream, recorder: Recorder, limits: ServiceLimits, memory: Memory | None = None
    ) -> None:
        self.limits = limits
        self._upstream, self._recorder, self._memory = upstream, recorder, memory or Memory()
        self._gate = Gate(limits)
        self._broken = ""

    async def answer(self, request: Request) -> Reply:
        """Carry out one request."""
        dialect = DIALECTS.get(request.path)
        try:
            if dialect is None:
                return await self._about(request)
            if request.method != "POST":
                raise Refused(405, f"{request.path} takes POST, not {request.method}", {"Allow": "POST"})
            if self._broken:
                raise Refused(503, self._broken)
            return await self._called(dialect, request)
        except Refused as refused:
            return _failure(dialect or OPENAI, refused)

    async def _about(self, request: Request) -> Reply:
        paths = ("/v1/models", "/health")
        if request.path not in paths:
            raise Refused(404, f"there is no {request.path} here, but {', '.join([*DIALECTS, *paths])}")
        if request.method != "GET":
            raise Refused(405, f"{request.path} takes GET, not {request.method}", {"Allow": "GET"})
        if request.path == "/health":
            return Reply(200, b'{"status":"ok"}', JSON)
        try:
            return Reply(200, msgspec.json.encode(_listed(await self._upstream.models())), JSON)
        except InfrastructureFault as error:
            raise Refused(502, str(error)) from error

    async def _called(self, dialect: Dialect, request: Request) -> Reply:
        """One call from its arrival to its record."""
        headers = {name.lower(): value for name, value in request.headers.items()}
        session = session_of(headers, request.query)
        retries = headers.get("x-stainless-retry-count", "")[:6]
        call = _Call(
            RecordedCall(
                call_id=secrets.token_hex(12),
                session_id=session or fresh_session(),
                dialect=dialect.name,
                agent_id=clean_name(headers.get("x-agent-id", "")),
                attempt=int(retries) if retries.isascii() and retries.isdigit() else 0,
                t_arrived=time.time(),
            ),
            named=session is not None,
        )
        try:
            reply = await self._carried_out(dialect, request, call)
            call.note(status=200)
        except Refused as refused:
            reply = call.failed(dialect, refused)
        except (UsageError, Refusal) as error:
            reply = call.failed(dialect, Refused(400, without_secrets(str(error))))
        except InfrastructureFault as error:
            reply = call.failed(dialect, Refused(502, without_secrets(str(error))))
        except BaseException as error:
            gone = isinstance(error, asyncio.CancelledError)
            why = (
                "given up before the answer: the client left, or the proxy ended"
                if gone
                else f"{type(error).__name__}: {error}"
            )
            call.note(status=ABANDONED if gone else 500, error=why)
            self._record(call)
            raise
        self._record(call)
        return reply

    async def _carried_out(self, dialect: Dialect, request: Request, call: _Call) -> Reply:
        async with self._gate:
            body = decoded(await request.read())
            asked = dialect.read(body)
            call.note(model=asked.model)
            if not call.named and (owner := self._memory.owner(asked.messages)):
                call.note(session_id=owner)
            session = call.record.session_id
            ready = self._upstream.prepare(
                dialect, body, asked, lambda past, message: self._memory.recall(session, past, message)
            )
            call.note(prompt_ids=ready.prompt_ids, sampling=ready.sampling, request=ready.body, t_start=time.time())
            try:
                async with asyncio.timeout(self.limits.deadline_s):
                    answered = _with_ids_that_are(await self._upstream.answer(ready, call.record.call_id))
            except TimeoutError as error:
                raise Refused(504, f"no answer within {self.limits.deadline_s:g} s") from error
        call.note_answer(answered)
        reply = msgspec.structs.replace(
            answered.reply,
            model=asked.model,
            created=int(call.record.t_arrived),
            tokens=_spelled(answered) if asked.token_ids else None,
        )
        if ready.past is not None and answered.output_ids:
            self._memory.remember(session, ready.past, reply, answered.output_ids)
        return _success(dialect, reply, asked.stream, asked.stream_usage)

    def _record(self, call: _Call) -> None:
        """
        Raises:
            Refused: the disk does not take it; the answer is kept back, too.
        """
        call.note(t_end=time.time())
        try:
            self._recorder.append(call.record)
        except OSError as error:
            self._broken = f"the record cannot be written: {error.strerror}"
            raise Refused(503, self._broken) from error


class _Call:
    """A call under way: its record grows, so that a failure leaves what was known by then."""

    def __init__(self, record: RecordedCall, named: bool) -> None:
        self.record, self.named = record, named

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

    def failed(self, dialect: Dialect, refused: Refused) -> Reply:
        """Note a failure; gives what the agent is told."""
        self.note(status=refused.reply.status, error=str(refused))
        return _failure(dialect, refused)


def _with_ids_that_are(answered: Answered) -> Answered:
    """An answer without its ids if one of them is none: no record and no memory could hold it."""
    ids = answered.prompt_ids + answered.output_ids
    if not ids or (min(ids) >= 0 and max(ids) < MOST_IDS):
        return answered
    reason = "the upstream gives token ids that are none"
    return msgspec.structs.replace(answered, prompt_ids=(), output_ids=(), output_logprobs=None, untrainable=reason)


def _spelled(answered: Answered) -> Spelled:
    return Spelled(answered.prompt_ids, answered.output_ids, answered.output_logprobs)


def _success(dialect: Dialect, reply: ChatReply, stream: bool, usage: bool) -> Reply:
    if stream:
        return Reply(200, dialect.stream(reply, usage), EVENTS)
    return Reply(200, msgspec.json.encode(dialect.whole(reply)), JSON)


def _failure(dialect: Dialect, refused: Refused) -> Reply:
    status = refused.reply.status
    return Reply(status, msgspec.json.encode(dialect.error(status, str(refused))), {**refused.reply.headers, **JSON})


def _listed(names: Sequence[str]) -> dict[str, Any]:
    """A list of models that the clients of both providers read."""
    when = {"created": 0, "created_at": "1970-01-01T00:00:00Z"}
    data = [
        {"id": name, "object": "model", "type": "model", "display_name": name, "owned_by": "harness1", **when}
        for name in names
    ]
    return {"object": "list", "data": data, "has_more": False}
