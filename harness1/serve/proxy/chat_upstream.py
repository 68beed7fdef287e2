"""A chat server as upstream: OpenAI's route, with token ids and log probabilities where the server gives them.

vLLM does (`return_token_ids`); it must be started with `--logprobs-mode processed_logprobs`, or its log probabilities
are those of another distribution than it samples from unless the temperature is 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from harness1.config import Config
from harness1.errors import InfrastructureFault
from harness1.http_client import HttpClient, HttpFault
from harness1.model_endpoint import ModelEndpoint
from harness1.policy.sampled import LEAST, ROUNDING
from harness1.records import Sampling, ToolCall
from harness1.serve.proxy.chat import Called, ChatReply, ChatRequest, Finish, refuse_unsupported
from harness1.serve.proxy.dialect import Dialect
from harness1.serve.proxy.openai_dialect import ONE_OUTPUT, OPENAI, body_of
from harness1.serve.proxy.rendering import Recall
from harness1.serve.proxy.upstream import Answered, Asked

FINISHES: dict[str, Finish] = {"length": "length", "tool_calls": "tool_calls", "function_call": "tool_calls"}
"""Every other reason of an end counts as `stop`."""


class _Function(msgspec.Struct):
    name: str
    arguments: str = "{}"


class _Call(msgspec.Struct):
    id: str
    function: _Function


class _Message(msgspec.Struct, omit_defaults=True):
    content: str | None = None
    tool_calls: list[_Call] | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class _Logprob(msgspec.Struct):
    logprob: float | None = None


class _Logprobs(msgspec.Struct):
    content: list[_Logprob] | None = None


class _Choice(msgspec.Struct):
    message: _Message
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Completion(msgspec.Struct):
    choices: list[_Choice]
    prompt_token_ids: list[int] | None = None
    usage: _Usage | None = None


class _Listed(msgspec.Struct):
    id: str


class _List(msgspec.Struct):
    data: list[_Listed]


class ChatUpstream:
    """A server with OpenAI's `/chat/completions`.

    Args:
        url: up to and including the `/v1`.
        model: what is asked for whatever the client calls it; "": what the client calls it.
        config: `policy` and `env.generation_reserve` say what a call does not; `run` how the server is asked.

    Raises:
        ConfigError, MissingExtra: as `ModelEndpoint`.
    """

    def __init__(self, url: str, model: str, config: Config) -> None:
        run = config.run
        self._endpoint = ModelEndpoint(
            url,
            run.model.key,
            timeout_s=run.model.timeout_s,
            attempts=run.attempts,
            backoff_s=run.backoff_s,
            concurrency=run.model.concurrency,
        )
        headers = {"Authorization": f"Bearer {run.model.key}"} if run.model.key else {}
        self._client, self._timeout_s = HttpClient(url.rstrip("/"), headers), run.call_deadline_s
        self._model, self._settings, self._reserve = model, config.policy, config.env.generation_reserve

    @property
    def inputs(self) -> dict[str, Any]:
        return {
            "upstream": self._endpoint.url,
            "model": self._model,
            "policy": self._settings,
            "reserve": self._reserve,
        }

    async def models(self) -> Sequence[str]:
        """As `Upstream.models`."""
        found = await self._client.get("/models", _List, self._timeout_s)
        if isinstance(found, HttpFault):
            raise InfrastructureFault(found.message)
        return [model.id for model in found.data]

    def prepare(self, dialect: Dialect, body: Mapping[str, Any], request: ChatRequest, recall: Recall) -> Asked:
        """As `Upstream.prepare`: an OpenAI client's body goes on as it is, with what is needed for a record."""
        refuse_unsupported(body, ONE_OUTPUT if dialect is OPENAI else dialect.neutral)
        forwarded = dict(body) if dialect is OPENAI else body_of(request)
        forwarded.pop("stream_options", None)
        settings = self._settings
        defaults: dict[str, Any] = {"temperature": settings.temperature, "top_p": settings.top_p}
        if settings.top_k:
            defaults["top_k"] = settings.top_k
        if request.max_tokens is None:
            defaults["max_tokens"] = self._reserve
        forced: dict[str, Any] = {"stream": False, "logprobs": True, "return_token_ids": True}
        if self._model:
            forced["model"] = self._model
        made = {**defaults, **forwarded, **forced}
        sampling = Sampling(
            temperature=made["temperature"],
            top_p=made["top_p"],
            top_k=max(made.get("top_k", 0), 0),
            max_tokens=request.max_tokens or self._reserve,
            seed=request.seed,
        )
        return Asked(sampling=sampling, body=made)

    async def answer(self, asked: Asked, call_id: str) -> Answered:
        """As `Upstream.answer`."""
        completion = await self._endpoint.post("/chat/completions", asked.body, _Completion)
        if len(completion.choices) != 1:
            raise InfrastructureFault(f"{self._endpoint.url} gave {len(completion.choices)} answers instead of one")
        choice, usage = completion.choices[0], completion.usage or _Usage()
        message, finish = choice.message, FINISHES.get(choice.finish_reason or "", "stop")
        calls = tuple(Called(call.id, call.function.name, call.function.arguments) for call in message.tool_calls or ())
        prompt_ids, output_ids = tuple(completion.prompt_token_ids or ()), tuple(choice.token_ids or ())
        logprobs = _logprobs(choice.logprobs, asked.sampling)
        reason = _untrainable(prompt_ids, output_ids, logprobs)
        reply = ChatReply(
            call_id=call_id,
            text=message.content or "",
            reasoning=message.reasoning_content or message.reasoning or "",
            calls=calls,
            finish="tool_calls" if calls else "stop" if finish == "tool_calls" else finish,
            prompt_tokens=usage.prompt_tokens or len(prompt_ids),
            output_tokens=usage.completion_tokens or len(output_ids),
        )
        return Answered(
            reply=reply,
            prompt_ids=prompt_ids,
            output_ids=() if reason else output_ids,
            output_logprobs=None if reason else logprobs,
            finish_reason=choice.finish_reason or "",
            actions=tuple(ToolCall(call.name, call.meaning()) for call in calls),
            untrainable=reason,
            message=msgspec.to_builtins(message) if reason else None,
        )


def _logprobs(given: _Logprobs | None, sampling: Sampling) -> tuple[float, ...] | None:
    """All of them, or None: what is missing is never replaced by a number. At temperature 0 the distribution is one
    token; servers give the probability that it had before."""
    found = [each.logprob for each in (given.content if given else None) or ()]
    known = tuple(min(value, 0.0) for value in found if value is not None and LEAST < value <= ROUNDING)
    if not found or len(known) != len(found):
        return None
    return known if sampling.temperature else (0.0,) * len(known)


def _untrainable(prompt_ids: Sequence[int], output_ids: Sequence[int], logprobs: Sequence[float] | None) -> str | None:
    """Why the tokens are no example, if they are none."""
    if not prompt_ids or not output_ids:
        return "the server gives no token ids"
    if min(*prompt_ids, *output_ids) < 0:
        return "the server gives token ids that are none"
    if logprobs is None:
        return "the server gives no log probabilities"
    if len(logprobs) != len(output_ids):
        return f"the server gives {len(logprobs)} log probabilities for {len(output_ids)} tokens"
    return None
