"""A language model as a policy: contexts become token ids, sampled ids become actions, and every call is recorded. A
hosted model answers by OpenAI's chat completions instead; without token ids its episodes cannot be trained on."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from harness1.config import ChatPolicy
from harness1.config.settings import to_record
from harness1.env.environment import choose
from harness1.env.pieces import Piece, piece
from harness1.env.render import Context
from harness1.http.model_endpoint import ChatRoute, Endpoint
from harness1.models.backend import Backend
from harness1.models.calls import (
    MOST_CALLS,
    Message,
    Said,
    clean_name,
    messages_of,
    read_object,
    tools_of,
    unwrap_calls,
    without_controls,
)
from harness1.models.chat_format import ChatFormat, Parsed, PromptSpan, join_spans
from harness1.plain import digest
from harness1.policy.policy import Decision
from harness1.records import ModelCall, Sampling, Task, ToolCall


class LanguageModelPolicy:
    """A model that uses a chat format. An output has at most `reserve` tokens (`env.generation_reserve`)."""

    def __init__(
        self, model: Backend, chat: ChatFormat, reserve: int, settings: ChatPolicy | None = None, name: str = "model"
    ) -> None:
        self.model, self.counter, self.reserve, self.name = model, chat, reserve, name
        self.settings = settings or ChatPolicy()
        sampled = to_record(self.settings, "policy.") | {"format": "auto"}
        self.hash = digest(["language model", model.hash, chat.hash, sampled, reserve])

    def open(self, task: Task, seed: int) -> LanguageModelSession:
        return LanguageModelSession(self, digest([task.query, seed]))


class LanguageModelSession:
    """One episode. A faulty attempt and its note leave the context; nothing else is kept between turns."""

    def __init__(self, policy: LanguageModelPolicy, seed: str) -> None:
        self._policy, self._seed = policy, seed
        self.pending: Decision | None = None

    async def act(self, context: Context) -> Decision:
        """Sample until an output holds a call, with at most `format_retries` retries; raise as the backend."""
        policy, chat = self._policy, self._policy.counter
        prefix = chat.segments(context)
        calls: list[ModelCall] = []
        used = {segment.key: segment.ids for segment in prefix}
        parsed = Parsed()
        for attempt in range(policy.settings.format_retries + 1):
            note = chat.messages([[retry_note(parsed, chat)]], context.tools) if attempt else []
            prompt = [*prefix, *note, chat.prompt_end()]
            room = policy.reserve - sum(len(segment.ids) for segment in note)
            if room < 1:  # the note would use up the rest of the window
                break
            call = await self._call(prompt, room, attempt, context)
            calls.append(call)
            used |= {segment.key: segment.ids for segment in prompt}
            parsed = chat.parse(call.output_ids, context.tools)
            if not parsed.actions and call.finish_reason == "length":
                parsed = msgspec.structs.replace(parsed, error=CUT)
            error = None if parsed.actions else parsed.error or "there is no call"
            segments = {key: ids for key, ids in used.items() if not key.startswith("call/")}
            decision = Decision(parsed.actions, parsed.reasoning, tuple(calls), error, segments)
            if parsed.actions:
                break
            self.pending = decision
        self.pending = None
        return decision

    def fork(self) -> LanguageModelSession:
        return LanguageModelSession(self._policy, self._seed)

    async def _call(self, prompt: Sequence[PromptSpan], room: int, attempt: int, context: Context) -> ModelCall:
        policy, settings = self._policy, self._policy.settings
        grammar = policy.counter.grammar(context.tools) if settings.constrained else None
        sampling = Sampling(
            temperature=settings.temperature,
            max_tokens=room,
            seed=call_seed(self._seed, context.turn, attempt),
            stop_ids=policy.counter.stop_ids,
            grammar=grammar.digest if grammar else None,
        )
        shown = [piece.call.call_id for piece in context.pieces if piece.call is not None]
        begun = time.time()
        output = await policy.model.generate(join_spans(prompt), sampling, grammar)
        return ModelCall(
            call_id=f"{context.turn}.{attempt}",
            parent_call_id=shown[-1] if shown else None,
            attempt=attempt,
            prompt=tuple(segment.key for segment in prompt),
            output_ids=output.output_ids,
            output_logprobs=output.output_logprobs,
            sampling=sampling,
            tokenizer_hash=policy.counter.tokenizer.hash,
            policy_version_start=output.version_start,
            policy_version_end=output.version_end,
            finish_reason=output.finish_reason,
            t_start=begun,
            t_end=time.time(),
        )


def call_seed(episode: str, turn: int, attempt: int) -> int:
    """Return the seed of one call: equal episodes, turns and attempts sample equal outputs, whatever else runs."""
    return int(digest([episode, turn, attempt])[:8], 16) >> 1


def retry_note(parsed: Parsed, chat: ChatFormat) -> Piece:
    """Return the note to a policy after an output without a call. It quotes nothing from the output."""
    return piece("retry", "user", f"Your last output was not valid: {parsed.error}. {chat.instruction}")


CUT = "the output was too long and is cut"
INSTRUCTION = "Answer with one call of a tool."
LONGEST_NAME = 64
"""Most characters of a function's name that servers accept when it is sent back."""
_UNSENDABLE = re.compile(r"[^a-zA-Z0-9_-]")
"""Characters that servers refuse in a function's name."""


class _Function(msgspec.Struct):
    name: str
    arguments: str | dict[str, Any] | None = None


class _Call(msgspec.Struct):
    function: _Function
    id: str | None = None


class _Message(msgspec.Struct):
    content: Any = None
    """Text, or a list of its parts from servers that divide it."""
    tool_calls: list[_Call] | None = None
    reasoning: Any = None
    reasoning_content: Any = None


class _Choice(msgspec.Struct):
    message: _Message
    finish_reason: str | None = None


class _Completion(msgspec.Struct):
    choices: Annotated[list[_Choice], msgspec.Meta(min_length=1)]


Meant = tuple[_Call, tuple[ToolCall, ...]]
"""A call in a form that its server takes back, and the actions that it means."""


class ChatCompletionsPolicy:
    """A model behind any server with OpenAI's routes. An output has at most `reserve` tokens."""

    def __init__(
        self, endpoint: Endpoint, model: str, reserve: int, settings: ChatPolicy | None = None, name: str = "openai"
    ) -> None:
        self.endpoint, self.model, self.reserve, self.name = endpoint, model, reserve, name
        self.settings = settings or ChatPolicy()
        self.hash = digest(["chat completions", model, to_record(self.settings, "policy."), reserve])
        # Reasoning models of some hosts must be free not to call.
        self.route = ChatRoute(endpoint, {"tool_choice": "required"}, {"tool_choice": "auto"})

    def open(self, task: Task, seed: int) -> ChatCompletionsSession:
        return ChatCompletionsSession(self, digest([task.query, seed]), {})


class ChatCompletionsSession:
    """One episode. After an answer that is not understood, the model is asked again without it, as every model is."""

    def __init__(self, policy: ChatCompletionsPolicy, seed: str, said: dict[int, Said]) -> None:
        self._policy, self._seed, self._said = policy, seed, said
        self.pending: Decision | None = None

    async def act(self, context: Context) -> Decision:
        """Ask until an answer holds a call. Raises InfrastructureFault; UsageError: every request would fail."""
        calls: list[ModelCall] = []
        messages = without_controls(messages_of(context.pieces, self._said))
        error = ""
        for attempt in range(self._policy.settings.format_retries + 1):
            note = [{"role": "user", "content": f"Your last output was not valid: {error}. {INSTRUCTION}\n"}]
            choice = await self._ask(messages + note * bool(attempt), context, attempt, calls)
            meant, error = _meaning(choice)
            if meant:
                actions = tuple(action for _, stands_for in meant for action in stands_for)
                self._said[context.turn] = _reply(choice.message, meant, choose(actions)[0], context.turn)
                decision = Decision(actions, _reasoning(choice.message), tuple(calls))
                break
            self.pending = decision = Decision((), _reasoning(choice.message), tuple(calls), error)
        self.pending = None
        return decision

    def fork(self) -> ChatCompletionsSession:
        return ChatCompletionsSession(self._policy, self._seed, dict(self._said))

    async def _ask(self, messages: list[Message], context: Context, attempt: int, calls: list[ModelCall]) -> _Choice:
        policy, settings = self._policy, self._policy.settings
        seed = call_seed(self._seed, context.turn, attempt)
        body = {
            "model": policy.model,
            "messages": messages,
            "tools": tools_of(context.tools),
            "temperature": settings.temperature,
            "top_p": 1.0,
            "seed": seed,
            "tool_choice": "required",
            "max_tokens": policy.reserve,
        }
        begun = time.time()
        completion, _ = await policy.route.post(body, _Completion)
        choice = completion.choices[0]
        sampling = Sampling(settings.temperature, max_tokens=policy.reserve, seed=seed)
        call = ModelCall(f"{context.turn}.{attempt}", attempt=attempt, sampling=sampling, t_start=begun)
        finish = choice.finish_reason or ""
        calls.append(msgspec.structs.replace(call, finish_reason=finish, t_end=time.time()))
        return choice


def _meaning(choice: _Choice) -> tuple[list[Meant], str]:
    found: list[Meant] = []
    for call in (choice.message.tool_calls or [])[:MOST_CALLS]:
        given = call.function.arguments or "{}"
        arguments = given if isinstance(given, dict) else read_object(given)
        if arguments is None:
            return [], "the arguments are not a JSON object"
        name = clean_name(call.function.name)
        if meant := unwrap_calls(name, arguments):
            try:
                msgspec.json.decode(given if isinstance(given, str) else "", type=dict[str, Any])
            except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
                given = json.dumps(arguments)
            sendable = _Function(_UNSENDABLE.sub("_", name)[:LONGEST_NAME], given)
            found.append((_Call(sendable, call.id), meant))
    if found:
        return found, ""
    return [], CUT if choice.finish_reason == "length" else "there is no call"


def _reply(message: _Message, meant: list[Meant], executed: ToolCall, turn: int) -> Said:
    """Return a message to send back, with its thoughts, which some servers demand, and ids that tell calls apart."""
    ids = [call.id or "" for call, _ in meant]
    if not all(ids) or len(set(ids)) < len(ids):
        ids = [f"turn-{turn}-{place}" for place in range(len(ids))]
    listed = [
        {"id": name, "type": "function", "function": msgspec.to_builtins(call.function)}
        for name, (call, _) in zip(ids, meant, strict=True)
    ]
    thoughts = {"reasoning": message.reasoning, "reasoning_content": message.reasoning_content}
    kept = {name: thought for name, thought in thoughts.items() if thought is not None}
    place = next(at for at, (_, actions) in enumerate(meant) if any(each is executed for each in actions))
    return Said({"role": "assistant", "content": message.content, **kept, "tool_calls": listed}, tuple(ids), ids[place])


def _reasoning(message: _Message) -> str:
    said = (message.reasoning_content, message.reasoning, message.content)
    return next((text.strip() for text in said if isinstance(text, str) and text.strip()), "")
