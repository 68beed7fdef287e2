"""Downstream answers: a frozen model answers the tasks of a finished run without documents, from one search, and from
what was delivered. Each reply is stored when it arrives, as one line of JSON, so a stopped run can continue."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from harness1.errors import MALFORMED, InfrastructureFault, SchemaError, UsageError
from harness1.eval.answers.prompts import (
    DocumentReader,
    closed_question,
    judge_question,
    open_question,
    prompt_hash,
    read_answer,
    within_budget,
)
from harness1.eval.run import Run
from harness1.http.model_endpoint import Completer, Messages
from harness1.records import Record, Status, UnitId
from harness1.reward.measures import delivered
from harness1.runs.journal import Journal, read_lines

ANSWERS = "answers.jsonl"
Condition = Literal["closed", "single", "curated"]
CONDITIONS: tuple[Condition, ...] = ("closed", "single", "curated")
"""Without documents; with those of one search for the question; with the curated set."""
Role = Literal["answer", "verdict"]


class ReplyKey(NamedTuple):
    """The identity of a reply. The prompt is a hash of everything in the request, documents and settings included."""

    role: Role
    task_id: str
    sample_idx: int
    condition: Condition
    model: str
    prompt: str


class Reply(Record, kw_only=True):
    """The whole output of a model for one prompt: an answer, or a judge's verdict on one."""

    role: Role = "answer"
    task_id: str
    sample_idx: int = 0
    condition: Condition
    model: str
    """The model's name as the user typed it, with the address of its server."""
    prompt: str
    """The hash of messages and settings."""
    text: str
    finish_reason: str = ""
    prompt_tokens: int | None = None
    """As counted by the server; None if it reports no counts."""
    output_tokens: int | None = None
    documents: tuple[UnitId, ...] = ()
    """The documents in the prompt, in order."""
    left_out: int = 0
    """Documents that did not fit."""

    @property
    def key(self) -> ReplyKey:
        return ReplyKey(self.role, self.task_id, self.sample_idx, self.condition, self.model, self.prompt)


class ReplyStore(Journal):
    """The replies stored in a folder, which one process at a time can hold.

    Attributes:
        kept: all replies by key; the last one if a key occurs again.

    Raises:
        UsageError: another process is writing to the folder, or it cannot be written.
        SchemaError: a line is not a reply.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, ANSWERS)
        try:
            self.kept = _read(folder / ANSWERS)
        except SchemaError:
            self.close()
            raise

    def append(self, reply: Reply) -> None:
        """Write one reply; when this returns, the operating system has it, and it survives a crash of this process."""
        self.write(msgspec.json.encode(reply))
        self.kept[reply.key] = reply


def _read(path: Path) -> dict[ReplyKey, Reply]:
    kept = {}
    for number, line in read_lines(path):
        try:
            reply = msgspec.json.decode(line, type=Reply)
        except MALFORMED as error:
            raise SchemaError(f"{path}:{number}: not an answer: {error}") from error
        kept[reply.key] = reply
    return kept


class AnswerItem(Record):
    """The question of an episode's task, the right answers, and the delivered units."""

    task_id: str
    sample_idx: int
    query: str
    golds: tuple[str, ...]
    delivered: tuple[UnitId, ...]


class Questions(Record):
    """The questions of a run, and counts of those that cannot be asked."""

    asked: tuple[AnswerItem, ...]
    tasks: int
    """Tasks that have a right answer."""
    without_answers: int
    """Tasks that have no right answer."""
    broken: int
    """Episodes broken by the infrastructure, which delivered nothing that could be judged."""


class AnswerJob(NamedTuple):
    """A question under one condition."""

    question: AnswerItem
    condition: Condition


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
    completer: Completer


@dataclass(frozen=True)
class Answering:
    """Questions, the models that answer and judge, and the limits of a prompt.

    Args:
        single_size: documents of the single search; 0: as many as the episode delivered.
        documents, tokens: the most in one prompt (see `within_budget`).
    """

    questions: Sequence[AnswerItem]
    texts: DocumentReader
    answerer: NamedModel
    judge: NamedModel | None = None
    conditions: Sequence[Condition] = CONDITIONS
    single_size: int = 0
    documents: int = 30
    tokens: int = 24000

    def jobs(self) -> Iterator[AnswerJob]:
        """Yield every question under every condition. Closed-book questions, equal for all samples, are asked once."""
        met: set[str] = set()
        for question in self.questions:
            for condition in self.conditions:
                if condition != "closed" or question.task_id not in met:
                    yield AnswerJob(question, condition)
            met.add(question.task_id)

    async def answer(self, job: AnswerJob, store: ReplyStore) -> Answered:
        """Return the answer and the verdict from the store; request and store them if they are missing.

        Raises:
            UsageError: a server would refuse every request.
        """
        question, condition = job
        answer = verdict = None
        try:
            units = await self._units(job)
            shown = within_budget(await self.texts.sources(units[: self.documents]), self.documents, self.tokens)
            closed = condition == "closed"
            messages = closed_question(question.query) if closed else open_question(question.query, shown)
            given = tuple(source.unit_id for source in shown)
            answer = await _asked("answer", job, self.answerer, messages, store, given, len(units) - len(given))
            if self.judge is not None:
                judged = judge_question(question.query, question.golds, read_answer(answer.text))
                verdict = await _asked("verdict", job, self.judge, judged, store)
        except InfrastructureFault as fault:
            return Answered(question, condition, answer, verdict, str(fault))
        return Answered(question, condition, answer, verdict)

    async def _units(self, job: AnswerJob) -> Sequence[UnitId]:
        question, condition = job
        if condition == "single":
            return await self.texts.single_shot(question.query, self.single_size or len(question.delivered))
        return question.delivered if condition == "curated" else ()


async def _asked(
    role: Role,
    job: AnswerJob,
    model: NamedModel,
    messages: Messages,
    store: ReplyStore,
    documents: tuple[UnitId, ...] = (),
    left_out: int = 0,
) -> Reply:
    """Return the reply in the store, or request one and store it."""
    question, condition = job
    settings = {"temperature": 0, "most_tokens": model.completer.most_tokens}
    named = Reply(
        role=role,
        task_id=question.task_id,
        sample_idx=question.sample_idx,
        condition=condition,
        model=model.name,
        prompt=prompt_hash(messages, settings),
        text="",
        documents=documents,
        left_out=left_out,
    )
    if (known := store.kept.get(named.key)) is not None:
        return known
    completion = await model.completer.complete(messages)
    reply = msgspec.structs.replace(named, **msgspec.structs.asdict(completion))
    store.append(reply)
    return reply


def questions_of(run: Run, limit: int = 0) -> Questions:
    """Return the questions of a run, in order of its tasks and samples.

    Args:
        limit: use only the first `limit` tasks; 0: all.

    Raises:
        UsageError: the run is not finished, or none of its tasks has a right answer and an episode.
    """
    if run.stage.status != "finished":
        raise UsageError(f"{run.folder} is not finished: run the same `harness1 eval` again first")
    tasks = list(run.tasks.values())[: limit or None]
    golds = {task.task_id: task.gold.answers for task in tasks if task.gold and task.gold.answers}
    whole = [episode for task in golds for episode in run.samples(task)]
    asked = tuple(
        AnswerItem(each.task.task_id, each.sample_idx, each.task.query, golds[each.task.task_id], delivered(each))
        for each in whole
        if each.status is not Status.INFRA_ERROR
    )
    if not asked:
        raise UsageError(
            f"{run.folder} cannot be answered: {len(tasks) - len(golds)} of its {len(tasks)} tasks have no right"
            f" answer in {run.dataset}, and {len(whole)} episodes of the others are broken"
        )
    return Questions(asked, len(golds), len(tasks) - len(golds), len(whole) - len(asked))


async def answer_all(
    work: Answering, store: ReplyStore, places: int, on_answer: Callable[[Answered], None] = lambda _: None
) -> list[Answered]:
    """Carry out all jobs, `places` at a time, and return the results in the order they finished.

    Raises:
        UsageError: a server would refuse every request, or the store cannot be written.
    """
    jobs, found = work.jobs(), list[Answered]()

    async def worker() -> None:
        for job in jobs:
            answered = await work.answer(job, store)
            found.append(answered)
            on_answer(answered)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(places):
                group.create_task(worker())
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return found
