"""The one loop: every end has its status, faults belong to the infrastructure, equal seeds give equal episodes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from harness1.config import Compression, Curation, Env, Machine, Read, Rendering, Search
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


def test_the_turn_limit_completes_an_episode_and_a_full_context_truncates_it() -> None:
    episode = play_script(*[search("Ada")] * 5, env=make_env(Env(max_turns=3)))
    assert (ended(episode), len(episode.turns)) == ((StopReason.TURN_LIMIT, Status.COMPLETED), 3)
    assert episode.curated
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


def plain(episode: Episode) -> bytes:
    return encode_episode(replace(episode, stage_ms={}))


class Acting(Script):
    def __init__(self, act: Callable[[Context], Awaitable[Decision]]) -> None:
        super().__init__()
        self.act = act

    def open(self, task: Task, seed: int) -> Any:
        return self


def test_an_episode_that_takes_too_long_is_broken() -> None:
    async def sleep(_: Context) -> Decision:
        await asyncio.sleep(60)
        raise AssertionError

    env = SearchEnv(Env(), WordRetriever(CORPUS), LexicalVerifier(), machine=Machine(episode_deadline_s=0.05))
    episode = run(rollout(env, Acting(sleep), TASK))
    assert ended(episode) == (StopReason.FAULT, Status.INFRA_ERROR)
    assert episode.error == "the episode took more than 0.05 s"


@pytest.mark.parametrize("order", ["paper", "epoch"])
def test_equal_seeds_give_equal_bytes(order: str) -> None:
    def line(seed: int) -> bytes:
        config = msgspec.convert({"rendering": {"order": order}}, Env)
        return plain(run(rollout(make_env(config, wide_corpus(30)), RandomPolicy(), TASK, seed=seed)))

    assert line(1) == line(1)
    assert line(1) != line(2)


def test_samples_of_a_task_have_ids_of_their_own() -> None:
    ids = {play_script(END, sample_idx=sample, seed=seed).episode_id for sample in (0, 1) for seed in (0, 1)}
    assert len(ids) == 4


def test_the_range_of_policy_versions_is_recorded() -> None:
    async def learn(context: Context) -> Decision:
        version = 3 + 2 * context.turn
        calls = (ModelCall("c", policy_version_start=version, policy_version_end=version + 1),)
        return Decision((END,) if context.turn == 2 else (search("Ada"),), "", calls)

    episode = run(rollout(make_env(), Acting(learn), TASK))
    assert (episode.policy_versions, len(episode.turns[0].calls)) == ((5, 8), 1)


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
    ).switch(rank=rank)


def recorded(order: str = "paper", *, rank: bool = True) -> Episode:
    episode = run(rollout(make_env(configured(order, rank=rank), WORLD), Script(*PLAN), TASK_REPLAY))
    return decode_episode(encode_episode(episode))


EPISODE = recorded()
SEEN = replace(EPISODE.turns[0].observation, notes=(Note("continues"),))


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


def renamed(hit: Hit) -> Hit:
    return replace(hit, doc_id=DocId("x"), chunk_id=ChunkId("x#0"))


def first_hit_text(seen: Observation) -> Observation:
    return replace(seen, hits=(replace(seen.hits[0], text=seen.hits[0].text.upper()), *seen.hits[1:]))


def first_turn(episode: Episode, **changes: Any) -> Episode:
    return replace(episode, turns=(replace(episode.turns[0], **changes), *episode.turns[1:]))


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

    broken = tampered(1, observed(first_hit_text))  # which changes the context and not the memory
    assert replay_episode(broken, configured()).difference.startswith("turn 2: context hash")
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
    rescored = observed(lambda seen: replace(seen, hits=tuple(replace(hit, score=hit.score / 3) for hit in seen.hits)))
    assert live(WORLD) is live(WORLD, tampered(1, rescored)) is None
    with pytest.raises(ConfigError, match="index differs"):
        live(WORLD, replace(EPISODE, hashes=replace(EPISODE.hashes, index="other")))
    first = EPISODE.turns[0].observation.hits[0].doc_id
    changed = [replace(each, text=f"{each.text} New.") if each.doc_id == first else each for each in WORLD]
    assert live(changed) == "turn 1: hits of the observation differ"
    assert live([each for each in WORLD if each.doc_id != "miss"]) == "turn 7: hits of the observation differ"


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
        (lambda episode: first_turn(episode, observation=SEEN), "cannot be played again"),
    ],
)
def test_a_forged_episode_is_found_out(change: Callable[[Episode], Episode], word: str) -> None:
    assert word in str(replay_episode(change(EPISODE), configured()).difference)


@pytest.mark.parametrize("field", ["notes", "delta", "resolved"])
def test_what_the_core_derived_is_derived_again_and_compared(field: str) -> None:
    forget = observed(lambda seen: replace(seen, **{field: getattr(Observation(""), field)}))
    turns = map(forget, EPISODE.turns)
    assert field in str(replay_episode(replace(EPISODE, turns=tuple(turns)), configured()).difference)
