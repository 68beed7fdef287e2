"""Which turns of a teacher are kept, and for whom."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from harness1.config import Config, load_config
from harness1.data import beir
from harness1.data.datasets import copy_dataset
from harness1.data.open import open_source
from harness1.env.render import Context
from harness1.episodes.jobs import EpisodeJob
from harness1.errors import ConfigError, InfrastructureFault, UsageError
from harness1.eval.evaluate import Evaluation, evaluate
from harness1.policy.policy import Decision
from harness1.policy.scripted import RecordedPolicy
from harness1.records import DocId, Episode, RewardRecord, RewardTerm, Task, ToolCall
from harness1.retrieval.build import build_index
from harness1.rl.pivot_turns import PivotState, PivotWorld
from harness1.rl.pivots import (
    PIVOTS,
    README,
    Pivot,
    Profile,
    choose_turns,
    label_of,
    open_training,
    profile,
    read_pivots,
)
from harness1.runs.files import read_stage
from harness1.runs.journal import latest_episodes
from harness1.sft.collect import TeacherRun, open_runs
from tests.support import END, run

WORLD = "world:60"
CONFIG = load_config(None, ["machine.workers=1"])


@pytest.fixture(autouse=True, scope="module")
def _few_samples() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("harness1.rl.pivots.SAMPLES", 4)
        patch.setattr("harness1.rl.pivots.HELD_OUT", 0.25)
        yield


class Dice:
    """Acts by its seed alone: asks the question, ends the search, or says nothing that can be read; and fails after
    `broken` acts."""

    name = "dice"

    def __init__(self, weights: str = "first", broken: int | None = None) -> None:
        self.hash, self.left, self.acts = weights, broken, 0

    def open(self, task: Task, seed: int) -> DiceSession:
        return DiceSession(self, task.query, random.Random(seed))


class DiceSession:
    def __init__(self, policy: Dice, query: str, rng: random.Random) -> None:
        self.policy, self.query, self.rng = policy, query, rng

    async def act(self, context: Context) -> Decision:
        self.policy.acts += 1
        if self.policy.left is not None and self.policy.acts > self.policy.left:
            raise InfrastructureFault("the model is gone")
        drawn = self.rng.random()
        if drawn < 0.2:
            return Decision(parse_error="mumbled")
        return Decision((END if drawn < 0.4 else ToolCall("search_corpus", {"query": self.query}),))

    def fork(self) -> DiceSession:
        return self


async def load(state: object, version: int) -> None:
    """No weights."""


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> TeacherRun:
    """Episodes of the oracle teacher over a small world."""
    home = tmp_path_factory.mktemp("pivots")
    source = open_source(WORLD)
    build_index(source.documents(), home / "index", CONFIG.index)
    chosen = source.tasks("train")[:8]
    teaching = Evaluation(WORLD, "train", chosen, str(home / "index"), "oracle-teacher", CONFIG)
    evaluate(teaching, home / "run", lambda _done, _all: None, lambda _episode: None)
    return open_runs([home / "run"], rerendered=True)[0]


@pytest.fixture(scope="module")
def finished(taught: TeacherRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("finished") / "pivots"
    profile(work(taught), out)
    return out


def work(taught: TeacherRun, config: Config = CONFIG, policy: Dice | None = None) -> Profile:
    return Profile(taught, policy or Dice(), "dice", config)


def test_a_profile_names_the_origins_of_its_policy_and_its_index(taught: TeacherRun, tmp_path: Path) -> None:
    copy_dataset("stdlib", tmp_path / "student")
    copy_dataset("world:60:1", tmp_path / "index")
    named = replace(work(taught), name=f"hf:{tmp_path / 'student'}", index=str(tmp_path / "index"))
    assert named.stage().origins == ("stdlib", "unknown:index", "world-60-1", WORLD)


def by_name(folder: Path) -> dict[str, Pivot]:
    return {each.name: each for each in read_pivots(folder)}


def test_a_turn_is_kept_if_outcomes_are_mixed_and_their_mean_is_low() -> None:
    found = {limit: [label_of(right, 4, limit) for right in range(5)] for limit in (0.25, 0.6, 1.0)}
    assert found == {
        0.25: ["all_wrong", "easy", "easy", "easy", "all_right"],
        0.6: ["all_wrong", "kept", "kept", "easy", "all_right"],
        1.0: ["all_wrong", "kept", "kept", "kept", "all_right"],
    }


def test_the_kept_set_is_as_enumerated(taught: TeacherRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng, table = random.Random(5), dict[str, list[float]]()

    async def injected(self: PivotWorld, state: PivotState, policy: object, job: EpisodeJob) -> Episode:
        drawn = [float(rng.random() < rng.choice((0.0, 0.3, 0.6, 1.0))) for _ in range(4)]
        rates = table.setdefault(job.task.task_id, drawn)
        value = 1.0 if isinstance(policy, RecordedPolicy) else rates[job.sample_idx]
        reward = RewardRecord(value, {"injected": RewardTerm(value, 1.0)})
        return msgspec.structs.replace(next(iter(episodes.values())), reward=reward)

    episodes = latest_episodes(taught.folder)
    monkeypatch.setattr(PivotWorld, "play", injected)
    profile(work(taught), tmp_path / "out")
    found = by_name(tmp_path / "out")
    assert found.keys() == table.keys()
    kept = {name for name, each in found.items() if each.fate == "kept"}
    assert kept == {name for name, rates in table.items() if 0 < sum(rates) < 4 and sum(rates) / 4 < 0.6}
    assert 0 < len(kept) < len(found)
    for name, rates in table.items():
        known = found[name]
        assert (known.right, known.mean, known.rules) == (sum(rates), sum(rates) / 4, {"injected": 4})


def test_the_experts_own_action_is_right_at_every_turn_that_was_sampled(taught: TeacherRun, finished: Path) -> None:
    episodes = {each.episode_id: each for each in latest_episodes(taught.folder).values()}
    world, checked = work(taught).world(), 0
    for each in read_pivots(finished):
        episode = episodes[each.episode_id]
        state = world.states(episode, taught.gold_by_id[each.task_id])[each.turn - 1]
        expert = RecordedPolicy([msgspec.structs.replace(episode, turns=(state.turn,))])
        made = run(world.play(state, expert, EpisodeJob(Task(each.name, episode.task.query))))
        assert (made.reward.total > 0.0) == (each.fate != "expert_fails") == (each.samples > 0)
        checked += each.samples > 0
    assert checked > 10


def test_a_readme_and_a_card_say_what_became_of_every_turn(taught: TeacherRun, finished: Path) -> None:
    found = read_pivots(finished)
    stage = read_stage(finished)
    assert (stage.status, stage.origins) == ("finished", ("unknown:index", WORLD))  # it was built without a card
    fates = stage.gates["fates"]
    assert Path(stage.outputs["index"]).is_absolute()
    tasks = {split: {each.task_id for each in found if each.split == split} for split in ("train", "held_out")}
    assert (len(tasks["train"]), len(tasks["held_out"]), tasks["train"] & tasks["held_out"]) == (6, 2, set())
    turns = (turn for each in latest_episodes(taught.folder).values() for turn in each.turns)
    assert fates["all"]["candidates"] == len(found) == sum(turn.action is not None for turn in turns)
    assert fates["all"]["kept"] == sum(each.fate == "kept" for each in found) == sum(stage.gates["splits"].values())
    assert sum(fates[tool]["expert_fails"] for tool in fates if tool != "all") == fates["all"]["expert_fails"]
    text = (finished / README).read_text()
    assert f"| all | {' | '.join(map(str, fates['all'].values()))} |" in text


@pytest.mark.parametrize("tear", [True, False])
def test_a_stopped_profile_goes_on_and_comes_out_the_same(taught: TeacherRun, tmp_path: Path, tear: bool) -> None:
    out, whole = tmp_path / "out", tmp_path / "whole"
    profile(work(taught), whole)
    with pytest.raises(InfrastructureFault, match="run the same command to go on"):
        profile(work(taught, policy=Dice(broken=50)), out)
    done = read_pivots(out)
    assert 0 < len(done) < len(read_pivots(whole))
    with pytest.raises(UsageError, match="no finished profile"):
        open_training(out, Dice(), CONFIG, load)
    if tear:
        with (out / PIVOTS).open("ab") as file:
            file.write(b'{"episode_id":"to')
    again = Dice()
    profile(work(taught, policy=again), out)
    assert (by_name(out), len(read_pivots(out))) == (by_name(whole), len(read_pivots(whole)))
    assert again.acts == sum(each.samples for each in read_pivots(whole)) - sum(each.samples for each in done)


def test_a_finished_profile_is_left_alone_others_refused(taught: TeacherRun, finished: Path, tmp_path: Path) -> None:
    idle = Dice()
    before = (finished / PIVOTS).stat().st_mtime_ns
    profile(work(taught, policy=idle), finished)
    assert (idle.acts, (finished / PIVOTS).stat().st_mtime_ns) == (0, before)
    other = load_config(None, ["sft.gates.recall=0.2"])
    with pytest.raises(UsageError, match="holds another profile"):
        profile(work(taught, other), finished)
    with pytest.raises(UsageError, match="holds another profile"):
        profile(work(taught, policy=Dice("second")), finished)
    again = Path(shutil.copytree(finished, tmp_path / "again"))
    profile(work(taught, policy=Dice("second")), again, force=True)
    stage = read_stage(again)
    assert stage.hashes["weights"] == "second"


def test_episodes_that_are_no_example_give_no_candidates(taught: TeacherRun) -> None:
    strict = load_config(None, ["sft.gates.recall=0.9"])
    first, task = next(iter(taught.tasks.items()))
    beyond = msgspec.structs.replace(task.gold, relevant={**task.gold.relevant, DocId("nowhere"): 1})
    harder = replace(taught, given=[*({**taught.tasks, first: msgspec.structs.replace(task, gold=beyond)}).values()])
    all_of_them = work(taught, strict).candidates(lambda _: None)
    assert len(all_of_them) == 8
    left = work(harder, strict).candidates(lambda _: None)
    assert {each.task_id for each in left} == {each.task_id for each in all_of_them} - {first}


def test_kept_turns_are_trained_as_tasks(taught: TeacherRun, finished: Path) -> None:
    train, held_out, rollouts, _ = open_training(finished, Dice(), CONFIG, load)
    kept = {each.name: each for each in read_pivots(finished) if each.fate == "kept"}
    assert {task.task_id for task in (*train, *held_out)} == kept.keys()
    assert all(kept[task.task_id].split == "held_out" for task in held_out)
    found: list[Episode] = []
    run(rollouts.run([EpisodeJob(task, 0, 9) for task in train], found.append))
    assert {each.task.task_id for each in found} == {task.task_id for task in train}
    assert all(each.reward is not None and len(each.turns) == 1 for each in found)


@pytest.mark.parametrize(
    ("policy", "change", "message"),
    [
        (lambda: Dice("second"), None, r"the weights"),
        (Dice, "env.max_turns=7", r"env\.max_turns=7 \(profiled: 40\)"),
        (lambda: Dice("second"), "policy.temperature=0.5", r"policy\.temperature=0\.5 \(profiled: 1\.0\), the weights"),
    ],
)
def test_a_profile_of_other_weights_or_settings_is_refused(
    finished: Path, policy: Callable[[], Dice], change: str | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        open_training(finished, policy(), load_config(None, [change] if change else []), load)


def test_another_index_is_refused_before_anything_is_written(taught: TeacherRun, tmp_path: Path) -> None:
    build_index(open_source("world:40").documents(), tmp_path / "index", CONFIG.index)
    other = Profile(taught, Dice(), "dice", CONFIG, str(tmp_path / "index"))
    with pytest.raises(ConfigError, match="is not the index"):
        profile(other, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_turns_of_leaked_tasks_are_not_trained(taught: TeacherRun, finished: Path, tmp_path: Path) -> None:
    played = {each.task_id for each in read_pivots(finished)}
    kept = {each.task_id for each in read_pivots(finished) if each.fate == "kept"}
    source, first = taught.source, min(kept)
    asked = msgspec.structs.replace(taught.tasks[first], task_id="q", split="test")
    beir.write(tmp_path / source.name, source.documents(), [asked])
    against = [str(tmp_path / source.name)]
    narrow = replace(work(taught), against=against)
    assert {each.task_id for each in narrow.candidates(lambda _: None)} == played - {first}
    assert narrow.stage().inputs != work(taught).stage().inputs
    train, held_out, _, selection = open_training(finished, Dice(), CONFIG, load, against=against)
    names = {task.task_id for task in (*train, *held_out)}
    assert {each.task_id for each in read_pivots(finished) if each.name in names} == kept - {first}
    assert selection.leaked == 1
    every = {(taught.source.name, task) for task in taught.tasks}  # those of earlier runs
    assert len({each.task_id for each in replace(work(taught), excluded=sorted(every)[1:]).candidates(print)}) <= 1
    with pytest.raises(UsageError, match=r"no episode to learn from: .* of earlier runs"):
        profile(replace(work(taught), excluded=every), tmp_path / "none")


def test_no_trained_turn_is_of_a_task_with_the_gold_of_a_validation_task(taught: TeacherRun, finished: Path) -> None:
    pivots = read_pivots(finished)
    learned, held_out = (next(each.task_id for each in pivots if each.split == name) for name in ("train", "held_out"))
    twin = msgspec.structs.replace(taught.tasks[learned], gold=taught.tasks[held_out].gold)
    alike = replace(work(taught), run=replace(taught, given=[*({**taught.tasks, learned: twin}).values()]))
    chosen = choose_turns(alike, pivots)
    assert (chosen.beside, learned in chosen.learned, held_out in chosen.held_out) == (1, False, True)
