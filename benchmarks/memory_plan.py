"""Compare memory plans with what training really takes: optimizer steps of small random models on this CPU.

    python benchmarks/memory_plan.py [--only NAME] [--json]

Each case runs in two fresh processes. One counts every block that torch asks of its allocator and gives back, as its
profiler reports them: this is what a GPU's allocator would be asked for. The other reads the process's peak of
resident memory, which also holds the scratch memory of CPU kernels. Both subtract what a step of a tiny model of the
same type has left, so libraries do not count. Two steps are taken, because moments exist from the first one on, of two
passes each, because gradients exist from the first pass on.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if not __package__:
    # Run as a script: its neighbours are found beside it.
    sys.path.insert(0, str(Path(__file__).parent.parent))

from harness1.config import Config, Lora, Rl, Train
from harness1.models.causal_model import compute_logits_in_float32
from harness1.models.fetch import PUBLISHED
from harness1.rows import TrainRow
from harness1.training.algorithm import make_algorithm
from harness1.training.memory_plan import BatchSize, Devices, MemoryPlanner
from harness1.training.trainable import choose_stored_dtype
from harness1.training.trainer import Trainer

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

SMALL = {"vocab_size": 300, "num_hidden_layers": 2, "intermediate_size": 64}
"""What a model of the same type is made of that loads the libraries."""
MODELS: dict[str, dict[str, Any]] = {
    "smollm2-135m": PUBLISHED["smollm2-135m"].config,
    "qwen3, 134M": {
        "model_type": "qwen3",
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "vocab_size": 32000,
        "tie_word_embeddings": False,
    },
    "gpt-oss, 88M": {
        "model_type": "gpt_oss",
        "hidden_size": 512,
        "intermediate_size": 512,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 32000,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": 128,
    },
}
TRAINED = 128


class Case(NamedTuple):
    """A model and the settings of its training."""

    model: str
    length: int
    rank: int
    dtype: str
    checkpointing: bool

    @property
    def train(self) -> Train:
        made: Any = self.dtype
        lora = Lora(rank=self.rank)
        return Train(lora=lora, dtype=made, checkpointing=self.checkpointing, micro_tokens=self.length)

    def __str__(self) -> str:
        kind = f"adapters of rank {self.rank}" if self.rank else "all weights"
        kept = "checkpointing" if self.checkpointing else "all kept"
        return f"{self.model}, {self.length} tokens, {kind}, {self.dtype}, {kept}"


CASES = [
    Case("smollm2-135m", 512, 32, "float32", False),
    Case("qwen3, 134M", 512, 32, "float32", False),
    Case("gpt-oss, 88M", 512, 32, "float32", False),
    Case("gpt-oss, 88M", 1024, 0, "float32", True),
    Case("qwen3, 134M", 512, 32, "bfloat16", True),
    Case("gpt-oss, 88M", 2048, 32, "bfloat16", False),
    Case("smollm2-135m", 512, 0, "float32", True),
]


def shape_of(settings: dict[str, Any]) -> PreTrainedConfig:
    """Return the configuration of a model."""
    from transformers import AutoConfig

    return AutoConfig.for_model(**settings)


def planned(case: Case) -> int:
    """Return the bytes that the plan of a case states."""
    planner = MemoryPlanner(shape_of(MODELS[case.model]), make_algorithm("cispo", Rl()))
    batch = BatchSize(1, case.length, TRAINED)
    return planner.plan(Config(train=case.train), batch, Devices(memory=1, kind="cpu")).needs


def take_steps(shape: PreTrainedConfig, train: Train, length: int, trained: int) -> None:
    """Make a random model, and take two optimizer steps of two forward passes each."""
    import torch
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    model = auto.from_config(shape, dtype=getattr(torch, choose_stored_dtype(train))).eval()
    if train.dtype != "float32":
        compute_logits_in_float32(model)
    trainer = Trainer(model, make_algorithm("cispo", Rl()), train, 10)
    ids = tuple(7 * place % 300 for place in range(length))
    known = (0.0,) * (length - trained) + (-5.0,) * trained
    mask = (0,) * (length - trained) + (1,) * trained
    row = TrainRow(ids, mask, known, (1.0,) * length)
    for _ in range(2):
        trainer.step([row, row])


def allocated(work: Callable[[], None]) -> int:
    """Return the most bytes that torch's allocator has given out at any time of a piece of work."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        work()
    results: Any = recorded.profiler
    blocks = [(each.start_ns(), each.nbytes()) for each in results.kineto_results.events() if each.name() == "[memory]"]
    now = most = 0
    for _, size in sorted(blocks, key=lambda block: block[0]):
        now += size
        most = max(most, now)
    return most


def resident(work: Callable[[], None]) -> int:
    """Return by how many bytes the peak of resident memory of a piece of work lies above what was there (Linux)."""
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    work()
    return _status("VmHWM") - before


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) * 1024


MEASURES = {"allocated": allocated, "resident": resident}


def measured(case: Case, measure: str) -> int:
    """Return the peak of a case in this process, by a name of `MEASURES`."""
    small = shape_of({**MODELS[case.model], **SMALL})
    take_steps(small, case.train, 64, 32)
    gc.collect()
    shape = shape_of(MODELS[case.model])
    return MEASURES[measure](lambda: take_steps(shape, case.train, case.length, TRAINED))


def in_child(case: Case, measure: str) -> int:
    """Return `measured` of a fresh process. Freed blocks go back to the system at once, so that they do not count."""
    code = "import sys, benchmarks.memory_plan as b; print(b.measured(b.Case(*eval(sys.argv[1])), sys.argv[2]))"
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "PYTHONPATH": str(Path(__file__).parent.parent)}
    command = [sys.executable, "-c", code, repr(tuple(case)), measure]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return int(done.stdout)


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name holds this")
    parser.add_argument("--json", action="store_true", dest="as_json")
    options = parser.parse_args(arguments)
    rows = []
    for case in CASES:
        if options.only not in str(case):
            continue
        row: dict[str, Any] = {"case": str(case), "planned": planned(case)}
        row |= {measure: in_child(case, measure) for measure in MEASURES}
        row |= {f"planned / {measure}": row["planned"] / row[measure] for measure in MEASURES}
        rows.append(row)
        if not options.as_json:
            sizes = ", ".join(f"{name} {row[name] / 1e6:,.0f} MB" for name in ("planned", *MEASURES))
            ratios = ", ".join(f"{name} {row[name]:.3f}" for name in row if name.startswith("planned /"))
            print(f"{case}: {sizes}; {ratios}", flush=True)
    if options.as_json:
        print(json.dumps(rows))
    return rows


if __name__ == "__main__":
    main()
