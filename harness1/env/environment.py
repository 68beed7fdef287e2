"""The search environment: one episode at a time around the pure core.

`transition` is the core: (memory, action, answers) -> (memory, observation). It never waits; it yields its requests,
which `SearchEnv.step` has answered by the world and `SearchEnv.replay` by the record. `guidance` adds facts about the
search and, in prescriptive mode, advice on the next step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from harness1.config import Env, Machine
from harness1.env.memory_pieces import TurnPieces, hit_words, turn_pieces
from harness1.env.pieces import ApproximateCounter, TokenCounter, question_text, static_piece
from harness1.env.render import Context, Renderer
from harness1.env.verifiers import Verifier, unopened_verifier
from harness1.env.world import World
from harness1.errors import ConfigError, HarnessError
from harness1.memory.parts import history_line
from harness1.memory.ranking import FITTED
from harness1.memory.working_memory import WorkingMemory
from harness1.plain import digest, utf8_safe
from harness1.records import ModelCall, Note, Observation, StopReason, Task, ToolCall, Turn, json_safe_call
from harness1.retrieval.protocol import Retriever
from harness1.tools.documents import END_SEARCH
from harness1.tools.registry import Toolbox
from harness1.tools.tool import Answer, Request, Steps, Traits, answer_of, one_line

SINGLE_TOOL_FROM = 3
VERIFY_FROM = 6
FINISH_WITHIN = 5


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
        observation = replay_action(memory, self.config, self.toolbox, action, turn.ignored, recorded, crowded=crowded)
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


def name_first(memory: WorkingMemory, env: Env) -> None:
    """Name what the question mentions, as every episode begins."""
    memory.name_entities([question_text(memory.query)], env)
    memory.name_leads(env)


def transition(
    memory: WorkingMemory,
    env: Env,
    toolbox: Toolbox,
    call: ToolCall,
    ignored: Sequence[ToolCall] = (),
    *,
    crowded: bool = False,
) -> Steps:
    """Execute one action: count the turn, run the tool, add the history line, name what is shown, add guidance. In a
    `crowded` transcript only actions that make room, curate or end the search are executed."""
    memory.turn += 1
    traits = toolbox.traits(call.name)
    if crowded and not (traits.frees or traits.curates or call.name == END_SEARCH):
        observation = Observation(one_line(call.name), error=Note("crowded", {"limit": env.pruning.refusal}))
    else:
        observation = yield from toolbox.run(memory, env, call)
    if env.history.on:
        memory.history.append(history_line(memory.turn, memory.pool, call, observation))
    traits = toolbox.traits(observation.tool)
    memory.name_entities((words for _, words in hit_words(memory, env, observation, traits)), env)
    memory.name_leads(env)
    _count(memory, observation, traits)
    notes = (*observation.notes, *guidance(memory, env, observation, traits))
    if ignored:
        notes += (Note("not_executed", {"tools": [one_line(other.name) for other in ignored[:5]]}),)
    return msgspec.structs.replace(observation, notes=notes)


def _count(memory: WorkingMemory, observation: Observation, traits: Traits) -> None:
    if observation.error is None:
        memory.tools_used.setdefault(observation.tool, memory.turn)
    memory.since_curation = 0 if traits.curates and observation.error is None else memory.since_curation + 1


def replay_action(
    memory: WorkingMemory,
    env: Env,
    toolbox: Toolbox,
    call: ToolCall,
    ignored: Sequence[ToolCall],
    recorded: Observation,
    *,
    crowded: bool = False,
) -> Observation:
    """Execute a recorded action with its recorded answer."""
    steps = transition(memory, env, toolbox, call, ignored, crowded=crowded)
    first = begin(steps)
    return first if isinstance(first, Observation) else resume(steps, answer_of(recorded))


def begin(steps: Steps) -> Request | Observation:
    """Run a transition to its request, or to its end if it has none."""
    try:
        return next(steps)
    except StopIteration as end:
        observation: Observation = end.value
        return observation


def resume(steps: Steps, answer: Answer) -> Observation:
    """Run a transition from its request to its end."""
    try:
        steps.send(answer)
    except StopIteration as end:
        observation: Observation = end.value
        return observation
    raise RuntimeError("a tool made two requests in one turn")


def guidance(memory: WorkingMemory, env: Env, observation: Observation, traits: Traits) -> tuple[Note, ...]:
    """Return the notes at the end of an observation; the memory already includes the turn."""
    if env.guidance == "none" or observation.error is not None:
        return ()
    notes = _facts(memory, env, observation, traits)
    if env.guidance == "prescriptive":
        notes += _prescriptions(memory, env, observation)
    return tuple(notes)


def _facts(memory: WorkingMemory, env: Env, observation: Observation, traits: Traits) -> list[Note]:
    notes = []
    if traits.discovers:
        units = {memory.pool.unit_of(hit) for hit in observation.hits}
        counts = {"returned": len(units), "new": len(observation.delta.new), "pool": len(memory.pool.entries)}
        notes.append(Note("result", {**counts, "curated": len(memory.curated), "cap": env.curation.cap}))
    if observation.delta.auto_populated:
        count = {"count": len(observation.delta.auto_populated)}
        tag = {"tag": env.auto_populate.tag}
        if env.refills:
            notes.append(Note("refilled", count))
        else:
            notes.append(Note("seeded", count | tag) if env.curation.tags else Note("seeded_untagged", count))
    if memory.pool.entries and not len(memory.curated):
        notes.append(Note("curated_empty"))
    if memory.turn >= SINGLE_TOOL_FROM and len(memory.tools_used) == 1:
        notes.append(Note("single_tool", {"tool": next(iter(memory.tools_used))}))
    return notes


def _prescriptions(memory: WorkingMemory, env: Env, observation: Observation) -> list[Note]:
    notes = []
    since = memory.since_curation
    uncurated = len(memory.pool.entries) - len(memory.curated)
    if since >= 2 and uncurated > 0:
        notes.append(Note("curate_overdue", {"turns": since, "uncurated": uncurated}))
    elif since and observation.delta.new:
        notes.append(Note("curate_now"))
    unverified = env.verification.on and not memory.verification.verdicts
    if unverified and memory.turn >= VERIFY_FROM and len(memory.curated) >= 3:
        notes.append(Note("verify_now"))
    if env.max_turns - memory.turn <= FINISH_WITHIN:
        notes.append(Note("finish", {"left": env.max_turns - memory.turn}))
    return notes
