"""What reaches the sampler and the disk of what bfloat16 adapters learned, and what merging loses."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness1.config import Train
from harness1.model_folder import folder_hash
from harness1.models.adapters import merge_adapters
from harness1.models.causal_model import load_causal_model
from harness1.models.checkpoint import Checkpoint
from harness1.models.slots import KvSlots, SlotModel, SlotPass
from harness1.rows import TrainRow
from harness1.training.algorithm import make_algorithm
from harness1.training.saving import write_model
from harness1.training.trainable import load_trainable, rounding_loss
from harness1.training.trainer import Trainer


def measure_losses(base: Path, rows: Sequence[TrainRow], train: Train, steps: int, out: Path) -> dict[str, float]:
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
