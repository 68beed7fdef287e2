"""What every match of an RE2 pattern must hold, read off the pattern itself.

A text that matches `born.{1,50}Paris` holds the trigrams `bor orn par ari ris`. The idea is Russ Cox's, "Regular
Expression Matching with a Trigram Index" (2012). Whatever is not understood here counts as "anything": an index that
is asked with the answer may return too much, never too little.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import reduce
from typing import NamedTuple

SPECIAL = frozenset("\\%_\"'")
"""Characters that mean something in the filters of some engine; a literal goes without them."""
_TOKEN = re.compile(
    r"""
      (?P<refused>\(\?(?!:)|\{(?!\d+(?:,\d*)?\}))       # flags and names; what may be a repeat elsewhere
    | (?P<open>\((?:\?:)?) | (?P<close>\)) | (?P<either>\|)
    | (?P<repeat>[*+?]|\{\d+(?:,\d*)?\})
    | (?P<gap>[.^$]|\\[bBdDsSwWAzafnrtv]|\[\^?\]?(?:\[:\^?\w+:\]|\\.|[^\]\\])*\])
    | \\(?P<quoted>[^0-9A-Za-z])
    | (?P<unknown>[\\\[])                               # \Q, \x, \p and the like
    | (?P<plain>.)
    """,
    re.VERBOSE | re.DOTALL,
)


def required_literal(pattern: str) -> str:
    """The longest run of plain characters outside groups without which a valid RE2 pattern matches no text, or "".

    It errs on the side of "": flags, alternatives outside groups and rare escapes give none, what stands in a group
    is not looked at, and a run ends before a character that is repeated.
    """
    runs, run, depth = [""], "", 0
    for token in _TOKEN.finditer(pattern):
        kind = token.lastgroup
        if kind in ("refused", "unknown") or (kind == "either" and depth == 0):
            return ""
        depth += (kind == "open") - (kind == "close")
        character = token["quoted"] or token["plain"] or ""
        if character and depth == 0 and character.isprintable() and character not in SPECIAL:
            run += character
            continue
        runs.append(run[:-1] if kind == "repeat" else run)
        run = ""
    return max([*runs, run], key=len)


LARGEST_SET = 32
"""Strings that a part of a pattern may stand for before it counts as anything; members of a class: see below."""
LARGEST_CLASS = 4
MOST_COPIES = 16
"""Parts that a repeat is written out to."""
DEEPEST = 50
"""Groups inside one another that are looked into."""
UNBOUNDED = -1
UNKNOWN_CHOICES = 1000
"""Choices of a pattern that is not understood."""

_GROUP = re.compile(r"\((?:\?P?<\w+>|\?(?P<on>[imsU]*)(?:-(?P<off>[imsU]+))?(?P<end>[:)])|(?!\?))")
_REPEAT = re.compile(r"(?:\*|\+|\?|\{(?P<least>0|[1-9][0-9]{0,3})(?P<comma>,(?P<most>0|[1-9][0-9]{0,3})?)?\})\??")
_LONG_REPEAT = re.compile(r"\{[0-9]{5,}")
_HEX = re.compile(r"x(?:([0-9A-Fa-f]{2})|\{([0-9A-Fa-f]+)\})")
_PROPERTY = re.compile(r"[pP](?:\{[^}]*\}|[^{])")
_SPECIAL = re.compile(r"[\\.+*?()|\[\]{}^$]")
_POSIX = re.compile(r"\[:\^?\w+:\]")
_CONTROLS = {"a": "\a", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}


class All(NamedTuple):
    """A text must satisfy each of these."""

    of: tuple[Query, ...]


class Some(NamedTuple):
    """A text must satisfy at least one of these."""

    of: tuple[Query, ...]


Query = int | All | Some
"""Trigrams (three folded bytes, the first one highest) that a text must hold."""
ANYTHING = All(())


class Analysis(NamedTuple):
    """What is known of a pattern without running it.

    Args:
        free: places where a match can go on in more than one way (a class, a dot, an optional part, an alternation),
            counted up to the first literal of 3 bytes. An automaton that follows all ways at once has up to
            2 ** free states.
        held: the same from that literal on, once for each form that it may take.
        needle: the longest literal, or few alternatives of one, as a pattern by itself: whatever matches the whole
            pattern matches it too. Equal to the whole pattern, it leaves nothing to check. None: there is none of 3
            bytes.
    """

    query: Query
    free: int
    held: int
    needle: str | None


def analyse(pattern: str) -> Analysis:
    """Analyse a pattern that RE2 has accepted."""
    try:
        parts = _Parser(pattern).parse()
    except _NotUnderstood:
        return Analysis(ANYTHING, UNKNOWN_CHOICES, 0, None)
    gates = [at for at, part in enumerate(parts) if _shortest(part) >= 3]
    if not gates:
        return Analysis(_query(parts), _choices(parts), 0, None)
    before, after = parts[: gates[0] + 1], parts[gates[0] + 1 :]
    held = len(before[-1].strings or ()) * _choices(after)
    return Analysis(_query(parts), _choices(before), held, _needle(max((parts[at] for at in gates), key=_shortest)))


def fold(text: str) -> bytes:
    """UTF-8 without the distinctions that `(?i)` ignores around ASCII: A to Z, and the two letters beyond it that fold
    to one of them, U+212A KELVIN SIGN and U+017F LATIN SMALL LETTER LONG S."""
    return text.replace("\u212a", "k").replace("\u017f", "s").encode().lower()


def trigrams(text: str) -> Query:
    """That all trigrams of a text are there, folded."""
    folded = fold(text)
    windows = (folded[at : at + 3] for at in range(len(folded) - 2))
    return _all(int.from_bytes(window, "big") for window in windows)


class _NotUnderstood(Exception):
    """The pattern uses what `_Parser` does not follow."""


class _Part(NamedTuple):
    """A stretch of a match: one of a few strings, as they are or in any case, or some text that satisfies a query."""

    strings: frozenset[str] | None
    query: Query
    choices: int
    any_case: bool = False


_EMPTY = frozenset({""})


def _gap(choices: int, query: Query = ANYTHING) -> _Part:
    return _Part(None, query, choices)


def _choices(parts: Iterable[_Part]) -> int:
    return sum(part.choices for part in parts)


def _shortest(part: _Part) -> int:
    """Bytes of its shortest string, folded; none, if it is not one of a few strings."""
    return min((len(fold(string)) for string in part.strings or _EMPTY), default=0)


def _needle(part: _Part) -> str:
    quoted = (_SPECIAL.sub(r"\\\g<0>", string) for string in sorted(part.strings or ()))
    return ("(?i)" if part.any_case else "") + "|".join(quoted)


def _all(queries: Iterable[Query]) -> Query:
    """The conjunction, flat and without repetition."""
    flat: dict[Query, None] = {}
    for query in queries:
        flat.update(dict.fromkeys(query.of if isinstance(query, All) else (query,)))
    return next(iter(flat)) if len(flat) == 1 else All(tuple(flat))


def _some(queries: Iterable[Query]) -> Query:
    """The disjunction; anything, where one of the queries is that."""
    distinct = tuple(dict.fromkeys(queries))
    if ANYTHING in distinct:
        return ANYTHING
    return distinct[0] if len(distinct) == 1 else Some(distinct)


def _query(parts: Sequence[_Part]) -> Query:
    return _all(part.query if part.strings is None else _some(map(trigrams, sorted(part.strings))) for part in parts)


def _joined(parts: Iterable[_Part]) -> list[_Part]:
    """The same stretches, with neighbours that stand for few strings made one."""
    joined: list[_Part] = []
    for part in parts:
        last = joined[-1] if joined else None
        if last and last.strings and part.strings and len(last.strings) * len(part.strings) <= LARGEST_SET:
            product = (head + tail for head in last.strings for tail in part.strings)
            either = last.any_case or part.any_case
            joined[-1] = _Part(frozenset(product), ANYTHING, last.choices + part.choices, either)
        elif part.strings != _EMPTY:
            joined.append(part)
    return joined


def _only_strings(parts: Sequence[_Part]) -> frozenset[str] | None:
    """What the joined parts match as a whole, if that is a few strings."""
    if not parts:
        return _EMPTY
    return parts[0].strings if len(parts) == 1 else None


def _alternation(branches: Sequence[Sequence[_Part]]) -> list[_Part]:
    """One of several sequences of joined parts."""
    if len(branches) == 1:
        return list(branches[0])
    choices = 1 + sum(map(_choices, branches))
    sets = [_only_strings(branch) for branch in branches]
    union = reduce(frozenset.union, (strings or _EMPTY for strings in sets))
    if None in sets or len(union) > LARGEST_SET:
        return [_gap(choices, _some(map(_query, branches)))]
    return [_Part(union, ANYTHING, choices, any(part.any_case for branch in branches for part in branch))]


def _repeated(parts: Sequence[_Part], least: int, most: int) -> list[_Part]:
    """Joined parts at least so often, and at most so often."""
    if not parts or most == 0:
        return []
    choices = _choices(parts)
    total = max(choices, int(least != most)) * max(least, most, 1)
    if least == 0:
        strings = _only_strings(parts) if most == 1 else None
        if strings is None or len(strings) >= LARGEST_SET:
            return [_gap(total)]
        return [_Part(strings | _EMPTY, ANYTHING, total, parts[0].any_case)]
    copies = max(1, min(least, MOST_COPIES // len(parts)))
    rest = [] if copies == most else [_gap(total - copies * choices)]
    return [*list(parts) * copies, *rest]


class _Parser:
    """Reads RE2's syntax by recursive descent (https://github.com/google/re2/wiki/Syntax)."""

    def __init__(self, pattern: str) -> None:
        self._text = pattern
        self._at = 0
        self._any_case = False
        self._depth = 0

    def parse(self) -> list[_Part]:
        parts = self._alternatives()
        if self._at < len(self._text):
            raise _NotUnderstood
        return _joined(parts)

    def _alternatives(self) -> list[_Part]:
        branches = [self._sequence()]
        while self._take("|"):
            branches.append(self._sequence())
        return _alternation(branches)

    def _sequence(self) -> list[_Part]:
        parts: list[_Part] = []
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            atoms = self._atoms()
            repeat = _REPEAT.match(self._text, self._at)
            if (repeat and not atoms) or _LONG_REPEAT.match(self._text, self._at):
                raise _NotUnderstood  # what is repeated stands further back
            if repeat:
                self._at = repeat.end()
                atoms[-1] = _repeated(_joined(atoms[-1]), *_bounds(repeat))
            parts += (part for atom in atoms for part in atom)
        return _joined(parts)

    def _atoms(self) -> list[list[_Part]]:
        """The next things that a repeat could follow: mostly one; each character of a quotation; none for flags."""
        char = self._text[self._at]
        if char == "(":
            return self._group()
        self._at += 1
        if char == "[":
            return [[self._class()]]
        if char == ".":
            return [[_gap(1)]]
        if char in "^$":
            return [[]]
        if char != "\\":
            return [[self._literal(char)]]
        if self._take("Q"):
            quoted, _, _ = self._text[self._at :].partition("\\E")
            self._at = min(self._at + len(quoted) + 2, len(self._text))
            return [[self._literal(each)] for each in quoted]
        if self._next() in tuple("bBAz"):
            self._at += 1
            return [[]]
        escaped = self._escape()
        return [[_gap(1) if escaped is None else self._literal(escaped)]]

    def _group(self) -> list[list[_Part]]:
        head = _GROUP.match(self._text, self._at)
        self._depth += 1
        if head is None or self._depth > DEEPEST:
            raise _NotUnderstood
        self._at = head.end()
        outside = self._any_case
        self._any_case = (outside or "i" in (head["on"] or "")) and "i" not in (head["off"] or "")
        if head["end"] == ")":
            self._depth -= 1
            return []
        parts = self._alternatives()
        if not self._take(")"):
            raise _NotUnderstood
        self._any_case = outside
        self._depth -= 1
        return [parts]

    def _class(self) -> _Part:
        """A class, after its bracket: its members, if they are few, or anything."""
        few = not self._take("^")
        members: set[str] = set()
        first = True
        while first or not self._take("]"):
            first = False
            if self._text.startswith("[:", self._at):
                few, self._at = False, self._end(_POSIX)
                continue
            low = self._member()
            if low is None:
                few = False
                continue
            high: str | None = low
            if self._next() == "-" and self._text[self._at + 1 : self._at + 2] not in ("", "]"):
                self._at += 1
                high = self._member()
            if high is None:
                raise _NotUnderstood
            few = few and ord(high) - ord(low) < LARGEST_CLASS
            members.update(map(chr, range(ord(low), ord(high) + 1)) if few else ())
        if not few or not 0 < len(members) <= LARGEST_CLASS or self._beyond(members):
            return _gap(1)
        return _Part(frozenset(members), ANYTHING, int(len(members) > 1), self._any_case)

    def _member(self) -> str | None:
        """The next character of a class, None for an escape that stands for many."""
        char = self._next()
        if not char:
            raise _NotUnderstood
        self._at += 1
        return self._escape() if char == "\\" else char

    def _escape(self) -> str | None:
        """The character that an escape stands for, after its backslash; None if it is one of many."""
        char = self._next()
        if not char or not char.isascii():
            raise _NotUnderstood
        if char in "pP":
            self._at = self._end(_PROPERTY)
            return None
        if char == "x":
            digits = _HEX.match(self._text, self._at)
            self._at = self._end(_HEX)
            return chr(int((digits and (digits[1] or digits[2])) or "", 16))
        self._at += 1
        if char in "dDsSwW":
            return None
        if char in _CONTROLS:
            return _CONTROLS[char]
        if char.isalnum():
            raise _NotUnderstood
        return char

    def _literal(self, char: str) -> _Part:
        return _gap(1) if self._beyond({char}) else _Part(frozenset({char}), ANYTHING, 0, self._any_case)

    def _beyond(self, chars: set[str]) -> bool:
        """Whether characters match others that `fold` does not make equal to them."""
        return self._any_case and not all(char.isascii() for char in chars)

    def _next(self) -> str:
        return self._text[self._at : self._at + 1]

    def _take(self, char: str) -> bool:
        taken = self._next() == char
        self._at += taken
        return taken

    def _end(self, expected: re.Pattern[str]) -> int:
        found = expected.match(self._text, self._at)
        if found is None:
            raise _NotUnderstood
        return found.end()


def _bounds(repeat: re.Match[str]) -> tuple[int, int]:
    """How often at least and at most."""
    if repeat["least"] is None:
        return {"*": (0, UNBOUNDED), "+": (1, UNBOUNDED), "?": (0, 1)}[repeat[0][0]]
    least = int(repeat["least"])
    if repeat["comma"] is None:
        return least, least
    return least, UNBOUNDED if repeat["most"] is None else int(repeat["most"])
