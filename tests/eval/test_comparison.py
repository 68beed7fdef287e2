"""Runs beside each other, with numbers computed by hand."""

from pathlib import Path
from typing import Any

import pytest

from harness1.config import load_config
from harness1.errors import UsageError
from harness1.eval.compare import Grid, Pairing, at_equal_size, blocks, compare, markdown
from harness1.eval.run import Run, read_run
from harness1.records import StopReason
from tests.eval.run_folders import dataset, episode, run_folder

QUERIES = {f"t{number}": f"Question {number}?" for number in range(1, 5)}
FIRST = (
    episode("t1", "ab", turns=2),  # recall 1
    episode("t2", "a"),  # 1/2
    episode("t3", "ab", stop=StopReason.FORMAT_LIMIT),  # delivers nothing
    episode("t4", "ax"),  # 1/2
)
SECOND = (episode("t1", "a", pool="ab", turns=4), episode("t2", "ab"), episode("t3", "ab"), episode("t4", "ax"))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return dataset(tmp_path / "data", QUERIES)


@pytest.fixture
def runs(tmp_path: Path, data: Path) -> list[Run]:
    folders = [run_folder(tmp_path / "one", data, FIRST), run_folder(tmp_path / "two", data, SECOND, policy="other")]
    return [read_run(folder) for folder in folders]


def pair(*runs: Run, **options: Any) -> Pairing:
    return compare(runs, **options).others[0]


def test_differences_are_the_second_minus_the_first_task_by_task(runs: list[Run]) -> None:
    found = pair(*runs)
    recall = found.metrics["curated_recall"]
    assert (recall.first, recall.second, recall.tasks) == (0.5, 0.75, 4)
    assert recall.difference.mean == pytest.approx(0.25)
    assert recall.difference.low < 0.25 < recall.difference.high
    # Of -1/2, 1/2 and 1, six of the eight signs give a sum at least as far from 0 as 1.
    assert recall.p == pytest.approx(0.75)
    assert recall.p_holm is None
    assert found.metrics["turns"].difference.mean == pytest.approx(0.5)
    assert (found.wins, found.losses, found.ties) == (2, 1, 1)
    assert (found.tasks, found.left_out) == (4, (0, 0))
    # Tasks are ordered by their change, then by what was seen.
    assert [(each.task_id, each.change) for each in found.changed] == [("t3", 1.0), ("t2", 0.5), ("t1", -0.5)]
    assert (found.changed[2].first, found.changed[2].second) == (1.0, 0.5)
    assert found.changed[0].query == "Question 3?"
    assert len(pair(*runs, top=1).changed) == 1


def test_any_metric_may_decide(runs: list[Run]) -> None:
    found = pair(*runs, metric="turns")
    assert (found.wins, found.losses, found.ties) == (1, 0, 3)
    assert found.changed[0].task_id == "t1"
    with pytest.raises(UsageError, match=r"no metric 'beauty'.*curated_recall"):
        compare(runs, "beauty")
    with pytest.raises(UsageError, match="two runs"):
        compare(runs[:1])


def test_at_equal_size_neither_delivers_more_than_the_other(runs: list[Run]) -> None:
    found = pair(*runs, equal_size=True)
    # Of 2, 1, 0 and 2 documents and 1, 2, 2 and 2: cut to 1, 1, 0 and 2, both find 1/2, 1/2, 0 and 1/2.
    for metric, mean in {"curated_recall": 0.375, "set_size": 1.0}.items():
        compared = found.metrics[metric]
        assert (compared.first, compared.second) == pytest.approx((mean, mean))
    assert found.metrics["trajectory_recall"].second == pytest.approx(0.875)
    assert "the sets of both are cut to the smaller one" in markdown(list(blocks(compare(runs, equal_size=True))))


def test_at_equal_size_every_sample_of_a_task_delivers_as_much(tmp_path: Path, data: Path) -> None:
    fault = episode("t1", "", sample=2, stop=StopReason.FAULT)
    sampled = [episode("t1", "abx"), episode("t1", "xa", sample=1), fault]
    one = read_run(run_folder(tmp_path / "one", data, sampled, tasks=["t1"], samples=3))
    two = read_run(run_folder(tmp_path / "two", data, [episode("t1", "xyab")], tasks=["t1", "t2"]))
    for first, second in ((one, two), (two, one)):
        cut = at_equal_size(first, second)
        assert [run.per_task["t1"]["set_size"] for run in cut] == [2.0, 2.0]
    assert pair(one, two, equal_size=True).metrics["curated_recall"].difference.mean == -0.75


def test_a_task_is_said_to_have_changed_by_the_chosen_metric_alone(tmp_path: Path, data: Path) -> None:
    folders = [
        run_folder(tmp_path / name, data, [episode(task, "a", pool=pool) for task in QUERIES])
        for name, pool in (("one", "a"), ("two", "ab"))
    ]
    runs = [read_run(folder) for folder in folders]
    assert pair(*runs).changed == ()
    assert "Tasks that changed most in curated_recall:\n\nNone changed.\n" in markdown(list(blocks(compare(runs))))
    assert len(pair(*runs, metric="trajectory_recall").changed) == 4
    moved = compare(runs, "trajectory_recall", top=0)
    assert "None changed" not in markdown(list(blocks(moved)))


def test_only_common_tasks_are_compared_and_the_rest_is_counted(tmp_path: Path, data: Path) -> None:
    one = run_folder(tmp_path / "one", data, FIRST[1:3], tasks=["t2", "t3"])
    fault = episode("t2", "ab", stop=StopReason.FAULT)
    two = run_folder(tmp_path / "two", data, [fault, *SECOND[2:]], tasks=["t2", "t3", "t4"])
    found = pair(read_run(one), read_run(two))
    assert (found.tasks, found.left_out) == (1, (1, 2))
    assert found.metrics["curated_recall"].difference.mean == 1.0


def test_what_differs_in_cards_and_configurations_is_told(tmp_path: Path, data: Path) -> None:
    config = load_config(overrides=["env.max_turns=7", "env.dedup.on=false"])
    one = run_folder(tmp_path / "one", data, FIRST)
    two = run_folder(tmp_path / "two", data, SECOND, config=config, policy="other", seed=3)
    found = pair(read_run(one), read_run(two))
    assert found.cards == {"policy": ("by-hand", "other"), "seed": (0, 3)}
    assert found.settings == {"env.dedup.on": (True, False), "env.max_turns": (40, 7)}
    same = pair(read_run(one), read_run(one))
    assert (same.cards, same.settings, same.changed) == ({}, {}, ())


def test_holm_takes_the_runs_of_one_metric_as_its_family(tmp_path: Path) -> None:
    queries = {f"q{number:02}": "?" for number in range(10)}
    many = dataset(tmp_path / "many", queries)
    nothing, everything, half = (
        read_run(run_folder(tmp_path / name, many, [episode(task, found) for task in queries]))
        for name, found in (("nothing", "x"), ("everything", "ab"), ("half", "a"))
    )
    comparison = compare([nothing, everything, half])
    # Ten differences of one sign are extreme in two of 1,024 cases: seldom among the 200 that are drawn.
    found = [each.metrics["curated_recall"] for each in comparison.others]
    assert found[0].p == found[1].p < 0.03
    assert [each.p_holm for each in found] == pytest.approx([2 * found[0].p] * 2)


def test_runs_of_other_tasks_are_refused(tmp_path: Path, data: Path, runs: list[Run]) -> None:
    other = dataset(tmp_path / "other", QUERIES)
    changed = dataset(tmp_path / "moved" / "data", {**QUERIES, "t2": "Another question?"})
    dataset(data, QUERIES, split="dev")
    broken = [episode("t1", "ab", stop=StopReason.FAULT)]
    for number, (place, played, options, says) in enumerate(
        (
            (other, FIRST, {}, r"data/test.*other/test"),
            (data, FIRST, {"split": "dev"}, r"data/test.*data/dev"),
            (changed, FIRST, {}, "'t2'"),
            (data, broken, {"tasks": ["t1"]}, "no scored task"),
        )
    ):
        with pytest.raises(UsageError, match=says):
            compare([runs[0], read_run(run_folder(tmp_path / str(number), place, played, **options))])


def test_a_dataset_that_was_moved_is_asked_for_and_found(tmp_path: Path, data: Path) -> None:
    folder = run_folder(tmp_path / "one", data, FIRST)
    place = data.rename(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match="--dataset"):
        read_run(folder)
    assert len(read_run(folder, str(place)).tasks) == 4
    with pytest.raises(UsageError, match="no task 't1'"):
        read_run(folder, str(dataset(tmp_path / "wrong", {"u": "?"})))


def test_markdown_holds_what_queries_say_as_text(tmp_path: Path) -> None:
    data = dataset(tmp_path / "data", {"t1": "a | b <b>bold</b>\n[x](y) \x1b[31mred"})
    runs = [
        read_run(run_folder(tmp_path / name, data, [episode("t1", found)])) for name, found in (("a", "a"), ("b", "x"))
    ]
    text = markdown(list(blocks(compare(runs))))
    assert "a &#124; b &#60;b&#62;bold&#60;/b&#62; &#91;x&#93;(y) &#91;31mred" in text
    assert "| curated_recall | 0.500 | 0.000 | -0.500 |" in text


def test_grids_name_each_run_in_its_place(runs: list[Run]) -> None:
    comparison = compare([*runs, runs[0]])
    assert comparison.others[1].changed == ()
    grids = [block for block in blocks(comparison) if isinstance(block, Grid)]
    assert [row[0] for row in grids[0].rows] == ["run 1", "run 2", "run 3"]
    assert grids[1].columns[-1] == "p (Holm)"
