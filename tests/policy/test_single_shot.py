"""One search, and its ranking as it is."""

from __future__ import annotations

from harness1.config import AutoPopulate, Curation, Env, Search
from harness1.episodes.rollout import rollout
from harness1.policy.scripted import SingleShotPolicy
from harness1.records import Episode, Task
from tests.support import chunk, make_env, run

TASK = Task("t", "common words 3")
WORLD = [chunk(f"d{n:02}", f"common words {n}", f"T{n}") for n in range(40)]


def episode(env: Env, task: Task = TASK) -> Episode:
    return run(rollout(make_env(env, WORLD), SingleShotPolicy(), task))


def test_the_ranking_is_delivered_in_its_order() -> None:
    for populate in (True, False):
        made = episode(Env(auto_populate=AutoPopulate(on=populate), search=Search(hits=30)))
        ranking = made.turns[0].observation.rankings[0] if made.turns[0].observation else None
        assert ranking is not None
        assert [f"{entry.unit_id}#0" for entry in made.curated] == list(ranking.chunk_ids)
        assert len(made.curated) == 30
        assert [turn.action and turn.action.name for turn in made.turns] == ["search_corpus", "curate", "end_search"]


def test_a_smaller_set_holds_the_head_of_the_ranking() -> None:
    made = episode(Env(curation=Curation(cap=3), search=Search(hits=30)))
    assert [entry.unit_id for entry in made.curated] == ["d03", "d00", "d01"]


def test_tags_are_not_needed() -> None:
    made = episode(Env(curation=Curation(tags=False)))
    assert len(made.curated) == 10


def test_where_nothing_is_found_it_ends() -> None:
    made = episode(Env(), Task("t", "zzz"))
    assert len(made.turns) == 2
    assert made.curated == ()
