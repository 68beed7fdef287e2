"""Tasks from a corpus, written as a dataset in BEIR layout with their splits."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from itertools import islice

from harness1.data.query_overlap import KnownQueries
from harness1.errors import CorpusError
from harness1.hashing import digest
from harness1.memory.question import head, normalised_name
from harness1.records import Gold, Task
from harness1.retrieval.corpus import Document
from harness1.retrieval.protocol import Retriever
from harness1.tasks import fact_drafts as facts
from harness1.tasks import name_drafts as names
from harness1.tasks.corpus_graph import CorpusGraph, graph_of
from harness1.tasks.drafts import ASPECT, BRIDGE, CLAIM, COMPARISON, DESCRIPTION, INTERSECTION, SINGLE, Draft
from harness1.tasks.elsewhere import MadeTask, Reader
from harness1.tasks.splitting import Splitter

WEIGHTS = {BRIDGE: 4, SINGLE: 2, COMPARISON: 1, INTERSECTION: 1, CLAIM: 1, ASPECT: 1}
"""Shares of the kinds; where a kind runs out, the others take its place."""
SPLITS = {"train": 0.8, "dev": 0.1, "test": 0.1}
NEAR = 0.8
"""Similarity of the words of two questions above which only the first is kept."""
FOUND = 10
"""Documents of one search; a bridge whose gold is all among them needs no second search, and is left out."""
VERDICTS = ("supported", "refuted")
UNEVEN = 2
"""Most claims by which one verdict leads: a reader could say it without reading."""
BATCH = 16
"""Drafts that are looked for in the corpus together."""


def make_tasks(
    documents: Sequence[Document],
    retriever: Retriever,
    count: int,
    seed: int,
    on_task: Callable[[int, int], None] = lambda done, of: None,
) -> list[Task]:
    """Return tasks over a corpus, each with its split; the same arguments give the same tasks.

    Args:
        retriever: searches the same corpus by BM25.
        count: the number of tasks; fewer are returned if the corpus does not give so many.
        on_task: called with the number of tasks that hold so far, and the number looked for.

    Raises:
        CorpusError: the corpus gives no task.
        InfrastructureFault: the index does not answer.
    """
    graph = graph_of(documents)
    made = asyncio.run(_chosen(graph, Reader(graph, retriever), count, seed, on_task))
    if not made:
        raise CorpusError("the corpus gives no task: it needs sentences with names or figures")
    return [task_of(graph, each, split) for each, split in made]


def task_of(graph: CorpusGraph, made: MadeTask, split: str) -> Task:
    """Return a task with its gold, and as metadata its kind, form, chain, links, reach, difficulty
    and origin."""
    draft = made.draft
    answers = (draft.answer,) if draft.answer else ()
    chain = [graph.passages[need.passage].doc_id for need in draft.needs]
    metadata = {
        "kind": draft.kind,
        "form": draft.form,
        "chain": chain,
        "links": list(draft.links),
        "reach": round(made.reach, 4),
        "difficulty": len(chain) + (made.reach < 1),
        "origin": "template",
    }
    task_id = f"{draft.kind}-{digest(draft.question)[:10]}"
    return Task(task_id, draft.question, split, Gold(dict.fromkeys(made.gold, 1), answers=answers), metadata)


def drafts_of(graph: CorpusGraph, seed: int) -> Mapping[str, Iterator[Draft]]:
    """Return the drafts of each kind, from its forms in turn."""
    said = facts.facts_of(graph)

    def rng(form: str) -> random.Random:
        return random.Random(f"{seed}/{form}")

    return {
        SINGLE: _in_turn(
            facts.single_drafts(said, rng("single")),
            names.gap_drafts(graph, rng("gap")),
            names.described_drafts(graph, rng("described")),
        ),
        BRIDGE: _in_turn(
            facts.chain_drafts(said, rng("chain")),
            facts.quoted_chain_drafts(said, rng("quoted")),
            names.lead_drafts(graph, rng("lead")),
        ),
        COMPARISON: facts.comparison_drafts(said, rng("comparison")),
        INTERSECTION: names.shared_drafts(graph, rng("shared")),
        CLAIM: _in_turn(facts.claim_drafts(said, rng("claim")), names.changed_drafts(graph, rng("changed"))),
        ASPECT: names.aspect_drafts(graph, rng("aspect")),
    }


def spare_drafts_of(graph: CorpusGraph, seed: int) -> Mapping[str, Iterator[Draft]]:
    """Return the drafts that are taken where the others do not suffice."""
    return {SINGLE: names.excerpt_drafts(graph, random.Random(f"{seed}/excerpt"))}


async def _chosen(
    graph: CorpusGraph, reader: Reader, wanted: int, seed: int, on_task: Callable[[int, int], None]
) -> list[tuple[MadeTask, str]]:
    """Return the tasks that hold, with their splits: always one of the kind that lacks most of its share."""
    rounds = [drafts_of(graph, seed), spare_drafts_of(graph, seed)]
    known, splitter = KnownQueries(NEAR), Splitter(SPLITS)
    counts: dict[str, int] = dict.fromkeys(WEIGHTS, 0)
    verdicts: dict[str, int] = defaultdict(int)
    made: list[tuple[MadeTask, str]] = []
    drafts: dict[str, AsyncIterator[MadeTask]] = {}
    while (drafts or rounds) and len(made) < wanted:
        if not drafts:
            drafts = {kind: _with_gold(reader, each) for kind, each in rounds.pop(0).items()}
        kind = min(drafts, key=lambda name: counts[name] / WEIGHTS[name])
        task = await anext(drafts[kind], None)
        if task is None:
            del drafts[kind]
        elif kind == CLAIM and verdicts[task.draft.answer] > min(map(verdicts.__getitem__, VERDICTS)) + UNEVEN:
            continue
        elif _holds(graph, task, known) and (split := splitter.place(task.gold)):
            verdicts[task.draft.answer] += kind == CLAIM
            made.append((task, split))
            known.add(task.draft.question, task.draft.question)
            counts[kind] += 1
            on_task(len(made), wanted)
    random.Random(f"{seed}/order").shuffle(made)
    return made


async def _with_gold(reader: Reader, drafts: Iterator[Draft]) -> AsyncIterator[MadeTask]:
    """Yield the drafts that have a clear gold; they are looked for in the corpus some at a time."""
    while batch := list(islice(drafts, BATCH)):
        for task in await reader.with_gold(batch, FOUND):
            yield task


def _holds(graph: CorpusGraph, task: MadeTask, known: KnownQueries) -> bool:
    """Return whether a task is worth keeping: it leads somewhere, asks for one thing, gives nothing away, and is not
    asked yet."""
    draft = task.draft
    if draft.kind == BRIDGE and (task.reach == 1 or _names_its_end(graph, draft)):
        return False
    if draft.kind in (SINGLE, CLAIM) and task.reach < 1:
        return False  # too many documents are like it
    if draft.form == DESCRIPTION and len(task.gold) > 1:
        return False
    if draft.kind in (SINGLE, BRIDGE) and _names(draft.question, draft.answer):
        return False
    return known.match(draft.question) is None


def _names_its_end(graph: CorpusGraph, draft: Draft) -> bool:
    """Return whether a question names a document behind the first of its chain."""
    return any(_names(draft.question, head(graph.passages[need.passage].subject)) for need in draft.needs[1:])


def _names(question: str, name: str) -> bool:
    words = normalised_name(name)
    return bool(words) and f" {words} " in f" {normalised_name(question)} "


def _in_turn(*forms: Iterator[Draft]) -> Iterator[Draft]:
    """Yield a draft of each form in turn; a form that ends leaves its turns to the others."""
    left = list(forms)
    while left:
        for form in list(left):
            draft = next(form, None)
            if draft is None:
                left.remove(form)
            else:
                yield draft
