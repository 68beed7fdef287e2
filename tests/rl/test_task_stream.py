"""Which task comes when: decided by counting alone."""

from __future__ import annotations

from harness1.records import DocId, Gold, Task
from harness1.rl.groups import PlacedTask, TaskStream
from harness1.rl.open import in_turn

TASKS = [PlacedTask(Task(f"t{n}", f"q{n}", "train", Gold({DocId("d"): 1})), n % 2) for n in range(5)]


def test_every_pass_has_all_tasks_in_an_order_of_its_own() -> None:
    stream = TaskStream(TASKS, samples=4, seed=3)
    passes = [[stream.task(index).task.task_id for index in range(start, start + 5)] for start in (0, 5, 10, 15)]
    assert all(sorted(each) == [f"t{n}" for n in range(5)] for each in passes)
    assert len(set(map(tuple, passes))) > 1


def test_a_place_has_the_same_jobs_whenever_it_is_asked_for() -> None:
    late, early = TaskStream(TASKS, samples=4, seed=3), TaskStream(TASKS, samples=4, seed=3)
    assert late.jobs(13) == [early.jobs(index) for index in range(14)][13]
    assert late.jobs(13) != TaskStream(TASKS, samples=4, seed=4).jobs(13)


def test_no_two_episodes_of_a_training_share_number_or_seed() -> None:
    stream = TaskStream(TASKS, samples=4, seed=0)
    jobs = [job for index in range(50) for job in stream.jobs(index)]
    assert [job.sample_idx for job in jobs] == list(range(200))
    assert len({job.seed for job in jobs}) == 200
    assert {job.group_id for job in jobs} == {str(index) for index in range(50)}
    assert all(job.setup == int(job.task.task_id[1:]) % 2 for job in jobs)


def test_held_out_tasks_are_taken_of_each_dataset_in_turn() -> None:
    chosen = in_turn([TASKS[:3], TASKS[3:]], 4)
    assert [placed.task.task_id for placed in chosen] == ["t0", "t3", "t1", "t4"]
    assert in_turn([], 4) == []
