"""Episodes that are appended to a run folder one by one, each a sample of its own, whoever plays them and when."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness1.adapters.driven import Searches
from harness1.config import Config
from harness1.episodes.rollout import replay_episode, rollout
from harness1.episodes.single import Samples, open_run
from harness1.errors import SchemaError
from harness1.records import Episode, Task, ToolCall
from harness1.runs.journal import EPISODES, latest_episodes, read_episodes
from tests.support import END, Script, make_env, run, search

CONFIG = Config()


def played(name: str) -> Episode:
    return run(rollout(make_env(), Script(search("Ada Byron"), END), Task(name, "Who was her father?")))


def keep(folder: Path, *names: str, samples: Samples | None = None) -> list[Episode]:
    with open_run(folder, CONFIG, "test", "index", {}, samples=samples) as append:
        return [append(played(name)) for name in names]


def numbers(folder: Path) -> list[tuple[str, int]]:
    assert len(latest_episodes(folder)) == len(list(read_episodes(folder)))
    return [key[:2] for key in latest_episodes(folder)]


def test_episodes_of_a_task_are_numbered_on_when_a_folder_is_opened_again(tmp_path: Path) -> None:
    told = keep(tmp_path, "a", "b", "a") + keep(tmp_path, "a", "c")
    assert numbers(tmp_path) == [("a", 0), ("b", 0), ("a", 1), ("a", 2), ("c", 0)]
    found = list(read_episodes(tmp_path))
    assert [each.episode_id for each in found] == [each.episode_id for each in told]
    assert len({each.episode_id for each in found}) == 5
    assert [replay_episode(each, make_env().config).difference for each in found] == [None] * 5


def test_one_who_opens_a_folder_often_counts_what_others_added_and_begins_anew_with_the_folder(tmp_path: Path) -> None:
    samples, folder = Samples(), tmp_path / "run"
    keep(folder, "a", samples=samples)
    keep(folder, "a", "a")
    keep(folder, "a", samples=samples)
    assert numbers(folder) == [("a", 0), ("a", 1), ("a", 2), ("a", 3)]
    for path in folder.iterdir():
        path.unlink()
    keep(folder, "a", samples=samples)
    assert numbers(folder) == [("a", 0)]


def test_lines_that_were_read_are_not_read_again(tmp_path: Path) -> None:
    keep(tmp_path, "a", "a")
    samples, path = Samples(), tmp_path / EPISODES
    samples.catch_up(tmp_path)
    size = path.stat().st_size
    path.write_bytes(b"x" * size)
    samples.catch_up(tmp_path)
    assert samples.next_of("a") == 2
    with pytest.raises(SchemaError, match="no episode"):
        Samples().catch_up(tmp_path)


def test_searches_of_a_server_that_was_started_again_are_all_kept(tmp_path: Path) -> None:
    async def serve() -> None:
        with open_run(tmp_path, CONFIG, "mcp", "index", {}) as append:
            searches = Searches(make_env, "mcp", append)
            for _ in range(2):
                name, _ = await searches.start("Who was her father?")
                await searches.act(name, ToolCall("end_search", {"reasoning": "done"}))

    run(serve())
    run(serve())
    assert [sample for _, sample in numbers(tmp_path)] == [0, 1, 2, 3]
