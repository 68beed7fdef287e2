"""Derives from an RE2 pattern what every matching text must contain.

A text that matches `born.{1,50}Paris` holds the trigrams `bor orn par ari ris` (Russ Cox, "Regular Expression Matching
with a Trigram Index", 2012). A part that is not understood counts as "anything", so a lookup in the index may return
too much but never too little.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import reduce
from typing import NamedTuple

from harness1.retrieval.grep.syntax import Concat, Either, Literal, Node, NotUnderstood, Repeat, parse

SPECIAL = frozenset("\\%_\"'")
"""Characters with a special meaning in the filters of some engine; literals exclude them."""
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
    """Return the longest run of plain characters that every match of a valid RE2 pattern holds, or "".

    Flags, alternatives outside groups and rare escapes give "", groups are skipped, and a run ends before a character
    that is repeated.
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
"""Strings that a part of a pattern may stand for before it counts as anything."""
MOST_COPIES = 16
"""The most parts that a repeat is expanded to."""
UNKNOWN_CHOICES = 1000
"""Choices assumed for a pattern that is not understood."""

_SPECIAL = re.compile(r"[\\.+*?()|\[\]{}^$]")


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
    """Facts about a pattern, found without running it.

    Attributes:
        query: what a matching text must contain.
        free: places where a match can go on in several ways (a class, a dot, an optional part, an alternation), up to
            the first literal of 3 bytes. An automaton that follows all ways at once has up to 2 ** free states.
        held: the number of such places after that literal, times the forms that the literal may take.
        needle: the longest literal, or a few alternatives of one, as a pattern of its own that matches wherever the
            whole one does. If it equals the whole pattern, nothing is left to check. None if no literal has 3 bytes.
    """

    query: Query
    free: int
    held: int
    needle: str | None


def analyse(pattern: str) -> Analysis:
    """Analyse a pattern that RE2 has accepted."""
    try:
        parts = _joined(_parts(parse(pattern)))
    except NotUnderstood:
        return Analysis(ANYTHING, UNKNOWN_CHOICES, 0, None)
    gates = [at for at, part in enumerate(parts) if _shortest(part) >= 3]
    if not gates:
        return Analysis(_query(parts), _choices(parts), 0, None)
    before, after = parts[: gates[0] + 1], parts[gates[0] + 1 :]
    held = len(before[-1].strings or ()) * _choices(after)
    return Analysis(_query(parts), _choices(before), held, _needle(max((parts[at] for at in gates), key=_shortest)))


def fold(text: str) -> bytes:
    """Return UTF-8 without the distinctions that `(?i)` ignores around ASCII: A to Z, and the two other letters that
    fold to one of them, U+212A KELVIN SIGN and U+017F LATIN SMALL LETTER LONG S."""
    return text.replace("\u212a", "k").replace("\u017f", "s").encode().lower()


def trigrams(text: str) -> Query:
    """Return the query for all trigrams of a text, folded."""
    folded = fold(text)
    windows = (folded[at : at + 3] for at in range(len(folded) - 2))
    return _all(int.from_bytes(window, "big") for window in windows)


class _Part(NamedTuple):
    """A stretch of a match: one of a few strings, exact or in any case, or a text that satisfies a query."""

    strings: frozenset[str] | None
    query: Query
    choices: int
    any_case: bool = False


_EMPTY = frozenset({""})


def _parts(node: Node) -> list[_Part]:
    """Return the stretches that make up a match of a node."""
    match node:
        case Literal(strings, any_case):
            return [_Part(strings, ANYTHING, int(len(strings) > 1), any_case) if strings else _gap(1)]
        case Concat(nodes):
            return _joined(part for each in nodes for part in _parts(each))
        case Either(branches):
            return _alternation([_parts(branch) for branch in branches])
        case Repeat(repeated, least, most):
            return _repeated(_joined(_parts(repeated)), least, most)


def _gap(choices: int, query: Query = ANYTHING) -> _Part:
    return _Part(None, query, choices)


def _choices(parts: Iterable[_Part]) -> int:
    return sum(part.choices for part in parts)


def _shortest(part: _Part) -> int:
    """Return the bytes of its shortest string, folded; 0 if it is not one of a few strings."""
    return min(len(fold(string)) for string in part.strings) if part.strings else 0


def _needle(part: _Part) -> str:
    quoted = (_SPECIAL.sub(r"\\\g<0>", string) for string in sorted(part.strings or ()))
    return ("(?i)" if part.any_case else "") + "|".join(quoted)


def _all(queries: Iterable[Query]) -> Query:
    """Return the conjunction, flat and without repetition."""
    flat: dict[Query, None] = {}
    for query in queries:
        flat.update(dict.fromkeys(query.of if isinstance(query, All) else (query,)))
    return next(iter(flat)) if len(flat) == 1 else All(tuple(flat))


def _some(queries: Iterable[Query]) -> Query:
    """Return the disjunction; it is `ANYTHING` if one of the queries is."""
    distinct = tuple(dict.fromkeys(queries))
    if ANYTHING in distinct:
        return ANYTHING
    return distinct[0] if len(distinct) == 1 else Some(distinct)


def _query(parts: Sequence[_Part]) -> Query:
    return _all(part.query if part.strings is None else _some(map(trigrams, sorted(part.strings))) for part in parts)


def _joined(parts: Iterable[_Part]) -> list[_Part]:
    """Merge neighbours that stand for few strings."""
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
    """Return the strings that the joined parts match as a whole, if they are few."""
    if not parts:
        return _EMPTY
    return parts[0].strings if len(parts) == 1 else None


def _alternation(branches: Sequence[Sequence[_Part]]) -> list[_Part]:
    """Return parts for one of several sequences of joined parts."""
    choices = 1 + sum(map(_choices, branches))
    sets = [_only_strings(branch) for branch in branches]
    union = reduce(frozenset.union, (strings or _EMPTY for strings in sets))
    if None in sets or len(union) > LARGEST_SET:
        return [_gap(choices, _some(map(_query, branches)))]
    return [_Part(union, ANYTHING, choices, any(part.any_case for branch in branches for part in branch))]


def _repeated(parts: Sequence[_Part], least: int, most: int) -> list[_Part]:
    """Return parts for joined parts that occur at least `least` and at most `most` times."""
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
