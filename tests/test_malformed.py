"""What a user may have edited is refused with its place, whatever it holds; nothing of it raises anything else."""

from collections.abc import Callable
from pathlib import Path

import pytest

from harness1.data.benchmarks import addresses
from harness1.errors import UsageError
from harness1.memory.question import head, mentions
from harness1.rl.admission import read_report
from harness1.rl.pivots import PIVOTS, read_pivots
from harness1.rows import RowFile
from harness1.rows.calls import CALLS, read_records
from harness1.sft.data_card import CARD, read_card
from harness1.training.log import LOG
from harness1.viewer.work import training_card
from tests.data.hostile import ends

READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "a report of rl check": ("report.json", lambda folder: read_report(folder / "report.json")),
    "pivots": (PIVOTS, read_pivots),
    "training rows": ("rows.jsonl", lambda folder: RowFile(folder / "rows.jsonl")),
    "calls": (CALLS, lambda folder: list(read_records(folder))),
    "a data card": (CARD, read_card),
    "a training's log": (LOG, training_card),
}


@pytest.mark.parametrize(
    "content", [b"[" * 100_000, b'{"a\xff": 1}', b"9" * 5000, b"{", b"{}", b'{"more": ' + b"[" * 100_000]
)
@pytest.mark.parametrize("name", READERS)
def test_a_file_that_was_edited_is_refused(tmp_path: Path, name: str, content: bytes) -> None:
    file, read = READERS[name]
    (tmp_path / file).write_bytes(content + b"\n")
    with pytest.raises(UsageError, match=file):
        read(tmp_path)


def test_questions_titles_and_cells_without_end_are_read_at_once() -> None:
    with ends():
        assert len(mentions("A." * 1_000_000)) < 10
        assert mentions(", A of " * 300_000) == []
        assert head("(" * 1_000_000) == ""
        assert head(" " * 1_000_000) == ""
        assert addresses(" " * 1_000_000 + "x") == []
        assert addresses("a" + " " * 1_000_000 + "http://b.org") == ["http://b.org"]
