"""A real tokenizer without a network: byte-level BPE at the speed of tiktoken, trained at start or read from a file."""

from __future__ import annotations

import base64
import json
import re
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import msgspec
import tiktoken
from datasketch import MinHash, MinHashLSH
from rank_bm25 import BM25Okapi
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

from benchmarks.workload import Move
from harness1.config import Env
from harness1.env.pieces import Piece
from harness1.plain import digest
from harness1.records import TAGS, Chunk
from harness1.tools.tool import ToolSpec

TRAINED_SIZE = 16384
TRAINING_BYTES = 4_000_000
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

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not a `.tiktoken` file.
    """
    return _read(vocab) if vocab is not None else _trained()


def _read(vocab: Path) -> tiktoken.Encoding:
    lines = (line.split() for line in vocab.read_bytes().splitlines() if line)
    return _encoding(vocab.stem, {base64.b64decode(token): int(rank) for token, rank in lines})


@lru_cache(maxsize=1)
def _trained() -> tiktoken.Encoding:
    """Train on the sources of the standard library, which are code and English prose."""
    bare = Tokenizer(models.BPE())
    bare.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
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


TOOL_CHARACTERS = 15_000
OLDER_REASONING_CHARACTERS = 300
_TOKEN = re.compile(r"[a-z0-9]+")
_SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z0-9])")
_ENTITY = re.compile(r"\b[A-Z][a-z]+(?:\s[A-Z][a-z]+){0,3}\b|\b\d{4}s?\b|\b\d{1,2}/\d{1,2}/\d{2,4}\b")
_STOP = frozenset(
    [
        "The",
        "This",
        "That",
        "A",
        "An",
        "It",
        "He",
        "She",
        "In",
        "On",
        "At",
        "For",
        "By",
        "With",
        "To",
        "From",
        "I",
        "We",
        "You",
        "They",
        "But",
        "However",
        "Moreover",
        "Therefore",
        "Furthermore",
        "Additionally",
        "Page",
        "Section",
        "Chapter",
        "Figure",
        "Table",
        "Document",
    ]
)


class Shown(NamedTuple):
    """One finished turn as the prompt shows it."""

    reasoning: str
    call: str
    observation: str
    summary: str


class Peer:
    """An episode; `step` carries out a move and returns the number of tokens of the next prompt."""

    def __init__(self, query: str, static: Sequence[str], env: Env, encoding: tiktoken.Encoding) -> None:
        self.query, self.static, self.env, self.encoding = query, static, env, encoding
        self.lsh = MinHashLSH(threshold=env.dedup.threshold, num_perm=env.dedup.permutations)
        self.pool: list[str] = []
        self.store: dict[str, str] = {}
        self.curated: dict[str, str] = {}
        self.entities: dict[str, set[str]] = {}
        self.history: list[str] = []
        self.hidden = 0
        self.turns: list[Shown] = []
        self.prompt_tokens = 0
        self.snapshots = [self._memory()]

    def step(self, move: Move) -> int:
        observation = self._search(move) if move.found else self._curate(move)
        call = json.dumps({"name": move.action.name, "arguments": move.action.arguments})
        summary = f"pool {len(self.pool)}, curated {len(self.curated)}: {', '.join(list(self.curated)[:5])}"
        self.turns.append(Shown(move.reasoning, call, observation, summary))
        self.snapshots.append(self._memory())
        self.prompt_tokens = self._prompt()
        return self.prompt_tokens

    def _search(self, move: Move) -> str:
        query = str(move.action.arguments["query"])
        new = sum([self._absorb(chunk) for chunk in move.found])
        if not self.curated:
            self.curated = dict.fromkeys(self.pool[: self.env.auto_populate.documents], self.env.auto_populate.tag)
        self.history.append(f"T{len(self.turns) + 1}: search_corpus({query[:60]}): {len(move.found)} docs, {new} new")
        text = "\n".join(f"# DOCUMENT ID: {chunk.doc_id}\n{self._compress(chunk, query)}" for chunk in move.found)
        used = self.prompt_tokens + self._count(text)
        return f"{text}\n[budget: {used} of {self.env.prompt_limit} tokens]"

    def _absorb(self, chunk: Chunk) -> bool:
        """Pool a chunk unless it repeats one that is pooled."""
        sketch = MinHash(num_perm=self.env.dedup.permutations)
        tokens = _TOKEN.findall(chunk.text.lower())
        size = self.env.dedup.shingle
        for shingle in {" ".join(tokens[start : start + size]) for start in range(len(tokens) - size + 1)}:
            sketch.update(shingle.encode())
        if self.lsh.query(sketch):
            self.hidden += 1
            return False
        self.lsh.insert(chunk.doc_id, sketch)
        self.pool.append(chunk.doc_id)
        self.store[chunk.doc_id] = chunk.text
        for found in _ENTITY.findall(chunk.text[: self.env.evidence.characters]):
            if found not in _STOP:
                self.entities.setdefault(found, set()).add(chunk.doc_id)
        return True

    def _compress(self, chunk: Chunk, query: str) -> str:
        sentences = _SENTENCE.split(chunk.text)
        if len(sentences) <= self.env.compression.sentences:
            return chunk.text
        scores = BM25Okapi([sentence.lower().split() for sentence in sentences]).get_scores(query.lower().split())
        best = sorted(range(len(sentences)), key=lambda place: -scores[place])[: self.env.compression.sentences]
        return " ".join(sentences[place] for place in sorted(best))

    def _curate(self, move: Move) -> str:
        arguments = move.action.arguments
        refused = []
        for doc_id in arguments["add_ids"]:
            tag = arguments["importance"][doc_id]
            if doc_id not in self.curated and len(self.curated) >= self.env.curation.cap:
                worst = max(self.curated, key=lambda held: TAGS.index(self.curated[held]))
                if TAGS.index(self.curated[worst]) <= TAGS.index(tag):
                    refused.append(doc_id)
                    continue
                del self.curated[worst]
            self.curated[doc_id] = tag
        self.history.append(f"T{len(self.turns) + 1}: curate({'; '.join(arguments['add_ids'])})")
        listed = ", ".join(f"{doc_id} ({tag})" for doc_id, tag in self.curated.items())
        return f"Curated {len(self.curated)}/{self.env.curation.cap}: {listed}. Refused: {refused[:5]}"

    def _memory(self) -> str:
        """Return the whole working memory as text."""
        settings = self.env
        lines = [f"WORKING MEMORY after turn {len(self.turns)}", f"Query: {self.query}"]
        lines.append(f"CURATED {len(self.curated)}/{settings.curation.cap}")
        for tag in TAGS:
            lines += [
                f"{doc_id} ({tag}): {self._snippet(doc_id)}" for doc_id, own in self.curated.items() if own == tag
            ]
        rest = [doc_id for doc_id in reversed(self.pool) if doc_id not in self.curated]
        lines.append(f"POOL {len(self.pool)}, not curated {len(rest)}")
        lines += [f"{doc_id}: {self._snippet(doc_id)}" for doc_id in rest[: settings.pool.lines]]
        older = rest[settings.pool.lines :]
        lines.append(f"Older: {', '.join(older[: settings.pool.older])} (+{len(older[settings.pool.older :])} more)")
        lines += ["HISTORY", *self.history[-settings.history.lines :]]
        ranked = sorted(self.entities.items(), key=lambda item: (-len(item[1]), item[0]))
        for name, documents in [item for item in ranked if len(item[1]) > 1][: settings.evidence.entities]:
            lines.append(f"{name}: {', '.join(sorted(documents)[: settings.evidence.documents])} ({len(documents)})")
        lines.append(f"Entities in one document: {sum(1 for _, documents in ranked if len(documents) == 1)}")
        lines.append(f"Near duplicates hidden: {self.hidden}")
        return "\n".join(lines)

    def _snippet(self, doc_id: str) -> str:
        return self.store.get(doc_id, "")[: self.env.pool.snippet].replace("\n", " ")

    def _prompt(self) -> int:
        """Return the number of tokens of the whole prompt; the oldest turns are left out while it is too long."""
        recent = self.turns[-self.env.rendering.recent :]
        while True:
            messages = [*self.static, self.query]
            if len(self.turns) > self.env.rendering.recent:
                messages.append(self.snapshots[len(self.turns) - self.env.rendering.recent])
            for turn in recent:
                last = turn is recent[-1]
                messages.append(turn.reasoning if last else turn.reasoning[:OLDER_REASONING_CHARACTERS])
                messages += [turn.call, turn.observation[:TOOL_CHARACTERS]]
                messages += [] if last else [turn.summary]
            tokens = sum(self._count(message) + MESSAGE_TOKENS for message in messages)
            if tokens <= self.env.prompt_limit or len(recent) == 1:
                return tokens
            recent = recent[1:]

    def _count(self, text: str) -> int:
        return len(self.encoding.encode_ordinary(text))
