"""Invents proper names from syllables: plentiful, and distinct even without case and accents."""

from __future__ import annotations

import random
import unicodedata
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

ONSETS = ("B", "Br", "D", "Dr", "F", "Fl", "G", "Gr", "H", "J", "K", "Kl", "Kr", "L", "M", "N", "P", "Pr", "R", "S",
          "Sk", "Sl", "St", "T", "Tr", "V", "W", "Z", "Š", "Č", "Th", "Qu", "Ł")  # fmt: skip
VOWELS = ("a", "e", "i", "o", "u", "a", "e", "i", "o", "ei", "au", "é", "ö", "å", "ía")
CODAS = ("l", "n", "r", "s", "m", "k", "nd", "rn", "v", "ñ", "t", "ss")
LINKS = ("b", "d", "f", "g", "h", "k", "l", "m", "n", "p", "r", "s", "t", "v", "w", "z", "st", "br", "dr", "š")
SOFT_CODAS = ("l", "n", "r", "s", "m", "", "")
ENDINGS = ("a", "en", "or", "is", "um", "o", "ek", "ay", "in", "ard", "ow", "el", "ik", "ova", "ens", "ö", "mark", "by")
FEMALE, MALE = ("a", "ine", "isa", "ette", "ía", "inka"), ("o", "an", "ek", "us", "ard", "ö")
PARTICLES = ("van", "de", "von", "van der", "del", "af")
TRADES = ("Systems", "Holdings", "Instruments", "Works", "Logistics", "Group", "Optics", "Maritime", "Foods", "& Sons",
          "Biologics", "Energy", "Textiles", "Robotics", "Paper Mills", "Glass", "Shipping Lines")  # fmt: skip
FIELDS = ("Glaciology", "Applied Optics", "Marine Biology", "Metallurgy", "Linguistics", "Soil Science", "Acoustics",
          "Hydraulics", "Astronomy", "Crop Genetics", "Public Health", "Printing Arts")  # fmt: skip
ADJECTIVES = ("Silent", "Crooked", "Amber", "Distant", "Second", "Borrowed", "Hollow", "Patient", "Northern", "Paper",
              "Unwritten", "Salted", "Velvet", "Last", "Burning", "Forgotten", "Narrow", "Blue", "Seventh")  # fmt: skip
NOUNS = ("Harbour", "Orchard", "Lantern", "Winter", "Bridge", "Archive", "Sparrow", "Compass", "Quarry", "Letter",
         "Lighthouse", "Ferry", "Garden", "Clock", "Tide", "Violin", "Frontier", "Staircase", "Meadow")  # fmt: skip
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def below(rng: random.Random, limit: int) -> int:
    """Return a whole number in [0, limit). Only `random()` promises the same numbers on every version of Python."""
    return int(rng.random() * limit)


def pick(rng: random.Random, options: Sequence[T]) -> T:
    """Return one of the options, each equally likely."""
    return options[below(rng, len(options))]


def fold(name: str) -> str:
    """Return a name as careless readers see it: without case and accents."""
    plain = unicodedata.normalize("NFKD", name)
    return "".join(letter for letter in plain if not unicodedata.combining(letter)).casefold()


def stem(rng: random.Random) -> str:
    """Invent a word of two or three syllables, such as "Velmark"."""
    inner = pick(rng, LINKS) + pick(rng, VOWELS) if rng.random() < 0.5 else ""
    return pick(rng, ONSETS) + pick(rng, VOWELS) + pick(rng, SOFT_CODAS) + inner + pick(rng, LINKS) + pick(rng, ENDINGS)


def first_name(rng: random.Random, female: bool) -> str:
    """Invent a given name."""
    return pick(rng, ONSETS) + pick(rng, VOWELS) + pick(rng, CODAS) + pick(rng, FEMALE if female else MALE)


def person(rng: random.Random, first: str, surnames: Sequence[str]) -> str:
    """Invent a full name: sometimes with an initial, a particle, or a double surname."""
    form, surname = rng.random(), pick(rng, surnames)
    if form < 0.08:
        return f"{first} {surname}-{pick(rng, surnames)}"
    if form < 0.16:
        return f"{first} {pick(rng, PARTICLES)} {surname}"
    if form < 0.26:
        return f"{first} {pick(rng, LETTERS)}. {surname}"
    return f"{first} {surname}"


def company(rng: random.Random) -> str:
    """Invent a company name: a word, now and then an acronym, and a trade."""
    root = "".join(pick(rng, LETTERS) for _ in range(4)) if rng.random() < 0.1 else stem(rng)
    return f"{root} {pick(rng, TRADES)}"


def resembling(rng: random.Random, name: str) -> str:
    """Invent a company name one word or one letter away from another."""
    root, _, trade = name.partition(" ")
    if rng.random() < 0.5:
        return f"{root} {pick(rng, TRADES)}"
    at = 1 + below(rng, len(root) - 1)
    letter = pick(rng, LETTERS)
    return f"{root[:at]}{letter if root.isupper() else letter.lower()}{root[at + 1 :]} {trade}"


def institute(rng: random.Random) -> str:
    """Invent the name of an institute, academy or university."""
    root, field = stem(rng), pick(rng, FIELDS)
    return pick(rng, (f"{root} Institute of {field}", f"{root} Academy of {field}", f"University of {root}"))


def work_title(rng: random.Random) -> str:
    """Invent the title of a book or film, of two to five words."""
    adjective, noun, root = pick(rng, ADJECTIVES), pick(rng, NOUNS), stem(rng)
    forms = (f"The {adjective} {noun} of {root}", f"A {noun} for {root}", f"{root} or a {adjective} {noun}",
             f"{adjective} {noun}", f"The {noun} at {root}")  # fmt: skip
    return pick(rng, forms)


class Register:
    """The names given so far; refuses names that differ from another only in case and accents."""

    def __init__(self) -> None:
        self._taken: set[str] = set()

    def claim(self, name: str) -> bool:
        """Take a name, and return whether it was free."""
        key = fold(name)
        if key in self._taken:
            return False
        self._taken.add(key)
        return True
