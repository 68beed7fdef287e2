"""The search environment: episodes around the pure core, `transition`: (memory, action, answers) -> (memory,
observation). It yields its requests, which `SearchEnv.step` has answered by the world, `SearchEnv.replay` by the
record."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import msgspec

from harness1.config import Env, Machine
from harness1.env.memory_pieces import TurnPieces, hit_words, turn_pieces
from harness1.env.pieces import ApproximateCounter, TokenCounter, question_text, static_piece
from harness1.env.render import Context, Renderer
from harness1.env.verifiers import Verifier, VerifierFault, unopened_verifier
from harness1.errors import ConfigError, HarnessError, ToolError
from harness1.http.client import Transient, retry
from harness1.memory.parts import POPULATED_TAG, history_line
from harness1.memory.ranking import FITTED
from harness1.memory.working_memory import WorkingMemory
from harness1.plain import digest, utf8_safe
from harness1.plugins import call_added, is_interrupt
from harness1.records import (
    Chunk,
    ChunkId,
    Hit,
    ModelCall,
    Note,
    Observation,
    Ranking,
    StopReason,
    Task,
    ToolCall,
    Turn,
    Verdict,
    json_safe_call,
)
from harness1.retrieval.corpus import approximate_tokens
from harness1.retrieval.protocol import BadPattern, RetrievalFault, Retriever, SearchRequest, SearchResult
from harness1.tools.documents import END_SEARCH
from harness1.tools.registry import Toolbox
from harness1.tools.tool import (
    Answer,
    Consult,
    GrepFor,
    Judge,
    ReadDocument,
    Request,
    SearchFor,
    Steps,
    Traits,
    answer_of,
    one_line,
)

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
        """Begin an episode; return None if the empty context exceeds the budget; HarnessError if the task has gold."""
        if task.gold is not None or task.metadata:
            raise HarnessError("an environment never sees gold: pass task.public()")
        return self.begin(WorkingMemory.empty(task.query, self.retriever.info.unit))

    def begin(self, memory: WorkingMemory) -> Context | None:
        """Begin an episode with a memory, as replay does without a retriever."""
        memory.name_entities([question_text(memory.query)], self.config)
        memory.name_leads(self.config)
        self._state = State(memory)
        return self._render()

    async def step(self, actions: Sequence[ToolCall], reasoning: str = "", calls: Sequence[ModelCall] = ()) -> Step:
        """Execute one action: the first that is not `end_search`, which counts only when alone. A step that fails
        leaves the state unchanged. Raise InfrastructureFault if retriever or verifier failed after all attempts;
        HarnessError if the episode is over or has not begun; ValueError without an action."""
        if self.state.done is not None:
            raise HarnessError(f"the episode has ended ({self.state.done}): reset the environment")
        call, ignored = choose([json_safe_call(action) for action in actions])
        memory, turn = self.state.memory, self.state.memory.turn
        steps = self._transition(call, ignored)
        try:
            found = advance(steps)
            if not isinstance(found, Observation):
                found = advance(steps, await self.world.answer(found, memory))
        except BaseException:
            # Until it gets its answer, a transition changes only the turn count.
            memory.turn = turn
            raise
        return self._finish(Turn(turn, tuple(calls), utf8_safe(reasoning), call, ignored=ignored), found)

    def replay(self, turn: Turn) -> Step:
        """Execute a recorded turn with its recorded answers instead of the world."""
        action, recorded = turn.action, turn.observation
        if action is None or recorded is None:
            raise ValueError("a turn without an action cannot be replayed")
        steps = self._transition(action, turn.ignored)
        found = advance(steps)
        if not isinstance(found, Observation):
            found = advance(steps, answer_of(recorded))
        return self._finish(Turn(turn.index, turn.calls, turn.reasoning, action, ignored=turn.ignored), found)

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

    def _transition(self, call: ToolCall, ignored: Sequence[ToolCall]) -> Steps:
        context, refusal = self.state.context, self.config.pruning.limits[1]
        crowded = self.config.has("pruning") and context is not None and context.budget.used > refusal
        return transition(self.state.memory, self.config, self.toolbox, call, ignored, crowded=crowded)

    def _finish(self, turn: Turn, observation: Observation | Request) -> Step:
        if not isinstance(observation, Observation):
            raise RuntimeError("a tool made two requests in one turn")
        state, seen = self.state, self.state.context
        turn = msgspec.structs.replace(
            turn,
            index=state.memory.turn,
            observation=observation,
            memory_hash=state.memory.hash(),
            context_hash=seen.hash if seen else "",
            prompt_tokens=seen.budget.used if seen else 0,
            prefill_tokens=seen.fresh if seen else 0,
        )
        _, most = self.config.rendering.window
        kept = state.turns[-(most - 1) :] if most > 1 else ()
        traits = self.toolbox.traits(observation.tool)
        state.turns = (*kept, turn_pieces(state.memory, self.config, turn, traits))
        context = None
        if turn.action is not None and turn.action.name == END_SEARCH and observation.error is None:
            state.done = StopReason.END_SEARCH
        elif state.memory.turn >= self.config.max_turns:
            state.done = StopReason.TURN_LIMIT
        else:
            context = self._render()
        return Step(turn, context, state.done)

    def _render(self) -> Context | None:
        state = self.state
        state.context = self.renderer.render(state.memory, state.turns, state.context)
        state.done = None if state.context else StopReason.CONTEXT_LIMIT
        return state.context


def env_hash(env: Env) -> str:
    """Return the hash of an environment, with the fitted weights if it ranks, and without the tokenizer."""
    toolbox = Toolbox.of(env)
    weights = [msgspec.to_builtins(FITTED)] if env.ranks else []
    return digest([env.to_hash(), static_piece(env, toolbox).text, toolbox.specs, *weights])


def choose(actions: Sequence[ToolCall]) -> tuple[ToolCall, tuple[ToolCall, ...]]:
    """Return the executed action and the ignored ones: `end_search` only if alone, as another may be a curation."""
    if not actions:
        raise ValueError("a decision without an action must have a parse error")
    at = next((place for place, call in enumerate(actions) if call.name != END_SEARCH), 0)
    return actions[at], tuple(call for place, call in enumerate(actions) if place != at)


def transition(
    memory: WorkingMemory,
    env: Env,
    toolbox: Toolbox,
    call: ToolCall,
    ignored: Sequence[ToolCall] = (),
    *,
    crowded: bool = False,
) -> Steps:
    """Execute one action; in a `crowded` transcript only one that makes room, curates or ends the search."""
    memory.turn += 1
    traits = toolbox.traits(call.name)
    if crowded and not (traits.frees or traits.curates or call.name == END_SEARCH):
        observation = Observation(one_line(call.name), error=Note("crowded", {"limit": env.pruning.limits[1]}))
    else:
        observation = yield from toolbox.run(memory, env, call)
    if env.has("history"):
        memory.history.append(history_line(memory.turn, memory.pool, call, observation))
    traits = toolbox.traits(observation.tool)
    memory.name_entities((words for _, words in hit_words(memory, env, observation, traits)), env)
    memory.name_leads(env)
    if observation.error is None:
        memory.tools_used.setdefault(observation.tool, memory.turn)
    memory.since_curation = 0 if traits.curates and observation.error is None else memory.since_curation + 1
    notes = (*observation.notes, *guidance(memory, env, observation, traits))
    if ignored:
        notes += (Note("not_executed", {"tools": [one_line(other.name) for other in ignored[:5]]}),)
    return msgspec.structs.replace(observation, notes=notes)


def advance(steps: Steps, answer: Answer | None = None) -> Request | Observation:
    """Run a transition from its beginning, or with the answer to its request, to its request or its end."""
    try:
        return next(steps) if answer is None else steps.send(answer)
    except StopIteration as end:
        observation: Observation = end.value
        return observation


def guidance(memory: WorkingMemory, env: Env, observation: Observation, traits: Traits) -> tuple[Note, ...]:
    """Return facts about the search after a turn and, in prescriptive mode, advice on the next step."""
    if env.guidance == "none" or observation.error is not None:
        return ()
    delta, pool, curated = observation.delta, len(memory.pool.entries), len(memory.curated)
    counts = {"returned": len({memory.pool.unit_of(hit) for hit in observation.hits}), "new": len(delta.new)}
    seeded = "refilled" if env.refills else "seeded" if env.has("tags") else "seeded_untagged"
    tag = {"tag": POPULATED_TAG} if seeded == "seeded" else {}
    told: list[tuple[object, Note]] = [
        (traits.discovers, Note("result", {**counts, "pool": pool, "curated": curated, "cap": env.curation.cap})),
        (delta.auto_populated, Note(seeded, {"count": len(delta.auto_populated), **tag})),
        (pool and not curated, Note("curated_empty")),
        (
            memory.turn >= SINGLE_TOOL_FROM and len(memory.tools_used) == 1,
            Note("single_tool", {"tool": next(iter(memory.tools_used), "")}),
        ),
    ]
    if env.guidance == "prescriptive":
        since, uncurated, left = memory.since_curation, pool - curated, env.max_turns - memory.turn
        overdue, unverified = since >= 2 and uncurated > 0, env.has("verification") and not memory.verification.verdicts
        told += [
            (overdue, Note("curate_overdue", {"turns": since, "uncurated": uncurated})),
            (since and delta.new and not overdue, Note("curate_now")),
            (unverified and memory.turn >= VERIFY_FROM and curated >= 3, Note("verify_now")),
            (left <= FINISH_WITHIN, Note("finish", {"left": left})),
        ]
    return tuple(note for on, note in told if on)


Outcome = TypeVar("Outcome")


class World:
    """Answers requests; environments on one event loop may share it."""

    def __init__(self, retriever: Retriever, verifier: Verifier, machine: Machine) -> None:
        self.retriever, self.verifier, self.machine = retriever, verifier, machine

    async def answer(self, request: Request, memory: WorkingMemory) -> Answer:
        """Answer a request; raise InfrastructureFault after `machine.attempts` failed or late calls."""
        machine = self.machine
        match request:
            case SearchFor():
                return await self._search(request, memory)
            case GrepFor(pattern=pattern, limit=limit):
                call = partial(self.retriever.grep, pattern, limit, machine.call_deadline_s)
                matched: tuple[Chunk, ...] | BadPattern = await call_engine(call, machine)
                if isinstance(matched, BadPattern):
                    return Answer(bad_pattern=matched.reason)
                ranking = Ranking(pattern, tuple(chunk.chunk_id for chunk in matched))
                return Answer(_hits(matched), (ranking,))
            case ReadDocument(doc_id=doc_id):
                chunks: tuple[Chunk, ...] = await call_engine(partial(self.retriever.read, doc_id), machine)
                return Answer(_hits(chunks))
            case Judge():
                return Answer(verdicts=await call_engine(partial(self._judge, request), machine))
            case Consult():
                return await call_engine(partial(_consult, request), machine)

    async def _search(self, request: SearchFor, memory: WorkingMemory) -> Answer:
        seen, deadline = frozenset(memory.store), self.machine.call_deadline_s
        searches = [SearchRequest(query, request.k, seen, deadline, request.about) for query in request.queries]
        done: dict[int, SearchResult] = {}

        async def search_missing() -> list[SearchResult] | RetrievalFault:
            pending = [place for place in range(len(searches)) if place not in done]
            results = await self.retriever.search([searches[place] for place in pending])
            if len(results) != len(pending):
                return RetrievalFault(f"{len(results)} results for {len(pending)} queries")
            fault = None
            for place, result in zip(pending, results, strict=True):
                if isinstance(result, RetrievalFault):
                    fault = result
                else:
                    done[place] = result
            return fault or [done[place] for place in range(len(searches))]

        results = await call_engine(search_missing, self.machine)
        hits: dict[ChunkId, Hit] = {}
        rankings = []
        for query, result in zip(request.queries, results, strict=True):
            for rank, scored in enumerate(result.hits):
                hits.setdefault(scored.chunk.chunk_id, _hit(scored.chunk, rank, scored.score, scored.likeness))
            ids = tuple(scored.chunk.chunk_id for scored in result.hits)
            rankings.append(Ranking(query, ids, result.pre_rerank_ids))
        return Answer(tuple(hits.values()), tuple(rankings))

    async def _judge(self, request: Judge) -> tuple[Verdict, ...] | VerifierFault:
        judgements = await self.verifier.judge(request.claim, request.texts)
        if len(judgements) != len(request.texts):
            return VerifierFault(f"{len(judgements)} judgements for {len(request.texts)} documents")
        verdicts = []
        for (unit_id, _), judgement in zip(request.texts, judgements, strict=True):
            if isinstance(judgement, VerifierFault):
                return judgement
            verdicts.append(Verdict(unit_id, request.claim, judgement.label, judgement.sentence))
        return tuple(verdicts)


async def _consult(request: Consult) -> Answer:
    function, arguments = request.function, request.arguments
    try:
        text = await call_added(function, **arguments)
    except ToolError as error:
        return Answer(refused=utf8_safe(str(error))[: request.characters])
    if not isinstance(text, str):
        raise TypeError(f"the tool {function.__name__} returned {type(text).__name__}, not a text")
    cut = f" ({len(text)} characters)"
    kept = text if len(text) <= request.characters else text[: request.characters].rstrip() + cut
    return Answer(text=utf8_safe(kept))


async def call_engine(
    call: Callable[[], Awaitable[Outcome | RetrievalFault | VerifierFault]], machine: Machine
) -> Outcome:
    """Await a call of an engine, `machine.attempts` times at most, then raise InfrastructureFault."""

    async def once() -> Outcome:
        try:
            async with asyncio.timeout(machine.call_deadline_s):
                result = await call()
        except TimeoutError as error:
            raise Transient(f"no answer within {machine.call_deadline_s:g} s") from error
        except BaseException as error:
            # An engine may raise anything, and must not end the other episodes of a run.
            if is_interrupt(error):
                raise
            raise Transient(f"{type(error).__name__}: {error}") from error
        if isinstance(result, RetrievalFault | VerifierFault):
            raise Transient(result.message)
        return result

    return await retry(once, machine.attempts)


def _hit(chunk: Chunk, rank: int, score: float = 0.0, likeness: float | None = None) -> Hit:
    tokens = approximate_tokens(chunk.text)
    return Hit(chunk.chunk_id, chunk.doc_id, chunk.index, chunk.title, chunk.text, score, rank, tokens, likeness)


def _hits(chunks: Sequence[Chunk]) -> tuple[Hit, ...]:
    return tuple(_hit(chunk, rank) for rank, chunk in enumerate(chunks))
