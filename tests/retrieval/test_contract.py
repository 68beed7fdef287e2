"""What every `Retriever` must do, whatever is behind it: terms, embeddings, a reranker and a cache, or a server."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import numpy as np
import pytest

from harness1.config import Config, Dense, Index, Machine, Rerank, Retrieval
from harness1.records import Chunk, ChunkId, DocId
from harness1.retrieval.build import build_index
from harness1.retrieval.corpus import Document, chunk
from harness1.retrieval.index import open_index
from harness1.retrieval.models import open_embedder
from harness1.retrieval.open import _open, open_retriever, split_engine
from harness1.retrieval.protocol import BadPattern, RetrievalFault, Retriever, SearchRequest, SearchResult, total_order
from harness1.retrieval.retriever import EmbeddedRetriever, open_embedded
from harness1.retrieval.sharing import CachingRetriever
from tests.serving import serving

Make = Callable[[list[Document]], Retriever]
"""Builds an index of documents and opens it."""
PLAIN = [
    Document(DocId(f"doc{n}"), f"Report {n}", f"Common ground. Alpha{n} beta{n} gamma{n} delta{n} lie here.")
    for n in range(330)
]
QUOTED = Document(DocId('it\'s "quoted"'), "Quotes: ' \" `", "She said \"it's\" and 'no'; then \"); drop -- left.")
STRANGE = [
    Document(DocId("ærø/Straße 東京"), "Ærø «Straße»", "Die Fähre nach Ærø. 東京タワー и Москва, naïve café 🦊 עברית."),
    QUOTED,
    Document(DocId("lines"), "Line\ttabs", "First line\nsecond line\r\n\n\tfourth, and an end\n"),
    Document(DocId("back\\slash\\"), "C:\\temp\\new", 'A path C:\\temp\\new\\"x" ends in a backslash \\'),
    Document(DocId("100%_off"), "Sale 100%_off", "Now 100%_off and 50% more; under_score, not underXscore."),
    Document(DocId("looks_alike"), "Sale 100XYoff", "Nothing: 100XXoff, underXscore."),
    Document(DocId("control"), "Control", "before\0after \x01\x1f\x7f bells"),
    Document(DocId("twin-b"), "Twin", "Zebra quagga stripes in pairs."),
    Document(DocId("twin-a"), "Twin", "Zebra quagga stripes in pairs."),
    Document(DocId("wordless"), "", ""),
    Document(DocId("wide"), "Wide", ("xylophone marimba " * 120)[:2000]),
    Document(DocId("long"), "Long", " ".join(f"Sentence number s{n} of a long story." for n in range(200))),
]
DOCUMENTS = PLAIN[:165] + STRANGE + PLAIN[165:]
TOKENS = Index().chunk_tokens
CHUNKS = [piece for document in DOCUMENTS for piece in chunk(document, TOKENS)]
HOSTILE = [
    *("", " \t\n", "x" * 10_000, "common " * 1500, "\0\x01\x1f\x7f", "\ud800 half a pair", "'\"`´\\", "%"),
    *('") or chunk_id != ("', '{"$nin": ["doc1"]}', "'; DROP TABLE chunks; --", "common AND (alpha1 OR"),
    *("🦊" * 500, "עברית\u202e\u200d"),
]
"""Queries, ids and literals that mean something to somebody's parser."""
PATTERNS = [
    *("Common", "common", "(?i)COMMON", "(?i)ærø", "Straße", "東京.*🦊", "100%_off", "50% more", "under_score"),
    *(r"\bAlpha1[0-9]\b", r"Alpha3(?:10|20) beta", r"gamma12?3", r"delta4{2} lie", "^Report 7\nCommon", "^Common"),
    *("lie here.$", r"\ACommon|pairs\.$", "(?m)^second", r"line\r\n\n\tfourth", r"backslash \\$"),
    *("under.score", "after", "Sale 100", "", "no such text", "[[:alpha:]]+s19[0-9]", r"[]x]y[^]]l", r"\pL+タワー"),
    *map(re.escape, ('"it\'s" and', '"); drop --', "C:\\temp\\new")),
]


def content(piece: Chunk) -> str:
    """What grep looks at."""
    return f"{piece.title}\n{piece.text}"


def ids(result: SearchResult | RetrievalFault) -> list[str]:
    assert isinstance(result, SearchResult), result
    return [hit.chunk.chunk_id for hit in result.hits]


def search(retriever: Retriever, query: str, k: int = 10, exclude: list[str] | None = None) -> SearchResult:
    request = SearchRequest(query, k, frozenset(map(ChunkId, exclude or [])))
    (result,) = asyncio.run(retriever.search([request]))
    assert isinstance(result, SearchResult), result
    return result


HASHED = Index(dense=Dense(model="hash:4096"))


class SharedWords:
    """A reranker: the share of the words of a query that a text has."""

    hash = "shared words"

    def score(self, pairs) -> np.ndarray:
        words = [(query.lower().split(), set(text.lower().replace(".", " ").split())) for query, text in pairs]
        shares = [sum(word in text for word in query) / (len(query) + 1) for query, text in words]
        return np.array(shares, dtype=np.float32)


KINDS = ("terms", "embeddings", "reranked", pytest.param("server", marks=pytest.mark.service))


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def make(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Make]:
    """Builds an index of documents and opens it; the cache is so small that results are dropped and asked for again."""
    with ExitStack() as servers:

        def made(documents: list[Document]) -> Retriever:
            folder = tmp_path_factory.mktemp("index")
            build_index(documents, folder, HASHED if kind in ("embeddings", "reranked") else Index())
            if kind == "server":
                served = open_retriever(str(folder))
                return _open(*split_engine(servers.enter_context(serving(served))), Config())
            if kind == "reranked":
                ranking, embedder = Retrieval(rerank=Rerank(on=True)), open_embedder(HASHED.dense, Machine())
                return CachingRetriever(EmbeddedRetriever(open_index(folder), ranking, embedder, SharedWords()), 20, "")
            return open_embedded(folder, Config())

        yield made


@pytest.fixture(scope="module")
def retriever(make: Make) -> Retriever:
    return make(DOCUMENTS)


def test_an_index_says_what_it_holds(retriever: Retriever) -> None:
    info = retriever.info
    assert (info.unit, info.documents, info.chunks) == ("document", len(DOCUMENTS), len(CHUNKS))


def test_equal_corpora_have_equal_hashes_in_any_order(make: Make) -> None:
    few = DOCUMENTS[160:180]
    hashes = [make(documents).info.index_hash for documents in (few, few[::-1], few[1:])]
    assert hashes[0] == hashes[1] != hashes[2]


def test_words_that_one_chunk_alone_has_find_it_first(retriever: Retriever) -> None:
    for n in (0, 7, 164, 165, 329):
        assert ids(search(retriever, f"alpha{n} BETA{n} gamma{n} delta{n}"))[0] == f"doc{n}"


def test_hits_are_totally_ordered_and_each_comes_once(retriever: Retriever) -> None:
    for query in ("common ground", "zebra quagga", "sale report 7", "sentence number s3"):
        result = search(retriever, query, 40)
        assert 0 < len(result.hits) <= 40
        assert len(set(ids(result))) == len(result.hits)
        scored = [(hit.chunk.chunk_id, hit.score) for hit in result.hits]
        assert total_order(scored[::-1]) == scored


def test_equal_scores_are_ordered_by_id(retriever: Retriever) -> None:
    for k in (1, 2):
        assert ids(search(retriever, "zebra quagga stripes", k)) == ["twin-a", "twin-b"][:k]


def test_at_most_k_hits_come_and_all_of_them_if_there_are_enough(retriever: Retriever) -> None:
    assert [len(search(retriever, "common ground", k).hits) for k in (1, 3, 50)] == [1, 3, 50]
    assert len(search(retriever, "common ground", 1000).hits) >= len(PLAIN)
    assert search(retriever, "common", 0).hits == ()


def test_chunks_come_as_they_were_indexed(retriever: Retriever) -> None:
    expected = {piece.chunk_id: piece for piece in CHUNKS}
    queries = ("ærø straße", "quotes said", "tabs second line", "path temp new", "sale 100", "bells", "xylophone")
    found = [hit.chunk for query in queries for hit in search(retriever, query, 3).hits]
    assert {document.doc_id for document in STRANGE[:7]} <= {hit.doc_id for hit in found}
    assert all(hit == expected[hit.chunk_id] for hit in found)


def test_excluded_chunks_never_come_back_and_others_take_their_places(retriever: Retriever) -> None:
    best = ids(search(retriever, "common ground", 10))
    assert ids(search(retriever, "common ground", 10, [])) == best
    assert best[0] not in ids(search(retriever, "common ground", 10, best[:1]))
    others = ids(search(retriever, "common ground", 10, best))
    assert len(others) == 10
    assert not set(others) & set(best)
    many = [document.doc_id for document in PLAIN[:300]]
    left = ids(search(retriever, "common ground", 30, many))
    assert sorted(left) == sorted(document.doc_id for document in PLAIN[300:])


def test_exclusions_that_are_no_ids_change_nothing(retriever: Retriever) -> None:
    best = ids(search(retriever, "common ground", 10))
    assert ids(search(retriever, "common ground", 10, [*HOSTILE, "unknown"])) == best
    odd = [document.doc_id for document in STRANGE]
    assert search(retriever, "quotes said", 1).hits[0].chunk.doc_id == QUOTED.doc_id
    assert not set(ids(search(retriever, "quotes said line path sale bells", 100, odd))) & set(odd)


def test_words_that_nobody_has_find_nothing_where_words_count(retriever: Retriever, kind: str) -> None:
    for query in ("unheardof wordlessness", "", "the of and", "q"):
        found = search(retriever, query).hits
        assert kind in ("embeddings", "reranked") or found == ()


def test_requests_are_answered_in_order_and_a_late_one_alone_fails(retriever: Retriever) -> None:
    few = [("alpha3 beta3 gamma3 delta3", 30.0), ("common", -1.0), ("alpha4 beta4 gamma4 delta4", 30.0)]
    requests = [SearchRequest(query, 1, deadline=deadline) for query, deadline in few]
    requests.append(SearchRequest("zebra quagga stripes", 1, frozenset({ChunkId("twin-a")})))
    first, late, *rest = asyncio.run(retriever.search(requests))
    assert isinstance(late, RetrievalFault)
    assert [ids(answer) for answer in (first, *rest)] == [["doc3"], ["doc4"], ["twin-b"]]
    assert asyncio.run(retriever.search([])) == []


def test_a_document_is_read_whole_and_in_order(retriever: Retriever) -> None:
    for document in [*STRANGE, PLAIN[329]]:
        expected = tuple(chunk(document, TOKENS))
        assert asyncio.run(retriever.read(document.doc_id)) == expected
    for unknown in ("nobody", "long#0", "doc", *HOSTILE):
        assert asyncio.run(retriever.read(DocId(unknown))) == ()


def test_chunks_are_got_in_the_order_asked_without_unknown_ones(retriever: Retriever) -> None:
    asked = [ChunkId(name) for name in ("twin-b", "nobody", "long#2", *HOSTILE, QUOTED.doc_id, "doc0", "long#0")]
    found = asyncio.run(retriever.get(asked))
    assert isinstance(found, tuple)
    assert [piece.chunk_id for piece in found] == ["twin-b", "long#2", QUOTED.doc_id, "doc0", "long#0"]
    assert asyncio.run(retriever.get([])) == ()


def test_grep_finds_the_first_matches_in_corpus_order(retriever: Retriever) -> None:
    for pattern in PATTERNS:
        # Python has neither \pL nor [:alpha:], and to it $ is also before a last line break.
        oracle = re.compile(pattern.replace(r"\pL", r"\w").replace("[:alpha:]", "a-zA-Z").replace("$", r"\Z"))
        expected = [piece for piece in CHUNKS if oracle.search(content(piece))]
        for limit in (1, 5, 1000):
            assert asyncio.run(retriever.grep(pattern, limit, 30.0)) == tuple(expected[:limit]), pattern


def test_grep_calls_a_bad_pattern_bad_and_a_late_one_late(retriever: Retriever) -> None:
    for pattern in ("(", "a(?=b)", r"(a)\1", "x{2000}", "\ud800"):
        assert isinstance(asyncio.run(retriever.grep(pattern, 5, 30.0)), BadPattern), pattern
    assert isinstance(asyncio.run(retriever.grep("Common", 5, -1.0)), RetrievalFault)


def test_no_query_breaks_the_engine(retriever: Retriever) -> None:
    for query in HOSTILE:
        assert len(search(retriever, query, 5).hits) <= 5
        excluded = ids(search(retriever, query, 5))
        assert not set(ids(search(retriever, query, 5, excluded))) & set(excluded)
        if not re.search("[\ud800-\udfff]", query) and len(query) < 1000:
            found = asyncio.run(retriever.grep(re.escape(query), 1000, 30.0))
            assert found == tuple(piece for piece in CHUNKS if query in content(piece)), query
