"""Sentence borders, for compression and verification."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from importlib import resources

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

_TOKEN = re.compile(r"\w+")
_BORDER = re.compile(rf"([.!?][\"'”’)\]]?)\s++(?=[\"'“‘(\[]?[A-Z0-9{UPPER}])")
_PIECE = re.compile(rf"\S(?:.{{0,{LONGEST - 2}}}\S)?(?!\S)|\S++", re.DOTALL)
_INITIALS = re.compile(r"(?:[^\W\d_]\.)+")
_OPENING = "\"'“‘(["
_ABBREVIATIONS, _BEFORE_NUMBERS = WORDS["abbreviations"], WORDS["before_numbers"]
_LONGEST_ABBREVIATION = 12
_LONGEST_WORD = 7
"""Letters of a word that is longer than any abbreviation."""


def table(kept: Callable[[str], bool]) -> bytes:
    """Return the table for `runs` of these ASCII characters: a space for all others, and what is not ASCII as it is."""
    return bytes(code if code >= 128 or kept(chr(code)) else ord(" ") for code in range(256))


def runs(text: str, kept: bytes, pattern: re.Pattern[str]) -> list[str]:
    """Return what `pattern.findall` finds. Bytes are cut five times as fast, so the pattern is left for pieces that are
    not ASCII."""
    if text.isascii():
        return text.encode().translate(kept).decode().split()
    pieces = text.encode("utf-8", "surrogatepass").translate(kept).decode("utf-8", "surrogatepass").split()
    return [run for piece in pieces for run in ((piece,) if piece.isascii() else pattern.findall(piece))]


def tokens(text: str) -> list[str]:
    """Return the runs of letters, digits and underscores of a text in lower case."""
    return runs(text.lower(), _WORD_CHARACTERS, _TOKEN)


_WORD_CHARACTERS = table(lambda character: character.isalnum() or character == "_")


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
