"""A fork of any policy without a model decides as its original would, and neither disturbs the other."""

from __future__ import annotations

import pytest

from harness1.episodes.rollout import rollout
from harness1.policy.policy import Decision, Policy
from harness1.policy.registry import PLAIN, RULES, open_policy
from harness1.policy.scripted import RecordedPolicy
from harness1.records import DocId, Gold, Task
from tests.support import CORPUS, make_env, run

TASK = Task("t", "Where did the father of Ada Lovelace die?")
GOLDS = {"t": Gold({DocId("ada"): 1, DocId("byron"): 1})}
SPECS = (*PLAIN, *RULES, "oracle", "oracle-teacher", "lead-teacher", "mixed:0.5", "silent:scripted")


async def decisions(policy: Policy) -> tuple[list[Decision], list[Decision]]:
    """The decisions of a session, and what a fork of each moment decided at that moment."""
    env, session = make_env(None, CORPUS), policy.open(TASK, 0)
    context, own, forked = await env.reset(TASK), list[Decision](), list[Decision]()
    while context is not None and len(own) < 6:
        fork = session.fork()
        forked.append(await fork.act(context))
        await fork.act(context)
        own.append(await session.act(context))
        context = (await env.step(own[-1].actions)).context
    return own, forked


@pytest.mark.parametrize("spec", [*SPECS, "replay"])
def test_a_fork_goes_on_from_where_it_was(spec: str) -> None:
    policy = open_policy("scripted" if spec == "replay" else spec, GOLDS)
    if spec == "replay":
        policy = RecordedPolicy([run(rollout(make_env(None, CORPUS), policy, TASK))])
    own, forked = run(decisions(policy))
    assert own == forked
