"""harness1 models new: a small model to begin with where there is no other."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from harness1.cli.bars import read_aloud
from harness1.cli.datasets import place_of
from harness1.cli.options import Cache, ConfigFile, Force, IndexSpec, Json, Overrides, resolve
from harness1.cli.policies import POLICIES
from harness1.cli.printing import print_result, put, say
from harness1.data.indexing import index_of
from harness1.data.open import open_source
from harness1.training.new_model import SHAPE, NewModel, Shape, make_model


def new(
    dataset: Annotated[str, Argument(help="The dataset that its tokenizer is trained on.", metavar="DATASET")],
    out: Annotated[Path, Option(help="The model's folder.", metavar="MODEL")],
    teacher: Annotated[
        str, Option(help=f"The policy whose episodes it hears: {POLICIES}.", metavar="NAME")
    ] = NewModel.teacher,
    words: Annotated[int, Option(help="Tokens of the vocabulary.", min=256)] = SHAPE.words,
    width: Annotated[int, Option(help="Width of its layers.", min=8)] = SHAPE.width,
    layers: Annotated[int, Option(help="Number of layers.", min=1)] = SHAPE.layers,
    heads: Annotated[int, Option(help="Heads of attention; the width is divided among them.", min=1)] = SHAPE.heads,
    seed: Annotated[int, Option(help="Seed of the weights and of the teacher.")] = 0,
    index: IndexSpec = None,
    cache: Cache = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Draw a small model with random weights, and train its tokenizer on a dataset and a teacher's episodes.

    Example: harness1 models new world --out model --config micro
    """
    settings = resolve(config, overrides)
    place = place_of(dataset, settings)
    searched = index_of(open_source(place), index, cache, settings, read_aloud, say)
    shape = Shape(words, width, layers, heads)
    size = make_model(NewModel(place, searched, out, settings, teacher, shape, seed), force=force)
    print_result({"model": str(out), "vocabulary": size}, as_json, _print_made)


def _print_made(made: dict[str, str | int]) -> None:
    put(f"{made['model']}: a model with random weights and a vocabulary of {made['vocabulary']:,} tokens")
