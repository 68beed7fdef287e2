"""Draws a small model with random weights, whose tokenizer is trained on a dataset's documents, on the words of its
questions, and on episodes of a teacher over it."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from harness1.config import Config
from harness1.data.open import open_source
from harness1.data.origins import origins_of_source, searched_origins, united
from harness1.data.source import Source
from harness1.errors import optional
from harness1.eval.evaluate import Evaluation, evaluate
from harness1.model_folder import folder_hash
from harness1.models.spec import policy_origins
from harness1.models.tokenizer import CONTROL, open_tokenizer, save_tokenizer
from harness1.records import Record
from harness1.rows.calls import calls_of, prompt_ids
from harness1.runs.files import Stage, clear, read_stage, refuse_other, under_way
from harness1.runs.journal import read_episodes

VERB, TRAIN = "models new", "train"
HEARD = 300  # number of episodes whose texts, with the documents, train the vocabulary
WIDE = 16384  # a context window for a vocabulary of bytes
ALONE = 30  # times that the tokenizer is trained on each single word of the questions, because queries use them
_WORK = ".heard"  # the folder of the teacher's episodes meanwhile; nothing below it counts as a model's file


class Shape(Record):
    """The size of a model of Llama's architecture; `words` are the tokens beyond the control tokens."""

    words: int = 8192
    width: int = 128
    layers: int = 3
    heads: int = 4


SHAPE = Shape()


@dataclass(frozen=True)
class NewModel:
    """The making of a model."""

    dataset: str
    index: str
    out: Path
    config: Config
    teacher: str = "silent:mixed:0.85"
    shape: Shape = SHAPE
    seed: int = 0


def make_model(work: NewModel, *, force: bool = False) -> int:
    """Write the model, if that is not done yet; return the size of its vocabulary; raise UsageError if the dataset has
    no training tasks, or the folder holds something else; MissingExtra as `draw`."""
    source = open_source(work.dataset)
    inputs = {"source": source.fingerprint, "teacher": work.teacher, "seed": work.seed}
    inputs |= {"shape": msgspec.to_builtins(work.shape), "env": work.config.env.plain()}
    heard = united(searched_origins(work.index), policy_origins(work.teacher))
    stage = Stage(VERB, inputs, origins=united(origins_of_source(source), heard))
    if not force:
        refuse_other(stage, work.out, "model")
        if stage.is_done(work.out) and (found := read_stage(work.out)) is not None:
            return int(found.outputs["vocabulary"])
    clear(work.out, VERB, "*.json", "*.safetensors", _WORK, keep_card=True)
    with under_way(stage, work.out):
        size = draw(work.out, collect_texts(work, source, work.out / _WORK), work.shape, work.config, work.seed)
        shutil.rmtree(work.out / _WORK)
        stage.write(work.out, status="finished", outputs={"vocabulary": size, "model": folder_hash(work.out)})
    return size


def draw(folder: Path, texts: Sequence[str], shape: Shape, config: Config, seed: int) -> int:
    """Train a tokenizer on texts and draw weights, with room for the context window; return the vocabulary's size."""
    with optional("train"):
        from transformers import AutoConfig, AutoModelForCausalLM, set_seed

    size = save_tokenizer(folder, texts, shape.words)
    control = {name: size - len(CONTROL) + at for at, name in enumerate(CONTROL)}
    set_seed(seed)
    llama = AutoConfig.for_model(
        "llama",
        vocab_size=size,
        hidden_size=shape.width,
        intermediate_size=2 * shape.width,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        max_position_embeddings=config.env.context_window,
        rope_theta=10000.0,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=control["<|im_end|>"],
        pad_token_id=control["<|endoftext|>"],
    )
    AutoModelForCausalLM.from_config(llama).save_pretrained(folder)  # type: ignore[no-untyped-call]
    return size


def collect_texts(work: NewModel, source: Source, folder: Path) -> list[str]:
    """Return the texts of the teacher's first episodes, rendered in bytes in a wide window, the documents, and the
    words of the questions. `folder` gets the tokenizer of bytes and the episodes."""
    in_bytes = folder / "bytes"
    save_tokenizer(in_bytes, [], 256)
    env = msgspec.structs.replace(work.config.env, context_window=WIDE)
    config = msgspec.structs.replace(work.config, env=env)
    tasks = source.tasks(TRAIN)
    played = work.dataset, TRAIN, tasks[:HEARD], work.index, work.teacher, config, 1, work.seed
    evaluate(Evaluation(*played, student=str(in_bytes)), folder / "heard")
    tokenizer, heard = open_tokenizer(in_bytes), []
    for episode in read_episodes(folder / "heard"):
        last = list(calls_of(episode))[-1]  # under the `epoch` order, its prompt contains earlier ones
        text = tokenizer.decode([*prompt_ids(episode, last), *last.output_ids])
        heard.append(re.sub("|".join(map(re.escape, CONTROL)), "\n", text))
    documents = (f"{document.title}\n{document.text}" for document in source.documents())
    asked = {word for task in tasks for word in task.query.split() if word.islower()}
    return [*heard, *documents, *(f"E1 {word}\n" for word in sorted(asked) for _ in range(ALONE))]
