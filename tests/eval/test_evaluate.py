"""Evaluation into a run folder."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from harness1.config import Config, load_config
from harness1.data.source import open_source
from harness1.errors import UsageError
from harness1.eval.evaluate import Evaluation, evaluate
from harness1.records import Episode, Gold, Status
from harness1.retrieval.building import build_index
from harness1.run_folder import METRICS, run_config
from harness1.stage import read_stage
from harness1.store import EpisodeStore, read_episodes

SOURCE = open_source("world:100")
CONFIG = load_config(None, ["run.workers=1", "run.bootstrap=100"])


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("evaluate") / "index"
    build_index(SOURCE.documents(), folder, Config().index)
    return str(folder)


def evaluation(index: str, tasks: int = 4, policy: str = "oracle", samples: int = 1) -> Evaluation:
    return Evaluation("world:100", "train", SOURCE.tasks("train")[:tasks], index, policy, CONFIG, samples)


def ignore(*_: object) -> None:
    pass


def test_a_run_folder_says_what_was_run_and_how_it_ended(index: str, tmp_path: Path) -> None:
    metrics = evaluate(evaluation(index), tmp_path, ignore, ignore)
    assert msgspec.json.decode((tmp_path / METRICS).read_bytes()) == metrics
    stage = read_stage(tmp_path)
    assert stage is not None
    assert (stage.status, stage.inputs["policy"]) == ("finished", stage.hashes["policy"])
    assert set(stage.hashes) == {"env", "policy", "index", "counter"}
    assert run_config(tmp_path) == (CONFIG, str(Path(index).resolve()))


def test_the_oracle_reaches_recall_one_and_one_search_does_not(index: str, tmp_path: Path) -> None:
    tasks = 60
    oracle = evaluate(evaluation(index, tasks), tmp_path / "oracle", ignore, ignore)
    single = evaluate(evaluation(index, tasks, "single-shot"), tmp_path / "single", ignore, ignore)
    assert oracle["curated_recall"]["mean"] == 1.0
    assert oracle["curated_precision"]["mean"] == 1.0
    assert single["curated_recall"]["high"] < 1.0


def test_only_what_is_missing_is_run_again(index: str, tmp_path: Path) -> None:
    evaluate(evaluation(index), tmp_path, ignore, ignore)
    lines = (tmp_path / "episodes.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "episodes.jsonl").write_bytes(b"".join(lines[:2]) + lines[2][:50])
    started: list[tuple[int, int]] = []
    ran: list[Episode] = []
    metrics = evaluate(evaluation(index), tmp_path, lambda *counts: started.append(counts), ran.append)
    assert started == [(2, 4)]
    assert len(ran) == 2
    assert metrics["tasks"] == metrics["scored"] == 4


def test_an_episode_that_the_infrastructure_broke_is_run_again(index: str, tmp_path: Path) -> None:
    evaluate(evaluation(index, 2), tmp_path, ignore, ignore)
    first, second = read_episodes(tmp_path)
    (tmp_path / "episodes.jsonl").unlink()
    with EpisodeStore(tmp_path) as store:
        store.append(msgspec.structs.replace(first, status=Status.INFRA_ERROR, reward=None))
        store.append(second)
    ran: list[Episode] = []
    metrics = evaluate(evaluation(index, 2), tmp_path, ignore, ran.append)
    assert [episode.task.task_id for episode in ran] == [first.task.task_id]
    assert metrics["failures"]["infra_error"] == 0


def test_samples_of_a_task_are_episodes_of_their_own(index: str, tmp_path: Path) -> None:
    metrics = evaluate(evaluation(index, 3, "random", samples=2), tmp_path, ignore, ignore)
    assert (metrics["tasks"], metrics["episodes"]) == (3, 6)
    assert len({episode.episode_id for episode in read_episodes(tmp_path)}) == 6


def test_tasks_without_gold_are_refused_before_anything_runs(index: str, tmp_path: Path) -> None:
    task = msgspec.structs.replace(SOURCE.tasks("train")[0], gold=Gold({}))
    with pytest.raises(UsageError, match=task.task_id):
        evaluate(Evaluation("w", "train", [task], index, "oracle", CONFIG), tmp_path / "run", ignore, ignore)
    assert not (tmp_path / "run").exists()


def test_an_empty_split_is_refused(index: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no tasks"):
        evaluate(Evaluation("w", "dev", [], index, "oracle", CONFIG), tmp_path, ignore, ignore)
