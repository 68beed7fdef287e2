"""Comma-separated values that a spreadsheet shows and never evaluates."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence

FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20")
"""Prefixes of texts that a spreadsheet takes for formulas (OWASP, CSV injection), the last four in full width."""


def csv_table(columns: Sequence[str], rows: Iterable[Iterable[str | float]]) -> str:
    """Return rows under their headings as comma-separated values (RFC 4180).

    A text that a spreadsheet would evaluate is prefixed with an apostrophe. Numbers stay as they are.
    """
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    for row in (columns, *rows):
        writer.writerow([_inert(cell) if isinstance(cell, str) else cell for cell in row])
    return text.getvalue()


def _inert(cell: str) -> str:
    return f"'{cell}" if cell.lstrip("' ").startswith(FORMULA) else cell
