"""Measure how much the log probabilities of sampler and trainer differ by their precisions, on the same weights.

The sampler decodes continuations of the beginning of lines of a text, several at a time, as episodes do; the trainer
computes their log probabilities by whole passes over padded rows, as in the first batch of RL, whose bounds
are `rl.gate`. `wrong` compares the outputs with rows whose prompts are those of others.

    python benchmarks/start_gate.py MODEL TEXT [--calls 16] [--prompt 256] [--tokens 64] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any, Literal

import msgspec

if not __package__:
    # Run as a script: its neighbours are found beside it.
    sys.path.insert(0, str(Path(__file__).parent.parent))

from harness1.config import Lora, Train
from harness1.models.backend import SampledOutput
from harness1.models.fetch import resolve_model
from harness1.models.tokenizer import open_tokenizer
from harness1.models.transformers_backend import open_transformers
from harness1.records import Sampling
from harness1.rl.logprobs import report_of
from harness1.rows.row import TrainRow
from harness1.training.algorithm import NegativeLogLikelihood
from harness1.training.trainable import load_trainable
from harness1.training.trainer import Trainer

SAMPLERS = ("float32", "bfloat16")
TRAINERS: tuple[Literal["float32", "bfloat16"], ...] = ("float32", "bfloat16")


def main() -> None:
    """Measure all pairs and print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder or a name")
    parser.add_argument("text", type=Path)
    parser.add_argument("--calls", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=256, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of an output")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    folder = resolve_model(asked.model)
    prompts = prompts_of(folder, asked)
    rows = {dtype: asyncio.run(sampled(folder, dtype, prompts, asked.tokens)) for dtype in SAMPLERS}
    found = []
    for dtype, rank in product(TRAINERS, (0, 32)):
        train = Train(dtype=dtype, lora=Lora(rank=rank), micro_tokens=4 * (asked.prompt + asked.tokens))
        trainer = Trainer(load_trainable(folder, train, "cpu", 1), NegativeLogLikelihood(), train, 1)
        for sampler in SAMPLERS:
            found.append({"sampler": sampler, "trainer": dtype, "rank": rank, **compared(trainer, rows[sampler])})
        moved = behind_others(rows["float32"])
        found.append({"sampler": "wrong", "trainer": dtype, "rank": rank, **compared(trainer, moved)})
        print(json.dumps(found[-3:]), file=sys.stderr, flush=True)
    if asked.json:
        print(json.dumps(found))
        return
    for each in found:
        print(
            f"{each['sampler']} sampled, {each['trainer']} trains, rank {each['rank']}: {each['tokens']} tokens,"
            f" largest difference {each['max_difference']:.3g}, mean k3 {each['mean_k3']:.3g}"
        )


def prompts_of(folder: Path, asked: argparse.Namespace) -> list[tuple[int, ...]]:
    """Return the first tokens of equal parts of a text."""
    ids = open_tokenizer(folder).encode(asked.text.read_text())
    parts = range(0, len(ids) - asked.prompt, max(1, (len(ids) - asked.prompt) // asked.calls))
    return [tuple(ids[start : start + asked.prompt]) for start in parts][: asked.calls]


async def sampled(folder: Path, dtype: Any, prompts: Sequence[tuple[int, ...]], tokens: int) -> list[TrainRow]:
    """Return what a sampler of one precision drew, as rows of reinforcement learning."""
    backend = open_transformers(folder, device="cpu", dtype=dtype, threads=1, rows=8, cache_tokens=0)

    async def one(at: int, prompt: tuple[int, ...]) -> TrainRow:
        out: SampledOutput = await backend.generate(prompt, Sampling(temperature=1.0, seed=at, max_tokens=tokens))
        known = (0.0,) * len(prompt) + out.output_logprobs
        mask = (0,) * len(prompt) + (1,) * len(out.output_ids)
        return TrainRow(prompt + out.output_ids, mask, rollout_logprobs=known)

    return list(await asyncio.gather(*[one(at, prompt) for at, prompt in enumerate(prompts)]))


def behind_others(rows: Sequence[TrainRow]) -> list[TrainRow]:
    """Return rows with the outputs of each after the prompt of the next, where prompts are equally long."""
    prompts = [row.token_ids[: row.loss_mask.index(1)] for row in rows]
    return [
        msgspec.structs.replace(row, token_ids=prompt + row.token_ids[len(prompt) :])
        for row, prompt in zip(rows, [*prompts[1:], prompts[0]], strict=True)
    ]


def compared(trainer: Trainer, rows: Sequence[TrainRow]) -> dict[str, float]:
    """Return the comparison of the recorded log probabilities with those of the trainer."""
    recorded = [
        value for row in rows for value, mask in zip(row.rollout_logprobs or (), row.loss_mask, strict=True) if mask
    ]
    report = report_of([value for row in trainer.logprobs(rows) for value in row], recorded)
    return {"tokens": report.tokens, "max_difference": report.max_difference, "mean_k3": report.mean_k3}


if __name__ == "__main__":
    main()
