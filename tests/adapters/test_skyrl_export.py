"""Episodes leave for SkyRL as they were sampled, in whole groups, or not at all."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from math import inf, nan
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from harness1.adapters.skyrl.export import Export, export
from harness1.adapters.skyrl.generator_output import GeneratorOutput, TrajectoryId, generator_output
from harness1.config import Config, Rl
from harness1.errors import SchemaError, UsageError
from harness1.records import Episode, Status, Task
from harness1.rl.training_rows import training_rows
from harness1.rows.calls import calls_of, prompt_ids, trained_calls
from harness1.runs.folder import run_stage
from harness1.runs.stage import STAGE, read_stage
from harness1.runs.store import EPISODES, TOKENS, EpisodeStore
from tests.rl.test_training_rows import group, made_episode, siblings

SAMPLES = 2


def played(name: str, group_id: str | None, sample: int, reward: float | None = 0.0, **changes: Any) -> Episode:
    """An episode of two turns."""
    return replace(made_episode(name, 2, reward), group_id=group_id, sample_idx=sample, **changes)


def pair(group_id: str, *rewards: float) -> list[Episode]:
    return [played(f"{group_id}/{at}", group_id, at, reward) for at, reward in enumerate(rewards)]


def save_run(folder: Path, episodes: Sequence[Episode], samples: int = SAMPLES) -> Path:
    card = run_stage(Config(), "hf:student", {"samples": samples}, "index", {"tokenizer": "words"})
    card.write(folder, status="finished")
    with EpisodeStore(folder) as store:
        for episode in episodes:
            store.append(episode)
    return folder


def batches(out: Path) -> list[GeneratorOutput]:
    """The files of a folder; each is checked as it is read."""
    return [msgspec.json.decode(path.read_bytes(), type=GeneratorOutput) for path in sorted(out.glob("batch-*.json"))]


def instances(output: GeneratorOutput) -> list[str]:
    return list(dict.fromkeys(name.instance_id for name in output.trajectory_ids))


def test_every_trained_call_is_a_step_with_its_exact_tokens() -> None:
    episodes = siblings("paper").episodes
    output = generator_output([[replace(each, sample_idx=at) for at, each in enumerate(episodes)]])
    calls = [(episode, call) for episode in episodes for call in trained_calls(episode)]
    assert len(calls) < sum(len(list(calls_of(episode))) for episode in episodes)
    assert output.prompt_token_ids == tuple(prompt_ids(*each) for each in calls)
    assert output.response_ids == tuple(call.output_ids for _, call in calls)
    assert output.rollout_logprobs == tuple(call.output_logprobs for _, call in calls)
    assert output.loss_masks == tuple((1,) * len(call.output_ids) for _, call in calls)
    assert output.stop_reasons == tuple(call.finish_reason for _, call in calls)


def test_the_reward_stands_on_the_last_token_of_the_last_step() -> None:
    output = generator_output([pair("g", 1.5, -0.5)])
    nothing = (0.0,) * 4
    assert output.rewards == (nothing, (0.0, 0.0, 0.0, 1.5), nothing, (0.0, 0.0, 0.0, -0.5))
    assert output.is_last_step == (False, True, False, True)
    assert output.trajectory_ids == tuple(TrajectoryId("g", sample) for sample in (0, 0, 1, 1))
    assert output.rollout_metrics["harness1/mean_reward"] == 0.5
    assert output.rollout_metrics["harness1/mean_steps"] == 2.0


def advantages_of(output: GeneratorOutput) -> list[float]:
    """The advantage of each step as SkyRL's step-wise branch has it, GRPO without a deviation: of last steps alone,
    handed to the steps before by counting ends."""
    ends = [at for at, last in enumerate(output.is_last_step) if last]
    earned = [sum(output.rewards[at]) for at in ends]
    names = [output.trajectory_ids[at].instance_id for at in ends]
    of_instance = defaultdict(list)
    for name, reward in zip(names, earned, strict=True):
        of_instance[name].append(reward)
    values = [reward - fmean(of_instance[name]) for name, reward in zip(names, earned, strict=True)]
    return [values[sum(output.is_last_step[:at])] for at in range(len(output.is_last_step))]


Rewards = st.lists(st.lists(st.floats(-1, 4), min_size=2, max_size=4), min_size=1, max_size=3)


@given(Rewards, st.integers(0, 99))
def test_the_trainer_finds_the_rows_and_advantages_of_our_own_training(rewards: list[list[float]], seed: int) -> None:
    turns = Random(seed)
    groups = [
        [
            replace(made_episode(f"{at}/{place}", turns.randint(1, 4), reward), group_id=str(at), sample_idx=place)
            for place, reward in enumerate(each)
        ]
        for at, each in enumerate(rewards)
    ]
    output = generator_output(groups)
    rows = training_rows([group(at, *each) for at, each in enumerate(groups)], Rl(advantages="center"))
    tokens = [one + other for one, other in zip(output.prompt_token_ids, output.response_ids, strict=True)]
    assert tokens == [row.token_ids for row in rows]
    assert advantages_of(output) == pytest.approx([(row.advantages or ())[-1] for row in rows])


def test_placeholders_have_no_advantage_and_do_not_touch_other_groups() -> None:
    groups = [pair("a", 1.0, 0.0), pair("b", 0.5, 2.0)]
    broken = {groups[1][0].episode_id}
    output = generator_output(groups, lambda episode: episode.episode_id in broken)
    assert advantages_of(output) == [0.5, 0.5, -0.5, -0.5, 0.0, 0.0]
    assert output.stop_reasons[-2:] == ("error", "error")


def test_placeholders_beside_other_trajectories_of_their_instance_are_refused() -> None:
    output = generator_output([pair("a", 1.0, 0.0)], lambda episode: True)
    sound = generator_output([pair("a", 1.0, 0.0)])
    names = msgspec.structs.asdict(sound)
    mixed = {
        name: (*value[:2], *getattr(output, name)[1:]) for name, value in names.items() if isinstance(value, tuple)
    }
    with pytest.raises(ValueError, match="placeholders and other trajectories"):
        msgspec.structs.replace(sound, **mixed)


def test_a_group_of_one_is_refused_unless_it_is_not_compared() -> None:
    alone = [played("g/0", "g", 0, 1.0)]
    with pytest.raises(ValueError, match="instance g has only one trajectory"):
        generator_output([pair("a", 1.0, 0.0), alone])
    assert len(generator_output([alone], compared=False).is_last_step) == 2


def changed(output: GeneratorOutput, name: str, at: int, value: Any) -> GeneratorOutput:
    column = list(getattr(output, name))
    column[at] = value
    return replace(output, **{name: tuple(column)})


def reordered(output: GeneratorOutput, order: Sequence[int]) -> GeneratorOutput:
    """Steps in another order, or some of them alone."""
    columns = {name: value for name, value in msgspec.structs.asdict(output).items() if isinstance(value, tuple)}
    return replace(output, **{name: tuple(value[at] for at in order) for name, value in columns.items()})


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        (lambda made: reordered(made, []), "there is no step"),
        (lambda made: replace(made, stop_reasons=made.stop_reasons[1:]), "stop_reasons does not have one entry"),
        (lambda made: replace(made, prompt_token_ids=()), "prompt_token_ids does not have one entry"),
        (lambda made: changed(made, "prompt_token_ids", 2, ()), "step 2 has no prompt"),
        (lambda made: changed(made, "loss_masks", 1, (1, 1, 1)), "loss_masks of step 1"),
        (lambda made: changed(made, "rewards", 1, (1.0,)), "rewards of step 1"),
        (lambda made: changed(made, "rollout_logprobs", 0, ()), "rollout_logprobs of step 0"),
        (lambda made: changed(made, "rollout_logprobs", 0, (-1.0, nan, -1.0, -1.0)), "step 0 has a log probability"),
        (lambda made: changed(made, "rollout_logprobs", 3, (-inf,) * 4), "step 3 has a log probability"),
        (lambda made: changed(made, "rewards", 3, (0.0, 0.0, 0.0, nan)), "step 3 has a reward that is not finite"),
        (lambda made: changed(made, "loss_masks", 2, (1, 1, 0, 1)), "step 2 has a token that is not trained"),
        (lambda made: changed(made, "is_last_step", 1, False), "is_last_step does not mark"),
        (lambda made: changed(made, "is_last_step", 0, True), "is_last_step does not mark"),
        (lambda made: changed(made, "is_last_step", -1, False), "is_last_step does not mark"),
        (lambda made: changed(made, "rewards", 0, (0.0, 0.0, 0.0, 1.0)), "step 0 has a reward before the end"),
        (lambda made: changed(made, "rewards", 1, (1.0, 0.0, 0.0, 0.0)), "step 1 has a reward before the end"),
        (lambda made: reordered(made, [0, 2, 1, 3]), "the steps of a trajectory are not adjacent"),
        (lambda made: reordered(made, [0, 1, 4, 5, 2, 3, 6, 7]), "the trajectories of an instance are not adjacent"),
    ],
)
def test_what_the_trainer_would_refuse_or_mistake_is_no_batch(
    broken: Callable[[GeneratorOutput], GeneratorOutput], says: str
) -> None:
    sound = generator_output([pair("a", 1.0, 0.0), pair("b", 0.0, 1.0)])
    assert reordered(sound, range(8)) == sound
    with pytest.raises(ValueError, match=says):
        broken(sound)


def test_groups_stand_whole_in_files_in_the_order_in_which_they_were_finished(tmp_path: Path) -> None:
    groups = {str(at): pair(str(at), float(at), -1.0) for at in range(5)}
    order = [("3", 1), ("0", 0), ("1", 1), ("0", 1), ("4", 0), ("2", 0), ("1", 0), ("2", 1), ("4", 1), ("3", 0)]
    run = save_run(tmp_path / "run", [groups[name][sample] for name, sample in order])
    made = export(run, tmp_path / "out", 2)
    first, second = batches(tmp_path / "out")
    assert [instances(first), instances(second)] == [["0", "1"], ["2", "4"]]
    assert first == generator_output([groups["0"], groups["1"]])
    assert (made.files, made.episodes, made.steps, made.left_out_groups) == (2, 8, 16, {"remainder": 1})
    prompts = (tmp_path / "out" / "prompts.jsonl").read_text().splitlines()
    assert len(prompts) == 4
    assert msgspec.json.decode(prompts[0])["prompt"] == [{"role": "user", "content": "a question"}]


def test_episodes_of_an_evaluation_are_grouped_by_their_tasks(tmp_path: Path) -> None:
    episodes = [
        played(f"{task}/{sample}", None, sample, float(sample), task=Task(task, task))
        for sample in range(2)
        for task in ("one", "other")
    ]
    export(save_run(tmp_path / "run", episodes), tmp_path / "out")
    (batch,) = batches(tmp_path / "out")
    assert instances(batch) == ["one", "other"]


def altered(episode: Episode, **sampling: Any) -> Episode:
    """The same, with its last call sampled otherwise."""
    *turns, last = episode.turns
    call = replace(last.calls[0], sampling=replace(last.calls[0].sampling, **sampling))
    return replace(episode, turns=(*turns, replace(last, calls=(call,))))


def test_what_cannot_be_trained_on_is_left_out_and_counted(tmp_path: Path) -> None:
    kept = pair("kept", 1.0, 0.0)
    unfit = [
        played("broken", "kept", 2, None, status=Status.INFRA_ERROR),
        played("unknown", "kept", 3, 9.0, untrainable="its outputs have no log probabilities"),
        played("unscored", "kept", 4, None),
        played("silent", "kept", 5, 9.0, turns=()),
        altered(played("warm", "kept", 6, 9.0), temperature=0.7),
        altered(played("masked", "kept", 7, 9.0), grammar="some"),
    ]
    alike = pair("alike", *[1.0] * 8)
    alone = [played("alone", "alone", 0), *(played(str(at), "alone", at, None) for at in range(1, 8))]
    run = save_run(tmp_path / "run", [*kept, *unfit, *alike, *alone, *pair("unfinished", 0.0, 1.0)], samples=8)
    made = export(run, tmp_path / "out")
    assert batches(tmp_path / "out") == [generator_output([kept])]
    assert made.left_out_episodes == {
        "altered_sampling": 2,
        "broken": 1,
        "no_calls": 1,
        "no_logprobs": 1,
        "unscored": 8,
    }
    assert made.left_out_groups == {"equal_rewards": 1, "alone": 1, "unfinished": 1}


def test_of_an_episode_that_was_played_again_the_last_counts(tmp_path: Path) -> None:
    broken = played("g/1", "g", 1, None, status=Status.INFRA_ERROR)
    again = pair("g", 1.0, 2.0)
    made = export(save_run(tmp_path / "run", [again[0], broken, again[1]]), tmp_path / "out")
    assert batches(tmp_path / "out") == [generator_output([again])]
    assert made.left_out_episodes == {}


def test_the_policys_own_errors_are_trained_on(tmp_path: Path) -> None:
    wrong = played("g/0", "g", 0, -0.5, status=Status.POLICY_ERROR)
    made = export(save_run(tmp_path / "run", [wrong, played("g/1", "g", 1, 1.0)]), tmp_path / "out")
    assert (made.episodes, made.left_out_episodes) == (2, {})


def test_an_export_says_what_it_is_of_and_how_it_is_fed(tmp_path: Path) -> None:
    run, out = save_run(tmp_path / "run", pair("g", 1.0, 0.0)), tmp_path / "out"
    made = export(run, out)
    stage = read_stage(out)
    assert stage is not None
    assert (stage.status, stage.verb, stage.hashes) == ("finished", "rl export", {"tokenizer": "words"})
    assert msgspec.convert(stage.outputs, Export) == made
    assert made.versions == (0, 0)
    text = (out / "README.md").read_text()
    assert "| `trainer.train_batch_size` | 1 |" in text
    assert "| `generator.n_samples_per_prompt` | 2 |" in text
    assert "Policy: `hf:student`" in text


def test_the_snippet_of_the_readme_is_python(tmp_path: Path) -> None:
    export(save_run(tmp_path / "run", pair("g", 1.0, 0.0)), tmp_path / "out")
    _, snippet, _ = (tmp_path / "out" / "README.md").read_text().split("```")
    compile(snippet.removeprefix("python"), "README.md", "exec")


def test_a_finished_export_is_left_as_it_is_and_a_grown_run_needs_force(tmp_path: Path) -> None:
    run, out = save_run(tmp_path / "run", [*pair("a", 1.0, 0.0), *pair("b", 1.0, 0.0)]), tmp_path / "out"
    made = export(run, out, 1)
    written = (out / "batch-00000.json").stat().st_mtime_ns
    assert export(run, out, 1) == made
    assert (out / "batch-00000.json").stat().st_mtime_ns == written
    (out / "batch-00001.json").unlink()
    assert export(run, out, 1) == made
    assert len(batches(out)) == 2
    with pytest.raises(UsageError, match=r"holds another export \(it differs in groups_per_file\)"):
        export(run, out, 2)
    assert export(run, out, 2, force=True).files == 1
    assert len(batches(out)) == 1
    with EpisodeStore(run) as store:
        store.append(played("c/0", "c", 0))
    with pytest.raises(UsageError, match="it differs in run"):
        export(run, out, 2)


def test_what_is_no_run_or_holds_nothing_to_train_on_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(UsageError, match="is not a run folder"):
        export(tmp_path / "nothing", out)
    scripted = save_run(tmp_path / "scripted", [played(str(at), "g", at, float(at), turns=()) for at in range(2)])
    with pytest.raises(UsageError, match="scripted holds no model calls"):
        export(scripted, out)
    alike = save_run(tmp_path / "alike", pair("g", 1.0, 1.0))
    with pytest.raises(UsageError, match=r"alike has no group of episodes to train on\. Left out: 1 groups equal"):
        export(alike, out)
    few = save_run(tmp_path / "few", pair("g", 1.0, 0.0))
    with pytest.raises(UsageError, match="has 1 groups to train on, fewer than the 3 of a file"):
        export(few, out, 3)
    assert not out.exists()
    with pytest.raises(UsageError, match="holds nothing of `harness1 rl export`"):
        export(few, few, force=True)
    assert {path.name for path in few.iterdir()} >= {STAGE, EPISODES, TOKENS}


def test_a_damaged_run_is_no_export(tmp_path: Path) -> None:
    lacking = [replace(each, segments={"start": (1, 2, 3)}) for each in pair("g", 1.0, 0.0)]
    with pytest.raises(SchemaError, match="lacks the prompt segment"):
        export(save_run(tmp_path / "lacking", lacking), tmp_path / "out")
    empty = [replace(each, segments={"start": (), "answer": ()}) for each in pair("g", 1.0, 0.0)]
    with pytest.raises(SchemaError, match=r"empty is damaged: episode g/0: .* has no prompt"):
        export(save_run(tmp_path / "empty", empty), tmp_path / "out")
    assert not (tmp_path / "out").exists()
