r"""Derives from an RE2 pattern (https://github.com/google/re2/wiki/Syntax) what every matching text must contain.

A text that matches `born.{1,50}Paris` holds the trigrams `bor orn par ari ris` (Cox, "Regular Expression Matching with
a Trigram Index", 2012). What is not understood counts as "anything": a lookup may return too much, never too little.
Python's own parser, `re._parser`, is private and accepts another language: no `\pL` or `[[:alpha:]]`, but `(?=...)`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import reduce
from typing import NamedTuple

LARGEST_CLASS = 4
DEEPEST = 50
LARGEST_SET = 32
"""Strings that a part of a pattern may stand for before it counts as anything."""
MOST_COPIES = 16
UNKNOWN_CHOICES = 1000
UNBOUNDED = -1

_MANY = r"\\(?:[dDsSwW]|[pP](?:\{[^}]*\}|[^{]))"
_ONE = r"\\x(?:[0-9A-Fa-f]{2}|\{[0-9A-Fa-f]+\})|\\.|[^\\]"
_COUNT = r"0|[1-9][0-9]{0,3}"
_TOKEN = re.compile(
    rf"""
      (?P<close>\)) | (?P<either>\|)
    | (?P<group>\((?!\?)|\(\?P?<\w+>)
    | \(\?(?P<on>[imsU]*)(?:-(?P<off>[imsU]+))?(?P<flags>[:)])
    | (?P<repeat>(?:[*+?]|\{{(?P<least>{_COUNT})(?P<comma>,(?P<most>{_COUNT})?)?\}})\??)
    | \\Q(?P<quotation>.*?)(?:\\E|\Z)
    | (?P<empty>[\^$]|\\[bBAz])
    | (?P<many>\.|{_MANY})
    | (?P<class>\[\^?)
    | (?P<run>[0-9A-Za-z\ ]+(?![*+?{{]))                    # plain, and nothing of it repeats
    | (?P<one>(?!\(){_ONE})
    | (?P<unknown>.)
    """,
    re.VERBOSE | re.DOTALL,
)
_MEMBER = re.compile(
    rf"(?P<many>\[:\^?\w+:\]|{_MANY})|(?!\[:)(?P<low>{_ONE})(?:-(?!\])(?P<high>{_MANY}|{_ONE}))?", re.DOTALL
)
_CONTROLS = {"a": "\a", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}
_SPECIAL = re.compile(r"[\\.+*?()|\[\]{}^$]")


class NotUnderstood(Exception):
    """The pattern uses syntax that this parser does not support."""


class All(NamedTuple):
    """A text must satisfy each of these."""

    of: tuple[Query, ...]


class Some(NamedTuple):
    """A text must satisfy at least one of these."""

    of: tuple[Query, ...]


Query = int | All | Some
"""Trigrams (three folded bytes, the first one highest) that a text must hold."""
ANYTHING = All(())


class Part(NamedTuple):
    """A stretch of a match: a few strings, or a query; and the places where it can go on in several ways."""

    strings: frozenset[str] | None = None
    query: Query = ANYTHING
    choices: int = 0
    any_case: bool = False


class Analysis(NamedTuple):
    """Facts about a pattern, found without running it: the `query` that a matching text satisfies; `free`, the places
    up to the first literal of 3 bytes where a match can go on in several ways, so that an automaton has up to 2 ** free
    states; `held`, those after it, times the forms of the literal; `needle`, a pattern of the longest literal or a few
    alternatives, which matches wherever the whole one does (equal to it: all; None: none of 3 bytes)."""

    query: Query
    free: int
    held: int
    needle: str | None


def analyse(pattern: str) -> Analysis:
    """Analyse a pattern that RE2 has accepted."""
    try:
        parts = parse(pattern)
    except NotUnderstood:
        return Analysis(ANYTHING, UNKNOWN_CHOICES, 0, None)
    gates = [at for at, part in enumerate(parts) if _shortest(part) >= 3]
    if not gates:
        return Analysis(_query(parts), _choices(parts), 0, None)
    before, after = parts[: gates[0] + 1], parts[gates[0] + 1 :]
    held = len(before[-1].strings or ()) * _choices(after)
    longest = max((parts[at] for at in gates), key=_shortest)
    quoted = (_SPECIAL.sub(r"\\\g<0>", string) for string in sorted(longest.strings or ()))
    needle = ("(?i)" if longest.any_case else "") + "|".join(quoted)
    return Analysis(_query(parts), _choices(before), held, needle)


def fold(text: str) -> bytes:
    """Return UTF-8 without what `(?i)` ignores around ASCII: case, U+212A KELVIN SIGN, U+017F LONG S."""
    return text.replace("\u212a", "k").replace("\u017f", "s").encode().lower()


def trigrams(text: str) -> Query:
    """Return the query for all trigrams of a text, folded."""
    folded = fold(text)
    windows = (folded[at : at + 3] for at in range(len(folded) - 2))
    return _all(int.from_bytes(window, "big") for window in windows)


def parse(pattern: str) -> list[Part]:
    """Return the stretches of a match of a valid RE2 pattern. Raises NotUnderstood: a rare escape, or deep nesting."""
    parser = _Parser(pattern)
    parts = _join(parser.either())
    if parser.kind:
        raise NotUnderstood
    return parts


class _Parser:
    """A recursive descent over the tokens of a pattern."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._any_case = False
        self._depth = 0
        self._move(0)

    def either(self) -> list[Part]:
        """Read branches up to the end of a group or of the pattern."""
        branches = [self._concat()]
        while self.kind == "either":
            self._take()
            branches.append(self._concat())
        return branches[0] if len(branches) == 1 else _alternate(branches)

    def _concat(self) -> list[Part]:
        atoms: list[list[Part]] = []
        while self.kind not in ("", "either", "close"):
            read = self._atoms()
            if self.kind == "repeat":
                if not read:
                    raise NotUnderstood  # the repeated atom is further back
                read[-1] = _repeat(_join(read[-1]), self._take())
            atoms += read
        return _join(part for atom in atoms for part in atom)

    def _atoms(self) -> list[list[Part]]:
        """Read what a repeat may follow: mostly one; one per character of a quotation; none for flags."""
        token = self._take()
        match token.lastgroup:
            case "run":
                return [self._literal({token["run"]})]
            case "one":
                return [self._literal({_decode(token["one"])})]
            case "many":
                return [[Part(choices=1)]]
            case "empty":
                return [[]]
            case "class":
                return [self._class(token.end(), negated=token[0] == "[^")]
            case "group" | "flags":
                return self._group(token)
            case "quotation":
                return [self._literal({each}) for each in token["quotation"]]
            case _:
                raise NotUnderstood

    def _group(self, head: re.Match[str]) -> list[list[Part]]:
        if self._depth == DEEPEST:
            raise NotUnderstood
        outside = self._any_case
        self._any_case = (outside or "i" in (head["on"] or "")) and "i" not in (head["off"] or "")
        if head["flags"] == ")":
            return []
        self._depth += 1
        inner = self.either()
        if self.kind != "close":
            raise NotUnderstood
        self._take()
        self._depth -= 1
        self._any_case = outside
        return [inner]

    def _class(self, at: int, negated: bool) -> list[Part]:
        """Read a class from its first member, which may be a bracket."""
        few, members, first = not negated, set[str](), at
        while at == first or not self._pattern.startswith("]", at):
            member = _MEMBER.match(self._pattern, at)
            if member is None:
                raise NotUnderstood
            at = member.end()
            low = _decode(member["low"]) if member["low"] else ""
            high = _decode(member["high"]) if member["high"] else low
            few = few and low != "" and ord(high) - ord(low) < LARGEST_CLASS
            members.update(map(chr, range(ord(low), ord(high) + 1)) if few else ())
        self._move(at + 1)
        return self._literal(members) if few and 0 < len(members) <= LARGEST_CLASS else [Part(choices=1)]

    def _literal(self, strings: set[str]) -> list[Part]:
        # Beyond ASCII, a character in any case matches others that `fold` does not make equal to it.
        if self._any_case and not all(string.isascii() for string in strings):
            return [Part(choices=1)]
        return [Part(frozenset(strings), choices=int(len(strings) > 1), any_case=self._any_case)]

    def _take(self) -> re.Match[str]:
        token = self._token
        if token is None:
            raise NotUnderstood
        self._move(token.end())
        return token

    def _move(self, at: int) -> None:
        self._token = _TOKEN.match(self._pattern, at)
        self.kind = (self._token and self._token.lastgroup) or ""


def _decode(one: str) -> str:
    if not one.startswith("\\"):
        return one
    if one[1] == "x" and len(one) > 2:
        character = chr(int(one[2:].strip("{}"), 16))
        if "\ud800" <= character <= "\udfff":
            raise NotUnderstood  # no text has a surrogate
        return character
    if one[1] not in _CONTROLS and (one[1].isalnum() or not one[1].isascii()):
        raise NotUnderstood
    return _CONTROLS.get(one[1], one[1])


_EMPTY = frozenset({""})


def _choices(parts: Iterable[Part]) -> int:
    return sum(part.choices for part in parts)


def _shortest(part: Part) -> int:
    """Return the bytes of its shortest string, folded; 0 if it is not one of a few strings."""
    return min(len(fold(string)) for string in part.strings) if part.strings else 0


def _query(parts: Sequence[Part]) -> Query:
    return _all(part.query if part.strings is None else _some(map(trigrams, sorted(part.strings))) for part in parts)


def _all(queries: Iterable[Query]) -> Query:
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


def _join(parts: Iterable[Part]) -> list[Part]:
    """Merge neighbours that stand for few strings."""
    joined: list[Part] = []
    for part in parts:
        last = joined[-1] if joined else None
        if last and last.strings and part.strings and len(last.strings) * len(part.strings) <= LARGEST_SET:
            product = (head + tail for head in last.strings for tail in part.strings)
            either = last.any_case or part.any_case
            joined[-1] = Part(frozenset(product), choices=last.choices + part.choices, any_case=either)
        elif part.strings != _EMPTY:
            joined.append(part)
    return joined


def _only_strings(parts: Sequence[Part]) -> frozenset[str] | None:
    """Return the strings that the joined parts match as a whole, if they are few."""
    if not parts:
        return _EMPTY
    return parts[0].strings if len(parts) == 1 else None


def _alternate(branches: Sequence[Sequence[Part]]) -> list[Part]:
    """Return parts for one of several sequences of joined parts."""
    choices = 1 + sum(map(_choices, branches))
    sets = [_only_strings(branch) for branch in branches]
    union = reduce(frozenset.union, (strings or _EMPTY for strings in sets))
    if None in sets or len(union) > LARGEST_SET:
        return [Part(query=_some(map(_query, branches)), choices=choices)]
    return [Part(union, choices=choices, any_case=any(part.any_case for branch in branches for part in branch))]


def _repeat(parts: Sequence[Part], token: re.Match[str]) -> list[Part]:
    """Return parts for joined parts that occur as often as a token says."""
    if token["least"] is None:
        least, most = {"*": (0, UNBOUNDED), "+": (1, UNBOUNDED), "?": (0, 1)}[token[0][0]]
    else:
        least = int(token["least"])
        most = int(token["most"] or UNBOUNDED) if token["comma"] else least
    if not parts or most == 0:
        return []
    choices = _choices(parts)
    total = max(choices, int(least != most)) * max(least, most, 1)
    if least == 0:
        strings = _only_strings(parts) if most == 1 else None
        if strings is None or len(strings) >= LARGEST_SET:
            return [Part(choices=total)]
        return [Part(strings | _EMPTY, choices=total, any_case=parts[0].any_case)]
    copies = max(1, min(least, MOST_COPIES // len(parts)))
    rest = [] if copies == most else [Part(choices=total - copies * choices)]
    return [*list(parts) * copies, *rest]
