"""A row trains what the teacher said, on the context that it said it in."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from harness1.config import Env, Sft, load_config
from harness1.env.environment import Step
from harness1.episodes.rollout import replay_env, replay_episode, rollout
from harness1.errors import ConfigError, SchemaError
from harness1.policy.policy import Policy
from harness1.policy.scripted import RandomPolicy, ScriptedPolicy
from harness1.policy.wrappers import StudentFormatPolicy
from harness1.records import Episode, ModelCall, RewardRecord, Sampling, Status, StopReason, Task
from harness1.rows import TrainRow
from harness1.rows.calls import calls_of, prompt_ids
from harness1.sft.rows import Origin, has_token_ids, rerender, row_tokens, sft_rows
from harness1.tools.registry import Toolbox
from tests.support import END, Script, WordRetriever, curate, make_env, run, search, wide_corpus
from tests.vocabularies import SPOKEN, chat_format

TASK = Task("t", "Which river flows past the castle of the king in Rome?")
CORPUS = wide_corpus(30)
ORIGIN = Origin("d", "train", "scripted")
EPOCH = load_config(None, ["env.rendering.order=epoch", "env.rendering.epoch_turns=3"]).env
CHAT = chat_format("hermes", "chatml")


def spoken(name: str = "hermes", kind: str = "chatml", env: Env = EPOCH, policy: Policy | None = None) -> Episode:
    taught = StudentFormatPolicy(policy or ScriptedPolicy(), chat_format(name, kind))
    return run(rollout(make_env(env, CORPUS, counter=taught.counter), taught, TASK, seed=5, sample_idx=2, group_id="g"))


EPISODE = spoken()
TURNS = len(EPISODE.turns)


def made(episode: Episode = EPISODE, **settings: object) -> list[TrainRow]:
    return sft_rows(episode, Sft(**settings), ORIGIN)[0]


def dropped(episode: Episode = EPISODE, **settings: object) -> dict[str, int]:
    return dict(sft_rows(episode, Sft(**settings), ORIGIN)[1])


def with_call(place: int, change: Callable[[ModelCall], ModelCall]) -> Episode:
    turns = list(EPISODE.turns)
    turns[place] = msgspec.structs.replace(turns[place], calls=tuple(map(change, turns[place].calls)))
    return msgspec.structs.replace(EPISODE, turns=tuple(turns))


def spoken_in(row: TrainRow) -> tuple[int, ...]:
    return tuple(token for token, mask in zip(row.token_ids, row.loss_mask, strict=True) if mask)


@pytest.mark.parametrize(("name", "kind"), SPOKEN)
@pytest.mark.parametrize("order", ["paper", "epoch"])
def test_a_row_is_the_context_as_the_student_sees_it_and_the_teachers_action(name: str, kind: str, order: str) -> None:
    env, chat = load_config(None, [f"env.rendering.order={order}"]).env, chat_format(name, kind)
    episode = spoken(name, kind, env)
    twin = replay_env(episode, env, chat)
    rows = made(episode)
    assert len(rows) == len(episode.turns) > 3
    for row, turn in zip(rows, episode.turns, strict=True):
        assert twin.state.context is not None
        segments = [*chat.segments(twin.state.context), chat.prompt_end()]
        prompt = tuple(token for segment in segments for token in segment.ids)
        assert row.token_ids[: len(prompt)] == prompt
        assert row.loss_mask == (0,) * len(prompt) + (1,) * (len(row.token_ids) - len(prompt))
        found = chat.parse(row.token_ids[len(prompt) :], Toolbox.of(env).specs)
        assert (found.actions, found.reasoning.strip()) == ((turn.action,), turn.reasoning.strip())
        assert row.token_ids[-1] in chat.stop_ids
        twin.replay(turn)


def test_a_row_says_where_it_comes_from() -> None:
    row, turn = made()[1], EPISODE.turns[1]
    assert row.metadata == {
        "task_id": "t",
        "dataset": "d",
        "split": "train",
        "teacher": "scripted",
        "turns": [2],
        "tools": [turn.action.name],
        "prompt_tokens": len(prompt_ids(EPISODE, turn.calls[-1])),
    }
    assert (row.rollout_logprobs, row.advantages, row.episode_id) == (None, None, EPISODE.episode_id)
    assert row.call_ids == (f"{EPISODE.episode_id}/{turn.calls[-1].call_id}",)


def test_rows_of_chains_train_the_same_tokens_as_rows_of_turns() -> None:
    turns, chains = made(), made(rows="epoch")
    assert 1 < len(chains) < len(turns)
    by_call = {row.call_ids[0]: spoken_in(row) for row in turns}
    assert [call for row in chains for call in row.call_ids] == list(by_call)
    for row in chains:
        assert spoken_in(row) == sum((by_call[call] for call in row.call_ids), ())
        first = next(each for each in turns if each.call_ids == row.call_ids[:1])
        assert row.metadata["prompt_tokens"] == first.metadata["prompt_tokens"] == row.loss_mask.index(1)
    numbers = [turn for row in chains for turn in row.metadata["turns"]]
    assert numbers == list(range(1, TURNS + 1))


def test_rows_that_are_too_long_are_dropped_and_counted() -> None:
    lengths = [len(row.token_ids) for row in made()]
    limit = sorted(lengths)[TURNS // 2]
    short = [length for length in lengths if length <= limit]
    assert [len(row.token_ids) for row in made(max_tokens=limit)] == short
    assert dropped(max_tokens=limit) == {"too_long": TURNS - len(short)}
    assert dropped(rows="epoch", max_tokens=100) == {"too_long": TURNS}
    assert (row_tokens(EPISODE, Sft()), row_tokens(EPISODE, Sft(max_tokens=limit))) == (sum(lengths), sum(short))
    assert row_tokens(EPISODE, Sft(rows="epoch")) <= sum(len(row.token_ids) for row in made(rows="epoch"))


def test_a_turn_or_chain_with_an_output_that_was_cut_is_dropped_and_counted() -> None:
    def sampled(stops: tuple[int, ...]) -> Callable[[ModelCall], ModelCall]:
        return lambda call: msgspec.structs.replace(call, sampling=Sampling(stop_ids=stops))

    torn = with_call(1, lambda call: msgspec.structs.replace(call, finish_reason="length"))
    assert [row.metadata["turns"] for row in made(torn)] == [[n] for n in range(1, TURNS + 1) if n != 2]
    assert dropped(torn) == {"unfinished": 1}
    whole = made(rows="epoch")
    assert made(torn, rows="epoch") == [row for row in whole if 2 not in row.metadata["turns"]]
    assert dropped(torn, rows="epoch")["unfinished"] == len(
        next(row for row in whole if 2 in row.metadata["turns"]).call_ids
    )
    assert dropped(with_call(0, sampled(CHAT.stop_ids))) == {}
    assert dropped(with_call(0, sampled((0,)))) == {"unfinished": 1}


def test_a_search_that_brought_no_new_gold_weighs_nothing() -> None:
    episode = spoken(policy=Script(search("river castle"), search("river bridge"), curate(add_ids=["D1"]), END))
    first, second = ({hit.doc_id for hit in turn.observation.hits} for turn in episode.turns[:2] if turn.observation)
    for gold, kept in (({min(first)}, [1, 3, 4]), ({min(second - first)}, [2, 3, 4]), (set(), [3, 4])):
        rows, _ = sft_rows(episode, Sft(useless_weight=0.0), ORIGIN, frozenset(gold))
        assert [row.metadata["turns"][0] for row in rows if row.advantages is None] == kept
        assert all(sum(row.advantages) == 0.0 for row in rows if row.advantages is not None)


def test_an_episode_without_calls_has_no_token_ids() -> None:
    bare = tuple(msgspec.structs.replace(turn, calls=()) for turn in EPISODE.turns)
    assert has_token_ids(EPISODE)
    assert not has_token_ids(msgspec.structs.replace(EPISODE, turns=bare))
    assert not has_token_ids(with_call(1, lambda call: msgspec.structs.replace(call, output_ids=())))
    assert not has_token_ids(with_call(1, lambda call: msgspec.structs.replace(call, prompt=())))


COMPACT = chat_format("compact", "chatml")


def recorded(policy: Policy, env: Env) -> Episode:
    return run(rollout(make_env(env, CORPUS), policy, TASK, seed=5, sample_idx=2, group_id="g"))


def timeless(episode: Episode) -> Episode:
    return msgspec.structs.replace(episode, stage_ms={})


@pytest.mark.parametrize(("name", "kind"), SPOKEN)
@pytest.mark.parametrize("order", ["paper", "stable_first", "epoch", "transcript"])
def test_a_rerendered_episode_equals_the_one_collected_for_the_student(name: str, kind: str, order: str) -> None:
    env = load_config(None, [f"env.rendering.order={order}"]).env
    for policy in (ScriptedPolicy(), RandomPolicy()):
        again = rerender(recorded(policy, env), env, chat_format(name, kind))
        wanted = spoken(name, kind, env, policy)
        if [turn.action for turn in wanted.turns] == [turn.action for turn in again.turns]:
            assert timeless(again) == timeless(wanted)
            assert [prompt_ids(again, call) for call in calls_of(again)] == [
                prompt_ids(wanted, call) for call in calls_of(wanted)
            ]
            break
    else:
        pytest.fail("no policy decided the same in both")
    assert replay_episode(again, env).difference is None


def test_where_the_student_has_no_room_the_episode_ends() -> None:
    policy = Script(search("river"), search("war " * 2000), search("king"), END)
    env = load_config("small").env
    whole = recorded(policy, env)
    assert whole.status is Status.COMPLETED
    scored = msgspec.structs.replace(whole, reward=RewardRecord(1.0))
    again = rerender(scored, env, COMPACT)
    assert (again.stop_reason, again.status) == (StopReason.CONTEXT_LIMIT, Status.TRUNCATED)
    assert [turn.action for turn in again.turns] == [turn.action for turn in whole.turns[:2]]
    assert (again.reward, again.hashes.reward) == (None, "")
    assert replay_episode(again, env).difference is None


def test_what_was_scored_stays_scored() -> None:
    episode = recorded(Script(search("river"), curate(add_ids=["D1"])), Env())
    hashes = msgspec.structs.replace(episode.hashes, reward="how")
    episode = msgspec.structs.replace(episode, reward=RewardRecord(0.5), hashes=hashes, stage_ms={"policy": 3.0})
    again = rerender(episode, Env(), COMPACT)
    assert (again.reward, again.hashes.reward, again.stage_ms) == (RewardRecord(0.5), "how", {"policy": 3.0})
    assert again.curated == episode.curated
    assert again.hashes.policy == StudentFormatPolicy(Script(search("river"), curate(add_ids=["D1"])), COMPACT).hash


def test_ignored_actions_are_not_spoken_of_and_a_turn_without_one_stays_as_it_is() -> None:
    again = rerender(recorded(Script([search("river"), search("war")], END), Env()), Env(), COMPACT)
    assert again.turns[0].ignored == ()
    assert "not_executed" not in [note.code for note in again.turns[0].observation.notes]
    again = rerender(recorded(Script(search("river"), "no call"), Env()), Env(), COMPACT)
    assert (again.stop_reason, again.status) == (StopReason.FORMAT_LIMIT, Status.POLICY_ERROR)
    assert (again.turns[1].parse_error, again.turns[1].reasoning, again.turns[1].calls) == ("no call", "confused", ())
    assert replay_episode(again, Env()).difference is None


def test_an_episode_that_a_fault_ended_stays_one() -> None:
    failing = WordRetriever(CORPUS)

    def break_it(_: Step) -> None:
        failing.faults = 99

    env = make_env(Env(), CORPUS, retriever=failing)
    episode = run(rollout(env, Script(search("river"), search("war"), END), TASK, on_step=break_it))
    assert (episode.status, len(episode.turns)) == (Status.INFRA_ERROR, 1)
    again = rerender(episode, Env(), COMPACT)
    assert (again.status, again.error, len(again.turns)) == (Status.INFRA_ERROR, episode.error, 1)


def test_a_record_of_another_environment_or_a_damaged_one_is_refused() -> None:
    episode = recorded(Script(search("river"), END), Env())
    with pytest.raises(ConfigError, match="another environment"):
        rerender(episode, Env(max_turns=7), COMPACT)
    first = episode.turns[0]
    for changes in ({"observation": None}, {"memory_hash": "0" * 64}):
        damaged = msgspec.structs.replace(first, **changes), *episode.turns[1:]
        with pytest.raises(SchemaError, match=f"episode {episode.episode_id}"):
            rerender(msgspec.structs.replace(episode, turns=damaged), Env(), COMPACT)
