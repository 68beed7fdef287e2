"""Measure the speed of fine-tuning adapters on this machine: tokens a second by the type of matrix products, by how
many layers have adapters and by the attention, in turns, on rows as long as those of episodes.

    python benchmarks/training_speed.py smollm2-135m [--threads 1] [--passes 3] [--rows 4] [--tokens 1100] [--json]

`gain` is the ratio to the first setting. Speeds are medians; each setting takes a step before it is measured.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from random import Random
from typing import Any

if not __package__:
    # Run as a script: its neighbours are found beside it.
    sys.path.insert(0, str(Path(__file__).parent.parent))

import msgspec

from harness1.config import Lora, Train
from harness1.models.fetch import resolve_model
from harness1.rows.row import TrainRow
from harness1.training.algorithm import make_algorithm
from harness1.training.trainable import load_trainable
from harness1.training.trainer import Trainer

TRAINED = 40
"""Trained tokens of a row: the calls of an episode."""


def measure(
    model: Path, threads: int, passes: int, rows: int, tokens: int, device: str = "cpu"
) -> list[dict[str, Any]]:
    """Return a row of the table for each setting."""
    trainers = {name: _trainer(model, train, threads, device) for name, train in _settings(model, tokens).items()}
    vocabulary = next(iter(trainers.values())).model.config.get_text_config().vocab_size
    batch = [_row(Random(seed), tokens, vocabulary) for seed in range(rows)]
    speeds: dict[str, list[float]] = {name: [] for name in trainers}
    for number in range(passes + 1):
        for name, trainer in trainers.items():
            begun = time.perf_counter()
            trainer.step(batch)
            if number:
                speeds[name].append(sum(len(row.token_ids) for row in batch) / (time.perf_counter() - begun))
    medians = {name: statistics.median(found) for name, found in speeds.items()}
    first = next(iter(medians.values()))
    return [{"setting": name, "tokens_per_s": speed, "gain": speed / first} for name, speed in medians.items()]


def _settings(model: Path, tokens: int) -> dict[str, Train]:
    layers = json.loads((model / "config.json").read_text())["num_hidden_layers"]
    half = layers // 2
    plain = Train(dtype="float32", attention="sdpa", micro_tokens=tokens, rate=1e-5, lora=Lora(rank=16))
    rounded = msgspec.structs.replace(plain, dtype="bfloat16")
    fewer = msgspec.structs.replace(rounded, lora=Lora(rank=16, layers=half))
    return {
        f"float32, adapters in {layers} layers": plain,
        f"bfloat16, adapters in {layers} layers": rounded,
        f"bfloat16, adapters in {half} layers": fewer,
        f"bfloat16, adapters in {half} layers, attention in blocks": msgspec.structs.replace(fewer, attention="auto"),
    }


def _trainer(model: Path, train: Train, threads: int, device: str) -> Trainer:
    return Trainer(load_trainable(model, train, device, threads), make_algorithm("nll"), train, steps=100)


def _row(rng: Random, tokens: int, vocabulary: int) -> TrainRow:
    """Return a row of 0.8 to 1.2 times as many tokens: rows of one length would flatter what caches shapes."""
    count = int(tokens * rng.uniform(0.8, 1.2))
    mask = (0,) * (count - TRAINED) + (1,) * TRAINED
    return TrainRow(tuple(rng.randrange(vocabulary) for _ in range(count)), mask)


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=1100)
    parser.add_argument("--json", action="store_true", dest="as_json")
    asked = parser.parse_args(arguments)
    found = measure(resolve_model(asked.model), asked.threads, asked.passes, asked.rows, asked.tokens)
    if asked.as_json:
        print(json.dumps(found))
    else:
        print("setting                            tokens a second   gain")
        for row in found:
            print(f"{row['setting']:34} {row['tokens_per_s']:15.1f} {row['gain']:6.2f}")
    return found


if __name__ == "__main__":
    main()
