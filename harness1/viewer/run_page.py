"""A run on a page: what the page says of it, the rows of its episodes and which of them fit, the titles of its gold
documents, and its comparison with other runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain, groupby, islice, zip_longest
from pathlib import Path
from statistics import fmean
from typing import Any
from zlib import crc32

import msgspec

from harness1.config import Config
from harness1.env.pieces import static_piece
from harness1.errors import MALFORMED, UsageError
from harness1.eval.compare import Difference, PerTask, correct_p_values, differences_of
from harness1.eval.metrics import HEADLINE, failure_class
from harness1.eval.outputs import outcome_if_known
from harness1.eval.run import Run
from harness1.eval.summary import task_metrics
from harness1.models.fetch import resolve_model
from harness1.models.open import HARMONY
from harness1.models.spec import ModelSpec, is_model
from harness1.models.tokenizer import HarmonyVocabulary, Tokenizer, open_tokenizer
from harness1.records import Episode, EpisodeKey, Gold, RewardRecord, Task, Unit
from harness1.retrieval.corpus import Document
from harness1.reward import composite
from harness1.reward.measures import Outcome, delivery, targets
from harness1.runs.folder import METRICS
from harness1.tools.registry import Toolbox

MOST_READ = 200_000
"""Documents of each dataset that are read for their titles; those of gold further on stay without one."""
MOST_TITLES = 20_000
"""Limit of titles."""
LONGEST = 200
"""Characters of a title."""


def gold_titles(run: Run) -> dict[str, str]:
    """Return the titles of the gold units of a run by id, as far as the first documents of its datasets tell; none if
    these cannot be read."""
    wanted = {
        name for (task_id, _), each in run.golds.items() for name in _gold_units(task_id, each, run.config.index.unit)
    }
    titles: dict[str, str] = {}
    try:
        for document in _first_documents(run) if wanted else ():
            titles |= {name: document.title[:LONGEST] for name in _unit_names(document, wanted) if document.title}
            if len(titles) >= min(len(wanted), MOST_TITLES):
                break
    except (UsageError, OSError):
        return titles
    return titles


def _first_documents(run: Run) -> Iterator[Document]:
    for source in run.sources:
        if source.has_documents:
            yield from islice(source.documents(), MOST_READ)


def _gold_units(task_id: str, gold: Gold, unit: Unit) -> Iterator[str]:
    try:
        for target in targets(task_id, gold, unit).relevant:
            yield from target
    except UsageError:
        return


def _unit_names(document: Document, wanted: set[str]) -> Iterator[str]:
    if document.doc_id in wanted:
        yield document.doc_id
    yield from (each.chunk_id for each in document.chunks if each.chunk_id in wanted)


class RunSource(Run):
    """A recorded run with all that a page says of it. It can be sent to a worker process."""

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @cached_property
    def notes(self) -> list[str]:
        """One line for everything that is missing, with the consequences for the reader."""
        notes = list(self.gold_notes) if self.split else []
        if self._has_tokens and self.tokenizer is None:
            notes.append(
                "The tokenizer of its model could not be loaded: prompts are shown as pieces of the context, and"
                " outputs as what was read in them, not as the text that was sampled."
            )
        return notes

    @cached_property
    def titles(self) -> Mapping[str, str]:
        """Of gold units, by id (see `gold_titles`)."""
        return gold_titles(self)

    def __getstate__(self) -> dict[str, Any]:
        # A tokenizer is not sent to a worker process: it loads its own.
        return super().__getstate__() | {"titles": self.titles}

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer with which the episodes were recorded, or None if it is not on this machine."""
        place = self._tokenizer_place
        if place is None:
            return None
        try:
            found = HarmonyVocabulary() if place == HARMONY else open_tokenizer(resolve_model(place))
        except (UsageError, OSError):
            return None
        return found if found.hash == self.stage.hashes.get("tokenizer") else None

    @property
    def tools(self) -> list[str]:
        """The names of the policy's tools, in order."""
        return [spec.name for spec in Toolbox.of(self.config.env).specs]

    @property
    def card(self) -> dict[str, Any]:
        """The page's description of the run."""
        inputs = self.stage.inputs
        metrics = self._metrics()
        return {
            "name": self.name,
            "folder": str(self.folder),
            "policy": self.policy,
            "learned": is_model(self.policy),
            "index": inputs.get("index", ""),
            "reward": inputs.get("reward", ""),
            "dataset": inputs.get("dataset", ""),
            "split": inputs.get("split", ""),
            "status": self.stage.status,
            "asked": not self.split,
            "tools": self.tools,
            "cap": self.config.env.curation.cap,
            "notes": self.notes,
            "metrics": {name: metrics[name] for name in HEADLINE if isinstance(metrics.get(name), dict)},
        }

    def shared(self, texts: Mapping[str, str]) -> dict[str, Any]:
        """Return the data that its episodes share: texts by the key of their segment, and the tools."""
        toolbox = Toolbox.of(self.config.env)
        static = static_piece(self.config.env, toolbox)
        return {"texts": {static.key: static.text, **texts}, "specs": msgspec.to_builtins(toolbox.specs)}

    @property
    def _has_tokens(self) -> bool:
        return "tokenizer" in self.stage.hashes

    @property
    def _tokenizer_place(self) -> str | None:
        if not self._has_tokens:
            return None
        named = self.stage.outputs.get("tokenizer") or self.config.machine.model.tokenizer
        if named or not is_model(self.policy):
            return str(named) if named else None
        try:
            return ModelSpec.read(self.policy).model
        except UsageError:
            return None

    def _metrics(self) -> dict[str, Any]:
        path = self.folder / METRICS
        try:
            return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        except (OSError, *MALFORMED):
            return {}


QUERY_CHARACTERS = 300
"""Limit of the query in a row; the episode has all of it."""


class EpisodeRow(msgspec.Struct, frozen=True, array_like=True):
    """An episode in the list, with the values to filter by. Undefined numbers are null."""

    run: int
    episode: str
    task: str
    sample: int
    query: str
    status: str
    stop: str
    failure: str
    recall: float | None
    trajectory: float | None
    precision: float | None
    size: int
    turns: int
    tools: int
    """One bit for each name in the run's list of tools, set if the tool was called."""
    reward: float | None
    tokens: int
    """The sum over all contexts of the episode."""
    held: bool = False
    """True if the file contains the episode itself."""
    problem: str | None = None
    """The reason why it cannot be replayed exactly."""
    delivered: int = 0
    """A checksum of the set of delivered units, equal for equal sets."""


class Scored(msgspec.Struct, frozen=True):
    """The outcome and the reward of an episode, if its gold is known."""

    outcome: Outcome | None
    reward: RewardRecord | None


def score_episode(episode: Episode, gold: Gold | None, config: Config) -> Scored:
    """Return the outcome of an episode, and its recorded reward, or else that of the run's configuration."""
    found = outcome_if_known(episode, gold)
    if found is None:
        return Scored(None, episode.reward)
    return Scored(found, episode.reward or composite(found, episode, config, gold))


def row_of(episode: Episode, run: int, result: Scored, tools: list[str], problem: str | None) -> EpisodeRow:
    """Return the row of an episode; `tools` are the names for the bits of `EpisodeRow.tools`."""
    called = {turn.action.name for turn in episode.turns if turn.action is not None}
    found, reward = result.outcome, result.reward
    return EpisodeRow(
        run=run,
        episode=episode.episode_id,
        task=episode.task.task_id,
        sample=episode.sample_idx,
        query=" ".join(episode.task.query.split())[:QUERY_CHARACTERS],
        status=episode.status.value,
        stop=episode.stop_reason.value,
        failure=failure_class(episode.stop_reason, found).value,
        recall=None if found is None else round(found.recall, 4),
        trajectory=None if found is None else round(found.trajectory_recall, 4),
        precision=None if found is None else round(found.precision, 4),
        size=len(episode.curated),
        turns=len(episode.turns),
        tools=sum(1 << bit for bit, name in enumerate(tools) if name in called),
        reward=None if reward is None else round(reward.total, 4),
        tokens=sum(turn.prompt_tokens for turn in episode.turns),
        problem=problem,
        delivered=crc32("\n".join(sorted(delivery(episode))).encode()),
    )


def in_order(rows: Sequence[EpisodeRow]) -> list[int]:
    """Return the indices of rows in order of interest: tasks with the lowest and with the highest recall alternate. The
    episodes of a task stay together for comparison. An unscored episode counts as recall 0; where all are unscored, the
    latest come first."""
    if all(row.recall is None for row in rows):
        return list(reversed(range(len(rows))))
    tasks: dict[str, list[int]] = {}
    for place, row in enumerate(rows):
        tasks.setdefault(row.task, []).append(place)
    recall = {task: sum(rows[at].recall or 0.0 for at in places) / len(places) for task, places in tasks.items()}
    ranked = sorted(tasks, key=lambda task: (recall[task], task))
    half = (len(ranked) + 1) // 2
    pairs = zip_longest(ranked[:half], reversed(ranked[half:]))
    return [place for task in chain.from_iterable(pairs) if task is not None for place in tasks[task]]


def with_room(
    order: Iterable[int],
    sizes: Sequence[tuple[int, Sequence[int]]],
    passage_size: Callable[[int], int],
    room: int,
) -> set[int]:
    """Return the places that fit into the room, taken in order; those that do not fit are skipped. `sizes`: for each
    place, its own size and the passages that it needs, which count once for all. `passage_size`: the size of a
    passage."""
    held: set[int] = set()
    there: set[int] = set()
    for place in order:
        own, passages = sizes[place]
        new = set(passages) - there
        size = own + sum(map(passage_size, new))
        if size <= room:
            held.add(place)
            there |= new
            room -= size
    return held


MOST_RUNS = 5
"""With more runs than this, only pairs with the first are compared."""

Measured = Mapping[EpisodeKey, Mapping[str, float]]
"""The metrics of every episode; none of one that cannot be scored."""


def pairs(runs: Sequence[RunSource], measured: Sequence[Measured]) -> list[dict[str, Any]]:
    """Return every comparison of a run with a later one on the same tasks as JSON data: their places, the number of
    their common scored tasks, and for each metric both means, the mean difference with its interval, and p."""
    found: list[dict[str, Any]] = []
    values = [per_task(run, each) for run, each in zip(runs, measured, strict=True)]
    for first in range(len(runs) if len(runs) <= MOST_RUNS else 1):
        family = list(_with_later(runs, values, first))
        metrics = correct_p_values([differences for _, _, differences in family])
        found += [
            {"first": first, "second": second, "tasks": tasks, "metrics": _difference_rows(each)}
            for (second, tasks, _), each in zip(family, metrics, strict=True)
        ]
    return found


def per_task(run: RunSource, measured: Measured) -> PerTask:
    """Return the mean of each metric over the samples of each scored task; tasks that a finished run dropped count as
    nothing done, as in its summary."""
    made_with = tuple(run.stage.inputs.get(name) for name in ("env", "policy", "index"))
    of_run = sorted(key for key in measured if key[2:] == made_with)
    groups = groupby((key for key in of_run if measured[key]), lambda key: key.task_id)
    found = {task_id: _means([measured[key] for key in samples]) for task_id, samples in groups}
    if run.is_finished and "tasks" in run.stage.inputs:
        met = {key.task_id for key in of_run}
        golds = {task_id: gold for (task_id, _), gold in run.golds.items() if task_id not in met}
        tasks = {task_id: Task(task_id, "", gold=gold) for task_id, gold in golds.items()}
        found |= task_metrics((), tasks, run.config, finished=True)
    return run.with_rollout_costs(found)


def _with_later(
    runs: Sequence[RunSource], values: Sequence[PerTask], first: int
) -> Iterator[tuple[int, int, dict[str, Difference]]]:
    for second in range(first + 1, len(runs)):
        common = values[first].keys() & values[second].keys()
        if common and _tasks_of(runs[first]) == _tasks_of(runs[second]):
            resamples = runs[first].config.machine.bootstrap
            yield second, len(common), differences_of(values[first], values[second], HEADLINE, resamples)


def _tasks_of(run: RunSource) -> tuple[str, Any]:
    return Path(run.dataset).name, run.stage.inputs.get("split")


def _means(samples: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for sample in samples for name in sample)
    return {name: fmean(sample[name] for sample in samples if name in sample) for name in names}


def _difference_rows(metrics: Mapping[str, Difference]) -> dict[str, list[float]]:
    return {
        name: [
            row.first,
            row.second,
            row.difference.mean,
            row.difference.low,
            row.difference.high,
            row.p if row.p_holm is None else row.p_holm,
        ]
        for name, row in metrics.items()
    }
