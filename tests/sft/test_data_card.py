"""The card says what is in a dataset, to people and to programs."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from harness1.errors import SchemaError, UsageError
from harness1.rows import TrainRow
from harness1.sft.build import GateCounts
from harness1.sft.data_card import (
    CARD,
    FEATURES,
    README,
    CollectionRun,
    DataCard,
    Distribution,
    RowCounts,
    RowFacts,
    licence_notes,
    read_card,
    tasks_by_dataset,
    write_card,
)

FACTS = [
    RowFacts(256, 10, ("search_corpus",), ("d", "t0", "a")),
    RowFacts(257, 20, ("search_corpus", "curate"), ("d", "t0", "b")),
    RowFacts(1000, 30, ("verify",), ("e", "t0", "c")),
]
RUN = CollectionRun(
    folder="/runs/a",
    dataset="/data/d",
    name="d",
    split="train",
    teacher="oracle | teacher",
    index="/index",
    hashes={"env": "e" * 64, "policy": "p" * 64, "index": "i" * 64, "counter": "c" * 64},
    episodes=3,
    missing=2,
    config={"env": {"max_turns": 40}},
)
CARD_OF_THREE = DataCard(
    runs=(RUN,),
    format="hermes",
    tokenizer="/models/m",
    tokenizer_hash="t" * 64,
    format_hash="c" * 64,
    rerendered=False,
    env={"max_turns": 40},
    env_hash="e" * 64,
    sft={"rows": "turn"},
    compared={"d:test": 7},
    gates=(GateCounts("recall", 5, 3, ("d/t9 (x): curated recall 0.000",)),),
    dropped_turns={"too_long": 2},
    train=RowCounts.of(FACTS),
    held_out=RowCounts.of([]),
    held_out_tasks={"d": ("t7",)},
    turns=Distribution.of([2, 3, 7], shares=False),
    curated_recall=Distribution.of([0.25, 0.5, 1.0]),
    trajectory_recall=Distribution.of([1.0, 1.0, 1.0]),
    licences={"d": "CC BY-SA 4.0"},
)


def test_numbers_are_told_in_short() -> None:
    found = Distribution.of([0.0, 0.1, 0.19, 0.95, 1.0])
    assert (found.count, found.mean, found.quantiles["0.5"]) == (5, pytest.approx(0.448), 0.19)
    assert (found.quantiles["0"], found.quantiles["1"]) == (0.0, 1.0)
    counts = {name: count for name, count in found.histogram.items() if count}
    assert (counts, len(found.histogram)) == ({"0.0 to 0.1": 1, "0.1 to 0.2": 2, "0.9 to 1.0": 2}, 10)
    assert Distribution.of([4, 9], shares=False).histogram == {}


def test_rows_are_counted() -> None:
    tools, lengths = {"curate": 1, "search_corpus": 2, "verify": 1}, {"256": 1, "512": 1, "1024": 1}
    counts = {"tasks": 2, "episodes": 3, "rows": 3, "turns": 4, "tokens": 1513, "trained_tokens": 60}
    assert RowCounts.of(FACTS) == RowCounts(**counts, tools=tools, lengths=lengths)
    row = TrainRow((1, 2, 3), (0, 1, 1), episode_id="e", metadata={"dataset": "d", "task_id": "t", "tools": ["verify"]})
    assert RowFacts.of(row) == RowFacts(3, 2, ("verify",), ("d", "t", "e"))
    assert [column["name"] for column in FEATURES] == list(TrainRow.__struct_fields__)
    assert tasks_by_dataset({("e", "2"), ("d", "3"), ("d", "1")}) == {"d": ("1", "3"), "e": ("2",)}
    assert licence_notes(["d=CC0", "as=is"], ["d", "e"]) == {"d": "CC0; as=is", "e": "as=is"}
    assert licence_notes([], ["d"]) == {"d": "not stated"}


def test_the_readme_tells_what_the_card_holds(tmp_path: Path) -> None:
    write_card(CARD_OF_THREE, tmp_path)
    text = (tmp_path / README).read_text()
    for line in (
        r"| oracle \| teacher | d | train | CC BY-SA 4.0 | 3 | 2 |",
        "| recall | 5 | 3 |",
        "| trained_tokens | 60 | 0 |",
        "Evaluation queries compared: 7 d:test.",
        "Turns of kept episodes left out of the rows: 2 too_long.",
    ):
        assert line in text.splitlines(), line


@pytest.mark.parametrize(
    ("policy", "shown"),
    [
        ("hf:/home/me/models/big", "hf:big"),
        ("replay:runs/mine", "replay:mine"),
        ("vllm:/home/me/models/big@http://host:1/v1", "vllm:big@http://host:1/v1"),
        ("openai:maker/big@https://host/v1", "openai:maker/big@https://host/v1"),
    ],
)
def test_the_readme_holds_no_local_folders(tmp_path: Path, policy: str, shown: str) -> None:
    run = msgspec.structs.replace(RUN, teacher=policy, folder="/home/me/a", dataset="/home/me/d", index="/home/me/i")
    card = msgspec.structs.replace(CARD_OF_THREE, runs=(run,), tokenizer="/home/me/models/m")
    write_card(card, tmp_path)
    text = (tmp_path / README).read_text()
    assert f"| {shown} | d |" in text
    assert "/home/me" not in text
    assert read_card(tmp_path) == card


def test_a_folder_without_a_card_and_a_damaged_card_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not a dataset"):
        read_card(tmp_path)
    (tmp_path / CARD).write_bytes(msgspec.json.encode(CARD_OF_THREE)[:-9])
    with pytest.raises(SchemaError, match="not a data card"):
        read_card(tmp_path)
