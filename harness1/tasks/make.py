"""Tasks from a corpus: drafts with their gold and their splits, written as a dataset in BEIR layout. Other documents
that answer as well are found by search: they join the gold, or the task is dropped."""

from __future__ import annotations

import asyncio
import random
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from harness1.config import Config
from harness1.data import beir
from harness1.data.leaks import KnownQueries
from harness1.data.origins import origins_of_source, searched_origins, united
from harness1.data.source import Source
from harness1.errors import CorpusError, InfrastructureFault, UsageError
from harness1.memory import sentences
from harness1.memory.question import head, normalise_name
from harness1.models.spec import policy_origins
from harness1.plain import digest
from harness1.records import DocId, Gold, Task
from harness1.retrieval.corpus import Document
from harness1.retrieval.open import open_retriever
from harness1.retrieval.protocol import RetrievalFault, Retriever, SearchRequest
from harness1.runs.files import Stage, read_stage, refuse_full_disk, refuse_other, under_way
from harness1.tasks import drafts as forms
from harness1.tasks.drafts import ASPECT, BRIDGE, CLAIM, COMPARISON, DESCRIPTION, INTERSECTION, SINGLE, Draft, Need
from harness1.tasks.graph import YEAR, CorpusGraph, Passage, holds_name, is_whole_name
from harness1.tasks.questions import REPLIES, QuestionWriter

SEARCHED = 20  # documents that are read for each piece of evidence
ALIKE = 0.6  # share of the words of two sentences in common above which one says what the other does
MOST_GOLD = 8
FOUND = 10  # documents of one search; a bridge whose gold is all among them needs no second search, and is left out
BATCH = 16  # drafts that are looked for in the corpus together
_WORD = re.compile(r"\w+")
Said = tuple[str, frozenset[str]]  # a sentence and its words in small letters


class GoldReader:
    """Reads a corpus for other documents that serve as evidence."""

    def __init__(self, graph: CorpusGraph, retriever: Retriever) -> None:
        self._graph, self._retriever = graph, retriever
        self._places = {passage.doc_id: place for place, passage in enumerate(graph.passages)}
        self._said: dict[int, list[Said]] = {}

    async def with_gold(self, drafts: Iterator[Draft]) -> AsyncIterator[Draft]:
        """Yield the drafts that have a clear gold: their own passages, and others that say the same. It is not clear
        if a passage holds the names of a need apart from each other, or if too many answer."""
        while batch := list(islice(drafts, BATCH)):
            needs = [(at, need) for at, draft in enumerate(batch) for need in draft.needs]
            found = await self._near([need.quoted or " ".join(need.names) for _, need in needs])
            golds = [{self._graph.passages[need.passage].doc_id: None for need in draft.needs} for draft in batch]
            unclear: set[int] = set()
            for (at, need), places in zip(needs, found, strict=True):
                for place in places:
                    passage = self._graph.passages[place]
                    if at in unclear or passage.doc_id in golds[at]:
                        continue
                    serves = _says(need, self._said_at(place)) if need.quoted else _serves(need, passage)
                    if serves is None:
                        unclear.add(at)
                    elif serves:
                        golds[at][passage.doc_id] = None
            clear = [at for at, gold in enumerate(golds) if at not in unclear and len(gold) <= MOST_GOLD]
            found = await self._near([batch[at].question for at in clear])
            for at, places in zip(clear, found, strict=True):
                seen = {self._graph.passages[place].doc_id for place in places[:FOUND]}
                yield replace(batch[at], gold=tuple(golds[at]), reach=len(seen & golds[at].keys()) / len(golds[at]))

    def _said_at(self, place: int) -> list[Said]:
        if place not in self._said:
            cut = sentences.split(self._graph.passages[place].text)
            self._said[place] = [(each, frozenset(_WORD.findall(each.lower()))) for each in cut]
        return self._said[place]

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
    """Return whether a sentence says nearly what that of a need does; None if with other figures or names."""
    own = set(_WORD.findall(need.quoted.lower()))
    alike = [each for each, its in said if len(its) >= ALIKE * len(own) and len(own & its) >= ALIKE * len(own | its)]
    figures, *others = ({word for word in _WORD.findall(each) if word[0].isdigit()} for each in (need.quoted, *alike))
    same = (its == figures and all(name in one for name in need.names) for one, its in zip(alike, others, strict=True))
    return True if any(same) else None if alike else False


class Splitter:
    """Gives each task a split as it comes. A document belongs to the split of the first task that has it, and that
    split is the one that lacks most of its share. `shares`: the share of each split; they add up to 1."""

    def __init__(self, shares: Mapping[str, float]) -> None:
        self._shares, self._counts = shares, dict.fromkeys(shares, 0)
        self._owner: dict[DocId, str] = {}

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


WEIGHTS = {BRIDGE: 4, SINGLE: 2, COMPARISON: 1, INTERSECTION: 1, CLAIM: 1, ASPECT: 1}  # shares, while a kind lasts
SPLITS = {"train": 0.8, "dev": 0.1, "test": 0.1}
NEAR = 0.8  # similarity of the words of two questions above which only the first is kept
VERDICTS = ("supported", "refuted")
UNEVEN = 2  # most claims by which one verdict leads: a reader could say it without reading


def make_tasks(
    documents: Sequence[Document],
    retriever: Retriever,
    count: int,
    seed: int,
    on_task: Callable[[int, int], None] = lambda done, of: None,
) -> list[Task]:
    """Return tasks over a corpus, each with its split; the same arguments give the same tasks, and fewer than
    `count` if the corpus does not give so many. `retriever`: searches the same corpus by BM25. `on_task`: called
    with the number of tasks so far, and the number looked for."""
    graph = CorpusGraph(documents)
    tasks = asyncio.run(_choose(graph, GoldReader(graph, retriever), count, seed, on_task))
    if not tasks:
        raise CorpusError("the corpus gives no task: it needs sentences with names or figures")
    return tasks


def _task_of(graph: CorpusGraph, draft: Draft, split: str) -> Task:
    chain = [graph.passages[need.passage].doc_id for need in draft.needs]
    metadata = {
        "kind": draft.kind,
        "form": draft.form,
        "chain": chain,
        "links": list(draft.links),
        "reach": round(draft.reach, 4),
        "difficulty": len(chain) + (draft.reach < 1),
        "origin": "template",
    }
    gold = Gold(dict.fromkeys(draft.gold, 1), answers=(draft.answer,) if draft.answer else ())
    return Task(f"{draft.kind}-{digest(draft.question)[:10]}", draft.question, split, gold, metadata)


Maker = Callable[[CorpusGraph, random.Random], Iterator[Draft]]
FORMS: Mapping[str, Mapping[str, Maker]] = {
    SINGLE: {"single": forms.single_drafts, "gap": forms.gap_drafts, "described": forms.description_drafts},
    BRIDGE: {"chain": forms.chain_drafts, "quoted": forms.quote_chain_drafts, "lead": forms.lead_drafts},
    COMPARISON: {"comparison": forms.comparison_drafts},
    INTERSECTION: {"shared": forms.pair_drafts},
    CLAIM: {"claim": forms.claim_drafts, "changed": forms.change_drafts},
    ASPECT: {"aspect": forms.aspect_drafts},
}  # what makes the drafts of each kind, by the seed's word for a form


def _in_turn(graph: CorpusGraph, makers: Mapping[str, Maker], seed: int) -> Iterator[Draft]:
    for drafts in zip_longest(*(make(graph, random.Random(f"{seed}/{form}")) for form, make in makers.items())):
        yield from filter(None, drafts)


async def _choose(
    graph: CorpusGraph, reader: GoldReader, wanted: int, seed: int, on_task: Callable[[int, int], None]
) -> list[Task]:
    rounds = [FORMS, {SINGLE: {"excerpt": forms.excerpt_drafts}}]  # the last where the others do not suffice
    known, splitter = KnownQueries(NEAR), Splitter(SPLITS)
    counts, verdicts = dict.fromkeys(WEIGHTS, 0), dict.fromkeys(VERDICTS, 0)
    tasks: list[Task] = []
    drafts: dict[str, AsyncIterator[Draft]] = {}
    while (drafts or rounds) and len(tasks) < wanted:
        if not drafts:
            drafts = {kind: reader.with_gold(_in_turn(graph, makers, seed)) for kind, makers in rounds.pop(0).items()}
        kind = min(drafts, key=lambda name: counts[name] / WEIGHTS[name])
        draft = await anext(drafts[kind], None)
        if draft is None:
            del drafts[kind]
        elif kind == CLAIM and verdicts[draft.answer] > min(verdicts.values()) + UNEVEN:
            continue
        elif _holds(graph, draft, known) and (split := splitter.place(draft.gold)):
            if kind == CLAIM:
                verdicts[draft.answer] += 1
            tasks.append(_task_of(graph, draft, split))
            known.add(draft.question, draft.question)
            counts[kind] += 1
            on_task(len(tasks), wanted)
    random.Random(f"{seed}/order").shuffle(tasks)
    return tasks


def _holds(graph: CorpusGraph, draft: Draft, known: KnownQueries) -> bool:
    ends = [head(graph.passages[need.passage].subject) for need in draft.needs[1:]]
    if draft.kind == BRIDGE and (draft.reach == 1 or any(holds_name(draft.question, each) for each in ends)):
        return False
    is_common = draft.kind in (SINGLE, CLAIM) and draft.reach < 1  # too many documents are like it
    if is_common or (draft.form == DESCRIPTION and len(draft.gold) > 1):
        return False
    is_told = draft.kind in (SINGLE, BRIDGE) and holds_name(draft.question, draft.answer)
    return not is_told and known.match(draft.question) is None


VERB = "tasks make"
TEMPLATE = "template"
FORMAT = 7  # counts changes in the tasks that are made of a corpus


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
    """Make tasks over a corpus and write both as a BEIR folder, if that is not done yet; return counts, and what a
    `writer` cost: a model that writes the questions of the templates anew. `on_reply`: as in `rewrite`. Raises
    UsageError: the folder holds something else, or the documents are on the web; otherwise as `make_tasks` and
    `rewrite`; the same call goes on."""
    if not source.has_documents:
        raise UsageError(f"{source.name} has its documents on the web: tasks are made from documents that are here")
    inputs = {"source": source.name, "corpus": source.fingerprint, "count": count, "seed": seed, "format": FORMAT}
    inputs["writer"] = TEMPLATE if writer is None else writer.name
    wrote = policy_origins(writer.name) if writer is not None else ()
    stage = Stage(VERB, inputs, origins=united(origins_of_source(source), searched_origins(index), wrote))
    if not force:
        refuse_other(stage, out, "set of tasks")
        if stage.is_done(out) and (done := read_stage(out)):
            return done.outputs
    documents = list(source.documents())
    refuse_full_disk(out, 2 * sum(len(document.text) for document in documents))
    tasks = make_tasks(documents, open_retriever(index, config), count, seed, on_task)
    outputs: dict[str, Any] = {
        "documents": len(documents),
        "tasks": len(tasks),
        "splits": dict(sorted(Counter(task.split for task in tasks).items())),
        "kinds": dict(Counter(task.metadata["kind"] for task in tasks).most_common()),
        "one_search": sum(task.metadata["reach"] == 1 for task in tasks),
        "left_out": len(source.problems),
    }
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
