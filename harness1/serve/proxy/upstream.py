"""What answers the calls of a proxy: a model whose tokens are sampled here, or a chat server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from harness1.models.backend import Grammar
from harness1.models.formats.chat_format import Ids
from harness1.records import Record, Sampling, ToolCall
from harness1.serve.proxy.chat import ChatReply, ChatRequest
from harness1.serve.proxy.dialect import Dialect
from harness1.serve.proxy.memory import Past
from harness1.serve.proxy.rendering import Recall
from harness1.tools.tool import ToolSpec


class Asked(Record, kw_only=True):
    """A call made ready for the upstream: ids, or a body to forward."""

    sampling: Sampling
    prompt_ids: Ids = ()
    past: Past | None = None
    """What the output will stand behind; None where no ids of it can be shown again."""
    tools: tuple[ToolSpec, ...] = ()
    grammar: Grammar | None = None
    one_call: bool = False
    body: dict[str, Any] | None = None
    untrainable: str | None = None
    """Why its tokens are no example, where that is known before."""


class Answered(Record, kw_only=True):
    """What came of it. `reply` is still without the names that the service gives it; `untrainable` says what its
    tokens lack."""

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
    """As a server gave it."""


class Upstream(Protocol):
    """What a proxy stands before. `inputs` go into the card of the record: what decides the answers."""

    @property
    def inputs(self) -> dict[str, Any]: ...

    async def models(self) -> Sequence[str]:
        """The names of what is served.

        Raises:
            InfrastructureFault: it does not say.
        """
        ...

    def prepare(self, dialect: Dialect, body: Mapping[str, Any], request: ChatRequest, recall: Recall) -> Asked:
        """Make a call ready.

        Raises:
            Refused: it asks for something that this upstream cannot do.
            UsageError: so it does, as a part of the package found.
        """
        ...

    async def answer(self, asked: Asked, call_id: str) -> Answered:
        """Carry it out; cancelling it ends it.

        Raises:
            InfrastructureFault: the upstream failed.
            Refusal: it refuses this call for good.
            UsageError: it refuses every call, or a part of the package refuses this one.
        """
        ...
