"""No context is ever over its budget, whatever the state; what must go goes whole, in a fixed order."""

from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness1.config import BudgetMarker, Dedup, Env, Rendering
from harness1.env.pieces import ApproximateCounter, Block, Drop, Piece, Role, piece
from harness1.env.render import CachedCounter, fit, marker
from harness1.env.view import BudgetView
from harness1.records import StopReason, Task, ToolCall
from tests.support import WordRetriever, call, curate, make_env, play, recount, run, search, text_of, wide_corpus

ORDERS = ("paper", "stable_first", "epoch")
WINDOWS = (2050, 2900, 3400, 4200, 6000)
RESERVE = 300


class CharacterCounter(ApproximateCounter):
    """One token for each character: as fine as a tokenizer can be."""

    hash = "characters"

    def piece(self, piece: Piece) -> int:
        return len(piece.text)


def random_action(rng: random.Random) -> ToolCall:
    handles = [f"D{rng.randint(1, 40)}" for _ in range(rng.randint(1, 8))]
    words = " ".join(
        rng.choices(
            ["river", "castle", "king", "Paris", "London", "Rome", "Byron", "engine", "war", "1824", "rain"], k=3
        )
    )
    tags = {handle: rng.choice(["very_high", "high", "fair", "low"]) for handle in handles}
    return rng.choice(
        [
            search(words),
            call("fan_out_search", queries=words.split()),
            call("grep_corpus", pattern=words.split()[0]),
            call("read_document", doc_id=handles[0]),
            call("review_docs", doc_ids=handles),
            curate(add_ids=handles, importance=tags),
            curate(add_ids=handles[1:], remove_ids=handles[:1]),
            call("verify", doc_ids=handles, claim=f"The {words} fell."),
            call("unknown", text="x" * 20_000),
        ]
    )


@pytest.mark.parametrize("wanted", [1_500, pytest.param(10_000, marks=pytest.mark.slow)])
def test_random_states_are_never_over_budget(wanted: int) -> None:
    """States are those of random episodes, in all orders and in windows that are too small for them."""
    rng = random.Random(7)
    retriever = WordRetriever(wide_corpus(30))
    states = limits = dropped = 0
    episode = 0
    runner = asyncio.Runner()
    while states < wanted:
        episode += 1
        order, context_window = ORDERS[episode % 3], WINDOWS[episode % 5]
        config = Env(
            context_window=context_window,
            generation_reserve=RESERVE,
            max_turns=60,
            dedup=Dedup(on=episode % 2 == 0),
            rendering=Rendering(order=order),  # type: ignore[arg-type]
            budget_marker=BudgetMarker(on=episode % 7 != 0),
        )
        env = make_env(config, retriever=retriever)
        context = runner.run(env.reset(Task("t", "Which river castle?")))
        actions = [random_action(rng) for _ in range(60)]

        for action in actions:
            states += 1
            if context is None:
                limits += 1
                break
            used = recount(env, context)
            assert used <= context.budget.used <= context.budget.limit == context_window - RESERVE
            dropped += context.budget.dropped > 0
            context = runner.run(env.step([action], "because")).context
    runner.close()
    assert dropped > wanted // 20
    assert limits > 0


def test_the_smallest_context_that_does_not_fit_ends_the_episode() -> None:
    env = make_env(Env(context_window=2050, generation_reserve=RESERVE))
    steps = play(env, ToolCall("unknown", {"text": "x" * 20_000}))
    assert (steps[0].done, steps[0].context) == (StopReason.CONTEXT_LIMIT, None)
    narrow = make_env(Env(context_window=2400, generation_reserve=RESERVE))
    assert run(narrow.reset(Task("t", "long question " * 1000))) is None


@pytest.mark.parametrize("counter", [ApproximateCounter(), CharacterCounter()])
def test_the_budget_line_has_room_whatever_the_tokenizer(counter: ApproximateCounter) -> None:
    env = make_env(Env(context_window=100_000), counter=counter)
    for step in play(env, search("Ada Byron"), search("town")):
        assert step.context is not None
        assert recount(env, step.context) <= step.context.budget.used <= step.context.budget.limit


_ROLE = st.sampled_from(["user", "tool", "assistant"])
_BLOCK = st.tuples(st.lists(st.tuples(_ROLE, st.integers(1, 60)), min_size=1, max_size=3), st.sampled_from(Drop))


@given(st.lists(_BLOCK, max_size=12), st.integers(10, 200))
def test_fitting_drops_whole_blocks_in_order(drawn: list[tuple[list[tuple[Role, int]], Drop]], limit: int) -> None:
    blocks = [
        Block(tuple(piece(f"p{at}/{n}", role, "x" * size) for n, (role, size) in enumerate(parts)), drop, at)
        for at, (parts, drop) in enumerate(drawn)
    ]
    measure = CachedCounter(ApproximateCounter())
    everything = [each for block in blocks for each in block.pieces]
    fitted = fit(blocks, limit, measure)
    if fitted is None:
        must = [each for block in blocks if block.drop is Drop.NEVER for each in block.pieces]
        assert measure.total(must) > limit
        return
    kept, used, dropped = fitted
    assert used == measure.total(kept) <= limit
    assert dropped == len(everything) - len(kept)
    assert kept == [each for each in everything if each in kept]
    gone = [block for block in blocks if block.pieces[0] not in kept]
    left = [block for block in blocks if block.pieces[0] in kept]
    assert all(block.drop is not Drop.NEVER for block in gone)
    assert max([(b.drop, b.turn) for b in gone], default=(-1, 0)) < min(
        [(b.drop, b.turn) for b in left], default=(9, 0)
    )
    assert all(set(block.pieces) <= set(kept) for block in left)


@given(st.lists(st.tuples(_ROLE, st.integers(1, 60)), max_size=12))
def test_a_total_counts_each_message_once(parts: list[tuple[Role, int]]) -> None:
    pieces = [piece(f"p{at}", role, "x" * size) for at, (role, size) in enumerate(parts)]
    messages = sum(1 for at, each in enumerate(pieces) if at == 0 or pieces[at - 1].role != each.role)
    counter = ApproximateCounter()
    assert CachedCounter(counter).total(pieces) == 4 * messages + sum(counter.piece(each) for each in pieces)


def test_a_piece_is_counted_once() -> None:
    class Counting(ApproximateCounter):
        calls = 0

        def piece(self, piece: Piece) -> int:
            self.calls += 1
            return super().piece(piece)

    counter = Counting()
    measure = CachedCounter(counter)
    shared = piece("p", "user", "text")
    assert measure.total([shared, shared]) == measure.total([shared, shared])
    assert counter.calls == 1


@pytest.mark.parametrize(
    ("share", "level"), [(0.5, ""), (0.6, "over halfway"), (0.75, "finish soon"), (0.9, "critical: end_search now")]
)
def test_the_budget_line_warns_by_level(share: float, level: str) -> None:
    env = Env(context_window=12_048)
    line = marker(env, int(share * 10_000), 3)
    assert line.shows == BudgetView(int(share * 10_000), 10_000, 3, 40, level)
    assert f"{share:.0%}" in line.text
    assert level in line.text


def test_the_budget_line_closes_every_context() -> None:
    for order in ORDERS:
        env = make_env(Env(rendering=Rendering(order=order)))  # type: ignore[arg-type]
        for turn, step in enumerate(play(env, search("Ada"), search("Byron"), search("town")), start=1):
            assert step.context is not None
            assert text_of(step.context).rstrip().splitlines()[-1].startswith("Budget: ")
            assert step.context.view.budget.turn == turn
            assert step.context.view.budget.used == step.context.budget.used
