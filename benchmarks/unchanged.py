"""Compare two checkouts: the same numbers, the same hashes, and records of the old one that replay in the new one.

    python benchmarks/unchanged.py OLD_CHECKOUT $DATA/* --out FOLDER [--vocab o200k_base.tiktoken] [--json]

Each checkout evaluates the scripted policy on the test split of every benchmark in a process of its own, with this
interpreter. The script compares every metric and every hash of the run cards, replays the runs of the old checkout
with the code of the new one, and compares what `prefix_reuse.py` and `env_turn.py` beside this script count. Times
are left out. Existing runs in the folder are not repeated. Exit code 1 if anything differs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent.parent
SPELLING = {
    **{f"{old}@{depth}": f"{new}@{depth}" for old, new in (("recall", "R"), ("precision", "P"), ("success", "Success"))
       for depth in (1, 3, 5, 10, 15, 30)},
    "ndcg@10": "nDCG@10", "average_precision": "AP", "reciprocal_rank": "RR",
}  # fmt: skip
"""Present names of measures by their former names."""
CLOCK = ("ms", "seconds", "time", "per_second", "speed", "ratio")
"""Parts of the names of figures that depend on the clock."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, compare and print; return the exit code."""
    options = _options(arguments)
    checkouts = {"old": options.old.resolve(), "new": HERE}
    report: dict[str, Any] = {"benchmarks": {}, "counts": {}}
    for data in options.data:
        report["benchmarks"][data.name] = _benchmark(checkouts, data.resolve(), options.out.resolve())
    for script in ("prefix_reuse", "env_turn"):
        report["counts"][script] = _counts(checkouts, script, options.vocab, options.out.resolve())
    differences = [line for found in _parts(report) for line in found["differences"]]
    print(json.dumps(report) if options.json else _table(report))
    return 1 if differences else 0


def _benchmark(checkouts: Mapping[str, Path], data: Path, out: Path) -> dict[str, Any]:
    cards, metrics = {}, {}
    for side, checkout in checkouts.items():
        run = out / side / data.name
        if not _is_finished(run):
            _ran(
                checkout, "-m", "harness1", "eval", str(data), "--out", str(run), "--cache", str(out / f"cache-{side}")
            )
        cards[side] = json.loads((run / "stage.json").read_text())
        metrics[side] = json.loads((run / "metrics.json").read_text())
    replayed = _ran(HERE, "-m", "harness1", "replay", str(out / "old" / data.name), "--json", fails=True)
    replay = json.loads(replayed.stdout.splitlines()[-1])
    hashes = {side: {**_hashes(out / side / data.name), **card["hashes"]} for side, card in cards.items()}
    old = {SPELLING.get(name, name): value for name, value in metrics["old"].items()}
    differences = [*_differences(old, metrics["new"]), *_differences(hashes["old"], hashes["new"])]
    if replayed.returncode:
        differences.append(f"replay of the old run: exit code {replayed.returncode}")
    recall = {side: found["curated_recall"]["mean"] for side, found in metrics.items()}
    return {"recall": recall, "tasks": metrics["new"]["tasks"], "replay": replay, "differences": differences}


def _counts(checkouts: Mapping[str, Path], script: str, vocab: Path | None, out: Path) -> dict[str, Any]:
    """Return the number of figures of a script that do not depend on the clock, and those that differ."""
    found = {}
    for side, checkout in checkouts.items():
        cached = out / side / f"{script}.json"
        if not cached.is_file():
            words = [
                str(checkout / "benchmarks" / f"{script}.py"),
                "--json",
                *(["--vocab", str(vocab)] if vocab else []),
            ]
            cached.parent.mkdir(parents=True, exist_ok=True)
            cached.write_text(_ran(checkout, *words).stdout)
        leaves = _leaves(json.loads(cached.read_text()))
        found[side] = {name: value for name, value in leaves if not any(part in name for part in CLOCK)}
    return {"figures": len(found["new"]), "differences": list(_differences(found["old"], found["new"]))}


def _ran(checkout: Path, *words: str, fails: bool = False) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    return subprocess.run(
        [sys.executable, *words], cwd=checkout, env=environment, stdout=subprocess.PIPE, text=True, check=not fails
    )


def _is_finished(run: Path) -> bool:
    card = run / "stage.json"
    return card.is_file() and json.loads(card.read_text())["status"] == "finished"


def _hashes(run: Path) -> dict[str, str]:
    """Return the hashes of provenance: reward, configuration, static prompt and tasks, besides those of the card."""
    provenance: dict[str, Any] = json.loads((run / "provenance.json").read_text())
    return dict(provenance["hashes"])


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if children is None:
        yield name, value
    else:
        for key, each in children:
            yield from _leaves(each, f"{name}.{key}" if name else str(key))


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    before, after = dict(_leaves(dict(old))), dict(_leaves(dict(new)))
    for name in sorted(before.keys() | after.keys()):
        if before.get(name) != after.get(name):
            yield f"{name}: {before.get(name)} before, {after.get(name)} now"


def _parts(report: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield from report["benchmarks"].values()
    yield from report["counts"].values()


def _table(report: Mapping[str, Any]) -> str:
    lines = [f"{'test split':<20}{'tasks':>7}{'recall before':>15}{'now':>9}{'turns replayed':>16}  differences"]
    for name, found in report["benchmarks"].items():
        recall, replay = found["recall"], found["replay"]
        equal = f"{replay['equal']}/{replay['turns']}"
        before, now = f"{recall['old']:.4f}", f"{recall['new']:.4f}"
        lines.append(f"{name:<20}{found['tasks']:>7}{before:>15}{now:>9}{equal:>16}  {len(found['differences'])}")
    lines += [
        f"{name}: {found['figures']} figures, {len(found['differences'])} differ"
        for name, found in report["counts"].items()
    ]
    return "\n".join([*lines, *(line for found in _parts(report) for line in found["differences"])])


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, help="a checkout of an earlier commit")
    parser.add_argument("data", type=Path, nargs="+", help="benchmarks in BEIR layout")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--vocab", type=Path)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
