"""The harness without a working memory: a transcript that only grows, and that the policy prunes."""

from __future__ import annotations

from itertools import pairwise

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from harness1.config import Env, load_config
from harness1.env.view import HitView
from harness1.episodes.rollout import replay_episode, rollout
from harness1.policy.registry import open_policy
from harness1.records import Task, ToolCall
from tests.support import END, Script, call, curate, make_env, play, recount, run, search, text_of, wide_corpus

CONFIG = "transcript"
ENV = load_config(CONFIG).env
WORLD = wide_corpus(60)
QUERIES = ("river castle", "bridge king", "Paris London", "Rome Ada", "engine program", "poet town", "war rain")


def pruning(tokens: int, refusal: int) -> Env:
    pruning = msgspec.structs.replace(ENV.pruning, limits=(tokens, refusal))
    return msgspec.structs.replace(ENV, pruning=pruning)


def test_a_prompt_is_the_one_before_and_what_came_since_and_the_view_tells_the_set_from_the_turns() -> None:
    edits = (
        curate(add_ids=["D1", "D2", "D3"], importance={"D1": "high"}),
        curate(remove_ids=["D2"], importance={"D3": "very_high"}),
    )
    steps = play(make_env(ENV, WORLD), search("river castle"), *edits, call("read_document", doc_id="D2"))
    for before, after in pairwise(step.context for step in steps):
        assert after.pieces[: len(before.pieces)] == before.pieces
        assert after.fresh < after.budget.used
    assert "Pool:" not in text_of(steps[-1].context)
    view = steps[-1].context.view
    assert {entry.handle: entry.tag for entry in view.curated} == {"D1": "high", "D3": "very_high"}
    assert all(entry.unit_id for entry in view.curated)
    assert view.cap == 30


def test_what_is_pruned_leaves_the_context_alone_and_can_be_read_again_and_pruning_nothing_is_told() -> None:
    env = make_env(ENV, WORLD)
    again = curate(add_ids=["D1"]), call("read_document", doc_id="D1")
    before, after, _, last = play(env, search("river castle"), call("prune_chunks", doc_ids=["D1", "D2"]), *again)
    lost = set(before.context.pieces) - set(after.context.pieces)
    assert {each.shows.document.handle for each in lost if isinstance(each.shows, HitView)} == {"D1", "D2"}
    assert len(lost) == 2
    assert "Pruned: D1, D2." in text_of(after.context)
    assert after.context.budget.used < before.context.budget.used
    assert {"D1", "D2"}.isdisjoint(after.context.view.documents)
    assert {"D1", "D2"} <= {entry.handle for entry in env.state.memory.pool.entries.values()}
    assert "D1" in last.context.view.documents
    assert [entry.handle for entry in last.context.view.curated] == ["D1"]
    for doc_ids, words in (([], "name documents to prune"), (["D99"], "Unknown: D99")):
        _, step = play(make_env(ENV, WORLD), search("river castle"), call("prune_chunks", doc_ids=doc_ids))
        assert words in text_of(step.context)


def test_over_the_threshold_every_observation_asks_to_prune_and_observations_are_bounded() -> None:
    small, large = (play(make_env(pruning(tokens, 24326), WORLD), search("river castle"))[0] for tokens in (20000, 900))
    assert "Prune what is useless" not in text_of(small.context)
    assert "Prune what is useless" in text_of(large.context)
    assert (ENV.observation_limit(9000), Env().observation_limit(9000)) == (4096, 9000)


def test_a_crowded_transcript_takes_only_what_frees_delivers_or_ends() -> None:
    env = make_env(pruning(1600, 2000), WORLD)
    prune = call("prune_chunks", doc_ids=[f"D{number}" for number in range(1, 30)])
    keep = curate(add_ids=["D1"])
    first, refused, kept, pruned, searched = play(
        env, search("river castle"), search("bridge king"), keep, prune, search("Paris London")
    )
    assert play(make_env(env.config, WORLD), search("river castle"), END)[-1].done == "end_search"
    assert first.context.budget.used > 2000
    assert refused.observation.error.code == "crowded"
    assert kept.observation.delta.added
    assert pruned.context.budget.used <= 2000
    assert searched.observation.hits


ACTIONS = st.one_of(
    st.sampled_from(QUERIES).map(search),
    st.lists(st.integers(1, 40), max_size=8).map(lambda ids: call("prune_chunks", doc_ids=[f"D{n}" for n in ids])),
    st.lists(st.integers(1, 12), max_size=4).map(lambda ids: curate(add_ids=[f"D{n}" for n in ids])),
    st.integers(1, 20).map(lambda number: call("read_document", doc_id=f"D{number}")),
)


@settings(max_examples=40, deadline=None)
@given(st.lists(ACTIONS, max_size=10), st.integers(1400, 6000))
def test_every_episode_is_counted_and_replayed(actions: list[ToolCall], refusal: int) -> None:
    config = pruning(refusal // 2, refusal)
    env = make_env(config, WORLD)
    steps = play(env, *actions)
    for step in steps:
        if step.context:
            # The room of the budget line is reserved at its longest.
            assert recount(env, step.context) <= step.context.budget.used
            assert 0 < step.context.fresh <= step.context.budget.used
    episode = run(rollout(make_env(config, WORLD), Script(*actions), Task("t", "Where did the father of Ada die?")))
    assert replay_episode(episode, config).difference is None


def test_the_script_prunes_and_goes_on() -> None:
    task = Task("t", "Which river castle stood beside the bridge of king Ada?")
    episode = run(rollout(make_env(pruning(2600, 6000), WORLD), open_policy("scripted:3", {}), task))
    tools = [turn.action.name for turn in episode.turns if turn.action]
    assert {"search_corpus", "fan_out_search"} & {*tools[tools.index("prune_chunks") :]}
