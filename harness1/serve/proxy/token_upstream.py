"""A model sampled by token ids as upstream; its tokens are recorded and reused exactly as sampled."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from harness1.config import Config
from harness1.models.backend import Backend, Grammar
from harness1.models.chat_format import ChatFormat
from harness1.plain import json_safe_call
from harness1.records import Sampling, ToolCall
from harness1.serve.proxy.chat import Called, ChatReply, ChatRequest, refuse_unsupported
from harness1.serve.proxy.dialect import Dialect
from harness1.serve.proxy.rendering import Recall, prompt_of, text_of_output
from harness1.serve.proxy.upstream import Answered, Asked
from harness1.serve.service import Refused
from harness1.tools.tool import ToolSpec


class TokenUpstream:
    """A backend and its chat format. `policy.constrained` enforces calls; `tool_choice = required` alone does not.
    `policy` and `env.generation_reserve` supply parameters that a call leaves out."""

    def __init__(self, name: str, model: Backend, chat: ChatFormat, config: Config) -> None:
        self._name, self._model, self._chat = name, model, chat
        self._settings, self._reserve = config.policy, config.env.generation_reserve

    @property
    def inputs(self) -> dict[str, Any]:
        hashes = {"model": self._model.hash, "format": self._chat.hash}
        return {"upstream": self._name, **hashes, "policy": self._settings, "reserve": self._reserve}

    async def models(self) -> Sequence[str]:
        return (self._name,)

    def prepare(self, dialect: Dialect, body: Mapping[str, Any], request: ChatRequest, recall: Recall) -> Asked:
        """Do as `Upstream.prepare`."""
        refuse_unsupported(body, dialect.neutral)
        grammar, settings = self._declared(request.tools), self._settings
        prompt = prompt_of(self._chat, request.messages, request.tools, recall)
        sampling = Sampling(
            temperature=settings.temperature if request.temperature is None else request.temperature,
            top_p=request.top_p or settings.top_p,
            top_k=settings.top_k if request.top_k is None else max(request.top_k, 0),
            max_tokens=request.max_tokens or self._reserve,
            seed=request.seed,
            stop_ids=self._chat.stop_ids,
            grammar=grammar.digest if grammar else None,
        )
        return Asked(
            sampling=sampling,
            prompt_ids=prompt.ids,
            past=prompt.past,
            tools=request.tools,
            grammar=grammar,
            one_call=request.one_call,
        )

    async def answer(self, asked: Asked, call_id: str) -> Answered:
        """Do as `Upstream.answer`. An output without a call is returned as text."""
        output = await self._model.generate(asked.prompt_ids, asked.sampling, asked.grammar)
        parsed = self._chat.parse(output.output_ids, asked.tools)
        actions = tuple(map(json_safe_call, parsed.actions if asked.tools else ()))
        calls = _calls(actions[:1] if asked.one_call else actions, call_id)
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

    def _declared(self, tools: Sequence[ToolSpec]) -> Grammar | None:
        """Return the grammar of the tools if calls are enforced; refuse schemas that the format cannot express."""
        try:
            self._chat.declarations(tools)
            return self._chat.grammar(tools) if self._settings.constrained and tools else None
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise Refused(400, f"the tools cannot be declared in this model's format: {error}") from error


def _calls(actions: Sequence[ToolCall], call_id: str) -> tuple[Called, ...]:
    """Return calls with unique ids, by which their output is recalled."""
    return tuple(
        Called(f"call_{call_id}_{place}", action.name, json.dumps(action.arguments, ensure_ascii=False))
        for place, action in enumerate(actions)
    )
