"""The benchmarks run, and report what they promise; no time is asserted."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import env_turn, prefix_reuse, retrieval
from benchmarks.peer import Peer
from benchmarks.workload import CHUNKS, EncodingCounter, passages, tokenizer, workload
from harness1.config import Env
from harness1.data.open import open_source
from harness1.env.pieces import piece
from harness1.errors import UsageError
from harness1.memory.sentences import split
from harness1.memory.working_memory import WorkingMemory
from tests.support import hit


def test_env_turn_compares_both_modes(capsys: pytest.CaptureFixture[str]) -> None:
    report = env_turn.main(["--episodes", "1", "--turns", "2", "--json"])
    assert json.loads(capsys.readouterr().out) == report
    assert report["modes"].keys() == {"search", "mix"}
    for rows in report["modes"].values():
        assert [row["turn"] for row in rows] == [1, 2]
        keys = {"turn", "action", "ours_ms", "peer_ms", "ratio", "ours_tokens", "peer_tokens"}
        assert all(row.keys() == keys for row in rows)
    assert [row["action"] for row in report["modes"]["mix"]] == ["search_corpus", "curate"]


def test_env_turn_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    env_turn.main(["--episodes", "1", "--turns", "1"])
    assert "peer/ours" in capsys.readouterr().out


def test_env_turn_measures_real_passages_with_evidence_and_token_ids(capsys: pytest.CaptureFixture[str]) -> None:
    report = env_turn.main(["--text", "world:60", "--episodes", "2", "--turns", "2", "--evidence", "--ids", "--json"])
    assert json.loads(capsys.readouterr().out) == report
    for row in (row for rows in report["modes"].values() for row in rows):
        for way in ("ids", "evidence", "evidence_ids"):
            assert row[f"{way}_ms"] > 0
            assert row[f"{way}_ratio"] == pytest.approx(row[f"{way}_ms"] / row["ours_ms"], abs=0.02)
    with pytest.raises(UsageError, match="need 800"):
        env_turn.main(["--text", "world:60", "--episodes", "2"])


def test_passages_come_once_and_their_copies_are_hidden() -> None:
    work = passages(open_source("world:300"), 7, "search", 4)
    chunks = [chunk for each in work for move in each.moves for chunk in move.found]
    assert len({chunk.chunk_id for chunk in chunks}) == len(chunks) == 4 * 7 * CHUNKS
    assert work == passages(open_source("world:300"), 7, "search", 4)
    copies = [chunk for chunk in chunks if "-copy" in chunk.doc_id]
    assert len(copies) >= 10
    for each in work:
        memory = WorkingMemory.empty(each.query, "document")
        for move in each.moves:
            hits = [hit(chunk.doc_id, chunk.text, chunk.title) for chunk in move.found]
            memory.absorb(hits, Env())
        made = {chunk.doc_id for move in each.moves for chunk in move.found if "-copy" in chunk.doc_id}
        assert made <= memory.pool.aliases.keys()


def test_prefix_reuse_compares_the_orders(capsys: pytest.CaptureFixture[str]) -> None:
    report = prefix_reuse.main(["--episodes", "1", "--turns", "6", "--world", "80", "--json"])
    assert json.loads(capsys.readouterr().out)["limits"].keys() == {"30720", "8192"}
    orders = report["limits"][30_720]
    assert orders.keys() == {"paper", "stable_first", "epoch"}
    assert all(row.keys() == orders["paper"].keys() for row in orders.values())
    assert orders["paper"]["ratio_to_paper"] == 1
    assert orders["paper"]["rows"] == 6
    assert orders["epoch"]["rows"] == orders["epoch"]["epochs"] == 2
    assert orders["epoch"]["prefilled_tokens"] < orders["stable_first"]["prefilled_tokens"]


def test_prefix_reuse_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    prefix_reuse.main(["--episodes", "1", "--turns", "1", "--world", "80"])
    assert "prefilled" in capsys.readouterr().out


def test_retrieval_measures_bm25_beside_peers_and_grep_beside_scans(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = ["--chunks", "400", "--folder", str(tmp_path), "--engines", "ours", "rank_bm25"]
    report = retrieval.main(["bm25", "grep", *seen, "--json"])
    assert json.loads(capsys.readouterr().out) == report
    ours, peer = report["bm25"]
    assert ours["ms_ratio"] == ours["excluding_ms_ratio"] == 1
    assert peer["excluding_ms"] / ours["excluding_ms"] == pytest.approx(peer["excluding_ms_ratio"])
    assert peer["agreement"] > 0.8
    assert all(row["hits"] >= 1 for row in report["grep"])
    assert {row["pattern"].startswith("(?i)") for row in report["grep"]} == {True, False}
    assert all(row["outcome"] for row in report["hostile"])


@pytest.mark.parametrize("wrong", [["speed"], ["bm25", "--engines", "tantivy"]])
def test_retrieval_refuses_what_it_cannot_measure(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        retrieval.main(wrong)
    assert "retrieval: error" in capsys.readouterr().err


def test_workload_repeats_itself_and_no_chunk() -> None:
    one = workload(4, "search", 1)
    assert one == workload(4, "search", 1)
    chunks = [chunk for move in one.moves for chunk in move.found]
    assert len({chunk.doc_id for chunk in chunks}) == len({chunk.text for chunk in chunks}) == 4 * CHUNKS
    assert not {chunk.text for chunk in chunks} & {
        c.text for move in workload(4, "search", 2).moves for c in move.found
    }


def test_workload_chunks_are_as_long_as_said() -> None:
    texts = [chunk.text for move in workload(10, "search", 0).moves for chunk in move.found]
    assert 165 <= sum(len(text.split()) for text in texts) / len(texts) <= 180
    assert 8 <= sum(len(split(text)) for text in texts) / len(texts) <= 11


def test_a_tenth_of_the_chunks_are_near_duplicates() -> None:
    texts = [chunk.text for move in workload(40, "search", 0).moves for chunk in move.found]
    words = [frozenset(text.split()) for text in texts]
    copies = sum(any(len(own & other) > 0.9 * len(own) for other in words[:at]) for at, own in enumerate(words))
    assert 20 <= copies <= 60


def test_peer_hides_near_duplicates_and_keeps_its_window() -> None:
    peer = Peer("a question", ("static",), Env(), tokenizer(None))
    sizes = [peer.step(move) for move in workload(8, "search", 0).moves]
    assert peer.hidden + len(peer.pool) == 8 * CHUNKS
    assert len(peer.curated) == Env().auto_populate.documents
    assert sizes[4] > sizes[0]
    assert max(sizes[5:]) < 2 * sizes[4]


@given(st.text())
def test_tokenizer_loses_nothing(text: str) -> None:
    encoding = tokenizer(None)
    assert encoding.decode(encoding.encode_ordinary(text)) == text


def test_tokenizer_learned_words() -> None:
    assert len(tokenizer(None).encode_ordinary(" the function returns a list of arguments")) <= 8


def test_tokenizer_reads_a_vocabulary(tmp_path: Path) -> None:
    tokens = [bytes([value]) for value in range(256)] + [b"ab"]
    lines = [f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(tokens)]
    path = tmp_path / "small.tiktoken"
    path.write_text("\n".join(lines))
    encoding = tokenizer(path)
    assert encoding.name == "small"
    assert encoding.encode_ordinary("abab") == [256, 256]


def test_counters_of_different_vocabularies_differ(tmp_path: Path) -> None:
    path = tmp_path / "bytes.tiktoken"
    path.write_text("\n".join(f"{base64.b64encode(bytes([value])).decode()} {value}" for value in range(256)))
    small, large = EncodingCounter(tokenizer(path)), EncodingCounter(tokenizer(None))
    assert small.hash != large.hash
    assert small.piece(piece("a", "user", "hello")) == 6 > large.piece(piece("a", "user", "hello"))
