"""end_search: ends when it is alone and well formed; the set is delivered as it stands."""

from __future__ import annotations

from harness1.records import StopReason, Task, ToolCall
from tests.support import END, make_env, play, run, search


def test_it_ends_and_changes_nothing_but_the_turn() -> None:
    env = make_env()
    play(env, search("Ada"))
    before = list(env.state.memory.curated.ranked())
    step = run(env.step([END]))
    assert (step.done, step.context) == (StopReason.END_SEARCH, None)
    assert env.state.memory.curated.ranked() == before


def test_a_reason_is_not_required() -> None:
    assert play(make_env(), ToolCall("end_search"))[0].done is StopReason.END_SEARCH


def test_beside_another_action_it_waits() -> None:
    env = make_env()
    run(env.reset(Task("t", "q")))
    step = run(env.step([search("Ada"), END]))
    assert step.done is None
    assert step.turn.ignored == (END,)
