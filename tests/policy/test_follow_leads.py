"""The policy that leaves judgement to the harness."""

from __future__ import annotations

from harness1.config import Env, Evidence
from harness1.episodes.rollout import replay_episode, rollout
from harness1.policy.registry import open_policy
from harness1.records import Episode, Status, Task
from tests.support import make_env, run

PLAIN = Env(evidence=Evidence(rank=False))


def played(config: Env) -> Episode:
    env = make_env(config)
    return run(rollout(env, open_policy("follow-leads"), Task("t", "Where did the father of Ada Lovelace die?")))


def test_it_searches_leads_and_delivers_the_evidence_order() -> None:
    episode = played(Env())
    assert episode.status is Status.COMPLETED
    searched = [ranking.query for seen in episode.observations for ranking in seen.rankings]
    assert {"Lord Byron", "Missolonghi"} <= set(searched)
    delivered = [entry.unit_id for entry in episode.curated]
    assert {"ada", "byron", "miss"} <= set(delivered[:4])
    assert replay_episode(episode, Env()).difference is None


def test_without_leads_and_order_it_ends_with_what_was_populated() -> None:
    episode = played(PLAIN)
    assert episode.status is Status.COMPLETED
    assert all(len(seen.rankings) <= 1 for seen in episode.observations)
    assert episode.curated
