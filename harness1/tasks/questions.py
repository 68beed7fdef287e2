"""The check of the questions of tasks: it reads faults off them, and lets policies play."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from random import Random

from harness1.config import Config
from harness1.data.leaks import KnownQueries, gold_set
from harness1.data.source import Source
from harness1.errors import UsageError
from harness1.eval.evaluate import Evaluation, ensure_run
from harness1.eval.metrics import task_metrics
from harness1.memory.question import head
from harness1.records import DocId, Record, Task
from harness1.runs.files import read_stage
from harness1.runs.folder import episodes_of
from harness1.tasks.drafts import BRIDGE
from harness1.tasks.graph import holds_name

ORACLE, NOTHING, ONE_SEARCH = POLICIES = ("oracle", "no-op", "single-shot")
NEAR = 0.8
SHORTEST, LONGEST = 15, 500  # characters of a question
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
