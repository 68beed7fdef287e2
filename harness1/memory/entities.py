"""Extracts names, years and dates, which link one document to another."""

from __future__ import annotations

import re
from functools import lru_cache

from harness1.memory.sentences import UPPER, WORDS

FUNCTION_WORDS, _COMMON = WORDS["function"], WORDS["common"]
_CALENDAR = WORDS["months"] | WORDS["days"] | WORDS["calendar"]
_OPENINGS = FUNCTION_WORDS | _CALENDAR
_ACRONYMS = frozenset(("US", "WHO"))
_CONTRACTIONS = frozenset(("t", "s", "m", "d", "ll", "re", "ve"))
_LONGEST = 100
_SENTENCE_BREAKS = ".!?:;\n\r\t•*|-–—"

_U = f"[A-Z{UPPER}]"
_TITLE = r"(?:Mr|Mrs|Ms|Dr|Prof|St|Mt|Ft|Gen|Sen|Gov|Lt|Col|Capt|Sgt)\.(?= )"
_REST = r"\w*+(?:&\w++)*+(?:['’](?!s\b)\w++|-\w++)*+"
_WORD = rf"(?:{_TITLE}|{_U}\.(?:{_U}\.)*+|{_U}{_REST})"
_PARTICLE = r"(?:of|the|van|von|der|den|de|del|della|di|da|dos|du|la|le|el|al|bin|ibn|&) "
_JOIN = rf" (?:{_PARTICLE}){{0,2}}(?:(?:al|el)-|[dl]['’])?"
_NAME = rf"{_WORD}(?:{_JOIN}{_WORD}){{0,5}}(?: [0-9]{{1,3}}(?![\w%]|[.,:/-][0-9]))?"
_DATE = r"(?<![0-9][.,])(?:[0-9]{4}s?|[0-9]{1,2}/[0-9]{1,2}/[0-9]{2,4})(?![\w/]|[.,][0-9])"
_ENTITY = re.compile(
    # The lookahead lets the search skip what can begin no entity; the group is the tail of iPhone, eBay, mRNA.
    rf"(?=[A-Z0-9{UPPER}])(?:(?<!\w)(?:{_DATE}|[0-9]{{0,2}}{_NAME})|(?:(?<=\b[a-z])|(?<=\b[a-z][a-z]))({_U}\w+))"
)

_YEAR = re.compile(_DATE)


@lru_cache(maxsize=2048)
def extract(text: str, limit_characters: int) -> tuple[str, ...]:
    """Return the distinct entities of the first `limit_characters` of a text, in order of first appearance.

    They are names (runs of up to six capitalised words, with particles, initials and a trailing number), acronyms,
    mixed-case words, four-digit years and decades, and numeric dates. Leading function words and honorifics, and
    possessive endings, are taken off. A single common word at the start of a sentence counts only where the text has it
    capitalised inside a sentence as well.
    """
    text = text[:limit_characters]
    found: dict[str, bool] = {}
    for match in _ENTITY.finditer(text):
        raw = match.group()
        if match.lastindex:
            if len(raw) <= _LONGEST:
                found[_head(text, match.start()) + raw] = True
            continue
        for part in _parts(raw) if ". " in raw else (raw,):
            name, common = _name(part)
            if not common or part != raw or not _starts_sentence(text, match.start()):
                found[name] = True
            else:
                found.setdefault(name, False)
    return tuple([name for name, certain in found.items() if certain and name])


def _head(text: str, start: int) -> str:
    """Return the one or two lower-case letters before the capital of a mixed-case word."""
    return text[start - 2 : start].lstrip() if start > 1 and text[start - 2].isalpha() else text[start - 1]


def _parts(raw: str) -> list[str]:
    """Cut a match where an abbreviation turns out to have ended a sentence, because a function word follows."""
    parts: list[list[str]] = [[]]
    for word in raw.split(" "):
        if parts[-1] and parts[-1][-1].endswith(".") and word[0].isupper() and word.lower() in FUNCTION_WORDS:
            parts.append([])
        parts[-1].append(word)
    return [" ".join(part) for part in parts]


@lru_cache(maxsize=4096)
def _name(raw: str) -> tuple[str, bool]:
    """Return the name in a match, without leading function words, and whether it is a common word. A bare month,
    numeral, initial or letter gives an empty name."""
    head = raw.partition(" ")[0]
    lowered = head.lower()
    if head.isalpha() and len(head) > 1 and lowered not in _OPENINGS and head.strip("IVX") and raw[-1] != ".":
        # Most matches are whole names as they stand.
        return (raw, len(head) == len(raw) and lowered in _COMMON) if len(raw) <= _LONGEST else ("", False)
    if raw[0].isdigit() and _YEAR.fullmatch(raw):
        return raw, False
    words = raw.split(" ")
    first = 0
    while first < len(words) and _leads(words[first]):
        first += 1
    words = words[first:]
    if not words or len(raw) > _LONGEST or _names_nothing(words):
        return "", False
    if _is_initial(words[-1]):
        words[-1] = words[-1][:-1]
    return " ".join(words), first == 0 and words[0].lower() in _COMMON and len(words) == 1


def _names_nothing(words: list[str]) -> bool:
    if len(words) == 1 and (len(words[0]) < 2 or _is_initial(words[0])):
        return True
    numbered = words[0].lower().rstrip(".") in _CALENDAR
    rest = "".join(words[numbered:])
    return not rest or rest.isdigit()


def _leads(word: str) -> bool:
    """Return whether a word cannot start a name: a function word, a contraction, or the Roman numeral of a part or
    list."""
    lowered = word.lower()
    if lowered in FUNCTION_WORDS:
        return word not in _ACRONYMS
    if "'" in word or "’" in word:
        stem, _, ending = lowered.replace("’", "'").partition("'")
        return ending in _CONTRACTIONS and (ending == "t" or stem in FUNCTION_WORDS)
    return 1 < len(word) < 6 and not word.strip("IVX")


def _is_initial(word: str) -> bool:
    return len(word) == 2 and word[1] == "."


def _starts_sentence(text: str, start: int) -> bool:
    before = text[max(0, start - 4) : start].rstrip(" \"'“‘([")
    return not before or before[-1] in _SENTENCE_BREAKS
