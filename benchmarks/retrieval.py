"""Measure the cost and the recall of retrieval, beside its peers, in several tables.

bm25        building, opening and searching, beside bm25s, tantivy and rank_bm25
grep        rare literals beside plain scans by RE2, and patterns designed to be slow
hybrid      embeddings and terms beside terms alone, by recall on real benchmarks
throughput  groups of concurrent episodes, alone, batched and cached

python benchmarks/retrieval.py bm25 grep --seed $DATA/hotpotqa --chunks 1000000
python benchmarks/retrieval.py hybrid --data $DATA/hotpotqa $DATA/scifact --folder indexes
python benchmarks/retrieval.py throughput --seed $DATA/hotpotqa --folder indexes
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if not __package__:
    # Run as a script: its neighbours are found beside it.
    sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.bm25_table import bm25_table
from benchmarks.engines import ENGINES, Ours
from benchmarks.grep_table import hostile_table, open_built, rare_table
from benchmarks.hybrid_table import MODEL, hybrid_table
from benchmarks.throughput_table import throughput_table

TABLES = ("bm25", "grep", "hybrid", "throughput")
MADE_UP = "world:300"
"""The default source of texts and questions."""
Row = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> dict[str, list[Row]]:
    """Measure and print; return what `--json` prints."""
    options = _options(arguments)
    folder = options.folder or Path(tempfile.mkdtemp(prefix="retrieval-"))
    try:
        report = {name: rows for table in options.tables for name, rows in _measure(table, folder, options).items()}
    finally:
        if options.folder is None:
            shutil.rmtree(folder)
    if options.json:
        print(json.dumps(report))
    else:
        print("\n\n".join(_table(name, rows) for name, rows in report.items()))
    return report


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="retrieval", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=f"any of {', '.join(TABLES)}; without, all")
    parser.add_argument("--seed", default=MADE_UP, help="corpus that bm25 and grep vary, and throughput asks about")
    parser.add_argument("--chunks", type=int, default=100_000, help="size of the corpus for bm25 and grep")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES), help="rows of the bm25 table")
    parser.add_argument("--data", nargs="+", default=[MADE_UP], help="benchmarks of the hybrid table")
    parser.add_argument("--model", default=MODEL, help="embedder of the hybrid and throughput tables")
    parser.add_argument("--single-shot", action="store_true", help="no scripted episodes in the hybrid table")
    parser.add_argument("--folder", type=Path, help="keep indexes here, and use those that are there")
    parser.add_argument("--json", action="store_true", help="print JSON in place of tables")
    options = parser.parse_args(arguments)
    options.tables = options.tables or TABLES
    for table in options.tables:
        if table not in TABLES:
            parser.error(f"there is no table {table!r}; choose from {', '.join(TABLES)}")
    if "ours" not in options.engines:
        parser.error("the others are measured beside ours: name it among the engines")
    return options


def _measure(table: str, folder: Path, options: argparse.Namespace) -> dict[str, list[Row]]:
    if table == "bm25":
        names = sorted(options.engines, key=list(ENGINES).index)
        return {"bm25": bm25_table(options.seed, _sized(folder, options), options.chunks, names)}
    if table == "grep":
        built = _sized(folder, options)
        if not (built / "ours").exists():
            Ours(built).build(options.seed, options.chunks)
        index = open_built(built)
        return {"grep": rare_table(index), "hostile": hostile_table(index)}
    if table == "hybrid":
        return {"hybrid": hybrid_table(options.data, folder, options.model, scripted=not options.single_shot)}
    return {"throughput": throughput_table(options.seed, folder, options.model)}


def _sized(folder: Path, options: argparse.Namespace) -> Path:
    """Return the folder for indexes of this size; each size has its own."""
    sized: Path = folder / str(options.chunks)
    return sized


def _table(name: str, rows: Sequence[Row]) -> str:
    columns = list(dict.fromkeys(column for row in rows for column in row))
    cells = [columns, *([_cell(row.get(column)) for column in columns] for row in rows)]
    widths = [max(len(line[at]) for line in cells) for at in range(len(columns))]
    lines = ("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells)
    return "\n".join([name, *lines])


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3f}" if abs(value) < 100 else f"{value:.0f}"
    if isinstance(value, list):
        mean, low, high = value
        return f"{mean:+.3f} [{low:+.3f}, {high:+.3f}]"
    return "" if value is None else str(value)


if __name__ == "__main__":
    main()
