"""Single episodes, appended to a run folder as they end: one that somebody watches, or those that clients drive."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec

from harness1.config import Config
from harness1.data.open import from_anywhere
from harness1.data.origins import QUESTIONS, origins_of, searched_origins, united
from harness1.env.environment import SearchEnv
from harness1.episodes.jobs import EpisodeJob, EpisodeSetup, describe_counter
from harness1.episodes.rollout import OnStep, episode_id, rollout
from harness1.errors import MALFORMED, SchemaError
from harness1.models.spec import policy_origins
from harness1.plain import digest
from harness1.records import Episode, Task
from harness1.retrieval.open import absolute_index, open_retriever
from harness1.reward import score
from harness1.runs.files import read_stage
from harness1.runs.folder import refuse_other_run, run_stage
from harness1.runs.journal import EPISODES, EpisodeStore, finish, lines_of


class _Line(msgspec.Struct):
    task: Task
    sample_idx: int = 0


class Samples:
    """Counts the samples of each task, and reads each line of a folder once."""

    def __init__(self) -> None:
        self._read = 0
        self._next: Counter[str] = Counter()

    def catch_up(self, folder: Path) -> None:
        """Read the lines that were added since the last time; call it while the folder is locked."""
        path = folder / EPISODES
        size = path.stat().st_size if path.is_file() else 0
        if size < self._read:  # the run was made anew
            self._read, self._next = 0, Counter()
        if size == self._read:
            return
        with path.open("rb") as lines:
            lines.seek(self._read)
            for line in lines:
                try:
                    found = msgspec.json.decode(line, type=_Line)
                except MALFORMED as error:
                    raise SchemaError(f"{path}: a line is no episode: {error}") from error
                self._next[found.task.task_id] = max(self._next[found.task.task_id], found.sample_idx + 1)
        self._read = size

    def next_of(self, task_id: str) -> int:
        self._next[task_id] += 1
        return self._next[task_id] - 1


Watch = Callable[[SearchEnv], AbstractContextManager[OnStep | None]]  # a context; yields what to call after each step
ASKED = "search"  # the split of tasks that are no dataset's: somebody asked their questions


def question_task(question: str) -> Task:
    """Return the task of a question that somebody asked, and that is no dataset's."""
    return Task(f"query-{digest(question)[:12]}", question, ASKED)


class Played(NamedTuple):
    """An episode, its environment as it ended, and the run folder that holds the record."""

    episode: Episode
    env: SearchEnv
    folder: Path


def play_one(
    task: Task | Callable[[Path], Task],
    setup: EpisodeSetup,
    out: Path | None = None,
    *,
    seed: int = 0,
    dataset: str = "",
    watch: Watch,
    on_torn: Callable[[Path, int], None],
) -> Played:
    """Play one episode, score it if there is gold, and append it to a run folder, as `open_run` does. `task`: or what
    returns it, given the folder. `out`: None: the folder that all searches under the same configuration, policy and
    index share. `on_torn`: called with the folder, and the bytes of a torn last line that was cut off."""
    config = setup.config
    policy = setup.policy_for([] if callable(task) else [EpisodeJob(task)])
    env = setup.environment(open_retriever(setup.retriever, config), policy)
    names = {"env": env.hash, "policy": policy.hash, "index": env.retriever.info.index_hash}
    counted = describe_counter(env.counter)
    out = out or Path("runs") / f"search-{digest(names)[:8]}"
    task = task(out) if callable(task) else task
    with open_run(out, config, setup.policy, setup.retriever, names, counted, on_torn, dataset) as keep:
        with watch(env) as on_step:
            episode = asyncio.run(rollout(env, policy, task, seed=seed, on_step=on_step))
        episode = score(episode, task.gold, config) if task.gold is not None else episode
        episode = keep(episode)
    return Played(episode, env, out)


@contextmanager
def open_run(
    out: Path,
    config: Config,
    policy: str,
    index: str,
    names: Mapping[str, str],
    counted: tuple[Mapping[str, str], Mapping[str, str]] | None = None,
    on_torn: Callable[[Path, int], None] = lambda out, torn: None,
    dataset: str = "",
    samples: Samples | None = None,
) -> Iterator[Callable[[Episode], Episode]]:
    """Yield the function that appends an episode to a run folder, and returns it as it was written: as the next sample
    of its task, with the id that follows. The folder is locked, and its card is written with the first episode.
    `names`: hashes by `env`, `policy` and `index`, which all episodes of a run share. `counted`: what
    `describe_counter` says; None: the counter is approximate. `dataset`: of the tasks; empty: they have none, and
    `harness1 push` refuses the run. `samples`: what a process that opens the folder often knows of its lines.
    UsageError: the folder holds something else, or another process writes to it; SchemaError: it is damaged."""
    hashes, chat = counted or ({}, {})
    inputs = {"dataset": from_anywhere(dataset), **names} if dataset else dict(names)
    stage = run_stage(config, policy, inputs, absolute_index(index), {**names, **hashes}, chat)
    asked, held = origins_of(dataset) if dataset else QUESTIONS, origins_of(out) if read_stage(out) else ()
    stage = msgspec.structs.replace(stage, origins=united(asked, policy_origins(policy), searched_origins(index), held))
    stage = refuse_other_run(stage, out)
    with EpisodeStore(out) as store:
        before = lines_of(read_stage(out))
        on_torn(out, store.torn)
        samples = samples or Samples()
        samples.catch_up(out)
        kept: list[str] = []

        def keep(episode: Episode) -> Episode:
            if not kept:
                stage.write(out)
            place = samples.next_of(episode.task.task_id)
            name = episode_id(episode.task, place, episode.seed, episode.hashes)
            episode = msgspec.structs.replace(episode, sample_idx=place, episode_id=name)
            kept.append(name)
            store.append(episode)
            return episode

        try:
            yield keep
        finally:
            if kept:
                finish(stage, out / EPISODES, before)


def append(
    episode: Episode, out: Path, config: Config, policy: str, index: str, dataset: str, samples: Samples
) -> Episode:
    """Append an episode to a run folder that is opened for it alone; otherwise as `open_run`."""
    names = {"env": episode.hashes.env, "policy": episode.hashes.policy, "index": episode.hashes.index}
    with open_run(out, config, policy, index, names, dataset=dataset, samples=samples) as keep:
        return keep(episode)
