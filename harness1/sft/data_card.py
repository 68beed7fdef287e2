"""The data card of a dataset: origin, gates and distributions of its rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from harness1.errors import UsageError
from harness1.records import Record
from harness1.rows import TrainRow
from harness1.runs.files import read_record, write_atomically, write_json

CARD, README = "card.json", "README.md"
TRAIN, HELD_OUT = "train.jsonl", "held_out.jsonl"
QUANTILES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)
BINS = 10  # of the histogram of a share
SHORTEST = 256  # upper end in tokens of the first class of row lengths; it doubles from class to class

_METADATA: list[dict[str, Any]] = [
    *({"name": name, "dtype": "string"} for name in ("task_id", "dataset", "split", "teacher")),
    {"name": "turns", "sequence": "int32"},
    {"name": "tools", "sequence": "string"},
    {"name": "prompt_tokens", "dtype": "int32"},
]
FEATURES: list[dict[str, Any]] = [
    {"name": "token_ids", "sequence": "int32"},
    {"name": "loss_mask", "sequence": "int8"},
    *({"name": name, "sequence": "float32"} for name in ("rollout_logprobs", "advantages")),
    *({"name": name, "dtype": "string"} for name in ("episode_id", "group_id")),
    {"name": "versions", "sequence": "int64"},
    {"name": "call_ids", "sequence": "string"},
    {"name": "metadata", "struct": _METADATA},
    {"name": "token_weight", "dtype": "float64"},
]
"""The columns of a row for Hugging Face's `datasets`, which cannot infer the type of a column of nulls."""


class GateCounts(Record):
    """The number of episodes that reached a gate and that passed it."""

    name: str
    entered: int = msgspec.field(name="in")
    passed: int = msgspec.field(name="out")
    dropped: tuple[str, ...] = ()  # the first dropped episodes, with the reasons


class Distribution(Record):
    """A summary of some numbers."""

    count: int
    mean: float
    quantiles: dict[str, float]
    histogram: dict[str, int]  # of shares: those in each tenth, including its lower end; the last includes 1

    @classmethod
    def of(cls, values: Sequence[float], *, shares: bool = True) -> Distribution:
        """Summarise at least one number, with a histogram for shares (between 0 and 1)."""
        numbers = np.asarray(values, np.float64)
        quantiles = {f"{each:g}": float(np.quantile(numbers, each)) for each in QUANTILES}
        counts, edges = np.histogram(numbers, BINS, (0.0, 1.0))
        names = (f"{low:.1f} to {high:.1f}" for low, high in pairwise(edges))
        histogram = dict(zip(names, counts.tolist(), strict=True)) if shares else {}
        return cls(len(numbers), float(numbers.mean()), quantiles, histogram)


class RowFacts(NamedTuple):
    """The facts of a row that the card counts."""

    tokens: int
    trained: int
    tools: tuple[str, ...]  # of each trained turn
    episode: tuple[str, str, str]  # dataset, task and episode

    @classmethod
    def of(cls, row: TrainRow) -> RowFacts:
        data, size = row.metadata, (len(row.token_ids), sum(row.loss_mask))
        return cls(*size, tuple(data["tools"]), (data["dataset"], data["task_id"], row.episode_id))


class RowCounts(Record, kw_only=True):
    """Counts over the rows of one file."""

    tasks: int
    episodes: int
    rows: int
    turns: int  # trained ones
    tokens: int
    trained_tokens: int
    tools: dict[str, int]  # trained turns of each
    lengths: dict[str, int]  # rows by class of length, named by its upper end in tokens

    @classmethod
    def of(cls, rows: Sequence[RowFacts]) -> RowCounts:
        # The smallest doubling of `SHORTEST` that holds the row.
        lengths = Counter(SHORTEST << ((max(1, row.tokens) - 1) // SHORTEST).bit_length() for row in rows)
        tools = Counter(tool for row in rows for tool in row.tools)
        return cls(
            tasks=len({row.episode[:2] for row in rows}),
            episodes=len({row.episode for row in rows}),
            rows=len(rows),
            turns=tools.total(),
            tokens=sum(row.tokens for row in rows),
            trained_tokens=sum(row.trained for row in rows),
            tools=dict(sorted(tools.items())),
            lengths={str(most): lengths[most] for most in sorted(lengths)},
        )


class CollectionRun(Record, kw_only=True):
    """A run folder that supplied episodes."""

    folder: str
    dataset: str  # absolute path, or the generator
    name: str  # short name, as in the metadata of rows
    split: str
    share: str = ""  # `sft` or `rl` if the run was collected over one share of the split's tasks
    teacher: str
    index: str
    hashes: dict[str, str]
    episodes: int
    missing: int = 0  # tasks without all their episodes, in an unfinished run
    config: dict[str, Any]  # every setting of the run, without keys


class DataCard(Record, kw_only=True):
    """The description of a dataset; checkpoints trained on it keep a copy."""

    runs: tuple[CollectionRun, ...]
    format: str
    tokenizer: str  # path of the tokenizer when the dataset was built
    tokenizer_hash: str
    format_hash: str  # of format and tokenizer together: the counter of the environment
    rerendered: bool  # contexts were rendered again for another student than that of the runs
    env: dict[str, Any]
    env_hash: str
    sft: dict[str, Any]
    compared: dict[str, int]  # sizes of the sets of evaluation queries that were excluded
    gates: tuple[GateCounts, ...]
    dropped_turns: dict[str, int]  # of kept episodes, without a row, by reason
    train: RowCounts
    held_out: RowCounts
    held_out_tasks: dict[str, tuple[str, ...]]  # ids of those that are never trained on, by dataset
    tasks: dict[str, tuple[str, ...]] = {}  # ids of those of all rows, held-out ones included, by dataset
    turns: Distribution  # of each kept episode
    curated_recall: Distribution
    trajectory_recall: Distribution
    licences: dict[str, str]  # notes on the licence of each dataset


def write_card(card: DataCard, folder: Path) -> None:
    """Write `card.json`, and `README.md` from it."""
    write_json(folder / CARD, card)
    write_atomically(folder / README, readme(card).encode())


def read_card(folder: Path, name: str = CARD) -> DataCard:
    """Return the card of a dataset folder, or the copy in a checkpoint; UsageError if none, SchemaError if damaged."""
    card = read_record(folder / name, DataCard, "a data card")
    if card is None:
        raise UsageError(f"{folder} is not a dataset of `harness1 sft build`: it has no {CARD}")
    return card


def licence_notes(notes: Sequence[str], datasets: Sequence[str]) -> dict[str, str]:
    """Return the licence of each dataset from notes that name it (`NAME=TEXT`) and notes for all datasets."""
    found: dict[str, list[str]] = {name: [] for name in datasets}
    for note in notes:
        name, _, text = note.partition("=")
        for own in [name] if name in found else datasets:
            found[own].append(text if name in found else note)
    return {name: "; ".join(texts) or "not stated" for name, texts in found.items()}


def tasks_by_dataset(tasks: Collection[tuple[str, str]]) -> dict[str, tuple[str, ...]]:
    """Return the sorted ids of each dataset, from tasks as (dataset, id)."""
    names = sorted({dataset for dataset, _ in tasks})
    return {name: tuple(sorted(task for dataset, task in tasks if dataset == name)) for name in names}


def readme(card: DataCard) -> str:
    """Return the card as Markdown, with front matter for `datasets.load_dataset`; of local paths only the last part."""
    files = [{"split": "train", "path": TRAIN}]
    files += [{"split": "validation", "path": HELD_OUT}] if card.held_out.rows else []
    configs = [{"config_name": "default", "data_files": files}]
    info = {"config_name": "default", "features": FEATURES}
    found, known = (msgspec.json.encode(tree).decode() for tree in (configs, info))  # JSON is valid YAML
    counted = ("tasks", "episodes", "rows", "turns", "tokens", "trained_tokens")
    parts = [
        f"---\nconfigs: {found}\ndataset_info: {known}\n---",
        "# Supervised fine-tuning rows of search episodes",
        f"{card.train.rows} training rows and {card.held_out.rows} held-out rows in the format `{card.format}`, for the"
        f" tokenizer `{Path(card.tokenizer).name}`. Only tokens of actions (reasoning and call) are trained.",
        _table(
            ("teacher", "dataset", "split", "licence", "episodes", "tasks missing"),
            [
                (_without_folders(run.teacher), run.name, run.split, card.licences[run.name], run.episodes, run.missing)
                for run in card.runs
            ],
        ),
        _table(("gate", "in", "out"), [(gate.name, gate.entered, gate.passed) for gate in card.gates]),
        f"Evaluation queries compared: {_list_counts(card.compared)}.",
        f"Turns of kept episodes left out of the rows: {_list_counts(card.dropped_turns)}.",
        _table(
            ("", "train", "held out"),
            [(name, getattr(card.train, name), getattr(card.held_out, name)) for name in counted],
        ),
        f"The distributions of lengths, tools and recall, held-out tasks, hashes and settings are in `{CARD}`.",
    ]
    return "\n\n".join(parts) + "\n"


def _without_folders(policy: str) -> str:
    kind, colon, rest = policy.partition(":")
    model, at, url = rest.partition("@http")
    local = not at or Path(model).is_absolute()
    return f"{kind}{colon}{Path(model).name if local else model}{at}{url}"


def _list_counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items()) or "none"


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [tuple(head), ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)
