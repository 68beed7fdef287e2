"""A language model as a policy: contexts become token ids, sampled ids become actions, and every call is recorded."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from harness1.config import ChatPolicy
from harness1.env.render.context import Context
from harness1.env.render.pieces import Piece, piece
from harness1.hashing import digest
from harness1.models.backend import Backend
from harness1.models.formats.chat_format import ChatFormat, Parsed, PromptSpan, joined
from harness1.policy.policy import Decision
from harness1.records import ModelCall, Sampling, Task
from harness1.tools.tool import ToolSpec


class LanguageModelPolicy:
    """A model that uses a chat format.

    Args:
        reserve: most tokens of an output: `env.generation_reserve`.
        settings: sampling, retries and constraints.
        name: the policy's name as the user typed it.
    """

    def __init__(
        self, model: Backend, chat: ChatFormat, reserve: int, settings: ChatPolicy | None = None, name: str = "model"
    ) -> None:
        self.model, self.counter, self.reserve, self.name = model, chat, reserve, name
        self.settings = settings or ChatPolicy()
        sampled = msgspec.structs.replace(self.settings, format="auto")
        self.hash = digest(["language model", model.hash, chat.hash, sampled, reserve])

    def open(self, task: Task, seed: int) -> LanguageModelSession:
        return LanguageModelSession(self, digest([task.query, seed]))


class LanguageModelSession:
    """One episode. A faulty attempt is a side branch: it and its note leave the context.

    The session keeps nothing between turns: a turn depends on its context alone, and a session may begin at any turn.
    """

    def __init__(self, policy: LanguageModelPolicy, seed: str) -> None:
        self._policy, self._seed = policy, seed
        self.pending: Decision | None = None

    async def act(self, context: Context) -> Decision:
        """Sample until an output holds a call, with at most `format_retries` retries.

        Raises:
            InfrastructureFault, UsageError: as the backend.
        """
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
            parsed = read_output(chat, call, context.tools)
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
            top_p=settings.top_p,
            top_k=settings.top_k,
            max_tokens=room,
            seed=call_seed(self._seed, context.turn, attempt),
            stop_ids=policy.counter.stop_ids,
            grammar=grammar.digest if grammar else None,
        )
        shown = [piece.call.call_id for piece in context.pieces if piece.call is not None]
        begun = time.time()
        output = await policy.model.generate(joined(prompt), sampling, grammar)
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


def read_output(chat: ChatFormat, call: ModelCall, tools: Sequence[ToolSpec]) -> Parsed:
    """Parse an output; the error for one that was cut before it held a call says that it was cut."""
    parsed = chat.parse(call.output_ids, tools)
    if parsed.actions or call.finish_reason != "length":
        return parsed
    return msgspec.structs.replace(parsed, error="the output was too long and is cut")


def retry_note(parsed: Parsed, chat: ChatFormat) -> Piece:
    """Return the note to a policy after an output without a call. It quotes nothing from the output."""
    return piece("retry", "user", f"Your last output was not valid: {parsed.error}. {chat.instruction}")
