"""A start for learning in the real environment, made within a minute: `benchmarks/micro.py` in a smaller form."""

from __future__ import annotations

from pathlib import Path

import msgspec

from benchmarks.micro import MICRO, TAUGHT, Start, make
from harness1.config import Validation, load_config

SHORT = (
    *("machine.workers=1", "machine.threads=1", "train.rate=1e-3"),
    *("rl.groups=8", "rl.batches=12", "train.watch.every=12", "train.watch.tasks=60", "train.save_every=0"),
)
FEW = ("rl.groups=4", "rl.samples=4", "rl.batches=2", "train.watch.every=0", "train.watch.tasks=10")
SETTINGS = ["--config", MICRO, *(word for setting in (*SHORT, *FEW) for word in ("--set", setting)), "--json"]
"""Of a command that trains for two small batches."""


def small_start(folder: Path) -> Start:
    """A small model that has seen a mediocre teacher for a few hundred episodes, with its world and index."""
    watch = Validation(every=0, rows=0, turns=8, metric="valid")
    taught = msgspec.structs.replace(TAUGHT, epochs=4, watch=watch)
    config = load_config(MICRO, list(SHORT))
    made = Start(folder, config, size=300, share=0.75, samples=6, words=3000, width=64, layers=2, taught=taught)
    make(made)
    return made
