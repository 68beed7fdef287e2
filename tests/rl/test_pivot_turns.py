"""A single turn is played from the very state, and on the very prompt, that the teacher had."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from harness1.config import Env, Machine, load_config
from harness1.env.pieces import counter_of
from harness1.env.verifiers import LexicalVerifier
from harness1.episodes.jobs import EpisodeJob
from harness1.episodes.rollout import rollout
from harness1.errors import ConfigError, SchemaError, UsageError
from harness1.models.backend import Grammar, SampledOutput
from harness1.policy.language_model import LanguageModelPolicy
from harness1.policy.policy import Policy
from harness1.policy.scripted import RandomPolicy, ScriptedPolicy
from harness1.policy.wrappers import StudentFormatPolicy
from harness1.records import DocId, Episode, Gold, RewardTerm, Sampling, Status, StopReason, Task, ToolCall, UnitId
from harness1.rl.pivot_turns import (
    DecisionPoint,
    Effect,
    PivotRollouts,
    PivotWorld,
    Ruling,
    SetQuality,
    compare_effects,
    set_quality,
)
from harness1.rows import per_request
from harness1.rows.calls import calls_for_rows, calls_of, prompt_ids
from harness1.sft.rows import rerender
from tests.support import (
    END,
    QUICK,
    Script,
    WordRetriever,
    call,
    chunk,
    curate,
    make_env,
    play,
    run,
    search,
    wide_corpus,
)
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

    async def generate(self, ids: Sequence[int], sampling: Sampling, grammar: Grammar | None = None) -> SampledOutput:
        self.prompts.append(tuple(ids))
        ids = tuple(self.said[(len(self.prompts) - 1) % len(self.said)])
        return SampledOutput(ids, (-0.5,) * len(ids), "stop", self.version, self.version)

    async def load_state(self, state: object, version: int) -> None:
        self.version = version


def model(*said: ToolCall | str) -> LanguageModelPolicy:
    ids = [CHAT.format_action("because", each) if isinstance(each, ToolCall) else CHAT.text(each) for each in said]
    return LanguageModelPolicy(Saying(*ids), CHAT, 384)


def taught(policy: Policy, env: Env = ENV) -> Episode:
    return run(rollout(make_env(env, CORPUS, counter=counter_of(policy)), policy, TASK, seed=3))


TOLD = taught(StudentFormatPolicy(TAUGHT, CHAT))
GOLD = Gold({DocId(entry.unit_id): 1 for entry in taught(TAUGHT).curated})


def world(policy: Policy, env: Env = ENV, retriever: WordRetriever | None = None, runs: Machine = QUICK) -> PivotWorld:
    return PivotWorld(env, retriever or WordRetriever(CORPUS), LexicalVerifier(), counter_of(policy), runs)


def rollouts(policy: LanguageModelPolicy, episode: Episode, **options: object) -> PivotRollouts:
    options.setdefault("world", world(policy))
    plays = {"policy": policy, "episodes": {episode.episode_id: episode}, "publish": policy.model.load_state}
    return PivotRollouts(golds={"t": GOLD}, **plays, **options)


def job(episode: Episode, turn: int, sample: int = 0) -> EpisodeJob:
    return EpisodeJob(Task(f"{episode.episode_id}/{turn}", TASK.query), sample, seed=sample, group_id="g")


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
            assert (state.turn, state.before.context.hash) == (turn, turn.context_hash)
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
    episode, policy = TOLD, model(END)
    (made,) = played(policy, episode, job(episode, 4))
    assert made.task == Task(f"{episode.episode_id}/4", TASK.query)
    assert (len(made.turns), made.group_id, made.stop_reason) == (1, "g", StopReason.END_SEARCH)
    assert (made.reward.total, made.reward.terms) == (1.0, {"stop": RewardTerm(1.0, 1.0)})
    assert made.hashes.policy == policy.hash
    (early,) = played(policy, episode, job(episode, 2))
    assert (early.reward.total, early.reward.terms) == (0.0, {"stop": RewardTerm(0.0, 1.0)})
    (long,) = played(model(search("bridge")), episode, job(episode, 1))  # would go on: it ends at its limit
    assert (long.stop_reason, long.status) == (StopReason.TURN_LIMIT, Status.COMPLETED)
    (row,) = per_request(calls_for_rows(made), made.group_id)
    assert sum(row.loss_mask) == len(CHAT.format_action("because", END))


def test_an_output_without_an_action_is_wrong_and_trained_with_all_its_attempts() -> None:
    (made,) = played(model("nothing to call"), TOLD, job(TOLD, 2))
    assert (made.status, made.turns[0].action) == (Status.POLICY_ERROR, None)
    assert (made.reward.terms, len(list(calls_for_rows(made)))) == ({"unreadable": RewardTerm(0.0, 1.0)}, 4)


def test_what_is_played_leaves_the_scene_as_it_was() -> None:
    episode, policy = TOLD, model(search("bridge"), curate(add_ids=["D1"]), call("read_document", doc_id="D1"))
    service = rollouts(policy, episode)
    state = service.state(f"{episode.episode_id}/3")
    before, prompt = state.decision_point.memory.hash(), state.before.context
    made = played(policy, episode, *(job(episode, 3, sample) for sample in range(6)), of=service)
    assert len({each.turns[0].memory_hash for each in made}) == 3
    assert len({each.turns[0].context_hash for each in made}) == 1
    assert (state.decision_point.memory.hash(), state.before.context) == (before, prompt)
    assert service.state(f"{episode.episode_id}/3") is state
    run(service.publish({}, 7))
    (made_later,) = played(policy, episode, job(episode, 1), of=service)
    assert made_later.policy_versions == (7, 7)


def test_a_fault_makes_an_episode_without_reward() -> None:
    episode, policy = TOLD, model(search("bridge"))
    broken = rollouts(policy, episode, world=world(policy, retriever=WordRetriever(CORPUS, faults=9)))
    (made,) = played(policy, episode, job(episode, 2), of=broken)
    assert (made.status, made.reward) == (Status.INFRA_ERROR, None)
    assert "down" in (made.error or "")


def test_a_turn_that_is_not_there_is_refused() -> None:
    episode = taught(TAUGHT)
    policy = model(END)
    missing = {"x/1": "no episode 'x'", f"{episode.episode_id}/9": "no turn 9", "river": "no episode ''"}
    for name, message in missing.items():
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


WANTED = tuple(frozenset({UnitId(name)}) for name in ("gold-a", "gold-b"))
CASTLES = (
    chunk("gold-a", "The alpha castle stands on the hill in Paris.", "Alpha"),
    chunk("twin", "They say that the alpha castle stands on the hill in Paris, far from here.", "Twin"),
    chunk("gold-b", "The beta bridge crosses the river in London.", "Beta"),
    *(chunk(f"noise-{place}", f"Some noise of kind {place} was heard.", f"Noise {place}") for place in range(6)),
)
TWO_HITS = load_config(None, ["env.auto_populate.on=false", "env.search.hits=2"]).env


@pytest.fixture(autouse=True)
def _one_useless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tolerated beside the expert's."""
    monkeypatch.setattr("harness1.rl.pivot_turns.USELESS", 1)


ALPHA, BETA, BOTH, NOISE, NOTHING = map(search, ("alpha", "beta", "alpha beta", "noise", "zebra"))
FOUND = (BOTH, NOISE)  # then D1 and D2 are gold, D3 and D4 are not
CASTLE = "The alpha castle stands on the hill in Paris."
BEST = SetQuality(1.0, 0)


def effect(before: tuple[ToolCall, ...], action: ToolCall, env: Env = TWO_HITS) -> Effect:
    world = make_env(env, CASTLES)
    play(world, *before)
    decision_point = DecisionPoint(world.snapshot().memory, WANTED, before, world.toolbox)
    held = decision_point.memory.hash()
    step = run(world.step([action]))
    assert decision_point.memory.hash() == held
    return decision_point.effect(step.turn, world.state.memory)


def ruling(before: tuple[ToolCall, ...], action: ToolCall, expert: ToolCall, end: SetQuality = BEST) -> Ruling:
    return compare_effects(effect(before, action), effect(before, expert), end)


def verify(*handles: str, claim: str = CASTLE) -> ToolCall:
    return call("verify", doc_ids=list(handles), claim=claim)


def read(handle: str) -> ToolCall:
    return call("read_document", doc_id=handle)


def review(*handles: str) -> ToolCall:
    return call("review_docs", doc_ids=list(handles))


def add(*handles: str, **others: object) -> ToolCall:
    return curate(add_ids=list(handles), **others)


SWAP, PRUNE, FRUITLESS = add("D2", remove_ids=["D1"]), curate(remove_ids=["D3", "D4"]), search("kind 4 2")
ASKED, PICKED, CROWDED = (ALPHA, search("noise 1")), (*FOUND, add("D1", "D3")), (*FOUND, add("D1", "D3", "D4"))
DENIED = verify("D1", claim="The alpha castle does not stand on the hill in Paris.")
RULES: dict[str, list[tuple[tuple[ToolCall, ...], ToolCall, ToolCall, bool]]] = {
    "evidence": [  # a search surfaces as much as the expert's
        ((), ALPHA, ALPHA, True),
        ((), search("an alpha castle in Paris"), ALPHA, True),  # other words, equal evidence
        ((), call("fan_out_search", queries=["castle", "noise"]), ALPHA, True),
        ((), BETA, ALPHA, True),  # other evidence, as much
        ((), ALPHA, BOTH, False),
        ((), NOTHING, ALPHA, False),
    ],
    "fresh": [  # beside a fruitless one it asks something new and finds something, or shows gold as the expert did
        (ASKED, NOISE, FRUITLESS, True),
        (ASKED, search("NOISE   1"), FRUITLESS, False),
        (ASKED, NOTHING, FRUITLESS, False),
        (FOUND, read("D2"), read("D1"), True),
        (FOUND, read("D3"), read("D1"), False),
        ((*FOUND, read("D2")), read("D2"), read("D1"), False),
    ],
    "curation": [  # gains as much, loses none, and leaves hardly more that is useless: none where the expert prunes
        (FOUND, add("D1", "D2"), add("D1", "D2"), True),
        (FOUND, add("D1", "D2", "D3"), add("D1", "D2"), True),
        (FOUND, add("D1", "D2", "D3", "D4"), add("D1", "D2"), False),
        (FOUND, add("D1"), add("D1", "D2"), False),
        (PICKED, SWAP, add("D2"), False),
        (PICKED, SWAP, SWAP, False),  # the expert's own, too: its turn is dropped
        (CROWDED, PRUNE, PRUNE, True),
        (CROWDED, curate(remove_ids=["D3"]), PRUNE, False),
    ],
    "verify": [  # confirms gold, and misjudges no more
        (FOUND, verify("D1"), verify("D1"), True),
        (FOUND, verify("D1", "D3"), verify("D1"), True),
        ((*FOUND, ALPHA), DENIED, verify("D1"), False),
        ((*FOUND, ALPHA), verify("D1", "D5"), verify("D1"), False),
        ((*FOUND, ALPHA), verify("D1", "D5"), verify("D1", "D5"), True),
        ((*FOUND, verify("D1")), verify("D1"), verify("D1", claim=f"{CASTLE[:-1]} now"), False),
    ],
    "review_docs": [  # shows gold that was not shown
        (FOUND, review("D2", "D4"), review("D1"), True),
        (FOUND, review("D3"), review("D1"), False),
        ((*FOUND, review("D2", "D4")), review("D2", "D4"), review("D1"), False),
    ],
    "stop": [  # with what the expert delivered in the end, and hardly more
        *(((*FOUND, add("D1", "D2", "D3")), END, expert, True) for expert in (END, ALPHA, curate(remove_ids=["D1"]))),
        ((*FOUND, add("D1")), END, ALPHA, False),
        ((*FOUND, add("D1", "D2", "D3", "D4")), END, ALPHA, False),
    ],
    "other": [  # another kind of action brings as much; pruning counts where the expert brought nothing forward
        (ASKED, add("D1"), BETA, True),  # one target forward, as the expert's search
        (ASKED, add("D2"), BETA, False),  # what is not gold
        (ASKED, BETA, add("D1"), True),
        (ASKED, BETA, verify("D1"), True),
        (ASKED, verify("D1"), BETA, False),
        ((*ASKED, add("D1", "D2")), curate(remove_ids=["D2"]), review("D1"), True),
        ((*ASKED, add("D1", "D2")), curate(remove_ids=["D2"]), BETA, False),
    ],
    "error": [  # what the environment refuses
        ((ALPHA,), wrong, expert, False)
        for wrong in (search(" "), call("search", query="alpha"), add("D99"))
        for expert in (BETA, END)
    ],
}


@pytest.mark.parametrize(
    ("rule", "before", "action", "expert", "right"), [(rule, *case) for rule in RULES for case in RULES[rule]]
)
def test_an_action_is_as_right_as_what_it_leads_to(
    rule: str, before: tuple[ToolCall, ...], action: ToolCall, expert: ToolCall, right: bool
) -> None:
    assert ruling(before, action, expert) == Ruling(rule, right)


def test_to_stop_is_right_where_nothing_more_was_gained_afterwards() -> None:
    assert ruling((*FOUND, add("D1")), END, ALPHA, SetQuality(0.5, 0)) == Ruling("stop", True)


def test_facts_are_targets_that_any_of_their_chunks_serves() -> None:
    wanted = (frozenset({UnitId("a#0"), UnitId("b#0")}), frozenset({UnitId("c#0")}))
    assert set_quality([UnitId("b#0"), UnitId("x#0")], wanted) == SetQuality(0.5, 1)
    assert set_quality([], wanted) == SetQuality(0.0, 0)
