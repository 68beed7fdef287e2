"""Working memory is a value: it forks, serialises and hashes by what it holds, and not by text or size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness1.config import AutoPopulate, Compression, Curation, Env
from harness1.memory.parts import RANK, SUBJECT_CHARACTERS, CuratedSet, Pool, history_line, subject
from harness1.memory.working_memory import WorkingMemory
from harness1.records import TAGS, Delta, Observation, Tag, ToolCall, UnitId, Verdict
from tests.support import CORPUS, call, curate, hit, make_env, play, run, search, wide_corpus

TOWN = "The town of Missolonghi lies in western Greece, on the north shore of the gulf."
_ACTION = (
    *(search("Byron poet town"), search("engine program"), call("grep_corpus", pattern="rain")),
    call("fan_out_search", queries=["river king", "castle war 1824"]),
    call("read_document", doc_id="D1"),
    curate(add_ids=["D1", "D2"], importance={"D2": "high"}),
    curate(add_ids=[], remove_ids=["D1"]),
    call("verify", doc_ids=["D1", "D3"], claim="The poet died in a town."),
)
_ACTIONS = st.lists(st.sampled_from(_ACTION), max_size=6)


@given(_ACTIONS, _ACTIONS)
@settings(max_examples=25, deadline=None)
def test_a_fork_is_equal_and_apart_and_survives_serialisation(before: list[object], after: list[object]) -> None:
    env = make_env(chunks=wide_corpus(20))
    play(env, *before)
    twin = env.fork().state.memory
    held = msgspec.msgpack.encode(twin)
    assert held == msgspec.msgpack.encode(env.state.memory)
    for action in after:
        if env.state.done is None:
            run(env.step([action]))
    assert msgspec.msgpack.encode(twin) == held
    for codec in (msgspec.json, msgspec.msgpack):
        again = codec.decode(codec.encode(twin), type=WorkingMemory)
        assert (again, again.hash()) == (twin, twin.hash())


def test_the_hash_names_ids_tags_aliases_verdicts_history_and_turn_and_no_text_score_or_size() -> None:
    env = make_env(chunks=wide_corpus(20))
    play(env, search("Byron poet"))
    base = env.state.memory
    first = next(iter(base.pool.entries))
    changes: list[Callable[[WorkingMemory], object]] = [
        lambda memory: memory.pool.aliases.update({UnitId("copy"): first}),
        lambda memory: memory.curated.tags.update({first: "high"}),
        lambda memory: memory.curated.tags.update({first: "low"}),
        lambda memory: memory.verification.put(Verdict(first, "A claim.", "yes")),
        lambda memory: memory.verification.put(Verdict(first, "A claim.", "no")),
        lambda memory: memory.history.clear(),
        lambda memory: memory.absorb([hit("other", "Text.")], Env()),
        lambda memory: setattr(memory, "turn", 9),
        lambda memory: setattr(memory, "auto_populated", False),
    ]
    hashes = {base.hash()}
    for change in changes:
        twin = base.fork()
        change(twin)
        hashes.add(twin.hash())
    assert len(hashes) == 1 + len(changes)
    twin = base.fork()
    for chunk_id, stored in twin.store.items():
        twin.store[chunk_id] = msgspec.structs.replace(stored, text="other", score=9.0, tokens=7)
    assert twin.hash() == base.hash()


def test_the_store_keeps_whole_texts_in_document_order_and_the_graph_links_them() -> None:
    env = make_env(Env(compression=Compression(sentences=1)))
    play(env, search("Ada Lovelace Byron"))
    assert env.state.memory.text_of(UnitId("ada")) == CORPUS[0].text
    assert "ada" in env.state.memory.evidence.units_of("Ada Lovelace")
    memory = WorkingMemory.empty("q", "document")
    memory.absorb([hit("a", "second", index=1), hit("a", "first", index=0)], Env())
    assert memory.text_of(UnitId("a")) == "first\nsecond"
    before = memory.fork()
    assert memory.absorb([hit("a", "second", index=1)], Env()) == ([], {}), "what is absorbed twice is absorbed once"
    assert memory == before


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
    assert Pool("document").resolve(reference) is Pool("document").document_of(reference) is None


def test_a_reference_may_be_a_handle_a_chunk_handle_or_an_exact_id() -> None:
    pool = Pool("document")
    pool.add(hit("doc_1_2", "text", index=2), 1)
    assert {pool.resolve(reference) for reference in ("D1", "d1", " [D1] ", "D1.3", "doc_1_2")} == {"doc_1_2"}
    others = ("D2", "D01", "D1.1", "doc_1", "doc", "doc_1_2#2", "", "D", "D-1", "Ｄ1")
    assert {pool.resolve(reference) for reference in others} == {None}


def test_where_chunks_are_curated_a_document_handle_means_its_only_chunk() -> None:
    pool = Pool("chunk")
    pool.add(hit("a", "text", index=4), 1)
    assert pool.resolve("D1.5") == pool.resolve("D1") == "a#4"
    pool.add(hit("a", "more", index=5), 1)
    assert (pool.resolve("D1"), pool.resolve("D1.6"), len(pool.entries)) == (None, "a#5", 2)
    for unit in ("document", "chunk"):  # by parts that are not pooled
        pool = Pool(unit)
        pool.add(hit("a", "text"), 1)
        assert (pool.document_of("D1.9"), pool.document_of("D2.1")) == ("a", None)


def test_an_alias_has_no_handle_and_its_id_names_the_representative_where_there_is_deduplication() -> None:
    memory, every = (WorkingMemory.empty("q", "document") for _ in range(2))
    hits = [hit("a", TOWN, "T"), hit("b", TOWN, "T"), hit("c", "Quite another text.", "T")]
    assert memory.absorb(hits, Env()) == (["a", "c"], {"b": "a"})
    assert memory.pool.resolve("b") == "a"
    assert [entry.handle for entry in memory.pool.entries.values()] == ["D1", "D2"]
    assert every.absorb(hits, Env().switch(dedup=False)) == (["a", "b", "c"], {})
    assert not every.pool.aliases


def test_a_hidden_document_becomes_visible_with_all_its_chunks() -> None:
    memory = WorkingMemory.empty("q", "document")
    new, aliases = memory.absorb(
        [hit("a", TOWN, "T"), hit("b", TOWN, "T", index=1), hit("b", "Byron died there.", "T", index=0)], Env()
    )
    assert (new, aliases, memory.pool.aliases) == (["a", "b"], {}, {})
    assert memory.text_of(UnitId("b")) == f"Byron died there.\n{TOWN}"
    assert memory.pool.resolve("D2.2") == memory.pool.resolve("D2.1") == "b"


A, B, C, D = map(UnitId, "abcd")
_TAG = st.sampled_from(TAGS)
_UNIT = st.sampled_from([UnitId(letter) for letter in "abcdefgh"])
_EDITS = st.lists(st.tuples(st.dictionaries(_UNIT, _TAG, max_size=6), st.lists(_UNIT, max_size=3)), max_size=10)
_SETTINGS = st.builds(Curation, cap=st.integers(1, 5), eviction=st.sampled_from(["rank", "fifo", "refuse"]))


def curated(**tags: Tag) -> CuratedSet:
    return CuratedSet({UnitId(name): tag for name, tag in tags.items()})


@given(_EDITS, _SETTINGS)
def test_the_cap_holds_and_every_change_is_reported(edits: list[Any], settings: Curation) -> None:
    kept = CuratedSet()
    for additions, removals in edits:
        before = dict(kept.tags)
        change = kept.edit(additions, removals, settings)
        assert len(kept) <= settings.cap
        gone = {*change.removed, *change.evicted} - change.added.keys()
        assert set(kept.tags) == (before.keys() | change.added.keys()) - gone
        assert not set(change.refused) & kept.tags.keys()
        assert all(kept.tags[unit] == tag for unit, tag in {**change.added, **change.retagged}.items() if unit in kept)
        ranks = [RANK[entry.tag] for entry in kept.in_order()]
        assert ranks == sorted(ranks)
        assert [entry.rank for entry in kept.in_order()] == list(range(1, len(kept) + 1))


@pytest.mark.parametrize(
    ("held", "additions", "removals", "left", "change"),
    [
        ({A: "fair", B: "fair"}, {A: "high"}, [], [A, B], Delta(retagged={A: "high"})),
        ({A: "high", B: "high"}, {C: "low"}, [A], [B, C], Delta(added={C: "low"}, removed=(A,))),
        ({A: "low", B: "low"}, {C: "fair"}, [], [B, C], Delta(added={C: "fair"}, evicted=(A,))),
        ({A: "high"}, {B: "low", C: "high"}, [], [A, C], Delta(added={C: "high"}, refused=(B,))),
        ({A: "low", B: "low"}, {A: "low"}, [], [A, B], Delta()),
    ],
    ids=["re-tagged in place", "removals first", "the first of the least", "added and evicted", "the same again"],
)
def test_an_edit_reports_what_it_changed(held: Any, additions: Any, removals: Any, left: Any, change: Delta) -> None:
    kept = CuratedSet(dict(held))
    assert (kept.edit(additions, removals, Curation(cap=2)), list(kept.tags)) == (change, left)


def test_at_the_cap_the_eviction_policy_decides() -> None:
    for eviction, incoming, left in (
        ("rank", "high", [A, C]),  # b is the first of the least important
        ("rank", "low", [A, B]),  # equal importance does not evict
        ("fifo", "low", [B, C]),
        ("refuse", "very_high", [A, B]),
    ):
        kept = curated(a="fair", b="low")
        change = kept.edit({C: incoming}, [], Curation(cap=2, eviction=eviction))
        assert (list(kept.tags), change.refused == (C,)) == (left, C not in left)
    kept = curated(a="low", b="very_high", c="fair", d="very_high")
    assert [entry.unit_id for entry in kept.in_order()] == [B, D, C, A], "by importance, then by addition"


_JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda inner: st.lists(inner), max_leaves=4)


@given(st.dictionaries(st.sampled_from(["query", "queries", "doc_ids", "claim", "other"]), _JSON, max_size=3))
def test_a_subject_is_one_short_line(arguments: dict[str, object]) -> None:
    words = subject(ToolCall("search_corpus", arguments))
    assert len(words) <= SUBJECT_CHARACTERS
    assert len(words.splitlines()) <= 1


def test_a_subject_is_the_argument_that_matters_and_a_huge_tool_name_does_not_fill_the_history() -> None:
    assert subject(search("Byron  died\nwhere")) == "Byron died where"
    assert subject(call("fan_out_search", queries=["a" * 40, "b", "c", "d"])) == f"{'a' * 30}; b; c"
    assert subject(call("verify", doc_ids=["D1"], claim="It rained.")) == "It rained."
    assert (subject(curate(add_ids=[], remove_ids=["D4"])), subject(ToolCall("search_corpus"))) == ("D4", "")
    for on in (True, False):
        env = make_env(Env().switch(history=on))
        play(env, ToolCall("x\n" * 100_000))
        assert [len(line.tool) <= 40 for line in env.state.memory.history] == [True] * on


def test_a_line_counts_units_returned_new_and_curated() -> None:
    env = make_env(Env(auto_populate=AutoPopulate(by="first")))
    checked = call("verify", doc_ids=["D1"], claim="Ada wrote the first program.")
    play(env, search("Ada Lovelace"), search("Ada Byron"), curate(add_ids=["D3"]), checked)
    lines = [(line.turn, line.returned, line.new, line.curated) for line in env.state.memory.history]
    assert lines == [(1, 2, 2, 2), (2, 1, 1, 0), (3, 0, 0, 1), (4, 1, 0, 0)]
    found = Observation("search_corpus", (hit("a", "x", index=0), hit("a", "y", index=1)))
    assert [history_line(1, Pool(unit), search("x"), found).returned for unit in ("chunk", "document")] == [2, 1]
