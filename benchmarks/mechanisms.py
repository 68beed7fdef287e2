"""Retrain a small policy without one mechanism of the harness at a time, and in the transcript harness: what is each
worth to a policy that learns, rather than to one that was trained with it?

    python benchmarks/mechanisms.py FOLDER [--seeds N] [--only NAME] [--tasks N] [--set A.B=VALUE] [--json]

Every variant and seed draws new weights, learns from the same teacher in its own environment (SFT), then goes on with
CISPO, and plays the same held-out tasks; the whole harness also learns by CISPO alone, from new weights. Differences
from the whole harness are paired by task over all seeds, with 95 % bootstrap intervals. The world makes mechanisms
matter: pages are long, with sentences about others between their own; pages that no question needs appear several
times, almost alike; some pages deny what another one says; and half of the questions are chains. Finished work is not
repeated.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec

if not __package__:
    # Run as a script: its neighbours are found beside it.
    sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.learn import earned, learned
from benchmarks.micro import MICRO, SPLITS, TAUGHT, Start, make
from harness1.config import Config, load_config
from harness1.data import beir
from harness1.data.leaks import gold_set
from harness1.data.open import open_source
from harness1.data.world import SyntheticWorld, republish
from harness1.errors import UsageError
from harness1.eval.ablations import ABLATIONS
from harness1.eval.statistics import bootstrap_mean
from harness1.records import DocId, Task
from harness1.retrieval.corpus import Document

WHOLE = (
    *("env.max_turns=7", "env.context_window=1024", "env.generation_reserve=40", "sft.max_tokens=1024"),
    *("env.search.hits=4", "env.search.tokens=360", "env.compression.sentences=2", "env.curation.tags=true"),
    *("env.auto_populate.on=true", "env.auto_populate.by=evidence", "env.auto_populate.documents=2"),
    *("env.evidence.on=true", "env.evidence.rank=true", "env.evidence.entities=2"),
    *("env.leads.on=true", "env.leads.lines=3", "env.history.on=true", "env.history.lines=4"),
    *("env.verification.on=true", "env.pool.lines=4", "env.pool.snippet=40", "env.rendering.epoch_turns=3"),
    *("rl.batches=20", "rl.groups=8", "rl.samples=8", "train.watch.every=10", "train.watch.tasks=100"),
)
"""The whole harness, beyond `--config micro`, and the length of training."""
TRANSCRIPT = (
    *("env.rendering.order=transcript", "env.pruning.on=true", "env.pruning.limits=[600, 800]"),
    *("env.auto_populate.on=false", "env.auto_populate.by=first", "env.dedup.on=false", "env.history.on=false"),
    *("env.compression.on=false", "env.evidence.on=false", "env.evidence.rank=false", "env.leads.on=false"),
)
"""The same tools over a growing transcript, which the policy prunes, in a window of the same size."""
BASE = "whole harness"
ALONE = "CISPO alone"
REMOVED = {
    "evidence order, leads and filling by it": "rank",
    "leads": "leads",
    "auto-population": "auto_populate",
    "history": "history",
    "verification": "verification",
    "deduplication": "dedup",
    "compression": "compression",
    "importance tags": "importance_tags",
}
VARIANTS = (BASE, "transcript harness", *REMOVED)
METRICS = ("reward", "recall", "f1", "size", "turns", "valid")
FILLING, COPIES, DENIALS = 5, 3, 0.1
"""Sentences about others in a page, copies of a page that no question needs, share of pages that another denies."""
RESAMPLES = 2000
Measured = Mapping[str, Sequence[float]]


def variant(name: str, settings: Sequence[str]) -> Config:
    """Return the configuration of a variant."""
    more = TRANSCRIPT if name == VARIANTS[1] else ()
    config = load_config(MICRO, [*WHOLE, *more, *settings])
    if name not in REMOVED:
        return config
    return msgspec.structs.replace(config, env=ABLATIONS[REMOVED[name]](config.env))


def write_pages(folder: Path, size: int, tasks: int) -> None:
    """Write the world: at most `tasks` questions a split, of one document or two in equal numbers."""
    if beir.is_beir(folder):
        return
    world, others = open_source(f"world:{size}"), SyntheticWorld(size, seed=1)
    kept = [task for split in SPLITS for task in _mixed(world.tasks(split), tasks)]
    asked = {doc_id for task in kept for doc_id in gold_set(task.gold)}
    beir.write(folder, _pages(world.documents(), asked, [page.text for page in others.documents()]), kept)


def _mixed(tasks: Sequence[Task], limit: int) -> list[Task]:
    by_hops = [[task for task in tasks if task.metadata["hops"] == hops][: limit // 2] for hops in (1, 2)]
    fewest = min(map(len, by_hops))
    return [task for pair in zip(*(each[:fewest] for each in by_hops), strict=True) for task in pair]


def _pages(documents: Iterator[Document], asked: set[DocId], others: Sequence[str]) -> Iterator[Document]:
    rng = random.Random("mechanisms")
    sentences = [sentence for text in others for sentence in text.split(". ")]
    for document in documents:
        own = document.text.removesuffix(".").split(". ")
        page = _page(document.doc_id, document.title, own, sentences, rng)
        yield page
        if document.doc_id not in asked:
            for number in range(COPIES):
                copy = DocId(f"{document.doc_id}-{number}")
                yield msgspec.structs.replace(page, doc_id=copy, text=republish(page.text, rng))
        elif rng.random() < DENIALS:
            denied = [f"It is not true that {sentence[0].lower()}{sentence[1:]}" for sentence in own]
            yield _page(DocId(f"{document.doc_id}-x"), f"Rumours about {document.title}", denied, sentences, rng)


def _page(doc_id: DocId, title: str, own: Sequence[str], filling: Sequence[str], rng: random.Random) -> Document:
    """Return a page with its own sentences in their order, the first one at the beginning."""
    text = list(own)
    for sentence in rng.sample(filling, FILLING):
        text.insert(rng.randint(1, len(text)), sentence)
    return Document(doc_id=doc_id, title=title, text=". ".join(text) + ".")


def trained(folder: Path, name: str, seed: int, asked: argparse.Namespace) -> dict[str, Measured]:
    """Train a variant from nothing, and measure it after SFT and after CISPO, by task."""
    taught = msgspec.structs.replace(TAUGHT, rate=2e-3)
    place = folder / f"{name.replace(',', '').replace(' ', '-')}-{seed}"
    start = Start(place, variant(name, asked.settings), seed, asked.size, samples=2, taught=taught)
    write_pages(Path(start.dataset), asked.size, asked.learned)
    make(start)
    tasks = start.tasks("test", asked.tasks)
    found: dict[str, Measured] = {"SFT": earned(start, f"hf:{start.folder / 'start'}", tasks, asked.samples)}
    found["CISPO"] = earned(start, f"hf:{learned(start, seed)}", tasks, asked.samples)
    if name == BASE:
        found[ALONE] = earned(start, f"hf:{learned_alone(start, seed)}", tasks, asked.samples)
    print(f"{name}, seed {seed}: {_line(found)}", file=sys.stderr, flush=True)
    return found


def learned_alone(start: Start, seed: int) -> Path:
    """Return what CISPO makes of new weights: the weights themselves if no episode earns more than another."""
    try:
        return learned(start, seed, name=f"alone-{seed}", base="model")
    except UsageError as error:
        print(f"{ALONE}, seed {seed}: {error}", file=sys.stderr, flush=True)
        return start.folder / "model"


def _line(found: Mapping[str, Measured]) -> str:
    return "; ".join(f"{stage} " + " ".join(f"{n} {fmean(v):.3f}" for n, v in m.items()) for stage, m in found.items())


def report(found: Mapping[str, Sequence[Mapping[str, Measured]]]) -> dict[str, Any]:
    """Return the means of each variant, and its differences from the whole harness, by stage of training."""
    rows: dict[str, Any] = {}
    for name, seeds in found.items():
        rows[name] = {}
        for stage in seeds[0]:
            row: dict[str, Any] = {
                metric: fmean(v for each in seeds for v in each[stage][metric]) for metric in METRICS
            }
            row["seeds"] = [fmean(each[stage]["reward"]) for each in seeds]
            if name != BASE and BASE in found:
                row["difference"] = {each: _difference(found[BASE], seeds, stage, each) for each in ("reward", "f1")}
            rows[name][stage] = row
    return rows


def _difference(
    base: Sequence[Mapping[str, Measured]], other: Sequence[Mapping[str, Measured]], stage: str, metric: str
) -> list[float]:
    """Return the mean over tasks of a variant minus the whole harness, each task the mean of all seeds."""
    ours, theirs = (
        [fmean(v) for v in zip(*(one[stage][metric] for one in each), strict=True)] for each in (other, base)
    )
    mean = bootstrap_mean([one - two for one, two in zip(ours, theirs, strict=True)], RESAMPLES)
    return [mean.mean, mean.low, mean.high]


def table(rows: Mapping[str, Any]) -> str:
    """Return the report as a table."""
    heads = ["variant", "after", *METRICS, "reward by seed", "reward minus whole", "F1 minus whole"]
    lines = [f"| {' | '.join(heads)} |", f"| {' | '.join(['---'] * len(heads))} |"]
    for name, stages in rows.items():
        for stage, row in stages.items():
            cells = [name, stage, *(f"{row[metric]:.3f}" for metric in METRICS)]
            cells.append(", ".join(f"{value:.3f}" for value in row["seeds"]))
            differences = row.get("difference", {})
            cells += ["{:+.3f} ({:+.3f} to {:+.3f})".format(*found) for found in differences.values()] or ["", ""]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--only", action="append", choices=VARIANTS, metavar="NAME", help="besides the whole harness")
    parser.add_argument("--size", type=int, default=1000, help="pages that questions may be about")
    parser.add_argument("--learned", type=int, default=600, help="most questions of a split")
    parser.add_argument("--tasks", type=int, default=150, help="held-out tasks that are measured")
    parser.add_argument("--samples", type=int, default=2, help="episodes of each held-out task")
    parser.add_argument("--set", action="append", default=[], dest="settings", metavar="A.B=VALUE")
    parser.add_argument("--json", action="store_true", dest="as_json")
    asked = parser.parse_args(arguments)
    names = [BASE, *(each for each in VARIANTS[1:] if each in (asked.only or VARIANTS))]
    found: dict[str, list[dict[str, Measured]]] = {name: [] for name in names}
    for seed in range(asked.seeds):
        for name in names:
            found[name].append(trained(asked.folder, name, seed, asked))
    rows = report(found)
    print(json.dumps(rows) if asked.as_json else table(rows))
    return rows


if __name__ == "__main__":
    main()
