"""The tool that runs one query."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from harness1.config import Env
from harness1.memory.working_memory import WorkingMemory
from harness1.records import Observation
from harness1.tools.discovery import discover, search_for
from harness1.tools.handles import QUERY_CHARACTERS, spelled
from harness1.tools.tool import Steps, Traits

Query = Annotated[
    str,
    Meta(
        description="What to look for: 5 to 12 words, names and terms as the documents would write them.",
        max_length=QUERY_CHARACTERS,
    ),
]


@Traits("query", discovers=True)
def search_corpus(memory: WorkingMemory, env: Env, query: Query) -> Steps:
    """Search the corpus with one query. Returns the best documents that you have not seen yet."""
    in_words = spelled(memory, env, [query])
    if not in_words.queries:
        return Observation("search_corpus", error=in_words.refusal)
    answer = yield search_for(memory, env, in_words.queries, env.search.hits)
    return discover(search_corpus, memory, env, answer, in_words.notes, resolved=in_words.resolved)
