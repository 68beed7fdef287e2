"""The table of ablations: one line per removed mechanism, compared task by task with the base."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from harness1.eval.failure import fault_count
from harness1.eval.statistics import Interval, paired_difference, probability, randomisation_test
from harness1.records import Record

ALL_OFF = "all_off"
"""The ablation of all mechanisms."""
SIGNIFICANT = 0.05
RECALL = "curated_recall"
ANSWER_RECALL = "answer_recall"
SEARCHES = ("search_corpus", "fan_out_search")
COLUMNS = ("condition", "R", "FA", "ΔR %", "95 % interval", "p", "ΔFA %", "hard", "search", "turns", "set")
"""Headings of `cells`, which `LEGEND` explains."""
LEGEND = (
    "R: curated recall; FA: recall of the documents that hold the answer; Δ: their changes in percent of the base's;"
    " hard: tasks where the base found something and the ablation nothing; search: share of all calls; set: documents."
)

Rows = Mapping[str, Mapping[str, float]]
"""The metrics of each task."""


class Condition(Record, kw_only=True):
    """One line of the table. Changes are against the base, over the tasks scored in both; None without such tasks."""

    name: str
    recall: float | None
    answer_recall: float | None
    change: Interval | None = None
    """Change of the recall: the mean paired difference."""
    answer_change: Interval | None = None
    """Change of the final-answer recall."""
    p: float | None = None
    """Probability that chance alone changes the recall this much (`randomisation_test`), Holm-corrected for all
    ablations."""
    paired: int = 0
    """Tasks scored in both."""
    hard_failures: int = 0
    base_recall: float = 0.0
    """The base's recall over the tasks scored in both; changes are a percentage of it."""
    base_answer_recall: float = 0.0
    """The base's final-answer recall over these tasks."""
    search_share: float
    turns: float | None
    set_size: float | None
    broken: int = 0
    """Episodes broken by the infrastructure, which the same command runs again."""

    def same_effort(self, other: Condition) -> bool:
        """Return whether calls, turns and sizes of sets are those of another condition."""
        return (self.search_share, self.turns, self.set_size) == (other.search_share, other.turns, other.set_size)

    @property
    def percent(self) -> Interval | None:
        """The change of the recall in percent of the base's."""
        return _percent(self.change, self.base_recall)

    @property
    def answer_percent(self) -> Interval | None:
        """The change of the final-answer recall in percent of the base's."""
        return _percent(self.answer_change, self.base_answer_recall)


class AblationTable(Record, kw_only=True):
    """The base and its ablations, and those skipped because their mechanism was already off."""

    dataset: str
    split: str
    policy: str
    tasks: int
    samples: int
    seed: int
    conditions: tuple[Condition, ...]
    skipped: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        """A sentence listing which mechanisms help, do not help, or hurt by their intervals, and which of these effects
        remain significant after the correction."""
        found = [each for each in self.conditions[1:] if each.name != ALL_OFF]
        changes = [(each.name, each.change) for each in found if each.change is not None]
        groups = {
            "Here helps": [name for name, change in changes if change.high < 0],
            "does not help (the interval contains 0)": [name for name, each in changes if each.low <= 0 <= each.high],
            "hurts": [name for name, change in changes if change.low > 0],
            f"corrected p < {SIGNIFICANT}": [
                each.name for each in found if each.p is not None and each.p < SIGNIFICANT
            ],
        }
        return "; ".join(f"{word}: {', '.join(names) or 'none'}" for word, names in groups.items()) + "."

    @property
    def unchanged(self) -> list[str]:
        """The ablations whose figures all equal those of the base."""
        base, *others = self.conditions
        return [
            each.name
            for each in others
            if each.same_effort(base)
            and each.hard_failures == 0
            and {each.change, each.answer_change} == {Interval(0.0, 0.0, 0.0)}
        ]

    @property
    def remarks(self) -> str:
        """Remarks for the reader: ablations that changed nothing or were skipped, tasks that were not compared."""
        remarks = [f"Nothing changes without: {', '.join(same)}."] if (same := self.unchanged) else []
        if self.skipped:
            remarks.append(f"Skipped, because it is off in the base: {', '.join(self.skipped)}.")
        if broken := [f"{each.broken} in {each.name}" for each in self.conditions if each.broken]:
            remarks.append(f"Episodes that the infrastructure broke: {', '.join(broken)}.")
        if partial := [each.name for each in self.conditions if each.paired < self.tasks]:
            remarks.append(f"Not all of the {self.tasks} tasks could be compared: {', '.join(partial)}.")
        return " ".join(remarks)


def compared(name: str, metrics: Mapping[str, Any], base: Rows, rows: Rows, resamples: int, seed: int) -> Condition:
    """Return a line of the table, its `p` not yet corrected, from a condition's `metrics.json` and its `rows`."""
    tasks = sorted(base.keys() & rows.keys())
    before, after = ({task: each[task][RECALL] for task in tasks} for each in (base, rows))
    base_answers, answers = ({task: each[task][ANSWER_RECALL] for task in tasks} for each in (base, rows))
    return Condition(
        name=name,
        recall=metrics[RECALL]["mean"],
        answer_recall=metrics[ANSWER_RECALL]["mean"],
        change=paired_difference(after, before, resamples, seed) if tasks else None,
        answer_change=paired_difference(answers, base_answers, resamples, seed) if tasks else None,
        p=randomisation_test(after, before, resamples, seed) if tasks else None,
        paired=len(tasks),
        hard_failures=sum(before[task] > 0.0 and after[task] == 0.0 for task in tasks),
        base_recall=sum(before.values()) / max(len(tasks), 1),
        base_answer_recall=sum(base_answers.values()) / max(len(tasks), 1),
        search_share=sum(metrics["tool_mix"].get(tool, 0.0) for tool in SEARCHES),
        turns=metrics["turns"]["mean"],
        set_size=metrics["set_size"]["mean"],
        broken=fault_count(metrics),
    )


def cells(table: AblationTable) -> Iterator[tuple[str, ...]]:
    """Yield the lines of the table as texts, in the order of `COLUMNS`; the base has no changes. Ablations that changed
    nothing have no lines."""
    unchanged = set(table.unchanged)
    for each in table.conditions:
        base = each is table.conditions[0]
        if each.name in unchanged:
            continue
        percent, answer = (None, None) if base else (each.percent, each.answer_percent)
        yield (
            each.name,
            _number(each.recall, ".3f"),
            _number(each.answer_recall, ".3f"),
            _number(percent.mean if percent else None, "+.1f"),
            f"{percent.low:+.1f} to {percent.high:+.1f}" if percent else "",
            "" if base or each.p is None else probability(each.p),
            _number(answer.mean if answer else None, "+.1f"),
            "" if base else str(each.hard_failures),
            f"{each.search_share:.0%}",
            _number(each.turns, ".1f"),
            _number(each.set_size, ".1f"),
        )


def title(table: AblationTable) -> str:
    """Return the table's title: policy, dataset, tasks and seed."""
    samples = f" x {table.samples}" if table.samples > 1 else ""
    return f"{table.policy} on {table.dataset}/{table.split}, {table.tasks} tasks{samples}, seed {table.seed}"


def markdown(table: AblationTable) -> str:
    """Return the table with its verdict, as in `ablations.md`."""
    lines = [COLUMNS, tuple("---" for _ in COLUMNS), *cells(table)]
    rows = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return "\n\n".join(filter(None, [f"# {title(table)}", rows, LEGEND, table.verdict, table.remarks])) + "\n"


def _percent(change: Interval | None, of: float) -> Interval | None:
    if change is None or of == 0.0:
        return None
    return Interval(*(100.0 * value / of for value in (change.mean, change.low, change.high)))


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
