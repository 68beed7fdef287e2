"""curate: only pooled documents, removals first, tags by handle."""

from __future__ import annotations

import msgspec

from harness1.config import AutoPopulate, Curation, Env
from harness1.records import Observation, ToolCall
from tests.support import curate, make_env, play, search, text_of


def curated(*actions: ToolCall, env: Env | None = None) -> tuple[dict[str, str], Observation, str]:
    """The set after searching (which curates D1 to D3 as fair) and the actions, and what the last one was told."""
    world = make_env(msgspec.structs.replace(env or Env(), auto_populate=AutoPopulate(by="first")))
    step = play(world, search("Ada Byron"), *actions)[-1]
    assert step.observation is not None
    return dict(world.state.memory.curated.tags), step.observation, text_of(step.context)


def test_adding_tagging_and_removing_by_handle_or_id() -> None:
    tags, seen, text = curated(curate(add_ids=["D2", "[D1]"], remove_ids=["byron"], importance={"d1": "high"}))
    assert tags == {"ada": "high", "babbage": "fair"}
    assert seen.delta.retagged == {"ada": "high"}
    assert seen.delta.removed == ("byron",)
    assert seen.resolved == {"D2": "babbage", "[D1]": "ada", "byron": "byron", "d1": "ada"}
    assert "Re-tagged: D1 high.\nRemoved: D3." in text


def test_a_tag_alone_retags_what_is_curated_and_adds_nothing() -> None:
    tags, _, _ = curated(curate(remove_ids=["D3"]), curate(importance={"D1": "very_high", "D3": "high"}))
    assert tags == {"ada": "very_high", "babbage": "fair"}


def test_a_document_that_is_named_again_keeps_its_tag() -> None:
    tags, seen, _ = curated(curate(importance={"D1": "high"}), curate(add_ids=["D1"]))
    assert tags["ada"] == "high"
    assert seen.error is None


def test_unknown_handles_are_told_wherever_they_stand() -> None:
    _, seen, text = curated(curate(add_ids=["D1", "D7"], remove_ids=["D8"], importance={"D9": "high", "D7": "low"}))
    assert seen.error is None
    assert "Unknown: D7, D8, D9 (3)." in text


def test_an_unknown_tag_counts_as_fair_and_is_told() -> None:
    tags, _, text = curated(curate(importance={"D1": "high"}), curate(importance={"D1": "crucial"}))
    assert tags["ada"] == "fair"
    assert "Unknown tags crucial count as fair" in text


def test_a_call_that_names_nothing_useful_is_an_error() -> None:
    for action, code in ((curate(), "nothing_to_curate"), (curate(add_ids=["X"]), "unknown_handles")):
        _, seen, _ = curated(action)
        assert seen.error is not None
        assert seen.error.code == code


def test_taking_out_what_is_not_in_is_told() -> None:
    _, seen, text = curated(curate(remove_ids=["D3"]), curate(remove_ids=["D3"]))
    assert seen.error is None
    assert "Not in the curated set: D3 (1)." in text
    _, _, text = curated(curate(remove_ids=["D3"]))
    assert "Not in the curated set" not in text


def test_the_full_set_reports_evictions_and_refusals() -> None:
    env = Env(curation=Curation(cap=2))
    _, seen, text = curated(curate(add_ids=["D3"], importance={"D3": "high"}), env=env)
    assert seen.delta.evicted == ("ada",)
    assert "Evicted for more important ones: D1." in text
    _, seen, text = curated(curate(add_ids=["D3"]), env=env)
    assert seen.delta.refused == ("byron",)
    assert "Refused, the set is full: D3." in text


def test_without_tags_there_is_no_importance_to_give() -> None:
    env = Env(curation=Curation(tags=False))
    _, seen, _ = curated(curate(add_ids=["D1"], importance={"D1": "high"}), env=env)
    assert seen.error is not None
    assert seen.error.code == "bad_arguments"
    tags, _, text = curated(curate(remove_ids=["D1"]), curate(add_ids=["D1"]), env=env)
    assert list(tags) == ["babbage", "byron", "ada"]
    assert "Added: D1." in text


def test_ids_that_contain_underscores_and_slashes_stay_whole() -> None:
    tags, seen, _ = curated(curate(add_ids=["ada_1", "http://ada/0_1", "ada#0"]))
    assert seen.error is not None
    assert list(tags) == ["ada", "babbage", "byron"]
