"""The tools that search the corpus: search_corpus, fan_out_search and grep_corpus."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from harness1.config import Env
from harness1.memory.working_memory import WorkingMemory
from harness1.records import Note, Observation
from harness1.tools.discovery import discover
from harness1.tools.handles import spelled
from harness1.tools.requests import GrepFor, SearchFor
from harness1.tools.tool import Steps, Traits

Query = Annotated[
    str,
    Meta(
        description="What to look for: 5 to 12 words, names and terms as the documents would write them.",
        max_length=2000,
    ),
]
Pattern = Annotated[
    str, Meta(description="An RE2 regular expression, e.g. (?i)kelvin.{0,20}1892; no lookaround.", max_length=1000)
]


@Traits("query", discovers=True)
def search_corpus(memory: WorkingMemory, env: Env, query: Query) -> Steps:
    """Search the corpus with one query. Returns the best documents that you have not seen yet."""
    in_words = spelled(memory, env, [query])
    if not in_words.queries:
        return Observation("search_corpus", error=in_words.refusal)
    answer = yield SearchFor(in_words.queries, env.search.hits)
    return discover(search_corpus, memory, env, answer, in_words.notes, resolved=in_words.resolved)


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
    answer = yield SearchFor(kept, env.search.hits)
    notes = (Note("queries_left_out", {"count": len(left), "limit": env.fan_out.queries}),) if left else ()
    return discover(fan_out_search, memory, env, answer, (*in_words.notes, *notes), resolved=in_words.resolved)


@Traits("pattern", discovers=True)
def grep_corpus(memory: WorkingMemory, env: Env, pattern: Pattern) -> Steps:
    """Find documents by a regular expression: for exact names, numbers, dates and quotations."""
    if not pattern.strip():
        return Observation("grep_corpus", error=Note("empty_pattern"))
    answer = yield GrepFor(pattern, env.grep.hits)
    if answer.bad_pattern is not None:
        return Observation("grep_corpus", error=Note("bad_pattern", {"reason": answer.bad_pattern}))
    return discover(grep_corpus, memory, env, answer, seed=False)
