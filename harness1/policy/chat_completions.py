"""A hosted model as a policy, by OpenAI's chat completions. It gives no token ids: its episodes are not trainable."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from harness1.config import ChatPolicy
from harness1.env.environment import choose
from harness1.env.render import Context
from harness1.hashing import digest
from harness1.model_endpoint import ModelEndpoint
from harness1.policy.chat_messages import Said, messages_of, tools_of
from harness1.policy.formats.reading import clean_name, read_object, unwrapped
from harness1.policy.language_model import call_seed
from harness1.policy.policy import Decision
from harness1.records import ModelCall, Sampling, Task, ToolCall

INSTRUCTION = "Answer with one call of a tool."


class _Function(msgspec.Struct):
    name: str
    arguments: str | dict[str, Any] = ""


class _Call(msgspec.Struct):
    id: str
    function: _Function


class _Message(msgspec.Struct):
    content: str | None = None
    tool_calls: list[_Call] | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    message: _Message
    finish_reason: str | None = None


class _Completion(msgspec.Struct):
    choices: list[_Choice]


class ChatCompletionsPolicy:
    """A model behind any server with OpenAI's routes.

    Args:
        model: its name there.
        reserve: tokens that an output may have: `env.generation_reserve`.
    """

    def __init__(
        self,
        endpoint: ModelEndpoint,
        model: str,
        reserve: int,
        settings: ChatPolicy | None = None,
        name: str = "openai",
    ) -> None:
        self.endpoint, self.model, self.reserve, self.name = endpoint, model, reserve, name
        self.settings = settings or ChatPolicy()
        self.hash = digest(["chat completions", model, self.settings, reserve])

    def open(self, task: Task, seed: int) -> ChatCompletionsSession:
        return ChatCompletionsSession(self, digest([task.query, seed]), {})


class ChatCompletionsSession:
    """One episode. What was not understood is asked again, without the faulty answer, as with every other model."""

    def __init__(self, policy: ChatCompletionsPolicy, seed: str, said: dict[int, Said], turn: int = 0) -> None:
        self._policy, self._seed, self._said, self._turn = policy, seed, said, turn

    async def act(self, context: Context) -> Decision:
        """
        Raises:
            InfrastructureFault: the server failed.
            UsageError: it refuses the request for good.
        """
        self._turn += 1
        calls: list[ModelCall] = []
        messages = messages_of(context.pieces, self._said)
        error = ""
        for attempt in range(self._policy.settings.format_retries + 1):
            note = [{"role": "user", "content": f"Your last output was not valid: {error}. {INSTRUCTION}\n"}]
            choice = await self._ask(messages + note * bool(attempt), context, attempt, calls)
            actions, error = _actions(choice.message)
            if actions:
                self._said[self._turn] = _said(choice.message, [action for action, _ in actions])
                return Decision(
                    tuple(call for _, unwrapped_calls in actions for call in unwrapped_calls),
                    _reasoning(choice.message),
                    tuple(calls),
                )
        return Decision(reasoning=_reasoning(choice.message), calls=tuple(calls), parse_error=error)

    def fork(self) -> ChatCompletionsSession:
        return ChatCompletionsSession(self._policy, self._seed, dict(self._said), self._turn)

    async def _ask(
        self, messages: list[dict[str, Any]], context: Context, attempt: int, calls: list[ModelCall]
    ) -> _Choice:
        policy, settings = self._policy, self._policy.settings
        seed = call_seed(self._seed, self._turn, attempt)
        body = {
            "model": policy.model,
            "messages": messages,
            "tools": tools_of(context.tools),
            "tool_choice": "required",
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            "max_tokens": policy.reserve,
            "seed": seed,
        }
        begun = time.time()
        completion = await policy.endpoint.post("/chat/completions", body, _Completion)
        choice = completion.choices[0] if completion.choices else _Choice(_Message())
        sampling = Sampling(settings.temperature, settings.top_p, settings.top_k, policy.reserve, seed)
        calls.append(
            ModelCall(
                call_id=f"{self._turn}.{attempt}",
                attempt=attempt,
                sampling=sampling,
                finish_reason=choice.finish_reason or "",
                t_start=begun,
                t_end=time.time(),
            )
        )
        return choice


def _actions(message: _Message) -> tuple[list[tuple[_Call, tuple[ToolCall, ...]]], str]:
    """The calls of a message with what each means, or why there is none."""
    found = []
    for call in message.tool_calls or []:
        arguments = call.function.arguments
        read = arguments if isinstance(arguments, dict) else read_object(arguments or "{}")
        if read is None:
            return [], "the arguments are not a JSON object"
        meant = unwrapped(clean_name(call.function.name), read)
        if meant:
            found.append((call, meant))
    return found, "" if found else "there is no call"


def _said(message: _Message, calls: list[_Call]) -> Said:
    """The message as it goes back, and which of its calls the environment carries out."""
    named = [ToolCall(clean_name(call.function.name)) for call in calls]
    executed = calls[named.index(choose(named)[0])].id
    listed = [{"id": call.id, "type": "function", "function": msgspec.to_builtins(call.function)} for call in calls]
    return Said(
        {"role": "assistant", "content": message.content, "tool_calls": listed},
        tuple(call.id for call in calls),
        executed,
    )


def _reasoning(message: _Message) -> str:
    return (message.reasoning_content or message.reasoning or message.content or "").strip()
