"""The scripted policy: what it asks, what it keeps, when it stops."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from harness1.config import AutoPopulate, Curation, Env, Search, load_config
from harness1.episodes.rollout import replay_episode, rollout
from harness1.errors import UsageError
from harness1.policy.registry import open_policy
from harness1.policy.scripted import (
    REPEATS,
    ROUNDS,
    RULES,
    RandomPolicy,
    RecordedPolicy,
    ReflexPolicy,
    ScriptedPolicy,
    SingleShotPolicy,
    claim,
)
from harness1.records import Chunk, Episode, Status, StopReason, Task
from harness1.runs.journal import EPISODES, EpisodeStore
from tests.support import CORPUS, END, Script, chunk, make_env, run, search, wide_corpus

ALL_OFF = " ".join(
    f"env.{name}.on=false"
    for name in ("fan_out", "grep", "read", "review", "verification", "dedup", "compression", "evidence", "history")
)
ALL_OFF += " env.budget_marker.on=false env.curation.tags=false env.guidance=none"
QUESTION = "Where did the father of Ada Lovelace die?"
FILLER = tuple(chunk(f"filler{number}", f"The father of somebody did die in town {number}.") for number in range(30))


def episode_of(policy: ScriptedPolicy, env: Env | None = None, question: str = QUESTION) -> Episode:
    return run(rollout(make_env(env, (*CORPUS, *FILLER)), policy, Task("t", question)))


def test_it_follows_names_from_one_document_to_the_next() -> None:
    episode = episode_of(ScriptedPolicy())
    curated = {entry.unit_id: entry.tag for entry in episode.curated}
    assert {"ada", "byron"} <= curated.keys()
    assert curated["byron"] in ("high", "very_high")
    assert episode.stop_reason is StopReason.END_SEARCH


def test_no_query_is_asked_twice_except_for_the_next_page_of_the_question() -> None:
    asked = []
    for turn in episode_of(ScriptedPolicy()).turns:
        asked += [turn.action.arguments.get("query"), *turn.action.arguments.get("queries", [])]
    assert asked[0] == QUESTION
    others = [query for query in asked if query not in (None, QUESTION)]
    assert len(others) == len(set(others))


@pytest.mark.parametrize("limit", [1, 15, 30])
def test_the_delivered_set_never_exceeds_its_limit(limit: int) -> None:
    assert 0 < len(episode_of(ScriptedPolicy(limit)).curated) <= limit


def test_only_verified_documents_are_called_very_high() -> None:
    episode = episode_of(ScriptedPolicy(), question="Ada Lovelace was the daughter of Lord Byron")
    verified = set()
    for turn in episode.turns:
        verified |= {verdict.unit_id for verdict in turn.observation.verdicts if verdict.label == "yes"}
    top = {entry.unit_id for entry in episode.curated if entry.tag == "very_high"}
    assert top
    assert top <= verified


@pytest.mark.parametrize(
    "setting",
    [
        "env.fan_out.on=false",
        "env.verification.on=false",
        "env.curation.tags=false",
        "env.compression.on=false",
        "env.rendering.order=epoch",
        "env.rendering.order=stable_first",
        "env.max_turns=4",
        "env.context_window=8192",
        "env.budget_marker.on=false",
        "env.evidence.on=false",
        "env.history.on=false",
        "env.dedup.on=false",
        "env.guidance=none",
        ALL_OFF,
    ],
)
def test_it_finds_the_same_chain_whatever_is_switched_off(setting: str) -> None:
    episode = episode_of(ScriptedPolicy(), load_config(None, ["env.auto_populate.on=false", *setting.split()]).env)
    # Without the evidence graph nothing tells which name to follow.
    wanted = {"ada"} if "max_turns" in setting or "evidence" in setting else {"ada", "byron"}
    assert wanted <= {entry.unit_id for entry in episode.curated}
    assert all(turn.observation and turn.observation.error is None for turn in episode.turns)


def test_an_empty_result_ends_the_search() -> None:
    episode = episode_of(ScriptedPolicy(), question="zzz")
    assert (episode.curated, episode.stop_reason) == ((), StopReason.END_SEARCH)
    short = load_config(None, ["env.max_turns=2", "env.auto_populate.on=false"]).env
    assert episode_of(ScriptedPolicy(), short).curated, "it delivers before the turns run out"


def test_a_claim_loses_its_question_words_only() -> None:
    assert claim("Which river runs through Paris?") == "river runs through Paris"
    assert claim("Aspirin inhibits platelets.") == "Aspirin inhibits platelets."


PLAIN = Env().switch(rank=False)


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


TASK = Task("t", "common words 3")
WORLD = [chunk(f"d{n:02}", f"common words {n}", f"T{n}") for n in range(40)]


def episode(env: Env, task: Task = TASK) -> Episode:
    return run(rollout(make_env(env, WORLD), SingleShotPolicy(), task))


def test_the_ranking_is_delivered_in_its_order() -> None:
    for populate in (True, False):
        made = episode(Env(search=Search(hits=30)).switch(auto_populate=populate))
        ranking = made.turns[0].observation.rankings[0] if made.turns[0].observation else None
        assert [f"{entry.unit_id}#0" for entry in made.curated] == list(ranking.chunk_ids)
        assert len(made.curated) == 30
        assert [turn.action and turn.action.name for turn in made.turns] == ["search_corpus", "curate", "end_search"]


def test_a_smaller_set_holds_the_head_of_the_ranking() -> None:
    made = episode(Env(curation=Curation(cap=3), search=Search(hits=30)))
    assert [entry.unit_id for entry in made.curated] == ["d03", "d00", "d01"]
    assert len(episode(Env().switch(tags=False)).curated) == 10
    nothing = episode(Env(), Task("t", "zzz"))
    assert (len(nothing.turns), nothing.curated) == (2, ())


WORLD_RANDOM_WALK = wide_corpus(30)
TASK_RANDOM_WALK = Task("t", "Which river castle did Ada see?")


def episode_random_walk(seed: int, env: Env | None = None, task: Task = TASK_RANDOM_WALK) -> Episode:
    return run(rollout(make_env(env, WORLD_RANDOM_WALK), RandomPolicy(), task, seed=seed))


@pytest.mark.parametrize("handles", [False, True])
def test_every_random_action_is_carried_out_and_names_handles(handles: bool) -> None:
    for seed in range(6):
        turns = episode_random_walk(seed, Env().switch(entity_handles=handles)).turns
        assert not [turn.action for turn in turns if turn.observation.error]
        assert ("E1" in str(turns[0].action)) == handles


def test_all_tools_are_used() -> None:
    names = {turn.action.name for seed in range(20) for turn in episode_random_walk(seed).turns if turn.action}
    assert names == {spec.name for spec in make_env().toolbox.specs}


def test_the_seed_and_the_task_decide() -> None:
    def actions(seed: int, task: Task = TASK_RANDOM_WALK) -> list[object]:
        return [turn.action for turn in episode_random_walk(seed, task=task).turns]

    assert actions(3) == actions(3)
    assert actions(3) != actions(4)
    assert actions(3) != actions(3, Task("u", TASK_RANDOM_WALK.query))


WORLD_DEGENERATE = wide_corpus(60)
QUERY = "Which river castle did Ada see ?"


def episode_degenerate(
    policy: str, query: str = QUERY, env: Env | None = None, chunks: list[Chunk] = WORLD_DEGENERATE
) -> Episode:
    return run(rollout(make_env(env, chunks), ReflexPolicy(policy), Task("t", query)))


def actions(found: Episode) -> list[str]:
    return [turn.action.name for turn in found.turns if turn.action is not None]


def populated(found: Episode) -> list[str]:
    """What the environment put into the set at the first search."""
    assert found.turns[0].observation.delta.auto_populated
    return list(found.turns[0].observation.delta.auto_populated)


def test_no_op_ends_with_nothing() -> None:
    found = episode_degenerate("no-op")
    assert (actions(found), found.curated, found.pool) == (["end_search"], (), ())


def test_stop_at_once_delivers_what_one_search_populated() -> None:
    found = episode_degenerate("stop-at-once")
    assert actions(found) == ["search_corpus", "end_search"]
    assert [entry.unit_id for entry in found.curated] == populated(found)


def test_the_repeater_asks_one_question() -> None:
    found = episode_degenerate("query-repeater", env=Env(auto_populate=AutoPopulate(by="first")))
    asked = [turn.action.arguments for turn in found.turns if turn.action and turn.action.name == "search_corpus"]
    assert asked == [{"query": QUERY}] * REPEATS
    assert [entry.unit_id for entry in found.curated] == populated(found)


def test_everything_is_curated_until_the_set_is_full() -> None:
    found = episode_degenerate("curate-everything")
    assert len(found.curated) == Env().curation.cap
    assert set(actions(found)) == {"search_corpus", "curate", "end_search"}
    small = episode_degenerate("curate-everything", env=Env(curation=Curation(cap=5)))
    assert len(small.curated) == 5
    few = [chunk(f"d{n}", f"The castle {n}") for n in range(11)]
    assert len(episode_degenerate("curate-everything", "castle", chunks=few).curated) == 11


def test_the_spammer_uses_every_tool_and_fills_the_set() -> None:
    found = episode_degenerate("tool-spammer", QUERY.removesuffix(" ?"))
    specs = [spec.name for spec in make_env().toolbox.specs if spec.name != "end_search"]
    assert actions(found) == specs * ROUNDS + ["end_search"]
    assert len(found.curated) > Env().auto_populate.documents


def test_the_inventor_delivers_nothing_without_a_hint() -> None:
    found = episode_degenerate("id-inventor")
    assert found.turns[0].observation.error is not None
    assert found.pool
    assert found.curated == ()


def test_the_inventor_takes_ids_that_stand_in_the_question() -> None:
    found = episode_degenerate(
        "id-inventor", "Where is the castle of doc_7?", chunks=[*WORLD_DEGENERATE, chunk("doc_70", "castle of doc_7")]
    )
    assert [entry.unit_id for entry in found.curated] in ([], ["doc_7"])
    shown = episode_degenerate(
        "id-inventor", "castle a7?", chunks=[chunk("a7", "A castle."), chunk("a77", "A castle, too.")]
    )
    assert [entry.unit_id for entry in shown.curated] == ["a7"]


@pytest.mark.parametrize("policy", [*RULES, "random"])
def test_all_live_with_few_tools_and_turns(policy: str) -> None:
    off = [f"env.{name}.on=false" for name in ("fan_out", "grep", "read", "review", "verification")]
    env = make_env(load_config(None, [*off, "env.max_turns=6"]).env, WORLD_DEGENERATE)
    found = run(rollout(env, open_policy(policy), Task("t", QUERY)))
    assert found.stop_reason in (StopReason.END_SEARCH, StopReason.TURN_LIMIT)
    assert set(actions(found)) <= {"search_corpus", "curate", "end_search"}


@pytest.mark.parametrize("policy", RULES)
def test_they_are_policies_by_name_and_do_the_same_again(policy: str) -> None:
    assert open_policy(policy, {}).name == policy
    assert [turn.memory_hash for turn in episode_degenerate(policy).turns] == [
        turn.memory_hash for turn in episode_degenerate(policy).turns
    ]
    assert len({ReflexPolicy(name).hash for name in RULES}) == len(RULES)


def recorded(*script: object) -> Episode:
    policy = Script(*script) if script else RandomPolicy()
    return run(rollout(make_env(None, WORLD_RANDOM_WALK), policy, TASK_RANDOM_WALK, seed=5))


def again(policy: RecordedPolicy, task: Task = TASK_RANDOM_WALK) -> Episode:
    return run(rollout(make_env(None, WORLD_RANDOM_WALK), policy, task, seed=9))


def test_the_same_actions_lead_to_the_same_turns() -> None:
    episode = recorded()
    assert again(RecordedPolicy([episode])).turns == episode.turns


def test_ignored_calls_and_parse_errors_are_repeated_too() -> None:
    episode = recorded([search("river"), END], "garbled")
    repeated = again(RecordedPolicy([episode]))
    assert repeated.turns == episode.turns
    assert repeated.status is Status.POLICY_ERROR


def test_where_the_record_ends_the_search_ends() -> None:
    episode = recorded(search("river"), search("war"), END)
    broken = msgspec.structs.replace(episode, turns=episode.turns[:1])
    assert again(RecordedPolicy([broken])).stop_reason is StopReason.END_SEARCH
    assert RecordedPolicy([broken]).hash != RecordedPolicy([episode]).hash
    with pytest.raises(UsageError, match="no recorded episode"):
        again(RecordedPolicy([episode]), Task("t", "Another question?"))


def test_a_run_is_read_from_its_folder_or_its_file(tmp_path: Path) -> None:
    with EpisodeStore(tmp_path) as store:
        store.append(recorded())
    for path in (tmp_path, tmp_path / EPISODES):
        policy = RecordedPolicy.load(path)
        assert policy.name == f"replay:{path}"
        assert policy.hash == RecordedPolicy([recorded()]).hash


@pytest.mark.parametrize("policy", ["random", "single-shot"])
@pytest.mark.parametrize("settings", [None, [], ["env.pruning.limits=[2000, 3000]"]])
def test_policies_play_inside_and_outside_of_the_harness(settings: list[str] | None, policy: str) -> None:
    env = Env() if settings is None else load_config("transcript", settings).env
    task = Task("t", "Which river castle stood beside the bridge of king Ada?")
    found = run(rollout(make_env(env, wide_corpus(60)), open_policy(policy, {}), task, seed=3))
    assert found.status is Status.COMPLETED
    assert found.curated or policy == "random"
    assert replay_episode(found, env).difference is None
