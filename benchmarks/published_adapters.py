"""Measure what reaches the sampler and the disk of what bfloat16 adapters learned, and what merging loses.

    python benchmarks/published_adapters.py MODEL DATASET [--steps 160] [--rate 1e-5] [--json]

MODEL is trained on the first documents of DATASET in small steps. The loss on these documents is then computed by the
trainer, by the attention of the sampler (in bfloat16, adapters beside the weights), by the checkpoint loaded again, and
by weights that the adapters were merged into in bfloat16.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from harness1.config import Lora, Train
from harness1.data.open import open_source
from harness1.model_folder import folder_hash
from harness1.models.adapters import merge_adapters
from harness1.models.causal_model import load_causal_model
from harness1.models.checkpoint import Checkpoint
from harness1.models.fetch import resolve_model
from harness1.models.slots import KvSlots, SlotModel, SlotPass
from harness1.models.tokenizer import open_tokenizer
from harness1.rows.row import TrainRow
from harness1.training.algorithm import make_algorithm
from harness1.training.merging import rounding_loss
from harness1.training.saving import write_model
from harness1.training.trainable import load_trainable
from harness1.training.trainer import Trainer


def main() -> None:
    """Train, measure in four ways, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("dataset")
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--rate", type=float, default=1e-5)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64, help="tokens of a row")
    parser.add_argument("--batch", type=int, default=2, help="rows of a step")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    base = resolve_model(asked.model)
    train = Train(rate=asked.rate, lora=Lora(), dtype="bfloat16", schedule="constant", batch_rows=asked.batch)
    rows = text_rows(base, asked.dataset, asked.rows, asked.tokens)
    with tempfile.TemporaryDirectory() as folder:
        found = measured(base, rows, train, asked.steps, Path(folder))
    print(json.dumps(found) if asked.json else "\n".join(f"{name}: {value:.5f}" for name, value in found.items()))


def text_rows(model: Path, dataset: str, count: int, tokens: int) -> list[TrainRow]:
    """Return the beginnings of a dataset's first documents of at least `tokens` tokens as rows of equal length."""
    tokenizer = open_tokenizer(model)
    encoded = (tuple(tokenizer.encode(document.text))[:tokens] for document in open_source(dataset).documents())
    whole = (ids for ids in encoded if len(ids) == tokens)
    return [TrainRow(ids, (0, *[1] * (tokens - 1))) for ids in islice(whole, count)]


def measured(base: Path, rows: Sequence[TrainRow], train: Train, steps: int, out: Path) -> dict[str, float]:
    """Train on rows and return the mean loss per token, in nats, before and after, by each way to the weights."""
    trainer = Trainer(load_trainable(base, train, "cpu"), make_algorithm("nll"), train, steps)
    plain = load_causal_model(base, "cpu", "bfloat16")
    found = {"start": trainer.loss(rows), "start_sampler": sampled_loss(plain, rows)}
    for step in range(steps):
        places = [(step * train.batch_rows + at) % len(rows) for at in range(train.batch_rows)]
        trainer.step([rows[place] for place in places])
        if step % 20 == 19:
            print(f"step {step + 1}: {trainer.loss(rows):.4f}", file=sys.stderr, flush=True)
    found["trainer"] = trainer.loss(rows)
    card = Checkpoint(format="hermes", counter="", env={}, env_hash="", base=folder_hash(base))
    write_model(out, trainer.model, trainer.weights(), base, card)
    again = Trainer(load_trainable(out, train, "cpu"), make_algorithm("nll"), train, 1)
    found["reloaded"] = again.loss(rows)
    found["sampler"] = sampled_loss(load_causal_model(out, "cpu", "bfloat16"), rows)
    found["rounding_lost"] = rounding_loss(trainer.model, "bfloat16").total
    merge_adapters(again.model)
    found["merged_bfloat16"] = again.loss(rows)
    learned = found["start"] - found["trainer"]
    return found | {"lost_by_merging": (found["merged_bfloat16"] - found["trainer"]) / learned}


def sampled_loss(model: Any, rows: Sequence[TrainRow]) -> float:
    """Return the mean loss of rows of equal length under the attention that samples, one token of each at a time."""
    import torch

    slots, slot_model, total = KvSlots(len(rows)), SlotModel(model), 0.0
    length = len(rows[0].token_ids)
    for at in range(length - 1):
        one_pass = SlotPass(slots, 0, [at] * len(rows), 1, slot_model.device)
        logprobs = slot_model.logits([[row.token_ids[at]] for row in rows], one_pass).log_softmax(-1)
        wanted = torch.tensor([[row.token_ids[at + 1]] for row in rows])
        total -= float(logprobs.gather(-1, wanted).sum())
    return total / (len(rows) * (length - 1))


if __name__ == "__main__":
    main()
