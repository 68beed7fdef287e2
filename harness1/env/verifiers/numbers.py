"""Numbers, amounts, years and months of a text, for verifiers that compare them."""

from __future__ import annotations

import re
from collections.abc import Collection

from harness1.memory.dedup import MONTHS

_NUMBER = re.compile(r"([$€£¥]?)(?<![\w.,])(\d[\d,]*+(?:\.\d+)?)(\s?%|\s?per\s?cent\b)?")
_NUMERALS = "zero one two three four five six seven eight nine ten eleven twelve"
NUMBER_WORDS = {word: str(value) for value, word in enumerate(_NUMERALS.split())}


def read_numbers(lowered: str, words: Collection[str]) -> frozenset[tuple[str, str]]:
    """Return (kind, value) for each number of a text in lower case, where kind is percent, money, year, month or count.

    Args:
        words: the words of the text, for numbers in words and months. "one" and "may" say too little.
    """
    numbers = {_number(*match.groups()) for match in _NUMBER.finditer(lowered)}
    numbers |= {("count", NUMBER_WORDS[word]) for word in words if word in NUMBER_WORDS and word != "one"}
    numbers |= {("month", word) for word in words if word in MONTHS and word != "may"}
    return frozenset(numbers)


def _number(sign: str, digits: str, percent: str) -> tuple[str, str]:
    value = digits.replace(",", "")
    if percent:
        return "percent", value
    if sign:
        return "money", value
    return ("year" if len(digits) == 4 and "1000" <= digits <= "2099" else "count"), value
