"""The candidates of a profile: each is a turn of a teacher. Let mu be the share of a reference policy's K samples that
the verifier finds right. A turn is kept if 0 < mu < 1 (otherwise no action stands out) and mu < lambda (PivotRL, arXiv
2603.21383)."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import msgspec

from harness1.config import Config, Env
from harness1.config.settings import differences, put_back_removed, to_record
from harness1.data.leaks import Selection, TaskFilter, open_filter
from harness1.env.environment import env_hash
from harness1.env.model_verifiers import open_verifier
from harness1.episodes.jobs import EpisodeJob
from harness1.errors import ConfigError, InfrastructureFault, UsageError
from harness1.plain import digest, file_digest, public_address
from harness1.policy.policy import Policy, counter_of
from harness1.policy.scripted import RecordedPolicy
from harness1.records import Episode, EpisodeKey, Record, Status, Task, Turn
from harness1.retrieval.open import is_engine, open_retriever
from harness1.rl.pivot_turns import REVISION, PivotRollouts, PivotState, PivotWorld, Publish, Ruling, TurnId
from harness1.runs.files import STAGE, Stage, clear, read_stage, refuse_other, under_way, write_atomically
from harness1.runs.journal import EPISODES, Journal, latest_episodes, read_episodes, read_line_records
from harness1.sft.build import TeacherEpisode, candidate, draw_held_out
from harness1.sft.collect import TeacherRun, open_runs

VERB, PIVOTS, README = "rl pivots", "pivots.jsonl", "README.md"
SAMPLES, LIMIT = 8, 0.6
"""Actions of the reference policy by which a turn is judged, and the share of right ones from which it is too easy."""
HELD_OUT, SEED = 0.1, 42
"""Share of the tasks whose turns are never trained on, and the seed that draws them and the samples."""
Split: TypeAlias = Literal["train", "held_out"]
PivotLabel: TypeAlias = Literal["kept", "easy", "all_right", "all_wrong", "expert_fails", "no_room"]
"""The decision on a candidate. `expert_fails`: the verifier finds the expert's own action wrong; `no_room`: the state
exceeds the policy's context."""


class Pivot(Record, kw_only=True):
    """A candidate turn, and the results of the reference policy there."""

    episode_id: str
    turn: int
    task_id: str
    tool: str  # the expert's
    split: Split
    right: int  # k: the number of samples that the verifier found right
    samples: int  # K; 0 if none were drawn
    mean: float  # mu = k / K
    rules: dict[str, int]  # the samples that each rule decided; with `expert_fails`, the rule that refused the expert
    fate: PivotLabel

    @property
    def turn_id(self) -> TurnId:
        return TurnId(self.episode_id, self.turn)


def label_of(successes: int, samples: int, limit: float) -> PivotLabel:
    """Label a turn: `kept` if some samples are right, some are not, and the share of right ones is below `limit`."""
    if 0 < successes < samples and successes / samples < limit:
        return "kept"
    return "all_wrong" if not successes else "all_right" if successes == samples else "easy"


def read_pivots(folder: Path) -> list[Pivot]:
    """Read the finished candidates of a profile, in the order written, without a torn last line; raise UsageError if
    the folder holds no profile; SchemaError if a line is damaged."""
    return list(read_line_records(folder / PIVOTS, Pivot, "a pivot"))


def counts(pivots: Sequence[Pivot]) -> dict[str, dict[str, Any]]:
    """Count the candidates by label, for all and for each tool of the expert, and the kept ones by split."""
    labels = {name: Counter[str]() for name in ("all", *sorted({each.tool for each in pivots}))}
    for each in pivots:
        labels["all"][each.fate] += 1
        labels[each.tool][each.fate] += 1
    return {
        "fates": {
            name: {"candidates": some.total(), **{label: some[label] for label in get_args(PivotLabel)}}
            for name, some in labels.items()
        },
        "splits": dict(Counter(each.split for each in pivots if each.fate == "kept")),
    }


OnProgress: TypeAlias = Callable[[int, int], None]
"""Called with the number of finished candidates and the number of all."""


@dataclass(frozen=True)
class Profile:
    """A profile to be made. Tasks are not learned from if they leak into `dev` and `test` of the run's dataset or into
    `against`, further evaluation sets, or if earlier runs were made of them: `excluded`, as (dataset, id)."""

    run: TeacherRun
    policy: Policy  # the frozen reference
    name: str  # that of the policy, as the user typed it
    config: Config  # the policy's settings; the environment is that of the run
    index: str = ""  # the place of the run's index, if it has moved
    against: Sequence[str] = ()
    excluded: Collection[tuple[str, str]] = frozenset()

    @cached_property
    def sieve(self) -> TaskFilter:
        """Return the filter of the run's tasks; raise UsageError if an evaluation set does not exist."""
        source, taught = self.run.source, {(self.run.source.name, self.run.split)}
        return open_filter(self.config.data, [source], taught, against=self.against, excluded=self.excluded)

    @cached_property
    def selection(self) -> Selection:
        """Return the choice among the tasks that the run was asked to play."""
        asked = self.run.stage.inputs.get("tasks", self.run.tasks)
        tasks = [task for name, task in self.run.tasks.items() if name in set(asked)]
        return self.sieve.select(self.run.source.name, self.run.split, tasks)[1]

    def world(self) -> PivotWorld:
        """Open the world in which the turns are played; raise UsageError if the index is missing; ConfigError if it
        differs from the one that the run was collected over."""
        config = msgspec.structs.replace(self.config, env=self.run.config.env, index=self.run.config.index)
        index = self.index or self.run.index
        retriever = open_retriever(index, config)
        if retriever.info.index_hash != self.run.stage.hashes["index"]:
            raise ConfigError(f"{index} is not the index that {self.run.folder} was made with")
        verifier, counter = open_verifier(config.env, config.machine), counter_of(self.policy)
        return PivotWorld(config.env, retriever, verifier, counter, config.machine)

    def stage(self) -> Stage:
        """Return the card of the folder; equal work has an equal one."""
        hashes, index = hashes_of(self.policy, self.run), self.index or self.run.index
        inputs = {
            "run": [file_digest(self.run.folder / name) for name in (STAGE, EPISODES)],
            "golds": digest(self.run.gold_by_id),
            "pivots": put_back_removed({}, "rl.pivots."),
            "recall": self.config.sft.gates.recall,
            **hashes,
        }
        if len(self.selection.learned) < self.selection.tasks:
            inputs["learned"] = digest(self.selection.learned)
        outputs = {
            "run": str(self.run.folder.resolve()),
            "index": public_address(index) if is_engine(index) else str(Path(index).resolve()),
            "policy": self.name,
            "settings": name_settings(self.run.config.env, self.config),
            "selections": [msgspec.to_builtins(self.selection)],
        }
        return Stage(VERB, inputs, hashes=hashes, outputs=outputs)

    def candidates(self, on_torn: Callable[[int], None]) -> list[TeacherEpisode]:
        """Return the last episode of each key of the tasks to learn from, without broken ones and those whose recall is
        below `sft.gates.recall`."""
        latest: dict[EpisodeKey, TeacherEpisode] = {}
        for line, episode in enumerate(read_episodes(self.run.folder, on_torn)):
            self.run.refuse_stray(episode, needs_ids=False)
            gold = self.run.gold_by_id.get(episode.task.task_id)
            latest[episode.key] = candidate(episode, gold, self.run.source.name, (0, line))
        learned, least = set(self.selection.learned), self.config.sft.gates.recall
        fit = [each for each in latest.values() if each.recall >= least and each.task_id in learned]
        return [each for each in fit if each.status in (Status.COMPLETED, Status.TRUNCATED)]


def profile(
    work: Profile,
    out: Path,
    *,
    force: bool = False,
    on_torn: Callable[[int], None] = lambda _size: None,
    on_pivot: OnProgress = lambda _done, _of: None,
) -> dict[str, dict[str, Any]]:
    """Write the profile of a teacher's turns, or resume it (anew with `force`), and return the counts that its README
    shows. `on_torn` is called with the bytes of a torn last line of the run, which is left out. Raise UsageError if the
    run has no episode to learn from, or the folder holds something else; ConfigError or SchemaError if the run does not
    fit its index or its configuration; InfrastructureFault if some turns could not be played; the same call resumes."""
    stage = work.stage()
    if force:
        clear(out, VERB, PIVOTS, README)
    refuse_other(stage, out, "profile")
    if stage.is_done(out) and (out / PIVOTS).is_file():
        return counts(read_pivots(out))
    chosen, world = work.candidates(on_torn), work.world()
    if not chosen:
        why = work.selection.line or "see sft.gates.recall"
        raise UsageError(f"{work.run.folder} has no episode to learn from: {why}")
    with under_way(stage, out):
        asyncio.run(_write_pivots(work, world, chosen, out, on_pivot))
        found = counts(read_pivots(out))
        write_atomically(out / README, _readme(work, found).encode())
        stage.write(out, status="finished", gates=found)
    return found


def hashes_of(policy: Policy, run: TeacherRun) -> dict[str, str]:
    """Return the hashes that a profile is valid for. The weights of a policy without a model are its own hash."""
    return {
        "weights": getattr(getattr(policy, "model", None), "hash", policy.hash),
        "format": counter_of(policy).hash,
        "policy": policy.hash,
        "env": env_hash(run.config.env),
        "index": run.stage.hashes["index"],
        "rules": digest(REVISION),
    }


def name_settings(env: Env, config: Config) -> dict[str, Any]:
    """Return the settings behind the hashes, by which a difference can be named."""
    found = {"policy": to_record(config.policy, "policy."), "pivots": put_back_removed({}, "rl.pivots.")}
    return {"env": env.plain()} | found


@dataclass(frozen=True)
class _PivotTurn:
    """A candidate before it is sampled; it has no state if it exceeds the policy's context."""

    episode: Episode
    turn: Turn
    split: Split
    state: PivotState | None

    async def sample(self, world: PivotWorld, policy: Policy) -> Pivot:
        """Check that the expert's own action is found right, then draw the samples; raise InfrastructureFault if the
        turn could not be played."""
        state, name = self.state, TurnId(self.episode.episode_id, self.turn.index).name

        async def rule(player: Policy, sample: int) -> Ruling:
            assert state is not None
            seed = int(digest([SEED, name, sample])[:8], 16) >> 1
            job = EpisodeJob(Task(name, self.episode.task.query), sample, seed)
            episode = await world.play(state, player, job)
            if episode.reward is None:
                raise InfrastructureFault(episode.error or "the turn was not played")
            return Ruling(next(iter(episode.reward.terms)), episode.reward.total > 0.0)

        right = samples = 0
        rules: dict[str, int] = {}
        label: PivotLabel = "no_room"
        if state is not None:
            own = await rule(RecordedPolicy([msgspec.structs.replace(self.episode, turns=(self.turn,))]), 0)
            label, rules = "expert_fails", {own.rule: 1}
            if own.right:
                samples = SAMPLES
                found = await asyncio.gather(*(rule(policy, sample) for sample in range(samples)))
                right, rules = sum(each.right for each in found), dict(Counter(each.rule for each in found))
                label = label_of(right, samples, LIMIT)
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
            rules=rules,
            fate=label,
        )


async def _write_pivots(
    work: Profile, world: PivotWorld, chosen: list[TeacherEpisode], out: Path, on_pivot: OnProgress
) -> None:
    """Sample the candidates that are left, several at a time, and write a line for each as it is done."""
    with Journal(out, PIVOTS) as journal:
        earlier = {each.turn_id for each in read_pivots(out)}
        turns = _open_turns(work, world, chosen, earlier)
        done, total = count(len(earlier)), sum(each.turns for each in chosen)
        on_pivot(next(done), total)
        faults: list[str] = []

        async def sample_some() -> None:
            for turn in turns:
                try:
                    journal.write(msgspec.json.encode(await turn.sample(world, work.policy)))
                    on_pivot(next(done), total)
                except InfrastructureFault as fault:
                    faults.append(str(fault))

        at_once = -(-world.machine.concurrency // SAMPLES)
        await asyncio.gather(*(sample_some() for _ in range(at_once)))
    if faults:
        raise InfrastructureFault(f"{len(faults)} turns were not played ({faults[0]}): run the same command to go on")


def _open_turns(
    work: Profile, world: PivotWorld, chosen: list[TeacherEpisode], done: Collection[TurnId]
) -> Iterator[_PivotTurn]:
    """Yield the candidates that are not done. Episodes are read again one by one, as memory may not hold all."""
    held = draw_held_out(chosen, HELD_OUT, SEED)
    kept = {each.place[1]: each for each in chosen}
    for line, episode in enumerate(read_episodes(work.run.folder)):
        if line not in kept:
            continue
        split: Split = "held_out" if kept[line].task in held else "train"
        acted = [turn for turn in episode.turns if turn.action is not None]
        left = [turn for turn in acted if TurnId(episode.episode_id, turn.index) not in done]
        states = world.states(episode, work.run.gold_by_id.get(episode.task.task_id)) if left else ()
        known = {state.turn.index: state for state in states}
        yield from (_PivotTurn(episode, turn, split, known.get(turn.index)) for turn in left)


def _readme(work: Profile, found: dict[str, dict[str, Any]]) -> str:
    origin = f"{work.run.source.name}/{work.run.split}"
    lines = [f"| {name} | {' | '.join(map(str, fates.values()))} |" for name, fates in found["fates"].items()]
    splits = ", ".join(f"{count} {name}" for name, count in sorted(found["splits"].items())) or "none"
    return f"""# Pivots of {work.run.folder.name}

Turns of {work.run.policy} over {origin}, each tried {SAMPLES} times by {work.name}.
Kept are those at which some of its actions are right, some are not, and less than {LIMIT:g} of them are.

| expert's tool | {" | ".join(found["fates"]["all"])} |
|---|{"---|" * len(found["fates"]["all"])}
{chr(10).join(lines)}

Kept, by split: {splits}. No task is in both. `{PIVOTS}` holds all candidates; a state is rebuilt by replay of its run.
All this holds for the weights and the configuration of `stage.json` alone.
"""


@dataclass(frozen=True)
class PivotTraining:
    """Tasks that have the names of turns, the rollouts that play them, and the choice among the run's tasks."""

    train: tuple[Task, ...]
    held_out: tuple[Task, ...]
    rollouts: PivotRollouts
    selection: Selection


def open_training(
    folder: Path,
    policy: Policy,
    config: Config,
    publish: Publish,
    index: str = "",
    against: Sequence[str] = (),
    excluded: Collection[tuple[str, str]] = frozenset(),
) -> PivotTraining:
    """Open the profile in `folder`; `config` has its settings, including those of the environment, `publish` gives new
    weights to the policy, and the rest is as in `Profile`, even if a task was profiled. Raise UsageError if the folder
    holds no finished profile, or its run is gone; ConfigError if the reference weights or the configuration differ."""
    stage = read_stage(folder)
    if stage is None or stage.verb != VERB or stage.status != "finished":
        raise UsageError(f"{folder} holds no finished profile: make one with `harness1 {VERB}`")
    run = open_runs([Path(stage.outputs["run"])], rerendered=True)[0]
    check_profile(stage, folder, policy, run, config)
    work = Profile(run, policy, policy.name, config, index or stage.outputs["index"], against, excluded)
    kept = [each for each in read_pivots(folder) if each.fate == "kept"]
    selection = choose_turns(work, kept)
    learned = {*selection.learned, *selection.held_out}
    chosen = [each for each in kept if each.task_id in learned]
    wanted = {each.episode_id for each in chosen}
    found = {each.episode_id: each for each in latest_episodes(run.folder).values() if each.episode_id in wanted}
    if missing := wanted - found.keys():
        raise UsageError(f"{run.folder} no longer has episode {min(missing)}: profile it again")
    tasks = [Task(each.turn_id.name, found[each.episode_id].task.query, each.split) for each in chosen]
    train, held_out = (tuple(task for task in tasks if task.split == split) for split in get_args(Split))
    return PivotTraining(
        train, held_out, PivotRollouts(work.world(), policy, found, run.gold_by_id, publish), selection
    )


def choose_turns(work: Profile, pivots: Sequence[Pivot]) -> Selection:
    """Return the choice of the profile's tasks: those with turns to learn from give away no validation task."""
    by_split = {split: {each.task_id for each in pivots if each.split == split} for split in get_args(Split)}
    allowed = work.selection.learned
    train, held_out = ([work.run.tasks[name] for name in allowed if name in by_split[each]] for each in get_args(Split))
    left = work.sieve.beside(held_out, work.run.source.name, train)
    return msgspec.structs.replace(
        work.selection,
        held_out=tuple(task.task_id for task in held_out),
        beside=len(train) - len(left),
        learned=tuple(task.task_id for task in left),
    )


def check_profile(stage: Stage, folder: Path, policy: Policy, run: TeacherRun, config: Config) -> None:
    """Refuse a profile of another policy, because turns with mixed outcomes for one are easy or hopeless for another:
    raise a ConfigError that names the differences."""
    now, then = hashes_of(policy, run), stage.hashes
    ours, theirs = name_settings(config.env, config), stage.outputs["settings"]
    wrong = [name for name, known in now.items() if then.get(name) != known]
    if not wrong and all(ours[group] == theirs[group] for group in ("env", "pivots")):
        return
    named = [f"{name}={mine} (profiled: {other})" for name, mine, other in differences(ours, theirs)]
    named += [f"the {name}" for name in wrong if name in ("weights", "format", "index", "rules")]
    raise ConfigError(
        f"the profile in {folder} was made with {stage.outputs['policy']} and is valid only for it; these differ:"
        f" {', '.join(named or wrong)}. Profile again with `harness1 {VERB}`"
    )
