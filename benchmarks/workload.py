"""The seeded workload of the benchmarks, the stub that serves it in place of a search engine, and a real tokenizer that
needs no network: byte-level BPE at the speed of tiktoken, trained at start or read from a file.

Each search finds `CHUNKS` new chunks of about `WORDS` words; one in ten repeats an earlier chunk with three words
changed. Mode `search` searches at every turn, mode `mix` alternates searches and curations. The text is the same on
every machine, and is made up so that a chunk has as many sentences, names and years as one of an encyclopaedia: nine
sentences and thirty entities, most of them in no other chunk of the episode.
"""

from __future__ import annotations

import base64
import json
import random
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from string import ascii_lowercase
from typing import Literal, get_args

import msgspec
import tiktoken
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

from harness1.data.source import Source
from harness1.data.world import SyntheticWorld
from harness1.env.pieces import Piece
from harness1.errors import UsageError
from harness1.memory.dedup import guard
from harness1.plain import digest
from harness1.records import TAGS, Chunk, ChunkId, DocId, ToolCall
from harness1.retrieval.corpus import Document
from harness1.retrieval.protocol import BadPattern, IndexInfo, RetrievalFault, Scored, SearchRequest, SearchResult
from harness1.tools.tool import ToolSpec

Mode = Literal["search", "mix"]
MODES: tuple[Mode, ...] = get_args(Mode)
CHUNKS = 10
WORDS = 165
NEAR_DUPLICATES = 0.1
CHANGED_WORDS = 3
WORLD_SIZE = 500
SENTENCE_WORDS = (11, 21)
NAMES, YEARS = 0.15, 0.02
"""The shares of names and years among words."""
SYLLABLES = tuple(a + b + c for b in "aeiou" for a in "bdfgklmnprstv" for c in ("", "n", "r", "l", "s"))


@dataclass(frozen=True)
class Move:
    """A turn: the policy's reasoning and action, and the results of a search."""

    reasoning: str
    action: ToolCall
    found: tuple[Chunk, ...] = ()


@dataclass(frozen=True)
class Workload:
    query: str
    moves: tuple[Move, ...]


class Served:
    """A `Retriever` that returns what it was last told to return, best first."""

    def __init__(self) -> None:
        self.info = IndexInfo("workload", "document", 0, 0)
        self.found: tuple[Chunk, ...] = ()

    async def search(self, requests: Sequence[SearchRequest]) -> list[SearchResult | RetrievalFault]:
        hits = tuple(Scored(chunk, float(len(self.found) - rank)) for rank, chunk in enumerate(self.found))
        return [SearchResult(hits) for _ in requests]

    async def grep(self, pattern: str, limit: int, deadline: float) -> tuple[Chunk, ...] | BadPattern | RetrievalFault:
        return self.found[:limit]

    async def read(self, doc_id: DocId) -> tuple[Chunk, ...] | RetrievalFault:
        return tuple(chunk for chunk in self.found if chunk.doc_id == doc_id)

    async def get(self, chunk_ids: Sequence[ChunkId]) -> tuple[Chunk, ...] | RetrievalFault:
        return tuple(chunk for chunk in self.found if chunk.chunk_id in chunk_ids)


def workload(turns: int, mode: Mode, seed: int) -> Workload:
    """Return an episode of the workload; no two seeds share a chunk."""
    rng = random.Random(f"{mode}/{seed}")
    moves = moves_of(rng, _chunks(rng, seed), turns, mode)
    return Workload(" ".join(rng.sample(_text(rng).split(), 20)), moves)


def moves_of(rng: random.Random, chunks: Iterator[Chunk], turns: int, mode: Mode) -> tuple[Move, ...]:
    """Return the turns of an episode whose searches find these chunks."""
    moves: list[Move] = []
    for turn in range(turns):
        if mode == "search" or turn % 2 == 0:
            found = tuple(islice(chunks, CHUNKS))
            words = found[0].text.split()
            query = " ".join(rng.sample(words, min(8, len(words))))
            thought = " ".join(rng.choices(found[1].text.split(), k=90))
            moves.append(Move(thought, ToolCall("search_corpus", {"query": query}), found))
        else:
            chosen: list[str] = [chunk.doc_id for chunk in rng.sample(moves[-1].found, 3)]
            tags = {doc_id: rng.choice(TAGS) for doc_id in chosen}
            thought = " ".join(rng.choices(moves[-1].found[0].text.split(), k=60))
            moves.append(Move(thought, ToolCall("curate", {"add_ids": chosen, "importance": tags})))
    return tuple(moves)


def _chunks(rng: random.Random, seed: int) -> Iterator[Chunk]:
    seen: list[str] = []
    while True:
        yield _chunk(seed, len(seen), _new_text(rng, seen))


def _chunk(seed: int, number: int, text: str) -> Chunk:
    doc_id = DocId(f"d{seed:02d}{number:05d}")
    return Chunk(ChunkId(f"{doc_id}_0"), doc_id, 0, "", text)


def _new_text(rng: random.Random, seen: list[str]) -> str:
    """Return the text of the next chunk, and add it to `seen`."""
    if seen and rng.random() < NEAR_DUPLICATES:
        words = rng.choice(seen).split()
        for _ in range(CHANGED_WORDS):
            # Words with digits are not changed: a different number would make it another text, not a copy.
            words[rng.randrange(len(words))] = "x" + "".join(rng.choices(ascii_lowercase, k=3))
        seen.append(" ".join(words))
    else:
        seen.append(_text(rng))
    return seen[-1]


def _text(rng: random.Random) -> str:
    """Return sentences with about `WORDS` words in total."""
    sentences: list[str] = []
    size = 0
    while size < WORDS:
        words = [_word(rng) for _ in range(rng.randint(*SENTENCE_WORDS))]
        words[0] = words[0][:1].upper() + words[0][1:]
        sentences.append(" ".join(words) + ".")
        size += len(sentences[-1].split())
    return " ".join(sentences)


def _word(rng: random.Random) -> str:
    """Return a common word, a name of one to three words, or a year."""
    draw = rng.random()
    if draw < YEARS:
        return str(rng.randint(1800, 2025))
    if draw < YEARS + NAMES:
        return " ".join(_name(rng) for _ in range(rng.choices((1, 2, 3), (5, 4, 1))[0]))
    return rng.choice(_common_words())


def _name(rng: random.Random) -> str:
    """Return a made-up name; names of early syllables are common, because real names differ widely in frequency."""
    places = (int(len(SYLLABLES) * rng.random() ** 2) for _ in range(rng.choice((2, 3))))
    return "".join(SYLLABLES[place] for place in places).capitalize()


@lru_cache(maxsize=1)
def _common_words() -> tuple[str, ...]:
    """Return the lower-case words of a synthetic world, repeated as often as they occur."""
    words = (word for document in SyntheticWorld(WORLD_SIZE).documents() for word in document.text.split())
    return tuple(word for word in words if word.isalpha() and word.islower())


COPIED_WORDS = 60
"""Words from which a passage is copied: with fewer, a copy is less similar than the threshold asks."""


def passages(source: Source, turns: int, mode: Mode, episodes: int) -> list[Workload]:
    """Return episodes over a corpus; no two share a passage.

    Raises:
        UsageError: the corpus has too few documents.
    """
    size = turns * CHUNKS
    documents = list(islice((each for each in source.documents() if len(each.text.split()) >= 3), episodes * size))
    if len(documents) < episodes * size:
        raise UsageError(f"{source.name} has {len(documents)} passages, and the episodes need {episodes * size}")
    parts = [documents[start : start + size] for start in range(0, len(documents), size)]
    questions = _questions(source, parts)
    return [_episode(part, turns, mode, number, questions[number]) for number, part in enumerate(parts)]


def _questions(source: Source, parts: Sequence[Sequence[Document]]) -> list[str]:
    """Return for each episode the first question whose gold is among its passages, or else its first title."""
    episode = {document.doc_id: number for number, part in enumerate(parts) for document in part}
    found: dict[int, str] = {}
    for task in (task for split in source.splits for task in source.tasks(split)):
        for doc_id in task.gold.relevant if task.gold else ():
            if doc_id in episode:
                found.setdefault(episode[DocId(doc_id)], task.query)
    return [found.get(number, part[0].title) for number, part in enumerate(parts)]


def _episode(documents: Sequence[Document], turns: int, mode: Mode, number: int, question: str) -> Workload:
    rng = random.Random(f"passages/{mode}/{number}")
    return Workload(question, moves_of(rng, _with_copies(rng, documents), turns, mode))


def _with_copies(rng: random.Random, documents: Sequence[Document]) -> Iterator[Chunk]:
    """Yield the passages as chunks; some make way for a copy of an earlier one."""
    sources: list[Chunk] = []
    for document in documents:
        chunk = Chunk(ChunkId(document.doc_id), document.doc_id, 0, document.title, document.text)
        if sources and rng.random() < NEAR_DUPLICATES:
            chunk = _copy(rng, rng.choice(sources), len(sources))
        elif len(document.text.split()) >= COPIED_WORDS:
            sources.append(chunk)
        yield chunk


def _copy(rng: random.Random, chunk: Chunk, number: int) -> Chunk:
    """Return a near duplicate: the last words are others, unless one of them is a number, a date or a negation."""
    changed = ["x" + "".join(rng.choices(ascii_lowercase, k=3)) for _ in range(CHANGED_WORDS)]
    text = " ".join([*chunk.text.split()[:-CHANGED_WORDS], *changed])
    if guard(chunk.title, text) != guard(chunk.title, chunk.text):
        text = f"{chunk.text} {changed[0]}"
    doc_id = DocId(f"{chunk.doc_id}-copy{number}-{changed[0]}")
    return msgspec.structs.replace(chunk, chunk_id=ChunkId(doc_id), doc_id=doc_id, text=text)


TRAINED_SIZE, TRAINING_BYTES = 16384, 4_000_000
MESSAGE_TOKENS = 4
"""Number of tokens that a chat format puts around a message: start, role, separator, end."""

_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
PATTERN = "|".join(
    (
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
"""The pattern by which o200k_base cuts text into words before it merges bytes."""


class EncodingCounter:
    """A `TokenCounter` over a tokenizer; special tokens in a text count as the ordinary text that they are."""

    def __init__(self, encoding: tiktoken.Encoding) -> None:
        self.encoding = encoding
        self.hash = digest([encoding.name, encoding.token_byte_values(), MESSAGE_TOKENS])

    def piece(self, piece: Piece) -> int:
        return len(self.encoding.encode_ordinary(piece.text))

    def tools(self, specs: Sequence[ToolSpec]) -> int:
        return len(self.encoding.encode_ordinary(msgspec.json.encode(specs).decode()))

    def overhead(self, first: Piece) -> int:
        return MESSAGE_TOKENS


class EncodingTokenizer:
    """A `Tokenizer` for chat formats over a tokenizer without control tokens: these are numbered behind its own."""

    def __init__(self, encoding: tiktoken.Encoding, control: Sequence[str]) -> None:
        self.encoding = encoding
        self.control = {name: encoding.n_vocab + place for place, name in enumerate(control)}
        self.hash = digest([encoding.name, self.control])

    def encode(self, text: str) -> list[int]:
        return self.encoding.encode_ordinary(text)

    def decode(self, ids: Sequence[int]) -> str:
        return self.encoding.decode([token for token in ids if token < self.encoding.n_vocab])


def tokenizer(vocab: Path | None) -> tiktoken.Encoding:
    """Return the o200k_base vocabulary of a `.tiktoken` file, or else one trained on this Python's standard library.
    Raises OSError: the file cannot be read; ValueError: it is not a `.tiktoken` file."""
    if vocab is None:
        return _trained()
    lines = (line.split() for line in vocab.read_bytes().splitlines() if line)
    return _encoding(vocab.stem, {base64.b64decode(token): int(rank) for token, rank in lines})


@lru_cache(maxsize=1)
def _trained() -> tiktoken.Encoding:
    """Train on the sources of the standard library, which are code and English prose."""
    bare = Tokenizer(models.BPE())
    split, to_bytes = pre_tokenizers.Split(Regex(PATTERN), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)
    bare.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    trainer = trainers.BpeTrainer(
        vocab_size=TRAINED_SIZE, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    bare.train_from_iterator(_sources(), trainer)
    # Ids rise in the order of the merges, so they are the ranks; tokens are written in a printable alphabet.
    names: dict[str, int] = json.loads(bare.to_str())["model"]["vocab"]
    letters = _printable_bytes()
    ranks = {bytes(letters[letter] for letter in name): rank for name, rank in names.items()}
    return _encoding(f"stdlib-{sys.version_info.major}.{sys.version_info.minor}", ranks)


def _encoding(name: str, ranks: dict[bytes, int]) -> tiktoken.Encoding:
    return tiktoken.Encoding(name, pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})


def _sources() -> Iterator[str]:
    left = TRAINING_BYTES
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text = path.read_text(encoding="utf-8", errors="replace")
        left -= len(text)
        if left < 0:
            return
        yield text


def _printable_bytes() -> dict[str, int]:
    """Return the alphabet of byte-level BPE: visible Latin-1 characters are themselves, others follow from U+0100."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + place): byte for place, byte in enumerate(hidden)}
