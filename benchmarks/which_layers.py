"""Choose the layers of a language model to train a small student from: leave out one at a time, each time the one
without which the model predicts a text best.

    python benchmarks/which_layers.py smollm2-135m --texts $DATA/hotpotqa --layers 10 [--tokens 256]

Each line has the layers that are left and the mean negative log likelihood of a token, in nats. The last line's layers
go into `harness1 models convert --layers`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

if not __package__:
    # Run as a script: its neighbours are found beside it.
    sys.path.insert(0, str(Path(__file__).parent.parent))

from harness1.data.open import open_source
from harness1.models.causal_model import load_causal_model
from harness1.models.fetch import resolve_model
from harness1.models.tokenizer import open_tokenizer

DOCUMENTS = 40
"""Documents whose texts are joined; the tokens are the first of them."""


class Left(NamedTuple):
    """The layers that are left, and what a token then costs, in nats."""

    layers: list[int]
    nll: float


def main() -> None:
    """Print what is left after each removal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--texts", required=True, help="a dataset")
    parser.add_argument("--layers", type=int, required=True, help="layers to keep")
    parser.add_argument("--tokens", type=int, default=256)
    asked = parser.parse_args()
    folder = resolve_model(asked.model)
    texts = (document.text for document in islice(open_source(asked.texts).documents(), DOCUMENTS))
    ids = open_tokenizer(folder).encode("\n".join(texts))[: asked.tokens]
    for left in removals(load_causal_model(folder, "cpu", "float32"), ids, asked.layers):
        print(f"{len(left.layers)} layers, nll {left.nll:.3f}: {','.join(map(str, left.layers))}", flush=True)


def removals(model: Any, ids: Sequence[int], layers: int) -> Iterator[Left]:
    """Yield what is left after each removal, until so many layers are left. The first layer always stays: it reads the
    embeddings. The model's layers are changed in place."""
    whole = list(model.model.layers)
    left = Left(list(range(len(whole))), 0.0)
    while len(left.layers) > layers:
        without = ([each for each in left.layers if each != gone] for gone in left.layers[1:])
        left = min(
            (Left(kept, _nll(model, [whole[at] for at in kept], ids)) for kept in without), key=lambda it: it.nll
        )
        yield left


def _nll(model: Any, layers: Sequence[Any], ids: Sequence[int]) -> float:
    """Return the mean negative log likelihood of the tokens after the first, by a model of these layers."""
    import torch

    model.model.layers = torch.nn.ModuleList(layers)
    tokens = torch.tensor([list(ids)])
    with torch.no_grad():
        logits = model(tokens, use_cache=False).logits[0, :-1]
    return float(torch.nn.functional.cross_entropy(logits.float(), tokens[0, 1:]))


if __name__ == "__main__":
    main()
