"""The pool gives handles in order of appearance, for good, and resolves what is in it and nothing else."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from harness1.config import Dedup, Env
from harness1.memory.parts import Pool
from harness1.memory.working_memory import WorkingMemory
from harness1.records import DocId, UnitId
from tests.support import hit

_HITS = st.lists(st.tuples(st.sampled_from(["a", "b_1", "D1", "http://x/y_2#z"]), st.integers(0, 3)), max_size=12)


@given(_HITS)
def test_handles_are_numbered_in_order_of_appearance_and_never_change(hits: list[tuple[str, int]]) -> None:
    pool = Pool("document")
    given_handles: dict[str, str] = {}
    for doc_id, index in dict.fromkeys(hits):
        pool.add(hit(doc_id, "text", index=index), 1)
        given_handles.setdefault(doc_id, f"D{len(given_handles) + 1}")
        assert {entry.unit_id: entry.handle for entry in pool.entries.values()} == given_handles
        assert all(pool.resolve(handle) == unit for unit, handle in given_handles.items())


@given(st.text())
def test_an_invented_reference_names_nothing(reference: str) -> None:
    pool = Pool("document")
    assert pool.resolve(reference) is None
    assert pool.document_of(reference) is None


def test_a_reference_may_be_a_handle_a_chunk_handle_or_an_exact_id() -> None:
    pool = Pool("document")
    pool.add(hit("doc_1_2", "text", index=2), 1)
    for reference in ("D1", "d1", " [D1] ", "D1.3", "doc_1_2"):
        assert pool.resolve(reference) == "doc_1_2"
    for reference in ("D2", "D01", "D1.1", "doc_1", "doc", "doc_1_2#2", "", "D", "D-1", "Ｄ1"):
        assert pool.resolve(reference) is None


def test_where_chunks_are_curated_a_document_handle_means_its_only_chunk() -> None:
    pool = Pool("chunk")
    pool.add(hit("a", "text", index=4), 1)
    assert pool.resolve("D1.5") == pool.resolve("D1") == "a#4"
    pool.add(hit("a", "more", index=5), 1)
    assert pool.resolve("D1") is None
    assert pool.resolve("D1.6") == "a#5"
    assert len(pool.entries) == 2


def test_a_document_is_found_by_parts_that_are_not_pooled() -> None:
    for unit in ("document", "chunk"):
        pool = Pool(unit)  # type: ignore[arg-type]
        pool.add(hit("a", "text"), 1)
        assert pool.document_of("D1.9") == DocId("a")
        assert pool.document_of("D2.1") is None


def test_an_alias_has_no_handle_and_its_id_names_the_representative() -> None:
    text = "The town of Missolonghi lies in western Greece, on the north shore of the gulf."
    memory = WorkingMemory.empty("q", "document")
    new, aliases = memory.absorb(
        [hit("a", text, "T"), hit("b", text, "T"), hit("c", "Quite another text.", "T")], Env()
    )
    assert (new, aliases) == (["a", "c"], {"b": "a"})
    assert memory.pool.resolve("b") == "a"
    assert [entry.handle for entry in memory.pool.entries.values()] == ["D1", "D2"]


def test_a_hidden_document_becomes_visible_with_all_its_chunks() -> None:
    text = "The town of Missolonghi lies in western Greece, on the north shore of the gulf."
    memory = WorkingMemory.empty("q", "document")
    new, aliases = memory.absorb(
        [hit("a", text, "T"), hit("b", text, "T", index=1), hit("b", "Byron died there.", "T", index=0)], Env()
    )
    assert (new, aliases, memory.pool.aliases) == (["a", "b"], {}, {})
    assert memory.text_of(UnitId("b")) == f"Byron died there.\n{text}"
    assert memory.pool.resolve("D2.2") == memory.pool.resolve("D2.1") == "b"


def test_without_deduplication_every_copy_is_pooled() -> None:
    text = "The town of Missolonghi lies in western Greece, on the north shore of the gulf."
    memory = WorkingMemory.empty("q", "document")
    memory.absorb([hit("a", text, "T"), hit("b", text, "T")], Env(dedup=Dedup(on=False)))
    assert list(memory.pool.entries) == ["a", "b"]
    assert not memory.pool.aliases
