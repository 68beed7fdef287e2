import math
import random
from collections import Counter

import bm25s
import numpy as np
import pytest
from bm25s.stopwords import STOPWORDS_EN

from harness1.records import ChunkId
from harness1.retrieval import bm25 as postings
from harness1.retrieval import kernels
from harness1.retrieval.bm25 import BM25, K1, NONE, B, Postings, PostingsWriter
from harness1.retrieval.corpus import Analyser
from harness1.retrieval.files import Files
from harness1.retrieval.protocol import total_order
from harness1.words import STOP_WORDS

WORDS = "river bridge stone castle market harbour engine garden winter silver run runners".split()  # noqa: SIM905
RNG = random.Random(7)
TEXTS = [" ".join(RNG.choices(WORDS, k=RNG.randint(3, 30))) for _ in range(120)] + ["", "the of", "river"]
QUERIES = ["silver bridge", "run", "stone castle castle market", "winter the river engine paper garden"]


def build(folder, texts: list[str], ranks=None) -> BM25:
    writer = PostingsWriter(folder, Analyser())
    for text in texts:
        writer.add(text)
    length = writer.finish()
    ranks = np.arange(len(texts), dtype=np.int32) if ranks is None else ranks
    return BM25([Postings(Files(folder), NONE, None)], len(texts), length, ranks, Analyser())


@pytest.fixture(scope="module")
def bm25(tmp_path_factory) -> BM25:
    return build(tmp_path_factory.mktemp("bm25"), TEXTS)


def by_formula(query: str) -> list[float]:
    """The Lucene formula, one chunk and one term at a time."""
    chunks = [Counter(Analyser().terms(text)) for text in TEXTS]
    mean = sum(chunk.total() for chunk in chunks) / len(chunks)
    scores = [0.0] * len(chunks)
    for term in Analyser().terms(query):
        holders = sum(term in chunk for chunk in chunks)
        idf = math.log(1 + (len(chunks) - holders + 0.5) / (holders + 0.5))
        for at, chunk in enumerate(chunks):
            scores[at] += idf * chunk[term] / (chunk[term] + K1 * (1 - B + B * chunk.total() / mean))
    return scores


@pytest.mark.parametrize("query", QUERIES)
def test_scores_are_those_of_the_formula(bm25: BM25, query: str) -> None:
    expected = {at: score for at, score in enumerate(by_formula(query)) if score > 0}
    assert dict(bm25.search(query, len(TEXTS))) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("query", QUERIES)
def test_scores_are_those_of_bm25s(bm25: BM25, query: str) -> None:
    peer = bm25s.BM25(method="lucene", k1=K1, b=B)
    peer.index([Analyser().terms(text) for text in TEXTS], show_progress=False)
    _, scores = peer.retrieve([Analyser().terms(query)], k=20, show_progress=False)
    assert [score for _, score in bm25.search(query, 20)] == pytest.approx(scores[0].tolist(), rel=1e-4)


@pytest.mark.parametrize("query", QUERIES)
def test_exclusion_equals_filtering_before_ordering(bm25: BM25, query: str) -> None:
    everything = bm25.search(query, len(TEXTS))
    for excluded in ([at for at, _ in everything[:7]], [at for at, _ in everything[::2]], list(range(len(TEXTS)))):
        rest = [(ChunkId(f"{at:03d}"), score) for at, score in everything if at not in excluded]
        for k in (1, 3, 10, 50, 1000):
            expected = [(int(name), score) for name, score in total_order(rest, k)]
            assert bm25.search(query, k, np.array(excluded, np.int64)) == expected


def test_more_ties_than_a_block_holds_are_cut_by_rank_too(tmp_path) -> None:
    size = 100_000
    bm25 = build(tmp_path, ["same"] * size, ranks=np.arange(size, dtype=np.int32)[::-1].copy())
    assert [at for at, _ in bm25.search("same", 3)] == [size - 1, size - 2, size - 3]
    assert [at for at, _ in bm25.search("same", 2, np.arange(size - 10, size))] == [size - 11, size - 12]


def test_the_best_of_many_blocks_are_found_wherever_they_lie(tmp_path) -> None:
    rng = random.Random(1)
    texts = [" ".join(rng.choices(WORDS, k=rng.randint(1, 9))) for _ in range(70_000)]
    bm25 = build(tmp_path, texts)
    everything = dict(bm25.search("silver bridge castle", len(texts)))
    exclude = np.array(rng.sample(range(len(texts)), 500))
    rest = [(ChunkId(f"{at:06d}"), score) for at, score in everything.items() if at not in set(exclude.tolist())]
    expected = [(int(name), score) for name, score in total_order(rest, 600)]
    for k in (1, 20, 600):
        assert bm25.search("silver bridge castle", k, exclude) == expected[:k]


def test_texts_are_inverted_in_runs_as_in_one(tmp_path, monkeypatch) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "many").mkdir()
    at_once, save = build(tmp_path / "one", TEXTS), np.save
    monkeypatch.setattr(postings, "RUN_WORDS", 50)
    saved: list[int] = []
    monkeypatch.setattr(np, "save", lambda path, values: saved.append(len(values)) or save(path, values))
    append, left = kernels.append_run, list[int]()
    count = lambda: len([*(tmp_path / "many").glob("run-*/c*.npy")])  # noqa: E731
    monkeypatch.setattr(kernels, "append_run", lambda *given: left.append(count()) or append(*given))
    in_runs = build(tmp_path / "many", TEXTS)
    monkeypatch.undo()
    assert left == [*range(len(left), 0, -1)], "each is removed before the next is appended"
    assert len(saved) > 20, "a run is written before the next is made"
    for query in QUERIES:
        assert in_runs.search(query, len(TEXTS)) == at_once.search(query, len(TEXTS))
    assert {path.name for path in (tmp_path / "one").iterdir()} == {path.name for path in (tmp_path / "many").iterdir()}


def test_more_kinds_of_postings_than_16_bits_can_name(tmp_path) -> None:
    """Every count from 1 to 64 in texts of 1,100 lengths: 70,400 pairs of count and length."""
    texts = [" ".join(f"w{word} " * word for word in range(1, 65)) + " pad" * extra for extra in range(1100)]
    bm25 = build(tmp_path, texts)
    assert np.load(tmp_path / "postings.codes.npy").dtype == np.uint32
    idf, mean = math.log(1 + 0.5 / 1100.5), 2080 + 1099 / 2
    norm = 1.2 * (0.25 + 0.75 * (2080 + 150) / mean)
    assert dict(bm25.search("w64", 1100))[150] == pytest.approx(idf * 64 / (64 + norm), rel=1e-5)


def test_a_query_without_a_known_term_finds_nothing(bm25: BM25) -> None:
    for query in ("", "   ", "the of and", "zzz unknown", "?!", "x", "\ud800", "a\0b"):
        assert bm25.search(query, 10) == []
    assert bm25.search("river", 0) == []
    assert Analyser().terms("The RUNNERS are running, a b, École") == ["runner", "run", "école"]


def test_stop_words_are_those_of_lucene() -> None:
    assert frozenset(STOPWORDS_EN) == STOP_WORDS


@pytest.mark.filterwarnings("error")
def test_a_corpus_without_any_term_can_be_searched(tmp_path) -> None:
    assert build(tmp_path, ["", "the", "? !"]).search("the river", 5) == []
