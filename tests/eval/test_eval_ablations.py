"""Ablations: a mechanism is truly gone, and nothing else."""

import re
from typing import Any

import msgspec
import pytest

from harness1.config import Rendering, load_config
from harness1.config.settings import differences
from harness1.errors import UsageError
from harness1.eval.ablations import ABLATIONS, ablate_config, conditions
from harness1.eval.evaluate import Evaluation
from tests.test_ablations import ABLATIONS as SWITCHES
from tests.test_ablations import played

TURNED = {
    "importance_tags": {"curation.eviction", "curation.tags"},
    "evidence": {"evidence.handles", "evidence.on"},
    "guidance": {"guidance"},
    "rank": {"evidence.rank"},
    "auto_populate_by_evidence": {"auto_populate.by"},
    "read_by_evidence": {"read.by"},
}
"""Settings that an ablation turns, where they are not the switch of its name."""
WAYS = ("env.evidence.handles=true", "env.evidence.rank=true", "env.leads.on=true", "env.auto_populate.by=evidence")
FULL = load_config(overrides=[*WAYS, "env.read.by=evidence"]).env
CONFIG = load_config()


@pytest.mark.parametrize("name", [name for name in ABLATIONS if name != "all_off"])
def test_an_ablation_turns_its_mechanism_off_and_nothing_else(name: str) -> None:
    changed = differences(*map(msgspec.to_builtins, (FULL, ABLATIONS[name](FULL))))
    assert {setting for setting, _, _ in changed} == TURNED.get(name, {f"{name}.on"})


@pytest.mark.parametrize("order", ["paper", "stable_first", "epoch"])
@pytest.mark.parametrize("instructions", ["full", "brief"])
def test_all_off_leaves_no_word_of_any_mechanism(order: Any, instructions: Any) -> None:
    rendering = Rendering(order=order, instructions=instructions)
    env, _, text = played(ABLATIONS["all_off"](msgspec.structs.replace(FULL, rendering=rendering)))
    assert [spec.name for spec in env.toolbox.specs] == ["search_corpus", "curate", "end_search"]
    assert [each.switch for each in SWITCHES if re.search(each.words, text)] == []
    ways = r"important|Bridge documents|follows the evidence|not found yet|\(E\d+[);]|\bE3\b"
    assert not re.search(ways, text)


def test_a_model_is_played_without_what_it_was_trained_with_and_what_is_off_already_is_not_played() -> None:
    assert ablate_config(CONFIG, "history").machine.model.foreign
    with pytest.raises(UsageError, match="unknown ablation 'hope'; choose from: all, importance_tags"):
        ablate_config(CONFIG, "hope")
    config = msgspec.structs.replace(CONFIG, env=ABLATIONS["dedup"](CONFIG.env))
    base = Evaluation("world:100", "train", [], "index", "scripted", config, seed=3)
    played = conditions(base, ("fan_out", "dedup"))
    assert ([*played], played["base"], played["fan_out"].seed) == (["base", "fan_out"], base, 3)
