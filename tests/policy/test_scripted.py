"""The scripted policy: what it asks, what it keeps, when it stops."""

from __future__ import annotations

import pytest

from harness1.config import Env, load_config
from harness1.episodes.rollout import rollout
from harness1.policy.scripted import ScriptedPolicy, claim
from harness1.records import Episode, StopReason, Task
from tests.support import CORPUS, chunk, make_env, run

ALL_OFF = " ".join(
    f"env.{name}.on=false"
    for name in ("fan_out", "grep", "read", "review", "verification", "dedup", "compression", "evidence", "history")
)
ALL_OFF += " env.budget_marker.on=false env.curation.tags=false env.guidance=none"
QUESTION = "Where did the father of Ada Lovelace die?"
FILLER = tuple(chunk(f"filler{number}", f"The father of somebody did die in town {number}.") for number in range(30))


def episode_of(policy: ScriptedPolicy, env: Env | None = None, question: str = QUESTION) -> Episode:
    return run(rollout(make_env(env, (*CORPUS, *FILLER)), policy, Task("t", question)))


def test_it_follows_names_from_one_document_to_the_next() -> None:
    episode = episode_of(ScriptedPolicy())
    curated = {entry.unit_id: entry.tag for entry in episode.curated}
    assert {"ada", "byron"} <= curated.keys()
    assert curated["byron"] in ("high", "very_high")
    assert episode.stop_reason is StopReason.END_SEARCH


def test_the_first_query_is_the_question_as_it_stands() -> None:
    first = episode_of(ScriptedPolicy()).turns[0].action
    assert first is not None
    assert first.arguments == {"query": QUESTION}


def test_no_query_is_asked_twice_except_for_the_next_page_of_the_question() -> None:
    asked = []
    for turn in episode_of(ScriptedPolicy()).turns:
        assert turn.action is not None
        asked += [turn.action.arguments.get("query"), *turn.action.arguments.get("queries", [])]
    others = [query for query in asked if query not in (None, QUESTION)]
    assert len(others) == len(set(others))


@pytest.mark.parametrize("limit", [1, 15, 30])
def test_the_delivered_set_never_exceeds_its_limit(limit: int) -> None:
    assert 0 < len(episode_of(ScriptedPolicy(limit)).curated) <= limit


def test_only_verified_documents_are_called_very_high() -> None:
    episode = episode_of(ScriptedPolicy(), question="Ada Lovelace was the daughter of Lord Byron")
    verified = set()
    for turn in episode.turns:
        assert turn.observation is not None
        verified |= {verdict.unit_id for verdict in turn.observation.verdicts if verdict.label == "yes"}
    top = {entry.unit_id for entry in episode.curated if entry.tag == "very_high"}
    assert top
    assert top <= verified


@pytest.mark.parametrize(
    "setting",
    [
        "env.fan_out.on=false",
        "env.verification.on=false",
        "env.curation.tags=false",
        "env.compression.on=false",
        "env.rendering.order=epoch",
        "env.rendering.order=stable_first",
        "env.max_turns=4",
        "env.context_window=8192",
        "env.budget_marker.on=false",
        "env.evidence.on=false",
        "env.history.on=false",
        "env.dedup.on=false",
        "env.guidance=none",
        ALL_OFF,
    ],
)
def test_it_finds_the_same_chain_whatever_is_switched_off(setting: str) -> None:
    episode = episode_of(ScriptedPolicy(), load_config(None, ["env.auto_populate.on=false", *setting.split()]).env)
    # Without the evidence graph nothing tells which name to follow.
    wanted = {"ada"} if "max_turns" in setting or "evidence" in setting else {"ada", "byron"}
    assert wanted <= {entry.unit_id for entry in episode.curated}
    assert all(turn.observation and turn.observation.error is None for turn in episode.turns)


def test_it_delivers_before_the_turns_run_out() -> None:
    episode = episode_of(ScriptedPolicy(), load_config(None, ["env.max_turns=2", "env.auto_populate.on=false"]).env)
    assert len(episode.curated) > 0


def test_an_empty_result_ends_the_search() -> None:
    episode = episode_of(ScriptedPolicy(), question="zzz")
    assert (episode.curated, episode.stop_reason) == ((), StopReason.END_SEARCH)


def test_a_claim_loses_its_question_words_only() -> None:
    assert claim("Which river runs through Paris?") == "river runs through Paris"
    assert claim("Aspirin inhibits platelets.") == "Aspirin inhibits platelets."
