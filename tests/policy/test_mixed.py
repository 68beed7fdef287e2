"""Policies made of policies: turns by shares, and decisions without reasons."""

from __future__ import annotations

import pytest

from harness1.env.render import Context
from harness1.episodes.rollout import rollout
from harness1.errors import UsageError
from harness1.policy.policy import Decision
from harness1.policy.registry import check_policy, open_policy
from harness1.policy.wrappers import MixedPolicy, SilentPolicy
from harness1.records import DocId, Episode, Gold, Task, ToolCall
from tests.support import END, Script, make_env, run, search

TASK = Task("t", "Where did the father of Ada Lovelace die?")
GOLDS = {"t": Gold({DocId("byron"): 1})}


class Always:
    """A policy that takes one action for ever, and counts how often it was asked."""

    def __init__(self, action: ToolCall) -> None:
        self.action, self.asked = action, 0
        self.name = self.hash = str(action)

    def open(self, task: Task, seed: int) -> Always:
        return self

    async def act(self, context: Context) -> Decision:
        self.asked += 1
        return Decision((self.action,), "because")

    def fork(self) -> Always:
        return self


def played(shares: tuple[float, float], seed: int = 0) -> tuple[Episode, Always, Always]:
    good, bad = Always(search("Ada")), Always(search("rain"))
    episode = run(rollout(make_env(), MixedPolicy((good, bad), shares), TASK, seed=seed))
    return episode, good, bad


def test_turns_are_shared_out_and_only_who_takes_one_is_asked() -> None:
    episode, good, bad = played((3, 1))
    assert good.asked + bad.asked == len(episode.turns) == 40
    assert 22 <= good.asked <= 37


def test_a_share_of_0_is_never_asked() -> None:
    _, good, bad = played((1, 0))
    assert (good.asked, bad.asked) == (40, 0)


def test_the_seed_decides_who_is_next() -> None:
    actions = [[turn.action for turn in played((1, 1), seed)[0].turns] for seed in (0, 0, 1)]
    assert actions[0] == actions[1] != actions[2]


@pytest.mark.parametrize("shares", [(1.0,), (1.0, -1.0), (0.0, 0.0)])
def test_shares_that_are_none_are_refused(shares: tuple[float, ...]) -> None:
    with pytest.raises(UsageError, match="shares"):
        MixedPolicy((Script(END), Script(END)), shares)


def test_policies_and_shares_are_in_the_hash() -> None:
    hashes = {
        open_policy(spec, GOLDS).hash for spec in ("mixed:0.5", "mixed:0.6", "silent:mixed:0.6", "oracle-teacher")
    }
    assert len(hashes) == 4


def test_a_silent_policy_gives_no_reasons_and_does_the_same() -> None:
    script = Script(search("Ada"), ToolCall("end_search", {"reasoning": "All is found."}))
    spoken, silent = (run(rollout(make_env(), each, TASK)) for each in (script, SilentPolicy(script)))
    assert [turn.observation for turn in silent.turns] == [turn.observation for turn in spoken.turns]
    assert {turn.reasoning for turn in silent.turns} == {""}
    assert silent.turns[-1].action == ToolCall("end_search")


@pytest.mark.parametrize(
    "spec",
    [
        "mixed:",
        "mixed:2",
        "mixed:x",
        "mixed:nan",
        "silent:",
        "silent:silent:random",
        "silent:hf:x",
    ],
)
def test_names_of_nothing_are_refused(spec: str) -> None:
    with pytest.raises(UsageError, match="there is no policy"):
        check_policy(spec)
