r"""RE2 patterns as small trees (https://github.com/google/re2/wiki/Syntax).

Python's own parser, `re._parser`, accepts another language: it refuses `\Q..\E`, `\pL`, `\z`, `[[:alpha:]]`, `(?U)` and
flags inside a pattern, accepts `(?=...)` and `\1`, which RE2 refuses, and is private.
"""

from __future__ import annotations

import re
from typing import NamedTuple

LARGEST_CLASS = 4
"""The most members of a class that are listed."""
DEEPEST = 50
"""The deepest nesting of groups that is read."""
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


class Literal(NamedTuple):
    """One of a few strings, in any case if so marked; None stands for one character of too many to list."""

    strings: frozenset[str] | None
    any_case: bool = False


class Concat(NamedTuple):
    """Nodes one after the other; without any, an assertion or an empty text."""

    nodes: tuple[Node, ...]


class Either(NamedTuple):
    """One of several branches."""

    branches: tuple[Node, ...]


class Repeat(NamedTuple):
    """A node at least and at most so many times; `most` may be `UNBOUNDED`."""

    node: Node
    least: int
    most: int


Node = Literal | Concat | Either | Repeat


class NotUnderstood(Exception):
    """The pattern uses syntax that this parser does not support."""


def parse(pattern: str) -> Node:
    """Return the tree of a pattern that RE2 has accepted.

    Raises:
        NotUnderstood: a rare escape, or groups that are nested too deeply.
    """
    parser = _Parser(pattern)
    tree = parser.either()
    if parser.kind:
        raise NotUnderstood
    return tree


class _Parser:
    """A recursive descent over the tokens of a pattern."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._any_case = False
        self._depth = 0
        self._move(0)

    def either(self) -> Node:
        """Read branches up to the end of a group or of the pattern."""
        branches = [self._concat()]
        while self.kind == "either":
            self._take()
            branches.append(self._concat())
        return branches[0] if len(branches) == 1 else Either(tuple(branches))

    def _concat(self) -> Node:
        nodes: list[Node] = []
        while self.kind not in ("", "either", "close"):
            atoms = self._atoms()
            if self.kind == "repeat":
                if not atoms:
                    raise NotUnderstood  # the repeated node is further back
                atoms[-1] = Repeat(atoms[-1], *_bounds(self._take()))
            nodes += atoms
        return Concat(tuple(nodes))

    def _atoms(self) -> list[Node]:
        """Read the nodes that a repeat may follow: mostly one; one per character of a quotation; none for flags."""
        token = self._take()
        match token.lastgroup:
            case "run":
                return [self._literal({token["run"]})]
            case "one":
                return [self._literal({_decoded(token["one"])})]
            case "many":
                return [Literal(None)]
            case "empty":
                return [Concat(())]
            case "class":
                return [self._class(token.end(), negated=token[0] == "[^")]
            case "group" | "flags":
                return self._group(token)
            case "quotation":
                return [self._literal({each}) for each in token["quotation"]]
            case _:
                raise NotUnderstood

    def _group(self, head: re.Match[str]) -> list[Node]:
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

    def _class(self, at: int, negated: bool) -> Node:
        """Read a class from its first member, which may be a bracket."""
        few, members, first = not negated, set[str](), at
        while at == first or not self._pattern.startswith("]", at):
            member = _MEMBER.match(self._pattern, at)
            if member is None:
                raise NotUnderstood
            at = member.end()
            low = _decoded(member["low"]) if member["low"] else ""
            high = _decoded(member["high"]) if member["high"] else low
            few = few and low != "" and ord(high) - ord(low) < LARGEST_CLASS
            members.update(map(chr, range(ord(low), ord(high) + 1)) if few else ())
        self._move(at + 1)
        return self._literal(members) if few and 0 < len(members) <= LARGEST_CLASS else Literal(None)

    def _literal(self, strings: set[str]) -> Literal:
        # Beyond ASCII, a character in any case matches others that `fold` does not make equal to it.
        if self._any_case and not all(string.isascii() for string in strings):
            return Literal(None)
        return Literal(frozenset(strings), self._any_case)

    def _take(self) -> re.Match[str]:
        """Return the next token, and advance past it."""
        token = self._token
        if token is None:
            raise NotUnderstood
        self._move(token.end())
        return token

    def _move(self, at: int) -> None:
        self._token = _TOKEN.match(self._pattern, at)
        self.kind = (self._token and self._token.lastgroup) or ""


def _decoded(one: str) -> str:
    """Return the character that a plain or an escaped one stands for."""
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


def _bounds(repeat: re.Match[str]) -> tuple[int, int]:
    """Return the least and the largest number of repeats."""
    if repeat["least"] is None:
        return {"*": (0, UNBOUNDED), "+": (1, UNBOUNDED), "?": (0, 1)}[repeat[0][0]]
    least = int(repeat["least"])
    if repeat["comma"] is None:
        return least, least
    return least, UNBOUNDED if repeat["most"] is None else int(repeat["most"])
