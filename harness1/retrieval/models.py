"""Models of retrieval: embedders, by sentence-transformers or by hashed words, with a store of the embeddings, and
cross-encoders, which read two texts together, for reranking and for verifying claims. Those behind an address are in
`harness1.retrieval.served`.

A query has the same vector, and a pair the same score, bit for bit, alone and among others. Products of different
shapes round differently, so both go through a transformer in a few fixed shapes."""

from __future__ import annotations

import os
import zlib
from array import array
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from harness1.config import Dense, Machine
from harness1.errors import ConfigError, CorpusError, MissingExtra, ModelError, UsageError, optional
from harness1.model_folder import first_line, folder_hash, model_folder, no_progress_bars, refusing
from harness1.plain import digest, utf8_safe
from harness1.records import Chunk
from harness1.retrieval.corpus import ANALYSER, Analyser
from harness1.retrieval.files import Files
from harness1.retrieval.protocol import Scored, total_order
from harness1.retrieval.served import SERVED, Pair, is_served, open_served_embedder, open_served_scorer
from harness1.runs.files import lock

if TYPE_CHECKING:
    from sentence_transformers import CrossEncoder, SentenceTransformer


HASHED = "hash:"
QUERY_ROWS = 4
"""Rows of every pass over queries: with MiniLM on one core, 1 is slowest for a batch, and 8 slower for one query."""
SHORTEST = 16
"""Tokens to which short queries are padded; longer ones are padded to 2, 4, 8 times as many, and so on."""
TOKENS_PER_PASS = {"cpu": 1024, "cuda": 65536}
"""Tokens in a pass over documents; the activations of more would not fit in the caches of a core."""
KEYS, VECTORS = "keys.bin", "vectors.f16"
KEY_BYTES = 16
BATCH = 256
"""New texts that are embedded, written and reported together: seconds of work for a model without a GPU."""
ROWS, STEP = 32, 32
"""On devices other than the CPU: pairs in a pass, and the multiple of tokens to which they are padded. On the CPU,
passes of several pairs gain nothing: 64 pairs of up to 220 words took 2.2 s alone and 1.9 to 3.8 s in fixed shapes."""
ENTAILMENT = frozenset({"entailment", "supports"})
AFFIRMATION = frozenset({"yes", "1", "label_1"})
CONTRADICTION = frozenset({"contradiction", "refutes"})
MOST_LABELS = 3
SMALLEST, LARGEST = 1e-30, 1.0 - 2.0**-24
"""The range of probabilities whose log odds are finite and distinct as 32-bit numbers."""

Progress = Callable[[int, int], None]
"""Called with the number of texts done, and the number of those that had to be embedded."""


def divide_alike(lengths: Iterable[int], rows: int) -> Iterator[tuple[int, list[int], list[int]]]:
    """Yield passes of equal padded length: it, the places of the texts, and these filled up to `rows`."""
    members: dict[int, list[int]] = defaultdict(list)
    for at, length in enumerate(lengths):
        members[length].append(at)
    for length, alike in members.items():
        for start in range(0, len(alike), rows):
            part = alike[start : start + rows]
            yield length, part, part + part[:1] * (rows - len(part))


@contextmanager
def loading(folder: Path, kind: str, machine: Machine) -> Iterator[None]:
    """Load a model within this context. Raises UsageError: it is none, or torch lacks the device; MissingExtra."""
    with optional("dense", "sentence-transformers"):
        import torch

        if machine.threads:
            torch.set_num_threads(machine.threads)
    with refusing(f"{folder} is not a {kind} that sentence-transformers can load"), no_progress_bars():
        try:
            yield
        except ModuleNotFoundError as error:
            raise MissingExtra("sentence-transformers", "dense") from error
        except RecursionError:
            raise
        except (RuntimeError, AssertionError) as error:  # what torch raises for the different kinds of device
            device = machine.device or "that torch prefers"
            raise UsageError(f"{folder} does not load on the device {device!r}: {first_line(error)}") from error


class Embedder(Protocol):
    """Turns texts into vectors of length 1 (0 for a text without anything to embed), so that products are cosines."""

    hash: str
    """Identifies what decides the vectors: weights, tokenizer and prefixes, whatever their folder."""
    dimensions: int

    def embed_documents(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return one row for each text; others may change its last digits. Raises ModelError: it is not finite."""

    def embed_queries(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return one row for each text, independent of the others. Raises what `embed_documents` does."""


def open_embedder(settings: Dense, machine: Machine) -> Embedder:
    """Open the embedder of `settings.model`, or of `machine.embedder` if set. Raises UsageError; MissingExtra;
    InfrastructureFault: its server does not embed."""
    if settings.model.startswith(HASHED):
        size = settings.model.removeprefix(HASHED)
        if not size.isdecimal() or int(size) < 1:
            raise UsageError(f"{settings.model!r} is not an embedder: write the number of dimensions, as in hash:256")
        return HashEmbedder(int(size))
    name = machine.embedder or settings.model
    if name.startswith(SERVED):
        return open_served_embedder(name, settings, machine)
    folder = model_folder(name)
    with loading(folder, "model", machine):
        from sentence_transformers import SentenceTransformer
        from sentence_transformers.sentence_transformer.modules import Transformer

        model = SentenceTransformer(str(folder), device=machine.device or None, local_files_only=True)
    parts = model, name, folder_hash(folder), settings.prefixes[0], settings.prefixes[1]
    return TransformerEmbedder(*parts) if isinstance(model[0], Transformer) else EncodingEmbedder(*parts)


class HashEmbedder:
    """Hashes terms to dimensions and signs, weighed by the root of their counts (Weinberger et al., ICML 2009)."""

    def __init__(self, dimensions: int) -> None:
        self.dimensions = dimensions
        self.hash = digest([HASHED, dimensions, ANALYSER])
        self._terms = Analyser().terms

    def embed_documents(self, texts: Sequence[str]) -> NDArray[np.float32]:
        vectors = np.zeros((len(texts), self.dimensions), dtype=np.float32)
        for vector, text in zip(vectors, texts, strict=True):
            for term, count in Counter(self._terms(text)).items():
                number = zlib.crc32(term.encode("utf-8", "surrogatepass"))
                sign = 1.0 if number >> 31 else -1.0
                vector[number % self.dimensions] += sign * count**0.5
        return _unit(vectors, f"{HASHED}{self.dimensions}")

    def embed_queries(self, texts: Sequence[str]) -> NDArray[np.float32]:
        return self.embed_documents(texts)


class EncodingEmbedder:
    """A model of sentence-transformers of any kind; queries are encoded one by one. `identity` names its files."""

    def __init__(
        self, model: SentenceTransformer, name: str, identity: str, query_prefix: str, document_prefix: str
    ) -> None:
        self.hash = digest([identity, query_prefix, document_prefix])
        self.dimensions = int(model.get_embedding_dimension() or 0)
        self._model, self._name = model, name
        self._prefixes = query_prefix, document_prefix
        self._lock = Lock()

    def embed_documents(self, texts: Sequence[str]) -> NDArray[np.float32]:
        clean = [utf8_safe(text) for text in texts]
        vectors = self._model.encode_document(clean, prompt=self._prefixes[1], show_progress_bar=False)
        return _unit(vectors.reshape(len(texts), self.dimensions), self._name)

    def embed_queries(self, texts: Sequence[str]) -> NDArray[np.float32]:
        vectors = np.empty((len(texts), self.dimensions), dtype=np.float32)
        for vector, text in zip(vectors, texts, strict=True):
            vector[:] = self._model.encode_query(utf8_safe(text), prompt=self._prefixes[0], show_progress_bar=False)
        return _unit(vectors, self._name)


class TransformerEmbedder(EncodingEmbedder):
    """A model whose first module is a transformer that reads `max_seq_length` tokens; one pass at a time."""

    def embed_documents(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Embed texts of similar length in one pass, so that little is padded."""
        vectors = np.empty((len(texts), self.dimensions), dtype=np.float32)
        per_pass = TOKENS_PER_PASS["cpu" if self._model.device.type == "cpu" else "cuda"]
        with self._lock:
            tokens = self._tokenize(texts, self._prefixes[1])
            order = sorted(range(len(texts)), key=lambda at: -len(tokens[at]))
            while order:
                length = max(1, len(tokens[order[0]]))
                rows = max(1, per_pass // length)
                part, order = order[:rows], order[rows:]
                vectors[part] = self._forward([tokens[at] for at in part], length)
        return _unit(vectors, self._name)

    def embed_queries(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Embed distinct texts of similar length together, in passes with a fixed number of rows."""
        places = {text: at for at, text in enumerate(dict.fromkeys(texts))}
        vectors = np.empty((len(places), self.dimensions), dtype=np.float32)
        with self._lock:
            tokens = self._tokenize(list(places), self._prefixes[0])
            doubled = [max(SHORTEST, 1 << (len(row) - 1).bit_length()) for row in tokens]
            for length, part, full in divide_alike((min(each, self._longest()) for each in doubled), QUERY_ROWS):
                vectors[part] = self._forward([tokens[at] for at in full], length)[: len(part)]
        return _unit(vectors, self._name)[[places[text] for text in texts]]

    def _longest(self) -> int:
        return int(self._model.max_seq_length or self._model.tokenizer.model_max_length)

    def _tokenize(self, texts: Sequence[str], prefix: str) -> list[list[int]]:
        clean = [utf8_safe(prefix + text) for text in texts]
        if not clean:
            return []
        tokenizer = self._model.tokenizer
        encoded = tokenizer(clean, truncation=True, max_length=self._longest(), return_attention_mask=False)
        ids: list[list[int]] = encoded["input_ids"]
        return ids

    def _forward(self, rows: Sequence[Sequence[int]], length: int) -> NDArray[np.float32]:
        import torch

        tokenizer, device = self._model.tokenizer, self._model.device
        ids = torch.full((len(rows), length), tokenizer.pad_token_id or 0)
        mask = torch.zeros_like(ids)
        for at, row in enumerate(rows):
            begin = 0 if tokenizer.padding_side == "right" else length - len(row)
            ids[at, begin : begin + len(row)] = torch.tensor(row)
            mask[at, begin : begin + len(row)] = 1
        with torch.inference_mode():
            features = self._model({"input_ids": ids.to(device), "attention_mask": mask.to(device)})
        vectors: NDArray[np.float32] = features["sentence_embedding"].float().cpu().numpy()
        return vectors


class CachedQueries:
    """A thread-safe embedder that remembers the vectors of its latest `size` queries, which sibling episodes repeat."""

    def __init__(self, embedder: Embedder, size: int) -> None:
        self.hash, self.dimensions = embedder.hash, embedder.dimensions
        self.embed_documents = embedder.embed_documents
        self._embedder, self._size = embedder, size
        self._known: OrderedDict[str, NDArray[np.float32]] = OrderedDict()
        self._lock = Lock()

    def embed_queries(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return one row for each text; the embedder gets those that are not remembered, each once."""
        with self._lock:
            vectors = {text: self._known[text] for text in texts if text in self._known}
        fresh = [text for text in dict.fromkeys(texts) if text not in vectors]
        if fresh:  # without the lock, so that remembered queries do not wait for the model
            rows = self._embedder.embed_queries(fresh)
            vectors |= {text: row.copy() for text, row in zip(fresh, rows, strict=True)}
        with self._lock:
            for text in texts:
                self._known[text] = vectors[text]
                self._known.move_to_end(text)
            while len(self._known) > self._size:
                self._known.popitem(last=False)
        return np.array([vectors[text] for text in texts], np.float32).reshape(len(texts), self.dimensions)


def _unit(vectors: NDArray[np.float32], model: str) -> NDArray[np.float32]:
    """Scale rows to length 1; rows of zeros stay. Raises ModelError: a row that is not finite would find nothing."""
    lengths = np.sqrt((vectors * vectors).sum(axis=1, keepdims=True))
    if not np.isfinite(lengths).all():
        raise ModelError(f"the embedding model {model} gives vectors that are not finite")
    unit: NDArray[np.float32] = vectors / np.maximum(lengths, np.finfo(np.float32).tiny)
    return unit


class VectorStore:
    """A growing store of the embeddings of one embedder in a folder: `keys.bin` (16-byte blake2b digests of the texts)
    and `vectors.f16`, row for row. Rows never change. Vectors reach the disk before their keys, and a row counts once
    it is whole in both files, so a killed writer leaves the earlier rows, and the next one cuts off the rest."""

    def __init__(self, folder: Path, dimensions: int) -> None:
        self._folder, self._widths = folder, row_widths(dimensions)

    def __len__(self) -> int:
        """Return the number of rows that are whole on the disk."""
        paths = {self._folder / name: width for name, width in self._widths.items()}
        return min(path.stat().st_size // width if path.exists() else 0 for path, width in paths.items())

    def ensure(
        self, texts: Iterable[str], embedder: Embedder, progress: Progress | None = None, batch: int = BATCH
    ) -> NDArray[np.int32]:
        """Return the row of each text, in order; new ones are embedded, `batch` at a time, and equal ones share a row.
        Raises CorpusError: the folder cannot be written; UsageError: another process is writing to it."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with (self._folder / KEYS).open("a+b") as keys, (self._folder / VECTORS).open("ab") as vectors:
                lock(keys, f"another process is writing embeddings to {self._folder}")
                whole = len(self)
                keys.truncate(whole * self._widths[KEYS])
                vectors.truncate(whole * self._widths[VECTORS])
                keys.seek(0)
                held, rows, waiting = keys.read(), array("i"), dict[bytes, str]()
                known = {held[at : at + KEY_BYTES]: at // KEY_BYTES for at in range(0, len(held), KEY_BYTES)}

                def write() -> None:
                    if waiting:
                        made = embedder.embed_documents(list(waiting.values())).astype(np.float16).tobytes()
                        for file, data in ((vectors, made), (keys, b"".join(waiting))):
                            file.write(data)
                            file.flush()
                            os.fsync(file.fileno())
                        waiting.clear()
                    if progress:
                        progress(len(rows), len(known) - whole)

                for text in texts:
                    key = blake2b(text.encode("utf-8", "surrogatepass"), digest_size=KEY_BYTES).digest()
                    if key not in known:
                        known[key] = len(known)
                        waiting[key] = text
                    rows.append(known[key])
                    if len(waiting) == batch:
                        write()
                write()
                return np.array(rows, dtype=np.int32)
        except OSError as error:
            raise CorpusError(f"cannot write embeddings to {self._folder}: {error}") from error


def row_widths(dimensions: int) -> dict[str, int]:
    """Return the bytes that a row takes in each file of a store."""
    return {KEYS: KEY_BYTES, VECTORS: 2 * dimensions}


def open_vectors(files: Files, dimensions: int, rows: int) -> NDArray[np.float16]:
    """Map the first rows of a store, [rows, dimensions]. Raises CorpusError: it has fewer, or they are damaged."""
    if len(store := VectorStore(files.folder, dimensions)) < rows:
        raise CorpusError(f"{files.folder} holds {len(store)} embeddings of {rows}; build the index again")
    if not rows:
        return np.empty((0, dimensions), dtype=np.float16)
    data = files.file(VECTORS, grows=True).bytes
    return np.frombuffer(data, np.float16, rows * dimensions).reshape(rows, dimensions)


class Scorer(Protocol):
    """Scores pairs of a query, or a claim, and a text."""

    hash: str
    """Identifies what decides the scores."""

    def score(self, pairs: Sequence[Pair]) -> NDArray[np.floating]:
        """Return a finite number for each pair, higher for a text that answers or supports: probabilities, or log odds
        where one is beyond 0 or 1."""

    def stances(self, pairs: Sequence[Pair]) -> NDArray[np.float32]:
        """Return the probabilities of support and of contradiction, [pairs, 2]."""


def open_cross_encoder(machine: Machine) -> Scorer:
    """Open the cross-encoder at `machine.reranker`: on `machine.device`, where the last one stays loaded and is shared,
    or behind its address. Raises ConfigError: none is named; MissingExtra; UsageError: it does not load, has no label
    for support, or does not answer; InfrastructureFault: its server does not score."""
    if not machine.reranker:
        raise ConfigError("a cross-encoder is needed: give its name, folder or address as machine.reranker")
    if is_served(machine.reranker):
        return open_served_scorer(machine.reranker, machine)
    return _load(machine.reranker, machine.device, machine.threads)


@lru_cache(maxsize=1)
def _load(spec: str, device: str, threads: int) -> TransformerScorer:
    folder = model_folder(spec)
    with loading(folder, "cross-encoder", Machine(device=device, threads=threads)):
        from sentence_transformers import CrossEncoder

        model = CrossEncoder(str(folder), device=device or None, local_files_only=True)
    rows, step = (1, 1) if model.device.type == "cpu" else (ROWS, STEP)
    return TransformerScorer(model, folder_hash(folder), rows, step)


class TransformerScorer:
    """A `CrossEncoder` of sentence-transformers, one pass at a time in any thread. A pass has `rows` pairs, padded to a
    multiple of `step` tokens. Raises UsageError: the model has more than three labels, or none that means support."""

    def __init__(self, model: CrossEncoder, identity: str, rows: int, step: int) -> None:
        self.hash = identity
        self._model, self._rows, self._step = model, rows, step
        self._lock = Lock()
        self._supports, self._contradicts, self._text_first = _labels(model)

    def score(self, pairs: Sequence[Pair]) -> NDArray[np.float32]:
        """Return the probability of each pair that the text answers or supports, independent of the other pairs."""
        return self.stances(pairs)[:, 0]

    def stances(self, pairs: Sequence[Pair]) -> NDArray[np.float32]:
        """Return the shares of support and contradiction. Raises ValueError: no numbers; RuntimeError: torch failed."""
        found = np.zeros((len(pairs), 2), dtype=np.float32)
        read = [(utf8_safe(one), utf8_safe(other)) for one, other in pairs]
        if self._text_first:
            read = [(text, claim) for claim, text in read]
        with self._lock:
            lengths = self._model.preprocess(read)["attention_mask"].sum(dim=1).tolist() if read else []
            padded = [-(-tokens // self._step) * self._step for tokens in lengths]
            longest = self._model.max_seq_length or max(padded, default=0)
            for length, part, full in divide_alike((min(each, longest) for each in padded), self._rows):
                chances = self._forward([read[at] for at in full], length)[: len(part)]
                found[part, 0] = chances[:, self._supports]
                if self._contradicts is not None:
                    found[part, 1] = chances[:, self._contradicts]
        return found

    def _forward(self, pairs: list[Pair], length: int) -> NDArray[np.float32]:
        from torch.nn import Identity

        text = {"padding": "max_length", "max_length": length}
        shape: Any = {"batch_size": len(pairs), "processing_kwargs": {"text": text}}
        outputs = self._model.predict(pairs, show_progress_bar=False, activation_fn=Identity(), **shape)
        logits = np.asarray(outputs, dtype=np.float64).reshape(len(pairs), -1)
        if not np.isfinite(logits).all():
            raise ValueError("the cross-encoder gives scores that are not numbers")
        # The sigmoid for one label; for several the softmax, which is the sigmoid of each against all others.
        if logits.shape[1] == 1:
            logits = np.hstack([logits, np.zeros_like(logits)])
        chances: NDArray[np.float32] = np.exp(logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)).astype("f4")
        return chances


def _labels(model: CrossEncoder) -> tuple[int, int | None, bool]:
    """Return the labels of support and, if any, of contradiction, and whether the model reads the text first."""
    count = model.num_labels
    if count == 1:
        return 0, None, False
    labels = dict(model.config.id2label or {}) if model.config else {}
    names = [str(name).lower() for _, name in sorted(labels.items(), key=lambda label: int(label[0]))]

    def place(wanted: Container[str]) -> int | None:
        return next((at for at, name in enumerate(names) if name in wanted), None)

    entails = place(ENTAILMENT)
    supports = place(AFFIRMATION if count == 2 else {"yes"})
    supports = supports if entails is None else entails
    if count > MOST_LABELS or supports is None:
        need = "a cross-encoder must have one label, or two or three with one called entailment or yes"
        raise UsageError(f"machine.reranker: {need}; this one has {count}: {', '.join(names)}")
    return supports, place(CONTRADICTION), entails is not None


def rerank(
    queries: Sequence[str], rankings: Sequence[Sequence[Chunk]], scorer: Scorer, candidates: int
) -> list[list[Scored]]:
    """Return all chunks of each query's ranking, rescored, best first, in the total order. The first `candidates` are
    scored by title, line break and text, all in one call, equal pairs once: by log odds, which keep values near 0 and 1
    distinct. The others follow in their earlier order, each 1 below the one before."""
    read = [
        [(query, f"{chunk.title}\n{chunk.text}") for chunk in chunks[:candidates]]
        for query, chunks in zip(queries, rankings, strict=True)
    ]
    pairs = list(dict.fromkeys(chain.from_iterable(read)))
    found = dict(zip(pairs, scorer.score(pairs), strict=True)) if pairs else {}
    reranked = []
    for chunks, each in zip(rankings, read, strict=True):
        odds = _log_odds(np.array([found[pair] for pair in each], np.float64))
        scores = {chunk.chunk_id: value for chunk, value in zip(chunks, odds, strict=False)}
        by_id, lowest = {chunk.chunk_id: chunk for chunk in chunks}, min(scores.values(), default=0.0)
        behind = [Scored(chunk, lowest - place) for place, chunk in enumerate(chunks[len(each) :], start=1)]
        reranked.append([Scored(by_id[name], score) for name, score in total_order(scores.items())] + behind)
    return reranked


def _log_odds(scores: NDArray[np.float64]) -> list[float]:
    """Return the log odds of probabilities; scores that are not all probabilities are log odds already."""
    if ((scores >= 0) & (scores <= 1)).all():
        chances = np.clip(scores, SMALLEST, LARGEST)
        scores = np.log(chances) - np.log1p(-chances)
    odds: list[float] = scores.tolist()
    return odds
