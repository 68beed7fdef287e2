"""Pivots: the turns of a teacher's episodes from which a policy has something to learn (PivotRL, arXiv 2603.21383).

A frozen reference policy acts K times from the state before each turn. With mu the share of its actions that the
verifier finds right, a turn is kept where 0 < mu < 1, for else no action stands out, and mu < lambda.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import msgspec

from harness1.config import Config, Env
from harness1.env.environment import env_hash
from harness1.env.verifiers.open import open_verifier
from harness1.episodes.jobs import EpisodeJob
from harness1.errors import ConfigError, InfrastructureFault, SchemaError, UsageError
from harness1.hashing import digest, file_digest
from harness1.models.checkpoint import differences
from harness1.policy.policy import Policy, counter_of
from harness1.policy.recorded import RecordedPolicy
from harness1.records import Episode, EpisodeKey, Record, Status, Task, Turn
from harness1.retrieval.open import is_engine, open_retriever
from harness1.rl.pivots.rollouts import PivotRollouts, PivotWorld, Place, Publish, Scene
from harness1.rl.pivots.verifier import REVISION
from harness1.runs.files import write_atomically
from harness1.runs.journal import read_lines
from harness1.runs.stage import STAGE, Stage, read_stage, refuse_foreign, refuse_other, under_way
from harness1.runs.store import EPISODES, latest_episodes, read_episodes
from harness1.sft.gates import TeacherEpisode, candidate, held_out_tasks
from harness1.sft.teacher_run import TeacherRun, open_runs

VERB = "rl pivots"
PIVOTS = "pivots.jsonl"
README = "README.md"
Split: TypeAlias = Literal["train", "held_out"]
Fate: TypeAlias = Literal["kept", "easy", "all_right", "all_wrong", "expert_fails", "no_room"]
"""What became of a candidate. `expert_fails`: the verifier does not find the expert's own action right; `no_room`: the
policy's context does not hold the state."""
Heard: TypeAlias = Callable[[int, int], None]
"""Told how many candidates are done, and how many there are."""
FATES: tuple[Fate, ...] = get_args(Fate)


class Pivot(Record, kw_only=True):
    """A candidate: the turn of an episode, and how the reference policy fared there."""

    episode_id: str
    turn: int
    task_id: str
    tool: str
    """The expert's."""
    split: Split
    right: int
    """k: samples that the verifier found right."""
    samples: int
    """K; 0 where none were drawn."""
    mean: float
    """mu = k / K."""
    rules: dict[str, int]
    """How many samples each rule decided; of `expert_fails`, which one refused the expert's action."""
    fate: Fate

    @property
    def place(self) -> Place:
        return Place(self.episode_id, self.turn)


def keep(successes: int, samples: int, limit: float) -> bool:
    """Whether a turn is a pivot: of its samples some are right and some are not, and less than a share `limit` is."""
    return 0 < successes < samples and successes / samples < limit


def _fate(successes: int, samples: int, limit: float) -> Fate:
    if keep(successes, samples, limit):
        return "kept"
    return "all_wrong" if not successes else "all_right" if successes == samples else "easy"


@dataclass(frozen=True)
class Profile:
    """What is profiled.

    Attributes:
        policy: the frozen reference, and
        name: what a user typed for it.
        config: its settings; the environment is that of the run.
        index: another place of the index that the run was collected over; empty: where it was.
    """

    run: TeacherRun
    policy: Policy
    name: str
    config: Config
    index: str = ""

    def world(self) -> PivotWorld:
        """Where the turns are played.

        Raises:
            UsageError: the index is not where it was.
            ConfigError: it is not the one that the run was collected over.
        """
        config = msgspec.structs.replace(self.config, env=self.run.config.env, index=self.run.config.index)
        retriever = open_retriever(self.index or self.run.index, config)
        if retriever.info.index_hash != self.run.stage.hashes["index"]:
            raise ConfigError(f"{self.index or self.run.index} is not the index that {self.run.folder} was made with")
        verifier, counter = open_verifier(config.env, config.machine), counter_of(self.policy)
        return PivotWorld(config.env, retriever, verifier, counter, config.machine, config.rl.pivots)

    def stage(self) -> Stage:
        """The card of the folder; equal work has an equal one."""
        hashes, asked = _hashes(self.policy, self.run), self.index or self.run.index
        inputs = {
            "run": [file_digest(self.run.folder / name) for name in (STAGE, EPISODES)],
            "golds": digest(self.run.golds),
            "pivots": msgspec.to_builtins(self.config.rl.pivots),
            "recall": self.config.sft.gates.recall,
            **hashes,
        }
        outputs = {
            "run": str(self.run.folder.resolve()),
            "index": asked if is_engine(asked) else str(Path(asked).resolve()),
            "policy": self.name,
            "settings": _settings(self.run.config.env, self.config),
        }
        return Stage(VERB, inputs, hashes=hashes, outputs=outputs)

    def candidates(self, on_torn: Callable[[int], None]) -> list[TeacherEpisode]:
        """The last episode of each key, of those that are an example: not broken, and with the recall that
        `sft.gates.recall` asks for."""
        latest: dict[EpisodeKey, TeacherEpisode] = {}
        for line, episode in enumerate(read_episodes(self.run.folder, on_torn)):
            self.run.refuse_stray(episode, needs_ids=False)
            gold = self.run.golds.get(episode.task.task_id)
            latest[episode.key] = candidate(episode, gold, self.run.source.name, (0, line))
        good, least = (Status.COMPLETED, Status.TRUNCATED), self.config.sft.gates.recall
        return [each for each in latest.values() if each.status in good and each.recall >= least]


def profile(
    work: Profile,
    out: Path,
    *,
    force: bool = False,
    on_torn: Callable[[int], None] = lambda _size: None,
    on_pivot: Heard = lambda _done, _of: None,
) -> dict[str, dict[str, Any]]:
    """Write the profile of a teacher's turns, or go on with it; returns the counts that its README shows.

    Args:
        on_torn: called with the bytes of a torn last line of the run, which is left out.
        on_pivot: called with the candidates that are done, and with all there are.

    Raises:
        UsageError: the run has no example, or the folder holds something else.
        ConfigError, SchemaError: the run does not fit its index or its configuration.
        InfrastructureFault: some turns could not be played; the others are written, and the same work goes on.
    """
    stage = work.stage()
    refuse_foreign(out, VERB)
    if force:
        for name in (STAGE, PIVOTS, README):
            (out / name).unlink(missing_ok=True)
    refuse_other(stage, out, "profile")
    if stage.is_done(out) and (out / PIVOTS).is_file():
        return counts(read_pivots(out))
    chosen, world = work.candidates(on_torn), work.world()
    if not chosen:
        raise UsageError(f"{work.run.folder} has no episode to learn from: see sft.gates.recall")
    with under_way(stage, out):
        asyncio.run(_profiled(work, world, chosen, out, on_pivot))
        found = counts(read_pivots(out))
        write_atomically(out / README, _readme(work, found).encode())
        stage.write(out, status="finished", gates=found)
    return found


def read_pivots(folder: Path) -> list[Pivot]:
    """All candidates of a profile that are done, in the order written; a torn last line is left out.

    Raises:
        UsageError: the folder holds no profile.
        SchemaError: a line is damaged.
    """
    found = []
    for number, line in read_lines(folder / PIVOTS):
        try:
            found.append(msgspec.json.decode(line, type=Pivot))
        except msgspec.MsgspecError as error:
            raise SchemaError(f"{folder / PIVOTS}:{number}: not a pivot: {error}") from error
    return found


def counts(pivots: Iterable[Pivot]) -> dict[str, dict[str, Any]]:
    """What became of the candidates, of all and by the expert's tool, and how the kept ones are split."""
    each = list(pivots)
    by_tool = {tool: [one for one in each if one.tool == tool] for tool in sorted({one.tool for one in each})}
    met = {name: Counter(one.fate for one in some) for name, some in {"all": each, **by_tool}.items()}
    fates = {name: {"candidates": some.total(), **{fate: some[fate] for fate in FATES}} for name, some in met.items()}
    return {"fates": fates, "splits": dict(Counter(one.split for one in each if one.fate == "kept"))}


@dataclass(frozen=True)
class PivotTraining:
    """What single turns are trained on: tasks named by the turns that were kept, and who plays them."""

    train: tuple[Task, ...]
    held_out: tuple[Task, ...]
    rollouts: PivotRollouts


def open_training(
    folder: Path, policy: Policy, config: Config, publish: Publish, index: str = "", *, every: bool = False
) -> PivotTraining:
    """Open a finished profile to train the policy that it was made with.

    Args:
        config: with the settings of the profile, those of the environment among them.
        publish: gives new weights to the policy.
        index: where the index lies, unless it is where it was.
        every: take all candidates at which samples were drawn, for comparison, not only those that were kept.

    Raises:
        UsageError: the folder holds no finished profile, or its run is gone.
        ConfigError: the reference weights or the configuration are others than those of the profile.
    """
    stage = read_stage(folder)
    if stage is None or stage.verb != VERB or stage.status != "finished":
        raise UsageError(f"{folder} holds no finished profile: make one with `harness1 {VERB}`")
    run = open_runs([Path(stage.outputs["run"])], rerendered=True)[0]
    check_profile(stage, folder, policy, run, config)
    world = Profile(run, policy, policy.name, config, index or stage.outputs["index"]).world()
    chosen = [each for each in read_pivots(folder) if each.fate == "kept" or (every and each.samples)]
    wanted = {each.episode_id for each in chosen}
    found = {each.episode_id: each for each in latest_episodes(run.folder).values() if each.episode_id in wanted}
    if missing := wanted - found.keys():
        raise UsageError(f"{run.folder} no more has episode {min(missing)}: profile it again")
    tasks = [Task(each.place.name, found[each.episode_id].task.query, each.split) for each in chosen]
    train, held_out = (tuple(task for task in tasks if task.split == split) for split in get_args(Split))
    return PivotTraining(train, held_out, PivotRollouts(world, policy, found, run.golds, publish))


def check_profile(stage: Stage, folder: Path, policy: Policy, run: TeacherRun, config: Config) -> None:
    """Refuse a profile that says nothing of this policy: what is mixed for one is easy or hopeless for another.

    Raises:
        ConfigError: it names what differs.
    """
    now, then = _hashes(policy, run), stage.hashes
    ours, theirs = _settings(config.env, config), stage.outputs["settings"]
    wrong = [name for name, known in now.items() if then.get(name) != known]
    if not wrong and all(ours[group] == theirs[group] for group in ("env", "pivots")):
        return
    named = [f"{name}={mine} (profiled: {other})" for name, mine, other in differences(ours, theirs)]
    named += [f"the {name}" for name in wrong if name in ("weights", "format", "index", "rules")]
    raise ConfigError(
        f"the profile in {folder} was made of {stage.outputs['policy']} and holds for it alone; what differs:"
        f" {', '.join(named or wrong)}. Profile again with `harness1 {VERB}`"
    )


@dataclass(frozen=True)
class _Candidate:
    """A turn before it is played; without a scene, the policy has no room for it."""

    episode: Episode
    turn: Turn
    split: Split
    scene: Scene | None

    def pivot(self, fate: Fate, right: int = 0, samples: int = 0, rules: Mapping[str, int] | None = None) -> Pivot:
        assert self.turn.action is not None
        return Pivot(
            episode_id=self.episode.episode_id,
            turn=self.turn.index,
            task_id=self.episode.task.task_id,
            tool=self.turn.action.name,
            split=self.split,
            right=right,
            samples=samples,
            mean=right / samples if samples else 0.0,
            rules=dict(rules or {}),
            fate=fate,
        )


async def _profiled(work: Profile, world: PivotWorld, chosen: list[TeacherEpisode], out: Path, on_pivot: Heard) -> None:
    """Play what is not done, and write a line for each turn as it is.

    Raises:
        InfrastructureFault: some turns could not be played.
    """
    faults: list[str] = []
    earlier = read_pivots(out) if (out / PIVOTS).is_file() else []
    write_atomically(out / PIVOTS, b"".join(msgspec.json.encode(each) + b"\n" for each in earlier))
    done, of = {each.place for each in earlier}, sum(each.turns for each in chosen)
    source = _open(work, world, chosen, frozenset(done))
    on_pivot(len(done), of)
    with (out / PIVOTS).open("ab") as file:

        async def play() -> None:
            for each in source:
                try:
                    pivot = await _sampled(each, world, work.policy)
                except InfrastructureFault as fault:
                    faults.append(str(fault))
                    continue
                file.write(msgspec.json.encode(pivot) + b"\n")
                file.flush()
                done.add(pivot.place)
                on_pivot(len(done), of)

        await asyncio.gather(*(play() for _ in range(-(-world.machine.concurrency // world.pivots.samples))))
    if faults:
        raise InfrastructureFault(f"{len(faults)} turns were not played ({faults[0]}): run the same command to go on")


def _open(
    work: Profile, world: PivotWorld, chosen: list[TeacherEpisode], done: Collection[Place]
) -> Iterator[_Candidate]:
    """The candidates that are not done. Episodes are read again one by one: all of them may not fit into memory."""
    held = held_out_tasks(chosen, world.pivots.held_out, world.pivots.seed)
    kept = {each.place[1]: each for each in chosen}
    for line, episode in enumerate(read_episodes(work.run.folder)):
        if line not in kept:
            continue
        split: Split = "held_out" if kept[line].task in held else "train"
        acted = [turn for turn in episode.turns if turn.action is not None]
        left = [turn for turn in acted if Place(episode.episode_id, turn.index) not in done]
        scenes = world.scenes(episode, work.run.golds.get(episode.task.task_id)) if left else ()
        known = {scene.turn.index: scene for scene in scenes}
        yield from (_Candidate(episode, turn, split, known.get(turn.index)) for turn in left)


async def _sampled(each: _Candidate, world: PivotWorld, policy: Policy) -> Pivot:
    """Check that the expert's own action is found right, then draw the samples.

    Raises:
        InfrastructureFault: a turn could not be played.
    """
    if each.scene is None:
        return each.pivot("no_room")
    task = Task(Place(each.episode.episode_id, each.turn.index).name, each.episode.task.query)

    async def play(by: Policy, sample: int) -> tuple[str, bool]:
        assert each.scene is not None
        seed = int(digest([world.pivots.seed, task.task_id, sample])[:8], 16) >> 1
        episode = await world.played(each.scene, by, EpisodeJob(task, sample, seed))
        if episode.reward is None:
            raise InfrastructureFault(episode.error or "the turn was not played")
        return next(iter(episode.reward.terms)), episode.reward.total > 0.0

    rule, is_right = await play(RecordedPolicy([msgspec.structs.replace(each.episode, turns=(each.turn,))]), 0)
    if not is_right:
        return each.pivot("expert_fails", rules={rule: 1})
    found = await asyncio.gather(*map(partial(play, policy), range(samples := world.pivots.samples)))
    right = sum(good for _, good in found)
    return each.pivot(_fate(right, samples, world.pivots.limit), right, samples, Counter(rule for rule, _ in found))


def _hashes(policy: Policy, run: TeacherRun) -> dict[str, str]:
    """What a profile holds for. A policy that is no model has no weights beside its own hash."""
    weights: str = getattr(getattr(policy, "model", None), "hash", policy.hash)
    asked = {"weights": weights, "format": counter_of(policy).hash, "policy": policy.hash}
    played = {"env": env_hash(run.config.env), "index": run.stage.hashes["index"], "rules": digest(REVISION)}
    return asked | played


def _settings(env: Env, config: Config) -> dict[str, Any]:
    """The settings behind the hashes, so that a difference has a name."""
    found: dict[str, Any] = msgspec.to_builtins({"env": env, "policy": config.policy, "pivots": config.rl.pivots})
    return found


def _readme(work: Profile, found: dict[str, dict[str, Any]]) -> str:
    settings = work.config.rl.pivots
    origin = f"{work.run.source.name}/{work.run.origin.split}"
    lines = [f"| {name} | {' | '.join(map(str, fates.values()))} |" for name, fates in found["fates"].items()]
    splits = ", ".join(f"{count} {name}" for name, count in sorted(found["splits"].items())) or "none"
    return f"""# Pivots of {work.run.folder.name}

Turns of {work.run.origin.teacher} over {origin}, each tried {settings.samples} times by {work.name}.
Kept are those at which some of its actions are right, some are not, and less than {settings.limit:g} of them are.

| expert's tool | {" | ".join(found["fates"]["all"])} |
|---|{"---|" * len(found["fates"]["all"])}
{chr(10).join(lines)}

Kept, by split: {splits}. No task is in both. `{PIVOTS}` holds all candidates; a state is rebuilt by replay of its run.
All this holds for the weights and the configuration of `stage.json` alone.
"""
