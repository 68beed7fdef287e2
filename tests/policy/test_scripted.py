"""The scripted policy: what it asks, what it keeps, when it stops."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from harness1.config import AutoPopulate, Curation, Env, Search, load_config
from harness1.env.view import DocumentView, HitView, TurnView, View
from harness1.episodes.rollout import replay_episode, rollout
from harness1.errors import UsageError
from harness1.policy.policy import Decision, Policy
from harness1.policy.registry import open_policy
from harness1.policy.scripted import (
    POLICIES,
    REPEATS,
    ROUNDS,
    UNTHINKING,
    RandomPolicy,
    RecordedPolicy,
    ScriptedPolicy,
    claim,
)
from harness1.records import Chunk, DocId, Episode, Gold, Status, StopReason, Task, UnitId
from harness1.runs.journal import EPISODES, EpisodeStore
from tests.support import CORPUS, END, Script, chunk, make_env, run, search, wide_corpus

OFF = ("fan_out", "grep", "read", "review", "verification", "dedup", "compression", "evidence", "history")
ALL_OFF = " ".join(f"env.{name}.on=false" for name in (*OFF, "budget_marker")) + " env.curation.tags=false"
SETTINGS = (
    *(f"env.{name}.on=false" for name in ("fan_out", "verification", "compression", "budget_marker", *OFF[5:])),
    *("env.curation.tags=false", "env.rendering.order=epoch", "env.rendering.order=stable_first"),
    *("env.max_turns=4", "env.context_window=8192", "env.guidance=none", ALL_OFF),
)
QUESTION = "Where did the father of Ada Lovelace die?"
FILLER = tuple(chunk(f"filler{number}", f"The father of somebody did die in town {number}.") for number in range(30))


def episode_of(policy: ScriptedPolicy, env: Env | None = None, question: str = QUESTION) -> Episode:
    return run(rollout(make_env(env, (*CORPUS, *FILLER)), policy, Task("t", question)))


def test_it_follows_names_from_one_document_to_the_next_and_asks_nothing_else_twice() -> None:
    episode = episode_of(ScriptedPolicy())
    curated = {entry.unit_id: entry.tag for entry in episode.curated}
    assert {"ada", "byron"} <= curated.keys()
    assert curated["ada"] in ("high", "very_high")
    assert curated["byron"] == "fair", "nothing in it says that it is asked for"
    assert episode.stop_reason is StopReason.END_SEARCH
    calls = [turn.action.arguments for turn in episode.turns]
    asked = [query for call in calls for query in (*call.get("queries", []), call.get("query")) if query]
    others = [query for query in asked if query != QUESTION]
    assert asked[0] == QUESTION
    assert len(others) == len(set(others))


def test_only_verified_documents_are_called_very_high_and_the_set_never_exceeds_its_limit() -> None:
    episode = episode_of(ScriptedPolicy(), question="Ada Lovelace was the daughter of Lord Byron")
    verdicts = [verdict for turn in episode.turns for verdict in turn.observation.verdicts]
    top = {entry.unit_id for entry in episode.curated if entry.tag == "very_high"}
    assert set() < top <= {verdict.unit_id for verdict in verdicts if verdict.label == "yes"}
    for limit in (1, 15, 30):
        assert 0 < len(episode_of(ScriptedPolicy(limit)).curated) <= limit


LEASE = "What is the notice period of the lease in Saint-Nazaire?"
LEASES = (
    chunk("lease", "The lease in Saint-Nazaire has a notice period of six months.", "Storage"),
    chunk("copy", "The lease in Saint-Nazaire has a notice period of six months.", "Copy of storage"),
    chunk("later", "The lease in Saint-Nazaire has a notice period of nine months.", "Storage"),
    *(chunk(f"port{n}", f"Saint-Nazaire is a port; the lease of notice {n} is in Saint-Nazaire.") for n in range(12)),
)


def seen(*turns: list[str], ranked: tuple[str, ...]) -> Any:
    """A context after searches that found these documents."""
    view = View(query="Which river?", ranked=ranked, turns={at: TurnView(at, "t") for at in range(1, len(turns) + 1)})
    for at, handles in enumerate(turns, 1):
        documents = {handle: DocumentView(handle, UnitId(handle), "", f"Text {handle}") for handle in handles}
        view.documents |= documents
        view.hits[at] = [HitView(at, each) for each in documents.values()]
    return SimpleNamespace(view=view, tools=make_env().toolbox.specs)


def test_what_the_question_found_first_stays_first_whatever_the_leads_bring() -> None:
    first, leads = ["D1", "D2"], ["D9", "D8", "D7"]
    session, later = ScriptedPolicy().open(Task("t", ""), 0), ("D9", "D8", "D7", "D2", "D1")
    contexts = [seen(ranked=()), seen(first, ranked=("D2", "D1")), *[seen(first, leads, ranked=later)] * 9]
    actions = [run(session.act(context)).actions[0] for context in contexts]
    curated = next(action for action in actions if action.name == "curate")
    assert curated.arguments["add_ids"] == ["D2", "D9", "D1", "D8", "D7"]


def test_a_near_copy_under_another_title_is_delivered_once_and_another_number_is_no_copy() -> None:
    episode = run(rollout(make_env(chunks=LEASES), ScriptedPolicy(), Task("t", LEASE)))
    delivered = [place.unit_id for place in episode.curated]
    assert len({"lease", "copy"}.intersection(delivered)) == 1
    assert "later" in delivered


def test_nothing_is_called_important_where_no_document_has_what_is_asked() -> None:
    episode = episode_of(ScriptedPolicy(), question="Which town won the national handball league for women in spring?")
    assert {place.tag for place in episode.curated} == {"fair"}


@pytest.mark.parametrize("setting", SETTINGS)
def test_it_finds_the_same_chain_whatever_is_switched_off(setting: str) -> None:
    episode = episode_of(ScriptedPolicy(), load_config(None, ["env.auto_populate.on=false", *setting.split()]).env)
    # Without the evidence graph nothing tells which name to follow.
    wanted = {"ada"} if "max_turns" in setting or "evidence" in setting else {"ada", "byron"}
    assert wanted <= {entry.unit_id for entry in episode.curated}
    assert all(turn.observation and turn.observation.error is None for turn in episode.turns)


def test_an_empty_result_ends_the_search_and_a_claim_loses_its_question_words_only() -> None:
    episode = episode_of(ScriptedPolicy(), question="zzz")
    assert (episode.curated, episode.stop_reason) == ((), StopReason.END_SEARCH)
    short = load_config(None, ["env.max_turns=2", "env.auto_populate.on=false"]).env
    assert episode_of(ScriptedPolicy(), short).curated, "it delivers before the turns run out"
    assert claim("Which river runs through Paris?") == "river runs through Paris"
    assert claim("Aspirin inhibits platelets.") == "Aspirin inhibits platelets."


def played(config: Env) -> Episode:
    episode = run(rollout(make_env(config), open_policy("follow-leads"), Task("t", QUESTION)))
    assert episode.status is Status.COMPLETED
    return episode


def test_it_searches_leads_and_delivers_the_evidence_order_or_else_what_was_populated() -> None:
    episode = played(Env())
    searched = [ranking.query for seen in episode.observations for ranking in seen.rankings]
    assert {"Lord Byron", "Missolonghi"} <= set(searched)
    assert {"ada", "byron", "miss"} <= {entry.unit_id for entry in episode.curated[:4]}
    assert replay_episode(episode, Env()).difference is None
    plain = played(Env().switch(rank=False))
    assert all(len(seen.rankings) <= 1 for seen in plain.observations)
    assert plain.curated


TASK = Task("t", "common words 3")
WORLD = [chunk(f"d{n:02}", f"common words {n}", f"T{n}") for n in range(40)]


def episode(env: Env, task: Task = TASK) -> Episode:
    return run(rollout(make_env(env, WORLD), open_policy("single-shot"), task))


def test_the_ranking_is_delivered_in_its_order_or_the_head_of_it() -> None:
    for populate in (True, False):
        made = episode(Env(search=Search(hits=30)).switch(auto_populate=populate))
        (ranking,) = made.turns[0].observation.rankings
        assert [f"{entry.unit_id}#0" for entry in made.curated] == list(ranking.chunk_ids)
        assert len(made.curated) == 30
        assert actions(made) == ["search_corpus", "curate", "end_search"]
    made = episode(Env(curation=Curation(cap=3), search=Search(hits=30)))
    assert [entry.unit_id for entry in made.curated] == ["d03", "d00", "d01"]
    assert len(episode(Env().switch(tags=False)).curated) == 10
    nothing = episode(Env(), Task("t", "zzz"))
    assert (len(nothing.turns), nothing.curated) == (2, ())


WORLD_WALK = wide_corpus(30)
TASK_WALK = Task("t", "Which river castle did Ada see?")


def walk(seed: int, env: Env | None = None, task: Task = TASK_WALK) -> Episode:
    return run(rollout(make_env(env, WORLD_WALK), RandomPolicy(), task, seed=seed))


def test_every_random_action_is_carried_out_and_names_handles_and_the_seed_and_the_task_decide() -> None:
    for handles in (False, True):
        for seed in range(6):
            turns = walk(seed, Env().switch(entity_handles=handles)).turns
            assert not [turn.action for turn in turns if turn.observation.error]
            assert ("E1" in str(turns[0].action)) == handles
    used = {name for seed in range(20) for name in actions(walk(seed))}
    assert used == {spec.name for spec in make_env().toolbox.specs}
    other = walk(3, task=Task("u", TASK_WALK.query))
    same, again, *others = ([turn.action for turn in each.turns] for each in (walk(3), walk(3), walk(4), other))
    assert same == again
    assert same not in others


WIDE = wide_corpus(60)
QUERY = "Which river castle did Ada see ?"


def reflex(policy: str, query: str = QUERY, env: Env | None = None, chunks: list[Chunk] = WIDE) -> Episode:
    return run(rollout(make_env(env, chunks), open_policy(policy), Task("t", query)))


def actions(found: Episode) -> list[str]:
    return [turn.action.name for turn in found.turns if turn.action is not None]


def populated(found: Episode) -> list[str]:
    """What the environment put into the set at the first search."""
    return list(found.turns[0].observation.delta.auto_populated) or ["nothing"]


def test_no_op_ends_with_nothing_and_stop_at_once_with_what_one_search_populated() -> None:
    found = reflex("no-op")
    assert (actions(found), found.curated, found.pool) == (["end_search"], (), ())
    found = reflex("stop-at-once")
    assert actions(found) == ["search_corpus", "end_search"]
    assert [entry.unit_id for entry in found.curated] == populated(found)


def test_the_repeater_asks_one_question_and_the_spammer_uses_every_tool_and_fills_the_set() -> None:
    found = reflex("query-repeater", env=Env(auto_populate=AutoPopulate(by="first")))
    asked = [turn.action.arguments for turn in found.turns if turn.action and turn.action.name == "search_corpus"]
    assert asked == [{"query": QUERY}] * REPEATS
    assert [entry.unit_id for entry in found.curated] == populated(found)
    found = reflex("tool-spammer", QUERY.removesuffix(" ?"))
    specs = [spec.name for spec in make_env().toolbox.specs if spec.name != "end_search"]
    assert actions(found) == specs * ROUNDS + ["end_search"]
    assert len(found.curated) > Env().auto_populate.documents


def test_everything_is_curated_until_the_set_is_full() -> None:
    found = reflex("curate-everything")
    assert len(found.curated) == Env().curation.cap
    assert set(actions(found)) == {"search_corpus", "curate", "end_search"}
    assert len(reflex("curate-everything", env=Env(curation=Curation(cap=5))).curated) == 5
    few = [chunk(f"d{n}", f"The castle {n}") for n in range(11)]
    assert len(reflex("curate-everything", "castle", chunks=few).curated) == 11


def test_the_inventor_delivers_only_ids_that_stand_in_the_question() -> None:
    found = reflex("id-inventor")
    assert found.turns[0].observation.error is not None
    assert found.pool
    assert found.curated == ()
    chunks = [*WIDE, chunk("doc_70", "castle of doc_7")]
    found = reflex("id-inventor", "Where is the castle of doc_7?", chunks=chunks)
    assert [entry.unit_id for entry in found.curated] in ([], ["doc_7"])
    chunks = [chunk("a7", "A castle."), chunk("a77", "A castle, too.")]
    assert [entry.unit_id for entry in reflex("id-inventor", "castle a7?", chunks=chunks).curated] == ["a7"]


@pytest.mark.parametrize("policy", [*UNTHINKING, "random"])
def test_all_live_with_few_tools_and_turns_and_do_the_same_again(policy: str) -> None:
    off = [f"env.{name}.on=false" for name in ("fan_out", "grep", "read", "review", "verification")]
    env = load_config(None, [*off, "env.max_turns=6"]).env
    found, again = (reflex(policy, env=env) for _ in range(2))
    assert found.stop_reason in (StopReason.END_SEARCH, StopReason.TURN_LIMIT)
    assert set(actions(found)) <= {"search_corpus", "curate", "end_search"}
    assert found.turns == again.turns
    assert open_policy(policy).name == policy
    assert len({open_policy(name).hash for name in POLICIES}) == len(POLICIES)


def recorded(*script: object) -> Episode:
    policy = Script(*script) if script else RandomPolicy()
    return run(rollout(make_env(None, WORLD_WALK), policy, TASK_WALK, seed=5))


def again(policy: RecordedPolicy, task: Task = TASK_WALK) -> Episode:
    return run(rollout(make_env(None, WORLD_WALK), policy, task, seed=9))


def test_the_same_actions_ignored_calls_and_parse_errors_lead_to_the_same_turns() -> None:
    for episode in (recorded(), recorded([search("river"), END], "garbled")):
        repeated = again(RecordedPolicy([episode]))
        assert (repeated.turns, repeated.status) == (episode.turns, episode.status)


def test_where_the_record_ends_the_search_ends_and_a_run_is_read_from_its_folder_or_its_file(tmp_path: Path) -> None:
    episode = recorded(search("river"), search("war"), END)
    broken = msgspec.structs.replace(episode, turns=episode.turns[:1])
    assert again(RecordedPolicy([broken])).stop_reason is StopReason.END_SEARCH
    assert RecordedPolicy([broken]).hash != RecordedPolicy([episode]).hash
    with pytest.raises(UsageError, match="no recorded episode"):
        again(RecordedPolicy([episode]), Task("t", "Another question?"))
    with EpisodeStore(tmp_path) as store:
        store.append(episode)
    for path in (tmp_path, tmp_path / EPISODES):
        policy = RecordedPolicy.load(path)
        assert (policy.name, policy.hash) == (f"replay:{path}", RecordedPolicy([episode]).hash)


@pytest.mark.parametrize("policy", ["random", "single-shot"])
@pytest.mark.parametrize("settings", [None, [], ["env.pruning.limits=[2000, 3000]"]])
def test_policies_play_inside_and_outside_of_the_harness(settings: list[str] | None, policy: str) -> None:
    env = Env() if settings is None else load_config("transcript", settings).env
    task = Task("t", "Which river castle stood beside the bridge of king Ada?")
    found = run(rollout(make_env(env, wide_corpus(60)), open_policy(policy, {}), task, seed=3))
    assert found.status is Status.COMPLETED
    assert found.curated or policy == "random"
    assert replay_episode(found, env).difference is None


FORKED = Task("t", "Where did the father of Ada Lovelace die?")
GOLDS = {"t": Gold({DocId("ada"): 1, DocId("byron"): 1})}
SPECS = (*POLICIES, "oracle", "oracle-teacher", "lead-teacher", "mixed:0.5", "silent:scripted")


async def decisions(policy: Policy) -> tuple[list[Decision], list[Decision]]:
    """The decisions of a session, and what a fork of each moment decided at that moment."""
    env, session = make_env(None, CORPUS), policy.open(FORKED, 0)
    context, own, forked = await env.reset(FORKED), list[Decision](), list[Decision]()
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
        policy = RecordedPolicy([run(rollout(make_env(None, CORPUS), policy, FORKED))])
    own, forked = run(decisions(policy))
    assert own == forked
