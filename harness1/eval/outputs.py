"""Files made from a run's episodes: tables, TREC runs, a BrowseComp-Plus submission; equal episodes give equal bytes,
in whatever order they finished. And the frames of a recorded run for pandas or polars."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

import msgspec

from harness1.config import Config
from harness1.data.trec import write_qrels, write_run
from harness1.errors import MissingExtra, UsageError
from harness1.eval.metrics import MeasuredRun, documents_of_hits, failure_class, measure_episode, resources
from harness1.eval.run import Run
from harness1.plain import text_digest
from harness1.records import TAGS, ChunkId, DocId, Episode, Gold, Status, Turn, UnitId
from harness1.reward.measures import Outcome, delivery, measure_outcome, targets
from harness1.rows.calls import calls_of
from harness1.runs import folder as runs
from harness1.runs.files import read_json, read_stage, write_atomically, write_json
from harness1.runs.journal import latest_episodes

TAG = "harness1"  # the last column of a TREC run
OFFICIAL = {"search_corpus": "search", "fan_out_search": "search", "read_document": "get_document"}
"""BrowseComp-Plus's names of the tools that it also has."""
LONGEST_NAME = 150  # characters of a task id in a file name; file systems allow 255 in all


def output_names(task_ids: Sequence[str], samples: int) -> Iterator[str]:
    """Yield the names of all files made from a run's episodes except the report."""
    yield from (runs.METRICS, runs.RESOURCES, runs.TASKS, runs.CONFIG, runs.PROVENANCE)
    for sample in range(samples):
        yield from (runs.of_sample(runs.CURATED, sample), runs.of_sample(runs.POOL, sample))
        yield from (f"{runs.of_sample(runs.SUBMISSION, sample)}/{submission_name(task_id)}" for task_id in task_ids)


def write_outputs(
    out: Path, episodes: Sequence[Episode], measured: MeasuredRun, config: Config, metrics: Mapping[str, Any]
) -> bool:
    """Write all files but the provenance and the report; return whether ids had to be encoded in the TREC runs."""
    write_json(out / runs.METRICS, metrics)
    write_json(out / runs.RESOURCES, resources(episodes, config, runs.wall_seconds(runs.read_provenance(out))))
    write_atomically(out / runs.TASKS, task_table(episodes, measured).encode())
    settings = "\n".join(runs.toml_lines(runs.public_config(config))).strip()
    write_atomically(out / runs.CONFIG, f"{settings}\n".encode())
    by_sample: dict[int, list[Episode]] = {}
    for episode in episodes:
        by_sample.setdefault(episode.sample_idx, []).append(episode)
    ids = (name for each in episodes for name in (each.task.task_id, *delivery(each), *seen_units(each)))
    encode = any(name.split() != [name] for name in ids)  # such an id would break the columns of a TREC file
    column = _encode if encode else str
    for sample, of_one in by_sample.items():
        for name, units_of in ((runs.CURATED, delivery), (runs.POOL, seen_units)):
            run = []
            for episode in (each for each in of_one if each.status is not Status.INFRA_ERROR):
                units = [UnitId(column(unit)) for unit in units_of(episode)]
                ranked = [(unit, float(len(units) - place)) for place, unit in enumerate(units)]
                run.append((column(episode.task.task_id), ranked))
            write_run(out / runs.of_sample(name, sample), run, TAG)
        folder = out / runs.of_sample(runs.SUBMISSION, sample)
        folder.mkdir(exist_ok=True)
        for episode in of_one:
            write_json(folder / submission_name(episode.task.task_id), submission(episode))
    (out / runs.ENCODED_QRELS).unlink(missing_ok=True)
    if encode:
        judged = {}
        for task_id, task in sorted(measured.tasks.items()):
            if task.gold:
                judged[_encode(task_id)] = {DocId(_encode(name)): grade for name, grade in task.gold.relevant.items()}
        write_qrels(out / runs.ENCODED_QRELS, judged)
    return encode


def task_table(episodes: Sequence[Episode], measured: MeasuredRun) -> str:
    """Return a table with the id, the query, the number of scored samples and the metrics of each task."""
    rows, tasks = measured.per_task(), measured.tasks
    names = list(dict.fromkeys(name for row in rows.values() for name in row))
    counted = (each for each in episodes if measured.counted == "zero" or each.status is not Status.INFRA_ERROR)
    scored = Counter(each.task.task_id for each in counted)
    lines = (
        (name, tasks[name].query, scored[name], *(rows.get(name, {}).get(metric, "") for metric in names))
        for name in sorted(tasks)
    )
    return csv_table(("task_id", "query", "samples", *names), lines)


def seen_units(episode: Episode) -> tuple[UnitId, ...]:
    """Return everything that was seen: the pool in the order of discovery, then its near duplicates."""
    return tuple(dict.fromkeys((*episode.pool, *episode.aliases)))


def submission(episode: Episode) -> dict[str, Any]:
    """Return what BrowseComp-Plus evaluates (`scripts_evaluation/evaluate_run.py`); the answer is empty."""
    failed = episode.status in (Status.POLICY_ERROR, Status.INFRA_ERROR)
    actions = [turn.action.name for turn in episode.turns if turn.action is not None]
    calls = Counter(OFFICIAL.get(name, name) for name in actions if name != "end_search")
    documents: list[str] = list(seen_units(episode))
    if episode.unit == "chunk":
        # For a chunk that was never shown, the part of its id before the number (see `chunking.chunk`).
        shown = documents_of_hits(episode)
        documents = [shown.get(ChunkId(unit), DocId(unit.rpartition("#")[0] or unit)) for unit in documents]
    return {
        "query_id": episode.task.task_id,
        "tool_call_counts": dict(sorted(calls.items())),
        "status": "incomplete" if failed else "completed",
        "retrieved_docids": list(dict.fromkeys(documents)),
        "result": [{"type": "output_text", "output": ""}],
    }


def submission_name(task_id: str) -> str:
    """Return the file name of one query, for any id."""
    name = quote(task_id, safe="")
    if len(name) > LONGEST_NAME:
        name = f"{name[:LONGEST_NAME]}-{text_digest(task_id)}"
    return f"run_{name}.json"


def _encode(name: str) -> str:
    """Return an id as one column: white space and percent signs are percent-encoded, so that ids stay distinct."""
    return "".join(quote(each) if each.isspace() or each == "%" else each for each in name) or "%"


FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20")
"""Prefixes of texts that a spreadsheet takes for formulas (OWASP, CSV injection), the last four in full width."""


def csv_table(columns: Sequence[str], rows: Iterable[Iterable[str | float]]) -> str:
    """Return comma-separated values (RFC 4180), in which what a spreadsheet would evaluate has an apostrophe."""

    def escape(cell: str | float) -> str | float:
        return f"'{cell}" if isinstance(cell, str) and cell.lstrip("' ").startswith(FORMULA) else cell

    text = io.StringIO(newline="")
    csv.writer(text).writerows(map(escape, row) for row in (columns, *rows))
    return text.getvalue()


Library = Literal["", "pandas", "polars"]
LIBRARIES = ("pandas", "polars")
SUMMARY = 200  # characters of the arguments of an action in a row
Row = dict[str, Any]


@dataclass(frozen=True)
class RecordedRun:
    """A run folder as tables; made by `load_run`."""

    run: Run
    episodes: tuple[Episode, ...]  # the last episode of each task and sample, in that order

    @property
    def folder(self) -> Path:
        return self.run.folder

    @property
    def metrics(self) -> dict[str, Any]:
        """What `metrics.json` holds; empty where nothing was scored."""
        path = self.run.folder / runs.METRICS
        return read_json(path) if path.is_file() else {}

    def tasks(self, library: Library = "") -> Any:
        """Return a frame of `library` (`pandas` or `polars`; empty: whichever is installed, pandas first) with a row
        for each episode: `task`, `query`, `sample`, `seed`, `policy`, `episode`, `group`, `status`, `stop`, the failure
        `class`, `delivered` units and how many have each tag, `turns`, `seconds`, the tokens of all contexts
        (`prompt_tokens`), those that no prefix cache held (`prefill_tokens`) and sampled ones (`output_tokens`),
        `reward` without unit, and where gold is known every metric of `tasks.csv`, mostly shares of 1. What is unknown
        is missing. Raises MissingExtra: the library is not installed; UsageError: there is no library of that name."""
        return _frame([self._task(episode) for episode in self.episodes], library)

    def turns(self, library: Library = "") -> Any:
        """Return a frame, as `tasks` does, with a row for each turn: `task`, `sample`, `episode`, `turn` from 1,
        `tool`, the first 200 characters of its `arguments`, the `error` code of its result, `prompt_tokens` of its
        context, `prefill_tokens` that no prefix cache held, sampled `output_tokens`, `attempts` of a model, `seconds`
        of them, `hits`, units that were `new`, and how many of the gold `targets` have been `found` so far."""
        rows = []
        for episode in self.episodes:
            try:
                wanted = targets(episode.task.task_id, self.run.gold_of(episode.task), episode.unit).relevant
            except UsageError:
                wanted = None
            seen: set[UnitId] = set()
            for turn in episode.turns:
                row, hits = _describe_turn(episode, turn), turn.observation.hits if turn.observation else ()
                seen |= {UnitId(hit.doc_id if episode.unit == "document" else hit.chunk_id) for hit in hits}
                row["found"] = None if wanted is None else sum(not target.isdisjoint(seen) for target in wanted)
                rows.append(row | {"targets": None if wanted is None else len(wanted)})
        return _frame(rows, library)

    def _task(self, episode: Episode) -> Row:
        gold = self.run.gold_of(episode.task)
        result = outcome_if_known(episode, gold)
        tags, called = Counter(entry.tag for entry in episode.curated), list(calls_of(episode))
        metrics = {} if result is None else measure_episode(result, episode, gold, self.run.config)
        row: Row = {
            "task": episode.task.task_id,
            "query": episode.task.query,
            "sample": episode.sample_idx,
            "seed": episode.seed,
            "policy": self.run.policy,
            "episode": episode.episode_id,
            "group": episode.group_id,
            "status": episode.status.value,
            "stop": episode.stop_reason.value,
            "class": failure_class(episode.stop_reason, result),
            "delivered": len(episode.curated),
            **{tag: tags[tag] for tag in TAGS},
            "turns": len(episode.turns),
            "seconds": sum(episode.stage_ms.values()) / 1000,
            "prompt_tokens": sum(turn.prompt_tokens for turn in episode.turns),
            "prefill_tokens": sum(turn.prefill_tokens for turn in episode.turns),
            "output_tokens": sum(len(call.output_ids) for call in called) if called else None,
            "reward": metrics.get("reward") if episode.reward is None else episode.reward.total,
        }
        return row | {name: value for name, value in metrics.items() if name not in row}


def load_run(folder: Path | str) -> RecordedRun:
    """Return a recorded run of `search`, `eval`, `sft collect` or `rl train`, whose `tasks()` and `turns()` are frames
    of pandas or polars; their docstrings name the columns and the units.

    Raises:
        UsageError: the folder holds no run; or, as a SchemaError, its card or an episode is damaged.
    """
    place = Path(folder)
    card = read_stage(place)
    run = Run.open(place / "episodes" if card is not None and card.verb == "rl train" else place)
    return RecordedRun(run, tuple(episode for _, episode in sorted(latest_episodes(run.folder).items())))


def _describe_turn(episode: Episode, turn: Turn) -> Row:
    action, seen, calls = turn.action, turn.observation, turn.calls
    error = None if seen is None or seen.error is None else seen.error.code
    return {
        "task": episode.task.task_id,
        "sample": episode.sample_idx,
        "episode": episode.episode_id,
        "turn": turn.index,
        "tool": action and action.name,
        "arguments": msgspec.json.encode(action.arguments).decode()[:SUMMARY] if action else "",
        "error": error if turn.parse_error is None else "parse_error",
        "prompt_tokens": turn.prompt_tokens,
        "prefill_tokens": turn.prefill_tokens,
        "output_tokens": sum(len(call.output_ids) for call in calls) if calls else None,
        "attempts": len(calls) or None,
        "seconds": sum(call.t_end - call.t_start for call in calls) if calls else None,
        "hits": len(seen.hits) if seen else 0,
        "new": len(seen.delta.new) if seen else 0,
    }


def outcome_if_known(episode: Episode, gold: Gold | None) -> Outcome | None:
    """Return the outcome of an episode; None if the infrastructure broke it, or its gold does not say."""
    if gold is None or episode.status is Status.INFRA_ERROR:
        return None
    try:
        return measure_outcome(episode, gold)
    except UsageError:
        return None


def _frame(rows: list[Row], library: str) -> Any:
    if library and library not in LIBRARIES:
        raise UsageError(f"there is no library {library!r} here: give {' or '.join(LIBRARIES)}")
    chosen = library or next((name for name in LIBRARIES if find_spec(name)), LIBRARIES[0])
    if find_spec(chosen) is None:
        raise MissingExtra(chosen, "frames")
    names = list(dict.fromkeys(name for row in sorted(rows, key=len) for name in row))
    columns: Mapping[str, list[Any]] = {name: [row.get(name) for row in rows] for name in names}
    return import_module(chosen).DataFrame(columns, **({"strict": False} if chosen == "polars" else {}))
