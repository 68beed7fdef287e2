"""Working memory is a value: it forks, serialises and hashes by what it holds, and not by text or size."""

from __future__ import annotations

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from harness1.config import Compression, Env, Evidence, Verification
from harness1.memory.parts import VerificationCache
from harness1.memory.working_memory import WorkingMemory
from harness1.records import UnitId, Verdict
from tests.support import CORPUS, END, call, curate, hit, make_env, play, run, search, wide_corpus

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
    play(env, *actions)  # type: ignore[arg-type]
    return env.state.memory


@given(_ACTIONS, _ACTIONS)
@settings(max_examples=25, deadline=None)
def test_a_fork_is_equal_and_neither_changes_the_other(before: list[object], after: list[object]) -> None:
    env = make_env(chunks=wide_corpus(20))
    play(env, *before)  # type: ignore[arg-type]
    twin = env.fork()
    held = msgspec.msgpack.encode(twin.state.memory)
    assert held == msgspec.msgpack.encode(env.state.memory)
    for action in after:
        if env.state.done is None:
            run(env.step([action]))  # type: ignore[list-item]
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
        change(twin)  # type: ignore[operator]
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


def test_what_is_absorbed_twice_is_absorbed_once() -> None:
    memory = WorkingMemory.empty("q", "document")
    memory.absorb([hit("a", "A text about Rome.")], Env())
    before = memory.fork()
    assert memory.absorb([hit("a", "A text about Rome.")], Env()) == ([], {})
    assert memory == before


def test_mechanisms_that_are_off_leave_the_memory_empty() -> None:
    env = make_env(Env(evidence=Evidence(on=False), verification=Verification(on=False)))
    play(env, search("Ada Byron"), call("verify", doc_ids=["D1"], claim="Ada wrote programs."), END)
    assert not env.state.memory.evidence.entities
    assert env.state.memory.verification == VerificationCache()
