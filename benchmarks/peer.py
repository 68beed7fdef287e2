"""The peer of `env_turn.py`: an environment turn built from the usual parts, which keeps nothing between turns.

It follows the published mechanisms (Harness-1, arXiv 2606.02373): MinHash by `datasketch`, sentence selection by
`rank_bm25`, entities by the published expression. Each turn sorts all entities, writes the memory anew, keeps it as
a snapshot and tokenises the whole prompt. Where the published program does more, this one does less.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import NamedTuple

import tiktoken
from datasketch import MinHash, MinHashLSH
from rank_bm25 import BM25Okapi

from benchmarks.workload import MESSAGE_TOKENS, Move
from harness1.config import Env
from harness1.memory.dedup import PERMUTATIONS, SHINGLE, THRESHOLD
from harness1.memory.entities import SCANNED
from harness1.memory.parts import POPULATED_TAG
from harness1.records import TAGS, Chunk

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
        self.lsh = MinHashLSH(threshold=THRESHOLD, num_perm=PERMUTATIONS)
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
            self.curated = dict.fromkeys(self.pool[: self.env.auto_populate.documents], POPULATED_TAG)
        self.history.append(f"T{len(self.turns) + 1}: search_corpus({query[:60]}): {len(move.found)} docs, {new} new")
        text = "\n".join(f"# DOCUMENT ID: {chunk.doc_id}\n{self._compress(chunk, query)}" for chunk in move.found)
        used = self.prompt_tokens + self._count(text)
        return f"{text}\n[budget: {used} of {self.env.prompt_limit} tokens]"

    def _absorb(self, chunk: Chunk) -> bool:
        """Pool a chunk unless it repeats one that is pooled."""
        sketch = MinHash(num_perm=PERMUTATIONS)
        tokens = _TOKEN.findall(chunk.text.lower())
        size = SHINGLE
        for shingle in {" ".join(tokens[start : start + size]) for start in range(len(tokens) - size + 1)}:
            sketch.update(shingle.encode())
        if self.lsh.query(sketch):
            self.hidden += 1
            return False
        self.lsh.insert(chunk.doc_id, sketch)
        self.pool.append(chunk.doc_id)
        self.store[chunk.doc_id] = chunk.text
        for found in _ENTITY.findall(chunk.text[:SCANNED]):
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
        for name, documents in [item for item in ranked if len(item[1]) > 1][: settings.evidence.shared[0]]:
            lines.append(f"{name}: {', '.join(sorted(documents)[: settings.evidence.shared[1]])} ({len(documents)})")
        lines.append(f"Entities in one document: {sum(1 for _, documents in ranked if len(documents) == 1)}")
        lines.append(f"Near duplicates hidden: {self.hidden}")
        return "\n".join(lines)

    def _snippet(self, doc_id: str) -> str:
        return self.store.get(doc_id, "")[: self.env.pool.snippet].replace("\n", " ")

    def _prompt(self) -> int:
        """Return the number of tokens of the whole prompt; the oldest turns are left out while it is too long."""
        recent = self.turns[-self.env.rendering.window[0] :]
        while True:
            messages = [*self.static, self.query]
            if len(self.turns) > self.env.rendering.window[0]:
                messages.append(self.snapshots[len(self.turns) - self.env.rendering.window[0]])
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
