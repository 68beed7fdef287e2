"""The protocol of upstreams, which answer the calls of a proxy: a model sampled by token ids, or a chat server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from harness1.models.backend import Grammar
from harness1.models.chat_format import Ids
from harness1.records import Record, Sampling, ToolCall
from harness1.serve.proxy.chat import ChatReply, ChatRequest
from harness1.serve.proxy.dialect import Dialect
from harness1.serve.proxy.memory import Past
from harness1.serve.proxy.rendering import Recall
from harness1.tools.tool import ToolSpec


class Asked(Record, kw_only=True):
    """A call prepared for the upstream: ids, or a body to forward."""

    sampling: Sampling
    prompt_ids: Ids = ()
    past: Past | None = None
    """The messages before the output; None if its ids cannot be reused."""
    tools: tuple[ToolSpec, ...] = ()
    grammar: Grammar | None = None
    one_call: bool = False
    body: dict[str, Any] | None = None
    untrainable: str | None = None
    """The reason why its tokens cannot be trained on, if known already."""


class Answered(Record, kw_only=True):
    """The result of a call. The service completes `reply`; `untrainable` is the reason why its tokens cannot be trained
    on."""

    reply: ChatReply
    prompt_ids: Ids = ()
    output_ids: Ids = ()
    output_logprobs: tuple[float, ...] | None = None
    version_start: int = 0
    version_end: int = 0
    finish_reason: str = ""
    actions: tuple[ToolCall, ...] = ()
    untrainable: str | None = None
    message: dict[str, Any] | None = None
    """The message as the server returned it."""


class Upstream(Protocol):
    """Answers the calls of a proxy. `inputs`, which determine the answers, go into the card of the record."""

    @property
    def inputs(self) -> dict[str, Any]: ...

    async def models(self) -> Sequence[str]:
        """Return the names of the served models; raise InfrastructureFault if the upstream does not list them."""
        ...

    def prepare(self, dialect: Dialect, body: Mapping[str, Any], request: ChatRequest, recall: Recall) -> Asked:
        """Prepare a call; raise Refused or UsageError if the upstream cannot do what the call asks for."""
        ...

    async def answer(self, asked: Asked, call_id: str) -> Answered:
        """Execute a call; it can be cancelled.

        Raises:
            InfrastructureFault: the upstream failed.
            Refusal: it refuses this call permanently.
            UsageError: it refuses every call, or the package refuses this one.
        """
        ...
