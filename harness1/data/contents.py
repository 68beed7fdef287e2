"""What a file holds: a title and sections of text; and how the bytes of a text are read, whatever their encoding."""

from __future__ import annotations

import codecs
import re
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import NamedTuple

TEXT_BYTES = 32 << 20  # largest text of a document, a hundred times a thick book. Longer ones are bombs, logs or data.
LONGEST_REASON = 200  # characters of an error of a parser, which may repeat the file
BROKEN = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, AssertionError, RecursionError, OSError)
"""What parsers of others raise for files that they do not understand."""


class Unreadable(Exception):
    """The file cannot become a document; the message says why."""


class NotText(Unreadable):
    """The file is of a kind that nothing reads. `is_absent`: the extra `documents` would."""

    def __init__(self, is_absent: bool = False) -> None:
        super().__init__("nothing reads this kind of file")
        self.is_absent = is_absent


class Contents(NamedTuple):
    """What a file holds. `sections`: each with its anchor (`page=3`), "" for one without a place. `notice`: what its
    owner should know of how it was read."""

    title: str
    sections: Sequence[tuple[str, str]]
    notice: str = ""


def whole(title: str, text: str, notice: str = "") -> Contents:
    """Return the contents of a file without places."""
    return Contents(title, [("", text)], notice)


def reason(error: BaseException) -> str:
    """Return what a parser says in one line that is not too long."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:LONGEST_REASON]


_MARKS: Mapping[bytes, str] = {
    codecs.BOM_UTF8: "utf-8",
    codecs.BOM_UTF32_LE: "utf-32-le",
    codecs.BOM_UTF32_BE: "utf-32-be",
    codecs.BOM_UTF16_LE: "utf-16-le",
    codecs.BOM_UTF16_BE: "utf-16-be",
}
_DECLARED = re.compile(rb"""(?i)<(?:meta|\?xml)\b[^>]{0,500}?\b(?:charset|encoding)\s*=\s*["']?\s*([\w.:-]{2,40})""")
_CONTROLS = bytes({*range(32)} - {*b"\t\n\v\f\r\x1b"})
SNIFFED = 8192  # bytes by which a file is known to hold no text
USUAL = (
    *("cp1252", "cp1250", "cp1251", "cp1253", "cp1254", "cp1255", "cp1256", "koi8_r"),
    *("cp932", "euc_jp", "gb18030", "big5", "cp949"),
)
"""Encodings that old files have, the more usual ones first: among all that Python has, most short texts fit another."""
DETECTED = 256 << 10  # bytes by which the encoding of a text is found
DAMAGED = 3  # letters beyond ASCII, for each one that is broken, of which a text in UTF-8 has more than any other


def is_binary(data: bytes) -> bool:
    """Return whether the beginning of a file is that of no text: it has zeros, or more than a few other controls."""
    data = data[:SNIFFED]
    if any(data.startswith(mark) for mark in _MARKS):
        return False
    return b"\0" in data or len(data) - len(data.translate(None, _CONTROLS)) > len(data) // 100


def decoded(data: bytes, *, declares: bool = False) -> tuple[str, str]:
    """Return the text of some bytes: as their mark says, UTF-8 (a little of it may be broken), as they declare, or
    as a detector finds; and a notice if their encoding was guessed or does not fit."""
    for mark, encoding in _MARKS.items():
        if data.startswith(mark):
            return _lenient(data[len(mark) :], encoding)
    if wide := _wide(data[:SNIFFED]):
        return _lenient(data, wide)
    text, wrong = _lenient(data, "utf-8")
    if not wrong or len(text) - len(text.encode("ascii", "ignore")) >= DAMAGED * text.count("\ufffd"):
        return text, wrong
    if declares and (found := _DECLARED.search(data[:4096])):
        try:
            name = codecs.lookup(found[1].decode()).name
            if name.startswith("utf"):
                raise LookupError("it would not have been found")
            # Browsers read Latin-1 as the encoding of Windows, which has quotes where the other has controls.
            return _lenient(data, "cp1252" if name in ("iso8859-1", "ascii") else name)
        except (LookupError, ValueError):
            pass  # there is none of that name, it is one of bytes, or the declaration is wrong
    encoding = _detected(data)
    text, unfit = _lenient(data, encoding)
    return text, unfit or f"{wrong}: read as {encoding}, which is a guess"


def _lenient(data: bytes, encoding: str) -> tuple[str, str]:
    try:
        return data.decode(encoding), ""
    except UnicodeDecodeError as error:
        return data.decode(encoding, "replace"), f"not {encoding} throughout (byte {error.start})"


def _wide(data: bytes) -> str:
    """Return how a text without a mark is written whose letters have two bytes, by its zeros; "" if it is none."""
    even, odd = (data[at::2].count(0) for at in (0, 1))
    if max(even, odd) <= len(data) // 4 or min(even, odd) > len(data) // 50:
        return ""
    return "utf-16-be" if even > odd else "utf-16-le"


_ODD = re.compile(
    "[\uff61-\uff9f\u3131-\u318e\u2500-\u259f]"  # half-width kana, letters of Hangul that make no syllable, frames
    "|(?<=[^\\W\\d_])[¢£¤¥¦§¨©¬®¯°±²³´¶¸¹¼½¾×÷ˇ˘˙˛˝](?=[^\\W\\d_])"  # signs within words
)
_HANGUL = re.compile("[\uac00-\ud7a3]")
ODD = 0.1  # share of the characters beyond ASCII above which a text is read wrongly


def _detected(data: bytes) -> str:
    from charset_normalizer import from_bytes

    if len(data) > DETECTED:  # a character that is cut into two would fit no encoding
        data = data[: data.rfind(b"\n", 0, DETECTED) + 1 or DETECTED]
    found = from_bytes(data, cp_isolation=[*USUAL])
    best = min(
        found,
        key=lambda each: (
            _is_odd(str(each), each.encoding),
            round(each.chaos, 2),
            -each.coherence,
            USUAL.index(each.encoding),
        ),
        default=None,
    )
    return best.encoding if best else USUAL[0]


def _is_odd(text: str, encoding: str) -> bool:
    """Return whether a text has what texts hardly have: the detector, which goes by words, cannot tell of one line."""
    odd, beyond = len(_ODD.findall(text)), sum(letter > "\x7f" for letter in text)
    if encoding == "cp949":  # syllables that Korean does not use are in its first rows and columns
        odd += sum(min(letter.encode(encoding)) < 0xA1 for letter in _HANGUL.findall(text))
    return odd > ODD * beyond


LONGEST_HEADER = 200  # characters of a table's header that stand in each of its rows
_NUMBER = re.compile(r"[\s\d.,:/%+-]*")


def table_text(rows: Sequence[Sequence[str]]) -> str:
    """Return a table as a line for each row, in which the header names each value, if there is one: a first row of
    different words, which is not so long that a text of it all would be too large."""
    rows = [[" ".join(cell.split()) for cell in row] for row in rows]
    rows = [row for row in rows if any(row)]
    head = rows[0] if len(rows) > 1 else []
    named = [name for name in head if not _NUMBER.fullmatch(name)]
    length = sum(map(len, head))
    is_header = len(head) >= 2 and len({*named}) == len(head)
    if not is_header or length > LONGEST_HEADER or length * len(rows) > TEXT_BYTES // 2:
        return "\n".join(" | ".join(row) for row in rows)
    return "\n".join(
        " | ".join(f"{name}: {cell}" if name else cell for name, cell in zip_longest(head, row, fillvalue="") if cell)
        for row in rows[1:]
    )
