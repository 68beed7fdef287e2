"""From a teacher to an evaluated student by the commands that a user types."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness1.cli import main
from harness1.engines.loop import STATE
from harness1.models.checkpoint import read_checkpoint
from harness1.runs.journal import read_episodes
from harness1.training.log import read_log, validation_values
from harness1.training.saving import load_state
from tests.cli.commands import Command, command_in_process
from tests.sft.test_fine_tuning import SHORT, SMALL, WORLD, save_student
from tests.support import hear_interrupts

OPTIONS = ["--config", SMALL, *(word for setting in SHORT for word in ("--set", setting))]
GATES = ["--set", "sft.gates.recall=0", "--set", "sft.gates.near=1", "--set", "sft.held_out=0.25"]
TRAIN = [
    word
    for setting in ("epochs=2", "batch_rows=2", "lora.rank=2", "watch.every=1", "watch.turns=1", "watch.rows=1")
    for word in ("--set", f"train.{setting}")
]


@pytest.fixture
def harness1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], home: Path) -> Command:
    """The command in this process, in the working folder of the tests."""
    monkeypatch.chdir(home)
    monkeypatch.setenv("COLUMNS", "200")
    return command_in_process(monkeypatch, capsys)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder with a model, the rows of a teacher for it, and a checkpoint."""
    made = tmp_path_factory.mktemp("home")
    save_student(made / "model")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(made)
        for command in (collect("taught"), build("rows"), train("student")):
            patch.setattr(sys, "argv", ["harness1", *command])
            with pytest.raises(SystemExit) as ended:
                main.run()
            assert not ended.value.code
    return made


def collect(out: str, *options: str) -> list[str]:
    student = ["--tokenizer", "model", "--limit", "4", "--cache", "cache"]
    return ["sft", "collect", "--data", WORLD, "--teacher", "oracle", "--out", out, *student, *OPTIONS, *options]


def build(out: str, *options: str) -> list[str]:
    return ["sft", "build", "taught", "--out", out, *OPTIONS, *GATES, *options]


def train(out: str, *options: str) -> list[str]:
    return ["sft", "train", "rows", "--model", "model", "--out", out, *OPTIONS, *TRAIN, *options]


def evaluation(out: str, *options: str) -> list[str]:
    limits = ["--split", "train", "--limit", "1", "--cache", "cache", "--json"]
    return ["eval", WORLD, "--policy", "hf:student", "--out", out, *limits, *OPTIONS, *options]


def test_a_policy_without_a_model_is_measured_in_a_models_window(harness1: Command, home: Path) -> None:
    alone = ["eval", WORLD, "--split", "train", "--limit", "1", "--cache", "cache", "--json", *OPTIONS]
    ended = harness1(*alone, "--policy", "single-shot", "--tokenizer", "model", "--out", "counted")
    assert ended.code == 0, ended.err
    card, taught = (json.loads((home / run / "stage.json").read_text()) for run in ("counted", "taught"))
    assert card["hashes"]["tokenizer"] == taught["hashes"]["tokenizer"]
    ended = harness1(*alone, "--policy", "hf:student", "--tokenizer", "model", "--out", "twice")
    assert (ended.code, "counts with its own tokenizer: leave --tokenizer out" in ended.err) == (2, True)


def test_a_collection_prints_one_object_of_its_metrics(harness1: Command, home: Path) -> None:
    ended = harness1(*collect("taught", "--json"))
    assert ended.code == 0, ended.err
    metrics = json.loads(ended.out)
    assert metrics == json.loads((home / "taught" / "metrics.json").read_text())
    assert (metrics["tasks"], metrics["failures"]["infra_error"]) == (4, 0)


def test_a_dataset_prints_one_object_of_its_card(harness1: Command, home: Path) -> None:
    ended = harness1(*build("rows", "--json"))
    assert ended.code == 0, ended.err
    card = json.loads(ended.out)
    assert card == json.loads((home / "rows" / "card.json").read_text())
    assert (card["format"], card["train"]["tasks"], card["held_out"]["tasks"]) == ("compact", 3, 1)


def test_a_finished_training_prints_its_checkpoint_and_loads_no_model_again(
    harness1: Command, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness1.engines.engine.load_trainable", lambda *_: pytest.fail("the model was loaded"))
    written = (home / "student" / "adapter_model.safetensors").stat().st_mtime_ns
    ended = harness1(*train("student", "--json"))
    assert ended.code == 0, ended.err
    found, card = json.loads(ended.out), read_checkpoint(home / "student")
    assert found == {"checkpoint": "student", "step": card.step, "metrics": card.metrics, "start": found["start"]}
    assert found["start"] == validation_values(read_log(home / "student")[0])
    assert found["metrics"].keys() == {"nll", "valid", "tool_agreement", "action_agreement"}
    assert (home / "student" / "adapter_model.safetensors").stat().st_mtime_ns == written


def test_a_training_shows_its_looks_and_where_the_checkpoint_is(harness1: Command, home: Path) -> None:
    ended = harness1(*train("shown", "--tensorboard"))
    assert ended.code == 0, ended.err
    assert "step 0, held out: nll" in ended.err
    assert "step 4 of 4" in ended.err
    assert "the best checkpoint, of step" in ended.out
    assert "The checkpoint is in shown: harness1 eval DATASET --policy hf:shown" in ended.out
    assert [line["step"] for line in read_log(home / "shown") if "loss" in line] == [1, 2, 3, 4]
    assert list((home / "shown" / "tensorboard").iterdir())


def test_a_training_is_logged_to_an_experiment_of_mlflow(
    harness1: Command, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, object]] = []

    class Run:
        def __init__(self, folder: Path, place: str, *, resumed: bool) -> None:
            calls.append(("open", (folder.name, place, resumed)))

        def log(self, values: dict[str, float], step: int) -> None:
            calls.append(("step", step))

        def finish(self, status: str) -> None:
            calls.append(("end", status))

    monkeypatch.setattr("harness1.training.log.MlflowRun", Run)
    ended = harness1(*train("logged", "--mlflow", "students@sqlite:///store.db"))
    assert ended.code == 0, ended.err
    assert calls[0] == ("open", ("logged", "students@sqlite:///store.db", False))
    assert calls[-1] == ("end", "FINISHED")
    assert {step for name, step in calls if name == "step"} == {0, 1, 2, 3, 4}


def test_another_training_needs_force_and_force_begins_anew(harness1: Command, home: Path) -> None:
    shutil.copytree(home / "student", home / "mine")
    longer = ("--set", "train.epochs=1", "--json")
    refused = harness1(*train("mine", *longer))
    assert (refused.code, refused.out) == (2, "")
    assert "mine holds another training (it differs in train): choose another --out, or --force" in refused.err
    assert read_checkpoint(home / "mine") == read_checkpoint(home / "student")
    assert harness1(*train("mine", *longer, "--force")).code == 0
    card = read_checkpoint(home / "mine")
    assert card.train["epochs"] == 1
    assert max(line["step"] for line in read_log(home / "mine")) == 2


@pytest.mark.parametrize(
    "arguments",
    [
        ["sft", "train", "nowhere", "--model", "model"],
        ["sft", "train", "taught", "--model", "model"],
        ["sft", "train", "rows", "--model", "student2"],
    ],
)
def test_force_clears_nothing_for_a_training_that_cannot_be(
    harness1: Command, home: Path, arguments: list[str]
) -> None:
    if not (home / "student2").exists():
        shutil.copytree(home / "student", home / "student2")
    before = {path: path.read_bytes() for path in (home / "student2").iterdir() if path.is_file()}
    ended = harness1(*arguments, "--out", "student2", "--force", *OPTIONS)
    assert ended.code == 2
    assert len(ended.err.strip().splitlines()) == 1
    assert before == {path: path.read_bytes() for path in (home / "student2").iterdir() if path.is_file()}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["sft", "train", "nowhere", "--model", "model", "--out", "wrong"], "nowhere is not a finished dataset"),
        (["sft", "train", "rows", "--model", "no/model", "--out", "wrong"], "no model 'no/model'"),
        (["sft", "train", "rows", "--model", "taught", "--out", "wrong"], "taught has no tokenizer.json"),
        (["sft", "train", "rows", "--model", "model", "--out", "wrong", "--packing"], "--packing needs --trainer trl"),
        (train("wrong", "--set", "train.epoch=1"), "epoch"),
        (train("wrong", "--set", "train.rate=0"), "train.rate"),
        (train("wrong", "--set", "train.watch.metric=curated_recall"), "needs train.watch.tasks"),
        (train("begun", "--set", "machine.device=tpu9"), "tpu9"),
        (train("taught"), "taught is not empty and holds"),
        (build("wrong", "--tokenizer", "model"), "give --rerender too"),
        (build("wrong", "--exclude", "taught"), "none of 4 episodes is left"),
        (collect("wrong", "--split", "test"), "is for testing"),
    ],
)
def test_what_is_wrong_with_a_command_is_one_line(
    harness1: Command, home: Path, arguments: list[str], says: str
) -> None:
    ended = harness1(*arguments)
    assert (ended.code, ended.out) == (2, "")
    assert says in ended.err
    assert len(ended.err.strip().splitlines()) == 1
    assert not (home / "wrong").exists()


def test_a_trainer_that_does_not_exist_is_wrong_use(harness1: Command) -> None:
    ended = harness1(*train("wrong", "--trainer", "gym"))
    assert (ended.code, ended.out) == (2, "")
    assert "'gym' is not one of" in ended.err


def test_a_student_is_evaluated_in_the_environment_that_it_learned(harness1: Command, home: Path) -> None:
    ended = harness1(*evaluation("metrics", "--set", "policy.format=auto", "--set", "policy.format_retries=0"))
    assert ended.code == 0, ended.err
    assert json.loads(ended.out)["tasks"] == 1
    (episode,) = read_episodes(home / "metrics")
    (taught, *_) = read_episodes(home / "taught")
    assert (episode.hashes.env, episode.hashes.counter) == (taught.hashes.env, taught.hashes.counter)


@pytest.mark.slow
def test_an_interrupt_saves_the_step_at_work_and_the_same_command_goes_on(home: Path) -> None:
    """In a process of its own: the state would otherwise be saved only at the end."""
    settings = ("epochs=40", "save_every=0", "watch.every=0")
    words = train("cut", *(word for setting in settings for word in ("--set", f"train.{setting}")))
    command = [sys.executable, "-m", "harness1", *words]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    log = home / "cut" / "log.jsonl"
    with subprocess.Popen(command, **pipes, cwd=home, text=True, preexec_fn=hear_interrupts) as process:
        while process.poll() is None and (not log.is_file() or log.read_text().count('"loss"') < 3):
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    done = read_log(home / "cut")[-1]["step"]
    assert process.returncode == 130, err
    assert err.splitlines()[-1] == f"harness1: interrupted; the same command continues after step {done}"
    state = load_state(home / "cut" / STATE, dict)
    assert state is not None
    ended = subprocess.run([*command, "--json"], cwd=home, capture_output=True, text=True, check=True)
    steps = [line["step"] for line in read_log(home / "cut") if "loss" in line]
    assert steps == list(range(1, len(steps) + 1)), ended.stderr
    assert len(steps) > done >= 3


def test_a_student_plays_in_the_environment_that_it_was_trained_in(harness1: Command, home: Path) -> None:
    run = ["--limit", "1", "--split", "train", "--cache", "cache", "--json", "--no-view"]
    played = harness1("eval", WORLD, "--policy", "hf:student", "--out", "carried", *run)
    assert played.code == 0, played.err
    assert "harness1: env of student: env.max_turns=4, " in played.err
    card = read_checkpoint(home / "student")
    assert next(read_episodes(home / "carried")).hashes.env == card.env_hash
    index = str(next((home / "cache").iterdir()))
    asked = harness1("search", "Who founded it?", "--index", index, "--policy", "hf:student", "--out", "asked")
    assert asked.code == 0, asked.err
    refused = harness1("eval", WORLD, "--policy", "hf:student", "--out", "no", *run, "--set", "env.max_turns=1")
    assert "which differs in env.max_turns=1 (trained:" in refused.err.splitlines()[-1]
    meant = harness1(
        *("eval", WORLD, "--policy", "hf:student", "--out", "meant", *run, "--set", "env.max_turns=1"),
        *("--set", "machine.model.foreign=true"),
    )
    assert (meant.code, json.loads(meant.out)["scored"]) == (0, 1), meant.err


def test_a_student_is_refused_in_another_environment_unless_that_is_meant(harness1: Command, home: Path) -> None:
    other = ("--set", "env.search.hits=3", "--set", "policy.format_retries=0")
    question = ["search", "Who founded it?", "--index", str(next((home / "cache").iterdir())), "--policy", "hf:student"]
    for command in (evaluation("other", *other), [*question, "--out", "other", *OPTIONS, *other]):
        refused = harness1(*command)
        complaint = refused.err.splitlines()[-1]
        assert (refused.code, refused.out) == (2, "")
        assert complaint.startswith("harness1: student was trained for another environment")
        assert "which differs in env.search.hits=3 (trained: 2). Without --config and --set" in complaint
        assert not (home / "other").exists()
    meant = harness1(*evaluation("other", *other, "--set", "machine.model.foreign=true"))
    assert meant.code == 0, meant.err
    assert json.loads(meant.out)["scored"] == 1
