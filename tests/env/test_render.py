"""A context shows the live state, in bounded space, and remembers nothing that could change a result."""

from __future__ import annotations

import asyncio
import random
import re
from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness1.config import Env, History, Rendering, load_config
from harness1.env.environment import SearchEnv, Step
from harness1.env.pieces import ApproximateCounter, Block, Drop, Piece, Role, piece
from harness1.env.render import CachedCounter, fit, marker, visible_units, window
from harness1.env.view import BudgetView
from harness1.records import StopReason, Task, ToolCall
from tests.support import WordRetriever, call, chunk, curate, make_env, play, recount, run, search, text_of, wide_corpus

PLAIN = Env().switch(rank=False)


def test_an_empty_memory_is_shown_as_such_and_hashes_name_the_content() -> None:
    context = run(make_env().reset(Task("t", "Where  did\nByron die?")))
    assert "Question: Where did Byron die?\n" in text_of(context)
    assert "Curated 0/30. Nothing yet.\n" in text_of(context)
    assert (context.view.query, context.tools) == ("Where did Byron die?", make_env().toolbox.specs)
    one, same, other = (play(make_env(), search(word))[0].context.hash for word in ("Ada", "Ada", "Byron"))
    assert one == same != other


def test_documents_in_recent_hits_need_no_line_of_their_own() -> None:
    env = make_env(PLAIN)
    steps = play(env, search("Ada Lovelace"), *[curate(add_ids=["D1"])] * 5)
    assert "\nD1 (fair)" not in text_of(steps[0].context)
    assert "\nD1 (fair) Ada Lovelace: Ada Lovelace wrote" in text_of(steps[-1].context)
    assert visible_units(env.state.turns[:1]) == {"ada", "babbage"}
    assert visible_units(env.state.turns[-5:]) == set()


def test_pool_lines_come_newest_first_with_a_snippet_then_handles_alone() -> None:
    chunks = [chunk(f"d{number}", f"common word {number} " + "x" * 300, f"Title {number}") for number in range(9)]
    off = (f"{each}=false" for each in ("evidence.rank", "dedup.on", "auto_populate.on"))
    lines = ("pool.lines=2", "pool.older=3", "pool.snippet=20", "rendering.recent=1", *off)
    config = load_config(None, [f"env.{each}" for each in lines]).env
    text = text_of(play(make_env(config, chunks), search("common"), curate(remove_ids=["D1"]))[-1].context)
    assert "\nD9 Title 8: common word 8 xxxxxx\nD8 Title 7:" in text
    assert "\nOlder: D7, D6, D5 (+4 more)\n" in text
    assert "Pool: 9 documents, 9 not curated." in text


def test_hits_say_which_queries_found_them_and_which_part_and_copies_they_are() -> None:
    text = text_of(play(make_env(), call("fan_out_search", queries=["Byron", "Ada"]))[0].context)
    assert "q1: Byron\nq2: Ada\n" in text
    assert "[D1] Ada Lovelace q1#1 q2#1\n" in text
    chunks = [chunk("a", "first part", "A"), chunk("a", "second part", "A", 1)]
    first, second = play(make_env(chunks=chunks), search("second"), search("first"))
    assert "[D1.2] A\n second part\n" in text_of(first.context)
    assert "[D1.1] A\n first part\n" in text_of(second.context)
    town = "Missolonghi is a town in western Greece, on the north shore of the gulf."
    chunks = [chunk(name, town, "Missolonghi") for name in "abc"]
    text = text_of(play(make_env(chunks=chunks), search("town"))[0].context)
    for words in ("[D1] Missolonghi also: 2 copies\n", "Hidden copies of: D1.", "2 near duplicates hidden"):
        assert words in text
    assert "D2" not in text.partition("Question")[2]


def test_history_shows_its_last_lines_and_counts_the_others() -> None:
    env = make_env(Env(history=History(lines=2)))
    context = play(env, search("Ada"), search("Byron"), search("town"))[-1].context
    assert re.search("History, 1 earlier turns left out:\nT2 search_corpus .Byron.: returned .*\nT3 ", text_of(context))


def test_what_is_dropped_is_not_in_the_view_and_the_curated_list_survives() -> None:
    env = make_env(Env(context_window=3000, generation_reserve=300), wide_corpus(40))
    tags = {"D1": "very_high", "D2": "low"}
    edit = curate(add_ids=list(tags), importance=tags)
    context = play(env, search("river"), edit, *map(search, ("war", "king", "Rome")))[-1].context
    assert context.budget.dropped > 0
    assert (context.view.curated[0].handle, context.view.curated[0].tag) == ("D1", "very_high")
    assert len(context.view.curated) == len(env.state.memory.curated)
    assert len(context.view.documents) < len(env.state.memory.pool.entries)
    assert all(document.text in text_of(context) for document in context.view.documents.values())


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
    return make_env(Env(rendering=Rendering(order=order, **options)), wide_corpus(40))


def steps_in(order: str, **options: int) -> list[Step]:
    return play(in_order(order, **options), *ACTIONS)


def sections(pieces: tuple[Piece, ...]) -> list[str]:
    """The kinds of pieces in order, each run of one kind once."""
    return [kind for kind, _ in groupby(each.key.split("#")[0].split("/")[0] for each in pieces)]


def observation_texts(step: Step, turn: int) -> list[str]:
    return [each.text for each in step.context.pieces if each.key.split("#")[0] in (f"turn/{turn}", f"hit/{turn}")]


@pytest.mark.parametrize("order", ORDERS)
def test_the_curated_set_that_is_seen_is_held_and_a_turn_refers_to_its_own_output(order: str) -> None:
    env = in_order(order)
    context = run(env.reset(Task("t", "q")))
    for action in ACTIONS:
        seen = [(entry.unit_id, entry.tag) for entry in context.view.curated]
        assert seen == [(entry.unit_id, entry.tag) for entry in env.state.memory.curated.in_order()]
        for each in context.pieces:
            assert (each.turn_ref is not None) == each.key.startswith("action/") == (each.role == "assistant")
        context = run(env.step([action])).context


def test_the_order_does_not_change_the_memory() -> None:
    by_order = [[step.turn.memory_hash for step in steps_in(order)] for order in ORDERS]
    assert by_order[0] == by_order[1] == by_order[2]


def test_paper_puts_the_memory_before_the_turns_and_stable_first_after_them() -> None:
    paper, stable = (sections(steps_in(order)[-1].context.pieces) for order in ("paper", "stable_first"))
    assert paper[:3] == ["static", "query", "curated"]
    assert paper.index("history") < paper.index("turn")
    assert stable[:3] == ["static", "query", "action"]
    assert len(stable) - 1 - stable[::-1].index("turn") < stable.index("curated")
    assert paper[-1] == stable[-1] == "budget"


def test_paper_shows_the_last_turns_and_stable_first_a_window_that_grows_and_falls() -> None:
    def shown(step: Step) -> int:
        return sum(each.key.startswith("turn/") for each in step.context.pieces)

    assert [shown(step) for step in steps_in("paper")] == [1, 2, 3, 4, 5, 5, 5, 5, 5, 5, 5, 5]
    assert [shown(step) for step in steps_in("stable_first")] == [1, 2, 3, 4, 5, 6, 7, 8, 9, 5, 6, 7]
    assert [window(turn, Rendering("stable_first", (2, 3))) for turn in range(1, 8)] == [1, 2, *[3, 2] * 2, 3]
    assert window(9, Rendering("stable_first", (5, 5))) == 5


def test_stable_first_keeps_its_prefix_while_the_window_grows() -> None:
    steps = steps_in("stable_first")
    for turn in range(5, 9):
        before, after = steps[turn - 1].context.pieces, steps[turn].context.pieces
        stable = [each.key.startswith("curated") for each in before].index(True)
        assert before[:stable] == after[:stable]


def test_inside_an_epoch_each_prompt_extends_the_one_before() -> None:
    steps = steps_in("epoch")
    for turn in range(1, len(steps)):
        before, after = steps[turn - 1].context.pieces, steps[turn].context.pieces
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
        actions = sum(each.turn_ref is not None for each in step.context.pieces)
        assert actions == turn % 3
        if turn % 3 == 0:
            assert sections(step.context.pieces)[:3] == ["static", "query", "curated"]
            expected = observation_texts(steps_in("paper")[turn - 1], turn)
            assert observation_texts(step, turn) == expected


def test_an_epoch_ends_early_when_the_observation_does_not_fit_and_shows_it_whole() -> None:
    config = Env(rendering=Rendering("epoch"), context_window=3300, generation_reserve=300)
    env = make_env(config, wide_corpus(40))
    starts = []
    for turn, step in enumerate(play(env, *map(search, ("river", "castle", "Paris", "London", "Rome"))), start=1):
        units = [env.state.memory.pool.unit_of(hit) for hit in step.observation.hits]
        shown = [hit.document.unit_id for hit in step.context.view.hits.get(turn, [])]
        assert shown == [unit for unit in units if unit not in step.observation.delta.aliases]
        starts.append(not any(each.turn_ref is not None for each in step.context.pieces))
    assert any(starts[:4])


def test_an_epoch_repeats_the_set_and_the_order_only_when_they_changed() -> None:
    counts = [kinds(step).count("curated") for step in steps_in("epoch")[:4]]
    assert counts == [2, 3, 3, 3]  # auto-populated, curated, searched, read
    env = make_env(Env(rendering=Rendering(order="epoch", epoch_turns=3)), wide_corpus(40))
    searches = map(search, ("river castle", "engine program", "poet town"))
    steps = play(env, *searches, curate(add_ids=["D1"]), curate(add_ids=["D2"]))
    assert [kinds(step).count("ranked") for step in steps[2:]] == [1, 1, 1]


EPOCH = Rendering(order="epoch", epoch_turns=5)
SEARCHES = (search("Ada Lovelace"), search("Lord Byron"), search("nothing of the kind"))


def kinds(step: Step) -> list[str]:
    return [each.key.split("#")[0] for each in step.context.pieces]


def test_the_order_and_the_leads_are_those_of_the_memory_at_each_turn_if_there_are_any() -> None:
    env = make_env(Env(rendering=EPOCH))
    for count in range(1, len(SEARCHES) + 1):
        step = play(env, *SEARCHES[:count])[-1]
        handles, found = step.context.view.ranked, env.state.memory.assess()
        assert [env.state.memory.pool.resolve(handle) for handle in handles] == list(found.units)
        assert [lead.name for lead in step.context.view.leads] == [lead.name for lead in found.leads]
    for off in ("rank", "evidence"):
        env = make_env(Env(rendering=EPOCH).switch(**{off: False}))
        steps = play(env, *SEARCHES)
        assert all("ranked" not in kinds(step) and "leads" not in kinds(step) for step in steps)
        assert bool(env.state.memory.evidence.entities) == (off == "rank")


def test_a_closed_lead_is_taken_back() -> None:
    chunks = [chunk("a", "Rain fell for days.", "Rain"), chunk("b", "A poem.", "The lady of the lake")]
    env = make_env(Env(rendering=EPOCH), chunks)
    steps = play(env, search("rain"), search("the lady of the lake"), query="Who wrote “the lady of the lake”?")
    views = [step.context.view for step in steps if step.context is not None]
    assert [len(view.leads) for view in views] == [1, 0]


WINDOWS = (2050, 2900, 3400, 4200, 6000)
RESERVE = 300


def random_action(rng: random.Random) -> ToolCall:
    handles = [f"D{rng.randint(1, 40)}" for _ in range(rng.randint(1, 8))]
    words = " ".join(rng.choices(["river", "castle", "king", "Paris", "London", "Rome", "Byron", "war", "rain"], k=3))
    tags = {handle: rng.choice(["very_high", "high", "fair", "low"]) for handle in handles}
    queries = words.split()
    searches = search(words), call("fan_out_search", queries=queries), call("grep_corpus", pattern=queries[0])
    reads = call("read_document", doc_id=handles[0]), call("review_docs", doc_ids=handles)
    edits = curate(add_ids=handles, importance=tags), curate(add_ids=handles[1:], remove_ids=handles[:1])
    others = call("verify", doc_ids=handles, claim=f"The {words} fell."), call("unknown", text="x" * 20_000)
    return rng.choice([*searches, *reads, *edits, *others])


def test_random_states_are_never_over_budget() -> None:
    """States are those of random episodes, in all orders and in windows that are too small for them."""
    wanted = 1_200
    rng, retriever, runner = random.Random(7), WordRetriever(wide_corpus(30)), asyncio.Runner()
    states = limits = dropped = episode = 0
    while states < wanted:
        episode += 1
        order, context_window = ORDERS[episode % 3], WINDOWS[episode % 5]
        config = Env(
            context_window=context_window, generation_reserve=RESERVE, max_turns=60, rendering=Rendering(order=order)
        ).switch(dedup=episode % 2 == 0, budget_marker=episode % 7 != 0)
        env = make_env(config, retriever=retriever)
        context = runner.run(env.reset(Task("t", "Which river castle?")))
        for action in [random_action(rng) for _ in range(60)]:
            states += 1
            if context is None:
                limits += 1
                break
            assert recount(env, context) <= context.budget.used <= context.budget.limit == context_window - RESERVE
            dropped += context.budget.dropped > 0
            context = runner.run(env.step([action], "because")).context
    runner.close()
    assert dropped > wanted // 20
    assert limits > 0


def test_the_smallest_context_that_does_not_fit_ends_the_episode() -> None:
    env = make_env(Env(context_window=2050, generation_reserve=RESERVE))
    (step,) = play(env, ToolCall("unknown", {"text": "x" * 20_000}))
    assert (step.done, step.context) == (StopReason.CONTEXT_LIMIT, None)
    narrow = make_env(Env(context_window=2400, generation_reserve=RESERVE))
    assert run(narrow.reset(Task("t", "long question " * 1000))) is None


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
    assert (dropped, kept) == (len(everything) - len(kept), [each for each in everything if each in kept])
    gone = [block for block in blocks if block.pieces[0] not in kept]
    left = [block for block in blocks if block.pieces[0] in kept]
    assert all(block.drop is not Drop.NEVER for block in gone)
    assert max([(b.drop, b.turn) for b in gone], default=(-1, 0)) < min(
        [(b.drop, b.turn) for b in left], default=(9, 0)
    )
    assert all(set(block.pieces) <= set(kept) for block in left)


def test_the_budget_line_warns_by_level_and_closes_every_context() -> None:
    levels = {0.5: "", 0.6: "over halfway", 0.75: "finish soon", 0.9: "critical: end_search now"}
    for share, level in levels.items():
        line = marker(Env(context_window=12_048), int(share * 10_000), 3)
        assert line.shows == BudgetView(int(share * 10_000), 10_000, 3, 40, level)
        used = int(share * 10_000)
        assert line.text.startswith(f"Budget: {used} of 10000 tokens ({share:.0%}), turn 3 of 40.")
        assert level in line.text
    for order in ORDERS:
        env = make_env(Env(rendering=Rendering(order=order)))
        for turn, step in enumerate(play(env, search("Ada"), search("Byron"), search("town")), start=1):
            assert text_of(step.context).rstrip().splitlines()[-1].startswith("Budget: ")
            assert step.context.view.budget.turn == turn
            assert step.context.view.budget.used == step.context.budget.used
