"""From a teacher to an evaluated student by the commands that a user types."""

import json
import shutil
from pathlib import Path

import pytest

from harness1.engines.loop import STATE
from harness1.models.checkpoint import read_checkpoint
from harness1.runs.journal import read_episodes
from harness1.training.log import read_log, validation_values
from harness1.training.saving import load_state
from tests.cli.commands import Command, interrupted, run_in
from tests.sft.test_fine_tuning import SHORT, SMALL, WORLD, save_student

OPTIONS = ["--config", SMALL, *(word for setting in SHORT for word in ("--set", setting))]
GATES = ["--set", "sft.gates.recall=0", "--set", "sft.gates.near=1", "--set", "sft.held_out=0.25"]
TRAIN = [
    word
    for setting in ("epochs=2", "batch_rows=2", "lora.rank=2", "watch.every=1", "watch.turns=1", "watch.rows=1")
    for word in ("--set", f"train.{setting}")
]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder with a model, the rows of a teacher for it, and a checkpoint."""
    made = tmp_path_factory.mktemp("home")
    save_student(made / "model")
    for command in (collect("taught"), build("rows"), train("student")):
        run_in(made, *command)
    return made


def collect(out: str, *options: str) -> list[str]:
    student = ["--tokenizer", "model", "--limit", "4", "--cache", "cache"]
    return ["sft", "collect", "--data", WORLD, "--teacher", "oracle", "--out", out, *student, *OPTIONS, *options]


def build(out: str, *options: str) -> list[str]:
    return ["sft", "build", "taught", "--out", out, *OPTIONS, *GATES, *options]


def train(out: str, *options: str) -> list[str]:
    return ["sft", "train", "rows", "--model", "model", "--out", out, *OPTIONS, *TRAIN, *options]


def test_a_policy_without_a_model_is_measured_in_a_models_window(harness1: Command, home: Path) -> None:
    alone = ["eval", WORLD, "--split", "train", "--limit", "1", "--cache", "cache", "--json", *OPTIONS]
    ended = harness1(*alone, "--policy", "single-shot", "--tokenizer", "model", "--out", "counted")
    assert ended.code == 0, ended.err
    card, taught = (json.loads((home / run / "stage.json").read_text()) for run in ("counted", "taught"))
    assert card["hashes"]["tokenizer"] == taught["hashes"]["tokenizer"]
    ended = harness1(*alone, "--policy", "hf:student", "--tokenizer", "model", "--out", "twice")
    assert (ended.code, "counts with its own tokenizer: leave --tokenizer out" in ended.err) == (2, True)


def test_collections_and_datasets_print_one_object(harness1: Command, home: Path) -> None:
    metrics, card = (json.loads(harness1(*verb, "--json").out) for verb in (collect("taught"), build("rows")))
    assert metrics == json.loads((home / "taught" / "metrics.json").read_text())
    assert (metrics["tasks"], metrics["failures"]["infra_error"]) == (4, 0)
    assert card == json.loads((home / "rows" / "card.json").read_text())
    assert (card["format"], card["train"]["tasks"], card["held_out"]["tasks"]) == ("compact", 3, 1)


def test_a_finished_training_prints_its_checkpoint_and_loads_no_model_again(
    harness1: Command, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness1.engines.engine.load_trainable", lambda *_: pytest.fail("the model was loaded"))
    ended = harness1(*train("student", "--json"))
    assert ended.code == 0, ended.err
    card, start = read_checkpoint(home / "student"), validation_values(read_log(home / "student")[0])
    expected = {"checkpoint": "student", "step": card.step, "metrics": card.metrics, "start": start}
    assert json.loads(ended.out) == expected
    assert card.metrics.keys() == {"nll", "valid", "tool_agreement", "action_agreement"}


def test_a_training_shows_its_looks_and_where_the_checkpoint_is(harness1: Command, home: Path) -> None:
    ended = harness1(*train("shown", "--tensorboard"))
    assert all(said in ended.err for said in ("step 0, held out: nll", "step 4 of 4")), ended.err
    assert "the best checkpoint, of step" in ended.out
    assert "The checkpoint is in shown: harness1 eval DATASET --policy hf:shown" in ended.out
    assert [line["step"] for line in read_log(home / "shown") if "loss" in line] == [1, 2, 3, 4]
    assert list((home / "shown" / "tensorboard").iterdir())


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


@pytest.mark.parametrize("given", [("nowhere", "model"), ("taught", "model"), ("rows", "student2")])
def test_force_clears_nothing_for_a_training_that_cannot_be(
    harness1: Command, home: Path, given: tuple[str, str]
) -> None:
    shutil.copytree(home / "student", home / "student2", dirs_exist_ok=True)
    before = {path: path.read_bytes() for path in (home / "student2").iterdir() if path.is_file()}
    ended = harness1("sft", "train", given[0], "--model", given[1], "--out", "student2", "--force", *OPTIONS)
    assert (ended.code, ended.err.count("\n")) == (2, 1), ended.err
    assert before == {path: path.read_bytes() for path in (home / "student2").iterdir() if path.is_file()}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["sft", "train", "nowhere", "--model", "model", "--out", "wrong"], "nowhere is not a finished dataset"),
        (["sft", "train", "rows", "--model", "taught", "--out", "wrong"], "taught has no tokenizer.json"),
        (train("wrong", "--packing"), "--packing needs --trainer trl"),
        (train("wrong", "--trainer", "trl", "--engine", "tinker:m"), "give one of them"),
        (train("wrong", "--set", "train.watch.metric=curated_recall"), "needs train.watch.tasks"),
        (train("begun", "--set", "machine.device=tpu9"), "tpu9"),
        (train("taught"), "taught is not empty and holds"),
        (build("wrong", "--tokenizer", "model"), "give --rerender too"),
        (build("wrong", "--rerender"), "--rerender needs --tokenizer"),
        (build("wrong", "--exclude", "taught"), "none of 4 episodes is left"),
        (collect("wrong", "--split", "test"), "is for testing"),
        (["sft", "collect", "--data", WORLD, "--out", "wrong", "--format", "hermes"], "give its --tokenizer too"),
    ],
)
def test_what_is_wrong_with_a_command_is_one_line(
    harness1: Command, home: Path, arguments: list[str], says: str
) -> None:
    ended = harness1(*arguments)
    assert (ended.code, ended.out, says in ended.err, ended.err.strip().count("\n")) == (2, "", True, 0), ended.err
    assert not (home / "wrong").exists()


@pytest.mark.slow
def test_an_interrupt_saves_the_step_at_work_and_the_same_command_goes_on(harness1: Command, home: Path) -> None:
    """In a process of its own: the state would otherwise be saved only at the end."""
    settings = ("epochs=40", "save_every=0", "watch.every=0")
    words = train("cut", *(word for setting in settings for word in ("--set", f"train.{setting}")))
    code, err = interrupted(*words, cwd=home, record=home / "cut" / "log.jsonl", least=3, mark='"loss"')
    done = read_log(home / "cut")[-1]["step"]
    assert code == 130, err
    assert err.splitlines()[-1] == f"harness1: interrupted; the same command continues after step {done}"
    assert load_state(home / "cut" / STATE, dict) is not None
    ended = harness1(*words, "--json")
    steps = [line["step"] for line in read_log(home / "cut") if "loss" in line]
    assert steps == list(range(1, len(steps) + 1)), ended.err
    assert len(steps) > done >= 3


def test_a_student_plays_in_the_environment_that_it_was_trained_in_and_in_another_only_if_that_is_meant(
    harness1: Command, home: Path
) -> None:
    run = ["eval", WORLD, "--policy", "hf:student", "--limit", "1", "--split", "train", "--cache", "cache", "--json"]
    played = harness1(*run, "--no-view", "--out", "carried")
    assert played.code == 0, played.err
    assert "harness1: env of student: env.max_turns=4, " in played.err
    hashes = [next(read_episodes(home / name)).hashes for name in ("carried", "taught")]
    assert hashes[0].env == hashes[1].env == read_checkpoint(home / "student").env_hash
    assert hashes[0].counter == hashes[1].counter
    other = ("--set", "env.search.hits=3", "--set", "policy.format_retries=0")
    index = str(next((home / "cache").iterdir()))
    for command in (run, ["search", "Who founded it?", "--index", index, "--policy", "hf:student"]):
        refused = harness1(*command, "--out", "other", *OPTIONS, *other)
        complaint = refused.err.splitlines()[-1]
        assert (refused.code, refused.out) == (2, "")
        assert complaint.startswith("harness1: student was trained for another environment")
        assert "which differs in env.search.hits=3 (trained: 2). Without --config and --set" in complaint
        assert not (home / "other").exists()
    meant = harness1(*run, "--out", "other", *OPTIONS, *other, "--set", "machine.model.foreign=true")
    assert (meant.code, json.loads(meant.out)["scored"]) == (0, 1), meant.err
