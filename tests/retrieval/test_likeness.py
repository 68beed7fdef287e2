"""Results say how like a text they are, where there are embeddings at hand."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from harness1.config import Config, Dense, Env, Index, Retrieval
from harness1.records import DocId
from harness1.retrieval.build import build_index
from harness1.retrieval.corpus import Document
from harness1.retrieval.embedder import HashEmbedder
from harness1.retrieval.index import open_index
from harness1.retrieval.protocol import Scored, SearchRequest, SearchResult
from harness1.retrieval.retriever import EmbeddedRetriever, open_embedded
from harness1.retrieval.sharing import CachingRetriever

SIZE, ABOUT = 64, "the poet of the castle"
TEXTS = ("a castle by the river", "the poet wrote of a castle", "rain fell on the town", "a king rode to war", "")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    documents = [Document(doc_id=DocId(f"d{at}"), title="", text=text) for at, text in enumerate(TEXTS)]
    path = tmp_path_factory.mktemp("likeness")
    build_index(documents, path, Index(dense=Dense(model=f"hash:{SIZE}")))
    return path


def hits(folder: Path, request: SearchRequest, **settings: str) -> tuple[Scored, ...]:
    retriever = open_embedded(folder, Config(env=Env(retrieval=Retrieval(**settings))))  # type: ignore[arg-type]
    (found,) = asyncio.run(retriever.search([request]))
    assert isinstance(found, SearchResult)
    return found.hits


@pytest.mark.parametrize("mode", ["hybrid", "dense"])
def test_a_result_has_the_cosine_of_its_text_with_the_text_that_is_asked_about(folder: Path, mode: str) -> None:
    found = hits(folder, SearchRequest("rain castle king", 5, about=ABOUT), mode=mode)
    assert len(found) >= 3
    embedder = HashEmbedder(SIZE)
    (about,) = embedder.embed_queries([ABOUT])
    for each in found:
        (text,) = embedder.embed_documents([each.chunk.text])
        assert each.likeness == pytest.approx(float(np.dot(about, text)), abs=2e-3)


def test_ranks_and_scores_do_not_depend_on_what_results_are_compared_with(folder: Path) -> None:
    plain = hits(folder, SearchRequest("castle", 5))
    compared = hits(folder, SearchRequest("castle", 5, about=ABOUT))
    assert [(each.chunk, each.score) for each in plain] == [(each.chunk, each.score) for each in compared]
    assert all(each.likeness is None for each in plain)
    assert all(each.likeness is not None for each in compared)


def test_a_search_by_terms_compares_nothing(folder: Path) -> None:
    found = hits(folder, SearchRequest("castle", 5, about=ABOUT), mode="bm25")
    assert found
    assert all(each.likeness is None for each in found)


def test_an_equal_search_about_another_text_is_another_search(folder: Path) -> None:
    inner = EmbeddedRetriever(open_index(folder), Retrieval(mode="hybrid"), embedder=HashEmbedder(SIZE))
    retriever = CachingRetriever(inner, 10, "")
    asked = [SearchRequest("castle", 3, about=ABOUT), SearchRequest("castle", 3, about="rain")]

    async def one_after_another() -> list[SearchResult]:
        return [each for request in asked for each in await retriever.search([request])]  # type: ignore[misc]

    first, second = asyncio.run(one_after_another())
    assert retriever.misses == 2
    assert [each.likeness for each in first.hits] != [each.likeness for each in second.hits]
