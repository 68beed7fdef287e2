"""Lines of a record that were edited, lost, moved or brought in from elsewhere are found when the run is read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness1.errors import SchemaError
from harness1.records import Episode, Hashes, Status, StopReason, Task
from harness1.runs.files import STAGE, Stage
from harness1.runs.journal import (
    EPISODES,
    EpisodeStore,
    continue_lines,
    count_undigested,
    finish,
    read_episodes,
    without_digest,
)

CARD = Stage("run", {"env": "e", "policy": "p", "seed": 7}, outputs={"policy": "by-hand"})
Lines = list[bytes]


def episode(number: int) -> Episode:
    return Episode(
        episode_id=f"e{number}",
        task=Task(f"t{number}", "Why?"),
        stop_reason=StopReason.END_SEARCH,
        status=Status.COMPLETED,
        hashes=Hashes("e", "p", "i"),
        stage_ms={"policy": 1.5},
    )


EPISODES_OF_RUN = [episode(number) for number in range(3)]


def written(folder: Path, card: Stage = CARD, *, closed: bool = True, key: str = "k") -> Path:
    card = msgspec.structs.replace(card, outputs={**card.outputs, "lines": {"key": key, "undigested": 0}})
    card = continue_lines(card, folder / EPISODES)
    card.write(folder)
    with EpisodeStore(folder) as store:
        for each in EPISODES_OF_RUN:
            store.append(each)
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
    "a field": lambda lines: [lines[0].replace(b'"t0"', b'"t9"'), *lines[1:]],
    "a time": lambda lines: [lines[0].replace(b"1.5", b"1.6"), *lines[1:]],
    "a space": lambda lines: [lines[0].replace(b":", b": ", 1), *lines[1:]],
    "a digest": lambda lines: [lines[0][:-3] + b'0"}', *lines[1:]],
    "a digest taken off": lambda lines: [*bare(lines[:1]), *lines[1:]],
    "all digests taken off": bare,
    "a digest moved": lambda lines: [_moved(lines[0]), *lines[1:]],
    "fields in another order": lambda lines: [_sorted(lines[0]), *lines[1:]],
}
OF_FINISHED_RUNS: dict[str, Callable[[Lines], Lines]] = {
    "a line lost": lambda lines: lines[1:],
    "the last line lost": lambda lines: lines[:-1],
    "a line twice": lambda lines: [*lines, lines[0]],
    "lines in another order": lambda lines: lines[::-1],
    "no line": lambda lines: [],
}


def _moved(line: bytes) -> bytes:
    body, found = without_digest(line)
    return b'{"digest":"' + found + b'",' + body[1:]


def _sorted(line: bytes) -> bytes:
    return json.dumps(dict(sorted(json.loads(line).items()))).encode()


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("closed", [True, False])
def test_an_edited_line_is_found_and_named(tmp_path: Path, edit: str, closed: bool) -> None:
    folder = written(tmp_path / "run", closed=closed)
    assert list(read_episodes(folder)) == EPISODES_OF_RUN
    edited(folder, EDITS[edit])
    with pytest.raises(SchemaError, match=r"episodes\.jsonl:1: "):
        list(read_episodes(folder))


@pytest.mark.parametrize("edit", OF_FINISHED_RUNS)
def test_lines_of_a_finished_run_are_all_there_in_their_order(tmp_path: Path, edit: str) -> None:
    edited(written(tmp_path), OF_FINISHED_RUNS[edit])
    with pytest.raises(SchemaError, match="changed after the run had ended"):
        list(read_episodes(tmp_path))


def test_a_line_of_another_run_is_found(tmp_path: Path) -> None:
    other = written(tmp_path / "other", key="l", closed=False)
    folder = written(tmp_path / "run", closed=False)
    (folder / EPISODES).write_bytes((folder / EPISODES).read_bytes() + (other / EPISODES).read_bytes())
    with pytest.raises(SchemaError, match=r":4: this line was changed, or was recorded in another run"):
        list(read_episodes(folder))


@pytest.mark.parametrize(
    "change",
    [{"inputs": {"env": "other"}}, {"outputs": {"policy": "other"}}, {"hashes": {"env": "x"}}, {"gates": {"a": 1}}],
    ids=str,
)
def test_an_edited_card_is_found(tmp_path: Path, change: dict[str, dict[str, Any]]) -> None:
    card = json.loads((written(tmp_path) / STAGE).read_bytes())
    for name, values in change.items():
        card[name] = card.get(name, {}) | values
    (tmp_path / STAGE).write_text(json.dumps(card))
    with pytest.raises(SchemaError, match="the card was edited"):
        list(read_episodes(tmp_path))


def test_lines_of_an_earlier_version_are_read_and_counted_and_the_run_goes_on(tmp_path: Path) -> None:
    CARD.write(edited(written(tmp_path, closed=False), bare))
    assert list(read_episodes(tmp_path)) == EPISODES_OF_RUN
    assert count_undigested(tmp_path / EPISODES) == 3
    written(tmp_path)
    assert len(list(read_episodes(tmp_path))) == 6
    assert count_undigested(tmp_path / EPISODES) == 3
    edited(tmp_path, lambda lines: [*lines[:3], *bare(lines[3:])])
    with pytest.raises(SchemaError, match=r":4: this line has lost its digest"):
        list(read_episodes(tmp_path))


def test_lines_without_a_card_are_checked_one_by_one(tmp_path: Path) -> None:
    with EpisodeStore(tmp_path) as store:
        store.append(episode(1))
    assert list(read_episodes(tmp_path)) == [episode(1)]
    edited(tmp_path, lambda lines: [lines[0].replace(b'"t1"', b'"t2"')])
    with pytest.raises(SchemaError, match=":1: this line was changed"):
        list(read_episodes(tmp_path))


def test_a_run_that_grows_is_closed_by_its_new_lines_alone(tmp_path: Path) -> None:
    from harness1.runs.files import read_stage
    from harness1.runs.journal import lines_of

    card = read_stage(written(tmp_path))
    assert card is not None
    with EpisodeStore(tmp_path) as store:
        store.append(episode(3))
    grown = finish(continue_lines(card, tmp_path / EPISODES), tmp_path / EPISODES, lines_of(card))
    assert len(list(read_episodes(tmp_path))) == 4
    assert finish(continue_lines(card, tmp_path / EPISODES), tmp_path / EPISODES) == grown
