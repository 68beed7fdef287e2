"""A recorded run as tables for pandas or polars: its episodes, and their turns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import msgspec

from harness1.config import Config
from harness1.errors import MissingExtra, UsageError
from harness1.eval.failure import failure_class
from harness1.eval.run import Run
from harness1.eval.summary import measured
from harness1.records import TAGS, Episode, Gold, Status, Turn, UnitId
from harness1.reward.measures import Outcome, measure_outcome, targets
from harness1.rows.calls import calls_of
from harness1.runs.files import Stage, read_json, read_stage
from harness1.runs.folder import METRICS
from harness1.runs.journal import latest_episodes

Library = Literal["", "pandas", "polars"]
LIBRARIES = ("pandas", "polars")
SUMMARY = 200
"""Characters of the arguments of an action in a row."""

Row = dict[str, Any]


@dataclass(frozen=True)
class RecordedRun:
    """A run folder as tables; made by `load_run`."""

    run: Run
    episodes: tuple[Episode, ...]
    """The last episode of each task and sample, in that order."""

    @property
    def folder(self) -> Path:
        return self.run.folder

    @property
    def stage(self) -> Stage:
        return self.run.stage

    @property
    def config(self) -> Config:
        return self.run.config

    @property
    def metrics(self) -> dict[str, Any]:
        """Every metric with its mean and the bounds of its 95 % interval, as in `metrics.json`; empty where nothing was
        scored."""
        path = self.folder / METRICS
        return read_json(path) if path.is_file() else {}

    def tasks(self, library: Library = "") -> Any:
        """Return a frame with a row for each episode: `task`, `query`, `sample`, `seed`, `policy`, `episode`, `group`,
        `status`, `stop`, the failure `class`, `delivered` units and how many have each tag, `turns`, `seconds`, the
        tokens of all contexts (`prompt_tokens`), those that no prefix cache held (`prefill_tokens`) and sampled ones
        (`output_tokens`), `reward` without unit, and where gold is known every metric of `tasks.csv`, mostly shares of
        1. What is unknown is missing.

        Args:
            library: `pandas` or `polars`; empty: whichever is installed, pandas first.

        Raises:
            MissingExtra: the library is not installed.
            UsageError: there is no library of that name.
        """
        return _frame([self._task(episode) for episode in self.episodes], library)

    def turns(self, library: Library = "") -> Any:
        """Return a frame with a row for each turn: `task`, `sample`, `episode`, `turn` from 1, `tool`, the first 200
        characters of its `arguments`, the `error` code of its result, `prompt_tokens` of its context, `prefill_tokens`
        that no prefix cache held, sampled `output_tokens`, `attempts` of a model, `seconds` of them, `hits`, units
        that were `new`, and how many of the gold `targets` have been `found` so far. What is unknown is missing.

        Args and errors are those of `tasks`.
        """
        return _frame([row for episode in self.episodes for row in self._turns(episode)], library)

    def _task(self, episode: Episode) -> Row:
        gold = self.run.gold_of(episode.task)
        result = _outcome(episode, gold)
        tags = Counter(entry.tag for entry in episode.curated)
        called = list(calls_of(episode))
        metrics = {} if result is None else measured(result, episode, gold, self.config)
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
            "class": failure_class(episode.stop_reason, result).value,
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

    def _turns(self, episode: Episode) -> Iterator[Row]:
        gold = self.run.gold_of(episode.task)
        wanted = _targets(episode, gold)
        seen: set[UnitId] = set()
        for turn in episode.turns:
            seen |= _units(episode, turn)
            found = None if wanted is None else sum(not target.isdisjoint(seen) for target in wanted)
            total = None if wanted is None else len(wanted)
            yield _turn(episode, turn) | {"found": found, "targets": total}


def load_run(folder: Path | str) -> RecordedRun:
    """Return a recorded run of `search`, `eval`, `sft collect` or `rl train`, whose `tasks()` and `turns()` are frames
    of pandas or polars; their docstrings name the columns and the units.

    Args:
        folder: the run folder; of `rl train`, its output or the `episodes` in it.

    Raises:
        UsageError: the folder holds no run.
        SchemaError: its card or an episode is damaged.
    """
    place = Path(folder)
    card = read_stage(place)
    run = Run.open(place / "episodes" if card is not None and card.verb == "rl train" else place)
    found = sorted(latest_episodes(run.folder).items())
    return RecordedRun(run, tuple(episode for _, episode in found))


def _turn(episode: Episode, turn: Turn) -> Row:
    action, seen = turn.action, turn.observation
    given = "" if action is None else msgspec.json.encode(action.arguments).decode()
    return {
        "task": episode.task.task_id,
        "sample": episode.sample_idx,
        "episode": episode.episode_id,
        "turn": turn.index,
        "tool": None if action is None else action.name,
        "arguments": given[:SUMMARY],
        "error": _error(turn),
        "prompt_tokens": turn.prompt_tokens,
        "prefill_tokens": turn.prefill_tokens,
        "output_tokens": sum(len(call.output_ids) for call in turn.calls) if turn.calls else None,
        "attempts": len(turn.calls) or None,
        "seconds": sum(call.t_end - call.t_start for call in turn.calls) if turn.calls else None,
        "hits": 0 if seen is None else len(seen.hits),
        "new": 0 if seen is None else len(seen.delta.new),
    }


def _error(turn: Turn) -> str | None:
    if turn.parse_error is not None:
        return "parse_error"
    return None if turn.observation is None or turn.observation.error is None else turn.observation.error.code


def _units(episode: Episode, turn: Turn) -> set[UnitId]:
    hits = () if turn.observation is None else turn.observation.hits
    return {UnitId(hit.doc_id if episode.unit == "document" else hit.chunk_id) for hit in hits}


def _outcome(episode: Episode, gold: Gold | None) -> Outcome | None:
    if gold is None or episode.status is Status.INFRA_ERROR:
        return None
    try:
        return measure_outcome(episode, gold)
    except UsageError:
        return None


def _targets(episode: Episode, gold: Gold | None) -> list[frozenset[UnitId]] | None:
    try:
        return [frozenset(each) for each in targets(episode.task.task_id, gold, episode.unit).relevant]
    except UsageError:
        return None


def _frame(rows: list[Row], library: str) -> Any:
    """Return rows as a frame in which every row has every column."""
    if library and library not in LIBRARIES:
        raise UsageError(f"there is no library {library!r} here: give {' or '.join(LIBRARIES)}")
    chosen = library or next((name for name in LIBRARIES if find_spec(name)), LIBRARIES[0])
    if find_spec(chosen) is None:
        raise MissingExtra(chosen, "frames")
    names = list(dict.fromkeys(name for row in sorted(rows, key=len) for name in row))
    columns: Mapping[str, list[Any]] = {name: [row.get(name) for row in rows] for name in names}
    return import_module(chosen).DataFrame(columns, **({"strict": False} if chosen == "polars" else {}))
