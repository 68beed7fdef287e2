"""The whole way at once: a small random model learns 32 turns of a teacher by heart, and then acts like it."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean

import msgspec
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from harness1.config import Gates, Lora, Sft, Train, Validation, load_config
from harness1.data.open import open_source
from harness1.eval.evaluate import Evaluation, evaluate
from harness1.models.tokenizer import FastTokenizer
from harness1.records import Episode, Status
from harness1.retrieval.build import build_index
from harness1.reward.measures import measure_outcome
from harness1.rows import RowFile
from harness1.rows.calls import calls_of, prompt_ids
from harness1.runs.journal import read_episodes
from harness1.sft.build import Build, build
from harness1.sft.data_card import HELD_OUT, TRAIN, write_card
from harness1.sft.train import FineTuning, fine_tune
from harness1.training.log import read_log
from tests.tiny_models import save_tiny_model
from tests.vocabularies import CHATML, vocabulary

pytestmark = pytest.mark.training

WORLD = "world:60"
SOURCE = open_source(WORLD)
SHORT = (
    *("env.max_turns=4", "env.context_window=1024", "env.generation_reserve=160", "env.compression.sentences=1"),
    *("env.search.hits=2", "env.auto_populate.documents=2"),
    *("machine.workers=1", "machine.threads=1"),
)
CONFIG = load_config("sft/small", [*SHORT, "policy.format_retries=0", "machine.device=cpu", "machine.threads=1"])
TASKS = 9
ROWS = 32
"""At least so many turns does the teacher take in them."""
WORDS = 1200
"""Size of the vocabulary, without control tokens."""
WATCHED = 3
"""Tasks that are run before and after the training."""
BY_HEART = Train(
    epochs=22,
    batch_rows=4,
    micro_tokens=4096,
    rate=6e-3,
    schedule="cosine",
    warmup=0.05,
    lora=Lora(rank=0),
    dtype="float32",
    save_every=0,
    watch=Validation(every=0, rows=4, turns=8, tasks=WATCHED),
)
SEEN = ("valid", "tool_agreement", "action_agreement", "format_failures", "curated_recall", "set_size")
GOLDS = {task.task_id: task.gold for task in SOURCE.tasks("train")}
KNOWN = 0.01
"""Loss per token of a text that is known by heart: greedy sampling then says all of it."""


def played(policy: str, out: Path, index: Path, student: str = "") -> list[Episode]:
    """Episodes of the first training tasks, through the run folder that a user would get."""
    evaluate(
        Evaluation(WORLD, "train", SOURCE.tasks("train")[:TASKS], str(index), policy, CONFIG, student=student), out
    )
    return sorted(read_episodes(out), key=lambda episode: episode.task.task_id)


def save_tokenizer(folder: Path, texts: Iterable[str]) -> int:
    """A byte-level BPE of some texts, with the control tokens of ChatML; returns its size."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=WORDS, show_progress=False, initial_alphabet=alphabet)
    made.train_from_iterator(texts, trainer)
    made.add_special_tokens(list(CHATML))
    folder.mkdir(parents=True)
    made.save(str(folder / "tokenizer.json"))
    return made.get_vocab_size()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder with an index, and a random model whose tokenizer learned the teacher's words."""
    home = tmp_path_factory.mktemp("overfitting")
    build_index(SOURCE.documents(), home / "index", CONFIG.index)
    (home / "any").mkdir()
    (home / "any" / "tokenizer.json").write_bytes(vocabulary("chatml"))
    heard, tokenizer = played("oracle-teacher", home / "heard", home / "index", str(home / "any")), vocabulary("chatml")
    texts = (
        FastTokenizer(tokenizer).decode([*prompt_ids(episode, call), *call.output_ids])
        for episode in heard
        for call in calls_of(episode)
    )
    shape = {"num_key_value_heads": 4, "intermediate_size": 128, "max_position_embeddings": CONFIG.env.context_window}
    size = save_tokenizer(home / "model", texts)
    save_tiny_model(home / "model", vocab_size=size, initializer_range=0.2, **shape)
    return home


@pytest.fixture(scope="module")
def taught(home: Path) -> list[Episode]:
    return played("oracle-teacher", home / "taught", home / "index", str(home / "model"))


@pytest.fixture(scope="module")
def student(home: Path, taught: list[Episode]) -> Path:
    assert {episode.status for episode in taught} == {Status.COMPLETED}
    rows = home / "rows"
    card = build(Build([home / "taught"], Sft(gates=Gates(recall=0.0, near=1.0), held_out=0.0)), rows)
    assert len(RowFile(rows / TRAIN)) >= ROWS
    shutil.copyfile(rows / TRAIN, rows / HELD_OUT)
    tasks = tuple(episode.task.task_id for episode in taught)
    write_card(msgspec.structs.replace(card, held_out_tasks={SOURCE.name: tasks}), rows)
    config = msgspec.structs.replace(CONFIG, train=BY_HEART)
    fine_tune(FineTuning(rows, home / "model", home / "student", config), lambda _step, _steps, _values: None)
    return home / "student"


def test_a_model_that_knows_32_turns_by_heart_repeats_them(home: Path, student: Path, taught: list[Episode]) -> None:
    repeated = played(f"hf:{student}", home / "repeated", home / "index")
    for episode, shown in zip(repeated, taught, strict=True):
        turns = [(turn.parse_error, turn.observation and turn.observation.error) for turn in episode.turns]
        assert turns == [(None, None)] * len(shown.turns)
        assert episode.status is Status.COMPLETED
        assert [turn.action for turn in episode.turns] == [turn.action for turn in shown.turns]
        assert [call.output_ids for call in calls_of(episode)] == [call.output_ids for call in calls_of(shown)]


def test_the_watch_saw_it_come(student: Path, taught: list[Episode]) -> None:
    lines = read_log(student)
    losses = [line["loss"] for line in lines if "loss" in line]
    before, after = ([line.get(f"held_out/{name}") for name in SEEN] for line in lines if "loss" not in line)
    assert losses[0] > 5
    assert max(losses[-ROWS // BY_HEART.batch_rows :]) < KNOWN
    results = [measure_outcome(episode, GOLDS[episode.task.task_id]) for episode in taught[:WATCHED]]
    recall, size = fmean(each.recall for each in results), fmean(each.set_size for each in results)
    assert before == [0.0, 0.0, 0.0, 1.0, 0.0, 0.0]
    assert after == [1.0, 1.0, 1.0, 0.0, pytest.approx(recall), pytest.approx(size)]
