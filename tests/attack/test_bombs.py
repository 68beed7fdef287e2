"""Tables of a few kilobytes may inflate to anything: they are read or refused, within bounds."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow.parquet import write_table

from harness1.data import tables
from harness1.data.apart import ReadApart
from harness1.data.contents import Unreadable
from harness1.errors import CorpusError
from tests.attack.attack import Attack
from tests.attack.test_inputs import mutated
from tests.data import hostile

MEGABYTE = "x" * 1_000_000


def dictionary(rows: int) -> pyarrow.Array:
    return pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * rows, pyarrow.int32()), pyarrow.array([MEGABYTE]))


BOMBS: dict[str, Any] = {
    "a dictionary of one long text": lambda: dictionary(12_900),
    "rows of nothing": lambda: pyarrow.nulls(20_000_000),
    "one text of nothing": lambda: pyarrow.array(["\0" * 150_000_000]),
    "lists of one long text": lambda: pyarrow.array([[MEGABYTE] * 100] * 3),
    "long bytes": lambda: pyarrow.array([b"\0" * 150_000_000]),
    "a list of nothing": lambda: pyarrow.array([[None] * 90_000_000]),
    "a deep list": lambda: pyarrow.ListArray.from_arrays([0, 90_000_000], pyarrow.nulls(90_000_000)),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_parquet_bomb_is_refused_in_a_line(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if "dictionary" not in name:  # the others would take too long to make for the bound that holds
        monkeypatch.setattr(tables, "LEAST_PARQUET", 64 << 20)
    path = tmp_path / "bomb.parquet"
    table = pyarrow.table({"text": BOMBS[name]()})
    write_table(table, path, compression="zstd", use_dictionary="dictionary" in name or "lists" in name)
    assert path.stat().st_size < 300_000
    with (
        hostile.ends(),
        pytest.raises(CorpusError, match=r"inflates to more than [\d,]+ bytes|too much memory|its parser"),
    ):
        for _ in tables.rows([path]):
            pass


def test_an_honest_parquet_file_may_repeat_itself(tmp_path: Path) -> None:
    path = tmp_path / "same.parquet"
    write_table(pyarrow.table({"text": dictionary(100)}), path, compression="zstd")
    assert path.stat().st_size < 100_000
    assert sum(1 for _ in tables.rows([path])) == 100


def test_a_parquet_file_that_lies_about_its_sizes_takes_no_more_memory_than_it_may(tmp_path: Path) -> None:
    path = tmp_path / "lies.parquet"
    write_table(pyarrow.table({f"c{at}": ["\0" * 100_000_000] for at in range(3)}), path, compression="zstd")
    with hostile.ends(), ReadApart(memory=600 << 20) as apart:
        with pytest.raises(Unreadable, match=r"memory|parser"):
            list(apart.rows(path, (), 1 << 40))
        write_table(pyarrow.table({"a": ["kept"]}), path)
        assert list(apart.rows(path, (), 1000)) == [[{"a": "kept"}]]


def test_a_mutated_parquet_file_is_read_or_refused(attack: Attack, tmp_path: Path) -> None:
    path, ends = tmp_path / "rows.parquet", Counter[str]()
    content = {"_id": ["a", "b"], "text": ["x", "y" * 50], "n": [1, None], "l": [["a", "b"], []], "d": [{"a": 1.5}] * 2}
    write_table(pyarrow.table(content), path)
    whole = path.read_bytes()

    def survives(data: bytes) -> None:
        path.write_bytes(data)
        try:
            with hostile.ends():
                ends["rows"] += sum(map(len, apart.rows(path, (), 1 << 20)))
        except Unreadable as error:
            ends["refused in a line" if "\n" not in str(error) else "wrong"] += 1

    with ReadApart() as apart:
        attack.try_all(mutated(whole), survives, 2_000)
    assert not ends["wrong"]
    attack.report("inputs parquet", inputs=attack.times(2_000), **ends)
