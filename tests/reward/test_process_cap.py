"""However much the process is paid for, an episode that solved its task is never outranked by one that did not.

Under `paper`, solved is to deliver all evidence of the answer, and unsolved to deliver none of it. `robust` asks for a
clean set as well: solved is F_1 of at least one half, and unsolved to deliver nothing relevant.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness1.config import Config, Reward, load_config
from harness1.records import RewardRecord
from harness1.reward import BEYOND_CAP, composite, contributions
from harness1.reward.measures import Outcome, f_beta
from tests.reward.test_composite import finished

CAP = 0.5
WEIGHT = st.floats(-1e3, 1e3)
WEIGHTS = st.fixed_dictionaries(dict.fromkeys(("diversity", "diversity_shortfall", "curation", "turn_penalty"), WEIGHT))
PROCESS = st.fixed_dictionaries(
    {
        "turns": st.integers(1, 60),
        "calls": st.dictionaries(
            st.sampled_from(["search_corpus", "curate", "verify", "grep_corpus"]), st.integers(1, 9)
        ),
    }
)
SHARE = st.floats(0.0, 1.0)
WORST_PROCESS = {"turns": 40, "calls": {}}
BEST_PROCESS = {"turns": 20, "calls": dict.fromkeys("abcdef", 1)}
BRIBED = {"diversity": 9.0, "diversity_shortfall": 0.0, "curation": 0.0, "turn_penalty": 9.0}


def config(recipe: str, weights: dict[str, float]) -> Config:
    settings = [f"reward.{name}={value!r}" for name, value in weights.items()]
    return load_config(None, [f"reward.recipe={recipe}", *settings])


def rewarded(outcome: Outcome, settings: Config) -> RewardRecord:
    found = composite(outcome, finished(curated="a", pool="a"), settings)
    assert found is not None
    return found


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
    bad = {
        "trajectory_recall": draw(SHARE),
        "trajectory_answer_recall": draw(SHARE),
        "set_size": draw(st.integers(0, 30)),
    }
    if recipe == "robust":
        return bad
    return bad | {"recall": draw(SHARE), "precision": draw(SHARE)}


@given(st.data(), st.sampled_from(["paper", "robust"]), WEIGHTS, PROCESS, PROCESS)
def test_no_unsolved_episode_outranks_a_solved_one(
    data: st.DataObject, recipe: str, weights: dict[str, float], one: dict[str, Any], other: dict[str, Any]
) -> None:
    settings = config(recipe, weights)
    good = Outcome(**data.draw(solved(recipe)), **one)
    bad = Outcome(**data.draw(unsolved(recipe)), **other)
    assert rewarded(good, settings).total > rewarded(bad, settings).total


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
    worst, best = Outcome(**good, **WORST_PROCESS), Outcome(**bad, **BEST_PROCESS)
    assert rewarded(worst, config(recipe, BRIBED)).total > rewarded(best, config(recipe, BRIBED)).total
    monkeypatch.setattr(Reward, "process_cap", 1e9)
    uncapped = config(recipe, BRIBED)
    assert rewarded(worst, uncapped).total < rewarded(best, uncapped).total


@given(st.sampled_from(["paper", "robust"]), WEIGHTS, PROCESS, SHARE, SHARE)
def test_process_terms_add_up_to_no_more_than_the_cap(
    recipe: str, weights: dict[str, float], process: dict[str, Any], recall: float, precision: float
) -> None:
    outcome = Outcome(recall=recall, precision=precision, set_size=9, **process)
    terms = rewarded(outcome, config(recipe, weights)).terms
    own = [term for name, term in terms.items() if name in weights or name == BEYOND_CAP]
    assert abs(contributions(own)) <= CAP + 1e-9


def test_published_weights_never_meet_the_cap() -> None:
    for process in (BEST_PROCESS, WORST_PROCESS):
        assert BEYOND_CAP not in rewarded(Outcome(set_size=1, **process), Config()).terms
