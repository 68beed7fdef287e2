"""Measure the peak memory of a pass and its backward pass, by what the output head computes: the union of the trained
columns of all rows (`union`), as a selection of columns gives it, or the trained positions alone (`trained`), as
`harness1.training.micro_batch` does it.

Rows end at different columns, as those of episodes do. Each way runs in a process of its own, on a random model of two
layers with a large vocabulary. Positions are those that the head computes, per trained token.

    python benchmarks/micro_batch_memory.py [--rows 32] [--tokens 2048] [--trained 40] [--ends 8] [--json]
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

if not __package__:
    # Run as a script: its neighbours are found beside it.
    sys.path.insert(0, str(Path(__file__).parent.parent))

from harness1.models.causal_model import output_head
from harness1.rows.row import TrainRow
from harness1.training.micro_batch import MicroBatch, collate, trained_logprobs

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

MIB = 1 << 20
SHAPE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}


def main() -> None:
    """Measure both ways in child processes and print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=2048, help="of the longest row")
    parser.add_argument("--trained", type=int, default=40, help="the last tokens of a row")
    parser.add_argument("--ends", type=int, default=8, help="different columns at which rows end")
    parser.add_argument("--vocabulary", type=int, default=49152)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", choices=sorted(WAYS), help="measure one way in this process")
    asked = parser.parse_args()
    if asked.only:
        print(json.dumps(measured(asked)))
        return
    found: dict[str, Any] = {}
    for way in WAYS:
        child = subprocess.run(
            [sys.executable, __file__, *sys.argv[1:], "--only", way], capture_output=True, text=True, check=True
        )
        found[way] = json.loads(child.stdout)
    if asked.json:
        print(json.dumps(found))
        return
    for way, each in found.items():
        print(
            f"{way}: {each['tokens']} tokens, {each['trained']} trained,"
            f" {each['positions'] / each['trained']:.1f} positions for each, peak {each['peak_mib']:,.0f} MiB"
            f" ({each['before_mib']:,.0f} before the pass), {each['seconds']:.1f} s, loss {each['loss']:.6f}"
        )


def measured(asked: argparse.Namespace) -> dict[str, float]:
    """Return the peak memory of this process before and after one pass and its backward pass."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model("llama", vocab_size=asked.vocabulary, max_position_embeddings=asked.tokens, **SHAPE)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    batch = collate(rows(asked))
    computed: list[int] = []
    output_head(model).register_forward_hook(lambda _, given, _result: computed.append(given[0][..., 0].numel()))
    before, began = peak_mib(), time.perf_counter()
    loss = -WAYS[asked.only](model, batch).mean()
    loss.backward()  # type: ignore[no-untyped-call]
    return {
        "tokens": batch.ids.numel(),
        "trained": len(batch.targets),
        "positions": sum(computed),
        "before_mib": before,
        "peak_mib": peak_mib(),
        "seconds": time.perf_counter() - began,
        "loss": float(loss.detach()),
    }


def rows(asked: argparse.Namespace) -> list[TrainRow]:
    """Return random rows whose last tokens are trained; those that end alike are equally many."""
    random, found = Random(0), []
    for at in range(asked.rows):
        length = asked.tokens - asked.trained * (at * asked.ends // asked.rows)
        ids = tuple(random.randrange(asked.vocabulary) for _ in range(length))
        found.append(TrainRow(ids, (0,) * (length - asked.trained) + (1,) * asked.trained))
    return found


def union_logprobs(model: PreTrainedModel, batch: MicroBatch) -> Tensor:
    """Return the log probabilities of the trained tokens, from logits of every row at each column trained in any."""
    import torch

    columns, place = torch.unique(batch.column, return_inverse=True)
    made = model(input_ids=batch.ids, attention_mask=batch.attention, use_cache=False, logits_to_keep=columns)
    chosen = torch.log_softmax(made.logits[batch.row, place].float(), -1)
    return chosen.gather(-1, batch.targets[:, None])[:, 0]


def peak_mib() -> float:
    """Return the most memory that this process has held."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / MIB


WAYS = {"union": union_logprobs, "trained": trained_logprobs}


if __name__ == "__main__":
    main()
