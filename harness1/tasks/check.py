"""Checks of a set of tasks: what can be read off the questions, and what three policies show by playing them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from random import Random

from harness1.config import Config
from harness1.data.query_overlap import KnownQueries
from harness1.data.source import Source
from harness1.errors import UsageError
from harness1.eval.evaluate import Evaluation, ensure_run
from harness1.eval.summary import task_metrics
from harness1.memory.question import head, normalised_name
from harness1.records import DocId, Record, Task
from harness1.runs.folder import episodes_of
from harness1.runs.stage import read_stage

ORACLE, NOTHING, ONE_SEARCH = POLICIES = ("oracle", "no-op", "single-shot")
NEAR = 0.8
SHORTEST, LONGEST = 15, 500
"""Characters of a question."""
REACHED = 0.95
"""Least mean recall of the oracle: below it, gold cannot be found with the tools."""
GIVEN_AWAY = ("comparison", "aspect", "claim", "intersection")
"""Kinds whose questions name the gold or the answer on purpose."""
SHOWN = 5


class KindOfTask(Record):
    """What was seen of the played tasks of a kind. Recalls are means of shares of 1."""

    kind: str
    tasks: int
    oracle: float
    nothing: float
    one_search: float
    more_than_one: float
    """Share of the tasks whose gold one search does not find whole."""


FINDINGS = (
    *("gold_in_two_splits", "near_duplicate", "length", "answer_in_question", "gold_in_question", "no_gold"),
    *("not_answerable", "answered_by_nothing", "answered_by_one_search"),
)
"""The kinds of findings."""


class Finding(Record):
    """A fault, how many tasks have it, and some of them."""

    name: str
    count: int
    examples: tuple[str, ...]


class TaskCheck(Record):
    """The result of a check; sound tasks have no findings."""

    tasks: dict[str, int]
    """The number of tasks in each split."""
    played: tuple[KindOfTask, ...]
    findings: tuple[Finding, ...]


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
    """Check all questions, and let three policies play a sample of the tasks: the oracle, one that does nothing, and
    one that searches once.

    Args:
        dataset: what `source` was opened by.
        out: the folder of the runs; the same call resumes.
        sample: tasks that are played.
        ignored: kinds of findings to leave out.
        on_policy: called with the name of each policy before it plays.

    Raises:
        UsageError: there are no tasks, a kind does not exist, or as `evaluate`.
        InfrastructureFault: as `evaluate`.
    """
    if unknown := sorted(set(ignored) - set(FINDINGS)):
        raise UsageError(f"no kind of finding is called {unknown[0]!r}; there are: {', '.join(FINDINGS)}")
    tasks = [task for split in source.splits for task in source.tasks(split)]
    if not tasks:
        raise UsageError(f"{source.name} has no tasks")
    chosen = sample_of(tasks, sample, seed)
    recalls: dict[str, Mapping[str, float]] = {}
    for name in POLICIES:
        on_policy(name)
        evaluation = Evaluation(dataset, "sample", chosen, index, name, config)
        ensure_run(evaluation, out / name)
        recalls[name] = _recalls(out / name, chosen, config)
    played = tuple(_by_kind(chosen, recalls))
    titles = {document.doc_id: document.title for document in source.documents()}
    found = [*question_findings(tasks, titles), *_played_findings(chosen, recalls)]
    counts = {split: sum(task.split == split for task in tasks) for split in source.splits}
    told = tuple(finding for finding in found if finding.count and finding.name not in ignored)
    return TaskCheck(counts, played, told)


def sample_of(tasks: Sequence[Task], count: int, seed: int) -> list[Task]:
    """Return `count` tasks drawn from all, in their order."""
    places = sorted(Random(f"{seed}/sample").sample(range(len(tasks)), min(count, len(tasks))))
    return [tasks[place] for place in places]


def question_findings(tasks: Sequence[Task], titles: Mapping[DocId, str]) -> list[Finding]:
    """Return what is wrong with questions and gold, without playing: gold of two splits, near duplicates, lengths, and
    questions that hold their answer or the name of the document that has it."""
    owners: dict[DocId, set[str]] = defaultdict(set)
    for task in tasks:
        for doc_id in _gold(task):
            owners[doc_id].add(task.split)
    known, repeated = KnownQueries(NEAR), []
    for task in tasks:
        if known.match(task.query) is not None:
            repeated.append(task)
        known.add(task.task_id, task.query)
    return [
        _finding("gold_in_two_splits", (task for task in tasks if any(len(owners[each]) > 1 for each in _gold(task)))),
        _finding("near_duplicate", repeated),
        _finding("length", (task for task in tasks if not SHORTEST <= len(task.query) <= LONGEST)),
        _finding("answer_in_question", (task for task in tasks if _tells_answer(task))),
        _finding("gold_in_question", (task for task in tasks if _tells_gold(task, titles))),
        _finding("no_gold", (task for task in tasks if not _gold(task))),
    ]


def _tells_answer(task: Task) -> bool:
    if task.metadata.get("kind") in GIVEN_AWAY or task.gold is None:
        return False
    return any(_names(task.query, answer) for answer in task.gold.answers)


def _tells_gold(task: Task, titles: Mapping[DocId, str]) -> bool:
    """Return whether a question that leads over several documents names one behind the first."""
    chain = task.metadata.get("chain")
    if task.metadata.get("kind") != "bridge" or not isinstance(chain, list):
        return False
    return any(_names(task.query, head(titles.get(DocId(each), ""))) for each in chain[1:])


def _names(text: str, name: str) -> bool:
    words = normalised_name(name)
    return bool(words) and f" {words} " in f" {normalised_name(text)} "


def _gold(task: Task) -> list[DocId]:
    return [] if task.gold is None else [doc_id for doc_id, grade in task.gold.relevant.items() if grade > 0]


def _recalls(run: Path, tasks: Sequence[Task], config: Config) -> dict[str, float]:
    stage = read_stage(run)
    assert stage is not None, "it was just played"
    found = task_metrics(episodes_of(stage, run), {task.task_id: task for task in tasks}, config, finished=True)
    return {task_id: values["curated_recall"] for task_id, values in found.items()}


def _by_kind(tasks: Sequence[Task], recalls: Mapping[str, Mapping[str, float]]) -> Iterable[KindOfTask]:
    kinds: dict[str, list[str]] = defaultdict(list)
    for task in tasks:
        kinds[str(task.metadata.get("kind", "task"))].append(task.task_id)
    kinds["all"] = [task.task_id for task in tasks]
    for kind, ids in kinds.items():
        oracle, nothing, one = (sum(recalls[name][each] for each in ids) / len(ids) for name in POLICIES)
        more = sum(recalls[ONE_SEARCH][each] < 1 for each in ids) / len(ids)
        yield KindOfTask(kind, len(ids), oracle, nothing, one, more)


def _played_findings(tasks: Sequence[Task], recalls: Mapping[str, Mapping[str, float]]) -> list[Finding]:
    mean = sum(recalls[ORACLE].values()) / len(tasks)
    unreached = [task for task in tasks if recalls[ORACLE][task.task_id] < 1]
    free = [task for task in tasks if recalls[NOTHING][task.task_id] > 0]
    easy = tasks if all(recalls[ONE_SEARCH][task.task_id] == 1 for task in tasks) else ()
    return [
        _finding("not_answerable", unreached if mean < REACHED else ()),
        _finding("answered_by_nothing", free),
        _finding("answered_by_one_search", easy),
    ]


def _finding(name: str, tasks: Iterable[Task]) -> Finding:
    found = [f"{task.task_id}: {task.query}" for task in tasks]
    return Finding(name, len(found), tuple(found[:SHOWN]))
