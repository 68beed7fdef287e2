"""Downstream answers: a frozen model answers the tasks of a finished run without documents, from one search, and from
what was delivered. Each reply is stored when it arrives, as one line of JSON, so a stopped run can continue."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import msgspec

from harness1.config import Machine
from harness1.env.environment import call_engine
from harness1.errors import InfrastructureFault, SchemaError, UsageError
from harness1.eval.run import Run
from harness1.http.model_endpoint import Messages, defuse, restore, strip_answer
from harness1.models.open import Completing
from harness1.plain import digest
from harness1.records import Chunk, ChunkId, DocId, Record, Status, UnitId
from harness1.retrieval.corpus import approximate_tokens
from harness1.retrieval.protocol import RetrievalFault, Retriever, SearchRequest, SearchResult
from harness1.reward.measures import delivery
from harness1.runs.journal import Journal, read_line_records

PROMPTS: Mapping[str, str] = MappingProxyType(
    msgspec.toml.decode(resources.files("harness1.eval").joinpath("answers.toml").read_bytes(), type=dict[str, str])
)


def write_prompt(kind: str, *parts: tuple[str, str]) -> Messages:
    """Return what asks for an answer (`closed`, `open`) or a verdict (`judge`): no text ends its own tags."""
    told = "\n".join(f"<{name}>\n{defuse(text)}\n</{name}>" for name, text in parts)
    return [{"role": "system", "content": PROMPTS[kind]}, {"role": "user", "content": told}]


_LABEL = re.compile(r"^(?:the\s+)?answer\s*(?:is\s*:|:)\s*", re.I)


def read_answer(said: str) -> str:
    """Return the answer in a reply: its first line with words, after thoughts and a label `Answer:`; empty if none."""
    lines = (_LABEL.sub("", line.strip().strip("*`")).strip("*` ") for line in strip_answer(said).splitlines())
    return restore(" ".join(next((line for line in lines if line), "").split()))


def read_verdict(said: str) -> bool | None:
    """Return whether a reply is `correct`; None unless it is that or `incorrect`, after thoughts if there are any."""
    return {"correct": True, "incorrect": False}.get(strip_answer(said).removesuffix(".").strip("*` ").casefold())


class QuotedDocument(Record):
    """A document in an answerer's prompt, where its id is not shown."""

    unit_id: UnitId
    title: str
    text: str

    @property
    def shown(self) -> str:
        return f"{self.title}\n{self.text}" if self.title else self.text


def within_budget(sources: Sequence[QuotedDocument], tokens: int) -> tuple[QuotedDocument, ...]:
    """Return the first whole documents that fit into `tokens` (characters / 4), without those that never would."""
    kept, room = list[QuotedDocument](), tokens
    for source in sources:
        size = approximate_tokens(source.title) + approximate_tokens(source.text)
        if size <= tokens:
            room -= size
            kept += [source] if room >= 0 else []
    return tuple(kept)


class DocumentReader:
    """A reader of full texts from a retriever. Raises InfrastructureFault: the index failed, or lacks a unit."""

    def __init__(self, retriever: Retriever, machine: Machine) -> None:
        self._retriever, self._machine = retriever, machine
        self.index_hash, self._by_chunk = retriever.info.index_hash, retriever.info.unit == "chunk"

    async def sources(self, units: Sequence[UnitId]) -> list[QuotedDocument]:
        """Return the documents, or the chunks if the corpus is scored by chunks, in the order requested."""
        return list(await asyncio.gather(*map(self._source, units)))

    async def single_shot(self, query: str, size: int) -> list[UnitId]:
        """Return the first `size` units of a single search, which is deepened until its chunks make so many."""
        depth, units = size, list[UnitId]()

        async def search() -> SearchResult | RetrievalFault:
            request = SearchRequest(query, depth, deadline=self._machine.call_deadline_s)
            (found,) = await self._retriever.search([request])
            return found

        while len(units) < size:
            hits = (await call_engine(search, self._machine)).hits
            names = (scored.chunk.chunk_id if self._by_chunk else scored.chunk.doc_id for scored in hits)
            units = list(dict.fromkeys(map(UnitId, names)))
            if len(hits) < depth:
                break
            depth *= 2
        return units[:size]

    async def _source(self, unit: UnitId) -> QuotedDocument:
        def ask() -> Awaitable[tuple[Chunk, ...] | RetrievalFault]:
            return self._retriever.get([ChunkId(unit)]) if self._by_chunk else self._retriever.read(DocId(unit))

        chunks = await call_engine(ask, self._machine)
        if not chunks:
            raise InfrastructureFault(f"the index no longer has {unit!r}")
        # Chunks are cut at white space, which is lost: replace it by a line break.
        return QuotedDocument(unit, chunks[0].title, "\n".join(chunk.text for chunk in chunks))


ANSWERS = "answers.jsonl"
Condition = Literal["closed", "single", "curated"]
CONDITIONS: tuple[Condition, ...] = ("closed", "single", "curated")  # no documents, those of one search, the delivered
Role = Literal["answer", "verdict"]
ReplyKey = tuple[Role, str, int, Condition, str, str]
"""The identity of a reply; the last part is a hash of everything in the request, documents and settings included."""


class Reply(Record, kw_only=True):
    """The output of a model for a prompt: an answer, or a judge's verdict on one. `model`: as the user typed it.
    `prompt_tokens`: as the server counts them. `documents`: in order, without `left_out` ones."""

    role: Role = "answer"
    task_id: str
    sample_idx: int = 0
    condition: Condition
    model: str
    prompt: str
    text: str
    finish_reason: str = ""
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    documents: tuple[UnitId, ...] = ()
    left_out: int = 0

    @property
    def key(self) -> ReplyKey:
        return self.role, self.task_id, self.sample_idx, self.condition, self.model, self.prompt


class ReplyStore(Journal):
    """The replies stored in a folder, as a `Journal`, the last of each key; SchemaError if a line is not a reply."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, ANSWERS)
        try:
            self.kept = {reply.key: reply for reply in read_line_records(folder / ANSWERS, Reply, "an answer")}
        except SchemaError:
            self.close()
            raise

    def append(self, reply: Reply) -> None:
        """Write one reply; when this returns, the operating system has it."""
        self.write(msgspec.json.encode(reply))
        self.kept[reply.key] = reply


class AnswerItem(Record):
    """The question of an episode's task, the right answers, and the delivered units."""

    task_id: str
    sample_idx: int
    query: str
    golds: tuple[str, ...]
    delivered: tuple[UnitId, ...]


AnswerJob = tuple[AnswerItem, Condition]


class Answered(Record):
    """The result of a job: the answer and, if it was judged, the verdict; `fault` is why one of them is missing."""

    question: AnswerItem
    condition: Condition
    answer: Reply | None = None
    verdict: Reply | None = None
    fault: str = ""

    @property
    def text(self) -> str:
        """The answer as it is scored."""
        return read_answer(self.answer.text) if self.answer else ""


@dataclass(frozen=True)
class NamedModel:
    """A model with the name that the user gave it."""

    name: str
    completer: Completing

    @property
    def described(self) -> dict[str, Any]:
        return {"model": self.name, "settings": {"temperature": 0, "max_tokens": self.completer.most_tokens}}


@dataclass(frozen=True)
class Answering:
    """Questions, the models that answer and judge, and the most tokens of documents in a prompt (`within_budget`)."""

    questions: Sequence[AnswerItem]
    texts: DocumentReader
    answerer: NamedModel
    judge: NamedModel | None = None
    conditions: Sequence[Condition] = CONDITIONS
    tokens: int = 24000

    def jobs(self) -> Iterator[AnswerJob]:
        """Yield every question under every condition. Closed-book questions, equal for all samples, are asked once."""
        met: set[str] = set()
        for question in self.questions:
            for condition in self.conditions:
                if condition != "closed" or question.task_id not in met:
                    yield question, condition
            met.add(question.task_id)

    async def answer(self, job: AnswerJob, store: ReplyStore) -> Answered:
        """Return the answer and the verdict, stored or asked for. Raises UsageError: a server refuses all requests."""
        question, condition = job
        answer = verdict = None
        fault, asked = "", ("question", question.query)

        async def ask(role: Role, model: NamedModel, messages: Messages, **shown: Any) -> Reply:
            prompt = digest([messages, {"temperature": 0, "most_tokens": model.completer.most_tokens}])
            task: dict[str, Any] = {"task_id": question.task_id, "sample_idx": question.sample_idx, **shown}
            reply = Reply(role=role, condition=condition, model=model.name, prompt=prompt, text="", **task)
            if (known := store.kept.get(reply.key)) is not None:
                return known
            completion = await model.completer.complete(messages)
            reply = msgspec.structs.replace(reply, **msgspec.structs.asdict(completion))
            store.append(reply)
            return reply

        try:
            units: Sequence[UnitId] = question.delivered if condition == "curated" else ()
            if condition == "single":
                units = await self.texts.single_shot(question.query, len(question.delivered))
            shown = within_budget(await self.texts.sources(units), self.tokens)
            given = tuple(source.unit_id for source in shown)
            kind = "closed" if condition == "closed" else "open"
            messages = write_prompt(kind, *(("document", source.shown) for source in shown), asked)
            answer = await ask("answer", self.answerer, messages, documents=given, left_out=len(units) - len(given))
            if self.judge is not None:
                said = ("correct", "\n".join(question.golds)), ("answer", read_answer(answer.text))
                verdict = await ask("verdict", self.judge, write_prompt("judge", asked, *said))
        except InfrastructureFault as error:
            fault = str(error)
        return Answered(question, condition, answer, verdict, fault)


def questions_of(run: Run, limit: int = 0) -> tuple[list[AnswerItem], dict[str, int]]:
    """Return the questions of the first `limit` tasks of a run (0: all), and the counts of `tasks` with a right answer,
    `without_answers`, and of `broken_episodes`. Raises UsageError: the run is not finished, or nothing can be asked."""
    if run.stage.status != "finished":
        raise UsageError(f"{run.folder} is not finished: run the same `harness1 eval` again first")
    tasks = list(run.tasks.values())[: limit or None]
    golds = {task.task_id: task.gold.answers for task in tasks if task.gold and task.gold.answers}
    whole = [episode for task in golds for episode in run.samples.get(task, ())]
    asked = [
        AnswerItem(each.task.task_id, each.sample_idx, each.task.query, golds[each.task.task_id], delivery(each))
        for each in whole
        if each.status is not Status.INFRA_ERROR
    ]
    lacking, broken = len(tasks) - len(golds), len(whole) - len(asked)
    if not asked:
        why = f"{lacking} of its {len(tasks)} tasks have no right answer in {run.dataset}"
        raise UsageError(f"{run.folder} cannot be answered: {why}, and {broken} episodes of the others are broken")
    return asked, {"tasks": len(golds), "without_answers": lacking, "broken_episodes": broken}


async def answer_all(
    work: Answering, store: ReplyStore, places: int, on_answer: Callable[[Answered], None] = lambda _: None
) -> list[Answered]:
    """Do all jobs, `places` at a time; return results as they finished. Raises UsageError: a server refuses all."""
    jobs, found = work.jobs(), list[Answered]()

    async def worker() -> None:
        for job in jobs:
            found.append(await work.answer(job, store))
            on_answer(found[-1])

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(places):
                group.create_task(worker())
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return found
