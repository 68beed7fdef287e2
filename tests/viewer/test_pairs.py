from __future__ import annotations

from pathlib import Path

import pytest

from harness1.eval.compare import compare
from harness1.eval.run import read_run
from harness1.viewer.pages import Asked, write_view
from tests.support import END, Script, curate, search
from tests.viewer.making import script, some_tasks, write_dataset, write_run
from tests.viewer.test_write import Page, opened


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three runs of the same tasks and one of others."""
    folder = tmp_path_factory.mktemp("pairs")
    tasks = some_tasks(4)
    dataset = write_dataset(folder / "data", tasks)
    least = Script(search("Missolonghi town"), curate(add_ids=["D1"], importance={"D1": "high"}), END)
    write_run(folder / "a", [script(), Script(END)], tasks, dataset)
    write_run(folder / "b", [least], tasks, dataset)
    write_run(folder / "c", [Script(END), least], tasks, dataset)
    write_run(folder / "other", [least], tasks, write_dataset(folder / "others", tasks))
    return folder


def page_of(folder: Path, *names: str) -> Page:
    write_view(Asked([folder / name for name in names], workers=1), folder / "view.html")
    return opened(folder / "view.html")


def test_pairs_have_the_statistics_of_compare(folder: Path) -> None:
    page = page_of(folder, "a", "b", "c")
    assert [(pair["first"], pair["second"]) for pair in page["pairs"]] == [(0, 1), (0, 2), (1, 2)]
    wanted = compare([read_run(folder / name) for name in "abc"])
    for pair, other in zip(page["pairs"], wanted.others, strict=False):
        assert pair["tasks"] == other.tasks
        assert pair["metrics"].keys() == other.metrics.keys()
        for name, (first, second, mean, low, high, p) in pair["metrics"].items():
            row = other.metrics[name]
            between = row.difference
            assert (first, second) == pytest.approx((row.first, row.second))
            assert (mean, low, high) == pytest.approx((between.mean, between.low, between.high))
            assert p == row.p_holm


def test_runs_of_other_tasks_are_no_pair(folder: Path) -> None:
    assert page_of(folder, "a", "other")["pairs"] == []


def test_equal_sets_have_equal_checksums(folder: Path) -> None:
    rows = page_of(folder, "a", "b", "c")["rows"]
    found = {(row["run"], row["task"]): row["delivered"] for row in rows}
    assert found[0, "task-1"] == found[2, "task-0"]
    assert found[1, "task-1"] == found[2, "task-1"]
    assert found[0, "task-0"] != found[1, "task-0"]
