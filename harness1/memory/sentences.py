"""Sentence borders, for compression and verification."""

from __future__ import annotations

import re
from functools import lru_cache
from importlib import resources
from string import ascii_lowercase, ascii_uppercase

import msgspec

LONGEST = 600
"""Characters after which text without a border is cut at white space: tables and lists need borders too."""

UPPER = "".join(letter for letter in map(chr, range(0x80, 0x2000)) if letter.isupper())
"""The upper-case letters of Latin, Greek, Cyrillic, Armenian and Georgian beyond ASCII, for a character class."""


WORDS = {
    kind: frozenset(words.split())
    for kind, words in msgspec.toml.decode(
        resources.files(__package__).joinpath("words.toml").read_bytes(), type=dict[str, str]
    ).items()
}
"""The word lists of `words.toml`."""

_SEPARATED = bytes(
    code if code >= 128 or chr(code).isalnum() or chr(code) == "_" else 32 for code in range(256)
).translate(bytes.maketrans(ascii_uppercase.encode(), ascii_lowercase.encode()))
"""Bytes of UTF-8 with a space for every ASCII character outside words, in lower case."""
_TOKEN = re.compile(r"\w+")
_BORDER = re.compile(rf"([.!?][\"'”’)\]]?)\s++(?=[\"'“‘(\[]?[A-Z0-9{UPPER}])")
_PIECE = re.compile(rf"\S(?:.{{0,{LONGEST - 2}}}\S)?(?!\S)|\S++", re.DOTALL)
_INITIALS = re.compile(r"(?:[^\W\d_]\.)+")
_OPENING = "\"'“‘(["
_ABBREVIATIONS, _BEFORE_NUMBERS = WORDS["abbreviations"], WORDS["before_numbers"]
_LONGEST_ABBREVIATION = 12
_LONGEST_WORD = 7
"""Letters of a word that is longer than any abbreviation."""


def tokens(text: str) -> list[str]:
    """Return the runs of letters, digits and underscores of a text in lower case. Bytes are cut five times as fast as by
    the expression, which is left for what is not ASCII."""
    if text.isascii():
        return text.encode().translate(_SEPARATED).decode().split()
    pieces = text.lower().encode("utf-8", "surrogatepass").translate(_SEPARATED).decode("utf-8", "surrogatepass")
    return [word for piece in pieces.split() for word in ((piece,) if piece.isascii() else _TOKEN.findall(piece))]


@lru_cache(maxsize=1024)
def split(text: str) -> tuple[str, ...]:
    """Cut a text into its sentences, without the white space between them.

    A sentence ends at a newline, and at white space between `.`, `!` or `?` (with an optional closing quote or bracket)
    and an upper-case letter or digit, unless what precedes is an abbreviation or an initial. Stretches longer than
    `LONGEST` characters are cut at white space. Nothing but white space is lost; the time is linear.
    """
    pieces: list[str] = []
    for line in text.splitlines():
        line = line.strip()
        start = 0
        for border in _BORDER.finditer(line):
            if not _abbreviates(line, border.end(1), border.end()):
                pieces.append(line[start : border.end(1)])
                start = border.end()
        if line:
            pieces.append(line[start:])
    if any(len(piece) > LONGEST for piece in pieces):
        return tuple(part for piece in pieces for part in _PIECE.findall(piece))
    return tuple(pieces)


def _abbreviates(line: str, end: int, following: int) -> bool:
    """Return whether the word that ends at `end` is an abbreviation, given where the next word starts."""
    letters = end - 1 - _LONGEST_WORD
    if line[end - 1] != "." or (letters >= 0 and line[letters : end - 1].isalpha()):
        return False
    start = max(0, end - _LONGEST_ABBREVIATION)
    word = line[max(start, line.rfind(" ", start, end) + 1) : end].lstrip(_OPENING)
    lowered = word.lower()
    if lowered in _ABBREVIATIONS or (word[1:2] == "." and _INITIALS.fullmatch(word)):
        return True
    return lowered in _BEFORE_NUMBERS and line[following].isdigit()
