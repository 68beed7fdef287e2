"""The pure core: (memory, action, answers) -> (memory, observation). It never waits and asks only through yields."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from harness1.config import Env
from harness1.env.guidance import guidance
from harness1.env.render.turn_pieces import shown_words
from harness1.memory.history import history_line
from harness1.memory.working_memory import WorkingMemory
from harness1.records import Note, Observation, ToolCall
from harness1.tools.end_search import END_SEARCH
from harness1.tools.registry import Toolbox
from harness1.tools.requests import Answer, Request, recorded_answer
from harness1.tools.tool import Steps, Traits, short_name


def transition(
    memory: WorkingMemory,
    env: Env,
    toolbox: Toolbox,
    call: ToolCall,
    ignored: Sequence[ToolCall] = (),
    *,
    crowded: bool = False,
) -> Steps:
    """Carry out one action: run its tool, count the turn, write the history line, name what is shown, add guidance.

    Args:
        crowded: the transcript is so large that only what makes room, delivers or ends is carried out.
    """
    memory.turn += 1
    traits = toolbox.traits(call.name)
    if crowded and not (traits.frees or traits.curates or call.name == END_SEARCH):
        observation = Observation(short_name(call.name), error=Note("crowded", {"limit": env.pruning.refusal}))
    else:
        observation = yield from toolbox.run(memory, env, call)
    if env.history.on:
        memory.history.append(history_line(memory.turn, memory.pool, call, observation))
    traits = toolbox.traits(observation.tool)
    memory.name_entities((words for _, words in shown_words(memory, env, observation, traits)), env)
    _count(memory, observation, traits)
    notes = (*observation.notes, *guidance(memory, env, observation, traits))
    if ignored:
        notes += (Note("not_executed", {"tools": [short_name(other.name) for other in ignored[:5]]}),)
    return msgspec.structs.replace(observation, notes=notes)


def _count(memory: WorkingMemory, observation: Observation, traits: Traits) -> None:
    """What guidance needs to know of earlier turns, also where no history is kept."""
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
    """Carry out a recorded action with the recorded answer in place of the world."""
    steps = transition(memory, env, toolbox, call, ignored, crowded=crowded)
    asked = begin(steps)
    return asked if isinstance(asked, Observation) else resume(steps, recorded_answer(recorded))


def begin(steps: Steps) -> Request | Observation:
    """Run a transition until it asks the world, or to its end if it does not."""
    try:
        return next(steps)
    except StopIteration as end:
        observation: Observation = end.value
        return observation


def resume(steps: Steps, answer: Answer) -> Observation:
    """Give a transition the answer that it asked for, and run it to its end."""
    try:
        steps.send(answer)
    except StopIteration as end:
        observation: Observation = end.value
        return observation
    raise RuntimeError("a tool asked the world twice in one turn")
