"""Guidance without a model: facts about the search so far and, in prescriptive mode, advice on the next step."""

from __future__ import annotations

from harness1.config import Env
from harness1.memory.working_memory import WorkingMemory
from harness1.records import Note, Observation
from harness1.tools.tool import Traits

SINGLE_TOOL_FROM = 3
VERIFY_FROM = 6
FINISH_WITHIN = 5


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
