"""Ablations: the same policy on the same tasks and seeds, with one mechanism of the environment removed at a time, and
their table: one line per removed mechanism, compared task by task with the base (table 3 of arXiv 2606.02373)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from harness1.config import Config, Env
from harness1.env.environment import env_hash
from harness1.errors import UsageError
from harness1.eval.compare import differences_of
from harness1.eval.evaluate import Evaluation, Play, ensure_run, refuse_changed_tasks, rescore
from harness1.eval.metrics import fault_count, task_metrics
from harness1.eval.run import SCORING, PerTask
from harness1.eval.statistics import RESAMPLES, Interval, holm, probability
from harness1.plain import meant
from harness1.records import Record
from harness1.runs import files
from harness1.runs.folder import REPORT, clear_run, episodes_of

ALL_OFF = "all_off"
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


class Condition(Record, kw_only=True):
    """One line of the table. `change`: of the recall against the base, which has `base_recall` on the `paired` tasks,
    those scored in both; None without any. `p`: of that change by chance, Holm-corrected for all ablations."""

    name: str
    recall: float | None
    answer_recall: float | None
    change: Interval | None = None
    answer_change: Interval | None = None
    p: float | None = None
    paired: int = 0
    hard_failures: int = 0
    base_recall: float = 0.0
    base_answer_recall: float = 0.0
    search_share: float
    turns: float | None
    set_size: float | None
    broken: int = 0


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
    def title(self) -> str:
        samples = f" x {self.samples}" if self.samples > 1 else ""
        return f"{self.policy} on {self.dataset}/{self.split}, {self.tasks} tasks{samples}, seed {self.seed}"

    @property
    def verdict(self) -> str:
        """A sentence on which mechanisms help by their intervals, and which effects remain after the correction."""
        found = [each for each in self.conditions[1:] if each.name != ALL_OFF]
        changes = [(each.name, each.change) for each in found if each.change is not None]
        sure = [each.name for each in found if each.p is not None and each.p < SIGNIFICANT]
        groups = {
            "Here helps": [name for name, change in changes if change.high < 0],
            "does not help (the interval contains 0)": [name for name, each in changes if each.low <= 0 <= each.high],
            "hurts": [name for name, change in changes if change.low > 0],
            f"corrected p < {SIGNIFICANT}": sure,
        }
        return "; ".join(f"{word}: {', '.join(names) or 'none'}" for word, names in groups.items()) + "."

    @property
    def unchanged(self) -> list[str]:
        """The ablations whose figures all equal those of the base."""
        base, *others = ((each, (each.search_share, each.turns, each.set_size)) for each in self.conditions)
        none = {Interval(0.0, 0.0, 0.0)}
        same = (each for each, effort in others if effort == base[1] and each.hard_failures == 0)
        return [each.name for each in same if {each.change, each.answer_change} == none]

    @property
    def remarks(self) -> str:
        """Ablations that changed nothing or were skipped, and tasks that were not compared."""
        broken = [f"{each.broken} in {each.name}" for each in self.conditions if each.broken]
        partial = [each.name for each in self.conditions if each.paired < self.tasks]
        remarks = {
            "Nothing changes without": self.unchanged,
            "Skipped, because it is off in the base": self.skipped,
            "Episodes that the infrastructure broke": broken,
            f"Not all of the {self.tasks} tasks could be compared": partial,
        }
        return " ".join(f"{remark}: {', '.join(names)}." for remark, names in remarks.items() if names)


def compare_condition(
    name: str, metrics: Mapping[str, Any], base: PerTask, rows: PerTask, resamples: int, seed: int
) -> Condition:
    """Return a line of the table, its `p` not yet corrected, from a condition's `metrics.json` and its `rows`."""
    found = differences_of(base, rows, (RECALL, ANSWER_RECALL), resamples, seed)
    recall, answers = found.get(RECALL), found.get(ANSWER_RECALL)
    both = base.keys() & rows.keys()
    return Condition(
        name=name,
        recall=metrics[RECALL]["mean"],
        answer_recall=metrics[ANSWER_RECALL]["mean"],
        change=recall.difference if recall else None,
        answer_change=answers.difference if answers else None,
        p=recall.p if recall else None,
        paired=len(both),
        hard_failures=sum(base[task][RECALL] > 0.0 and rows[task][RECALL] == 0.0 for task in both),
        base_recall=recall.first if recall else 0.0,
        base_answer_recall=answers.first if answers else 0.0,
        search_share=sum(metrics["tool_mix"].get(tool, 0.0) for tool in SEARCHES),
        turns=metrics["turns"]["mean"],
        set_size=metrics["set_size"]["mean"],
        broken=fault_count(metrics),
    )


def cells(table: AblationTable) -> Iterator[tuple[str, ...]]:
    """Yield the lines of the table as texts, in the order of `COLUMNS`, without ablations that changed nothing."""

    def number(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    unchanged = set(table.unchanged)
    for each in (each for each in table.conditions if each.name not in unchanged):
        base = each is table.conditions[0]
        percent = None if base else percent_of(each.change, each.base_recall)
        answer = None if base else percent_of(each.answer_change, each.base_answer_recall)
        yield (
            each.name,
            number(each.recall, ".3f"),
            number(each.answer_recall, ".3f"),
            number(percent.mean if percent else None, "+.1f"),
            f"{percent.low:+.1f} to {percent.high:+.1f}" if percent else "",
            "" if base or each.p is None else probability(each.p),
            number(answer.mean if answer else None, "+.1f"),
            "" if base else str(each.hard_failures),
            f"{each.search_share:.0%}",
            number(each.turns, ".1f"),
            number(each.set_size, ".1f"),
        )


def markdown(table: AblationTable) -> str:
    """Return the table with its verdict, as in `ablations.md`."""
    lines = [COLUMNS, tuple("---" for _ in COLUMNS), *cells(table)]
    rows = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return "\n\n".join(filter(None, [f"# {table.title}", rows, LEGEND, table.verdict, table.remarks])) + "\n"


def percent_of(change: Interval | None, of: float) -> Interval | None:
    """Return a change in percent of the base's value."""
    if change is None or of == 0.0:
        return None
    return Interval(*(100.0 * value / of for value in (change.mean, change.low, change.high)))


VERB = "eval --ablations"
BASE = "base"
TABLE = "ablations.json"
README = "ablations.md"

Ablation = Callable[[Env], Env]


def _with(**groups: Any) -> Ablation:
    """Return the change of some settings; `name=False` switches a mechanism off."""

    def change(env: Env) -> Env:
        parts = {name: value for name, value in groups.items() if isinstance(value, dict)}
        changed = {name: msgspec.structs.replace(getattr(env, name), **value) for name, value in parts.items()}
        switches = {name: value for name, value in groups.items() if value is False}
        others = {name: value for name, value in groups.items() if name not in switches}
        return msgspec.structs.replace(env.switch(**switches), **{**others, **changed})

    return change


_NAMES = (
    *("importance_tags", "compression", "auto_populate", "evidence", "verification", "review", "dedup", "guidance"),
    *("history", "budget_marker", "fan_out", "grep", "read", "rank", "leads", "auto_populate_by_evidence"),
    "read_by_evidence",
)
_MECHANISMS: Mapping[str, Ablation] = MappingProxyType(
    {name: _with(**{name: False}) for name in _NAMES}
    | {
        "importance_tags": _with(tags=False, curation={"eviction": "fifo"}),
        "evidence": _with(evidence=False, entity_handles=False),
        "guidance": _with(guidance="none"),
        "auto_populate_by_evidence": _with(auto_populate={"by": "first"}),
        "read_by_evidence": _with(read={"by": "order"}),
    }
)


ABLATIONS: Mapping[str, Ablation] = MappingProxyType(
    {**_MECHANISMS, ALL_OFF: lambda env: reduce(lambda left, ablation: ablation(left), _MECHANISMS.values(), env)}
)
"""Each mechanism with the function that removes it from all prompts, tool schemas, memory and metrics; `all_off` leaves
searching, curating and ending."""


def ablate_config(config: Config, name: str) -> Config:
    """Return the configuration without a mechanism, even for a model trained with it; UsageError if there is none."""
    if name not in ABLATIONS:
        raise UsageError(f"unknown ablation {name!r}; choose from: all, {', '.join(ABLATIONS)}{meant(name, ABLATIONS)}")
    machine = config.machine
    machine = msgspec.structs.replace(machine, model=msgspec.structs.replace(machine.model, foreign=True))
    return msgspec.structs.replace(config, env=ABLATIONS[name](config.env), machine=machine)


def conditions(evaluation: Evaluation, names: Sequence[str]) -> dict[str, Evaluation]:
    """Return the evaluations to play, in order: the base, and the ablations of mechanisms that are not already off."""
    variants = {name: replace(evaluation, config=ablate_config(evaluation.config, name)) for name in names}
    changed = {name: each for name, each in variants.items() if each.config.env != evaluation.config.env}
    return {BASE: evaluation, **changed}


def ablate(
    evaluation: Evaluation,
    out: Path,
    names: Sequence[str] = tuple(ABLATIONS),
    *,
    force: bool = False,
    rescored: bool = False,
    play: Play = ensure_run,
) -> AblationTable:
    """Play an evaluation and its ablations into run folders below `out`, and write `ablations.json` and `ablations.md`
    there, or return the existing table. `force`: start over. `rescored`: first score the recorded episodes again.
    Raises UsageError: a name is no ablation, a task is missing or has no gold, or the folder holds something else;
    SchemaError: the folder is damaged; InfrastructureFault: a worker died."""
    evaluation.check()
    played = conditions(evaluation, names)
    skipped = tuple(name for name in dict.fromkeys(names) if name not in played)
    stage = evaluation.stage()
    environments = {name: env_hash(each.config.env) for name, each in played.items() if name != BASE}
    stage = files.Stage(VERB, {**stage.inputs, "ablations": environments}, hashes=stage.hashes)
    files.refuse_foreign(out, VERB)
    if force:
        for name in (BASE, *ABLATIONS):
            clear_run(out / name)
        files.clear(out, VERB, TABLE, README, keep_card=True)
    else:
        for name, each in played.items():
            (rescore if rescored else refuse_changed_tasks)(each, out / name)
        files.refuse_changed(stage, out, "ablation", besides=SCORING if rescored else ())
    if stage.is_done(out) and all((out / name).is_file() for name in (TABLE, README)):
        table = files.read_record(out / TABLE, AblationTable, "a table of ablations")
        if table is not None and not any(each.broken for each in table.conditions):
            return table
    with files.under_way(stage, out):
        metrics = {name: play(each, out / name) for name, each in played.items()}
        tasks, resamples = {task.task_id: task for task in evaluation.tasks}, RESAMPLES
        rows: dict[str, PerTask] = {}
        for name, each in played.items():
            episodes = episodes_of(each.stage(), out / name)
            rows[name] = task_metrics(episodes, tasks, each.config, faults=each.faults)
        seed, base = evaluation.seed, rows[BASE]
        raw = [compare_condition(name, metrics[name], base, rows[name], resamples, seed) for name in played]
        p = holm({each.name: each.p for each in raw if each.name != BASE and each.p is not None})
        told = {name: getattr(evaluation, name) for name in ("dataset", "split", "policy", "samples", "seed")}
        lines = tuple(msgspec.structs.replace(each, p=p.get(each.name)) for each in raw)
        table = AblationTable(tasks=len(evaluation.tasks), conditions=lines, skipped=skipped, **told)
        files.write_atomically(out / README, markdown(table).encode())
        files.write_json(out / TABLE, table)
        for name in played:
            # The report shows the table but was written before it.
            (out / name / REPORT).unlink(missing_ok=True)
        stage.write(out, status="finished", gates={"broken": sum(each.broken for each in table.conditions)})
    return table
