"""Ablations: the same policy on the same tasks and seeds, with one mechanism of the environment removed at a time.

A removed mechanism is in no prompt, tool schema, memory or metric. Harness-1 (arXiv 2606.02373), table 3, shows what
the published harness lost without each mechanism.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from harness1.config import Config, Env
from harness1.env.environment import env_hash
from harness1.errors import MALFORMED, SchemaError, UsageError
from harness1.eval.ablations.table import ALL_OFF, AblationTable, compared, markdown
from harness1.eval.evaluate import Evaluation, Play, ensure_run, refuse_changed_tasks, rescore
from harness1.eval.run import SCORING
from harness1.eval.statistics import holm
from harness1.eval.summary import task_metrics
from harness1.plain import meant
from harness1.runs.files import Stage, clear, refuse_changed, refuse_foreign, under_way, write_atomically, write_json
from harness1.runs.folder import REPORT, clear_run, episodes_of

VERB = "eval --ablations"
BASE = "base"
TABLE = "ablations.json"
README = "ablations.md"

Ablation = Callable[[Env], Env]


def _with(**groups: Any) -> Ablation:
    """Return an ablation that replaces settings of the environment: a word replaces one, a mapping part of a group."""

    def changed(env: Env) -> Env:
        values = {
            name: msgspec.structs.replace(getattr(env, name), **value) if isinstance(value, dict) else value
            for name, value in groups.items()
        }
        return msgspec.structs.replace(env, **values)

    return changed


_MECHANISMS: Mapping[str, Ablation] = MappingProxyType(
    {
        "importance_tags": _with(curation={"tags": False, "eviction": "fifo"}),
        "compression": _with(compression={"on": False}),
        "auto_populate": _with(auto_populate={"on": False}),
        "evidence": _with(evidence={"on": False, "handles": False}),
        "verification": _with(verification={"on": False}),
        "review": _with(review={"on": False}),
        "dedup": _with(dedup={"on": False}),
        "guidance": _with(guidance="none"),
        "history": _with(history={"on": False}),
        "budget_marker": _with(budget_marker={"on": False}),
        "fan_out": _with(fan_out={"on": False}),
        "grep": _with(grep={"on": False}),
        "read": _with(read={"on": False}),
        "rank": _with(evidence={"rank": False}),
        "leads": _with(leads={"on": False}),
        "auto_populate_by_evidence": _with(auto_populate={"by": "first"}),
        "read_by_evidence": _with(read={"by": "order"}),
    }
)


def _all_off(env: Env) -> Env:
    return reduce(lambda left, ablation: ablation(left), _MECHANISMS.values(), env)


ABLATIONS: Mapping[str, Ablation] = MappingProxyType({**_MECHANISMS, ALL_OFF: _all_off})
"""Each mechanism with the function that removes it; `all_off` leaves searching, curating and ending."""


def ablated(config: Config, name: str) -> Config:
    """Return the configuration without a mechanism. A model that was trained with the mechanism is accepted:
    how much it loses is what an ablation measures.

    Raises:
        UsageError: there is no such mechanism.
    """
    if name not in ABLATIONS:
        raise UsageError(f"unknown ablation {name!r}; choose from: all, {', '.join(ABLATIONS)}{meant(name, ABLATIONS)}")
    machine = config.machine
    machine = msgspec.structs.replace(machine, model=msgspec.structs.replace(machine.model, foreign=True))
    return msgspec.structs.replace(config, env=ABLATIONS[name](config.env), machine=machine)


def conditions(evaluation: Evaluation, names: Sequence[str]) -> dict[str, Evaluation]:
    """Return the evaluations to play, in order: the base, and the ablations of mechanisms that are not already off.

    Raises:
        UsageError: a name is not an ablation.
    """
    variants = {name: replace(evaluation, config=ablated(evaluation.config, name)) for name in names}
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
    there, or return the existing table unchanged. Interrupted runs continue; episodes broken by faults are run again.

    Args:
        names: from `ABLATIONS`; those whose mechanism is already off are skipped, which the table notes.
        force: start over, whatever earlier ablations are in the folder.
        rescored: first score the recorded episodes again, with changed gold or another reward (`evaluate.rescore`).

    Raises:
        UsageError: a name is not an ablation, there is no task, a task has no gold, or the folder holds something else.
        SchemaError: the folder is damaged.
        InfrastructureFault: a worker died; run again to continue.
    """
    evaluation.check()
    played = conditions(evaluation, names)
    skipped = tuple(name for name in dict.fromkeys(names) if name not in played)
    stage = _stage(played)
    if force:
        refuse_foreign(out, VERB)
        for name in (BASE, *ABLATIONS):
            clear_run(out / name)
        clear(out, VERB, TABLE, README, keep_card=True)
    else:
        refuse_foreign(out, VERB)
        for name, each in played.items():
            (rescore if rescored else refuse_changed_tasks)(each, out / name)
        refuse_changed(stage, out, "ablation", besides=SCORING if rescored else ())
    if (finished := _finished(stage, out)) is not None:
        return finished
    with under_way(stage, out):
        metrics = {name: play(each, out / name) for name, each in played.items()}
        table = _table(played, metrics, out, skipped)
        write_atomically(out / README, markdown(table).encode())
        write_json(out / TABLE, table)
        for name in played:
            # The report shows the table but was written before it.
            (out / name / REPORT).unlink(missing_ok=True)
        stage.write(out, status="finished", gates={"broken": sum(each.broken for each in table.conditions)})
    return table


def _stage(played: Mapping[str, Evaluation]) -> Stage:
    """Return the card: the inputs of the base, and the environments that it is compared with."""
    base = played[BASE].stage()
    environments = {name: env_hash(each.config.env) for name, each in played.items() if name != BASE}
    return Stage(VERB, {**base.inputs, "ablations": environments}, hashes=base.hashes)


def _finished(stage: Stage, out: Path) -> AblationTable | None:
    """Return the existing table; None if something is left to do."""
    if not stage.is_done(out) or not all((out / name).is_file() for name in (TABLE, README)):
        return None
    try:
        table = msgspec.json.decode((out / TABLE).read_bytes(), type=AblationTable)
    except MALFORMED as error:
        raise SchemaError(f"{out / TABLE} is not a table of ablations: {error}") from error
    return None if any(each.broken for each in table.conditions) else table


def _table(
    played: Mapping[str, Evaluation], metrics: Mapping[str, Mapping[str, Any]], out: Path, skipped: tuple[str, ...]
) -> AblationTable:
    base = played[BASE]
    rows = {name: _per_task(each, out / name) for name, each in played.items()}
    resamples, seed = base.config.machine.bootstrap, base.seed
    raw = [compared(name, metrics[name], rows[BASE], rows[name], resamples, seed) for name in played]
    p = holm({each.name: each.p for each in raw if each.name != BASE and each.p is not None})
    conditions = tuple(msgspec.structs.replace(each, p=p.get(each.name)) for each in raw)
    return AblationTable(
        dataset=base.dataset,
        split=base.split,
        policy=base.policy,
        tasks=len(base.tasks),
        samples=base.samples,
        seed=base.seed,
        conditions=conditions,
        skipped=skipped,
    )


def _per_task(evaluation: Evaluation, folder: Path) -> dict[str, dict[str, float]]:
    tasks = {task.task_id: task for task in evaluation.tasks}
    episodes = episodes_of(evaluation.stage(), folder)
    return task_metrics(episodes, tasks, evaluation.config, faults=evaluation.faults)
