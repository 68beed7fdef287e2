"""The questions of tasks: written anew by a language model, which sees neither answers nor documents, so that it cannot
give them away; and checked, by faults that are read off them, and by policies that play."""

from __future__ import annotations

import asyncio
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import msgspec

from harness1.config import Config
from harness1.data.leaks import KnownQueries, gold_set
from harness1.data.source import Source
from harness1.errors import InfrastructureFault, UsageError
from harness1.eval.evaluate import Evaluation, ensure_run
from harness1.eval.metrics import task_metrics
from harness1.http.model_endpoint import defuse, strip_answer
from harness1.memory.entities import extract
from harness1.memory.question import head
from harness1.models.open import Completing
from harness1.plain import digest
from harness1.records import DocId, Record, Task
from harness1.runs.files import read_stage
from harness1.runs.folder import episodes_of
from harness1.runs.journal import Journal, read_line_records
from harness1.tasks.drafts import BRIDGE, CLAIM, SINGLE
from harness1.tasks.graph import holds_name

REPLIES = "writer.jsonl"
MOST_TOKENS = 1024  # tokens of a reply, including the thoughts before it
LONGEST = 500  # characters of a question
SYSTEM = (
    "You write the questions of a search test. Write the given question anew, as a person would ask it who has not seen"
    " the documents. Keep every name, number and date, and everything else that narrows the answer down. A gap, ____,"
    " stands for what is not known: ask for it in words, and do not fill it in. Of a claim, keep what it claims, true"
    " or not. Add nothing that you know. Reply with the question alone, in one line."
)
PLACES = 16  # requests at a time
LEAST_KEPT = 1 / 2  # share of the longer words of a template, outside names, that a question has to keep
# First words of templates:
_OWN = {"which", "find", "fill", "check", "is", "how", "what", "who", "where", "true", "document", "documents"}
_FIGURE = re.compile(r"\d[\d.,]*\d|\d")
_LONG_WORD = re.compile(r"[^\W\d_]{5,}")
_DENIAL = re.compile(r"\b(?:not|never|no|nor|without|\w+n't)\b", re.I)


class WriterReply(Record):
    """The reply to one prompt of one model. Tokens are None where they are not counted."""

    writer: str
    prompt: str  # the hash of the messages
    text: str
    finish_reason: str = ""
    prompt_tokens: int | None = None
    output_tokens: int | None = None


class Writing(Record):
    """What a model wrote, and what it cost."""

    writer: str
    written: int = 0
    kept: dict[str, int] = {}  # tasks that keep the question of the template, by what was wrong with the reply
    prompt_tokens: int = 0
    output_tokens: int = 0


@dataclass(frozen=True)
class QuestionWriter:
    """A model that writes questions anew."""

    name: str
    model: Completing

    def rewrite(
        self,
        tasks: Sequence[Task],
        titles: Mapping[DocId, str],
        out: Path,
        on_reply: Callable[[int, int, int], None] = lambda done, of, tokens: None,
    ) -> tuple[list[Task], Writing]:
        """Ask for what the folder does not hold yet; return the tasks with the questions that hold, and the costs.
        `on_reply`: called with the number of replies, of tasks, and of tokens so far. Raises InfrastructureFault: the
        model did not answer every request, and what it answered is stored; UsageError: it would refuse each."""
        with Journal(out, REPLIES) as journal:
            records = read_line_records(out / REPLIES, WriterReply, "a writer's reply")
            known = {(each.writer, each.prompt): each for each in records}
            replies = asyncio.run(self._ask(tasks, known, journal, on_reply))
        told, kept = list[Task](), Counter[str]()
        for task, reply in zip(tasks, replies, strict=True):
            question = " ".join(strip_answer(reply.text).split()).strip('"“”')
            if fault := fault_of(question, task, titles):
                kept[fault] += 1
                told.append(task)
            else:
                metadata = {**task.metadata, "origin": self.name, "template": task.query}
                told.append(msgspec.structs.replace(task, query=question, metadata=metadata))
        tokens = (sum(each.prompt_tokens or 0 for each in replies), sum(each.output_tokens or 0 for each in replies))
        return told, Writing(self.name, len(tasks) - kept.total(), dict(kept), *tokens)

    async def _ask(
        self,
        tasks: Sequence[Task],
        known: Mapping[tuple[str, str], WriterReply],
        journal: Journal,
        on_reply: Callable[[int, int, int], None],
    ) -> list[WriterReply]:
        turns, got = asyncio.Semaphore(PLACES), list[WriterReply]()

        async def one(task: Task) -> WriterReply | InfrastructureFault:
            asked = {"role": "user", "content": defuse(task.query)}
            prompt = digest(messages := [{"role": "system", "content": SYSTEM}, asked])
            if (reply := known.get((self.name, prompt))) is None:
                try:
                    async with turns:
                        completion = await self.model.complete(messages)
                except InfrastructureFault as fault:
                    return fault
                reply = WriterReply(self.name, prompt, **msgspec.structs.asdict(completion))
                journal.write(msgspec.json.encode(reply))
            got.append(reply)
            on_reply(len(got), len(tasks), sum((each.prompt_tokens or 0) + (each.output_tokens or 0) for each in got))
            return reply

        replies = await asyncio.gather(*map(one, tasks))
        if faults := [each for each in replies if isinstance(each, InfrastructureFault)]:
            left = f"{self.name} left {len(faults)} of {len(tasks)} requests unanswered"
            raise InfrastructureFault(f"{left}; the same command asks them again: {faults[0]}")
        return [each for each in replies if isinstance(each, WriterReply)]


def fault_of(question: str, task: Task, titles: Mapping[DocId, str]) -> str:
    """Return what is wrong with a rewritten question, or "": it is empty or too long, has lost a name, a figure, a
    denial or most of its words, tells the answer, or names a gold document that the template does not name."""
    template, kind = task.query, task.metadata.get("kind")
    if not question or "____" in question:
        return "empty"
    if len(question) > min(LONGEST, 2 * len(template) + 80):
        return "too long"
    if kind in (SINGLE, BRIDGE) and task.gold and any(holds_name(question, answer) for answer in task.gold.answers):
        return "tells the answer"
    gold = task.gold.relevant if task.gold else {}
    subjects = [head(titles.get(doc_id, "")) for doc_id in gold]
    if any(holds_name(question, each) and not holds_name(template, each) for each in subjects):
        return "names gold"
    names = [name for name in extract(template, len(template)) if name.lower() not in _OWN]
    if not all(holds_name(question, name) for name in names):
        return "lost a name"
    if sorted(_FIGURE.findall(question)) != sorted(_FIGURE.findall(template)):
        return "changed a figure"
    words = {word[:4] for word in _LONG_WORD.findall(template) if word[0].islower() and word not in _OWN}
    if len(words & {word[:4] for word in _LONG_WORD.findall(question.lower())}) < LEAST_KEPT * len(words):
        return "lost its words"
    denied = bool(_DENIAL.search(question)), bool(_DENIAL.search(template))
    return "changed a claim" if kind == CLAIM and denied[0] != denied[1] else ""


ORACLE, NOTHING, ONE_SEARCH = POLICIES = ("oracle", "no-op", "single-shot")
NEAR = 0.8
SHORTEST = 15  # least characters of a question
REACHED = 0.95  # least mean recall of the oracle: below it, gold cannot be found with the tools
GIVEN_AWAY = ("comparison", "aspect", "claim", "intersection")  # kinds whose questions name gold or answer on purpose
SHOWN = 5


class KindOfTask(Record):
    """What was seen of the played tasks of a kind. Recalls are means of shares of 1."""

    kind: str
    tasks: int
    oracle: float
    nothing: float
    one_search: float
    more_than_one: float  # share of the tasks whose gold one search does not find whole


FINDINGS = (
    *("gold_in_two_splits", "near_duplicate", "length", "answer_in_question", "gold_in_question", "no_gold"),
    *("not_answerable", "answered_by_nothing", "answered_by_one_search"),
)
"""The kinds of findings."""


class TaskFault(Record):
    """A fault, how many tasks have it, and some of them."""

    name: str
    count: int
    examples: tuple[str, ...]


class TaskCheck(Record):
    """The result of a check; sound tasks have no findings."""

    tasks: dict[str, int]  # the number of tasks in each split
    played: tuple[KindOfTask, ...]
    findings: tuple[TaskFault, ...]


def check_tasks(
    source: Source,
    dataset: str,
    index: str,
    out: Path,
    config: Config,
    *,
    sample: int,
    seed: int,
    ignored: Collection[str] = (),
    on_policy: Callable[[str], None] = lambda name: None,
) -> TaskCheck:
    """Check all questions, and let three policies play `sample` tasks: the oracle, one that does nothing, and one
    that searches once. `dataset`: what `source` was opened by. `out`: the folder of the runs; the same call resumes.
    Raises UsageError: there are no tasks, or a kind of `ignored` does not exist."""
    if unknown := sorted(set(ignored) - set(FINDINGS)):
        raise UsageError(f"no kind of finding is called {unknown[0]!r}; there are: {', '.join(FINDINGS)}")
    tasks = [task for split in source.splits for task in source.tasks(split)]
    if not tasks:
        raise UsageError(f"{source.name} has no tasks")
    chosen = sample_of(tasks, sample, seed)
    ids = {task.task_id: task for task in chosen}
    recalls: dict[str, dict[str, float]] = {}
    for name in POLICIES:
        on_policy(name)
        ensure_run(Evaluation(dataset, "sample", chosen, index, name, config), out / name)
        stage = read_stage(out / name)
        assert stage is not None, "it was just played"
        metrics = task_metrics(episodes_of(stage, out / name), ids, config, finished=True)
        recalls[name] = {task_id: values["curated_recall"] for task_id, values in metrics.items()}
    kinds: dict[str, list[str]] = defaultdict(list)
    for task in chosen:
        kinds[str(task.metadata.get("kind", "task"))].append(task.task_id)
    kinds["all"] = [task.task_id for task in chosen]
    played = []
    for kind, own in kinds.items():
        oracle, nothing, one = (sum(recalls[name][each] for each in own) / len(own) for name in POLICIES)
        more = sum(recalls[ONE_SEARCH][each] < 1 for each in own) / len(own)
        played.append(KindOfTask(kind, len(own), oracle, nothing, one, more))
    titles = {document.doc_id: document.title for document in source.documents()}
    every, reached, given = played[-1], recalls[ORACLE], recalls[NOTHING]
    found = [
        *question_findings(tasks, titles),
        _finding("not_answerable", (task for task in chosen if every.oracle < REACHED and reached[task.task_id] < 1)),
        _finding("answered_by_nothing", (task for task in chosen if given[task.task_id] > 0)),
        _finding("answered_by_one_search", chosen if every.more_than_one == 0 else ()),
    ]
    counts = {split: sum(task.split == split for task in tasks) for split in source.splits}
    told = tuple(finding for finding in found if finding.count and finding.name not in ignored)
    return TaskCheck(counts, tuple(played), told)


def sample_of(tasks: Sequence[Task], count: int, seed: int) -> list[Task]:
    """Return `count` tasks drawn from all, in their order."""
    places = sorted(Random(f"{seed}/sample").sample(range(len(tasks)), min(count, len(tasks))))
    return [tasks[place] for place in places]


def question_findings(tasks: Sequence[Task], titles: Mapping[DocId, str]) -> list[TaskFault]:
    """Return what is wrong with questions and gold, without playing."""
    pairs = [(task, gold_set(task.gold)) for task in tasks]
    owners: dict[DocId, set[str]] = defaultdict(set)
    known, repeated = KnownQueries(NEAR), []
    for task, gold in pairs:
        for doc_id in gold:
            owners[doc_id].add(task.split)
        if known.match(task.query) is not None:
            repeated.append(task)
        known.add(task.task_id, task.query)
    return [
        _finding("gold_in_two_splits", (task for task, gold in pairs if any(len(owners[each]) > 1 for each in gold))),
        _finding("near_duplicate", repeated),
        _finding("length", (task for task in tasks if not SHORTEST <= len(task.query) <= LONGEST)),
        _finding("answer_in_question", filter(_tells_answer, tasks)),
        _finding("gold_in_question", (task for task in tasks if _tells_gold(task, titles))),
        _finding("no_gold", (task for task, gold in pairs if not gold)),
    ]


def _tells_answer(task: Task) -> bool:
    answers = task.gold.answers if task.gold and task.metadata.get("kind") not in GIVEN_AWAY else ()
    return any(holds_name(task.query, answer) for answer in answers)


def _tells_gold(task: Task, titles: Mapping[DocId, str]) -> bool:
    chain = task.metadata.get("chain")
    later = chain[1:] if isinstance(chain, list) and task.metadata.get("kind") == BRIDGE else ()
    return any(holds_name(task.query, head(titles.get(DocId(each), ""))) for each in later)


def _finding(name: str, tasks: Iterable[Task]) -> TaskFault:
    found = [f"{task.task_id}: {task.query}" for task in tasks]
    return TaskFault(name, len(found), tuple(found[:SHOWN]))
