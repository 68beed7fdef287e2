"""An action is judged by what it leads to, never by its words."""

from __future__ import annotations

import pytest

from harness1.config import Env, load_config
from harness1.episodes.rollout import rollout
from harness1.memory.working_memory import WorkingMemory
from harness1.policy.scripted import RandomPolicy
from harness1.records import DocId, Gold, Task, ToolCall, UnitId
from harness1.rl.pivot_turns import DecisionPoint, Effect, Ruling, SetQuality, compare_effects, set_quality
from tests.support import END, call, chunk, curate, make_env, play, run, search, wide_corpus

WANTED = tuple(frozenset({UnitId(name)}) for name in ("gold-a", "gold-b"))
CORPUS = (
    chunk("gold-a", "The alpha castle stands on the hill in Paris.", "Alpha"),
    chunk("twin", "They say that the alpha castle stands on the hill in Paris, far from here.", "Twin"),
    chunk("gold-b", "The beta bridge crosses the river in London.", "Beta"),
    *(chunk(f"noise-{place}", f"Some noise of kind {place} was heard.", f"Noise {place}") for place in range(6)),
)
ENV = load_config(None, ["env.auto_populate.on=false", "env.search.hits=2"]).env


@pytest.fixture(autouse=True)
def _one_useless(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness1.rl.pivot_turns.USELESS", 1)


ALPHA, BETA, BOTH, NOISE, NOTHING = map(search, ("alpha", "beta", "alpha beta", "noise", "zebra"))
FOUND = (BOTH, NOISE)
"""Then D1 and D2 are gold, D3 and D4 are not."""
CASTLE = "The alpha castle stands on the hill in Paris."
BEST = SetQuality(1.0, 0)


def effect(before: tuple[ToolCall, ...], action: ToolCall, env: Env = ENV) -> Effect:
    world = make_env(env, CORPUS)
    play(world, *before)
    decision_point = DecisionPoint(world.snapshot().memory, WANTED, before, world.toolbox)
    held = decision_point.memory.hash()
    step = run(world.step([action]))
    assert decision_point.memory.hash() == held
    return decision_point.effect(step.turn, world.state.memory)


def ruling(before: tuple[ToolCall, ...], action: ToolCall, expert: ToolCall, end: SetQuality = BEST) -> Ruling:
    return compare_effects(effect(before, action), effect(before, expert), end)


@pytest.mark.parametrize(
    ("action", "expert", "right"),
    [
        (ALPHA, ALPHA, True),
        (search("an alpha castle in Paris"), ALPHA, True),  # other words, equal evidence
        (call("grep_corpus", pattern="castle"), ALPHA, True),  # another tool that discovers
        (call("fan_out_search", queries=["castle", "noise"]), ALPHA, True),
        (BETA, ALPHA, True),  # other evidence, as much
        (ALPHA, BOTH, False),
        (NOISE, ALPHA, False),
        (NOTHING, ALPHA, False),
    ],
)
def test_a_search_surfaces_as_much_evidence_as_the_experts(action: ToolCall, expert: ToolCall, right: bool) -> None:
    assert ruling((), action, expert) == Ruling("evidence", right)


def test_a_search_beside_a_fruitless_one_asks_what_was_not_asked_and_finds_something() -> None:
    before = (ALPHA, search("noise 1"))
    assert ruling(before, NOISE, search("kind 4 2")) == Ruling("fresh", True)
    assert ruling(before, search("NOISE   1"), search("kind 4 2")) == Ruling("fresh", False)
    assert ruling(before, NOTHING, search("kind 4 2")) == Ruling("fresh", False)


def test_a_reading_shows_gold_where_the_experts_did() -> None:
    read = [call("read_document", doc_id=handle) for handle in ("D1", "D2", "D3")]
    before = FOUND
    assert ruling(before, read[1], read[0]) == Ruling("fresh", True)
    assert ruling(before, read[2], read[0]) == Ruling("fresh", False)
    assert ruling(before, search("noise 5"), read[0]) == Ruling("fresh", False)
    assert ruling((*before, read[1]), read[1], read[0]) == Ruling("fresh", False)


@pytest.mark.parametrize(
    ("action", "right"),
    [
        (curate(add_ids=["D1", "D2"]), True),
        (curate(add_ids=["D2", "D1"], importance={"D1": "low"}), True),
        (curate(add_ids=["D1", "D2", "D3"]), True),  # one useless document is tolerated
        (curate(add_ids=["D1", "D2", "D3", "D4"]), False),
        (curate(add_ids=["D1"]), False),
        (curate(add_ids=["D3"]), False),
    ],
)
def test_a_curation_gains_as_much_and_adds_hardly_more(action: ToolCall, right: bool) -> None:
    assert ruling(FOUND, action, curate(add_ids=["D1", "D2"])) == Ruling("curation", right)


def test_a_curation_loses_no_evidence() -> None:
    before = (*FOUND, curate(add_ids=["D1", "D3"]))
    swap = curate(add_ids=["D2"], remove_ids=["D1"])
    assert ruling(before, swap, curate(add_ids=["D2"])) == Ruling("curation", False)
    assert ruling(before, swap, swap) == Ruling("curation", False)  # the expert's own, too: its turn is dropped


def test_where_the_expert_prunes_nothing_useless_is_tolerated() -> None:
    before = (*FOUND, curate(add_ids=["D1", "D3", "D4"]))
    prune = curate(remove_ids=["D3", "D4"])
    assert ruling(before, prune, prune) == Ruling("curation", True)
    assert ruling(before, curate(remove_ids=["D3"]), prune) == Ruling("curation", False)
    assert ruling(before, curate(add_ids=["D1"]), prune) == Ruling("curation", False)  # changes nothing


def test_a_verdict_confirms_gold_and_misjudges_no_more() -> None:
    right = call("verify", doc_ids=["D1"], claim=CASTLE)
    assert ruling(FOUND, right, right) == Ruling("verify", True)
    assert ruling(FOUND, call("verify", doc_ids=["D1", "D3"], claim=CASTLE), right) == Ruling("verify", True)
    denied = call("verify", doc_ids=["D1"], claim="The alpha castle does not stand on the hill in Paris.")
    beside = call("verify", doc_ids=["D3"], claim="Some noise of kind 0 was heard.")
    both = call("verify", doc_ids=["D1", "D5"], claim=CASTLE)
    for wrong in (denied, beside, both):
        assert ruling((*FOUND, ALPHA), wrong, right) == Ruling("verify", False)
    assert ruling((*FOUND, ALPHA), both, both) == Ruling("verify", True)
    assert ruling((*FOUND, right), right, call("verify", doc_ids=["D1"], claim=f"{CASTLE[:-1]} now")).right is False


def test_a_review_shows_gold() -> None:
    review = [call("review_docs", doc_ids=handles) for handles in (["D1"], ["D3"], ["D2", "D4"])]
    assert ruling(FOUND, review[2], review[0]) == Ruling("review_docs", True)
    assert ruling(FOUND, review[1], review[0]) == Ruling("review_docs", False)
    assert ruling((*FOUND, review[2]), review[2], review[0]) == Ruling("review_docs", False)


def test_to_stop_is_right_with_what_the_expert_delivered_in_the_end() -> None:
    clean, half = (*FOUND, curate(add_ids=["D1", "D2", "D3"])), (*FOUND, curate(add_ids=["D1"]))
    crowded = (*FOUND, curate(add_ids=["D1", "D2", "D3", "D4"]))
    for expert in (END, ALPHA, curate(remove_ids=["D1"])):
        assert ruling(clean, END, expert) == Ruling("stop", True)
        assert ruling(half, END, expert) == Ruling("stop", False)
        assert ruling(crowded, END, expert) == Ruling("stop", False)
    assert ruling(half, END, ALPHA, SetQuality(0.5, 0)) == Ruling("stop", True)  # nothing more was gained afterwards


@pytest.mark.parametrize(
    ("action", "expert", "right"),
    [
        (curate(add_ids=["D1"]), BETA, True),  # one target forward, as the expert's search
        (curate(add_ids=["D2"]), BETA, False),  # what is not gold
        (BETA, curate(add_ids=["D1"]), True),
        (search("noise 5"), curate(add_ids=["D1"]), False),
        (BETA, call("verify", doc_ids=["D1"], claim=CASTLE), True),
        (call("verify", doc_ids=["D1"], claim=CASTLE), BETA, False),
        (call("review_docs", doc_ids=["D1"]), curate(add_ids=["D1"]), False),
    ],
)
def test_another_kind_of_action_counts_if_it_brings_as_much(action: ToolCall, expert: ToolCall, right: bool) -> None:
    assert ruling((ALPHA, search("noise 1")), action, expert) == Ruling("other", right)


def test_pruning_counts_where_the_expert_brought_nothing_forward() -> None:
    before = (ALPHA, search("noise 1"), curate(add_ids=["D1", "D2"]))
    prune = curate(remove_ids=["D2"])
    assert ruling(before, prune, call("review_docs", doc_ids=["D1"])) == Ruling("other", True)
    assert ruling(before, prune, BETA) == Ruling("other", False)


@pytest.mark.parametrize("wrong", [search(" "), call("search", query="alpha"), curate(add_ids=["D99"])])
def test_what_the_environment_refuses_is_wrong(wrong: ToolCall) -> None:
    for expert in (BETA, curate(add_ids=["D1"]), END):
        assert ruling((ALPHA,), wrong, expert) == Ruling("error", False)


def test_facts_are_targets_that_any_of_their_chunks_serves() -> None:
    wanted = (frozenset({UnitId("a#0"), UnitId("b#0")}), frozenset({UnitId("c#0")}))
    assert set_quality([UnitId("b#0"), UnitId("x#0")], wanted) == SetQuality(0.5, 1)
    assert set_quality([], wanted) == SetQuality(0.0, 0)


def test_the_experts_own_action_is_right_wherever_it_brought_evidence() -> None:
    task = Task("t", "Which river flows past the castle of the king in Rome?")
    gold = Gold({DocId(f"doc_{number}"): 1 for number in range(0, 30, 4)})
    wanted = tuple(frozenset({UnitId(name)}) for name in gold.relevant)
    judged = 0
    for seed in range(6):
        world = make_env(Env(), wide_corpus(30))
        episode = run(rollout(world, RandomPolicy(), task, seed=seed))
        world.begin(WorkingMemory.empty(task.query, "document"))
        for turn in episode.turns:
            decision_point = DecisionPoint(world.snapshot().memory, wanted, (), world.toolbox)
            made = decision_point.effect(world.replay(turn).turn, world.state.memory)
            if not made.failed and not made.lost and (made.surfaced or made.gained):
                judged += 1
                assert compare_effects(made, made, SetQuality(1.0, 0)).right, turn
    assert judged > 10
