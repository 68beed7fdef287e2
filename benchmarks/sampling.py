"""Measure sampling from a model in bfloat16 beside the same with a float32 copy of the whole output head in each pass.

Rows play turns as episodes do: a prompt that shares a beginning with all others, a short output, then observations.
Both ways take turns in one process and must sample the same tokens. Times are the processor's, which other load
disturbs less than those of a clock; they compare ways with equal threads.

    python benchmarks/sampling.py MODEL [--rows N] [--turns N] [--rounds N] [--threads N] [--json]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

if not __package__:
    # Run as a script: its neighbours are found beside it.
    sys.path.insert(0, str(Path(__file__).parent.parent))

from harness1.models import causal_model, decoding
from harness1.models.decoding import Decoder, DecodingRow, DecodingStats
from harness1.models.slots import SlotModel
from harness1.records import Sampling

SHARED, QUESTION, OBSERVATION, OUTPUT = 200, 60, 220, 12
"""Tokens of the beginning of all prompts, of a question, of each turn's observation, and of each output."""
WHOLE = 2**31
"""More rows than any output head has."""


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure and print; return what `--json` prints."""
    import torch

    options = _options(arguments)
    torch.set_num_threads(options.threads)
    model = SlotModel(causal_model.load_causal_model(options.model, "cpu", "bfloat16"))
    times: dict[str, list[DecodingStats]] = {"whole": [], "blocks": []}
    for _ in range(options.rounds):
        sampled = []
        for way, rows in (("whole", WHOLE), ("blocks", causal_model.HEAD_ROWS)):
            clock = SimpleNamespace(perf_counter=time.process_time)
            with patch.object(causal_model, "HEAD_ROWS", rows), patch.object(decoding, "time", clock):
                stats, ids = play(model, options.rows, options.turns)
            times[way].append(stats)
            sampled.append(ids)
        assert sampled[0] == sampled[1]
    report = {way: _summary(stats) for way, stats in times.items()}
    ratios = {name: round(report["whole"][name] / report["blocks"][name], 2) for name in report["whole"]}
    result = {"rows": options.rows, "turns": options.turns, **report, "faster": ratios}
    print(json.dumps(result) if options.json else _table(result))
    return result


def play(model: SlotModel, rows: int, turns: int) -> tuple[DecodingStats, list[tuple[int, ...]]]:
    """Play `rows` episodes together with a decoder; return its costs, and the ids of each episode."""
    decoder = Decoder(model, rows, cache_tokens=rows * turns * (SHARED + OBSERVATION))
    prompts = [[*_text(0, SHARED, model), *_text(1 + row, QUESTION, model)] for row in range(rows)]
    for turn in range(turns):
        running = [DecodingRow(prompt, Sampling(temperature=1.0, seed=7, max_tokens=OUTPUT)) for prompt in prompts]
        for row in running:
            decoder.admit([row])
        while any(row.finish_reason is None for row in running):
            decoder.step()
        for row in running:
            decoder.release(row)
        prompts = [[*row.ids, *_text(99 + 9 * turn + at, OBSERVATION, model)] for at, row in enumerate(running)]
    return decoder.stats, [tuple(prompt) for prompt in prompts]


def _text(seed: int, tokens: int, model: SlotModel) -> list[int]:
    return [(31 * seed + 7 * at * at) % model.vocabulary for at in range(tokens)]


def _summary(runs: list[DecodingStats]) -> dict[str, float]:
    return {
        "seconds": round(median(run.prefill_seconds + run.decode_seconds for run in runs), 3),
        "ms_per_prefilled_token": round(median(1000 * run.prefill_seconds / run.prefilled_tokens for run in runs), 3),
        "ms_per_decoded_token": round(median(1000 * run.decode_seconds / run.decoded_tokens for run in runs), 3),
    }


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="sampling", description="Sampling with the output head in blocks or whole.")
    parser.add_argument("model", type=Path, help="folder of a model or of adapters")
    parser.add_argument("--rows", type=int, default=8, help="episodes that play together")
    parser.add_argument("--turns", type=int, default=4, help="turns of an episode")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each way; the report has their medians")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print JSON in place of a table")
    return parser.parse_args(arguments)


def _table(result: dict[str, Any]) -> str:
    lines = [f"{result['rows']} rows, {result['turns']} turns{'whole':>20}{'blocks':>10}{'faster':>10}"]
    for name, ratio in result["faster"].items():
        lines.append(f"{name:26}{result['whole'][name]:>12}{result['blocks'][name]:>10}{ratio:>10}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
