"""A single turn is played from the very state, and on the very prompt, that the teacher had."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from harness1.config import Env, Machine, load_config
from harness1.env.verifiers import LexicalVerifier
from harness1.episodes.jobs import EpisodeJob
from harness1.episodes.rollout import rollout
from harness1.errors import ConfigError, SchemaError, UsageError
from harness1.models.backend import Grammar, SampledOutput
from harness1.policy.language_model import LanguageModelPolicy
from harness1.policy.policy import Policy, counter_of
from harness1.policy.scripted import RandomPolicy, ScriptedPolicy
from harness1.policy.wrappers import StudentFormatPolicy
from harness1.records import DocId, Episode, Gold, RewardTerm, Sampling, Status, StopReason, Task, ToolCall
from harness1.rl.pivot_turns import PivotRollouts, PivotWorld, TurnId
from harness1.rows import per_request
from harness1.rows.calls import calls_for_rows, calls_of, prompt_ids
from harness1.sft.rows import rerender
from tests.support import END, QUICK, Script, WordRetriever, call, curate, make_env, run, search, wide_corpus
from tests.vocabularies import chat_format

TASK = Task("t", "Which river flows past the castle of the king in Rome?")
CORPUS = wide_corpus(30)
ENV = load_config(None, ["env.auto_populate.on=false"]).env
CHAT = chat_format("compact", "chatml")
TAUGHT = Script(search("river castle"), search("king bridge"), curate(add_ids=["D1", "D2"]), END)


class Saying:
    """A backend that says one thing, and counts the versions that it is given."""

    def __init__(self, *said: Sequence[int]) -> None:
        self.hash, self.version = "saying", 0
        self.said, self.prompts = list(said), list[tuple[int, ...]]()

    async def generate(
        self, prompt: Sequence[int], sampling: Sampling, grammar: Grammar | None = None
    ) -> SampledOutput:
        self.prompts.append(tuple(prompt))
        ids = tuple(self.said[(len(self.prompts) - 1) % len(self.said)])
        return SampledOutput(ids, (-0.5,) * len(ids), "stop", self.version, self.version)

    async def load_state(self, state: object, version: int) -> None:
        self.version = version

    async def load_weights(self, folder: object, version: int) -> None:
        self.version = version


def model(*said: ToolCall | str) -> LanguageModelPolicy:
    ids = [CHAT.format_action("because", each) if isinstance(each, ToolCall) else CHAT.text(each) for each in said]
    return LanguageModelPolicy(Saying(*ids), CHAT, 384)


def taught(policy: Policy, env: Env = ENV) -> Episode:
    return run(rollout(make_env(env, CORPUS, counter=counter_of(policy)), policy, TASK, seed=3))


GOLD = Gold({DocId(entry.unit_id): 1 for entry in taught(TAUGHT).curated})


def world(policy: Policy, env: Env = ENV, retriever: WordRetriever | None = None, runs: Machine = QUICK) -> PivotWorld:
    return PivotWorld(env, retriever or WordRetriever(CORPUS), LexicalVerifier(), counter_of(policy), runs)


def rollouts(policy: LanguageModelPolicy, episode: Episode, **options: object) -> PivotRollouts:
    options.setdefault("world", world(policy))
    return PivotRollouts(
        policy=policy,
        episodes={episode.episode_id: episode},
        golds={"t": GOLD},
        publish=policy.model.load_state,
        **options,
    )


def job(episode: Episode, turn: int, sample: int = 0) -> EpisodeJob:
    return EpisodeJob(Task(TurnId(episode.episode_id, turn).name, TASK.query), sample, seed=sample, group_id="g")


def played(
    policy: LanguageModelPolicy, episode: Episode, *jobs: EpisodeJob, of: PivotRollouts | None = None
) -> list[Episode]:
    found: list[Episode] = []
    run((of or rollouts(policy, episode)).run(jobs, found.append))
    return sorted(found, key=lambda each: each.sample_idx)


@pytest.mark.parametrize("order", ["paper", "stable_first", "epoch", "transcript"])
def test_states_are_those_of_the_record(order: str) -> None:
    env = load_config(None, [f"env.rendering.order={order}"]).env
    for policy in (RandomPolicy(), ScriptedPolicy(), StudentFormatPolicy(RandomPolicy(), CHAT)):
        episode = taught(policy, env)
        states = world(policy, env).states(episode, GOLD)
        assert len(states) == len(episode.turns) > 2
        for state, turn in zip(states, episode.turns, strict=True):
            assert state.turn == turn
            assert state.before.context is not None
            assert state.before.context.hash == turn.context_hash
        for state, before in zip(states[1:], episode.turns, strict=False):
            assert state.decision_point.memory.hash() == before.memory_hash


@pytest.mark.parametrize("order", ["paper", "stable_first", "epoch", "transcript"])
@pytest.mark.parametrize("recorded_in_format", [True, False])
def test_the_policy_gets_the_prompt_that_the_teacher_had(order: str, recorded_in_format: bool) -> None:
    env = load_config(None, [f"env.rendering.order={order}"]).env
    policy = model(search("bridge"))
    episode = taught(StudentFormatPolicy(TAUGHT, CHAT) if recorded_in_format else TAUGHT, env)
    told = episode if recorded_in_format else rerender(episode, env, CHAT)
    service = rollouts(policy, episode, world=world(policy, env))
    for turn, known in enumerate(calls_of(told), start=1):
        (made,) = played(policy, episode, job(episode, turn), of=service)
        (own,) = calls_for_rows(made)
        assert own.prompt_ids == prompt_ids(told, known) == policy.model.prompts[-1]
        assert made.turns[0].index == turn


def test_an_episode_is_one_turn_with_a_reward_under_the_name_of_its_rule() -> None:
    episode = taught(StudentFormatPolicy(TAUGHT, CHAT))
    policy = model(END)
    (made,) = played(policy, episode, job(episode, 4))
    assert made.task == Task(f"{episode.episode_id}/4", TASK.query)
    assert (len(made.turns), made.group_id, made.stop_reason) == (1, "g", StopReason.END_SEARCH)
    assert made.reward is not None
    assert (made.reward.total, made.reward.terms) == (1.0, {"stop": RewardTerm(1.0, 1.0)})
    assert made.hashes.policy == policy.hash
    (early,) = played(policy, episode, job(episode, 2))
    assert early.reward is not None
    assert (early.reward.total, early.reward.terms) == (0.0, {"stop": RewardTerm(0.0, 1.0)})
    (row,) = per_request(calls_for_rows(made), made.group_id)
    assert sum(row.loss_mask) == len(CHAT.format_action("because", END))


def test_a_turn_that_goes_on_ends_at_its_limit_and_counts_as_completed() -> None:
    episode = taught(StudentFormatPolicy(TAUGHT, CHAT))
    (made,) = played(model(search("bridge")), episode, job(episode, 1))
    assert (made.stop_reason, made.status) == (StopReason.TURN_LIMIT, Status.COMPLETED)
    assert made.turns[0].observation is not None


def test_an_output_without_an_action_is_wrong_and_trained_with_all_its_attempts() -> None:
    episode = taught(StudentFormatPolicy(TAUGHT, CHAT))
    (made,) = played(model("nothing to call"), episode, job(episode, 2))
    assert (made.status, made.turns[0].action) == (Status.POLICY_ERROR, None)
    assert made.reward is not None
    assert made.reward.terms == {"unreadable": RewardTerm(0.0, 1.0)}
    assert len(list(calls_for_rows(made))) == 4


def test_what_is_played_leaves_the_scene_as_it_was() -> None:
    episode = taught(StudentFormatPolicy(TAUGHT, CHAT))
    policy = model(search("bridge"), curate(add_ids=["D1"]), call("read_document", doc_id="D1"))
    service = rollouts(policy, episode)
    state = service.state(TurnId(episode.episode_id, 3))
    before, prompt = state.decision_point.memory.hash(), state.before.context
    made = played(policy, episode, *(job(episode, 3, sample) for sample in range(6)), of=service)
    assert len({each.turns[0].memory_hash for each in made}) == 3
    assert len({each.turns[0].context_hash for each in made}) == 1
    assert (state.decision_point.memory.hash(), state.before.context) == (before, prompt)
    assert service.state(TurnId(episode.episode_id, 3)) is state


def test_a_fault_makes_an_episode_without_reward() -> None:
    episode = taught(StudentFormatPolicy(TAUGHT, CHAT))
    policy = model(search("bridge"))
    (made,) = played(
        policy,
        episode,
        job(episode, 2),
        of=rollouts(policy, episode, world=world(policy, retriever=WordRetriever(CORPUS, faults=9))),
    )
    assert (made.status, made.reward) == (Status.INFRA_ERROR, None)
    assert "down" in (made.error or "")


def test_published_weights_reach_the_model() -> None:
    episode = taught(TAUGHT)
    policy = model(END)
    service = rollouts(policy, episode)
    run(service.publish({}, 7))
    (made,) = played(policy, episode, job(episode, 1), of=service)
    assert made.policy_versions == (7, 7)


def test_a_turn_that_is_not_there_is_refused() -> None:
    episode = taught(TAUGHT)
    policy = model(END)
    for name, message in (
        ("x/1", "no episode x"),
        (f"{episode.episode_id}/9", "no turn 9"),
        ("river", "does not name a turn"),
    ):
        with pytest.raises(UsageError, match=message):
            played(policy, episode, EpisodeJob(Task(name, TASK.query)))


def test_an_episode_of_another_environment_index_or_memory_is_refused() -> None:
    episode = taught(TAUGHT)
    here = world(RandomPolicy())
    other = load_config(None, ["env.max_turns=5"]).env
    with pytest.raises(ConfigError, match=r"another env$"):
        world(RandomPolicy(), other).states(episode, GOLD)
    hashes = msgspec.structs.replace(episode.hashes, index="elsewhere")
    with pytest.raises(ConfigError, match=r"another index$"):
        here.states(msgspec.structs.replace(episode, hashes=hashes), GOLD)
    turn = msgspec.structs.replace(episode.turns[1], memory_hash="edited")
    edited = msgspec.structs.replace(episode, turns=(episode.turns[0], turn, *episode.turns[2:]))
    with pytest.raises(SchemaError, match="differently at turn 2"):
        here.states(edited, GOLD)
    with pytest.raises(ConfigError, match="count tokens differently"):
        rollouts(model(END), episode, world=here)


def test_where_the_policy_has_no_room_the_scenes_end() -> None:
    env = load_config(None, ["env.context_window=2500", "env.generation_reserve=64", "env.auto_populate.on=false"]).env
    long = Script(search("river"), search("war " * 3000), search("king"), END)
    episode = taught(long, env)
    told = rerender(episode, env, CHAT)
    assert len(told.turns) < len(episode.turns)
    assert len(world(model(END), env).states(episode, GOLD)) == len(told.turns)
