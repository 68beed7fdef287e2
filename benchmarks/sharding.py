"""Compare processes that shard a model with one process that trains it whole: on the same random rows, for fine-tuning
and CISPO, with whole weights and with adapters.

Print the largest difference of a weight after some steps, the shares of weights and of the optimizer's moments that
each process holds, and the seconds of a step.

    torchrun --nproc-per-node 2 benchmarks/sharding.py MODEL [--steps 5] [--rows 8] [--tokens 128] [--json]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

if not __package__:
    # Run as a script: its neighbours are found beside it.
    sys.path.insert(0, str(Path(__file__).parent.parent))

from harness1.cli.launched import launched
from harness1.config import Lora, Train
from harness1.models.adapters import tensors_of
from harness1.models.fetch import resolve_model
from harness1.rows.row import TrainRow
from harness1.training.algorithm import Algorithm, NegativeLogLikelihood
from harness1.training.cispo import Cispo
from harness1.training.process_group import ALONE, ProcessGroup, joined_group
from harness1.training.trainable import load_trainable
from harness1.training.trainer import Trainer

VOCABULARY = 256
"""Random tokens have smaller ids."""
NLL = NegativeLogLikelihood()
CASES: dict[str, tuple[Algorithm, int]] = {
    "nll": (NLL, 0),
    "nll, adapters": (NLL, 32),
    "cispo": (Cispo(), 0),
    "cispo, adapters": (Cispo(), 32),
}
"""Algorithms, and the ranks of adapters."""


def main() -> None:
    """Measure every case in all processes; the first prints a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder or a name")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rows", type=int, default=8, help="per step")
    parser.add_argument("--tokens", type=int, default=128, help="of the longest row")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    model, found = resolve_model(asked.model), {}
    with joined_group(launched()) as group:
        for name, (algorithm, _) in CASES.items():
            made = (
                random_rows(asked.rows, asked.tokens, seed, played=algorithm is not NLL) for seed in range(asked.steps)
            )
            found[name] = compared(model, name, list(made), group)
    if not group.leads:
        return
    if asked.json:
        print(json.dumps(found))
        return
    for name, values in found.items():
        print(f"{name}: {', '.join(f'{key} {value:.3g}' for key, value in values.items())}")


def random_rows(count: int, tokens: int, seed: int, *, played: bool) -> list[TrainRow]:
    """Return rows of different lengths, trained in their second half, with advantages if they were `played`."""
    random, rows = Random(seed), []
    for at in range(count):
        length = tokens * (at + 1) // count
        mask = tuple(int(place >= length // 2) for place in range(length))
        ids = tuple(random.randrange(VOCABULARY) for _ in range(length))
        if not played:
            rows.append(TrainRow(ids, mask))
            continue
        known = tuple(each * random.uniform(-4.0, -2.0) for each in mask)
        rows.append(TrainRow(ids, mask, known, tuple(random.uniform(-1.0, 1.0) for _ in mask)))
    return rows


def compared(model: Path, name: str, batches: Sequence[list[TrainRow]], group: ProcessGroup) -> dict[str, float]:
    """Train sharded and whole; return the difference, what this process holds, and both times."""
    sharded, seconds = trained(model, name, batches, group)
    weights, (held, moments) = tensors_of(sharded.weights()), numbers_of(sharded)
    del sharded
    found = {}
    if group.leads:
        whole, alone = trained(model, name, batches, ALONE)
        expected, (all_held, all_moments) = tensors_of(whole.weights()), numbers_of(whole)
        differences = ((weights[each] - expected[each]).abs().max() for each in expected)
        found = {
            "difference": max(map(float, differences)),
            "weights": held / all_held,
            "moments": moments / all_moments,
        }
        found |= {"seconds": seconds, "seconds alone": alone}
    group.wait()
    return found


def trained(model: Path, name: str, batches: Sequence[list[TrainRow]], group: ProcessGroup) -> tuple[Trainer, float]:
    """Return a trainer after its steps, and the mean seconds of a step but the first."""
    algorithm, rank = CASES[name]
    tokens = max(len(row.token_ids) for row in batches[0])
    train = Train(rate=1e-4, epsilon=1e-6, lora=Lora(rank=rank), dtype="float32", micro_tokens=tokens)
    trainer = Trainer(load_trainable(model, train, "cpu", threads=1), algorithm, train, len(batches), group)
    trainer.step(batches[0])
    began = time.perf_counter()
    for rows in batches[1:]:
        trainer.step(rows)
    return trainer, (time.perf_counter() - began) / max(1, len(batches) - 1)


def numbers_of(trainer: Trainer) -> tuple[int, int]:
    """Return how many numbers of weights and of moments this process holds."""
    moments = (each for known in trainer.optimizer.state.values() for each in known.values() if each.ndim)
    return sum(map(local, trainer.model.parameters())), sum(map(local, moments))


def local(value: Any) -> int:
    """Return the elements of a tensor that this process holds."""
    held: int = value.to_local().numel() if hasattr(value, "to_local") else value.numel()
    return held


if __name__ == "__main__":
    main()
