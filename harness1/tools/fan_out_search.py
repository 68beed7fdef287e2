"""The tool that runs several queries at once and fuses their results."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from harness1.config import Env
from harness1.memory.working_memory import WorkingMemory
from harness1.records import Note, Observation
from harness1.tools.discovery import discover, search_for
from harness1.tools.handles import spelled
from harness1.tools.search_corpus import Query
from harness1.tools.tool import Steps, Traits


@Traits("query", discovers=True)
def fan_out_search(
    memory: WorkingMemory,
    env: Env,
    queries: Annotated[
        list[Query], Meta(description="Different queries, one for each facet of the question.", max_length=64)
    ],
) -> Steps:
    """Run several different queries at once and fuse their results: a document found by several queries comes first,
    and each hit says which queries found it."""
    in_words = spelled(memory, env, queries)
    if not in_words.queries:
        return Observation("fan_out_search", error=in_words.refusal)
    kept, left = in_words.queries[: env.fan_out.queries], in_words.queries[env.fan_out.queries :]
    answer = yield search_for(memory, env, kept, env.fan_out.hits or env.search.hits)
    notes = (Note("queries_left_out", {"count": len(left), "limit": env.fan_out.queries}),) if left else ()
    return discover(fan_out_search, memory, env, answer, (*in_words.notes, *notes), resolved=in_words.resolved)
