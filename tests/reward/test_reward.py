"""However much the process is paid for, an episode that solved its task is never outranked by one that did not.

Under `paper`, solved is to deliver all evidence of the answer, and unsolved to deliver none of it. `robust` asks for a
clean set as well: solved is F_1 of at least one half, and unsolved to deliver nothing relevant.
"""

from __future__ import annotations

from math import isnan
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from harness1.config import Config, Env, Reward, load_config
from harness1.errors import ConfigError, UsageError
from harness1.records import STATUS_OF, Curated, Episode, Gold, Hashes, RewardRecord, RewardTerm, StopReason
from harness1.reward import (
    BEYOND_CAP,
    COMPONENTS,
    Case,
    Component,
    available_tools,
    component,
    composite,
    contributions,
    score,
    total_of,
)
from harness1.reward.measures import Outcome, f_beta
from tests.support import ended_episode

EPISODE = ended_episode()
BY_NAME = {part.name: part for part in COMPONENTS}
ONLY_SEARCH = [f"env.{tool}.on=false" for tool in ("fan_out", "grep", "read", "review", "verification")]


def value(part: Component | str, *settings: str, **outcome: Any) -> float:
    part = BY_NAME[part] if isinstance(part, str) else part
    return part.term(Case(Outcome(**outcome), EPISODE, load_config(overrides=list(settings)))).value


@pytest.mark.parametrize(
    ("name", "outcome", "expected"),
    [
        ("outcome", {"precision": 0.5, "recall": 0.25}, 5 * 0.125 / 2.25),
        ("trajectory", {"trajectory_recall": 0.4}, 0.4),
        ("answer_found", {"answer_recall": 0.0}, 0.0),
        ("answer_found", {"answer_recall": 0.01}, 1.0),
        ("answer", {"answer_recall": 0.3}, 0.3),
        ("trajectory_answer", {"trajectory_answer_recall": 0.6}, 0.6),
        ("answer_missed", {"trajectory_answer_recall": 0.75, "answer_recall": 0.5}, 0.25),
        ("answer_missed", {"trajectory_answer_recall": 0.5, "answer_recall": 0.75}, 0.0),
        ("clutter", {"precision": 0.25, "set_size": 8}, 6 / 30),
        ("clutter", {"precision": 0.0, "set_size": 30}, 1.0),
        ("clutter", {}, 0.0),
        *(("turn_penalty", {"turns": n}, cost) for n, cost in ((0, 0), (20, 0), (21, 0.05), (30, 0.5), (99, 1))),
        *(("diversity", {"calls": dict.fromkeys("abcdefghi"[:n], 1)}, min(n / 6, 1)) for n in (0, 3, 6, 9)),
    ],
)
def test_values_by_hand(name: str, outcome: dict[str, Any], expected: float) -> None:
    assert value(name, **outcome) == pytest.approx(expected)
    assert BY_NAME[name].__doc__ == BY_NAME[name].doc != ""


def test_settings_count_and_tools_that_are_off_are_not_missed() -> None:
    assert value("outcome", "reward.recipe=robust", precision=0.5, recall=0.25) == pytest.approx(1 / 3)
    assert value("clutter", "env.curation.cap=10", set_size=10, precision=0.5) == 0.5
    assert [value("turn_penalty", "env.max_turns=5", turns=turns) for turns in (5, 21)] == [0.0, 1.0]
    assert (available_tools(Env()), available_tools(load_config(overrides=ONLY_SEARCH).env)) == (7, 2)
    assert value("diversity", *ONLY_SEARCH, calls={"a": 1, "b": 1}) == 1.0


def test_penalties_weigh_negatively_and_nothing_else_does() -> None:
    off = ("recall", "clutter")
    settings = load_config(overrides=[f"reward.{name}=0.5" for name in off]).reward
    negative = {part.name for part in COMPONENTS if part.weight(settings) < 0.0}
    assert negative == {"answer_missed", "clutter", "turn_penalty"}
    assert all(part.weight(settings) != 0.0 for part in COMPONENTS)
    assert {part.name for part in COMPONENTS if part.process} == {"diversity", "turn_penalty"}


def test_a_component_that_runs_away_is_capped_by_a_number() -> None:
    @component("wild", ceiling=3.0)
    def wild(case: Case) -> float:
        return float(case.outcome.turns)

    assert (value(wild, turns=99), value(wild, turns=-99), value(wild, turns=2)) == (3.0, 0.0, 2.0)
    with pytest.raises(UsageError, match="ceiling of the reward term 'wild' must be a number"):
        component("wild", ceiling=lambda settings: 3.0)  # as it was once


SHAPELESS = load_config(overrides=["reward.diversity=0.0", "reward.turn_penalty=0.0"])
GOLD = Gold(relevant={"a": 1, "b": 1}, answer_docs=("a",))
SHARE = st.floats(0.0, 1.0)


def finished(stop: StopReason = StopReason.END_SEARCH, curated: str = "", pool: str = "") -> Episode:
    ranked = tuple(Curated(unit, "fair", rank) for rank, unit in enumerate(curated, 1))
    given = {"hashes": Hashes("env", "policy", "index"), "curated": ranked, "pool": tuple(pool)}
    return structs.replace(EPISODE, stop_reason=stop, status=STATUS_OF[stop], **given)


def rewarded(episode: Episode, config: Config = SHAPELESS) -> RewardRecord:
    return score(episode, GOLD, config).reward


@pytest.mark.parametrize(
    ("curated", "pool", "stop", "total", "override"),
    [
        ("ab", "ab", StopReason.END_SEARCH, 3.2, None),
        ("x", "xab", StopReason.END_SEARCH, 0.35, None),
        ("x", "x", StopReason.END_SEARCH, 0.001, None),
        ("", "ab", StopReason.END_SEARCH, -0.2, "empty"),
        ("ab", "ab", StopReason.FORMAT_LIMIT, -0.5, "format_failure"),
    ],
    ids=["perfect", "all seen, nothing right", "the floor", "empty", "a format failure"],
)
def test_what_episodes_earn_bare(curated: str, pool: str, stop: StopReason, total: float, override: str | None) -> None:
    found = rewarded(finished(stop, curated, pool))
    assert (found.total, found.override) == (pytest.approx(total), override)


def test_terms_without_a_sum_have_no_total() -> None:
    terms = {name: RewardTerm(sign * 1e308, 1e10) for name, sign in (("more", 1.0), ("less", -1.0))}
    assert isnan(total_of(terms, None, SHAPELESS.reward))


def test_running_out_is_scored_like_stopping_and_a_fault_never() -> None:
    for stop in (StopReason.TURN_LIMIT, StopReason.CONTEXT_LIMIT):
        assert rewarded(finished(stop, "a", "ab")) == rewarded(finished(curated="a", pool="ab"))
    assert rewarded(finished(StopReason.FAULT, "ab", "ab")) is rewarded(finished(StopReason.FAULT)) is None


def test_a_middling_episode_by_hand() -> None:
    # P = 1/2, R = 1/2, F = 1, T = 1, TF = 1; one of six tools; 30 turns are half of the penalised ones.
    half, whole = ("precision", "recall"), ("answer_recall", "trajectory_recall", "trajectory_answer_recall")
    shares = dict.fromkeys(half, 0.5) | dict.fromkeys(whole, 1.0)
    found = composite(Outcome(**shares, set_size=2, turns=30, calls={"search_corpus": 30}), finished(), Config())
    assert found.total == pytest.approx(0.7 * 0.5 + 0.3 + 1.0 + 0.8 + 0.4 + 0.15 / 6 - 0.02 * 0.5)
    assert found.total == pytest.approx(sum(term.value * term.weight for term in found.terms.values()))


def test_scoring_names_the_weights_and_changes_nothing_else_and_records_no_term_without_weight() -> None:
    episode = finished(curated="ab", pool="ab")
    scored = score(episode, GOLD, SHAPELESS)
    assert scored.hashes == Hashes("env", "policy", "index", reward=SHAPELESS.reward_hash)
    assert structs.replace(scored, reward=None, hashes=episode.hashes) == episode
    assert score(scored, GOLD, SHAPELESS) == scored
    with pytest.raises(UsageError, match="'t'"):
        score(episode, Gold(relevant={}), SHAPELESS)
    published = {"outcome", "trajectory", "answer_found", "answer", "trajectory_answer", "answer_missed"}
    assert scored.reward.terms.keys() == published
    assert rewarded(episode, Config()).terms.keys() == published | {"diversity", "turn_penalty"}


OUTCOMES = st.fixed_dictionaries(
    dict.fromkeys(("precision", "recall", "answer_recall", "trajectory_recall", "trajectory_answer_recall"), SHARE)
    | {"set_size": st.integers(0, 30), "turns": st.integers(0, 60)}
)


@given(OUTCOMES, SHARE, st.sampled_from(["recall", "answer_recall", "trajectory_recall", "trajectory_answer_recall"]))
def test_more_recall_of_any_kind_never_costs(outcome: dict[str, Any], other: float, name: str) -> None:
    low, high = sorted((outcome[name], other))
    less, more = (composite(Outcome(**(outcome | {name: share})), finished(), Config()) for share in (low, high))
    assert more.total >= less.total - 1e-12


def test_the_defaults_are_the_published_weights() -> None:
    weights = {part.name: part.weight(Reward()) for part in COMPONENTS if part.weight(Reward())}
    result = {"outcome": 0.7, "trajectory": 0.3, "answer_found": 1.0, "answer": 0.8, "trajectory_answer": 0.4}
    assert weights == result | {"answer_missed": -0.35, "diversity": 0.15, "turn_penalty": -0.02}
    assert load_config(None, ["reward.recipe=paper"]) == Config()
    for process in (BEST_PROCESS, WORST_PROCESS):
        assert BEYOND_CAP not in earned(Outcome(set_size=1, **process), Config()).terms


CAP = 0.5
WEIGHT = st.floats(-1e3, 1e3)
WEIGHTS = st.fixed_dictionaries(dict.fromkeys(("diversity", "turn_penalty"), WEIGHT))
CALLS = st.dictionaries(st.sampled_from(["search_corpus", "curate", "verify", "grep_corpus"]), st.integers(1, 9))
PROCESS = st.fixed_dictionaries({"turns": st.integers(1, 60), "calls": CALLS})
WORST_PROCESS = {"turns": 40, "calls": {}}
BEST_PROCESS = {"turns": 20, "calls": dict.fromkeys("abcdef", 1)}
BRIBED = {"diversity": 9.0, "turn_penalty": 9.0}


def config(recipe: str, weights: dict[str, float]) -> Config:
    settings = [f"reward.{name}={value!r}" for name, value in weights.items()]
    return load_config(None, [f"reward.recipe={recipe}", *settings])


def earned(outcome: Outcome, settings: Config) -> RewardRecord:
    return composite(outcome, finished(curated="a", pool="a"), settings)


@st.composite
def solved(draw: st.DrawFn, recipe: str) -> dict[str, Any]:
    """An outcome that counts as solved; what was delivered was also seen."""
    relevant, size = draw(st.integers(1, 30)), draw(st.integers(1, 30))
    delivered = draw(st.integers(1, min(relevant, size)))
    if recipe == "robust":
        size = min(size, max(4 * delivered - relevant, delivered))
        relevant = min(relevant, 4 * delivered - size)
    recall, precision = delivered / relevant, delivered / size
    answer = 1.0 if recipe == "paper" else draw(SHARE)
    seen = draw(st.floats(recall, 1.0))
    if recipe == "robust":
        assert f_beta(precision, recall, 1.0) >= 0.5 - 1e-12
    return {
        "recall": recall,
        "precision": precision,
        "answer_recall": answer,
        "trajectory_recall": seen,
        "trajectory_answer_recall": draw(st.floats(answer, 1.0)),
        "set_size": size,
    }


@st.composite
def unsolved(draw: st.DrawFn, recipe: str) -> dict[str, Any]:
    """An outcome that counts as unsolved, with everything seen, and nothing delivered or anything but the answer."""
    shares = ["trajectory_recall", "trajectory_answer_recall", *(["recall", "precision"] if recipe == "paper" else [])]
    return {"set_size": draw(st.integers(0, 30)), **{name: draw(SHARE) for name in shares}}


@given(st.data(), st.sampled_from(["paper", "robust"]), WEIGHTS, PROCESS, PROCESS)
def test_no_unsolved_episode_outranks_a_solved_one(
    data: st.DataObject, recipe: str, weights: dict[str, float], one: dict[str, Any], other: dict[str, Any]
) -> None:
    settings = config(recipe, weights)
    good = Outcome(**data.draw(solved(recipe)), **one)
    bad = Outcome(**data.draw(unsolved(recipe)), **other)
    assert earned(good, settings).total > earned(bad, settings).total


@pytest.mark.parametrize(
    ("recipe", "good", "bad"),
    [
        (
            "paper",
            {"answer_recall": 1.0, "trajectory_answer_recall": 1.0, "set_size": 30},
            {"recall": 1.0, "precision": 1.0, "trajectory_recall": 1.0, "trajectory_answer_recall": 1.0, "set_size": 9},
        ),
        ("robust", {"recall": 1.0, "precision": 1 / 3, "set_size": 30}, {"set_size": 1}),
    ],
)
def test_the_closest_case_holds_by_the_cap_alone(
    monkeypatch: pytest.MonkeyPatch, recipe: str, good: dict[str, Any], bad: dict[str, Any]
) -> None:
    worst, best, settings = Outcome(**good, **WORST_PROCESS), Outcome(**bad, **BEST_PROCESS), config(recipe, BRIBED)
    assert earned(worst, settings).total > earned(best, settings).total
    monkeypatch.setattr("harness1.reward.PROCESS_CAP", 1e9)
    assert earned(worst, config(recipe, BRIBED)).total < earned(best, config(recipe, BRIBED)).total


@given(st.sampled_from(["paper", "robust"]), WEIGHTS, PROCESS, SHARE, SHARE)
def test_process_terms_add_up_to_no_more_than_the_cap(
    recipe: str, weights: dict[str, float], process: dict[str, Any], recall: float, precision: float
) -> None:
    outcome = Outcome(recall=recall, precision=precision, set_size=9, **process)
    terms = earned(outcome, config(recipe, weights)).terms
    own = [term for name, term in terms.items() if name in weights or name == BEYOND_CAP]
    assert abs(contributions(own)) <= CAP + 1e-9


ROBUST = load_config(None, ["reward.recipe=robust"])


def test_a_given_weight_holds_against_the_recipe_in_any_order_and_a_recipe_that_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "my.toml"
    path.write_text('[reward]\nclutter = 0.125\nrecipe = "robust"\n')
    given = load_config(path).reward
    assert (given.weights["clutter"], given.beta, given.weights["trajectory"]) == (0.125, 1.0, 0.0)
    assert load_config(None, ["reward.clutter=0.125", "reward.recipe=robust"]).reward == given
    published = load_config("paper", ["reward.recipe=robust"])
    assert published == structs.replace(load_config("paper"), reward=ROBUST.reward)
    assert ROBUST.reward_hash != Config().reward_hash
    for override in ("reward.recipe=best", "reward.recipe=3", "reward=3"):
        with pytest.raises(ConfigError):
            load_config(None, [override])


def test_the_robust_recipe_prefers_a_few_wrong_units_to_a_right_one_among_thirty() -> None:
    seen = Outcome(trajectory_recall=1.0, trajectory_answer_recall=1.0, set_size=1, calls=dict.fromkeys("abcdef", 1))
    assert earned(seen, ROBUST).total == pytest.approx(-0.45 / 30), "what was seen earns nothing"
    few, hoard = earned(Outcome(set_size=8), ROBUST), Outcome(set_size=30, recall=1.0, precision=1 / 30)
    assert few.total == pytest.approx(-0.45 * 8 / 30)
    assert earned(hoard, ROBUST).total == pytest.approx(3.0 * f_beta(1 / 30, 1.0, 1.0) - 0.45 * 29 / 30)
    assert few.total > earned(hoard, ROBUST).total
