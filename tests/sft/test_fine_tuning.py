"""A dataset and a model in, a checkpoint out: resumed, watched, stopped early, and refused before any hour is spent."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from harness1.config import Gates, Lora, Sft, Train, Validation, load_config
from harness1.data.open import open_source
from harness1.engines.loop import STATE
from harness1.errors import UsageError
from harness1.eval.evaluate import Evaluation, evaluate
from harness1.model_folder import folder_hash
from harness1.models.checkpoint import CHECKPOINT, read_checkpoint
from harness1.policy.registry import open_model
from harness1.retrieval.build import build_index
from harness1.rows import RowFile
from harness1.runs.files import STAGE, clear, read_stage
from harness1.sft.build import Build, build
from harness1.sft.data_card import CARD, HELD_OUT, README, TRAIN, read_card
from harness1.sft.train import VERB, FineTuning, fine_tune, space_evenly
from harness1.training.algorithm import NegativeLogLikelihood
from harness1.training.log import LOG, read_log
from harness1.training.saving import load_state
from harness1.training.trainable import load_trainable
from harness1.training.trainer import Trainer
from tests.tiny_models import save_tiny_model
from tests.vocabularies import tokenizer, vocabulary

WORLD = "world:60"
SMALL = "sft/small"
SHORT = (
    *("env.max_turns=4", "env.context_window=1536", "env.generation_reserve=64", "env.compression.sentences=1"),
    *("env.search.hits=2", "env.auto_populate.documents=2", "machine.workers=1"),
    *("machine.device=cpu", "machine.threads=1"),
)
CONFIG = load_config(SMALL, [*SHORT])
SFT = Sft(gates=Gates(recall=0.0, near=1.0), rows="epoch", held_out=0.3)
QUICK = Train(
    epochs=3,
    batch_rows=2,
    micro_tokens=4096,
    rate=1e-3,
    schedule="constant",
    lora=Lora(rank=0),
    dtype="float32",
    save_every=2,
    watch=Validation(every=2, rows=2, turns=2),
)
NLL = "held_out/nll"


class Place(NamedTuple):
    model: Path
    rows: Path
    indexed: Path


def save_student(folder: Path, kind: str = "chatml", **settings: Any) -> Path:
    """A random model of two small layers, with a tokenizer that knows the words of prompts."""
    folder.mkdir(parents=True)
    (folder / "tokenizer.json").write_bytes(vocabulary(kind))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    size = max(tokenizer(kind).control.values()) + 1
    return save_tiny_model(folder, **{"vocab_size": size, "max_position_embeddings": 2048, **shape, **settings})


def save_rows(home: Path, model: Path, tasks: int = 6) -> Place:
    source = open_source(WORLD)
    build_index(source.documents(), home / "index", CONFIG.index)
    chosen = source.tasks("train")[:tasks]
    teaching = Evaluation(
        WORLD, "train", chosen, str(home / "index"), "oracle-teacher", CONFIG, student=str(model.resolve())
    )
    evaluate(teaching, home / "taught")
    build(Build([home / "taught"], SFT), home / "rows")
    return Place(model, home / "rows", home / "index")


def tuning(place: Place, out: Path, train: Train = QUICK, **changes: Any) -> FineTuning:
    config = msgspec.structs.replace(CONFIG, train=train)
    return FineTuning(**{"dataset": place.rows, "model": place.model, "out": out, "config": config, **changes})


def silent(step: int, steps: int, values: Mapping[str, float]) -> None:
    pass


def interrupt_at(stop: int) -> Callable[[int, int, Mapping[str, float]], None]:
    def listen(step: int, steps: int, values: Mapping[str, float]) -> None:
        if step == stop and "loss" in values:
            raise KeyboardInterrupt

    return listen


def timeless(out: Path) -> list[dict[str, Any]]:
    return [{name: value for name, value in line.items() if name != "seconds"} for line in read_log(out)]


def looks(out: Path) -> dict[int, float]:
    return {line["step"]: line[NLL] for line in read_log(out) if NLL in line}


def held_out_loss(model: Path, place: Place) -> float:
    trainer = Trainer(load_trainable(model, QUICK, "cpu"), NegativeLogLikelihood(), QUICK, 1)
    return trainer.loss(space_evenly(RowFile(place.rows / HELD_OUT), QUICK.watch.rows))


@pytest.fixture(scope="module")
def trained(place: Place, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("trained") / "out"
    fine_tune(tuning(place, out), silent)
    return out


def test_a_checkpoint_is_complete_and_says_what_it_is(place: Place, trained: Path) -> None:
    assert {path.name for path in trained.iterdir()} == {
        *("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"),
        *(CHECKPOINT, f"data_{CARD}", f"data_{README}", LOG, STAGE, "state"),
    }
    card, found, stage = read_card(place.rows), read_checkpoint(trained), read_stage(trained)
    made_with = ("compact", card.format_hash, card.env, card.env_hash)
    assert (found.format, found.counter, found.env, found.env_hash) == made_with
    assert (found.base, found.train["rate"]) == (folder_hash(place.model), QUICK.rate)
    assert (stage.verb, stage.status) == ("sft train", "finished")
    assert found.origins == ("unknown:index", "unknown:model", WORLD)  # no card tells of index and model
    assert read_stage(place.rows).origins == ("unknown:index", WORLD)
    assert stage.outputs == {"step": found.step, "metrics": found.metrics}
    assert (trained / f"data_{CARD}").read_bytes() == (place.rows / CARD).read_bytes()
    assert open_model(f"hf:{trained}", CONFIG).name == f"hf:{trained}"


def test_the_log_has_each_step_once_and_each_look(place: Place, trained: Path) -> None:
    steps = 3 * -(-len(RowFile(place.rows / TRAIN)) // QUICK.batch_rows)
    lines = read_log(trained)
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, steps + 1))
    assert {"loss", "gradient", "rate", "tokens", "seconds", "trained_tokens"} <= lines[1].keys()
    watched = [line for line in lines if "loss" not in line]
    assert [line["step"] for line in watched] == list(range(0, steps + 1, 2))
    names = {"nll", "valid", "tool_agreement", "action_agreement"}
    assert all(line.keys() == {"step", *(f"held_out/{name}" for name in names)} for line in watched)
    assert looks(trained)[steps] < looks(trained)[0]


@pytest.mark.parametrize(("rank", "stops"), [(2, [3]), (0, [2, 5])])
def test_an_interrupted_training_ends_as_if_it_had_not_been(
    place: Place, trained: Path, tmp_path: Path, rank: int, stops: list[int]
) -> None:
    train = msgspec.structs.replace(QUICK, lora=Lora(rank=rank))
    whole = trained
    if rank:
        whole = tmp_path / "whole"
        fine_tune(tuning(place, whole, train), silent)
    work = tuning(place, tmp_path / "cut", train)
    for stop in stops:
        with pytest.raises(KeyboardInterrupt):
            fine_tune(work, interrupt_at(stop))
        assert (read_stage(work.out).status, work.is_done()) == ("interrupted", False)
    begun: list[int] = []
    done = fine_tune(work, lambda step, _steps, _values: begun.append(step))
    assert begun[0] == stops[-1]
    assert work.is_done()
    saved = "adapter_model.safetensors" if rank else "model.safetensors"
    weights, wanted = (load_file(out / saved) for out in (work.out, whole))
    torch.testing.assert_close(weights, wanted, rtol=0, atol=1e-5)
    assert done == read_checkpoint(work.out)
    card = read_checkpoint(whole)
    assert done.step == card.step
    assert done.metrics == pytest.approx(card.metrics, abs=1e-5)
    assert len(timeless(work.out)) == len(timeless(whole))
    for line, other in zip(timeless(work.out), timeless(whole), strict=True):
        assert line == pytest.approx(other, abs=1e-5)


def test_a_finished_training_is_left_alone_and_another_refused(place: Place, trained: Path, tmp_path: Path) -> None:
    other = msgspec.structs.replace(QUICK, epochs=1)
    assert not tuning(place, trained, other).is_done()
    assert not tuning(place, trained, trainer="trl").is_done()
    assert not tuning(place, trained.parent / "nothing").is_done()
    out = Path(shutil.copytree(trained, tmp_path / "out"))
    assert tuning(place, out).is_done()
    assert fine_tune(tuning(place, out), interrupt_at(1)) == read_checkpoint(trained)
    with pytest.raises(UsageError, match=r"another training .*differs in train.*--force"):
        fine_tune(tuning(place, out, other), silent)
    for name in ("model.safetensors", LOG, STAGE, CHECKPOINT):
        assert (out / name).read_bytes() == (trained / name).read_bytes()
    clear(out, VERB, "*")
    assert (fine_tune(tuning(place, out, other), silent).train["epochs"], max(looks(out))) == (1, 2)


def test_a_folder_with_something_else_is_never_touched(place: Place, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    for step in (lambda: fine_tune(tuning(place, tmp_path), silent), lambda: clear(tmp_path, VERB, "*")):
        with pytest.raises(UsageError, match="holds nothing of `harness1 sft train`: choose another --out"):
            step()
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_without_held_out_rows_the_last_weights_are_the_checkpoint(place: Place, tmp_path: Path) -> None:
    rows = Path(shutil.copytree(place.rows, tmp_path / "rows"))
    (rows / HELD_OUT).write_bytes(b"")
    train = msgspec.structs.replace(QUICK, epochs=1, save_every=0)
    done = fine_tune(tuning(place, tmp_path / "out", train, dataset=rows), silent)
    assert (done.step, done.metrics, len(read_log(tmp_path / "out"))) == (2, {}, 2)
    state = load_state(tmp_path / "out" / STATE, dict)
    last = Trainer(load_trainable(place.model, QUICK, "cpu"), NegativeLogLikelihood(), QUICK, 2)
    last.load((tmp_path / "out" / STATE).parent, state["trainer"])
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(written[name], weight) for name, weight in last.model.named_parameters())


def test_a_listener_hears_everything_that_is_logged_and_the_tokens_within_a_step(place: Place, tmp_path: Path) -> None:
    told: list[str] = []
    heard: list[tuple[int, int, dict[str, float]]] = []
    work = tuning(place, tmp_path, msgspec.structs.replace(QUICK, epochs=1))
    fine_tune(work, lambda step, steps, values: heard.append((step, steps, dict(values))), on_part=told.append)
    (begin, *rest), steps = heard, heard[0][1]
    assert begin == (0, 2, {})
    assert [{"step": step, **values} for step, of, values in rest if of == steps] == read_log(tmp_path)
    assert told[0] == "measuring on held-out tasks"
    within = [re.fullmatch(r"([\d,]+) of ([\d,]+) tokens of step 1", each) for each in told]
    last = [each for each in within if each][-1]
    assert last[1] == last[2]


def test_a_checkpoint_is_trained_further_and_gets_its_own_cards(place: Place, trained: Path, tmp_path: Path) -> None:
    base = Path(shutil.copytree(trained, tmp_path / "base"))
    (base / f"data_{CARD}").write_text("{}")
    done = fine_tune(tuning(place, tmp_path / "out", msgspec.structs.replace(QUICK, epochs=1), model=base), silent)
    assert done.base == folder_hash(trained) == folder_hash(base)
    assert (tmp_path / "out" / f"data_{CARD}").read_bytes() == (place.rows / CARD).read_bytes()
    assert read_log(tmp_path / "out")[0][NLL] == pytest.approx(min(looks(trained).values()), abs=1e-5)


def test_trl_trains_a_checkpoint_that_loads(place: Place, tmp_path: Path) -> None:
    train = msgspec.structs.replace(QUICK, epochs=1, watch=Validation(every=1, rows=2, turns=0))
    heard: list[tuple[int, int]] = []
    work = tuning(place, tmp_path, train, trainer="trl")
    done = fine_tune(work, lambda step, steps, _values: heard.append((step, steps)))
    assert work.is_done()
    assert heard[0] == (0, 2)
    assert heard[-1] == (2, 2)
    assert (done.step, list(done.metrics)) == (2, ["nll"])
    assert done.metrics["nll"] == pytest.approx(held_out_loss(tmp_path, place), abs=1e-6)
    assert [line["step"] for line in read_log(tmp_path) if "loss" in line] == [1, 2]
    assert [line["step"] for line in read_log(tmp_path) if "eval_loss" in line] == [1, 2]
    assert (tmp_path / f"data_{CARD}").read_bytes() == (place.rows / CARD).read_bytes()
    assert open_model(f"hf:{tmp_path}", CONFIG).name == f"hf:{tmp_path}"
    assert held_out_loss(tmp_path, place) < held_out_loss(place.model, place)


def test_what_training_reads_is_never_written_over(place: Place, trained: Path) -> None:
    files = {path: path.read_bytes() for path in trained.iterdir() if path.is_file()}
    for work in (tuning(place, trained, model=trained), tuning(place, place.rows), tuning(place, place.rows.parent)):
        with pytest.raises(UsageError, match="is an input, and is inside --out: choose another --out"):
            fine_tune(work, silent)
    assert files == {path: path.read_bytes() for path in trained.iterdir() if path.is_file()}


def test_a_limit_of_steps_ends_a_training_and_its_schedule(place: Place, tmp_path: Path) -> None:
    train = msgspec.structs.replace(QUICK, max_steps=3, schedule="linear")
    done = fine_tune(tuning(place, tmp_path, train), silent)
    rates = [line["rate"] for line in read_log(tmp_path) if "loss" in line]
    assert rates == pytest.approx([QUICK.rate * share for share in (1, 2 / 3, 1 / 3)])
    assert done.step <= 3


def test_a_limit_of_steps_is_rounded_up_to_whole_batches() -> None:
    def batches(*settings: str) -> int:
        return load_config(None, ["rl.batches=80", "rl.substeps=4", *settings]).batches

    assert [batches(), *(batches(f"train.max_steps={most}") for most in (1, 4, 5, 1000))] == [80, 1, 1, 2, 80]
