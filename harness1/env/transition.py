"""The pure core: (memory, action, answers) -> (memory, observation). It never waits; it yields its requests."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from harness1.config import Env
from harness1.env.guidance import guidance
from harness1.env.render.prompt import shown_question
from harness1.env.render.turn_pieces import shown_words
from harness1.memory.history import history_line
from harness1.memory.working_memory import WorkingMemory
from harness1.records import Note, Observation, ToolCall
from harness1.tools.documents import END_SEARCH
from harness1.tools.registry import Toolbox
from harness1.tools.tool import Answer, Request, Steps, Traits, one_line, recorded_answer


def name_first(memory: WorkingMemory, env: Env) -> None:
    """Name what the question mentions, as every episode begins."""
    memory.name_entities([shown_question(memory.query)], env)
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
    """Execute one action: count the turn, run the tool, add the history line, name what is shown, add guidance.

    Args:
        crowded: the transcript is so large that only actions that make room, curate or end the search are executed.
    """
    memory.turn += 1
    traits = toolbox.traits(call.name)
    if crowded and not (traits.frees or traits.curates or call.name == END_SEARCH):
        observation = Observation(one_line(call.name), error=Note("crowded", {"limit": env.pruning.refusal}))
    else:
        observation = yield from toolbox.run(memory, env, call)
    if env.history.on:
        memory.history.append(history_line(memory.turn, memory.pool, call, observation))
    traits = toolbox.traits(observation.tool)
    memory.name_entities((words for _, words in shown_words(memory, env, observation, traits)), env)
    memory.name_leads(env)
    _count(memory, observation, traits)
    notes = (*observation.notes, *guidance(memory, env, observation, traits))
    if ignored:
        notes += (Note("not_executed", {"tools": [one_line(other.name) for other in ignored[:5]]}),)
    return msgspec.structs.replace(observation, notes=notes)


def _count(memory: WorkingMemory, observation: Observation, traits: Traits) -> None:
    """Update the counts that guidance needs, which do not depend on the history."""
    if observation.error is None:
        memory.tools_used.setdefault(observation.tool, memory.turn)
    memory.since_curation = 0 if traits.curates and observation.error is None else memory.since_curation + 1


def replayed(
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
    return first if isinstance(first, Observation) else resume(steps, recorded_answer(recorded))


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
