"""`harness1 rl train`: what it refuses, and what it says of a policy that has nothing to learn from."""

from pathlib import Path

import pytest

from harness1.runs.files import read_stage
from harness1.runs.journal import read_episodes
from harness1.sft.collect import tasks_of_runs
from harness1.viewer.run_page import RunSource, score_episode
from tests.cli.commands import Command
from tests.sft.test_fine_tuning import SHORT, WORLD, save_student

RL = "rl/small"
FEW = ("rl.groups=2", "rl.samples=2", "rl.batches=2", "train.watch.tasks=2", "policy.format_retries=0")
OPTIONS = ["--config", RL, *(word for setting in (*SHORT, *FEW) for word in ("--set", setting))]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("home")
    save_student(made / "model")
    return made


def train(*options: str, data: str = WORLD, model: str = "hf:model", out: str = "out") -> list[str]:
    places = ["--data", data, "--model", model, "--out", out, "--cache", "cache"]
    return ["rl", "train", *places, *OPTIONS, *options]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["rl", "train", "--config", RL, "--model", "hf:model", "--out", "out"], "give either --data or --pivots"),
        (train(data="nowhere"), "nowhere"),
        (train(model="openai:gpt@http://localhost:1"), "gives no token ids"),
        (train(out="."), "is inside --out"),
        (train("--split", "test"), "is for testing"),
        (train("--set", "policy.temperature=0.5"), "policy.temperature=1"),
        (train("--set", "train.watch.metric=nll"), "train.watch.metric"),
        (train("--index", "a", "--index", "b"), "2 of --index for 1 of --data"),
        (train("--admission", "model"), "model"),
        (train("--against", f"{WORLD}:train"), "0 of 60 tasks are taken"),
        (train("--exclude", "model"), "no card there says"),
        (train("--pivots", "model"), "give either --data or --pivots"),
        (train("--set", "machine.fleet.workers=2", model="vllm:model@http://localhost:1"), "not a server"),
        (train("--set", "machine.model.sleep=true"), "machine.model.sleep is for vllm"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(harness1: Command, arguments: list[str], complaint: str) -> None:
    ended = harness1(*arguments)
    assert (ended.code, complaint in ended.err, ended.err.count("\n") <= 2) == (2, True, True), ended.err


def test_a_policy_that_never_acts_has_nothing_to_learn_from(harness1: Command, home: Path) -> None:
    ended = harness1(*train("--share", "rl", "--tensorboard", out="hopeless"))
    assert ended.code == 2
    assert "world-60-0 train: left out 18 tasks of the other share" in ended.err
    assert "all episodes had the same reward" in ended.err
    stage = read_stage(home / "hopeless")
    assert stage.status == "interrupted"
    assert "world:60" in read_stage(home / "hopeless" / "episodes").origins
    (chosen,) = stage.outputs["selections"]
    assert (chosen["share"], chosen["tasks"], len(chosen["learned"])) == ("rl", 60, 42)
    assert chosen["compared"] == {"world-60-0:dev": 15, "world-60-0:test": 15}
    played = list(read_episodes(home / "hopeless" / "episodes"))
    learned = {task for _, task in tasks_of_runs([home / "hopeless"])}
    assert {task for _, task in tasks_of_runs([home / "hopeless" / "episodes"])} - learned <= {"dev-00000", "dev-00001"}
    assert {str(episode.status) for episode in played} == {"policy_error"}
    assert list((home / "hopeless" / "tensorboard").iterdir())
    assert harness1("replay", "hopeless/episodes", "--json").code == 0
    viewed = harness1("view", "hopeless/episodes", "--out", "view.html")
    assert (viewed.code, "episodes, " in viewed.out) == (0, True), viewed.err
    source = RunSource.open(home / "hopeless" / "episodes")
    assert source.notes == []
    assert all(score_episode(episode, source.gold_of(episode.task), source.config)[0] for episode in played)


def test_no_batch_is_begun_when_the_time_is_up_and_nothing_untrained_is_a_checkpoint(
    harness1: Command, home: Path
) -> None:
    ended = harness1(*train("--minutes", "0", out="late"))
    assert (ended.code, "the time was up before the first batch" in ended.err) == (2, True)
    assert read_stage(home / "late").status != "finished"


def test_a_folder_of_something_else_is_left_alone(harness1: Command, home: Path) -> None:
    (home / "mine").mkdir()
    (home / "mine" / "notes.txt").write_text("mine")
    ended = harness1(*train("--force", out="mine"))
    assert (ended.code, "not empty" in ended.err) == (2, True)
    assert (home / "mine" / "notes.txt").read_text() == "mine"
