"""A recipe gives the weights that nobody gave."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec import structs

from harness1.config import Config, Reward, load_config
from harness1.errors import ConfigError
from harness1.reward import composite
from harness1.reward.measures import Outcome, f_beta
from tests.reward.test_composite import finished

ROBUST = load_config(None, ["reward.recipe=robust"])


def test_the_published_recipe_is_the_default() -> None:
    assert load_config(None, ["reward.recipe=paper"]) == Config()
    assert Reward().recipe == "paper"


def test_a_given_weight_holds_against_the_recipe_in_any_order(tmp_path: Path) -> None:
    path = tmp_path / "my.toml"
    path.write_text('[reward]\nclutter = 0.125\nrecipe = "robust"\n')
    given = load_config(path).reward
    assert (given.clutter, given.beta, given.trajectory) == (0.125, 1.0, 0.0)
    assert load_config(None, ["reward.clutter=0.125", "reward.recipe=robust"]).reward == given


def test_a_recipe_that_is_asked_for_takes_the_place_of_a_file_that_spells_out_another() -> None:
    published = load_config("paper", ["reward.recipe=robust"])
    assert published == structs.replace(load_config("paper"), reward=ROBUST.reward)


def test_recipes_are_told_apart_by_their_hash() -> None:
    assert ROBUST.reward_hash != Config().reward_hash


@pytest.mark.parametrize("override", ["reward.recipe=best", "reward.recipe=3", "reward=3"])
def test_a_recipe_that_does_not_exist_is_refused(override: str) -> None:
    with pytest.raises(ConfigError):
        load_config(None, [override])


def test_the_robust_recipe_pays_for_the_delivered_set_alone() -> None:
    seen = Outcome(trajectory_recall=1.0, trajectory_answer_recall=1.0, set_size=1, calls=dict.fromkeys("abcdef", 1))
    found = composite(seen, finished(curated="x"), ROBUST)
    assert found is not None
    assert found.total == pytest.approx(-0.45 / 30)


def test_the_robust_recipe_prefers_a_few_wrong_units_to_a_right_one_among_thirty() -> None:
    few = composite(Outcome(set_size=8), finished(curated="x"), ROBUST)
    hoard = composite(Outcome(set_size=30, recall=1.0, precision=1 / 30), finished(curated="x"), ROBUST)
    assert few is not None
    assert hoard is not None
    assert few.total == pytest.approx(-0.45 * 8 / 30)
    assert hoard.total == pytest.approx(3.0 * f_beta(1 / 30, 1.0, 1.0) - 0.45 * 29 / 30)
    assert few.total > hoard.total
