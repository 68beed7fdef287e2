"""Working memory is a value: it forks, serialises and hashes by what it holds, and not by text or size."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness1.config import AutoPopulate, Compression, Curation, Env
from harness1.memory.parts import RANK, SUBJECT_CHARACTERS, CuratedSet, Pool, history_line, subject
from harness1.memory.working_memory import WorkingMemory
from harness1.records import TAGS, Delta, DocId, Observation, Tag, ToolCall, UnitId, Verdict
from tests.support import CORPUS, call, curate, hit, make_env, play, run, search, wide_corpus

TOWN = "The town of Missolonghi lies in western Greece, on the north shore of the gulf."
_ACTIONS = st.lists(
    st.sampled_from(
        [
            search("Byron poet town"),
            search("engine program"),
            call("fan_out_search", queries=["river king", "castle war 1824"]),
            call("grep_corpus", pattern="rain"),
            call("read_document", doc_id="D1"),
            curate(add_ids=["D1", "D2"], importance={"D2": "high"}),
            curate(add_ids=[], remove_ids=["D1"]),
            call("verify", doc_ids=["D1", "D3"], claim="The poet died in a town."),
        ]
    ),
    max_size=6,
)


def played(actions: list[object]) -> WorkingMemory:
    env = make_env(chunks=wide_corpus(20))
    play(env, *actions)
    return env.state.memory


@given(_ACTIONS, _ACTIONS)
@settings(max_examples=25, deadline=None)
def test_a_fork_is_equal_and_neither_changes_the_other(before: list[object], after: list[object]) -> None:
    env = make_env(chunks=wide_corpus(20))
    play(env, *before)
    twin = env.fork()
    held = msgspec.msgpack.encode(twin.state.memory)
    assert held == msgspec.msgpack.encode(env.state.memory)
    for action in after:
        if env.state.done is None:
            run(env.step([action]))
    assert msgspec.msgpack.encode(twin.state.memory) == held


@given(_ACTIONS)
@settings(max_examples=25, deadline=None)
def test_a_memory_survives_serialisation_whole(actions: list[object]) -> None:
    memory = played(actions)
    for codec in (msgspec.json, msgspec.msgpack):
        again = codec.decode(codec.encode(memory), type=WorkingMemory)
        assert again == memory
        assert again.hash() == memory.hash()


def test_the_hash_names_ids_tags_aliases_verdicts_history_and_turn() -> None:
    base = played([search("Byron poet")])
    hashes = {base.hash()}

    def differs(change: object) -> None:
        twin = base.fork()
        change(twin)
        assert twin.hash() not in hashes
        hashes.add(twin.hash())

    first = next(iter(base.pool.entries))
    differs(lambda memory: memory.pool.aliases.update({UnitId("copy"): first}))
    differs(lambda memory: memory.curated.tags.update({first: "high"}))
    differs(lambda memory: memory.curated.tags.update({first: "low"}))
    differs(lambda memory: memory.verification.put(Verdict(first, "A claim.", "yes")))
    differs(lambda memory: memory.verification.put(Verdict(first, "A claim.", "no")))
    differs(lambda memory: memory.history.clear())
    differs(lambda memory: memory.absorb([hit("other", "Text.")], Env()))
    differs(lambda memory: setattr(memory, "turn", 9))
    differs(lambda memory: setattr(memory, "auto_populated", False))


def test_the_hash_knows_no_text_score_or_size() -> None:
    memory = played([search("Byron poet")])
    twin = memory.fork()
    for chunk_id, stored in twin.store.items():
        twin.store[chunk_id] = msgspec.structs.replace(stored, text="other", score=9.0, tokens=7)
    assert twin.hash() == memory.hash()


def test_the_store_keeps_whole_texts_and_the_graph_links_them() -> None:
    env = make_env(Env(compression=Compression(sentences=1)))
    play(env, search("Ada Lovelace Byron"))
    memory = env.state.memory
    assert memory.text_of(UnitId("ada")) == CORPUS[0].text
    assert "ada" in memory.evidence.units_of("Ada Lovelace")


def test_chunks_of_a_document_are_read_in_document_order() -> None:
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
        pool = Pool(unit)
        pool.add(hit("a", "text"), 1)
        assert pool.document_of("D1.9") == DocId("a")
        assert pool.document_of("D2.1") is None


def test_an_alias_has_no_handle_and_its_id_names_the_representative() -> None:
    memory = WorkingMemory.empty("q", "document")
    new, aliases = memory.absorb(
        [hit("a", TOWN, "T"), hit("b", TOWN, "T"), hit("c", "Quite another text.", "T")], Env()
    )
    assert (new, aliases) == (["a", "c"], {"b": "a"})
    assert memory.pool.resolve("b") == "a"
    assert [entry.handle for entry in memory.pool.entries.values()] == ["D1", "D2"]


def test_a_hidden_document_becomes_visible_with_all_its_chunks() -> None:
    memory = WorkingMemory.empty("q", "document")
    new, aliases = memory.absorb(
        [hit("a", TOWN, "T"), hit("b", TOWN, "T", index=1), hit("b", "Byron died there.", "T", index=0)], Env()
    )
    assert (new, aliases, memory.pool.aliases) == (["a", "b"], {}, {})
    assert memory.text_of(UnitId("b")) == f"Byron died there.\n{TOWN}"
    assert memory.pool.resolve("D2.2") == memory.pool.resolve("D2.1") == "b"


def test_without_deduplication_every_copy_is_pooled() -> None:
    memory = WorkingMemory.empty("q", "document")
    memory.absorb([hit("a", TOWN, "T"), hit("b", TOWN, "T")], Env().switch(dedup=False))
    assert list(memory.pool.entries) == ["a", "b"]
    assert not memory.pool.aliases


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
    assert kept.edit(additions, removals, Curation(cap=2)) == change
    assert list(kept.tags) == left


def test_delivery_is_by_importance_then_by_addition() -> None:
    kept = curated(a="low", b="very_high", c="fair", d="very_high")
    assert [entry.unit_id for entry in kept.in_order()] == [B, D, C, A]


@pytest.mark.parametrize(
    ("eviction", "incoming", "left"),
    [
        ("rank", "high", [A, C]),  # b is the first of the least important
        ("rank", "low", [A, B]),  # equal importance does not evict
        ("fifo", "low", [B, C]),
        ("refuse", "very_high", [A, B]),
    ],
)
def test_at_the_cap_the_eviction_policy_decides(eviction: Any, incoming: Tag, left: list[UnitId]) -> None:
    kept = curated(a="fair", b="low")
    change = kept.edit({C: incoming}, [], Curation(cap=2, eviction=eviction))
    assert list(kept.tags) == left
    assert (change.refused == (C,)) == (C not in left)


_JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda inner: st.lists(inner), max_leaves=4)


@given(st.dictionaries(st.sampled_from(["query", "queries", "doc_ids", "claim", "other"]), _JSON, max_size=3))
def test_a_subject_is_one_short_line(arguments: dict[str, object]) -> None:
    words = subject(ToolCall("search_corpus", arguments))
    assert len(words) <= SUBJECT_CHARACTERS
    assert len(words.splitlines()) <= 1


def test_a_huge_tool_name_does_not_fill_the_history_which_may_be_off() -> None:
    for on in (True, False):
        env = make_env(Env().switch(history=on))
        play(env, ToolCall("x\n" * 100_000))
        assert [len(line.tool) <= 40 for line in env.state.memory.history] == [True] * on


def test_a_subject_is_the_argument_that_matters() -> None:
    assert subject(search("Byron  died\nwhere")) == "Byron died where"
    assert subject(call("fan_out_search", queries=["a" * 40, "b", "c", "d"])) == f"{'a' * 30}; b; c"
    assert subject(call("verify", doc_ids=["D1"], claim="It rained.")) == "It rained."
    assert subject(curate(add_ids=[], remove_ids=["D4"])) == "D4"
    assert subject(ToolCall("search_corpus")) == ""


def test_a_line_counts_units_returned_new_and_curated() -> None:
    env = make_env(Env(auto_populate=AutoPopulate(by="first")))
    play(env, search("Ada Lovelace"), search("Ada Byron"), curate(add_ids=["D3"]))
    lines = env.state.memory.history
    assert [(line.turn, line.returned, line.new, line.curated) for line in lines] == [
        (1, 2, 2, 2),
        (2, 1, 1, 0),
        (3, 0, 0, 1),
    ]


def test_where_chunks_are_curated_chunks_are_counted() -> None:
    found = Observation("search_corpus", (hit("a", "x", index=0), hit("a", "y", index=1)))
    assert history_line(1, Pool("chunk"), search("x"), found).returned == 2
    assert history_line(1, Pool("document"), search("x"), found).returned == 1
