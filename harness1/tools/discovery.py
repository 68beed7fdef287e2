"""The tools that discover documents: put queries in words, fuse, fit hits into the allowance, absorb, populate."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, takewhile
from types import MappingProxyType
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from harness1.config import Env
from harness1.memory.parts import DEFAULT_TAG, POPULATED_TAG
from harness1.memory.sentences import compress
from harness1.memory.working_memory import WorkingMemory
from harness1.records import Delta, Hit, Note, Observation, Ranking, UnitId
from harness1.retrieval.corpus import CHARACTERS_PER_TOKEN, approximate_tokens
from harness1.retrieval.protocol import RRF_K, rrf
from harness1.tools.tool import Answer, GrepFor, SearchFor, Steps, ToolFunction, Traits, traits_of
from harness1.words import has_foreign, signed

SHOWN_CHARACTERS = 40
SHOWN_HANDLES = 5
QUERY_CHARACTERS = 2000  # longest query, also with names in place of handles, of which each may be 50 times as long

HEADER_TOKENS = 24  # tokens that an allowance sets aside for a hit's handle, title and query marks
LABEL_TOKENS = 16  # tokens of a hit's handle and query marks
TITLE_CHARACTERS = 1000  # characters shown of a title: three times the longest title of the benchmarks
UNCUT_CHARACTERS = 1000  # characters up to which a text is shown whole, however small the window
REASON_CHARACTERS = 1200  # characters of an engine's reason for refusing a pattern, which may repeat the pattern
_PATTERN_WORD = re.compile(r"(?<!\\)[^\W_]{3,}")

MOST_QUERIES = 5  # queries of one `fan_out_search`; further ones are left out, and the observation says so
GREP_HITS = 5  # hits of one `grep_corpus`


def resolve_all(memory: WorkingMemory, references: Iterable[str]) -> tuple[dict[str, UnitId], list[str]]:
    """Return the units that references name, in order, and the references that name nothing."""
    resolved: dict[str, UnitId] = {}
    unknown: list[str] = []
    for reference in dict.fromkeys(references):
        unit_id = memory.pool.resolve(reference)
        if unit_id is None:
            unknown.append(reference)
        else:
            resolved[reference] = unit_id
    return resolved, unknown


def unknown_handles(references: list[str]) -> Note:
    """Return the note on documents that no search has returned."""
    return Note("unknown_handles", handle_data(references))


def handle_data(references: list[str]) -> dict[str, Any]:
    """Return a note's data on handles as the policy wrote them: the first ones, cut, and their number."""
    shown = [reference[:SHOWN_CHARACTERS] for reference in references[:SHOWN_HANDLES]]
    return {"handles": shown, "count": len(references)}


def discover(
    tool: ToolFunction,
    memory: WorkingMemory,
    env: Env,
    answer: Answer,
    notes: Sequence[Note] = (),
    *,
    seed: bool = True,
    resolved: Mapping[str, str] = MappingProxyType({}),
) -> Observation:
    """Turn an answer to a tool into an observation and take its hits into the memory, those of several queries in fused
    order. What does not fit the allowance or the window is not absorbed, and can be found again. With `seed`, the first
    search that finds something fills an empty curated set."""
    traits, found = traits_of(tool), list(answer.hits)
    if len(answer.rankings) > 1:  # one query keeps its own order
        by_id = {hit.chunk_id: hit for hit in answer.hits}
        order = rrf([ranking.chunk_ids for ranking in answer.rankings], RRF_K)
        found = [by_id[chunk_id] for chunk_id, _ in order if chunk_id in by_id]
    fitting: list[Hit] = []
    allowance = env.observation_limit(env.search.tokens * max(1, len(answer.rankings)))
    for hit in found:
        cost = HEADER_TOKENS + approximate_tokens(show_text(hit, traits, answer.rankings, env))
        if cost <= allowance or not fitting:
            fitting.append(hit)
            allowance -= cost
    hits = tuple(fit_window(fitting, traits, answer.rankings, env))
    new, aliases = memory.absorb(hits, env)
    memory.take_rankings(answer.rankings, hits, env)
    seeded = auto_populate(memory, env, hits) if seed else Delta()
    notes = list(notes)
    # Counted from the rankings, which a record keeps whole, so that replay counts the same.
    total = len({chunk_id for ranking in answer.rankings for chunk_id in ranking.chunk_ids})
    if not total:
        notes.append(Note("nothing_found"))
    if len(hits) < total:
        notes.append(Note("hits_left_out", {"count": total - len(hits)}))
    delta = msgspec.structs.replace(seeded, new=tuple(new), aliases=aliases)
    return Observation(tool.__name__, hits, answer.rankings, resolved=dict(resolved), notes=tuple(notes), delta=delta)


def fit_window(hits: Sequence[Hit], traits: Traits, rankings: Sequence[Ranking], env: Env) -> list[Hit]:
    """Return the first hits that fit `env.hits_limit` together as they are shown with their titles; at least one."""
    shown = (f"{show_title(hit.title, env)}\n{show_text(hit, traits, rankings, env)}\n" for hit in hits)
    return take_within(hits, (LABEL_TOKENS + approximate_tokens(text) for text in shown), env.hits_limit)


def take_within(hits: Sequence[Hit], costs: Iterable[int], tokens: int) -> list[Hit]:
    """Return as many hits from the first on as an allowance holds, at least one."""
    fitting = sum(1 for _ in takewhile(lambda used: used <= tokens, accumulate(costs)))
    return list(hits[: max(1, fitting)])


def show_title(title: str, env: Env) -> str:
    """Return a title on one line, cut to a length that leaves room for the rest of the context."""
    most = min(TITLE_CHARACTERS, CHARACTERS_PER_TOKEN * env.title_limit)
    return " ".join(title[: 4 * TITLE_CHARACTERS].split())[:most].rstrip()


def show_text(hit: Hit, traits: Traits, rankings: Sequence[Ranking], env: Env) -> str:
    """Return the text of a hit as an observation shows it: compressed with the queries, a pattern by its words, or
    whole. A text that alone would fill `env.hits_limit` is cut, and its length stated."""
    text = hit.text.strip()
    if env.has("compression") and traits.shows != "whole":
        query = " ".join(ranking.query for ranking in rankings)
        if traits.shows == "pattern" and not has_foreign(query):
            query = " ".join([*_PATTERN_WORD.findall(query), *signed(query.replace("\\", ""))])
        text = _compress(hit.text, query, env.compression.sentences)
        most = env.compression.characters
        if most and len(text) > most:  # whole words, and a mark where something is missing
            text = f"{text[: most + 1].rsplit(None, 1)[0][:most].rstrip()} ..."
    room = CHARACTERS_PER_TOKEN * (env.hits_limit - env.title_limit - 2 * LABEL_TOKENS)
    most = max(UNCUT_CHARACTERS, room)
    return text if len(text) <= most else f"{text[:most].rstrip()} ({len(text)} characters)"


_compress = lru_cache(maxsize=256)(compress)  # each is compressed once to see whether it fits, and once to be shown


def auto_populate(memory: WorkingMemory, env: Env, hits: Sequence[Hit]) -> Delta:
    """Curate for the policy, and return what changed: the first units of the first successful search, once, and only
    into an empty set (auto-seed in the paper); or the best of all searches so far, until the policy curates."""
    if not env.has("auto_populate") or not hits or "curate" in memory.tools_used:
        return Delta()
    if not env.refills and (memory.auto_populated or len(memory.curated)):
        return Delta()
    memory.auto_populated = True
    if env.refills:
        pooled = list(memory.assess().units)
    else:
        pooled = [unit for unit in (memory.pool.unit_of(hit) for hit in hits) if unit in memory.pool.entries]
    chosen = list(dict.fromkeys(pooled))[: min(env.auto_populate.documents, env.curation.cap)]
    tag = POPULATED_TAG if env.has("tags") else DEFAULT_TAG
    return memory.curated.refill(chosen, tag)


Query = Annotated[
    str,
    Meta(
        description="What to look for: 5 to 12 words, names and terms as the documents would write them.",
        max_length=QUERY_CHARACTERS,
    ),
]


def _search(tool: ToolFunction, memory: WorkingMemory, env: Env, queries: Sequence[str], hits: int) -> Steps:
    """Search for queries, each on one line, with names in place of entity handles. A word such as E7 that no entity of
    this episode has stays in the query, and is reported; a query with nothing else in it is left out."""
    words = [line for line in (" ".join(query.split()) for query in queries) if line]
    resolved, notes = dict[str, str](), list[Note]()
    if env.has_handles:
        question = " ".join(memory.query.split()) if env.leads_have_handles else ""
        spelled = [memory.entities.spell(line, question) for line in words]
        unknown = list(dict.fromkeys(handle for query in spelled for handle in query.unknown))
        notes += [Note("unknown_entities", handle_data(unknown))] if unknown else []
        words = [query.text[:QUERY_CHARACTERS].rstrip() for query in spelled if not query.empty]
        resolved = {handle: name for query in spelled for handle, name in query.resolved.items()}
    distinct = tuple(dict.fromkeys(words))
    if not distinct:
        return Observation(tool.__name__, error=next(iter(notes), Note("empty_query")))
    answer = yield SearchFor(distinct[:MOST_QUERIES], hits, memory.query[:QUERY_CHARACTERS] if env.ranks else "")
    if left := len(distinct[MOST_QUERIES:]):
        notes.append(Note("queries_left_out", {"count": left, "limit": MOST_QUERIES}))
    return discover(tool, memory, env, answer, notes, resolved=resolved)


@Traits("query", discovers=True)
def search_corpus(memory: WorkingMemory, env: Env, query: Query) -> Steps:
    """Search the corpus with one query. Returns the best documents that you have not seen yet."""
    return (yield from _search(search_corpus, memory, env, [query], env.search.hits))


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
    return (yield from _search(fan_out_search, memory, env, queries, env.fan_out.hits or env.search.hits))


Pattern = Annotated[
    str, Meta(description="An RE2 regular expression, e.g. (?i)kelvin.{0,20}1892; no lookaround.", max_length=1000)
]


@Traits("pattern", discovers=True)
def grep_corpus(memory: WorkingMemory, env: Env, pattern: Pattern) -> Steps:
    """Find documents by a regular expression: for exact names, numbers, dates and quotations."""
    if not pattern.strip():
        return Observation("grep_corpus", error=Note("empty_pattern"))
    answer = yield GrepFor(pattern, GREP_HITS)
    if answer.bad_pattern is not None:
        return Observation("grep_corpus", error=Note("bad_pattern", {"reason": answer.bad_pattern[:REASON_CHARACTERS]}))
    return discover(grep_corpus, memory, env, answer, seed=False)
