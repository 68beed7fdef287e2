"""Episodes rendered again for a student are those that it would have been taught by at once."""

from __future__ import annotations

import msgspec
import pytest

from harness1.config import Env, load_config
from harness1.env.environment import Step
from harness1.episodes.rollout import replay_episode, rollout
from harness1.errors import ConfigError, SchemaError
from harness1.policy.policy import Policy
from harness1.policy.scripted import RandomPolicy, ScriptedPolicy
from harness1.policy.wrappers import StudentFormatPolicy
from harness1.records import Episode, RewardRecord, Status, StopReason, Task
from harness1.rows.calls import calls_of, prompt_ids
from harness1.sft.rows import rerender
from tests.support import END, Script, WordRetriever, curate, make_env, run, search, wide_corpus
from tests.vocabularies import SPOKEN, chat_format

TASK = Task("t", "Which river flows past the castle of the king in Rome?")
CORPUS = wide_corpus(30)
CHAT = chat_format("compact", "chatml")


def recorded(policy: Policy, env: Env) -> Episode:
    return run(rollout(make_env(env, CORPUS), policy, TASK, seed=5, sample_idx=2, group_id="g"))


def spoken(policy: Policy, env: Env, name: str, kind: str) -> Episode:
    taught = StudentFormatPolicy(policy, chat_format(name, kind))
    return run(rollout(make_env(env, CORPUS, counter=taught.counter), taught, TASK, seed=5, sample_idx=2, group_id="g"))


def timeless(episode: Episode) -> Episode:
    return msgspec.structs.replace(episode, stage_ms={})


@pytest.mark.parametrize(("name", "kind"), SPOKEN)
@pytest.mark.parametrize("order", ["paper", "stable_first", "epoch", "transcript"])
def test_a_rerendered_episode_equals_the_one_collected_for_the_student(name: str, kind: str, order: str) -> None:
    env = load_config(None, [f"env.rendering.order={order}"]).env
    for policy in (ScriptedPolicy(), RandomPolicy()):
        again = rerender(recorded(policy, env), env, chat_format(name, kind))
        wanted = spoken(policy, env, name, kind)
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
    again = rerender(scored, env, CHAT)
    assert (again.stop_reason, again.status) == (StopReason.CONTEXT_LIMIT, Status.TRUNCATED)
    assert [turn.action for turn in again.turns] == [turn.action for turn in whole.turns[:2]]
    assert (again.reward, again.hashes.reward) == (None, "")
    assert replay_episode(again, env).difference is None


def test_what_was_scored_stays_scored() -> None:
    episode = recorded(Script(search("river"), curate(add_ids=["D1"])), Env())
    hashes = msgspec.structs.replace(episode.hashes, reward="how")
    episode = msgspec.structs.replace(episode, reward=RewardRecord(0.5), hashes=hashes, stage_ms={"policy": 3.0})
    again = rerender(episode, Env(), CHAT)
    assert (again.reward, again.hashes.reward, again.stage_ms) == (RewardRecord(0.5), "how", {"policy": 3.0})
    assert again.curated == episode.curated
    assert again.hashes.policy == StudentFormatPolicy(Script(search("river"), curate(add_ids=["D1"])), CHAT).hash


def test_ignored_actions_are_not_spoken_of_and_a_turn_without_one_stays_as_it_is() -> None:
    again = rerender(recorded(Script([search("river"), search("war")], END), Env()), Env(), CHAT)
    assert again.turns[0].ignored == ()
    assert "not_executed" not in [note.code for note in again.turns[0].observation.notes]
    again = rerender(recorded(Script(search("river"), "no call"), Env()), Env(), CHAT)
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
    again = rerender(episode, Env(), CHAT)
    assert (again.status, again.error, len(again.turns)) == (Status.INFRA_ERROR, episode.error, 1)


def test_a_record_of_another_environment_or_a_damaged_one_is_refused() -> None:
    episode = recorded(Script(search("river"), END), Env())
    with pytest.raises(ConfigError, match="another environment"):
        rerender(episode, Env(max_turns=7), CHAT)
    first = episode.turns[0]
    for changes in ({"observation": None}, {"memory_hash": "0" * 64}):
        damaged = msgspec.structs.replace(first, **changes), *episode.turns[1:]
        with pytest.raises(SchemaError, match=f"episode {episode.episode_id}"):
            rerender(msgspec.structs.replace(episode, turns=damaged), Env(), CHAT)
