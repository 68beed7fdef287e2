"""How sure it is that a document is one that the question asks for, from the texts alone. The evidence value compares
the units of one pool, so in any pool some unit is the best; a confidence means the same for every question. Fitted and
measured by `benchmarks/fit_evidence.py --confidence`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import or_
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from harness1.memory.entities import FUNCTION_WORDS
from harness1.memory.question import bits, content_terms, head, mask_of, read_question
from harness1.memory.sentences import split
from harness1.memory.working_memory import WorkingMemory
from harness1.records import Curated, UnitId

CONVINCING, HIGH = 0.15, 0.8
"""The confidence from which a document is convincing, so that 97 of 100 answerable questions find one, and that of the
few that are called important."""
UNCONVINCING = "Nothing convincing was found"
NEAREST = 3  # documents or sentences that are shown where nothing is convincing


class Features(NamedTuple):
    """What a confidence is made of, each from 0 on; as a value, the weights. Terms of the question count by how few of
    the documents have them."""

    sentence: float  # share of the question's terms in the title and one sentence
    names: float  # share of the question's names in title and text
    title: float  # share of the title's words that the question has
    named: float  # whether the question names the title
    mass: float  # log(1 + terms of the question in title and text): all of two words say less than most of ten
    base: float  # 1


FITTED = Features(sentence=3.10, names=1.39, title=1.56, named=1.50, mass=3.13, base=-6.61)


def features(question: str, documents: Sequence[tuple[str, str]]) -> NDArray[np.float64]:
    """Return the features of documents, each a title and a text, shape [documents, features]. All that a search found
    should be among them: they tell which terms are rare."""
    asked, table = read_question(question), np.zeros((len(documents), len(Features._fields)))
    table[:, -1] = 1.0
    if not documents or not asked.terms:
        return table
    titles = [content_terms(title) for title, _ in documents]
    said = [[mask_of(terms, asked.terms)] for terms in titles]
    for found, (_, text) in zip(said, documents, strict=True):
        found += [found[0] | mask_of(content_terms(sentence), asked.terms) for sentence in split(text)]
    masks = [reduce(or_, found) for found in said]
    present = bits(np.array(masks, np.int64), len(asked.terms))
    counts = present.sum(axis=0)
    rarity = np.log1p((len(documents) - counts + 0.5) / (counts + 0.5))
    rarity /= rarity.sum()
    cover = present @ rarity
    for at, (title, _) in enumerate(documents):
        names = [masks[at] & name == name for name in asked.names]
        meant = head(title)
        named = len(meant) > 2 and meant not in FUNCTION_WORDS and f" {meant} " in asked.flat
        table[at] = Features(
            sentence=float((bits(np.array(said[at], np.int64), len(asked.terms)) @ rarity).max()),
            names=sum(names) / max(1, len(names)),
            title=said[at][0].bit_count() / max(1, len(set(titles[at]))),
            named=float(named),
            mass=float(np.log1p(cover[at] * len(asked.terms))),
            base=1.0,
        )
    return table


def confidences(question: str, documents: Sequence[tuple[str, str]]) -> list[float]:
    """Return for each of the documents that were found, a title and a text, how sure it is that the question asks for
    it, from 0 to 1."""
    values = 1 / (1 + np.exp(-features(question, documents) @ np.array(FITTED)))
    return list(map(float, values))


class Judgement(NamedTuple):
    """How sure it is of each unit that was delivered."""

    confidence: dict[UnitId, float]

    @property
    def convincing(self) -> bool:
        return max(self.confidence.values(), default=0.0) >= CONVINCING


def judge(memory: WorkingMemory, delivered: Sequence[Curated]) -> Judgement:
    """Return how sure it is of the delivered units, beside all that was found."""
    entries = memory.pool.entries
    found = confidences(memory.query, [(entry.title, memory.text_of(unit)) for unit, entry in entries.items()])
    of = dict(zip(entries, found, strict=True))
    return Judgement({place.unit_id: of[place.unit_id] for place in delivered})
