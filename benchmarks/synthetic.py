"""A corpus of any size that looks like Wikipedia: real passages, padded, then varied word by word.

The first chunks are the passages of a real corpus, padded with sentences of others to about 165 words. Later ones are
copies with one word in twelve replaced: by another word of the corpus (80 %), a made-up name (13 %) or a number
(7 %). Near copies are more common than in real text, so ratios are meaningful, and absolute times are not.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

from harness1.data.open import open_source
from harness1.records import DocId
from harness1.retrieval.analyser import Analyser
from harness1.retrieval.corpus import Document

WORDS = 145
"""Minimum number of words of a chunk; the average is about 165."""
REPLACED = 12
"""One word in this many is replaced."""
WINDOW = 14
QUERY_WORDS = 10
SYLLABLES = ("ka", "lo", "mi", "ra", "ten", "vor", "shi", "bel", "qua", "dun", "ef", "os", "yr", "zan", "gu", "pri")


def corpus(seed: str, chunks: int) -> Iterator[Document]:
    """Yield documents of one chunk each, named by their number; the same for equal arguments."""
    rng = random.Random(chunks)
    base = _padded(seed, rng)
    words = [word for text in base for word in text.split()]
    for number in range(chunks):
        text = base[number % len(base)]
        if number >= len(base):
            text = _varied(text, words, rng)
        title, _, rest = text.partition(" ")
        yield Document(doc_id=chunk_name(number), title=title, text=rest)


def chunk_name(number: int) -> DocId:
    """Return the id of a document, and of its one chunk."""
    return DocId(f"c{number:07d}")


def chunk_number(name: str | int) -> int:
    """Return the number of a chunk, given its id or its number."""
    return name if isinstance(name, int) else int(name[1:])


def queries(seed: str, chunks: int, count: int) -> list[list[str]]:
    """Return analysed queries: up to ten words from a window of a chunk, without stop words."""
    rng, analyser = random.Random(count), Analyser()
    wanted = sorted(rng.sample(range(chunks), count))
    found, texts = [], enumerate(document.text for document in corpus(seed, chunks))
    for place in wanted:
        words = next(text for number, text in texts if number == place).split()
        start = rng.randrange(max(1, len(words) - WINDOW))
        window = words[start : start + WINDOW]
        terms = analyser.terms(" ".join(rng.sample(window, min(QUERY_WORDS, len(window)))))
        found.append(terms or ["film"])
    return found


def _padded(seed: str, rng: random.Random) -> list[str]:
    passages = [f"{document.title} {document.text}" for document in open_source(seed).documents()]
    sentences = [sentence for text in passages for sentence in re.split(r"(?<=[.!?])\s+", text)]
    padded = []
    for text in passages:
        while len(text.split()) < WORDS:
            text = f"{text} {rng.choice(sentences)}"
        padded.append(text)
    return padded


def _varied(text: str, words: list[str], rng: random.Random) -> str:
    varied = text.split()
    for at in rng.sample(range(len(varied)), len(varied) // REPLACED):
        draw = rng.random()
        if draw < 0.80:
            varied[at] = rng.choice(words)
        elif draw < 0.93:
            varied[at] = "".join(rng.choices(SYLLABLES, k=rng.randint(2, 5))).capitalize()
        else:
            varied[at] = str(rng.randrange(10**6))
    return " ".join(varied)
