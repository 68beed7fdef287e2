"""Bridges: documents that link names of the question, and rare names that lead on from the best documents."""

from __future__ import annotations

import pytest

from harness1.config import Dedup, Env, Evidence
from harness1.memory.working_memory import BridgeDocument, WorkingMemory, bridge_documents, question_names, rare_bridges
from harness1.records import Hit, Unit, UnitId
from tests.support import hit

RANKED = Env(evidence=Evidence(rank=True), dedup=Dedup(on=False))
QUESTION = "Did Ed Wood ever meet Scott Derrickson?"


def memory_of(*hits: Hit, query: str = QUESTION, unit: Unit = "document") -> WorkingMemory:
    memory = WorkingMemory.empty(query, unit)
    memory.absorb(hits, RANKED)
    return memory


def linked(memory: WorkingMemory, limit: int = 9) -> dict[str, tuple[str, ...]]:
    order = list(memory.pool.entries)
    return {bridge.unit_id: bridge.names for bridge in bridge_documents(memory, order, limit)}


def shared(memory: WorkingMemory, limit: int = 9) -> list[str]:
    return [bridge.entity for bridge in rare_bridges(memory, list(memory.pool.entries), limit, 5)]


def test_a_document_that_covers_two_names_links_them_in_the_question_s_order() -> None:
    memory = memory_of(
        hit("both", "Here Scott Derrickson speaks of Ed Wood.", "Talk"),
        hit("one", "Here is Ed Wood.", "Alone"),
        hit("titled", "He admires Ed Wood.", "Scott Derrickson (director)"),
    )
    assert linked(memory) == {"both": ("Ed Wood", "Scott Derrickson"), "titled": ("Ed Wood", "Scott Derrickson")}


def test_a_document_links_the_name_that_it_covers_with_the_one_whose_document_names_it() -> None:
    film = hit("film", "A film that Scott Derrickson shot.", "Sinister Night")
    about = hit("wood", "He liked Sinister Night and Plan Nine.", "Ed Wood")
    other = hit("plan", "A film about graves.", "Plan Nine")
    assert linked(memory_of(film, about, other)) == {"film": ("Ed Wood", "Scott Derrickson")}


def test_a_document_about_a_name_links_only_what_it_covers() -> None:
    named = hit("wood", "A director.", "Ed Wood")
    assert linked(memory_of(named, hit("scott", "He met Ed Wood.", "Scott Derrickson"))).keys() == {"scott"}


def test_those_that_link_most_names_come_first_and_ties_keep_the_evidence_order() -> None:
    question = "Did Ed Wood, Scott Derrickson or Tim Burton win?"
    memory = memory_of(
        hit("p", "With Ed Wood and Tim Burton.", "P"),
        hit("q", "With Ed Wood and Scott Derrickson.", "Q"),
        hit("all", "With Ed Wood, Scott Derrickson and Tim Burton.", "All"),
        query=question,
    )
    assert list(linked(memory)) == ["all", "p", "q"]
    backwards = [UnitId(unit) for unit in ("q", "p", "all")]
    assert [bridge.unit_id for bridge in bridge_documents(memory, backwards, 2)] == ["all", "q"]


def test_a_question_with_one_name_has_no_bridge_documents() -> None:
    both = hit("both", "Ed Wood and Scott Derrickson.", "Talk")
    assert bridge_documents(memory_of(both, query="Who was Ed Wood?"), [UnitId("both")], 9) == []


def test_the_names_of_a_question_are_told_once_and_without_years() -> None:
    assert question_names("Did Ed Wood meet ED WOOD in 1954 in Rome?") == ("Ed Wood", "Rome")


def test_a_name_of_few_good_documents_comes_before_one_of_many() -> None:
    many = [hit(f"n{at}", f"In France. Number {at}.", f"N{at}") for at in range(8)]
    memory = memory_of(hit("p", "Lugosi in France.", "P"), *many, hit("q", "With Lugosi.", "Q"))
    assert shared(memory) == ["Lugosi", "France"]
    assert shared(memory, 1) == ["Lugosi"]


def test_the_better_the_documents_the_earlier_the_name_and_ties_keep_their_order() -> None:
    texts = ("Lugosi.", "Vampira and Karloff.", "Vampira and Karloff.", "Lugosi.")
    memory = memory_of(*(hit(f"d{at}", f"Of {text}", f"Part {at}") for at, text in enumerate(texts)))
    assert shared(memory) == ["Lugosi", "Vampira", "Karloff"]
    order = [UnitId(unit) for unit in ("d1", "d2", "d0", "d3")]
    assert [bridge.entity for bridge in rare_bridges(memory, order, 9, 5)] == ["Vampira", "Karloff", "Lugosi"]


@pytest.mark.parametrize(
    ("name", "leads"), [("Lugosi", True), ("Wood", False), ("Ed Wood", False), ("1954", False), ("Old Graves", False)]
)
def test_names_of_the_question_titles_of_the_pool_and_years_lead_nowhere(name: str, leads: bool) -> None:
    titled = hit("graves", "It is quiet.", "Old Graves")
    memory = memory_of(hit("p", f"It was {name} then.", "P"), hit("q", f"Here {name} is.", "Q"), titled)
    assert shared(memory) == [name] * leads


def test_a_name_in_parts_of_one_document_only_leads_nowhere() -> None:
    parts = [hit("p", f"Part {at} on Lugosi.", "P", index=at) for at in range(2)]
    assert shared(memory_of(*parts, unit="chunk")) == []
    assert shared(memory_of(*parts, hit("q", "On Lugosi.", "Q"), unit="chunk")) == ["Lugosi"]


def test_units_are_listed_up_to_a_limit_and_all_counted() -> None:
    memory = memory_of(*(hit(f"d{at}", "With Lugosi.", f"Part {at}") for at in range(4)))
    (bridge,) = rare_bridges(memory, list(memory.pool.entries), 9, 2)
    assert (bridge.unit_ids, bridge.total) == (("d0", "d1"), 4)


def test_what_links_is_a_unit_with_its_names() -> None:
    memory = memory_of(hit("both", "Ed Wood and Scott Derrickson.", "Talk"))
    assert bridge_documents(memory, [UnitId("both")], 1) == [
        BridgeDocument(UnitId("both"), ("Ed Wood", "Scott Derrickson"))
    ]
