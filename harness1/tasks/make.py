"""Tasks from a corpus: drafts with their gold and their splits, written as a dataset in BEIR layout. Other documents
that answer as well are found by search: they join the gold, or the task is dropped."""

from __future__ import annotations

import asyncio
import random
import re
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from harness1.config import Config
from harness1.data import beir
from harness1.data.leaks import KnownQueries
from harness1.data.source import Source
from harness1.errors import CorpusError, InfrastructureFault, UsageError
from harness1.memory import sentences
from harness1.memory.question import head, normalise_name
from harness1.plain import digest
from harness1.records import DocId, Gold, Record, Task
from harness1.retrieval.corpus import Document
from harness1.retrieval.open import open_retriever
from harness1.retrieval.protocol import RetrievalFault, Retriever, SearchRequest
from harness1.runs.files import Stage, read_stage, refuse_full_disk, refuse_other, under_way
from harness1.tasks import drafts as forms
from harness1.tasks.drafts import ASPECT, BRIDGE, CLAIM, COMPARISON, DESCRIPTION, INTERSECTION, SINGLE, Draft, Need
from harness1.tasks.graph import YEAR, CorpusGraph, Passage, facts_of, graph_of, holds_name, is_whole_name
from harness1.tasks.questions import REPLIES, QuestionWriter

SEARCHED = 20
"""Documents that are read for each piece of evidence."""
ALIKE = 0.6
"""Share of the words of two sentences in common above which one says what the other does."""
MOST_GOLD = 8
_WORD = re.compile(r"\w+")
Said = tuple[str, frozenset[str]]
"""A sentence and its words in small letters."""


class MadeTask(Record, kw_only=True):
    """A draft with its gold."""

    draft: Draft
    gold: tuple[DocId, ...]
    reach: float
    """The share of the gold that one search for the question finds."""


class GoldReader:
    """Reads a corpus for other documents that serve as evidence."""

    def __init__(self, graph: CorpusGraph, retriever: Retriever) -> None:
        self._graph, self._retriever = graph, retriever
        self._places = {passage.doc_id: place for place, passage in enumerate(graph.passages)}
        self._said: dict[int, list[Said]] = {}

    async def gold(self, drafts: Sequence[Draft]) -> list[tuple[DocId, ...] | None]:
        """Return the gold of each draft: its own passages, and others that say the same; None if a passage holds the
        names of a need apart from each other, which leaves open whether it answers, or if too many answer. Raises
        InfrastructureFault: the index does not answer."""
        needs = [(at, need) for at, draft in enumerate(drafts) for need in draft.needs]
        found = await self._near([need.quoted or " ".join(need.names) for _, need in needs])
        gold: list[dict[DocId, None] | None] = [
            {self._graph.passages[need.passage].doc_id: None for need in draft.needs} for draft in drafts
        ]
        for (at, need), places in zip(needs, found, strict=True):
            known = gold[at]
            for place in places:
                passage = self._graph.passages[place]
                if known is None or passage.doc_id in known:
                    continue
                serves = _says(need, self._said_at(place)) if need.quoted else _serves(need, passage)
                if serves is None:
                    known = gold[at] = None
                elif serves:
                    known[passage.doc_id] = None
        return [tuple(each) if each is not None and len(each) <= MOST_GOLD else None for each in gold]

    def _said_at(self, place: int) -> list[Said]:
        if (said := self._said.get(place)) is None:
            cut = sentences.split(self._graph.passages[place].text)
            said = self._said[place] = [(each, frozenset(_WORD.findall(each.lower()))) for each in cut]
        return said

    async def with_gold(self, drafts: Sequence[Draft], k: int) -> list[MadeTask]:
        """Return the drafts that have a clear gold (see `gold`), with the share of it among the first `k` documents
        that one search for the question finds."""
        golds = await self.gold(drafts)
        clear = [(draft, gold) for draft, gold in zip(drafts, golds, strict=True) if gold is not None]
        found = await self._near([draft.question for draft, _ in clear])
        made = []
        for (draft, gold), places in zip(clear, found, strict=True):
            seen = {self._graph.passages[place].doc_id for place in places[:k]}
            made.append(MadeTask(draft=draft, gold=gold, reach=len(seen.intersection(gold)) / len(gold)))
        return made

    async def _near(self, queries: Sequence[str]) -> list[list[int]]:
        answers = await self._retriever.search([SearchRequest(query, SEARCHED) for query in queries])
        places = []
        for answer in answers:
            if isinstance(answer, RetrievalFault):
                raise InfrastructureFault(f"the index does not answer: {answer}")
            documents = dict.fromkeys(hit.chunk.doc_id for hit in answer.hits)
            places.append([self._places[doc_id] for doc_id in documents if doc_id in self._places])
        return places


def _serves(need: Need, passage: Passage) -> bool | None:
    """Return whether a passage holds the names of a need; None if that cannot be told."""
    wanted = [f" {normalise_name(name)} " for name in need.names]
    title = f" {normalise_name(passage.subject)} "
    text = f" {normalise_name(passage.text)} "
    if not all(name in text or name in title for name in wanted):
        return False
    if len(wanted) == 1:  # somewhere not within a longer name
        places = ((found.start(), found.end()) for found in re.finditer(re.escape(need.names[0]), passage.text))
        is_whole = any(is_whole_name(passage.text[:start][-80:], passage.text[end:][:80]) for start, end in places)
        return True if is_whole else None
    if title == wanted[0]:
        return True
    said = (f" {normalise_name(each)} " for each in sentences.split(passage.text))
    if not any(all(name in each for name in wanted) for each in said):
        return None
    # A year stands beside a name by chance too often.
    return None if any(YEAR.fullmatch(name) for name in need.names) else True


def _says(need: Need, said: Sequence[Said]) -> bool | None:
    """Return whether one of some sentences says nearly the same as that of a need; None if one says it with other
    figures or names."""
    own = set(_WORD.findall(need.quoted.lower()))
    alike = [
        each for each, words in said if len(words) >= ALIKE * len(own) and len(own & words) >= ALIKE * len(own | words)
    ]
    figures, *others = ({word for word in _WORD.findall(each) if word[0].isdigit()} for each in (need.quoted, *alike))
    same = (
        found == figures and all(name in each for name in need.names) for each, found in zip(alike, others, strict=True)
    )
    return True if any(same) else None if alike else False


class Splitter:
    """Gives each task a split as it comes. A document belongs to the split of the first task that has it, and that
    split is the one that lacks most of its share. `shares`: the share of each split; they add up to 1."""

    def __init__(self, shares: Mapping[str, float]) -> None:
        self._shares = shares
        self._owner: dict[DocId, str] = {}
        self._counts = dict.fromkeys(shares, 0)

    def place(self, gold: Sequence[DocId]) -> str | None:
        """Return the split of a task with this gold, or None if documents of it belong to different splits."""
        owners = {self._owner[doc_id] for doc_id in gold if doc_id in self._owner}
        if len(owners) > 1:
            return None
        total = sum(self._counts.values()) + 1
        lacking = max(self._shares, key=lambda name: self._shares[name] * total - self._counts[name])
        split = owners.pop() if owners else lacking
        self._counts[split] += 1
        self._owner.update(dict.fromkeys(gold, split))
        return split


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
    """Return tasks over a corpus, each with its split; the same arguments give the same tasks. `retriever`: searches
    the same corpus by BM25. `count`: the number of tasks; fewer are returned if the corpus does not give so many.
    `on_task`: called with the number of tasks that hold so far, and the number looked for. Raises CorpusError: the
    corpus gives no task; InfrastructureFault: the index does not answer."""
    graph = graph_of(documents)
    made = asyncio.run(_choose(graph, GoldReader(graph, retriever), count, seed, on_task))
    if not made:
        raise CorpusError("the corpus gives no task: it needs sentences with names or figures")
    return [task_of(graph, each, split) for each, split in made]


def task_of(graph: CorpusGraph, made: MadeTask, split: str) -> Task:
    """Return a task with its gold and, as metadata, what is known of how it was made."""
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
    said = facts_of(graph)

    def rng(form: str) -> random.Random:
        return random.Random(f"{seed}/{form}")

    return {
        SINGLE: _in_turn(
            forms.single_drafts(said, rng("single")),
            forms.gap_drafts(graph, rng("gap")),
            forms.description_drafts(graph, rng("described")),
        ),
        BRIDGE: _in_turn(
            forms.chain_drafts(said, rng("chain")),
            forms.quote_chain_drafts(said, rng("quoted")),
            forms.lead_drafts(graph, rng("lead")),
        ),
        COMPARISON: forms.comparison_drafts(said, rng("comparison")),
        INTERSECTION: forms.pair_drafts(graph, rng("shared")),
        CLAIM: _in_turn(forms.claim_drafts(said, rng("claim")), forms.change_drafts(graph, rng("changed"))),
        ASPECT: forms.aspect_drafts(graph, rng("aspect")),
    }


async def _choose(
    graph: CorpusGraph, reader: GoldReader, wanted: int, seed: int, on_task: Callable[[int, int], None]
) -> list[tuple[MadeTask, str]]:
    spare = {SINGLE: forms.excerpt_drafts(graph, random.Random(f"{seed}/excerpt"))}  # where the others do not suffice
    rounds: list[Mapping[str, Iterator[Draft]]] = [drafts_of(graph, seed), spare]
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


async def _with_gold(reader: GoldReader, drafts: Iterator[Draft]) -> AsyncIterator[MadeTask]:
    while batch := list(islice(drafts, BATCH)):
        for task in await reader.with_gold(batch, FOUND):
            yield task


def _holds(graph: CorpusGraph, task: MadeTask, known: KnownQueries) -> bool:
    draft = task.draft
    ends = [head(graph.passages[need.passage].subject) for need in draft.needs[1:]]
    if draft.kind == BRIDGE and (task.reach == 1 or any(holds_name(draft.question, each) for each in ends)):
        return False
    if draft.kind in (SINGLE, CLAIM) and task.reach < 1:
        return False  # too many documents are like it
    if draft.form == DESCRIPTION and len(task.gold) > 1:
        return False
    if draft.kind in (SINGLE, BRIDGE) and holds_name(draft.question, draft.answer):
        return False
    return known.match(draft.question) is None


def _in_turn(*each_form: Iterator[Draft]) -> Iterator[Draft]:
    left = list(each_form)
    while left:
        for form in list(left):
            draft = next(form, None)
            if draft is None:
                left.remove(form)
            else:
                yield draft


VERB = "tasks make"
TEMPLATE = "template"
FORMAT = 7
"""Counts changes in the tasks that are made of a corpus."""


def write_tasks(
    source: Source,
    index: str,
    out: Path,
    config: Config,
    *,
    count: int,
    seed: int,
    writer: QuestionWriter | None = None,
    force: bool = False,
    on_reply: Callable[[int, int, int], None] = lambda done, of, tokens: None,
    on_task: Callable[[int, int], None] = lambda done, of: None,
) -> dict[str, Any]:
    """Make tasks over a corpus and write both as a BEIR folder, if that is not done yet; return counts
    of documents and tasks, and what a writer wrote and cost. `index`: of the corpus, as `open_retriever` takes it.
    `writer`: a model that writes the questions anew; None leaves those of the templates. `on_reply`: as in `rewrite`.
    `on_task`: as in `make_tasks`. Raises UsageError: the folder holds something else or cannot be written, the
    documents are on the web, or the writer would refuse every request; CorpusError: the corpus cannot be read, or gives
    no task; InfrastructureFault: the index or the writer does not answer; the same call goes on."""
    if not source.has_documents:
        raise UsageError(f"{source.name} has its documents on the web: tasks are made from documents that are here")
    inputs = {"source": source.name, "corpus": source.fingerprint, "count": count, "seed": seed, "format": FORMAT}
    inputs["writer"] = TEMPLATE if writer is None else writer.name
    stage = Stage(VERB, inputs)
    done = read_stage(out) if out.is_dir() else None
    if done is not None and stage.is_done(out) and not force:
        return done.outputs
    if not force:
        refuse_other(stage, out, "set of tasks")
    documents = list(source.documents())
    refuse_full_disk(out, 2 * sum(len(document.text) for document in documents))
    tasks = make_tasks(documents, open_retriever(index, config), count, seed, on_task)
    outputs = {"documents": len(documents), **counts_of(tasks), "left_out": len(source.problems)}
    if force:
        (out / REPLIES).unlink(missing_ok=True)
    with under_way(stage, out):
        if writer is not None:
            titles = {document.doc_id: document.title for document in documents}
            tasks, written = writer.rewrite(tasks, titles, out, on_reply)
            outputs["writer"] = msgspec.to_builtins(written)
        beir.write(out, documents, tasks)
        stage.write(out, status="finished", outputs=outputs)
    return outputs


def counts_of(tasks: Sequence[Task]) -> dict[str, Any]:
    """Return the numbers of tasks, of those in each split and of each kind, and of those that one search finds."""
    return {
        "tasks": len(tasks),
        "splits": dict(sorted(Counter(task.split for task in tasks).items())),
        "kinds": dict(Counter(task.metadata["kind"] for task in tasks).most_common()),
        "one_search": sum(task.metadata["reach"] == 1 for task in tasks),
    }
