"""A run on a page: its card, the rows of its episodes and which of them fit, and its comparison with other runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any
from zlib import crc32

import msgspec

from harness1.config import Config
from harness1.env.pieces import static_piece
from harness1.errors import UsageError
from harness1.eval.cited import answers_in
from harness1.eval.compare import correct_p_values, differences_of
from harness1.eval.metrics import HEADLINE, failure_class
from harness1.eval.run import PerTask, Run
from harness1.eval.statistics import RESAMPLES
from harness1.models.fetch import resolve_model
from harness1.models.open import HARMONY
from harness1.models.spec import ModelSpec, is_model
from harness1.models.tokenizer import HarmonyVocabulary, Tokenizer, open_tokenizer
from harness1.records import Episode, Gold, RewardRecord, Status
from harness1.reward import composite
from harness1.reward.measures import Outcome, delivery, measure_outcome, targets
from harness1.runs.files import find_json
from harness1.runs.folder import METRICS
from harness1.tools.registry import Toolbox

MOST_READ = 200_000
"""Documents of each dataset that are read for their titles; those of gold further on stay without one."""
MOST_TITLES = 20_000
LONGEST = 200  # characters of a title


class RunSource(Run):
    """A recorded run with all that a page says of it. It can be sent to a worker process."""

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @cached_property
    def notes(self) -> list[str]:
        """One line for everything that is missing, with the consequences for the reader."""
        notes = list(self.known_gold[1]) if self.split else []
        if "tokenizer" in self.stage.hashes and self.tokenizer is None:
            notes.append(
                "The tokenizer of its model could not be loaded: prompts are shown as pieces of the context, and"
                " outputs as what was read in them, not as the text that was sampled."
            )
        return notes

    @cached_property
    def titles(self) -> Mapping[str, str]:
        """The titles of the gold units by id, as far as the first documents of its datasets tell."""
        wanted: set[str] = set()
        for (task_id, _), gold in self.known_gold[0].items():
            with suppress(UsageError):
                wanted.update(*targets(task_id, gold, self.config.index.unit).relevant)
        titles: dict[str, str] = {}
        with suppress(UsageError, OSError):
            sources = (source for source in (self.sources if wanted else ()) if source.has_documents)
            for document in chain.from_iterable(islice(source.documents(), MOST_READ) for source in sources):
                if document.title:
                    names = {document.doc_id, *(each.chunk_id for each in document.chunks)} & wanted
                    titles |= dict.fromkeys(names, document.title[:LONGEST])
                if len(titles) >= min(len(wanted), MOST_TITLES):
                    break
        return titles

    def __getstate__(self) -> dict[str, Any]:
        # A tokenizer is not sent to a worker process: it loads its own.
        return super().__getstate__() | {"titles": self.titles}

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer with which the episodes were recorded, or None if it is not on this machine."""
        place = self.stage.outputs.get("tokenizer") or self.config.machine.model.tokenizer
        if "tokenizer" not in self.stage.hashes or not (place or is_model(self.policy)):
            return None
        try:
            place = str(place or ModelSpec.read(self.policy).model)
            found = HarmonyVocabulary() if place == HARMONY else open_tokenizer(resolve_model(place))
        except (UsageError, OSError):
            return None
        return found if found.hash == self.stage.hashes["tokenizer"] else None

    @property
    def tools(self) -> list[str]:
        """The names of the policy's tools, in order."""
        return [spec.name for spec in Toolbox.of(self.config.env).specs]

    @property
    def card(self) -> dict[str, Any]:
        """The page's description of the run."""
        inputs, metrics = self.stage.inputs, find_json(self.folder / METRICS) or {}
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

    def answers_to(self, episode: Episode) -> list[dict[str, Any]]:
        """Return what `harness1 ask` answered from an episode."""
        return [each.as_json() for each in answers_in(self.folder) if each.episode_id == episode.episode_id]

    def shared(self, texts: Mapping[str, str]) -> dict[str, Any]:
        """Return the data that its episodes share: texts by the key of their segment, and the tools."""
        toolbox = Toolbox.of(self.config.env)
        static = static_piece(self.config.env, toolbox)
        return {"texts": {static.key: static.text, **texts}, "specs": msgspec.to_builtins(toolbox.specs)}


QUERY_CHARACTERS = 300  # limit of the query in a row; the episode has all of it


class EpisodeRow(msgspec.Struct, frozen=True, array_like=True):
    """An episode in the list, with the values to filter by. `tools`: one bit for each name in the run's list of tools.
    `tokens`: of all its contexts. `held`: whether the file contains the episode itself. `problem`: why it cannot be
    replayed exactly. `delivered`: a checksum of the set of delivered units, equal for equal sets."""

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
    reward: float | None
    tokens: int
    held: bool = False
    problem: str | None = None
    delivered: int = 0


Scored = tuple[Outcome | None, RewardRecord | None]


def score_episode(episode: Episode, gold: Gold | None, config: Config) -> Scored:
    """Return the outcome, if the gold tells, and the recorded reward, or else the configuration's."""
    found = None
    if gold is not None and episode.status is not Status.INFRA_ERROR:
        with suppress(UsageError):
            found = measure_outcome(episode, gold)
    return found, episode.reward or (composite(found, episode, config, gold) if found else None)


def row_of(episode: Episode, run: int, result: Scored, tools: list[str], problem: str | None) -> EpisodeRow:
    """Return the row of an episode; `tools` are the names for the bits of `EpisodeRow.tools`."""
    called = {turn.action.name for turn in episode.turns if turn.action is not None}
    found, reward = result
    return EpisodeRow(
        run=run,
        episode=episode.episode_id,
        task=episode.task.task_id,
        sample=episode.sample_idx,
        query=" ".join(episode.task.query.split())[:QUERY_CHARACTERS],
        status=episode.status.value,
        stop=episode.stop_reason.value,
        failure=failure_class(episode.stop_reason, found),
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
    """Return the indices of rows in order of interest: tasks with the lowest and with the highest recall alternate,
    each with all its episodes. An unscored one counts as recall 0; where all are unscored, the latest come first."""
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
    order: Iterable[int], sizes: Sequence[tuple[int, Sequence[int]]], passages: Sequence[int], room: int
) -> set[int]:
    """Return the places that fit into the room, taken in order; those that do not fit are skipped. `sizes`: of each
    place its own, and the passages that it needs, which count once for all. `passages`: their sizes."""
    held, there = set[int](), set[int]()
    for place in order:
        own, needed = sizes[place]
        new = set(needed) - there
        size = own + sum(passages[number] for number in new)
        if size <= room:
            held.add(place)
            there |= new
            room -= size
    return held


MOST_RUNS = 5  # with more runs than this, only pairs with the first are compared


def pairs(runs: Sequence[RunSource]) -> list[dict[str, Any]]:
    """Return every comparison of a run with a later one on the same tasks as JSON data: their places, the number of
    their common scored tasks, and for each metric both means, the mean difference with its interval, and p."""
    found: list[dict[str, Any]] = []
    named = [(Path(run.dataset).name, run.split) for run in runs]
    values = [_per_task(run) if named.count(name) > 1 else {} for run, name in zip(runs, named, strict=True)]
    for first in range(len(runs) if len(runs) <= MOST_RUNS else 1):
        later = (second for second in range(first + 1, len(runs)) if named[first] == named[second])
        common = {second: len(values[first].keys() & values[second].keys()) for second in later}
        common = {second: tasks for second, tasks in common.items() if tasks}
        family = [differences_of(values[first], values[second], HEADLINE, RESAMPLES) for second in common]
        for (second, tasks), metrics in zip(common.items(), correct_p_values(family), strict=True):
            rows = {}
            for name, row in metrics.items():
                between, p = row.difference, row.p if row.p_holm is None else row.p_holm
                rows[name] = [row.first, row.second, between.mean, between.low, between.high, p]
            found.append({"first": first, "second": second, "tasks": tasks, "metrics": rows})
    return found


def _per_task(run: RunSource) -> PerTask:
    try:
        return run.per_task
    except UsageError:  # its dataset does not tell the gold
        return {}
