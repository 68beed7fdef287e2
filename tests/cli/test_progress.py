"""What is said of work under way, by hand: means so far with intervals, failures, and trends."""

from __future__ import annotations

import random
import statistics

import msgspec
import pytest

from harness1.cli.dashboard import EpisodeProgress, RunningMean, StepProgress
from harness1.cli.progress import Pacing
from harness1.records import (
    STATUS_OF,
    Curated,
    DocId,
    Episode,
    Gold,
    Hashes,
    ModelCall,
    Note,
    Observation,
    Status,
    StopReason,
    Task,
    ToolCall,
    Turn,
    UnitId,
)

GOLD = Gold({DocId("a"): 1, DocId("b"): 1})


def episode(
    task: str = "t", found: str = "ab", stop: StopReason = StopReason.END_SEARCH, turns: tuple[Turn, ...] = ()
) -> Episode:
    return Episode(
        episode_id=task,
        task=Task(task, "q"),
        turns=turns,
        stop_reason=stop,
        status=STATUS_OF[stop],
        curated=tuple(Curated(UnitId(name), "fair", rank) for rank, name in enumerate(found, start=1)),
        hashes=Hashes("env", "policy", "index"),
    )


def turn(index: int, *, error: bool = False, action: bool = True, prompt: int = 0, output: int = 0) -> Turn:
    seen = Observation("search_corpus", error=Note("empty_query") if error else None)
    return Turn(
        index=index,
        calls=(ModelCall("c", output_ids=(1,) * output),) if output else (),
        action=ToolCall("search_corpus") if action else None,
        observation=seen if action else None,
        parse_error=None if action else "there is no call",
        prompt_tokens=prompt,
    )


def test_a_running_mean_is_the_one_of_tasks_with_its_normal_interval() -> None:
    mean = RunningMean()
    assert mean.interval() is None
    mean.add("a", 0.5)
    assert mean.interval() == (0.5, 0.5, 0.5)
    for task, value in (("b", 1.0), ("a", 0.1), ("c", 0.0)):
        mean.add(task, value)
    means = [0.3, 1.0, 0.0]
    half = 1.959964 * statistics.stdev(means) / 3**0.5
    middle = statistics.fmean(means)
    assert mean.tasks == 3
    assert mean.interval() == pytest.approx((middle, middle - half, middle + half))


def test_a_running_mean_stays_exact_over_many_samples() -> None:
    mean, drawn, values = RunningMean(), random.Random(0), dict[str, list[float]]()
    for _ in range(5000):
        task, value = f"t{drawn.randrange(400)}", drawn.random()
        values.setdefault(task, []).append(value)
        mean.add(task, value)
    means = [statistics.fmean(each) for each in values.values()]
    found = mean.interval()
    assert found[0] == pytest.approx(statistics.fmean(means))
    assert found[2] - found[0] == pytest.approx(1.959964 * statistics.stdev(means) / len(means) ** 0.5)


def test_episodes_are_counted_with_what_failed_in_them() -> None:
    progress = EpisodeProgress()
    assert (progress.recall.interval(), progress.failures, progress.stops) == (None, {}, {})
    good = (turn(1, prompt=100, output=5), turn(2, error=True, prompt=300, output=7))
    progress.add(episode("a", "ab", turns=good), GOLD)
    progress.add(episode("b", "a", StopReason.TURN_LIMIT, (turn(1),)), GOLD)
    progress.add(episode("c", "ab", StopReason.FORMAT_LIMIT, (turn(1, action=False),)), GOLD)
    progress.add(episode("d", "ab", StopReason.FAULT), GOLD)
    recall = progress.recall.interval()
    assert (progress.recall.tasks, recall and recall[0]) == (3, 0.5)  # 1, 0.5, and 0 for the policy's error
    assert progress.failures == {"policy_error": 1, "infra_error": 1, "format errors": 1, "tool errors": 1}
    assert progress.stops == {"end_search": 1, "turn_limit": 1, "format_limit": 1, "fault": 1}
    assert progress.means() == (1.0, 400 / 3, 4.0)


def test_an_episode_without_gold_is_counted_and_not_scored() -> None:
    progress = EpisodeProgress()
    progress.add(episode(), None)
    assert (progress.stops, progress.recall.interval(), progress.recall.tasks) == ({"end_search": 1}, None, 0)


def test_what_the_infrastructure_broke_is_no_recall() -> None:
    progress = EpisodeProgress()
    broken = msgspec.structs.replace(episode("a", ""), status=Status.INFRA_ERROR, stop_reason=StopReason.FAULT)
    progress.add(broken, GOLD)
    assert progress.recall.interval() is None
    progress.add(episode("a"), GOLD)
    assert progress.recall.interval() == (1.0, 1.0, 1.0)


def test_steps_have_trends_and_speed() -> None:
    progress = StepProgress()
    progress.add(2, {})
    assert progress.values == {}
    for step in range(3, 13):
        progress.add(step, {"reward": 0.1 * step, "tokens": 500.0, "seconds": 0.5})
    assert progress.tokens_per_second() == pytest.approx(1000.0)
    assert progress.trend("reward") == pytest.approx(0.5)
    assert progress.values == {"reward": pytest.approx(1.2), "tokens": 500.0, "seconds": 0.5}


def test_a_trend_needs_twice_as_many_steps_as_it_compares() -> None:
    progress = StepProgress()
    for step in range(1, 10):
        progress.add(step, {"loss": 1.0})
    assert progress.trend("loss") is None
    assert progress.tokens_per_second() is None


def test_a_validation_is_kept_apart() -> None:
    progress = StepProgress()
    progress.add(0, {})
    progress.add(0, {"held_out/nll": 3.5})
    assert progress.validation == {"nll": 3.5}
    progress.add(1, {"loss": 2.0})
    progress.add(1, {"held_out/nll": 1.5})
    progress.add(2, {"loss": 1.0})
    assert (progress.validation, progress.validation_step, progress.values) == ({"nll": 1.5}, 1, {"loss": 1.0})


def test_lines_come_each_ten_seconds_or_tenth_of_the_work_and_not_twice_a_second() -> None:
    pacing = Pacing(0.0)
    times = [(0.5, 0.5), (1.0, 0.05), (2.0, 0.1), (2.5, 0.9), (3.0, 0.15), (11.9, 0.19), (12.0, 0.19), (13.0, 0.3)]
    assert [pacing.due(now, share) for now, share in times] == [False, False, True, False, False, False, True, True]
