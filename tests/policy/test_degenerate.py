"""The degenerate policies do what their names say, and no more."""

from __future__ import annotations

import pytest

from harness1.config import AutoPopulate, Curation, Env, FanOut, Grep, Read, Review, Verification
from harness1.episodes.rollout import rollout
from harness1.policy.registry import open_policy
from harness1.policy.scripted import REPEATS, ROUNDS, RULES, ReflexPolicy
from harness1.records import Chunk, Episode, StopReason, Task
from tests.support import chunk, make_env, run, wide_corpus

WORLD = wide_corpus(60)
QUERY = "Which river castle did Ada see ?"


def episode(policy: str, query: str = QUERY, env: Env | None = None, chunks: list[Chunk] = WORLD) -> Episode:
    return run(rollout(make_env(env, chunks), ReflexPolicy(policy), Task("t", query)))


def actions(found: Episode) -> list[str]:
    return [turn.action.name for turn in found.turns if turn.action is not None]


def populated(found: Episode) -> list[str]:
    """What the environment put into the set at the first search."""
    assert found.turns[0].observation is not None
    assert found.turns[0].observation.delta.auto_populated
    return list(found.turns[0].observation.delta.auto_populated)


def test_no_op_ends_with_nothing() -> None:
    found = episode("no-op")
    assert (actions(found), found.curated, found.pool) == (["end_search"], (), ())


def test_stop_at_once_delivers_what_one_search_populated() -> None:
    found = episode("stop-at-once")
    assert actions(found) == ["search_corpus", "end_search"]
    assert [entry.unit_id for entry in found.curated] == populated(found)


def test_the_repeater_asks_one_question() -> None:
    found = episode("query-repeater", env=Env(auto_populate=AutoPopulate(by="first")))
    asked = [turn.action.arguments for turn in found.turns if turn.action and turn.action.name == "search_corpus"]
    assert asked == [{"query": QUERY}] * REPEATS
    assert [entry.unit_id for entry in found.curated] == populated(found)


def test_everything_is_curated_until_the_set_is_full() -> None:
    found = episode("curate-everything")
    assert len(found.curated) == Env().curation.cap
    assert set(actions(found)) == {"search_corpus", "curate", "end_search"}
    small = episode("curate-everything", env=Env(curation=Curation(cap=5)))
    assert len(small.curated) == 5


def test_everything_is_all_there_is_in_a_small_corpus() -> None:
    found = episode("curate-everything", "castle", chunks=[chunk(f"d{n}", f"The castle {n}") for n in range(11)])
    assert {entry.unit_id for entry in found.curated} == {f"d{n}" for n in range(11)}
    assert found.stop_reason is StopReason.END_SEARCH


def test_the_spammer_uses_every_tool_and_fills_the_set() -> None:
    found = episode("tool-spammer", QUERY.removesuffix(" ?"))
    specs = [spec.name for spec in make_env().toolbox.specs if spec.name != "end_search"]
    assert actions(found) == specs * ROUNDS + ["end_search"]
    assert len(found.curated) > Env().auto_populate.documents


def test_the_inventor_delivers_nothing_without_a_hint() -> None:
    found = episode("id-inventor")
    assert found.turns[0].observation is not None
    assert found.turns[0].observation.error is not None
    assert found.pool
    assert found.curated == ()


def test_the_inventor_takes_ids_that_stand_in_the_question() -> None:
    found = episode("id-inventor", "Where is the castle of doc_7?", chunks=[*WORLD, chunk("doc_70", "castle of doc_7")])
    assert [entry.unit_id for entry in found.curated] in ([], ["doc_7"])
    shown = episode("id-inventor", "castle a7?", chunks=[chunk("a7", "A castle."), chunk("a77", "A castle, too.")])
    assert [entry.unit_id for entry in shown.curated] == ["a7"]


@pytest.mark.parametrize("policy", RULES)
def test_all_live_with_few_tools_and_turns(policy: str) -> None:
    off = {"fan_out": FanOut(on=False), "grep": Grep(on=False), "read": Read(on=False), "review": Review(on=False)}
    found = episode(policy, env=Env(**off, verification=Verification(on=False), max_turns=6))
    assert found.stop_reason in (StopReason.END_SEARCH, StopReason.TURN_LIMIT)
    known = {"search_corpus", "curate", "end_search"}
    assert set(actions(found)) <= known


@pytest.mark.parametrize("policy", RULES)
def test_they_are_policies_by_name_and_do_the_same_again(policy: str) -> None:
    assert open_policy(policy, {}).name == policy
    assert [turn.memory_hash for turn in episode(policy).turns] == [turn.memory_hash for turn in episode(policy).turns]
    assert len({ReflexPolicy(name).hash for name in RULES}) == len(RULES)
