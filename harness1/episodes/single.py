"""One episode, played while somebody watches, and appended to a run folder."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

from harness1.env.environment import SearchEnv
from harness1.episodes.jobs import EpisodeJob, EpisodeSetup, counted_with
from harness1.episodes.rollout import OnStep, rollout
from harness1.hashing import digest
from harness1.records import Episode, Task
from harness1.retrieval.open import absolute_index, open_retriever
from harness1.reward.composite import score
from harness1.runs.folder import refuse_other_run, run_stage
from harness1.runs.line_digests import finish, lines_of
from harness1.runs.stage import read_stage
from harness1.runs.store import EPISODES, EpisodeStore

Watch = Callable[[SearchEnv], AbstractContextManager[OnStep | None]]
"""A context around an episode; it yields the function to call after each step, if any."""


class Played(NamedTuple):
    """An episode, its environment as it ended, and the run folder that holds the record."""

    episode: Episode
    env: SearchEnv
    folder: Path


def play_one(
    task: Task,
    setup: EpisodeSetup,
    out: Path | None = None,
    *,
    seed: int = 0,
    watch: Watch,
    on_torn: Callable[[Path, int], None],
) -> Played:
    """Play one episode, score it if there is gold, and append it to a run folder.

    Args:
        out: the run folder; None: one that all searches under the same configuration, policy and index share.
        on_torn: called with the run folder, and the bytes of a torn last line that was cut off.

    Raises:
        UsageError: the folder holds another run or something else, or is written by another process.
    """
    config = setup.config
    policy = setup.policy_for([EpisodeJob(task)])
    env = setup.environment(open_retriever(setup.retriever, config), policy)
    names = {"env": env.hash, "policy": policy.hash, "index": env.retriever.info.index_hash}
    hashes, chat = counted_with(env.counter)
    stage = run_stage(config, setup.policy, names, absolute_index(setup.retriever), names | hashes, chat)
    out = out or Path("runs") / f"search-{digest(names)[:8]}"
    stage = refuse_other_run(stage, out)
    with EpisodeStore(out) as store:
        before = lines_of(read_stage(out))
        on_torn(out, store.torn)
        with watch(env) as on_step:
            episode = asyncio.run(rollout(env, policy, task, seed=seed, on_step=on_step))
        episode = score(episode, task.gold, config) if task.gold is not None else episode
        stage.write(out)
        store.append(episode)
        finish(stage, out / EPISODES, before)
    return Played(episode, env, out)
