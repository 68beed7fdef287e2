"""Upstreams, which answer the calls of a proxy: a model sampled by token ids, or a chat server."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from harness1.config import Config
from harness1.errors import InfrastructureFault, Refusal, UsageError
from harness1.http.client import HttpFault
from harness1.http.model_endpoint import ChatRoute, is_too_long, policy_endpoint
from harness1.models.backend import LEAST, ROUNDING, Backend, Grammar
from harness1.models.chat_format import ChatFormat, Ids
from harness1.models.dialects import read_message, text_of
from harness1.models.open import open_backend
from harness1.models.spec import ModelSpec
from harness1.records import Record, Sampling, ToolCall, json_safe_call
from harness1.retrieval.corpus import CHARACTERS_PER_TOKEN
from harness1.serve.chat import (
    TOO_LONG,
    Called,
    ChatReply,
    ChatRequest,
    Dialect,
    Recall,
    changing,
    prompt_of,
    refuse_fields,
    text_of_output,
)
from harness1.serve.openai_dialect import ONE_OUTPUT, OPENAI, ToolUse, body_of
from harness1.serve.service import Refused
from harness1.tools.tool import ToolSpec


class Asked(Record):
    """A call prepared for the upstream: ids, or a body to forward."""

    sampling: Sampling
    prompt_ids: Ids = ()
    past: str | None = None  # digest of the messages before the output; None if its ids cannot be reused
    tools: tuple[ToolSpec, ...] = ()
    grammar: Grammar | None = None
    one_call: bool = False
    body: dict[str, Any] | None = None
    untrainable: str | None = None  # why its tokens cannot be trained on, if known already
    unmet: dict[str, Any] = {}  # what the client asks for that is not done


class Answered(Record, kw_only=True):
    """The result of a call. The service completes `reply`; `untrainable` says why its tokens cannot be trained on."""

    reply: ChatReply
    prompt_ids: Ids = ()
    output_ids: Ids = ()
    output_logprobs: tuple[float, ...] | None = None
    version_start: int = 0
    version_end: int = 0
    finish_reason: str = ""
    actions: tuple[ToolCall, ...] = ()
    untrainable: str | None = None
    message: dict[str, Any] | None = None  # the message as the server returned it
    unmet: dict[str, Any] = {}  # as in `Asked`, if it is known by the answer alone


class TokenUpstream:
    """A backend and its chat format. `policy.constrained` enforces calls; `tool_choice = required` alone does not."""

    def __init__(self, name: str, model: Backend, chat: ChatFormat, config: Config) -> None:
        self._name, self._model, self._chat = name, model, chat
        self._settings, self._reserve = config.policy, config.env.generation_reserve
        self._window = config.env.context_window
        hashes = {"model": model.hash, "format": chat.hash}
        policy = self._settings.to_hash()
        self.inputs: dict[str, Any] = {"upstream": name, **hashes, "policy": policy, "reserve": self._reserve}
        """What determines the answers, for the card of the record."""

    async def models(self) -> Sequence[str]:
        """Return the names of the served models; raise InfrastructureFault if the upstream does not list them."""
        return (self._name,)

    def prepare(self, dialect: Dialect, body: Mapping[str, Any], request: ChatRequest, recall: Recall) -> Asked:
        """Prepare a call; raise Refused or UsageError if the upstream cannot do what the call asks for. The window
        bounds an output, and refuses none: agents ask for as much as their own model can write."""
        refuse_fields(body, dialect.fields)
        settings, tools = self._settings, request.tools
        grammar = self._declare(tools)
        prompt_ids, past = prompt_of(self._chat, request.messages, tools, recall)
        if (room := self._window - len(prompt_ids)) < 1:
            raise Refused(400, f"{TOO_LONG}: {len(prompt_ids)} tokens > {self._window} maximum (env.context_window)")
        unmet = request.unmet
        if request.max_tokens is not None and request.max_tokens > room:
            unmet = unmet | {"max_tokens": request.max_tokens}
        sampling = Sampling(
            temperature=settings.temperature if request.temperature is None else request.temperature,
            top_p=request.top_p or 1.0,
            top_k=max(request.top_k or 0, 0),
            max_tokens=min(request.max_tokens or self._reserve, room),
            seed=request.seed,
            stop_ids=self._chat.stop_ids,
            grammar=grammar.digest if grammar else None,
        )
        return Asked(sampling, prompt_ids, past, tools, grammar, request.one_call, unmet=unmet)

    def _declare(self, tools: Sequence[ToolSpec]) -> Grammar | None:
        try:
            self._chat.declarations(tools)
            return self._chat.grammar(tools) if self._settings.constrained and tools else None
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise Refused(400, f"the tools cannot be declared in this model's format: {error}") from error

    def count(self, request: ChatRequest) -> int:
        """Return the tokens of a prompt; raise Refused if its tools cannot be declared."""
        self._declare(request.tools)
        return len(prompt_of(self._chat, request.messages, request.tools, lambda *_: None)[0])

    async def answer(self, asked: Asked, call_id: str) -> Answered:
        """Execute a call; an output without a call is returned as text. Raise InfrastructureFault if the upstream
        failed, Refusal if it refuses this call, and UsageError if it refuses every call, or we this one."""
        output = await self._model.generate(asked.prompt_ids, asked.sampling, asked.grammar)
        parsed = self._chat.parse(output.output_ids, asked.tools)
        actions = tuple(map(json_safe_call, parsed.actions if asked.tools else ()))
        calls = _called(actions, asked, call_id)
        reply = ChatReply(
            call_id=call_id,
            text=parsed.reasoning if calls else text_of_output(self._chat, output.output_ids),
            calls=calls,
            finish="tool_calls" if calls else output.finish_reason,
            prompt_tokens=len(asked.prompt_ids),
            output_tokens=len(output.output_ids),
        )
        return Answered(
            reply=reply,
            prompt_ids=asked.prompt_ids,
            output_ids=output.output_ids,
            output_logprobs=output.output_logprobs,
            version_start=output.version_start,
            version_end=output.version_end,
            finish_reason=output.finish_reason,
            actions=actions,
        )


MOST_TOKENS = ("max_tokens", "max_completion_tokens")
OPTIONAL: dict[str, Any] = {"return_token_ids": True, "logprobs": True, "top_k": -1, "min_p": 0.0}
OPTIONAL |= {"repetition_penalty": 1.0, "temperature": 1.0, "top_p": 1.0}
"""Parameters that are dropped if a server refuses them by name. Neutral values are sent because servers of open models
would otherwise use the values recommended in the model's files."""


class _Message(msgspec.Struct, omit_defaults=True):
    content: Any = None
    tool_calls: list[ToolUse] | None = None
    reasoning: Any = None
    reasoning_content: Any = None


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
    """A server with OpenAI's `/chat/completions` at an address up to and including `/v1`, with the methods of a
    `TokenUpstream`; `model` replaces the model's name in every call, unless it is empty. Raises as `ModelEndpoint`."""

    def __init__(self, url: str, model: str, config: Config) -> None:
        machine = config.machine
        self._endpoint = policy_endpoint(url, machine)
        self._route, self._timeout_s = ChatRoute(self._endpoint, OPTIONAL), machine.model.timeout_s
        self._model, self._settings, self._reserve = model, config.policy, config.env.generation_reserve
        upstream = {"upstream": self._endpoint.url, "model": model}
        policy = self._settings.to_hash()
        self.inputs: dict[str, Any] = {**upstream, "policy": policy, "reserve": self._reserve}

    async def models(self) -> Sequence[str]:
        listed = await self._endpoint.client.ask("/models", None, _List, self._timeout_s)
        if isinstance(listed, HttpFault):
            raise InfrastructureFault(listed.message)
        return [model.id for model in listed.data]

    def prepare(self, dialect: Dialect, body: Mapping[str, Any], request: ChatRequest, recall: Recall) -> Asked:
        """Prepare a call: an OpenAI client's body is forwarded with the parameters that a record needs."""
        refuse_fields(body, ONE_OUTPUT if dialect is OPENAI else dialect.fields)
        forwarded = dict(body) if dialect is OPENAI else body_of(request)
        forwarded.pop("stream_options", None)
        own: dict[str, Any] = {"temperature": self._settings.temperature}
        own |= {} if request.max_tokens else {"max_tokens": self._reserve}
        forced: dict[str, Any] = {"stream": False, "logprobs": True, "return_token_ids": True}
        forced |= {"model": self._model} if self._model else {}
        made: dict[str, Any] = {**OPTIONAL, **own, **forwarded, **forced}
        sampling = Sampling(
            temperature=made["temperature"],
            top_p=made["top_p"],
            top_k=max(made["top_k"], 0),
            max_tokens=request.max_tokens or self._reserve,
            seed=request.seed,
        )
        untrainable = None  # or why a record would not determine the distribution of the log probabilities
        if names := changing(made, {**OPENAI.fields, "tool_choice": ("", "auto", "none")}):
            untrainable = f"{', '.join(names)}: the effect on the distribution is not recorded"
        elif (sampling.temperature, sampling.top_p, sampling.top_k) != (1.0, 1.0, 0):
            untrainable = (
                "a chat server's log probabilities may be raw: they count only at temperature 1, top_p 1 and top_k 0"
            )
        return Asked(
            sampling=sampling,
            tools=request.tools,
            one_call=request.one_call,
            body=made,
            untrainable=untrainable,
            unmet={} if dialect is OPENAI else request.unmet,
        )

    def count(self, request: ChatRequest) -> int:
        """Return about how many tokens a prompt has: the server's own tokenizer is not known."""
        return 1 + request.characters() // CHARACTERS_PER_TOKEN

    async def answer(self, asked: Asked, call_id: str) -> Answered:
        """Execute a call, as `TokenUpstream.answer`."""
        body = asked.body or {}
        unmet = {}
        try:
            completion, sent = await self._route.post(body, _Completion)
        except Refusal as refusal:
            if asked.sampling.max_tokens <= self._reserve or not is_too_long(refusal):
                raise
            unmet = {"max_tokens": asked.sampling.max_tokens}  # without it, a server goes on to the end of its window
            body = {name: value for name, value in body.items() if name not in MOST_TOKENS}
            completion, sent = await self._route.post(body, _Completion)
        left_out = [name for name in OPTIONAL if name in body and name not in sent]
        if len(completion.choices) != 1:
            raise InfrastructureFault(f"{self._endpoint.url} returned {len(completion.choices)} answers instead of one")
        choice, usage = completion.choices[0], completion.usage or _Usage()
        message = choice.message
        thoughts, text, calls = _read(message, asked, call_id, choice.finish_reason == "length")
        prompt_ids, output_ids = tuple(completion.prompt_token_ids or ()), tuple(choice.token_ids or ())
        values = [each.logprob for each in (choice.logprobs.content if choice.logprobs else None) or ()]
        known = tuple(min(value, 0.0) for value in values if value is not None and LEAST < value <= ROUNDING)
        missing = None
        if not prompt_ids or not output_ids:
            missing = "the server returns no token ids"
        elif not values or len(known) < len(values):
            missing = "the server returns no log probabilities"
        elif len(known) != len(output_ids):
            missing = f"the server returns {len(known)} log probabilities for {len(output_ids)} tokens"
        refused = f"the server refuses {', '.join(left_out)}" if left_out else None
        reply = ChatReply(
            call_id=call_id,
            text=text,
            reasoning=thoughts,
            calls=calls,
            finish="tool_calls" if calls else "length" if choice.finish_reason == "length" else "stop",
            prompt_tokens=usage.prompt_tokens or len(prompt_ids),
            output_tokens=usage.completion_tokens or len(output_ids),
        )
        return Answered(
            reply=reply,
            prompt_ids=prompt_ids,
            output_ids=() if missing else output_ids,
            output_logprobs=None if missing else known,
            finish_reason=choice.finish_reason or "",
            actions=tuple(ToolCall(call.name, call.meaning()) for call in calls),
            untrainable="; ".join(filter(None, (asked.untrainable, refused, missing))) or None,
            message=msgspec.to_builtins(message),
            unmet=unmet,
        )


def _read(message: _Message, asked: Asked, call_id: str, cut: bool) -> tuple[str, str, tuple[Called, ...]]:
    """Return thoughts, text and calls of a message; a server that finds no calls may have left them in the text."""
    text, thoughts = text_of(message.content), (message.reasoning_content, message.reasoning)
    thought = next((each for each in thoughts if isinstance(each, str) and each), "")
    calls = tuple(call.to_call(f"call_{call_id}_{place}") for place, call in enumerate(message.tool_calls or ()))
    if not calls and asked.tools and (reading := read_message(text, thought, asked.tools, cut)).calls:
        thought, text, calls = thought or reading.thought, reading.words, _called(reading.calls, asked, call_id)
    return thought, text, calls


def _called(actions: Sequence[ToolCall], asked: Asked, call_id: str) -> tuple[Called, ...]:
    """Return the calls of an output under ids that are unique: by them it is recalled."""
    return tuple(
        Called(f"call_{call_id}_{place}", call.name, json.dumps(json_safe_call(call).arguments, ensure_ascii=False))
        for place, call in enumerate(actions[:1] if asked.one_call else actions)
    )


Upstream = TokenUpstream | ChatUpstream


def open_upstream(spec: str, config: Config) -> Upstream:
    """Open the upstream of a proxy: `http://HOST:PORT/v1`, `openai:MODEL@URL`, or a model that is sampled by token ids.
    Raise UsageError if it does not exist or cannot be loaded, and as `open_backend` does."""
    if spec.startswith(("http://", "https://")):
        return ChatUpstream(spec, "", config)
    try:
        asked = ModelSpec.read(spec)
    except UsageError as error:
        raise UsageError(f"{error}; a chat server is given as http://HOST:PORT/v1") from error
    if asked.kind == "openai":
        return ChatUpstream(asked.url or "", asked.model, config)
    model, chat = open_backend(asked, config)
    return TokenUpstream(spec, model, chat, config)
