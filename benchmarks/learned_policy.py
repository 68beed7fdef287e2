"""Compare learned policies with each other and with systems that have learned nothing, on any benchmarks: one table.

    python benchmarks/learned_policy.py $DATA/hotpotqa $DATA/scifact $DATA/fm2 --indexes indexes --out runs/learned \\
        --model base=smollm2-135m --model sft=runs/sft --model rl=runs/rl --unseen fm2 --limit 300 --unseen-limit 100

A model is a folder, a fetched model, or any policy such as `openai:MODEL@URL`; --transcript plays each of them also
over a growing transcript in place of the memory, with the same tools, window and turns. The last model is the learned
policy. Every other system is compared with it at equal size: of both sets, the larger is cut to the size of the
smaller, task by task, so that a task for which one of them delivered nothing counts 0 for both. Differences are paired
by task and have 95 % bootstrap intervals. Each model is also compared with the one before it, with whole sets, and over
the datasets named by --unseen, which count equally, the learned policy with the single searches: in the engine's order,
and in the order of the harness's evidence, which is what the harness is worth without a policy. Models play in the
environment of --config, all others in the default one. Every system's run is a folder below --out; existing runs are
not repeated. Seconds are those of the run divided by its tasks, which play concurrently; a run that was interrupted
shows none."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

if not __package__:
    # Run as a script: its neighbours are found beside it.
    sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.mechanisms import TRANSCRIPT
from benchmarks.systems import MODEL, SINGLE, SINGLE_RANKED, System, signed, stratified
from harness1.config import load_config
from harness1.data.indexing import ensure_index
from harness1.data.open import open_source
from harness1.eval.compare import at_equal_size
from harness1.eval.evaluate import Evaluation, ensure_run
from harness1.eval.run import Run, read_run
from harness1.eval.statistics import RESAMPLES, bootstrap_mean, paired_difference
from harness1.runs.folder import RESOURCES

F1, RECALL, REWARD = "curated_f1", "curated_recall", "reward"
SHOWN = {F1: "F1", RECALL: "recall", "curated_precision": "precision", "set_size": "size", REWARD: "reward"}
COSTS = {"turns": "turns", "prompt_tokens": "prompt tokens", "output_tokens": "output tokens"}
VALID = "valid calls"
TRANSCRIPT_ROW = ", transcript"
STEPS = {
    "over_the_one_before": "Each model minus the one before it",
    "over_the_transcript": "Each model minus the same over a transcript",
}
ROBUST = "reward.recipe=robust"
Row = dict[str, Any]


def systems(
    models: Mapping[str, str], config: str, settings: Sequence[str], dense: bool, transcript: bool = False
) -> dict[str, System]:
    """Return every system by its name in the table, models first and the learned policy last of them.

    Args:
        models: by name, a folder, a fetched model or a policy.
        config, settings: of the models' environment and sampling.
        dense: also search by embeddings.
        transcript: also play each model over a transcript.

    Raises:
        SystemExit: a model has the name of another system.
    """
    learned = load_config(config, [ROBUST, *settings])
    modes = ("bm25", "dense", "hybrid") if dense else ("bm25",)
    plain = load_config(None, [ROBUST, *(() if dense else ("env.retrieval.mode=bm25",))])
    found = {policy: System(policy, plain) for policy in ("scripted", "follow-leads")}
    for mode in modes:
        for order, single in (("", SINGLE), (", by evidence", SINGLE_RANKED)):
            searched = load_config(None, [ROBUST, *single, f"env.retrieval.mode={mode}"])
            found[f"single search, {mode}{order}"] = System("single-shot", searched)
    policies = {name: model if ":" in model else f"hf:{model}" for name, model in models.items()}
    if transcript:
        # Pruning is advised and enforced at about the shares of the window at which `--config transcript` does.
        room = learned.env.context_window - learned.env.generation_reserve
        pruning = f"env.pruning.limits=[{room // 2}, {room * 4 // 5}]"
        over = load_config(config, [ROBUST, *settings, *TRANSCRIPT, pruning])
        found |= {f"{name}{TRANSCRIPT_ROW}": System(policy, over) for name, policy in policies.items()}
    if taken := found.keys() & models.keys():
        raise SystemExit(f"--model {min(taken)}: another system has this name")
    return {name: System(policy, learned) for name, policy in policies.items()} | found


def dataset_rows(
    dataset: str, asked: Mapping[str, System], models: Sequence[str], indexes: Path, out: Path, limit: int, dense: bool
) -> dict[str, Row]:
    """Return the row of each system on a dataset; play what has not been played."""
    source = open_source(dataset)
    index = indexes / source.name
    ensure_index(source, index, load_config(None, [f"index.dense.model={MODEL}"] if dense else []))
    tasks = source.tasks("test")[: limit or None]
    runs: dict[str, Run] = {}
    for name, system in asked.items():
        folder = out / source.name / name.replace(", ", "-").replace(" ", "-")
        ensure_run(Evaluation(dataset, "test", tasks, str(index), system.policy, system.config), folder)
        runs[name] = read_run(folder, dataset)
        print(f"learned_policy: {name} on {source.name} is done", file=sys.stderr, flush=True)
    return compared(runs, models)


def compared(runs: Mapping[str, Run], models: Sequence[str]) -> dict[str, Row]:
    """Return metrics of each run, its difference from the learned policy (the last of `models`) at equal size, and that
    of each model from the one before it. Differences are those of the learned, or later, policy minus the other."""
    learned, before = models[-1], dict(zip(models[1:], models, strict=False))
    rows: dict[str, Row] = {}
    for name, run in runs.items():
        metrics: Row = {metric: _mean(run, metric) for metric in (*SHOWN, *COSTS)}
        metrics[VALID] = _valid_calls(run)
        rows[name] = {"tasks": len(run.per_task), "metrics": metrics, "seconds": _seconds(run)}
        if name != learned:
            ours, theirs = at_equal_size(runs[learned], run)
            rows[name]["at_equal_size"] = {metric: _difference(ours, theirs, metric) for metric in (F1, RECALL)}
        if name in before:
            earlier = runs[before[name]]
            rows[name]["over_the_one_before"] = {each: _difference(run, earlier, each) for each in (F1, REWARD)}
        if over := runs.get(f"{name}{TRANSCRIPT_ROW}"):
            rows[name]["over_the_transcript"] = {each: _difference(run, over, each) for each in (F1, RECALL)}
    return rows


def unseen_gains(table: Mapping[str, Mapping[str, Row]], unseen: Sequence[str]) -> dict[str, list[float]]:
    """Return the learned policy's gain in F1 at equal size over each single search, as the mean of the datasets' means,
    with its interval."""
    found = [table[name] for name in unseen if name in table]
    names = [name for name in next(iter(table.values())) if name.startswith("single search")] if found else []
    return {name: stratified([rows[name]["at_equal_size"][F1]["differences"] for rows in found]) for name in names}


def _values(run: Run, metric: str) -> dict[str, float]:
    return {task: metrics.get(metric, 0.0) for task, metrics in run.per_task.items()}


def _mean(run: Run, metric: str) -> list[float]:
    found = bootstrap_mean(list(_values(run, metric).values()), RESAMPLES)
    return [found.mean, found.low, found.high]


def _valid_calls(run: Run) -> float | None:
    """Return the share of the model's calls, repeated attempts included, that were carried out without an error."""
    turns, wrong, calls = (
        sum(sum(_values(run, each).values()) for each in names)
        for names in (("turns",), ("tool_errors", "format_errors"), ("model_calls",))
    )
    return (turns - wrong) / calls if calls else None


def _seconds(run: Run) -> float | None:
    """Return the seconds that the whole run took for each of its tasks, if they are known."""
    path = run.folder / RESOURCES
    known = json.loads(path.read_text()) if path.is_file() else {}
    return float(known["wall_seconds"]) / len(run.tasks) if "wall_seconds" in known else None


def _difference(ours: Run, theirs: Run, metric: str) -> Row:
    one, other = _values(ours, metric), _values(theirs, metric)
    found = paired_difference(one, other, RESAMPLES)
    differences = [one[task] - other[task] for task in sorted(other)]
    return {"difference": [found.mean, found.low, found.high], "differences": differences}


def markdown(table: Mapping[str, Mapping[str, Row]], gains: Mapping[str, Sequence[float]]) -> str:
    """Format a table of metrics for each dataset, and the differences below it."""
    parts: list[str] = []
    for dataset, rows in table.items():
        heads = [
            "system",
            *SHOWN.values(),
            *COSTS.values(),
            VALID,
            "seconds",
            "learned policy minus it at equal size: F1",
            "recall",
        ]
        lines = [[name, *_cells(row)] for name, row in rows.items()]
        parts.append(f"{dataset}, {next(iter(rows.values()))['tasks']} tasks:")
        parts.append("\n".join(f"| {' | '.join(cells)} |" for cells in (heads, ["---"] * len(heads), *lines)))
        for key, head in STEPS.items():
            steps = [f"- {name}: {_steps(row[key])}" for name, row in rows.items() if key in row]
            parts += [f"{head}:\n\n" + "\n".join(steps)] if steps else []
    if gains:
        said = [f"- {name}: {signed(gain)}" for name, gain in gains.items()]
        parts.append(
            "F1 at equal size on the datasets never trained on, learned policy minus it:\n\n" + "\n".join(said)
        )
    return "\n\n".join(parts)


def _cells(row: Row) -> list[str]:
    metrics = row["metrics"]
    own = [f"{metrics[name][0]:.3f} ({metrics[name][1]:.3f} to {metrics[name][2]:.3f})" for name in (F1, RECALL)]
    own += [f"{metrics[name][0]:.2f}" for name in list(SHOWN)[2:]]
    own += [f"{metrics[name][0]:,.1f}" for name in COSTS]
    own += ["" if value is None else f"{value:.2f}" for value in (metrics[VALID], row["seconds"])]
    against = row.get("at_equal_size")
    return own + ([signed(against[name]["difference"]) for name in (F1, RECALL)] if against else ["", ""])


def _steps(found: Row) -> str:
    return ", ".join(f"{SHOWN[name]} {signed(each['difference'])}" for name, each in found.items())


def _named(given: str) -> tuple[str, str]:
    name, equals, model = given.partition("=")
    if not equals or not name or not model:
        raise argparse.ArgumentTypeError(f"{given!r} is not NAME=MODEL")
    return name, model


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("datasets", nargs="+", metavar="DATASET")
    parser.add_argument("--model", action="append", required=True, type=_named, metavar="NAME=MODEL")
    parser.add_argument("--config", default="sft/handles", help="environment and sampling of the models")
    parser.add_argument("--set", action="append", default=[], dest="settings", metavar="A.B=VALUE")
    parser.add_argument("--unseen", action="append", default=[], metavar="NAME", help="a dataset never trained on")
    parser.add_argument("--dense", action="store_true", help="also search by embeddings, with indexes that have some")
    parser.add_argument("--transcript", action="store_true", help="also play each model over a transcript")
    parser.add_argument("--indexes", type=Path, required=True, help="where an index of each dataset is, or is built")
    parser.add_argument("--out", type=Path, required=True, help="where the run folders go")
    parser.add_argument("--limit", type=int, default=0, help="the first N tasks; 0 means all")
    parser.add_argument("--unseen-limit", type=int, default=0, help="the same for datasets never trained on")
    parser.add_argument("--json", action="store_true", dest="as_json")
    options = parser.parse_args(arguments)
    models = dict(options.model)
    asked = systems(models, options.config, options.settings, options.dense, options.transcript)
    if len(models) < len(options.model):
        parser.error("every --model needs a name of its own")
    names = {dataset: open_source(dataset).name for dataset in options.datasets}
    if unknown := set(options.unseen) - set(names.values()):
        parser.error(f"--unseen {min(unknown)}: the datasets are {', '.join(names.values())}")
    table: dict[str, dict[str, Row]] = {}
    for dataset, name in names.items():
        limit = options.unseen_limit if name in options.unseen else options.limit
        table[name] = dataset_rows(dataset, asked, list(models), options.indexes, options.out, limit, options.dense)
    gains = unseen_gains(table, options.unseen)
    report = {"systems": table, "unseen": gains}
    print(json.dumps(report) if options.as_json else markdown(table, gains))
    return report


if __name__ == "__main__":
    main()
