"""The one loop: every end has its status, faults belong to the infrastructure, equal seeds give equal episodes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from harness1.config import Compression, Curation, Env, Evidence, Machine, Read, Rendering, Search
from harness1.env.environment import SearchEnv, Step
from harness1.env.pieces import ApproximateCounter
from harness1.env.render import Context
from harness1.env.verifiers import LexicalVerifier
from harness1.episodes.rollout import ReplayReport, replay_env, replay_episode, replay_live, rollout
from harness1.errors import ConfigError
from harness1.policy.policy import Decision
from harness1.policy.scripted import RandomPolicy
from harness1.records import (
    Chunk,
    ChunkId,
    DocId,
    Episode,
    Hit,
    ModelCall,
    Note,
    Observation,
    Status,
    StopReason,
    Task,
    Turn,
    decode_episode,
    encode_episode,
)
from tests.support import (
    CORPUS,
    END,
    QUICK,
    Script,
    WordRetriever,
    call,
    chunk,
    curate,
    make_env,
    run,
    search,
    wide_corpus,
)

TASK = Task("t", "Where did the father of Ada Lovelace die?")


def play_script(*actions: Any, env: SearchEnv | None = None, **options: Any) -> Episode:
    return run(rollout(env or make_env(), Script(*actions), TASK, **options))


def ended(episode: Episode) -> tuple[StopReason, Status]:
    return episode.stop_reason, episode.status


def test_a_whole_episode_is_recorded() -> None:
    episode = play_script(
        search("Ada Byron"), curate(add_ids=["D3"], importance={"D3": "high"}), END, sample_idx=2, group_id="g"
    )
    assert ended(episode) == (StopReason.END_SEARCH, Status.COMPLETED)
    assert [turn.index for turn in episode.turns] == [1, 2, 3]
    assert [(entry.unit_id, entry.tag, entry.rank) for entry in episode.curated] == [
        ("byron", "high", 1),
        ("ada", "fair", 2),
        ("babbage", "fair", 3),
    ]
    assert episode.pool == ("ada", "babbage", "byron")
    assert (episode.sample_idx, episode.group_id, episode.error, episode.reward) == (2, "g", None, None)
    assert (episode.hashes.env, episode.hashes.index) == (make_env().hash, "word-index")
    assert all(turn.memory_hash and turn.context_hash and turn.reasoning for turn in episode.turns)
    assert {"policy", "environment"} <= episode.stage_ms.keys()


def test_the_turn_limit_ends_a_complete_episode() -> None:
    episode = play_script(*[search("Ada")] * 5, env=make_env(Env(max_turns=3)))
    assert ended(episode) == (StopReason.TURN_LIMIT, Status.COMPLETED)
    assert len(episode.turns) == 3
    assert episode.curated


def test_a_context_that_does_not_fit_truncates() -> None:
    env = make_env(Env(context_window=2050, generation_reserve=300))
    huge = call("unknown", text="x" * 20_000)
    assert ended(play_script(huge, env=env)) == (StopReason.CONTEXT_LIMIT, Status.TRUNCATED)


@pytest.mark.parametrize("failure", ["no call found", [], "lone \ud800 surrogate"])
def test_an_answer_without_an_action_is_the_policys_error(failure: Any) -> None:
    episode = play_script(search("Ada"), failure)
    assert ended(episode) == (StopReason.FORMAT_LIMIT, Status.POLICY_ERROR)
    last = episode.turns[-1]
    assert (last.index, last.action, last.observation) == (2, None, None)
    assert last.parse_error
    assert last.memory_hash == episode.turns[0].memory_hash
    assert msgspec.json.decode(encode_episode(episode), type=Episode) == episode


def test_a_fault_that_stays_breaks_the_episode_and_is_never_an_empty_result() -> None:
    retriever = WordRetriever(CORPUS)
    seen: list[Step] = []

    def watch(step: Step) -> None:
        seen.append(step)
        retriever.faults = 3

    episode = play_script(search("Ada"), search("Byron"), END, env=make_env(retriever=retriever), on_step=watch)
    assert ended(episode) == (StopReason.FAULT, Status.INFRA_ERROR)
    assert episode.error == "down (3 attempts)"
    assert episode.reward is None
    assert len(episode.turns) == len(seen) == 1
    assert b"nothing_found" not in encode_episode(episode)


@pytest.mark.parametrize("faults", [1, 2])
def test_faults_that_are_retried_away_change_nothing(faults: int) -> None:
    def plain(episode: Episode) -> Episode:
        return msgspec.structs.replace(episode, stage_ms={})

    troubled = play_script(search("Ada"), END, env=make_env(retriever=WordRetriever(CORPUS, faults=faults)))
    assert plain(troubled) == plain(play_script(search("Ada"), END))


class Sleeper(Script):
    """A policy that never answers."""

    def open(self, task: Task, seed: int) -> Any:
        return self

    async def act(self, context: Context) -> Decision:
        await asyncio.sleep(60)
        raise AssertionError


def test_an_episode_that_takes_too_long_is_broken() -> None:
    env = SearchEnv(Env(), WordRetriever(CORPUS), LexicalVerifier(), machine=Machine(episode_deadline_s=0.05))
    episode = run(rollout(env, Sleeper(), TASK))
    assert ended(episode) == (StopReason.FAULT, Status.INFRA_ERROR)
    assert episode.error == "the episode took more than 0.05 s"


@pytest.mark.parametrize("order", ["paper", "epoch"])
def test_equal_seeds_give_equal_bytes(order: str) -> None:
    def line(seed: int) -> bytes:
        config = msgspec.convert({"rendering": {"order": order}}, Env)
        episode = run(rollout(make_env(config, wide_corpus(30)), RandomPolicy(), TASK, seed=seed))
        return encode_episode(msgspec.structs.replace(episode, stage_ms={}))

    assert line(1) == line(1)
    assert line(1) != line(2)


def test_samples_of_a_task_have_ids_of_their_own() -> None:
    ids = {play_script(END, sample_idx=sample, seed=seed).episode_id for sample in (0, 1) for seed in (0, 1)}
    assert len(ids) == 4


class Versioned(Script):
    """A policy whose weights change while it runs."""

    def open(self, task: Task, seed: int) -> Any:
        self.version = 3
        return self

    async def act(self, context: Context) -> Decision:
        self.version += 2
        calls = (ModelCall("c", policy_version_start=self.version, policy_version_end=self.version + 1),)
        return Decision((END,) if self.version > 6 else (search("Ada"),), "", calls)


def test_the_range_of_policy_versions_is_recorded() -> None:
    episode = run(rollout(make_env(), Versioned(), TASK))
    assert episode.policy_versions == (5, 8)
    assert len(episode.turns[0].calls) == 1


ORDERS = ("paper", "stable_first", "epoch", "transcript")
TASK_REPLAY = Task("t", "Which castle stands by the river?")
CLAIM = "The castle stands by the river."
SAGA = [chunk("a_saga", f"River castle Byron {part}. " + "Long ago it was so. " * 9, "Saga", part) for part in range(4)]
WORLD = [*SAGA, *wide_corpus(30), *CORPUS]
PLAN = (
    search("river castle Byron"),
    call("fan_out_search", queries=["Paris", "London king", "Rome"]),
    curate(add_ids=["D9", "D3", "nowhere"], remove_ids=["D1"], importance={"D9": "very_high"}),
    call("verify", doc_ids=["D1", "D3"], claim=CLAIM),
    call("verify", doc_ids=["D3", "D2"], claim=CLAIM),
    call("read_document", doc_id="D1"),
    call("grep_corpus", pattern="(?i)missolonghi"),
    call("grep_corpus", pattern="("),
    call("review_docs", doc_ids=["D1", "D2"]),
    [search("war"), curate(add_ids=["D5"])],
    call("nonsense"),
    END,
)


def configured(order: str = "paper", *, rank: bool = True) -> Env:
    """Small allowances, so that hits and parts are left out."""
    return Env(
        search=Search(tokens=500),
        read=Read(tokens=150),
        compression=Compression(sentences=3),
        context_window=9000,
        rendering=Rendering(order),
        evidence=Evidence(rank=rank),
    )


def recorded(order: str = "paper", *, rank: bool = True) -> Episode:
    episode = run(rollout(make_env(configured(order, rank=rank), WORLD), Script(*PLAN), TASK_REPLAY))
    return decode_episode(encode_episode(episode))


EPISODE = recorded()


def tampered(turn: int, change: Callable[[Turn], Turn]) -> Episode:
    turns = [change(each) if each.index == turn else each for each in EPISODE.turns]
    return replace(EPISODE, turns=tuple(turns))


def observed(change: Callable[[Observation], Observation]) -> Callable[[Turn], Turn]:
    return lambda turn: replace(turn, observation=change(turn.observation))


@pytest.mark.parametrize(("rank", "populated"), [(True, "refilled"), (False, "seeded")])
@pytest.mark.parametrize("order", ORDERS)
def test_every_hash_comes_out_equal(order: str, rank: bool, populated: str) -> None:
    episode = recorded(order, rank=rank)
    report = replay_episode(episode, configured(order, rank=rank))
    assert (report.turns, report.equal, report.difference) == (12, 12, None)
    codes = {note.code for turn in episode.turns if turn.observation for note in turn.observation.notes}
    assert {"hits_left_out", "continues", "unknown_handles", "not_executed", populated} <= codes


def test_the_contexts_come_out_equal_word_for_word() -> None:
    env = make_env(configured(), WORLD)
    live = run(rollout_texts(env))
    twin = replay_env(EPISODE, configured())
    again = [twin.replay(turn).context for turn in EPISODE.turns]
    assert [[piece.text for piece in context.pieces] for context in again if context] == live


async def rollout_texts(env: object) -> list[list[str]]:
    texts: list[list[str]] = []
    await rollout(
        env,
        Script(*PLAN),
        TASK_REPLAY,
        on_step=lambda step: texts.append([piece.text for piece in step.context.pieces]) if step.context else None,
    )
    return texts


def renamed(hit: Hit) -> Hit:
    return replace(hit, doc_id=DocId("x"), chunk_id=ChunkId("x#0"))


def first_hit_text(seen: Observation) -> Observation:
    return replace(seen, hits=(replace(seen.hits[0], text=seen.hits[0].text.upper()), *seen.hits[1:]))


def first_turn(episode: Episode, **changes: Any) -> Episode:
    return replace(episode, turns=(replace(episode.turns[0], **changes), *episode.turns[1:]))


def test_a_changed_text_changes_the_context_and_not_the_memory() -> None:
    report = replay_episode(tampered(1, observed(first_hit_text)), configured())
    assert report.difference.startswith("turn 2: context hash")


@pytest.mark.parametrize(
    ("turn", "change"),
    [
        (1, observed(lambda seen: replace(seen, hits=seen.hits[1:]))),
        (1, observed(lambda seen: replace(seen, hits=seen.hits[::-1]))),
        (1, observed(lambda seen: replace(seen, hits=(renamed(seen.hits[0]), *seen.hits[1:])))),
        (2, observed(lambda seen: replace(seen, rankings=seen.rankings[::-1]))),
        (3, lambda turn: replace(turn, action=curate(add_ids=["D9", "D3"], importance={"D9": "low"}))),
        (3, lambda turn: replace(turn, action=curate(add_ids=["D8"]))),
        (4, observed(lambda seen: replace(seen, verdicts=(replace(seen.verdicts[0], label="no"), *seen.verdicts[1:])))),
        (4, observed(lambda seen: replace(seen, verdicts=(replace(seen.verdicts[0], unit_id="x"),)))),
        (6, observed(lambda seen: replace(seen, hits=()))),
        (6, observed(lambda seen: replace(seen, notes=seen.notes[1:]))),
        (1, lambda turn: replace(turn, memory_hash="0" * 64)),
        (5, lambda turn: replace(turn, context_hash="0" * 64)),
        (5, lambda turn: replace(turn, reasoning="other")),
    ],
)  # fmt: skip
def test_a_tampered_record_is_found_out(turn: int, change: Callable[[Turn], Turn]) -> None:
    report = replay_episode(tampered(turn, change), configured())
    assert report.difference.startswith((f"turn {turn}:", f"turn {turn + 1}:"))
    assert report.equal < report.turns


def test_contexts_are_compared_only_under_the_counter_of_the_record() -> None:
    class Other(ApproximateCounter):
        hash = "other"

    broken = tampered(1, observed(first_hit_text))
    assert "context hash" not in str(replay_episode(broken, configured(), Other()).difference)


def test_another_configuration_is_refused() -> None:
    for other in (Env(), replace(configured(), curation=Curation(cap=7))):
        with pytest.raises(ConfigError, match="another environment"):
            replay_episode(EPISODE, other)
        with pytest.raises(ConfigError, match="another environment"):
            run(replay_live(EPISODE, other, WordRetriever(WORLD), QUICK))


def test_a_turn_without_an_action_names_the_state_before_it() -> None:
    episode = run(rollout(make_env(configured(), WORLD), Script("no call"), TASK_REPLAY))
    assert replay_episode(episode, configured()) == ReplayReport(1, 1)
    (turn,) = episode.turns
    forged = replace(episode, turns=(replace(turn, memory_hash="0" * 64),))
    assert "memory hash" in str(replay_episode(forged, configured()).difference)


def test_replay_needs_no_world_and_says_so_if_asked() -> None:
    twin = replay_env(EPISODE, configured())
    with pytest.raises(Exception, match="a replay has no index"):
        run(twin.step([search("x")]))
    with pytest.raises(ValueError, match="without an action"):
        twin.replay(Turn(1))


def live(chunks: list[Chunk], episode: Episode = EPISODE) -> str | None:
    return run(replay_live(episode, configured(), WordRetriever(chunks), QUICK)).difference


def test_a_live_replay_agrees_with_an_unchanged_index_and_reports_the_first_difference_from_another() -> None:
    assert live(WORLD) is None
    with pytest.raises(ConfigError, match="index differs"):
        live(WORLD, replace(EPISODE, hashes=replace(EPISODE.hashes, index="other")))
    found = EPISODE.turns[0].observation
    changed = [
        replace(each, text=each.text + " New.") if each.doc_id == found.hits[0].doc_id else each for each in WORLD
    ]
    assert live(changed) == "turn 1: hits of the observation differ"
    assert live([each for each in WORLD if each.doc_id != "miss"]) == "turn 7: hits of the observation differ"


def test_scores_do_not_count_as_a_difference() -> None:
    def rescored(seen: Observation) -> Observation:
        return replace(seen, hits=tuple(replace(hit, score=hit.score / 3) for hit in seen.hits))

    assert live(WORLD, tampered(1, observed(rescored))) is None


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda episode: replace(episode, curated=episode.curated[:-1]), "curated"),
        (lambda episode: replace(episode, pool=(*episode.pool, "faked")), "pool"),
        (lambda episode: replace(episode, aliases={"a": "b"}), "aliases"),
        (lambda episode: replace(episode, stop_reason=StopReason.TURN_LIMIT), "stop reason"),
        (lambda episode: replace(episode, status=Status.TRUNCATED), "status"),
        (lambda episode: replace(episode, turns=episode.turns[:-1]), "stop reason"),
        (lambda episode: replace(episode, turns=(*episode.turns, episode.turns[-1])), "had ended"),
        (lambda episode: first_turn(episode, index=7), "recorded as 7"),
        (lambda episode: first_turn(episode, observation=None), "missing"),
    ],
)
def test_a_forged_episode_is_found_out(change: Callable[[Episode], Episode], word: str) -> None:
    assert word in str(replay_episode(change(EPISODE), configured()).difference)


def test_a_record_that_cannot_be_played_is_a_difference_and_no_crash() -> None:
    first = EPISODE.turns[0]
    assert first.observation is not None
    broken = first_turn(EPISODE, observation=replace(first.observation, notes=(Note("continues"),)))
    report = replay_episode(broken, configured())
    assert "cannot be played again" in str(report.difference)


@pytest.mark.parametrize("field", ["notes", "delta", "resolved"])
def test_what_the_core_derived_is_derived_again_and_compared(field: str) -> None:
    empty = Observation("")
    turns = [
        replace(turn, observation=replace(turn.observation, **{field: getattr(empty, field)})) for turn in EPISODE.turns
    ]
    assert field in str(replay_episode(replace(EPISODE, turns=tuple(turns)), configured()).difference)
