"""Episodes on disk survive a crash at any byte, and damage is told instead of read."""

import json
import os
import signal
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness1.errors import SchemaError, UsageError
from harness1.records import (
    Episode,
    Hashes,
    ModelCall,
    Status,
    StopReason,
    Task,
    ToolCall,
    Turn,
)
from harness1.runs.files import STAGE, Stage, lock, read_stage
from harness1.runs.journal import (
    BLOCK,
    EPISODES,
    TOKENS,
    EpisodeStore,
    continue_lines,
    count_undigested,
    finish,
    latest_episodes,
    lines_of,
    read_episodes,
    without_digest,
)

_IDS = st.lists(st.integers(0, 2**31 - 1), max_size=6).map(tuple)
_LOGPROBS = st.lists(st.floats(-50, 0, width=32), max_size=6).map(tuple)
_CALLS = st.lists(
    st.builds(ModelCall, call_id=st.text(max_size=3), output_ids=_IDS, output_logprobs=_LOGPROBS), max_size=3
).map(tuple)


def episode(name: str = "a", calls: tuple[ModelCall, ...] = (), **segments: tuple[int, ...]) -> Episode:
    return Episode(
        episode_id=name,
        task=Task(name, f"Question {name}?"),
        turns=(Turn(1, calls, action=ToolCall("end_search")), Turn(2, calls[:1])),
        stop_reason=StopReason.END_SEARCH,
        status=Status.COMPLETED,
        hashes=Hashes("env", "policy", "index"),
        segments=segments,
    )


def with_tokens(name: str) -> Episode:
    call = ModelCall(name, output_ids=(1, 2, 3), output_logprobs=(-0.5, -1.0, -2.0))
    return episode(name, (call,), static=(7, 8), turn=())


def written(folder: Path, *episodes: Episode) -> None:
    with EpisodeStore(folder) as store:
        for each in episodes:
            store.append(each)


@given(calls=_CALLS, segments=st.dictionaries(st.text(max_size=4), _IDS, max_size=3))
def test_ids_and_logprobs_come_back_exactly(
    tmp_path_factory: pytest.TempPathFactory, calls: tuple[ModelCall, ...], segments: dict[str, tuple[int, ...]]
) -> None:
    folder = tmp_path_factory.mktemp("run")
    first, second = msgspec.structs.replace(episode("a", calls), segments=segments), with_tokens("b")
    written(folder, first, second)
    assert list(read_episodes(folder)) == [first, second]


def test_tokens_lie_in_the_side_file_as_int32_and_float32(tmp_path: Path) -> None:
    written(tmp_path, with_tokens("a"))
    assert (tmp_path / TOKENS).stat().st_size == 4 * (2 * (3 + 3) + 2)
    line = (tmp_path / EPISODES).read_bytes()
    assert msgspec.json.decode(line)["tokens"]["counts"] == [3, 3, 3, 3, 2, 0]
    assert b"-0.5" not in line
    assert np.fromfile(tmp_path / TOKENS, "<i4")[:3].tolist() == [1, 2, 3]


def test_a_crash_at_any_byte_of_the_last_line_loses_that_line_alone(tmp_path: Path) -> None:
    written(tmp_path, with_tokens("a"), with_tokens("b"))
    lines, tokens = (tmp_path / EPISODES).read_bytes(), (tmp_path / TOKENS).read_bytes()
    start = lines.index(b"\n") + 1
    for cut in range(start, len(lines)):
        (tmp_path / EPISODES).write_bytes(lines[:cut])
        (tmp_path / TOKENS).write_bytes(tokens)
        assert list(read_episodes(tmp_path)) == [with_tokens("a")]
        with EpisodeStore(tmp_path) as store:
            assert store.torn == cut - start
            store.append(with_tokens("c"))
        assert list(read_episodes(tmp_path)) == [with_tokens("a"), with_tokens("c")]


def test_a_crash_while_tokens_are_written_leaves_no_line(tmp_path: Path) -> None:
    written(tmp_path, with_tokens("a"))
    size = (tmp_path / TOKENS).stat().st_size
    for extra in range(1, 9):
        with (tmp_path / TOKENS).open("ab") as tokens:
            tokens.write(b"\x01" * extra)
    written(tmp_path, with_tokens("b"))
    assert (tmp_path / TOKENS).stat().st_size > 2 * size
    assert list(read_episodes(tmp_path)) == [with_tokens("a"), with_tokens("b")]


@pytest.mark.parametrize("keep", [0, 1, 30, 55])
def test_a_side_file_that_is_too_short_or_damaged_is_told(tmp_path: Path, keep: int) -> None:
    written(tmp_path, with_tokens("a"))
    tokens = (tmp_path / TOKENS).read_bytes()
    for damaged in (tokens[:keep], tokens[:keep] + b"\xff" + tokens[keep + 1 :]):
        (tmp_path / TOKENS).write_bytes(damaged)
        with pytest.raises(SchemaError, match=r"episodes.jsonl:1: the tokens of episode a are damaged"):
            list(read_episodes(tmp_path))
    (tmp_path / TOKENS).unlink()
    with pytest.raises(SchemaError, match=r"episodes.jsonl:1: .*missing"):
        list(read_episodes(tmp_path))


@pytest.mark.parametrize("change", ["removed", "replaced"])
def test_a_journal_that_is_gone_once_it_is_locked_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    path = tmp_path / EPISODES

    def lock_late(*_: object, **__: object) -> None:
        path.rename(tmp_path / "old")  # keeps its inode from being used again
        if change == "replaced":
            path.touch()

    monkeypatch.setattr("harness1.runs.journal.lock", lock_late)
    with pytest.raises(UsageError, match="another process"):
        EpisodeStore(tmp_path)


def test_two_writers_are_refused_and_the_second_may_follow_the_first(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no"):
        list(read_episodes(tmp_path))
    with EpisodeStore(tmp_path / "new" / "run") as store:
        assert list(read_episodes(tmp_path / "new" / "run")) == []  # a reader may look
        with pytest.raises(UsageError, match="another process"):
            EpisodeStore(tmp_path / "new" / "run")
        store.append(with_tokens("a"))
    written(tmp_path / "new" / "run", episode("b"))
    assert list(read_episodes(tmp_path / "new" / "run")) == [with_tokens("a"), episode("b")]


def test_work_that_was_done_again_counts_as_it_ended_the_last_time(tmp_path: Path) -> None:
    fine, broken = episode("a"), msgspec.structs.replace(episode("b"), status=Status.INFRA_ERROR)
    written(tmp_path, fine, broken)
    written(tmp_path, episode("b"))
    assert latest_episodes(tmp_path) == {fine.key: fine, broken.key: episode("b")}
    assert len(list(read_episodes(tmp_path))) == 3


@pytest.mark.parametrize("size", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK])
@pytest.mark.parametrize("torn", [0, 1, BLOCK, 2 * BLOCK + 5])
def test_a_torn_line_of_any_length_is_cut_off(tmp_path: Path, size: int, torn: int) -> None:
    whole = b"a" * (size - 1) + b"\n" if size else b""
    (tmp_path / EPISODES).write_bytes(whole + b"b" * torn)
    with EpisodeStore(tmp_path) as store:
        assert store.torn == torn
    assert (tmp_path / EPISODES).read_bytes() == whole


def test_opening_a_large_journal_reads_its_end_only(tmp_path: Path) -> None:
    with (tmp_path / EPISODES).open("wb") as file:
        file.truncate(64 << 20)
        file.seek(0, 2)
        file.write(b"\n{}\n{torn")
    tracemalloc.start()
    with EpisodeStore(tmp_path) as store:
        assert store.torn == 5
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 * BLOCK


CARD = Stage("run", {"env": "e", "policy": "p", "seed": 7}, outputs={"policy": "by-hand"})
Lines = list[bytes]


EPISODES_OF_RUN = [msgspec.structs.replace(episode(name), stage_ms={"policy": 1.5}) for name in "abc"]


def digested(folder: Path, card: Stage = CARD, *, closed: bool = True, key: str = "k") -> Path:
    card = msgspec.structs.replace(card, outputs={**card.outputs, "lines": {"key": key, "undigested": 0}})
    card = continue_lines(card, folder / EPISODES)
    card.write(folder)
    written(folder, *EPISODES_OF_RUN)
    if closed:
        finish(card, folder / EPISODES)
    return folder


def edited(folder: Path, change: Callable[[Lines], Lines]) -> Path:
    lines = change((folder / EPISODES).read_bytes().splitlines())
    (folder / EPISODES).write_bytes(b"".join(line + b"\n" for line in lines))
    return folder


def bare(lines: Lines) -> Lines:
    return [without_digest(line)[0] for line in lines]


EDITS: dict[str, Callable[[Lines], Lines]] = {
    "a field": lambda lines: [lines[0].replace(b'"a"', b'"z"'), *lines[1:]],
    "a time": lambda lines: [lines[0].replace(b"1.5", b"1.6"), *lines[1:]],
    "a space": lambda lines: [lines[0].replace(b":", b": ", 1), *lines[1:]],
    "a digest": lambda lines: [lines[0][:-3] + b'0"}', *lines[1:]],
    "a digest taken off": lambda lines: [*bare(lines[:1]), *lines[1:]],
    "all digests taken off": bare,
    "a digest moved": lambda lines: [_moved(*without_digest(lines[0])), *lines[1:]],
    "fields in another order": lambda lines: [_sorted(lines[0]), *lines[1:]],
}
OF_FINISHED_RUNS: dict[str, Callable[[Lines], Lines]] = {
    "a line lost": lambda lines: lines[1:],
    "the last line lost": lambda lines: lines[:-1],
    "a line twice": lambda lines: [*lines, lines[0]],
    "lines in another order": lambda lines: lines[::-1],
    "no line": lambda lines: [],
}


def _moved(body: bytes, found: bytes) -> bytes:
    return b'{"digest":"' + found + b'",' + body[1:]


def _sorted(line: bytes) -> bytes:
    return json.dumps(dict(sorted(json.loads(line).items()))).encode()


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("closed", [True, False])
def test_an_edited_line_is_found_and_named(tmp_path: Path, edit: str, closed: bool) -> None:
    folder = digested(tmp_path / "run", closed=closed)
    assert list(read_episodes(folder)) == EPISODES_OF_RUN
    edited(folder, EDITS[edit])
    with pytest.raises(SchemaError, match=r"episodes\.jsonl:1: "):
        list(read_episodes(folder))


@pytest.mark.parametrize("edit", OF_FINISHED_RUNS)
def test_lines_of_a_finished_run_are_all_there_in_their_order(tmp_path: Path, edit: str) -> None:
    edited(digested(tmp_path), OF_FINISHED_RUNS[edit])
    with pytest.raises(SchemaError, match="changed after the run had ended"):
        list(read_episodes(tmp_path))


def test_a_line_of_another_run_is_found_and_an_edited_one_even_without_a_card(tmp_path: Path) -> None:
    other = digested(tmp_path / "other", key="l", closed=False)
    folder = digested(tmp_path / "run", closed=False)
    (folder / EPISODES).write_bytes((folder / EPISODES).read_bytes() + (other / EPISODES).read_bytes())
    with pytest.raises(SchemaError, match=r":4: this line was changed, or was recorded in another run"):
        list(read_episodes(folder))
    written(tmp_path, episode("a"))
    assert list(read_episodes(tmp_path)) == [episode("a")]
    edited(tmp_path, EDITS["a field"])
    with pytest.raises(SchemaError, match=":1: this line was changed"):
        list(read_episodes(tmp_path))


@pytest.mark.parametrize(
    "change",
    [{"inputs": {"env": "other"}}, {"outputs": {"policy": "other"}}, {"hashes": {"env": "x"}}, {"gates": {"a": 1}}],
    ids=str,
)
def test_an_edited_card_is_found(tmp_path: Path, change: dict[str, dict[str, Any]]) -> None:
    card = json.loads((digested(tmp_path) / STAGE).read_bytes())
    for name, values in change.items():
        card[name] = card.get(name, {}) | values
    (tmp_path / STAGE).write_text(json.dumps(card))
    with pytest.raises(SchemaError, match="the card was edited"):
        list(read_episodes(tmp_path))


def test_lines_of_an_earlier_version_are_read_and_counted_and_the_run_goes_on(tmp_path: Path) -> None:
    CARD.write(edited(digested(tmp_path, closed=False), bare))
    assert list(read_episodes(tmp_path)) == EPISODES_OF_RUN
    assert count_undigested(tmp_path / EPISODES) == 3
    digested(tmp_path)
    assert len(list(read_episodes(tmp_path))) == 6
    assert count_undigested(tmp_path / EPISODES) == 3
    edited(tmp_path, lambda lines: [*lines[:3], *bare(lines[3:])])
    with pytest.raises(SchemaError, match=r":4: this line has lost its digest"):
        list(read_episodes(tmp_path))


def test_a_run_that_grows_is_closed_by_its_new_lines_alone(tmp_path: Path) -> None:
    card = read_stage(digested(tmp_path))
    with EpisodeStore(tmp_path) as store:
        store.append(episode("d"))
    grown = finish(continue_lines(card, tmp_path / EPISODES), tmp_path / EPISODES, lines_of(card))
    assert len(list(read_episodes(tmp_path))) == 4
    assert finish(continue_lines(card, tmp_path / EPISODES), tmp_path / EPISODES) == grown


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[int]:
    ready, locked = os.pipe()
    child = os.fork()
    if not child:
        file = (tmp_path / "lock").open("w")
        lock(file, "held")
        os.write(locked, b"x")
        signal.pause()
        os._exit(0)
    os.read(ready, 1)
    yield child
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def test_a_held_lock_is_refused_or_waited_for_aloud_until_its_process_is_killed(tmp_path: Path, holder: int) -> None:
    said, got = threading.Event(), threading.Event()

    def wait() -> None:
        with (tmp_path / "lock").open("w") as file:
            lock(file, "", said.set)
            got.set()

    with (tmp_path / "lock").open("w") as file, pytest.raises(UsageError, match="somebody builds here"):
        lock(file, "somebody builds here")
    waiting = threading.Thread(target=wait)
    waiting.start()
    assert said.wait(10)
    assert not got.is_set()
    os.kill(holder, signal.SIGKILL)
    waiting.join(10)
    assert got.is_set()
