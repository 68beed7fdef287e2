"""Programmatic guidance, without a model: facts about the search so far, and in prescriptive mode what to do next."""

from __future__ import annotations

from harness1.config import Env
from harness1.env.memory import WorkingMemory
from harness1.records import Note, Observation

SINGLE_TOOL_FROM = 3
VERIFY_FROM = 6
FINISH_WITHIN = 5
DISCOVERY = ("search_corpus", "fan_out_search", "grep_corpus", "read_document")


def guidance(memory: WorkingMemory, env: Env, observation: Observation) -> tuple[Note, ...]:
    """The notes that close an observation; the memory already holds the turn."""
    if env.guidance == "none" or observation.error is not None:
        return ()
    notes = _facts(memory, env, observation)
    if env.guidance == "prescriptive":
        notes += _prescriptions(memory, env, observation)
    return tuple(notes)


def _facts(memory: WorkingMemory, env: Env, observation: Observation) -> list[Note]:
    notes = []
    if observation.tool in DISCOVERY:
        units = {memory.pool.unit_of(hit) for hit in observation.hits}
        counts = {"returned": len(units), "new": len(observation.delta.new), "pool": len(memory.pool.entries)}
        notes.append(Note("result", {**counts, "curated": len(memory.curated), "cap": env.curation.cap}))
    if observation.delta.auto_populated:
        seeded = len(observation.delta.auto_populated)
        tagged = env.curation.tags
        notes.append(
            Note("seeded", {"count": seeded, "tag": env.auto_populate.tag})
            if tagged
            else Note("seeded_untagged", {"count": seeded})
        )
    if memory.pool.entries and not len(memory.curated):
        notes.append(Note("curated_empty"))
    tools = {line.tool for line in memory.history}
    if memory.turn >= SINGLE_TOOL_FROM and len(tools) == 1:
        notes.append(Note("single_tool", {"tool": next(iter(tools))}))
    return notes


def _prescriptions(memory: WorkingMemory, env: Env, observation: Observation) -> list[Note]:
    notes = []
    since = 0
    for line in reversed(memory.history):
        if line.tool == "curate":
            break
        since += 1
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
