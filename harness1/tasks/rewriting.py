"""Has a language model write the questions of tasks anew. It sees neither answers nor documents, so that it cannot give
them away; each reply is stored when it arrives, so that a stopped work continues without asking twice."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from harness1.errors import MALFORMED, InfrastructureFault, SchemaError
from harness1.hashing import digest
from harness1.http.completions import Completion, Messages, bare, inert
from harness1.memory.entities import extract
from harness1.memory.question import head, normalised_name
from harness1.models.open import Completing
from harness1.records import DocId, Record, Task
from harness1.runs.journal import Journal, read_lines
from harness1.tasks.drafts import BRIDGE, CLAIM, SINGLE

REPLIES = "writer.jsonl"
MOST_TOKENS = 1024
"""Tokens of a reply, including the thoughts before it."""
LONGEST = 500
"""Characters of a question."""
SYSTEM = (
    "You write the questions of a search test. Write the given question anew, as a person would ask it who has not seen"
    " the documents. Keep every name, number and date, and everything else that narrows the answer down. A gap, ____,"
    " stands for what is not known: ask for it in words, and do not fill it in. Of a claim, keep what it claims, true"
    " or not. Add nothing that you know. Reply with the question alone, in one line."
)
LEAST_KEPT = 1 / 2
"""Share of the longer words of a template outside names, by their beginnings, that a question has to keep."""
_FIGURE = re.compile(r"\d[\d.,]*\d|\d")
_LONG_WORD = re.compile(r"[^\W\d_]{5,}")
_DENIAL = re.compile(r"\b(?:not|never|no|nor|without|\w+n't)\b", re.I)


class Reply(Record):
    """The reply to one prompt of one model. Tokens are None where they are not counted."""

    writer: str
    prompt: str
    """The hash of the messages."""
    text: str
    finish_reason: str = ""
    prompt_tokens: int | None = None
    output_tokens: int | None = None


class Writing(Record):
    """What a model wrote, and what it cost."""

    writer: str
    written: int = 0
    kept: dict[str, int] = {}
    """Tasks that keep the question of the template, by what was wrong with the reply."""
    prompt_tokens: int = 0
    output_tokens: int = 0


@dataclass(frozen=True)
class Writer:
    """A model that writes questions anew. `places` is the number of requests at a time."""

    name: str
    model: Completing
    places: int = 16

    def rewrite(
        self,
        tasks: Sequence[Task],
        titles: Mapping[DocId, str],
        out: Path,
        on_reply: Callable[[int, int, int], None] = lambda done, of, tokens: None,
    ) -> tuple[list[Task], Writing]:
        """Ask for what the folder does not hold yet; return the tasks with the questions that hold, and the costs.

        Args:
            titles: of the documents of the corpus.
            on_reply: called with the number of replies, of tasks, and of tokens so far.

        Raises:
            InfrastructureFault: the model did not answer every request; what it answered is stored.
            UsageError: the model would refuse every request, or the folder cannot be written.
            SchemaError: the stored replies are damaged.
        """
        with Journal(out, REPLIES) as journal:
            known = {(each.writer, each.prompt): each for each in _read(out / REPLIES)}
            replies = asyncio.run(self._ask(tasks, known, journal, on_reply))
        told: list[Task] = []
        kept: dict[str, int] = {}
        for task, reply in zip(tasks, replies, strict=True):
            question = " ".join(bare(reply.text).split()).strip('"“”')
            if fault := fault_of(question, task, titles):
                kept[fault] = kept.get(fault, 0) + 1
                told.append(task)
            else:
                metadata = {**task.metadata, "origin": self.name, "template": task.query}
                told.append(msgspec.structs.replace(task, query=question, metadata=metadata))
        tokens = (sum(each.prompt_tokens or 0 for each in replies), sum(each.output_tokens or 0 for each in replies))
        return told, Writing(self.name, len(tasks) - sum(kept.values()), kept, *tokens)

    async def _ask(
        self,
        tasks: Sequence[Task],
        known: Mapping[tuple[str, str], Reply],
        journal: Journal,
        on_reply: Callable[[int, int, int], None],
    ) -> list[Reply]:
        turns, got = asyncio.Semaphore(self.places), list[Reply]()

        async def one(task: Task) -> Reply | InfrastructureFault:
            messages = asking(task)
            prompt = digest(messages)
            if (reply := known.get((self.name, prompt))) is None:
                try:
                    async with turns:
                        completion: Completion = await self.model.complete(messages)
                except InfrastructureFault as fault:
                    return fault
                reply = Reply(self.name, prompt, **msgspec.structs.asdict(completion))
                journal.write(msgspec.json.encode(reply))
            got.append(reply)
            on_reply(len(got), len(tasks), sum((each.prompt_tokens or 0) + (each.output_tokens or 0) for each in got))
            return reply

        replies = await asyncio.gather(*map(one, tasks))
        if faults := [each for each in replies if isinstance(each, InfrastructureFault)]:
            raise InfrastructureFault(
                f"{self.name} left {len(faults)} of {len(tasks)} requests unanswered; "
                f"the same command asks them again: {faults[0]}"
            )
        return [each for each in replies if isinstance(each, Reply)]


def asking(task: Task) -> Messages:
    """Return the request for one question."""
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": inert(task.query)}]


def fault_of(question: str, task: Task, titles: Mapping[DocId, str]) -> str:
    """Return what is wrong with a rewritten question, or "": it is empty or too long, has lost a name, a figure, a
    denial or most of its words, tells the answer, or names a gold document that the template does not name."""
    template, kind = task.query, task.metadata.get("kind")
    if not question or "____" in question:
        return "empty"
    if len(question) > min(LONGEST, 2 * len(template) + 80):
        return "too long"
    if kind in (SINGLE, BRIDGE) and task.gold and any(_names(question, answer) for answer in task.gold.answers):
        return "tells the answer"
    gold = task.gold.relevant if task.gold else {}
    subjects = [head(titles.get(doc_id, "")) for doc_id in gold]
    if any(_names(question, each) and not _names(template, each) for each in subjects):
        return "names gold"
    names = [name for name in extract(template, len(template)) if name.lower() not in _OWN]
    if not all(_names(question, name) for name in names):
        return "lost a name"
    if sorted(_FIGURE.findall(question)) != sorted(_FIGURE.findall(template)):
        return "changed a figure"
    words = {word[:4] for word in _LONG_WORD.findall(template) if word[0].islower() and word not in _OWN}
    if len(words & {word[:4] for word in _LONG_WORD.findall(question.lower())}) < LEAST_KEPT * len(words):
        return "lost its words"
    denied = bool(_DENIAL.search(question)), bool(_DENIAL.search(template))
    return "changed a claim" if kind == CLAIM and denied[0] != denied[1] else ""


_OWN = frozenset(
    ("which", "find", "fill", "check", "is", "how", "what", "who", "where", "true", "document", "documents")
)
"""First words of templates."""


def _names(text: str, name: str) -> bool:
    words = normalised_name(name)
    return bool(words) and f" {words} " in f" {normalised_name(text)} "


def _read(path: Path) -> Iterator[Reply]:
    for number, line in read_lines(path):
        try:
            yield msgspec.json.decode(line, type=Reply)
        except MALFORMED as error:
            raise SchemaError(f"{path}:{number}: not a writer's reply: {error}") from error
