"""The search environment: a shell around the pure core that runs one episode at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from harness1.config import Env, Machine
from harness1.env.render.context import Context
from harness1.env.render.pieces import ApproximateCounter, TokenCounter
from harness1.env.render.prompt import static_piece
from harness1.env.render.renderer import Renderer
from harness1.env.render.turn_pieces import TurnPieces, turn_pieces
from harness1.env.transition import begin, name_first, replayed, resume, transition
from harness1.env.verifiers.open import unopened_verifier
from harness1.env.verifiers.protocol import Verifier
from harness1.env.world import World
from harness1.errors import ConfigError, HarnessError
from harness1.hashing import digest
from harness1.memory.evidence_value import FITTED
from harness1.memory.working_memory import WorkingMemory
from harness1.plain import json_safe_call, utf8_safe
from harness1.records import ModelCall, Observation, StopReason, Task, ToolCall, Turn
from harness1.retrieval.protocol import Retriever
from harness1.tools.documents import END_SEARCH
from harness1.tools.registry import Toolbox


@dataclass(frozen=True)
class Step:
    """The result of one action: the recorded turn, and the next context or the reason why the episode is over."""

    turn: Turn
    context: Context | None
    done: StopReason | None

    @property
    def observation(self) -> Observation | None:
        return self.turn.observation


@dataclass
class State:
    """Everything that the next step depends on. Forks share texts, signatures and pieces, which never change."""

    memory: WorkingMemory
    turns: tuple[TurnPieces, ...] = ()
    context: Context | None = None
    done: StopReason | None = None

    def fork(self) -> State:
        return State(self.memory.fork(), self.turns, self.context, self.done)


class SearchEnv:
    """An environment for search episodes: one tool action per turn, over a memory that the environment keeps
    (Harness-1, arXiv 2606.02373). An instance runs one episode at a time; instances share nothing mutable.

    Args:
        config: mechanisms, limits in tokens and turns, and rendering.
        retriever: finds documents; see `open_retriever`.
        verifier: judges claims, lexically by default; see `open_verifier`.
        counter: counts tokens as the policy's format does; by default, four characters are a token.
        machine: attempts, and deadlines in seconds.

    Raises:
        ConfigError: the context window cannot hold the static prompt, the tools and one small observation.
    """

    def __init__(
        self,
        config: Env,
        retriever: Retriever,
        verifier: Verifier | None = None,
        counter: TokenCounter | None = None,
        machine: Machine | None = None,
    ) -> None:
        self.config = config
        self.retriever = retriever
        self.verifier = verifier or unopened_verifier(config)
        self.toolbox = Toolbox.of(config)
        self.counter = counter or ApproximateCounter()
        self.world = World(retriever, self.verifier, machine or Machine())
        self.renderer = Renderer(config, self.toolbox, self.counter)
        if config.context_window < (needed := self.renderer.smallest_window()):
            raise ConfigError(
                f"env.context_window={config.context_window} is too small for prompt, tools, one observation and"
                f" env.generation_reserve={config.generation_reserve}: it must be at least {needed}"
            )
        self._state: State | None = None

    @property
    def hash(self) -> str:
        """Hash of mechanisms, limits, rendering, static prompt and tool schemas."""
        return env_hash(self.config)

    @property
    def state(self) -> State:
        if self._state is None:
            raise HarnessError("reset the environment before the first step")
        return self._state

    async def reset(self, task: Task) -> Context | None:
        """Begin an episode; return None if even the empty context exceeds the budget.

        Raises:
            HarnessError: the task contains its gold; pass `task.public()`.
        """
        if task.gold is not None or task.metadata:
            raise HarnessError("an environment never sees gold: pass task.public()")
        return self.begin(WorkingMemory.empty(task.query, self.retriever.info.unit))

    def begin(self, memory: WorkingMemory) -> Context | None:
        """Begin an episode with a memory, as replay does without a retriever."""
        name_first(memory, self.config)
        self._state = State(memory)
        return self._render()

    async def step(self, actions: Sequence[ToolCall], reasoning: str = "", calls: Sequence[ModelCall] = ()) -> Step:
        """Execute one action: the first that is not `end_search`, which counts only when alone.

        A step that fails leaves the state unchanged.

        Raises:
            InfrastructureFault: retriever or verifier failed after all attempts; the episode is invalid.
            HarnessError: the episode is over or has not begun.
            ValueError: there is no action.
        """
        if self.state.done is not None:
            raise HarnessError(f"the episode has ended ({self.state.done}): reset the environment")
        call, ignored = choose([json_safe_call(action) for action in actions])
        memory = self.state.memory
        turn = memory.turn
        steps = transition(memory, self.config, self.toolbox, call, ignored, crowded=self._crowded())
        asked = begin(steps)
        if isinstance(asked, Observation):
            return self._finish(call, ignored, asked, utf8_safe(reasoning), calls)
        try:
            answer = await self.world.answer(asked, memory)
        except BaseException:
            # Until it gets its answer, a transition changes only the turn count.
            memory.turn = turn
            raise
        return self._finish(call, ignored, resume(steps, answer), utf8_safe(reasoning), calls)

    def replay(self, turn: Turn) -> Step:
        """Execute a recorded turn with its recorded answers instead of the world."""
        action, recorded = turn.action, turn.observation
        if action is None or recorded is None:
            raise ValueError("a turn without an action cannot be replayed")
        memory, crowded = self.state.memory, self._crowded()
        observation = replayed(memory, self.config, self.toolbox, action, turn.ignored, recorded, crowded=crowded)
        return self._finish(action, turn.ignored, observation, turn.reasoning, turn.calls)

    def snapshot(self) -> State:
        """Return a copy of the state, unaffected by later steps."""
        return self.state.fork()

    def restore(self, state: State) -> Context | None:
        """Continue from a snapshot, which can be restored again."""
        self._state = state.fork()
        return self._state.context

    def fork(self) -> SearchEnv:
        """Return an independent environment in the same state."""
        twin = SearchEnv(self.config, self.retriever, self.verifier, self.counter, self.world.machine)
        twin._state = self.state.fork()
        return twin

    def _crowded(self) -> bool:
        """Return True if the transcript has reached the size at which only actions that make room are executed."""
        context, pruning = self.state.context, self.config.pruning
        return pruning.on and context is not None and context.budget.used > pruning.refusal

    def _finish(
        self,
        call: ToolCall,
        ignored: Sequence[ToolCall],
        observation: Observation,
        reasoning: str,
        calls: Sequence[ModelCall],
    ) -> Step:
        state = self.state
        turn = Turn(
            index=state.memory.turn,
            calls=tuple(calls),
            reasoning=reasoning,
            action=call,
            ignored=tuple(ignored),
            observation=observation,
            memory_hash=state.memory.hash(),
            context_hash=state.context.hash if state.context else "",
            prompt_tokens=state.context.budget.used if state.context else 0,
            prefill_tokens=state.context.fresh if state.context else 0,
        )
        kept = state.turns[-(self.config.rendering.recent_max - 1) :] if self.config.rendering.recent_max > 1 else ()
        traits = self.toolbox.traits(observation.tool)
        state.turns = (*kept, turn_pieces(state.memory, self.config, turn, traits))
        if call.name == END_SEARCH and observation.error is None:
            state.done = StopReason.END_SEARCH
        elif state.memory.turn >= self.config.max_turns:
            state.done = StopReason.TURN_LIMIT
        else:
            return Step(turn, self._render(), state.done)
        return Step(turn, None, state.done)

    def _render(self) -> Context | None:
        state = self.state
        state.context = self.renderer.render(state.memory, state.turns, state.context)
        state.done = None if state.context else StopReason.CONTEXT_LIMIT
        return state.context


def env_hash(env: Env) -> str:
    """Return the hash of an environment, which does not depend on the tokenizer. The fitted weights enter it where
    evidence is ranked."""
    toolbox = Toolbox.of(env)
    weights = [msgspec.to_builtins(FITTED)] if env.evidence.ranks else []
    return digest([env.hashed(), static_piece(env, toolbox).text, toolbox.specs, *weights])


def choose(actions: Sequence[ToolCall]) -> tuple[ToolCall, tuple[ToolCall, ...]]:
    """Return the executed action and the ignored ones: `end_search` is executed only if it is the only action, because
    another one may be a last curation."""
    if not actions:
        raise ValueError("a decision without an action must have a parse error")
    at = next((place for place, call in enumerate(actions) if call.name != END_SEARCH), 0)
    return actions[at], tuple(call for place, call in enumerate(actions) if place != at)
