"""Compare models on held-out turns, on the same prompts of a teacher's episodes, to see the effect of fine-tuning.

For each model, print the shares of greedy outputs that contain a valid action, that agree with the teacher in the tool,
and that agree in the whole action, with 95 % bootstrap intervals over turns; and the mean negative log likelihood of
the teacher's tokens.

    python benchmarks/held_out.py ROWS --model smollm2-135m --model CHECKPOINT [--turns N] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path
from typing import Any

if not __package__:
    # Run as a script: its neighbours are found beside it.
    sys.path.insert(0, str(Path(__file__).parent.parent))

from harness1.config import Lora, Train
from harness1.eval.statistics import bootstrap_mean
from harness1.models.causal_model import load_causal_model
from harness1.models.fetch import resolve_model
from harness1.models.transformers_backend import open_transformers
from harness1.rows.file import RowFile
from harness1.sft.data_card import HELD_OUT, read_card
from harness1.sft.student import Student
from harness1.tools.registry import Toolbox
from harness1.training.algorithm import NegativeLogLikelihood
from harness1.training.trainer import Trainer
from harness1.training.validation import held_out_turns, turn_results

RESAMPLES = 2000
METRICS = ("valid", "tool_agreement", "action_agreement")


def main() -> None:
    """Measure every model, and print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path, help="a folder made by `harness1 sft build`")
    parser.add_argument("--model", action="append", required=True)
    parser.add_argument("--turns", type=int, default=0, help="spread evenly over all; 0: all")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    found = {name: measured(asked.rows, resolve_model(name), asked.turns, asked.threads) for name in asked.model}
    if asked.json:
        print(json.dumps(found))
        return
    for name, result in found.items():
        shares = ", ".join(
            f"{metric} {result[metric]['mean']:.3f} ({result[metric]['low']:.3f} to {result[metric]['high']:.3f})"
            for metric in METRICS
        )
        print(f"{name}: {result['turns']} turns, {shares}, nll {result['nll']:.3f}", flush=True)


def measured(dataset: Path, folder: Path, limit: int, threads: int) -> dict[str, Any]:
    """Measure one model on the held-out rows of a dataset."""
    student = Student.of(folder, read_card(dataset))
    rows = RowFile(dataset / HELD_OUT)
    turns = held_out_turns(list(rows), limit or sys.maxsize)
    backend = open_transformers(folder, device="cpu", dtype="float32", threads=threads, rows=8, cache_tokens=65536)
    reserve = student.env.generation_reserve
    results = asyncio.run(turn_results(backend, student.chat, Toolbox.of(student.env), turns, reserve))
    intervals = {name: bootstrap_mean([each[name] for each in results], RESAMPLES) for name in METRICS}
    settings = Train(lora=Lora(rank=0), dtype="float32", micro_tokens=1)
    trainer = Trainer(load_causal_model(folder, "cpu", "float32"), NegativeLogLikelihood(), settings, 1)
    return {
        "turns": len(turns),
        "nll": trainer.loss(list(rows)),
        **{name: {"mean": each.mean, "low": each.low, "high": each.high} for name, each in intervals.items()},
    }


if __name__ == "__main__":
    main()
