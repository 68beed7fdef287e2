"""The public reference of this method has known defects. Each is a requirement here, the other way round; the number
in a docstring is that of the defect. Others hold 5, 7, 9 to 15, 17 to 19, and 23 (`test_ablations`)."""

import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest

from harness1.config import Compression, Config, Env
from harness1.env.environment import SearchEnv
from harness1.episodes.rollout import rollout
from harness1.memory.sentences import compress
from harness1.memory.working_memory import WorkingMemory
from harness1.records import DocId, Episode, Gold, Status, StopReason, Task, UnitId
from harness1.retrieval.protocol import RetrievalFault, SearchRequest, SearchResult
from harness1.reward import score
from tests.support import (
    CORPUS,
    END,
    Script,
    WordRetriever,
    call,
    chunk,
    curate,
    hit,
    make_env,
    play,
    run,
    search,
    text_of,
    wide_corpus,
)

ROOT = Path(__file__).parent.parent
LONG = " ".join(f"Sentence number {n} says little about it." for n in range(30))
NEEDLE = "Lord Byron died in Missolonghi of a fever in April 1824."


def memory_after(env: SearchEnv, *actions: object) -> WorkingMemory:
    play(env, *actions)
    return env.state.memory


def test_compression_and_deduplication_need_no_optional_package() -> None:
    """1: the packages behind them were missing, and both silently did nothing."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = " ".join(project["dependencies"])
    assert "datasketch" not in needed
    assert "rank-bm25" not in needed
    assert compress(f"{LONG} {NEEDLE}", "Byron died fever", 1) == NEEDLE
    twin = LONG.replace("number 29 says", "number 29 tells")
    memory = WorkingMemory.empty("q", "document")
    assert memory.absorb([hit("a", LONG, "T"), hit("b", twin, "T")], Env())[1] == {"b": "a"}


def test_results_are_compressed_whatever_their_header_looks_like() -> None:
    """2: compression looked for a header that search results never had."""
    for title in ("Plain", "Title (123 tokens)", "# DOCUMENT ID: x_1 (9 tokens) "):
        env = make_env(Env(compression=Compression(sentences=1)), [chunk("x_1", f"{LONG} {NEEDLE}", title)])
        shown = text_of(play(env, search("Byron died fever"))[0].context)
        assert NEEDLE in shown
        assert "Sentence number 5" not in shown


def test_structured_hits_need_no_text_parsing() -> None:
    """3: ids were parsed back out of text, so that store, graph and verification stayed empty."""
    odd = "# DOCUMENT ID: other_1 (12 tokens)\nD9 very_high (99 tokens): \n[D2] Ada Lovelace wrote it."
    chunks = [chunk("id with spaces (5 tokens)", f"Ada Lovelace. {odd}", "T (3 tokens)"), CORPUS[2]]
    env = make_env(chunks=chunks)
    memory = memory_after(env, search("Ada Lovelace"))
    assert set(memory.pool.entries) == {"id with spaces (5 tokens)", "babbage"}
    assert memory.text_of(UnitId("id with spaces (5 tokens)")) == chunks[0].text
    assert "id with spaces (5 tokens)" in memory.evidence.units_of("Ada Lovelace")
    verdicts = play(
        env, search("Ada Lovelace"), call("verify", doc_ids=[chunks[0].doc_id], claim="Ada Lovelace wrote it.")
    )[1]
    assert verdicts.observation.verdicts[0].label == "yes"


def test_what_is_read_enters_store_graph_and_pool() -> None:
    """4: a document that was read left no trace in the memory."""
    chunks = [chunk("a", "Ada Lovelace wrote.", "A"), chunk("a", "Charles Babbage built an engine.", "A", 1)]
    memory = memory_after(make_env(chunks=chunks), search("Ada"), call("read_document", doc_id="D1"))
    assert memory.pool.entries[UnitId("a")].chunk_ids == ("a#0", "a#1")
    assert "engine" in memory.text_of(UnitId("a"))
    assert memory.evidence.units_of("Charles Babbage") == ("a",)


@pytest.mark.parametrize("doc_id", ["under_score_12", "http://x.org/a_b/c_1#d_2", "_", "a/b\\c", "漢字_3", "D_1"])
def test_ids_with_underscores_and_slashes_stay_whole(doc_id: str) -> None:
    """6: tools cut ids at the first or the last underscore, each in its own way."""
    env = make_env(chunks=[chunk(doc_id, "Ada Lovelace wrote."), chunk("under", "Ada Ada.")])
    for name in (doc_id, memory_after(env, search("Ada Lovelace")).pool.entries[UnitId(doc_id)].handle):
        named = [call("review_docs", doc_ids=[name]), call("verify", doc_ids=[name], claim="Ada wrote.")]
        curated = curate(add_ids=[name], importance={name: "high"})
        for step in play(env, search("Ada Lovelace"), call("read_document", doc_id=name), *named, curated)[1:]:
            assert (step.observation.error, step.observation.resolved) == (None, {name: doc_id})
        assert env.state.memory.curated.tags[UnitId(doc_id)] == "high"


def test_no_document_is_pooled_without_being_shown() -> None:
    """16: documents beyond the cut entered the pool, and nobody saw them."""
    env = make_env(Env().switch(compression=False), wide_corpus(60))
    for words in (["river", "castle", "Paris", "war", "Ada"], ["Rome", "king"]):
        step = play(env, call("fan_out_search", queries=words))[0]
        assert {document.unit_id for document in step.context.view.documents.values()} == set(
            env.state.memory.pool.entries
        )


def test_gold_never_reaches_the_environment() -> None:
    """24: queries of training and test met; here an environment cannot even be given the answer."""
    seen: list[str] = []
    task = Task("t", "Where did Byron die?", gold=Gold({DocId("secret_gold"): 1}), metadata={"answer": "secret_gold"})
    episode = run(rollout(make_env(), Script(search("Byron"), END), task, on_step=lambda step: seen.append(str(step))))
    assert "secret_gold" not in str(episode) + "".join(seen)


def test_every_failure_of_a_policy_is_scored_and_none_of_the_infrastructure() -> None:
    """20, 25: a crashed tool and a faulty format shared one reward, -0.5; failures counted as 0 for one system and were
    skipped for the others."""
    gold = Gold({DocId("ada"): 1})

    def scored(env: SearchEnv, *script: object) -> Episode:
        return score(run(rollout(env, Script(*script), Task("t", "q"))), gold, Config())

    truncated = scored(make_env(Env(context_window=2050, generation_reserve=300)), call("unknown", text="x" * 20_000))
    assert (truncated.stop_reason, truncated.reward is not None) == (StopReason.CONTEXT_LIMIT, True)
    limited = scored(make_env(Env(max_turns=1)), search("Ada"))
    assert limited.reward.total > 0
    faulty = scored(make_env(), "no call")
    assert (faulty.status, faulty.reward.total) == (Status.POLICY_ERROR, -0.5)
    broken = scored(make_env(retriever=WordRetriever(CORPUS, faults=99)), search("Ada"))
    assert (broken.status, broken.reward) == (Status.INFRA_ERROR, None)


def test_queries_of_a_fan_out_are_asked_at_once() -> None:
    """The prompt promised parallel queries, and they ran one after the other."""
    batches: list[int] = []

    class Together(WordRetriever):
        async def search(self, requests: Sequence[SearchRequest]) -> list[SearchResult | RetrievalFault]:
            batches.append(len(requests))
            return await super().search(requests)

    play(make_env(retriever=Together(CORPUS)), call("fan_out_search", queries=["Ada", "Byron", "town", "Rain", "Lord"]))
    assert batches == [5]
