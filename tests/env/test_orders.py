"""The three orders show the same state; they differ in what stands where, and so in what a prefix cache keeps."""

from __future__ import annotations

import pytest

from harness1.config import Env, Rendering
from harness1.env.environment import SearchEnv, Step
from harness1.env.pieces import Piece
from harness1.env.render import window
from harness1.records import Task, ToolCall
from tests.support import call, curate, make_env, play, run, search, wide_corpus

ORDERS = ("paper", "stable_first", "epoch")
ACTIONS = (
    search("river castle"),
    curate(add_ids=["D1", "D4"], importance={"D1": "very_high"}),
    call("fan_out_search", queries=["Paris", "London", "Rome"]),
    call("read_document", doc_id="D2"),
    curate(add_ids=["D5"], remove_ids=["D4"], importance={"D5": "low"}),
    call("verify", doc_ids=["D1"], claim="The river has a castle."),
    call("grep_corpus", pattern="Byron"),
    search("engine program"),
    search("poet town"),
    curate(add_ids=["D9", "D8"]),
    search("war 1824"),
    search("rain"),
)


def in_order(order: str, **options: int) -> SearchEnv:
    return make_env(Env(rendering=Rendering(order=order, **options)), wide_corpus(40))  # type: ignore[arg-type]


def steps_in(order: str, **options: int) -> list[Step]:
    return play(in_order(order, **options), *ACTIONS)


def pieces_of(step: Step) -> tuple[Piece, ...]:
    assert step.context is not None
    return step.context.pieces


def sections(pieces: tuple[Piece, ...]) -> list[str]:
    """The kinds of pieces in order, each run of one kind once."""
    kinds = [each.key.split("#")[0].split("/")[0] for each in pieces]
    return [kind for at, kind in enumerate(kinds) if at == 0 or kinds[at - 1] != kind]


def observation_texts(step: Step, turn: int) -> list[str]:
    return [each.text for each in pieces_of(step) if each.key.split("#")[0] in (f"turn/{turn}", f"hit/{turn}")]


@pytest.mark.parametrize("order", ORDERS)
def test_the_curated_set_that_is_seen_is_the_one_that_is_held(order: str) -> None:
    env = in_order(order)

    async def check() -> None:
        context = await env.reset(Task("t", "q"))
        for action in ACTIONS:
            assert context is not None
            seen = [(entry.unit_id, entry.tag) for entry in context.view.curated]
            assert seen == [(entry.unit_id, entry.tag) for entry in env.state.memory.curated.in_order()]
            context = (await env.step([action])).context

    run(check())


def test_the_order_does_not_change_the_memory() -> None:
    by_order = [[step.turn.memory_hash for step in steps_in(order)] for order in ORDERS]
    assert by_order[0] == by_order[1] == by_order[2]


def test_paper_puts_the_memory_before_the_turns() -> None:
    names = sections(pieces_of(steps_in("paper")[-1]))
    assert names[:3] == ["static", "query", "curated"]
    assert names.index("history") < names.index("turn")
    assert names[-1] == "budget"


def test_stable_first_puts_the_memory_after_the_turns() -> None:
    names = sections(pieces_of(steps_in("stable_first")[-1]))
    assert names[:3] == ["static", "query", "action"]
    assert len(names) - 1 - names[::-1].index("turn") < names.index("curated")
    assert names[-1] == "budget"


def test_paper_shows_the_last_turns_and_stable_first_a_window_that_grows_and_falls() -> None:
    def shown(step: Step) -> int:
        return sum(each.key.startswith("turn/") for each in pieces_of(step))

    assert [shown(step) for step in steps_in("paper")] == [1, 2, 3, 4, 5, 5, 5, 5, 5, 5, 5, 5]
    assert [shown(step) for step in steps_in("stable_first")] == [1, 2, 3, 4, 5, 6, 7, 8, 9, 5, 6, 7]
    assert [window(turn, Rendering("stable_first", 2, 3)) for turn in range(1, 8)] == [
        1,
        2,
        3,
        2,
        3,
        2,
        3,
    ]
    assert window(9, Rendering("stable_first", 5, 5)) == 5


def test_stable_first_keeps_its_prefix_while_the_window_grows() -> None:
    steps = steps_in("stable_first")
    for turn in range(5, 9):
        before, after = pieces_of(steps[turn - 1]), pieces_of(steps[turn])
        stable = [each.key.startswith("curated") for each in before].index(True)
        assert before[:stable] == after[:stable]


def test_inside_an_epoch_each_prompt_extends_the_one_before() -> None:
    steps = steps_in("epoch")
    for turn in range(1, len(steps)):
        before, after = pieces_of(steps[turn - 1]), pieces_of(steps[turn])
        if (turn + 1) % 5:
            assert after[: len(before)] == before
            added = after[len(before) :]
            assert added[0].turn_ref == turn + 1
            assert [each.turn_ref for each in added[1:]] == [None] * (len(added) - 1)
        else:
            assert after[: len(before)] != before


def test_an_epoch_ends_after_its_turns_and_starts_with_the_full_last_observation() -> None:
    steps = steps_in("epoch", epoch_turns=3)
    for turn, step in enumerate(steps, start=1):
        actions = sum(each.turn_ref is not None for each in pieces_of(step))
        assert actions == turn % 3
        if turn % 3 == 0:
            assert sections(pieces_of(step))[:3] == ["static", "query", "curated"]
            expected = observation_texts(steps_in("paper")[turn - 1], turn)
            assert observation_texts(step, turn) == expected


def test_an_epoch_ends_early_when_the_observation_does_not_fit_and_shows_it_whole() -> None:
    config = Env(rendering=Rendering("epoch"), context_window=3300, generation_reserve=300)
    env = make_env(config, wide_corpus(40))
    steps = play(env, *(search(word) for word in ("river", "castle", "Paris", "London", "Rome")))
    starts = []
    for turn, step in enumerate(steps, start=1):
        assert step.context is not None
        assert step.observation is not None
        assert [hit.document.unit_id for hit in step.context.view.hits.get(turn, [])] == [
            unit
            for unit in (env.state.memory.pool.unit_of(hit) for hit in step.observation.hits)
            if unit not in step.observation.delta.aliases
        ]
        starts.append(not any(each.turn_ref is not None for each in step.context.pieces))
    assert any(starts[:4])


def test_an_epoch_repeats_the_curated_set_only_when_it_changed() -> None:
    steps = steps_in("epoch")
    counts = [sum(each.key.startswith("curated#") for each in pieces_of(step)) for step in steps[:4]]
    assert counts == [2, 3, 3, 3]  # auto-populated, curated, searched, read


@pytest.mark.parametrize("order", ORDERS)
def test_a_turn_of_the_policy_is_a_reference_to_its_own_output(order: str) -> None:
    steps = steps_in(order)
    for step in steps:
        for each in pieces_of(step):
            assert (each.turn_ref is not None) == each.key.startswith("action/") == (each.role == "assistant")


def test_an_unknown_tool_is_shown_in_every_order() -> None:
    for order in ORDERS:
        step = play(in_order(order), ToolCall("fetch"))[0]
        assert "there is no tool 'fetch'" in "".join(observation_texts(step, 1))
