"""Turning a mechanism off removes it everywhere at once: prompt, schemas, memory and every rendered context."""

import re
from dataclasses import dataclass

import msgspec
import pytest

from harness1.config import Env, load_config
from harness1.env.environment import SearchEnv, Step
from tests.support import CORPUS, WordRetriever, call, chunk, curate, make_env, play, search, text_of, wide_corpus

COPY = "The river castle stood beside the old bridge for centuries, people say in town."
LONG = " ".join(f"The castle of Number{n} is by the river." for n in range(9))
WORLD = [*CORPUS, *wide_corpus(30), chunk("c1", COPY, "Copy"), chunk("c2", COPY, "Copy")]
PLAN = (
    call("fan_out_search", queries=["river castle", "old bridge people"]),
    search("Ada Byron"),
    call("grep_corpus", pattern="Missolonghi"),
    call("read_document", doc_id="D2"),
    call("review_docs", doc_ids=["D1"]),
    curate(add_ids=["D5"], remove_ids=["D1"]),
    curate(add_ids=["D5", "D6"], importance={"D5": "high"}),
    call("verify", doc_ids=["D1"], claim="The river castle fell."),
    search("London"),
    search("Paris"),
    search("king"),
    search("rain"),
    search("war"),
    search("poet"),
)


@dataclass(frozen=True)
class Ablation:
    """A switch, and the words that only the mechanism behind it may cause in anything a policy reads."""

    switch: str
    words: str
    value: str = "false"

    @property
    def env(self) -> Env:
        return load_config(None, [f"env.{self.switch}={self.value}"]).env


ABLATIONS = (
    Ablation("fan_out.on", r"fan_out|fan-out|\bq1\b"),
    Ablation("grep.on", r"grep"),
    Ablation("read.on", r"read_document|more parts"),
    Ablation("review.on", r"review_docs"),
    Ablation("verification.on", r"(?i)verif"),
    Ablation("curation.tags", r"very_high|\bfair\b|\blow\b|(?i:\btags?\b)|re-tag|importan"),
    Ablation("auto_populate.on", r"curated for you|were curated|first search|stay curated|curated now"),
    Ablation("auto_populate.by", r"stay curated|curated now", "first"),
    Ablation("dedup.on", r"(?i)duplicate|copies|also: "),
    Ablation("compression.on", r"sentences nearest"),
    Ablation("evidence.on", r"(?i)shared entit"),
    Ablation("evidence.rank", r"By evidence|by evidence|with more evidence"),
    Ablation("leads.on", r"Search next"),
    Ablation("read.by", r"nearest to the question", "order"),
    Ablation("history.on", r"History"),
    Ablation("budget_marker.on", r"Budget|budget"),
    Ablation("guidance", r"Returned \d|The curated set is empty|so far", "none"),
)


def everything(env: SearchEnv, steps: list[Step]) -> str:
    """All that a policy ever reads: schemas, and every piece but its own output and the echo of an unknown tool."""
    pieces = {each.key: each for step in steps if step.context for each in step.context.pieces}
    texts = [each.text for each in pieces.values() if each.turn_ref is None]
    known = [text for text in texts if "there is no tool" not in text and "Not executed: Object contains" not in text]
    specs = msgspec.json.encode(env.toolbox.specs).decode()
    lines = [line for text in known for line in text.splitlines() if not re.match(r"T\d+ ", line)]
    return "\n".join([specs, *lines])


def played(config: Env) -> tuple[SearchEnv, list[Step], str]:
    env = make_env(config, retriever=WordRetriever(WORLD))
    steps = play(env, *PLAN)
    return env, steps, everything(env, steps)


FULL = played(Env())


@pytest.mark.parametrize("ablation", ABLATIONS, ids=lambda ablation: ablation.switch)
def test_a_mechanism_that_is_off_is_nowhere_to_be_read(ablation: Ablation) -> None:
    env, _, text = played(ablation.env)
    assert re.search(ablation.words, FULL[2])
    assert not re.search(ablation.words, text)
    assert env.hash != FULL[0].hash


@pytest.mark.parametrize("ablation", ABLATIONS, ids=lambda ablation: ablation.switch)
def test_the_other_mechanisms_stay(ablation: Ablation) -> None:
    _, _, text = played(ablation.env)
    ranked = {"evidence.rank", "leads.on", "auto_populate.by"}
    coupled = {
        "fan_out.on": {"dedup.on"},
        "read.on": {"read.by"},
        "auto_populate.on": {"auto_populate.by"},
        "evidence.on": ranked,
        "evidence.rank": ranked,
    }
    for other in ABLATIONS:
        if other is not ablation and other.switch not in coupled.get(ablation.switch, set()):
            assert re.search(other.words, text), other.switch


def test_all_off_is_a_searcher_with_a_set() -> None:
    env = make_env(Env(guidance="none", mechanisms=()), WORLD)
    steps = play(env, *PLAN)
    assert [spec.name for spec in env.toolbox.specs] == ["search_corpus", "curate", "end_search"]
    text = everything(env, steps)
    for ablation in ABLATIONS:
        assert not re.search(ablation.words, text), ablation.switch


def test_configurations_do_not_meet_in_one_process() -> None:
    envs = [make_env(ablation.env, WORLD) for ablation in ABLATIONS]
    assert len({env.hash for env in envs}) == len(ABLATIONS)
    interleaved = [play(env, search("river castle")) for env in envs for _ in range(2)]
    for ablation, steps in zip(ABLATIONS, interleaved[::2], strict=True):
        alone = play(make_env(ablation.env, WORLD), search("river castle"))
        assert text_of(alone[0].context) == text_of(steps[0].context)
