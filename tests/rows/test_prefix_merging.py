"""Calls merge exactly where one continues the tokens of another; every output is trained once, or told why not."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness1.rows import Merged, chain_row, prefix_merging
from harness1.rows.calls import CapturedCall

Tokens = tuple[int, ...]


def made(name: str, prompt: Tokens, output: Tokens, **fields: object) -> CapturedCall:
    logprobs = tuple(-0.1 - token / 8 for token in output)
    return CapturedCall(name, prompt, output, logprobs, **fields)


def whole(call: CapturedCall) -> Tokens:
    return call.prompt_ids + call.output_ids


def after(name: str, parent: CapturedCall, seen: Tokens, output: Tokens, **fields: object) -> CapturedCall:
    return made(name, whole(parent) + seen, output, **fields)


def trained(merged: Merged) -> set[str]:
    return {call_id for row in merged.rows for call_id in row.call_ids}


def chains(merged: Merged) -> list[tuple[str, ...]]:
    return sorted(row.call_ids for row in merged.rows)


@st.composite
def sessions(draw: st.DrawFn) -> list[CapturedCall]:
    """Whatever agents do: turns, sub-agents, forks, compaction, retries and empty outputs. The vocabulary is so small
    that calls continue and repeat one another by accident, too."""
    tokens = st.lists(st.integers(0, draw(st.sampled_from([1, 2, 300]))), min_size=1, max_size=3).map(tuple)
    calls = [made("0", draw(tokens), draw(tokens))]
    for number in range(1, draw(st.integers(1, 14))):
        earlier = draw(st.sampled_from(calls))
        what = draw(st.sampled_from(["turn", "turn", "turn", "fork", "compaction", "retry", "same", "empty"]))
        prompt = {
            "turn": whole(calls[-1]) + draw(tokens),
            "fork": whole(earlier) + draw(tokens),
            "compaction": draw(tokens),
        }.get(what, earlier.prompt_ids)
        output = () if what == "empty" else earlier.output_ids if what == "same" else draw(tokens)
        agent = draw(st.sampled_from(["", "", "", "sub"]))
        attempt = draw(st.integers(0, 2)) if what in ("retry", "same") else 0
        calls.append(made(str(number), prompt, output, agent_id=agent, attempt=attempt))
    return calls


def plainly_ambiguous(calls: Sequence[CapturedCall]) -> set[str]:
    found: set[str] = set()
    for call in sorted(calls, key=lambda call: len(call.prompt_ids)):
        others = [other for other in calls if other.output_ids and other.agent_id == call.agent_id]
        before = [other for other in others if call.prompt_ids[: len(whole(other))] == whole(other)]
        longest = max((len(whole(other)) for other in before), default=0)
        parents = [other.call_id for other in before if len(whole(other)) == longest]
        if call.output_ids and (len(parents) > 1 or found & set(parents)):
            found.add(call.call_id)
    return found


@settings(max_examples=150, deadline=None)
@given(sessions(), st.randoms(use_true_random=False))
def test_whatever_agents_do_rows_are_exact_and_every_output_is_trained_once_or_accounted_for(
    calls: list[CapturedCall], shuffler: random.Random
) -> None:
    merged = prefix_merging(calls)
    shuffled = list(calls)
    shuffler.shuffle(shuffled)
    assert prefix_merging(shuffled) == merged
    known = {call.call_id: call for call in calls}
    assert list(merged.rows) == [chain_row([known[name] for name in row.call_ids]) for row in merged.rows]
    named = [call_id for row in merged.rows for call_id in row.call_ids]
    aside = [*merged.ambiguous, *merged.unresolved, *merged.superseded, *merged.empty]
    assert sorted(named + aside) == sorted(call.call_id for call in calls)
    assert sum(sum(row.loss_mask) for row in merged.rows) == sum(len(known[name].output_ids) for name in named)
    assert set(merged.ambiguous) == plainly_ambiguous(calls)
    assert set(merged.empty) == {call.call_id for call in calls if not call.output_ids}
    leaves = [whole(call) for call in calls if call.call_id in {row.call_ids[-1] for row in merged.rows}]
    assert sorted(row.token_ids for row in merged.rows) == sorted(leaves)


def test_an_append_only_session_of_eight_turns_is_one_row() -> None:
    calls = [made("0", (1, 2, 3), (4, 5), session_id="s")]
    for turn in range(1, 8):
        calls.append(after(str(turn), calls[-1], (10 * turn, 6), (7, turn), session_id="s"))
    merged = prefix_merging(calls, "g")
    (row,) = merged.rows
    assert (row.call_ids, row.token_ids) == (tuple("01234567"), whole(calls[-1]))
    assert (row.episode_id, row.group_id) == ("s", "g")
    assert (merged.merge_ratio, sum(row.loss_mask)) == (8.0, sum(len(call.output_ids) for call in calls))


def test_a_fork_trains_what_both_branches_saw_once() -> None:
    root = made("root", (1, 2), (3, 4))
    left, right = after("left", root, (5,), (6,)), after("right", root, (7,), (8,))
    leaf = after("leaf", right, (9,), (1,))
    merged = prefix_merging([leaf, right, left, root])
    assert chains(merged) == [("right", "leaf"), ("root", "left")]
    context = next(row for row in merged.rows if "right" in row.call_ids)
    assert (context.token_ids, sum(context.loss_mask[: len(right.prompt_ids)])) == (whole(leaf), 0)
    assert merged.merge_ratio == 2.0


def test_agents_and_sessions_are_kept_apart() -> None:
    first = made("first", (1,), (2,), session_id="s")
    second = after("second", first, (3,), (4,), session_id="t")
    third = after("third", first, (3,), (4,), session_id="s", agent_id="sub")
    fourth = after("fourth", first, (3,), (4,), session_id="s")
    merged = prefix_merging([first, second, third, fourth])
    assert chains(merged) == [("first", "fourth"), ("second",), ("third",)]
    assert {row.call_ids: row.episode_id for row in merged.rows}[("second",)] == "t"
    assert merged.quarantine == merged.superseded == ()


def test_of_retries_the_one_that_was_continued_is_trained() -> None:
    root = made("root", (1,), (2,))
    lost, used = after("lost", root, (3,), (4, 4, 4), attempt=9), after("used", root, (3,), (5,))
    leaf = after("leaf", used, (6,), (7,))
    merged = prefix_merging([root, lost, used, leaf])
    assert chains(merged) == [("root", "used", "leaf")]
    assert (merged.superseded, merged.quarantine) == (("lost",), ())
    also = prefix_merging([root, lost, used, leaf, after("fork", lost, (7,), (8,)), after("idle", root, (3,), (6,))])
    assert chains(also) == [("root", "lost", "fork"), ("used", "leaf")]
    assert also.superseded == ("idle",)


def test_retries_that_nothing_continues_are_told_apart_by_their_attempt_or_not_at_all() -> None:
    root = made("root", (1,), (2,))

    def retried(first: int, second: int) -> Merged:
        attempts = (("a", 4, first), ("b", 5, second))
        return prefix_merging([root, *(after(name, root, (3,), (ids,), attempt=at) for name, ids, at in attempts)])

    told = retried(1, 0)
    assert (chains(told), told.superseded, told.quarantine) == ([("root", "a")], ("b",), ())
    untold = retried(1, 1)
    assert (chains(untold), untold.superseded, untold.unresolved) == ([("root",)], (), ("a", "b"))


def test_a_call_that_two_others_could_precede_is_quarantined_with_all_that_follows() -> None:
    root = made("root", (1,), (2,))
    long, short = made("long", (1, 2, 3), (4, 5)), made("short", (1, 2, 3, 4), (5,))
    child = made("child", (1, 2, 3, 4, 5, 6), (7,))
    grandchild = after("grandchild", child, (8,), (9,))
    branch = after("branch", child, (9,), (9,))
    merged = prefix_merging([root, long, short, child, grandchild, branch])
    assert merged.quarantine == merged.ambiguous == ("branch", "child", "grandchild")
    assert trained(merged) == {"root", "long", "short"}
    assert merged.counts == {"rows": 2, "trained": 3, "ambiguous": 3, "unresolved": 0, "superseded": 0, "empty": 0}
    a, b = (after(name, root, (3,), (4,)) for name in "ab")
    twins = prefix_merging([root, a, b, made("c", (1, 2, 3, 4, 5), (6,))])
    assert (twins.ambiguous, twins.unresolved) == (("c",), ("a", "b"))


def test_empty_outputs_are_dropped_and_counted_and_two_calls_of_one_id_refused() -> None:
    merged = prefix_merging([made("a", (1,), ()), made("b", (1,), (2,)), made("c", (1, 2, 3), ())])
    assert (chains(merged), merged.empty) == ([("b",)], ("a", "c"))
    assert (prefix_merging([]), prefix_merging([]).merge_ratio) == (Merged((), (), (), (), ()), 0.0)
    with pytest.raises(ValueError, match="same id"):
        prefix_merging([made("a", (1,), (2,)), made("a", (3,), (4,))])


def test_thousands_of_calls_are_merged_in_seconds() -> None:
    draw = random.Random(3)
    calls: list[CapturedCall] = []
    for agent in range(30):
        call = made(f"{agent}", (0,) * 500 + (agent,), (1, 2))
        for turn in range(100):
            calls.append(call)
            call = after(f"{agent}-{turn}", call, tuple(draw.randrange(300) for _ in range(10)), (1, 2))
    draw.shuffle(calls)
    begin = time.perf_counter()
    merged = prefix_merging(calls)
    assert time.perf_counter() - begin < 10
    assert (merged.counts["rows"], merged.merge_ratio) == (30, 100.0)
