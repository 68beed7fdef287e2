"""Report the results of training: the runs of `scripts/gpu_train.sh` in one table, and the use of the machine.

The tables show systems on the test splits with 95 % bootstrap intervals over tasks; and for each training run the
minutes, the tokens per second of its optimizer steps, and their share of the chip's peak, at 6 N floating point
operations per token (4 N if the N weights are frozen, with adapters); the output head counts only for trained tokens.

    python benchmarks/training_report.py RUNS [--peak TFLOPS] [--json]
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import msgspec

if not __package__:
    # Run as a script: its neighbours are found beside it.
    sys.path.insert(0, str(Path(__file__).parent.parent))

from harness1.runs.folder import METRICS
from harness1.runs.stage import read_stage
from harness1.training.log import read_log
from harness1.training.saving import parameters_of

SHOWN = ("curated_recall", "curated_precision", "set_size", "reward")


def main() -> None:
    """Print the tables, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, help="the --out of scripts/gpu_train.sh")
    parser.add_argument("--peak", type=float, default=0.0, help="of the chip, in TFLOPS; 0: not known")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    found = {
        "systems": {folder.name.removeprefix("eval-"): system(folder) for folder in sorted(asked.runs.glob("eval-*"))},
        "trainings": {name: training(asked.runs / name, asked.peak) for name in ("sft", "rl")},
    }
    if asked.json:
        print(json.dumps(found))
        return
    for name, metrics in found["systems"].items():
        values = ", ".join(
            f"{metric} {each['mean']:.3f} ({each['low']:.3f} to {each['high']:.3f})" for metric, each in metrics.items()
        )
        print(f"{name}: {values}")
    for name, speed in found["trainings"].items():
        print(f"{name}: " + ", ".join(f"{metric} {value:.3g}" for metric, value in speed.items()))


def system(folder: Path) -> dict[str, Any]:
    """Return the measurements of an evaluation."""
    metrics = msgspec.json.decode((folder / METRICS).read_bytes())
    return {name: metrics[name] for name in SHOWN if metrics.get(name, {}).get("mean") is not None}


def head_of(folder: Path) -> int:
    """Return the number of weights of a model's output head, which may be its embeddings."""
    shape = msgspec.json.decode((folder / "config.json").read_bytes())
    return int(shape["vocab_size"]) * int(shape["hidden_size"])


def training(folder: Path, peak: float) -> dict[str, float]:
    """Return the speed of a training run, from its log."""
    lines = [line for line in read_log(folder) if "loss" in line]
    stage = read_stage(folder)
    train = stage.inputs["train"] if stage is not None else {}
    head = head_of(folder)
    body = parameters_of(folder) - head
    steps = sum(line.get("train_seconds", line["seconds"]) for line in lines)
    tokens = sum(line["tokens"] for line in lines)
    trained = sum(line["trained_tokens"] for line in lines)
    each = 4 if train.get("lora", {}).get("rank") else 6
    operations = each * (body * tokens + head * trained) / max(steps, 1e-9)
    return {
        "minutes": sum(line["seconds"] for line in lines) / 60,
        "minutes_of_steps": steps / 60,
        "tokens_per_second": tokens / max(steps, 1e-9),
        "tflops": operations / 1e12,
        **({"share_of_peak": operations / 1e12 / peak} if peak else {}),
    }


if __name__ == "__main__":
    main()
