"""The candidates of a profile: turns of a teacher. Let mu be the share of a reference policy's K samples that the
verifier finds right. A turn is kept if 0 < mu < 1 (else no action stands out) and mu < lambda (PivotRL, 2603.21383)."""

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
from harness1.config.settings import differences, put_back_removed
from harness1.data.leaks import Selection, TaskFilter, open_filter
from harness1.data.origins import origins_of, searched_origins, united
from harness1.env.environment import env_hash
from harness1.env.model_verifiers import open_verifier
from harness1.env.pieces import counter_of
from harness1.episodes.jobs import EpisodeJob
from harness1.errors import ConfigError, InfrastructureFault, UsageError
from harness1.models.spec import policy_origins
from harness1.plain import digest, file_digest, public_address
from harness1.policy.policy import Policy
from harness1.policy.scripted import RecordedPolicy
from harness1.records import Episode, EpisodeKey, Record, Status, Task
from harness1.retrieval.open import is_engine, open_retriever
from harness1.rl.pivot_turns import REVISION, PivotRollouts, PivotState, PivotWorld, Ruling
from harness1.rl.rollouts import Publish
from harness1.runs.files import STAGE, Stage, clear, read_stage, refuse_other, under_way, write_atomically
from harness1.runs.journal import EPISODES, Journal, latest_episodes, read_episodes, read_line_records
from harness1.sft.build import TeacherEpisode, candidate, draw_held_out
from harness1.sft.collect import TeacherRun, open_runs

VERB, PIVOTS, README = "rl pivots", "pivots.jsonl", "README.md"
SAMPLES, LIMIT = 8, 0.6  # actions of the reference policy at a turn; the share of right ones from which it is too easy
HELD_OUT, SEED = 0.1, 42  # share of the tasks whose turns are never trained on; seed of these and of the samples
Split: TypeAlias = Literal["train", "held_out"]
PivotLabel: TypeAlias = Literal["kept", "easy", "all_right", "all_wrong", "expert_fails", "no_room"]
"""`expert_fails`: the expert's own action is found wrong; `no_room`: the state exceeds the policy's context."""


class Pivot(Record):
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
    def name(self) -> str:
        return f"{self.episode_id}/{self.turn}"


def label_of(successes: int, samples: int, limit: float) -> PivotLabel:
    """Label a turn: `kept` if some samples are right, some are not, and the share of right ones is below `limit`."""
    if 0 < successes < samples and successes / samples < limit:
        return "kept"
    return "all_wrong" if not successes else "all_right" if successes == samples else "easy"


def read_pivots(folder: Path) -> list[Pivot]:
    """Read the finished candidates of a profile in order; UsageError if there is none, SchemaError if it is damaged."""
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
        source, taught = self.run.source, {(self.run.source.name, self.run.split)}
        return open_filter(self.config.data, [source], taught, against=self.against, excluded=self.excluded)

    @cached_property
    def selection(self) -> Selection:
        """Return the choice among the tasks that the run was asked to play."""
        asked = self.run.stage.inputs.get("tasks", self.run.tasks)
        tasks = [task for name, task in self.run.tasks.items() if name in set(asked)]
        return self.sieve.select(self.run.source.name, self.run.split, tasks)[1]

    def world(self) -> PivotWorld:
        """Open the world in which the turns are played; ConfigError if the index is not that of the run."""
        config = msgspec.structs.replace(self.config, env=self.run.config.env, index=self.run.config.index)
        index = self.index or self.run.index
        retriever = open_retriever(index, config)
        if retriever.info.index_hash != self.run.stage.hashes["index"]:
            raise ConfigError(f"{index} is not the index that {self.run.folder} was made with")
        verifier, counter = open_verifier(config.env, config.machine), counter_of(self.policy)
        return PivotWorld(config.env, retriever, verifier, counter, config.machine)

    @property
    def hashes(self) -> dict[str, str]:
        """What a profile is valid for. The weights of a policy without a model are its own hash."""
        return {
            "weights": getattr(getattr(self.policy, "model", None), "hash", self.policy.hash),
            "format": counter_of(self.policy).hash,
            "policy": self.policy.hash,
            "env": env_hash(self.run.config.env),
            "index": self.run.stage.hashes["index"],
            "rules": digest(REVISION),
        }

    def name_settings(self, env: Env) -> dict[str, Any]:
        pivots, policy = put_back_removed({}, "rl.pivots."), self.config.policy.to_hash()
        return {"env": env.plain(), "policy": policy, "pivots": pivots}

    def stage(self) -> Stage:
        """Return the card of the folder; equal work has an equal one."""
        hashes, index = self.hashes, self.index or self.run.index
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
            "settings": self.name_settings(self.run.config.env),
            "selections": [msgspec.to_builtins(self.selection)],
        }
        origins = united(origins_of(self.run.folder), policy_origins(self.name), searched_origins(index))
        return Stage(VERB, inputs, hashes=hashes, outputs=outputs, origins=origins)

    def candidates(self, on_torn: Callable[[int], None]) -> list[TeacherEpisode]:
        """Return the last whole episodes of the tasks to learn from that reach `sft.gates.recall`."""
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
    on_pivot: Callable[[int, int], None] = lambda _done, _of: None,
) -> dict[str, dict[str, Any]]:
    """Write the profile of a teacher's turns, or resume it (anew with `force`), and return the counts that its README
    shows. `on_torn` gets the bytes of a torn last line of the run; `on_pivot` the numbers of candidates that are done
    and of all. Raise UsageError if the run has no episode to learn from, or the folder holds something else;
    ConfigError or SchemaError if the run does not fit; InfrastructureFault if some turns could not be played."""
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


async def _write_pivots(
    work: Profile, world: PivotWorld, chosen: list[TeacherEpisode], out: Path, on_pivot: Callable[[int, int], None]
) -> None:
    with Journal(out, PIVOTS) as journal:
        earlier = {each.name for each in read_pivots(out)}
        begun = _begin_pivots(work, world, chosen, earlier)
        done, total = count(len(earlier)), sum(each.turns for each in chosen)
        on_pivot(next(done), total)
        faults: list[str] = []

        async def sample_some() -> None:
            for pivot, episode, state in begun:
                try:
                    journal.write(msgspec.json.encode(await _sample(pivot, episode, state, world, work.policy)))
                    on_pivot(next(done), total)
                except InfrastructureFault as fault:
                    faults.append(str(fault))

        at_once = -(-world.machine.concurrency // SAMPLES)
        await asyncio.gather(*(sample_some() for _ in range(at_once)))
    if faults:
        raise InfrastructureFault(f"{len(faults)} turns were not played ({faults[0]}): run the same command to go on")


def _begin_pivots(
    work: Profile, world: PivotWorld, chosen: list[TeacherEpisode], done: Collection[str]
) -> Iterator[tuple[Pivot, Episode, PivotState | None]]:
    """Yield the candidates that are not done, each with its episode and its state, if there is room for it. Episodes
    are read again one by one, as memory may not hold all."""
    held = draw_held_out(chosen, HELD_OUT, SEED)
    kept = {each.place[1]: each for each in chosen}
    for line, episode in enumerate(read_episodes(work.run.folder)):
        if line not in kept:
            continue
        split: Split = "held_out" if kept[line].task in held else "train"
        of = episode.episode_id, episode.task.task_id
        acted = ((turn.index, turn.action.name) for turn in episode.turns if turn.action is not None)
        pivots = [Pivot(of[0], at, of[1], tool, split, 0, 0, 0.0, {}, "no_room") for at, tool in acted]
        left = [each for each in pivots if each.name not in done]
        states = world.states(episode, work.run.gold_by_id.get(of[1])) if left else ()
        known = {state.turn.index: state for state in states}
        yield from ((each, episode, known.get(each.turn)) for each in left)


async def _sample(pivot: Pivot, episode: Episode, state: PivotState | None, world: PivotWorld, policy: Policy) -> Pivot:
    if state is None:
        return pivot

    async def rule(player: Policy, sample: int) -> Ruling:
        seed = int(digest([SEED, pivot.name, sample])[:8], 16) >> 1
        made = await world.play(state, player, EpisodeJob(Task(pivot.name, episode.task.query), sample, seed))
        if made.reward is None:
            raise InfrastructureFault(made.error or "the turn was not played")
        return Ruling(next(iter(made.reward.terms)), made.reward.total > 0.0)

    own = await rule(RecordedPolicy([msgspec.structs.replace(episode, turns=(state.turn,))]), 0)
    if not own.right:
        return msgspec.structs.replace(pivot, fate="expert_fails", rules={own.rule: 1})
    found = await asyncio.gather(*(rule(policy, sample) for sample in range(SAMPLES)))
    right, rules = sum(each.right for each in found), dict(Counter(each.rule for each in found))
    fate = label_of(right, SAMPLES, LIMIT)
    return msgspec.structs.replace(pivot, right=right, samples=SAMPLES, mean=right / SAMPLES, rules=rules, fate=fate)


def _readme(work: Profile, found: dict[str, dict[str, Any]]) -> str:
    run = work.run
    lines = [f"| {name} | {' | '.join(map(str, fates.values()))} |" for name, fates in found["fates"].items()]
    splits = ", ".join(f"{count} {name}" for name, count in sorted(found["splits"].items())) or "none"
    return f"""# Pivots of {run.folder.name}

Turns of {run.policy} over {run.source.name}/{run.split}, each tried {SAMPLES} times by {work.name}.
Kept are those at which some of its actions are right, some are not, and less than {LIMIT:g} of them are.

| expert's tool | {" | ".join(found["fates"]["all"])} |
|---|{"---|" * len(found["fates"]["all"])}
{chr(10).join(lines)}

Kept, by split: {splits}. No task is in both. `{PIVOTS}` holds all candidates; a state is rebuilt by replay of its run.
All this holds for the weights and the configuration of `stage.json` alone.
"""


def open_training(
    folder: Path,
    policy: Policy,
    config: Config,
    publish: Publish,
    index: str = "",
    against: Sequence[str] = (),
    excluded: Collection[tuple[str, str]] = frozenset(),
) -> tuple[list[Task], list[Task], PivotRollouts, Selection]:
    """Open the profile in `folder`: return the tasks to train and to validate on, which have the names of turns, the
    rollouts that play them, and the choice among the run's tasks. `config` has the profile's settings, and the rest is
    as in `Profile`. Raise UsageError if the folder holds no finished profile, or its run is gone; ConfigError if the
    reference weights or the configuration differ."""
    stage = read_stage(folder)
    if stage is None or stage.verb != VERB or stage.status != "finished":
        raise UsageError(f"{folder} holds no finished profile: make one with `harness1 {VERB}`")
    run = open_runs([Path(stage.outputs["run"])], rerendered=True)[0]
    work = Profile(run, policy, policy.name, config, index or stage.outputs["index"], against, excluded)
    ours, theirs = work.name_settings(config.env), stage.outputs["settings"]
    wrong = [name for name, known in work.hashes.items() if stage.hashes.get(name) != known]
    if wrong or any(ours[group] != theirs[group] for group in ("env", "pivots")):
        # Turns with mixed outcomes for one policy are easy or hopeless for another.
        named = [f"{name}={mine} (profiled: {other})" for name, mine, other in differences(ours, theirs)]
        named += [f"the {name}" for name in wrong if name in ("weights", "format", "index", "rules")]
        raise ConfigError(
            f"the profile in {folder} was made with {stage.outputs['policy']} and is valid only for it; these differ:"
            f" {', '.join(named or wrong)}. Profile again with `harness1 {VERB}`"
        )
    kept = [each for each in read_pivots(folder) if each.fate == "kept"]
    selection = choose_turns(work, kept)
    learned = {*selection.learned, *selection.held_out}
    chosen = [each for each in kept if each.task_id in learned]
    wanted = {each.episode_id for each in chosen}
    found = {each.episode_id: each for each in latest_episodes(run.folder).values() if each.episode_id in wanted}
    if missing := wanted - found.keys():
        raise UsageError(f"{run.folder} no longer has episode {min(missing)}: profile it again")
    tasks = [Task(each.name, found[each.episode_id].task.query, each.split) for each in chosen]
    train, held_out = ([task for task in tasks if task.split == split] for split in get_args(Split))
    return train, held_out, PivotRollouts(work.world(), policy, found, run.gold_by_id, publish), selection


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
