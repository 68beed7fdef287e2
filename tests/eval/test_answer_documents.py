"""An answerer gets whole documents, in delivered order, within a budget; a single search as many as it should."""

from __future__ import annotations

import msgspec
import pytest

from harness1.config import Machine
from harness1.errors import InfrastructureFault
from harness1.eval.answers import DocumentReader, QuotedDocument, within_budget
from harness1.records import UnitId
from tests.support import CORPUS, WordRetriever, chunk, run

QUICK = Machine(attempts=3)
CUT = (chunk("ada", "Ada wrote", "Ada", 0), chunk("ada", "the program", "Ada", 1), chunk("rain", "Ada in rain", "", 0))


def source(name: str, tokens: int, title: str = "") -> QuotedDocument:
    return QuotedDocument(UnitId(name), title, "x" * (4 * tokens))


def names(found: tuple[QuotedDocument, ...]) -> str:
    return "".join(each.unit_id for each in found)


@pytest.mark.parametrize(
    ("documents", "tokens", "expected"),
    [(30, 100, "abcd"), (2, 100, "ab"), (30, 60, "abcd"), (30, 59, "abc"), (30, 30, "ab"), (30, 29, "a"), (30, 9, "")],
)
def test_the_lowest_ranks_are_dropped_first_and_whole(documents: int, tokens: int, expected: str) -> None:
    sources = [source("a", 10), source("b", 20), source("c", 10), source("d", 20)]
    assert names(within_budget(sources, documents, tokens)) == expected


def test_what_never_fits_makes_no_other_document_go() -> None:
    sources = [source("a", 10), source("b", 1000), source("c", 10), source("d", 90)]
    assert names(within_budget(sources, 30, 100)) == "ac"
    assert within_budget([], 30, 100) == ()


def test_titles_count() -> None:
    assert within_budget([source("a", 10, "four")], 30, 10) == ()
    assert names(within_budget([source("a", 10, "four")], 30, 11)) == "a"


def test_a_document_is_whole_however_it_was_cut() -> None:
    library = DocumentReader(WordRetriever(CUT), QUICK)
    found = run(library.sources([UnitId("rain"), UnitId("ada")]))
    assert [(each.title, each.text) for each in found] == [("", "Ada in rain"), ("Ada", "Ada wrote\nthe program")]


def test_where_chunks_are_scored_a_chunk_is_what_is_given() -> None:
    library = DocumentReader(WordRetriever(CUT, "chunk"), QUICK)
    (found,) = run(library.sources([UnitId("ada#1")]))
    assert found.text == "the program"
    assert run(library.single_shot("Ada", 2)) == ["ada#0", "ada#1"]


def test_one_search_gives_as_many_documents_as_it_should_however_they_are_cut() -> None:
    library = DocumentReader(WordRetriever(CUT), QUICK)
    assert run(library.single_shot("Ada program", 1)) == ["ada"]
    assert run(library.single_shot("Ada program", 2)) == ["ada", "rain"]
    assert run(library.single_shot("Ada program", 9)) == ["ada", "rain"]
    retriever = WordRetriever(CUT)
    assert run(DocumentReader(retriever, QUICK).single_shot("Ada program", 0)) == []
    assert retriever.calls == 0


def test_a_fault_is_tried_again_and_then_one_of_the_infrastructure() -> None:
    assert len(run(DocumentReader(WordRetriever(CORPUS, faults=2), QUICK).single_shot("Ada", 2))) == 2
    with pytest.raises(InfrastructureFault, match="down"):
        run(DocumentReader(WordRetriever(CORPUS, faults=3), QUICK).sources([UnitId("ada")]))
    with pytest.raises(InfrastructureFault, match="no longer has 'nobody'"):
        run(DocumentReader(WordRetriever(CORPUS), QUICK).sources([UnitId("nobody")]))


def test_a_silent_index_is_a_fault() -> None:
    class Silent(WordRetriever):
        async def read(self, doc_id):
            raise TimeoutError

    with pytest.raises(InfrastructureFault, match="no answer within"):
        run(
            DocumentReader(Silent(CORPUS), msgspec.structs.replace(QUICK, call_deadline_s=1.0)).sources([UnitId("ada")])
        )
