"""The gates that choose a teacher's episodes for training, in a fixed order, with counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence

import msgspec

from harness1.config import Gates
from harness1.data.leaks import GoldSet, KnownQueries, Leaks, gold_set
from harness1.errors import UsageError
from harness1.hashing import digest
from harness1.records import Episode, Gold, Record, Status
from harness1.reward.measures import measure_outcome
from harness1.tools.documents import END_SEARCH

SEARCHES = ("search_corpus", "fan_out_search", "grep_corpus")
SHOWN = 5
"""Number of dropped episodes that a report names."""


class TeacherEpisode(Record):
    """An episode as the gates see it."""

    place: tuple[int, int]
    """The numbers of its run and of its line."""
    episode_id: str
    task_id: str
    dataset: str
    query: str
    status: Status
    format_errors: int
    documents: int
    """Curated documents; 0 if the episode ended in a policy error."""
    recall: float
    precision: float
    trajectory_recall: float
    turns: int
    calls: dict[str, int]
    """Successful turns of each tool, including `end_search`."""
    actions: str
    """Digest of all actions."""
    gold: GoldSet = frozenset()
    """Relevant documents of the task."""

    @property
    def task(self) -> tuple[str, str]:
        """Dataset and id, because two datasets may use one id."""
        return self.dataset, self.task_id

    @property
    def tools(self) -> int:
        """Number of tools used successfully, without `end_search`."""
        return len(self.calls.keys() - {END_SEARCH})

    @property
    def searches(self) -> int:
        """Number of successful turns that brought documents from the corpus."""
        return sum(self.calls.get(name, 0) for name in SEARCHES)


class GateCounts(Record):
    """The number of episodes that reached a gate and that passed it."""

    name: str
    entered: int = msgspec.field(name="in")
    passed: int = msgspec.field(name="out")
    dropped: tuple[str, ...] = ()
    """The first dropped episodes, with the reasons."""


Reason = Callable[[TeacherEpisode], str | None]
"""Gives the reason to drop an episode, or None if it passes."""


def candidate(episode: Episode, gold: Gold | None, dataset: str, place: tuple[int, int]) -> TeacherEpisode:
    """Return an episode as the gates see it; raise UsageError if the task has no gold, or nothing to find."""
    scored = measure_outcome(episode, gold)
    acted = [turn for turn in episode.turns if turn.action is not None]
    ended = sum(turn.action is not None and turn.action.name == END_SEARCH for turn in acted)
    return TeacherEpisode(
        place=place,
        episode_id=episode.episode_id,
        task_id=episode.task.task_id,
        dataset=dataset,
        query=episode.task.query,
        status=episode.status,
        format_errors=scored.format_errors,
        documents=scored.set_size,
        recall=scored.recall,
        precision=scored.precision,
        trajectory_recall=scored.trajectory_recall,
        turns=len(acted),
        calls=scored.calls | ({END_SEARCH: ended} if ended else {}),
        actions=digest([turn.action for turn in acted]),
        gold=gold_set(gold),
    )


def gated(
    candidates: Sequence[TeacherEpisode],
    gates: Gates,
    leaks: Leaks,
    seed: int,
    excluded: Collection[tuple[str, str]] = frozenset(),
) -> tuple[tuple[TeacherEpisode, ...], tuple[GateCounts, ...]]:
    """Return the candidates that pass all gates, in the order given, and the counts of each gate.

    Args:
        leaks: the evaluation tasks that must not be given away.
        seed: chooses the episodes that fill a quota.
        excluded: tasks, as (dataset, id), that were learned elsewhere.
    """
    makers: dict[str, Callable[[Sequence[TeacherEpisode]], Reason]] = {
        "fault": lambda _: _fault,
        "format": lambda _: _format,
        "documents": lambda _: _documents(gates),
        "recall": lambda _: _recall(gates),
        "precision": lambda _: _precision(gates),
        "tools": lambda _: _tools(gates),
        "excluded": lambda _: _excluded(excluded),
        "leak": lambda _: _leak(leaks),
        "duplicate": lambda left: _duplicate(left, gates),
        "quota": lambda left: _quota(left, gates.quotas, seed),
        "searches": lambda left: _searches(left, gates.same_searches, seed),
    }
    kept, reports = tuple(candidates), []
    for name, reason_among in makers.items():
        kept, report = _passed(name, kept, reason_among(kept))
        reports.append(report)
    return kept, tuple(reports)


def check_any_left(kept: Sequence[TeacherEpisode], reports: Sequence[GateCounts]) -> None:
    """Check that at least one episode is left. Raise UsageError if nothing passed the gates; the message says how many
    each dropped."""
    if not kept:
        counts = [f"{each.name} dropped {each.entered - each.passed}" for each in reports if each.dropped]
        last = next(each.dropped[0] for each in reversed(reports) if each.dropped)
        raise UsageError(
            f"none of {reports[0].entered} episodes is left: {', '.join(counts)}; for example {last}. Collect others,"
            " or loosen sft.gates"
        )


def check_tool_mix(kept: Iterable[TeacherEpisode], gates: Gates, offered: Iterable[str]) -> None:
    """Raise UsageError if a tool of those offered has less than `sft.gates.tool_share` of the successful turns."""
    turns = Counter(dict.fromkeys(offered, 0))
    for each in kept:
        turns.update(each.calls)
    total = max(1, turns.total())
    rare = [f"{name} {count / total:.3f}" for name, count in sorted(turns.items()) if count / total < gates.tool_share]
    if rare:
        raise UsageError(
            f"tools below sft.gates.tool_share={gates.tool_share:g} of the turns: {', '.join(rare)}: collect episodes"
            " that use them, or lower the share"
        )


def held_out_tasks(kept: Iterable[TeacherEpisode], share: float, seed: int) -> frozenset[tuple[str, str]]:
    """Return the tasks, as (dataset, id), that are never trained on: a share of each dataset, but at least one if the
    share is above 0 and there are two tasks, and never all."""
    tasks: dict[str, set[str]] = {}
    for each in kept:
        tasks.setdefault(each.dataset, set()).add(each.task_id)
    chosen: set[tuple[str, str]] = set()
    for dataset, ids in tasks.items():
        wanted = min(max(1, round(share * len(ids))), len(ids) - 1) if share > 0.0 else 0
        chosen.update((dataset, name) for name in sorted(ids, key=lambda name: _drawn(seed, dataset, name))[:wanted])
    return frozenset(chosen)


def _passed(
    name: str, candidates: tuple[TeacherEpisode, ...], reason: Reason
) -> tuple[tuple[TeacherEpisode, ...], GateCounts]:
    reasons = [(each, reason(each)) for each in candidates]
    kept = tuple(each for each, why in reasons if why is None)
    dropped = [f"{each.dataset}/{each.task_id} ({each.episode_id}): {why}" for each, why in reasons if why is not None]
    return kept, GateCounts(name, len(candidates), len(kept), tuple(dropped[:SHOWN]))


def _fault(each: TeacherEpisode) -> str | None:
    return "the infrastructure failed" if each.status is Status.INFRA_ERROR else None


def _format(each: TeacherEpisode) -> str | None:
    if each.status is Status.POLICY_ERROR:
        return "it ended in a policy error"
    return f"{each.format_errors} outputs without a readable call" if each.format_errors else None


def _documents(gates: Gates) -> Reason:
    return lambda each: f"{each.documents} curated" if each.documents < gates.documents else None


def _recall(gates: Gates) -> Reason:
    return lambda each: f"curated recall {each.recall:.3f}" if each.recall < gates.recall else None


def _precision(gates: Gates) -> Reason:
    return lambda each: f"curated precision {each.precision:.3f}" if each.precision < gates.precision else None


def _tools(gates: Gates) -> Reason:
    return lambda each: f"{each.tools} different tools" if each.tools < gates.tools else None


def _excluded(tasks: Collection[tuple[str, str]]) -> Reason:
    return lambda each: "its task was learned from before" if each.task in tasks else None


def _leak(leaks: Leaks) -> Reason:
    def reason(each: TeacherEpisode) -> str | None:
        found = leaks.find(each.dataset, each.query, each.gold)
        return None if found is None else found.reason

    return reason


def _duplicate(candidates: Sequence[TeacherEpisode], gates: Gates) -> Reason:
    """Keep the best of the episodes with the same question: highest recall, then fewest turns. Samples of one task are
    duplicates only if their actions are equal, or `per_task` better ones are kept."""
    asked = KnownQueries(gates.near)
    tasks = Counter[tuple[str, str]]()
    done: set[tuple[tuple[str, str], str]] = set()
    found: dict[tuple[int, int], str] = {}
    for each in sorted(candidates, key=lambda one: (-one.recall, one.turns, one.place)):
        if (each.task, each.actions) in done:
            found[each.place] = "another sample did the same"
        elif gates.per_task and tasks[each.task] >= gates.per_task:
            found[each.place] = "better samples of its task are kept"
        elif each.task not in tasks and (same := asked.match(each.query)) is not None:
            found[each.place] = f"asks the same as {same}"
        else:
            asked.add("/".join(each.task), each.query)
            tasks[each.task] += 1
            done.add((each.task, each.actions))
    return lambda each: found.get(each.place)


def _quota(candidates: Sequence[TeacherEpisode], quotas: dict[str, int], seed: int) -> Reason:
    over: set[tuple[int, int]] = set()
    for dataset, quota in quotas.items():
        own = [each for each in candidates if each.dataset == dataset]
        own.sort(key=lambda each: (_drawn(seed, *each.task, each.episode_id), each.place))
        over.update(each.place for each in own[quota:])
    return lambda each: "beyond the quota of its dataset" if each.place in over else None


def _searches(candidates: Sequence[TeacherEpisode], share: float, seed: int) -> Reason:
    counts = Counter(each.searches for each in candidates)
    most = max(counts.values(), default=0)
    while most > 1 and most > share * sum(min(count, most) for count in counts.values()):
        most -= 1
    left = dict.fromkeys(counts, most)
    over: set[tuple[int, int]] = set()
    for each in sorted(candidates, key=lambda one: (_drawn(seed, *one.task, one.episode_id), one.place)):
        left[each.searches] -= 1
        if left[each.searches] < 0:
            over.add(each.place)
    return lambda each: f"too many searched {each.searches} times" if each.place in over else None


def _drawn(seed: int, *names: str) -> str:
    """Return a sort key that shuffles names by the seed."""
    return digest([seed, *names])
