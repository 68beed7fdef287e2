"""A language model as a policy: contexts become token ids, sampled ids become actions, and every call is recorded. A
hosted model answers by OpenAI's chat completions instead; without token ids its episodes cannot be trained on."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec

from harness1.config import ChatPolicy
from harness1.env.environment import choose
from harness1.env.pieces import ApproximateCounter, Piece, piece
from harness1.env.render import Context
from harness1.errors import Overflow, Refusal, Unreadable
from harness1.http.chat_stream import Ended
from harness1.http.model_endpoint import ChatRoute, Endpoint
from harness1.models.backend import Backend
from harness1.models.calls import (
    MOST_CALLS,
    Message,
    Said,
    clean_name,
    messages_of,
    tools_of,
    unwrap_calls,
    without_controls,
    without_limits,
)
from harness1.models.chat_format import ChatFormat, Parsed, PromptSpan, join_spans
from harness1.models.dialects import Reading, decode_arguments, fit_calls, read_message, text_of
from harness1.models.endings import has_ended
from harness1.models.served import ServedModel
from harness1.models.written_calls import join_roles, response_format, write_messages
from harness1.plain import digest, utf8_safe
from harness1.policy.policy import Decision
from harness1.records import ModelCall, Sampling, Task, ToolCall
from harness1.tools.tool import ToolSpec


class LanguageModelPolicy:
    """A model that uses a chat format. An output has at most `reserve` tokens (`env.generation_reserve`)."""

    def __init__(
        self, model: Backend, chat: ChatFormat, reserve: int, settings: ChatPolicy | None = None, name: str = "model"
    ) -> None:
        self.model, self.counter, self.reserve, self.name = model, chat, reserve, name
        self.settings = settings or ChatPolicy()
        sampled = self.settings.to_hash() | {"format": "auto"}
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
            if policy.settings.max_tokens and not _was_cut(calls):
                room = min(room, policy.settings.max_tokens)
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


def _was_cut(calls: Sequence[ModelCall]) -> bool:
    return any(call.finish_reason == "length" for call in calls)


def retry_note(parsed: Parsed, chat: ChatFormat) -> Piece:
    """Return the note to a policy after an output without a call. It quotes nothing from the output."""
    return piece("retry", "user", f"Your last output was not valid: {parsed.error}. {chat.instruction}")


CUT = "the output was too long and is cut"
INSTRUCTION = "Answer with one call of a tool."
LONGEST_NAME = 64  # most characters of a function's name that servers accept when it is sent back
_UNSENDABLE = re.compile(r"[^a-zA-Z0-9_-]")  # characters that servers refuse in a function's name
FEW = 256  # tokens that a call takes at most, unless it is exceptionally long, or its model thinks before it
WRITTEN = 20_000  # most characters of a failed attempt that are recorded


class _Message(msgspec.Struct):
    content: Any = None  # text, or a list of its parts from servers that divide it
    tool_calls: list[dict[str, Any]] | None = None
    reasoning: Any = None
    reasoning_content: Any = None
    reasoning_details: Any = None


class _Choice(msgspec.Struct):
    message: _Message
    finish_reason: str | None = None


class _Completion(msgspec.Struct):
    choices: Annotated[list[_Choice], msgspec.Meta(min_length=1)]


Meant = tuple[dict[str, Any], tuple[ToolCall, ...]]  # a call in a form that its server takes back, and what it means


class ChatCompletionsPolicy:
    """A model behind any server with OpenAI's routes. An output has at most `reserve` tokens."""

    def __init__(
        self,
        endpoint: Endpoint,
        model: str,
        reserve: int,
        settings: ChatPolicy | None = None,
        name: str = "openai",
        served: ServedModel | None = None,
    ) -> None:
        self.endpoint, self.model, self.reserve, self.name = endpoint, model, reserve, name
        self.settings = settings or ChatPolicy()
        self.hash = digest(["chat completions", model, self.settings.to_hash(), reserve])
        # Reasoning models of some hosts must be free not to call.
        self.route = ChatRoute(endpoint, {"tool_choice": "required"}, {"tool_choice": "auto"})
        self.served = served or ServedModel()
        self.counter = ApproximateCounter(self.served.per_token)
        self.thinks = False  # whether an answer held thoughts, or was used up by some that its server does not show
        # Servers of one's own are read as a stream, so that waste ends, unless they refuse it; those of many write too
        # little to waste, and some (vLLM) parse calls worse in a stream.
        self.streams = self.served.program in ("llama.cpp", "ollama")

    def open(self, task: Task, seed: int) -> ChatCompletionsSession:
        return ChatCompletionsSession(self, digest([task.query, seed]), {})


class ChatCompletionsSession:
    """One episode. After an answer that is not understood, the model is asked again without it, as every model is; only
    a first answer that was cut off is shown again, so that the model goes on from there."""

    def __init__(self, policy: ChatCompletionsPolicy, seed: str, said: dict[int, Said]) -> None:
        self._policy, self._seed, self._said = policy, seed, said
        self.pending: Decision | None = None
        # Its calls take no time of its episode: a slow server is waited for while it goes on.
        self.unhurried = policy.streams

    async def act(self, context: Context) -> Decision:
        """Ask until an answer holds a call. Raises InfrastructureFault; UsageError: every request would fail."""
        calls: list[ModelCall] = []
        if self._policy.settings.constrained:
            messages = write_messages(context.pieces, context.tools)
        else:
            messages = messages_of(context.pieces, self._said)
        messages, more = without_controls(messages), list[Message]()
        for attempt in range(self._policy.settings.format_retries + 1):
            try:
                message = await self._ask(messages + more, context, attempt, calls)
            except Overflow as refusal:  # tokens may be counted without the model's tokenizer
                where, said = f"{context.turn}.{attempt}", str(refusal)
                calls.append(ModelCall(where, attempt=attempt, finish_reason="overflow", text=said))
                messages = shorten(messages)
                message = await self._ask(messages + more, context, attempt, calls)
            cut = calls[-1].finish_reason == "length"
            reading, meant, error = _meaning(message, context.tools, cut)
            silent = cut and not text_of(message.content).strip() and not reading.calls
            self._policy.thinks |= bool(_thoughts(message) or reading.thought or silent)
            reasoning = _thoughts(message) or reading.thought or reading.words
            if meant:
                actions = tuple(action for _, stands_for in meant for action in stands_for)
                self._said[context.turn] = _reply(message, reading, meant, choose(actions)[0], context.turn)
                decision = Decision(actions, reasoning, tuple(calls))
                break
            calls[-1] = msgspec.structs.replace(calls[-1], text=_written(message) or calls[-1].text)
            more = [{"role": "user", "content": f"Your last output was not valid: {error}. {INSTRUCTION}\n"}]
            if cut and not attempt and reading.words:
                more.insert(0, {"role": "assistant", "content": reading.words})
            self.pending = decision = Decision((), reasoning, tuple(calls), error)
        self.pending = None
        return decision

    def fork(self) -> ChatCompletionsSession:
        return ChatCompletionsSession(self._policy, self._seed, dict(self._said))

    async def _ask(self, messages: list[Message], context: Context, attempt: int, calls: list[ModelCall]) -> _Message:
        policy, settings = self._policy, self._policy.settings
        seed = call_seed(self._seed, context.turn, attempt)
        few = settings.max_tokens or (policy.reserve if policy.thinks else FEW)
        room = policy.reserve if _was_cut(calls) else min(few, policy.reserve)
        told = {"tools": without_limits(tools_of(context.tools)), "tool_choice": "required"}
        if settings.constrained:
            told = {"response_format": response_format(context.tools, context.turn)}
        body = {
            "model": policy.model,
            "messages": join_roles(messages) if settings.constrained else messages,
            "temperature": settings.temperature,
            "top_p": 1.0,
            "seed": seed,
            "max_tokens": room,
            **told,
        }
        sampling, begun = Sampling(settings.temperature, max_tokens=room, seed=seed), time.time()
        call = ModelCall(f"{context.turn}.{attempt}", attempt=attempt, sampling=sampling, t_start=begun)
        try:
            # A schema ends each answer, also one that repeats itself.
            free = not settings.constrained
            completion = await self._post(body, lambda so_far: free and has_ended(so_far, context.tools))
            choice, text = completion.choices[0], ""
        except Unreadable as fault:
            choice, text = _Choice(_Message(), "length"), str(fault)
        finish = choice.finish_reason or ""
        calls.append(msgspec.structs.replace(call, finish_reason=finish, t_end=time.time(), text=text))
        return choice.message

    async def _post(self, body: dict[str, Any], ended: Ended) -> _Completion:
        policy = self._policy
        if policy.streams:
            # A server that reads a long prompt tells its progress, so that it is not given up.
            progress = {"return_progress": True} if policy.served.program == "llama.cpp" else {}
            try:
                return (await policy.route.post(body | {"stream": True} | progress, _Completion, ended))[0]
            except Refusal as refusal:
                if isinstance(refusal, Overflow):
                    raise
        completion, _ = await policy.route.post(body, _Completion, ended)
        policy.streams = False
        return completion


KEPT = 0.7  # share of the characters of a prompt that is kept where the server found it too long
SHORT = 500  # characters of a message that are kept in any case, as the question is


def shorten(messages: Sequence[Message]) -> list[Message]:
    """Return messages of which the longest lose their ends, all but the first, which holds the rules."""
    sizes = [len(text_of(message.get("content"))) for message in messages]
    most, sum_kept = max(sizes[1:], default=0), KEPT * sum(sizes)
    while most > SHORT and sizes[0] + sum(min(size, most) for size in sizes[1:]) > sum_kept:
        most = max(most * 9 // 10, SHORT)
    kept = [
        {**message, "content": text_of(message["content"])[:most]} if size > most else message
        for message, size in zip(messages[1:], sizes[1:], strict=True)
    ]
    return [messages[0], *kept]


def _meaning(message: _Message, tools: Sequence[ToolSpec], cut: bool) -> tuple[Reading, list[Meant], str]:
    """Return what a message says, its calls in a form that its server takes back with the actions that they mean, and
    the reason if there are none. Without `tool_calls`, calls are looked for in the text."""
    schemas, text = {spec.name: spec.parameters for spec in tools}, text_of(message.content)
    found: list[Meant] = []
    for call in (message.tool_calls or [])[:MOST_CALLS]:
        function = call["function"] if isinstance(call.get("function"), dict) else {}
        arguments = decode_arguments(given := function.get("arguments"))
        if arguments is None:
            if cut and found:
                break  # the last of several calls was cut off
            return Reading("", text.strip(), ()), [], CUT if cut else "the arguments are not a JSON object"
        name = clean_name(function["name"]) if isinstance(function.get("name"), str) else ""
        fitted = fit_calls(unwrap_calls(name, arguments), schemas)
        try:
            msgspec.json.decode(given if isinstance(given, str) else "", type=dict[str, Any])
        except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
            given = json.dumps(arguments)
        if fitted:
            found.append((_sendable(call, name, given), tuple(fitted)))
    if found:
        return Reading("", text.strip(), ()), found, ""
    reading = read_message(text, _thoughts(message), tools, cut)
    meant: list[Meant] = [(_sendable({}, each.name, json.dumps(each.arguments)), (each,)) for each in reading.calls]
    return reading, meant, "" if meant else CUT if cut else "there is no call"


def _sendable(call: Mapping[str, Any], name: str, arguments: Any) -> dict[str, Any]:
    """Return a call as it came, unknown fields too, which some servers demand (Gemini's `extra_content`), but with a
    name that servers accept, and without its place in a stream."""
    function = call["function"] if isinstance(call.get("function"), dict) else {}
    function = {**function, "name": _UNSENDABLE.sub("_", name)[:LONGEST_NAME], "arguments": arguments}
    kept = {key: value for key, value in call.items() if key != "index"}
    return {"id": "", **kept, "type": "function", "function": function}


def _reply(message: _Message, reading: Reading, meant: list[Meant], executed: ToolCall, turn: int) -> Said:
    """Return a message to send back, with its thoughts, which some servers demand, and ids that tell calls apart."""
    ids = [call["id"] if isinstance(call["id"], str) else "" for call, _ in meant]
    if not all(ids) or len(set(ids)) < len(ids):
        ids = [f"turn-{turn}-{place}" for place in range(len(ids))]
    listed = [call | {"id": name} for name, (call, _) in zip(ids, meant, strict=True)]
    thoughts = {name: getattr(message, name) for name in ("reasoning", "reasoning_content", "reasoning_details")}
    kept = {name: thought for name, thought in thoughts.items() if thought is not None}
    place = next(at for at, (_, actions) in enumerate(meant) if any(each is executed for each in actions))
    content = (reading.words or None) if reading.calls else message.content
    return Said({"role": "assistant", "content": content, **kept, "tool_calls": listed}, tuple(ids), ids[place])


def _thoughts(message: _Message) -> str:
    said = (message.reasoning_content, message.reasoning)
    return next((text.strip() for text in said if isinstance(text, str) and text.strip()), "")


def _written(message: _Message) -> str:
    """Return all that a model wrote in a message."""
    calls = json.dumps(message.tool_calls, ensure_ascii=False) if message.tool_calls else ""
    parts = (_thoughts(message), text_of(message.content).strip(), calls)
    return utf8_safe("\n".join(filter(None, parts)))[:WRITTEN]
