"""A policy may send anything: every call gets an answer, the memory keeps its invariants, and the episode replays."""

from __future__ import annotations

from hypothesis import strategies as st

from harness1.config import Env, load_config
from harness1.episodes.rollout import replay_episode, rollout
from harness1.policy.policy import Decision
from harness1.policy.scripted import RuleSession
from harness1.records import Status, Task, ToolCall, decode_episode, encode_episode
from harness1.tools.registry import Toolbox
from tests.attack.attack import Attack
from tests.support import make_env, run

TURNS = 12
HANDLES = ("D1", "D2", "D99", "E1", "D0", "d1", "D1#0", "D-1", "ada", "")
"""Names of documents, of which some exist."""

HOSTILE = ("a" * 70_000, "\x1b]0;x\x07", "\u202egnp.exe", "[/x]", "\ud800", "((((", "(a+)+$", "\0", "Ada Byron")

texts = st.one_of(st.text(max_size=60), st.sampled_from(HOSTILE))
values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), texts, st.sampled_from(HANDLES)),
    lambda inner: st.one_of(st.lists(inner, max_size=5), st.dictionaries(texts, inner, max_size=4)),
    max_leaves=12,
)


def calls() -> st.SearchStrategy[ToolCall]:
    """Calls of tools that exist and of others, with arguments of any kind under names that exist and others."""
    specs = {spec.name: spec.parameters for spec in Toolbox.of(Env()).specs}
    names = st.one_of(st.sampled_from(sorted(specs)), texts)
    keys = sorted({key for schema in specs.values() for key in schema["properties"]})
    arguments = st.dictionaries(st.one_of(st.sampled_from(keys), texts), values, max_size=4)
    plausible = st.fixed_dictionaries({}, optional=dict.fromkeys(keys, values))
    return st.builds(ToolCall, names, st.one_of(arguments, plausible, values))


class Sends:
    name = hash = "attack"

    def __init__(self, turns: list[list[ToolCall]]) -> None:
        self._turns = turns

    def open(self, task: Task, seed: int) -> RuleSession:
        return RuleSession(lambda at, context: Decision(tuple(self._turns[at % len(self._turns)]), "because \x1b[31m"))


def test_no_action_breaks_an_episode_or_its_record(attack: Attack) -> None:
    config, sent = load_config(None, [f"env.max_turns={TURNS}"]).env, 0

    def survives(turns: list[list[ToolCall]]) -> None:
        nonlocal sent
        env = make_env(config)
        episode = run(rollout(env, Sends(turns), Task("t", "Where did the father of Ada Lovelace die?")))
        sent += sum(len(turns[at % len(turns)]) for at in range(len(episode.turns)))
        assert episode.status is not Status.INFRA_ERROR, episode.error
        memory = env.state.memory
        assert len(memory.curated.tags) <= config.curation.cap
        assert set(memory.curated.tags) <= set(memory.pool.entries)
        assert not set(memory.pool.aliases) & set(memory.pool.entries)
        assert all(turn.prompt_tokens <= config.context_window - config.generation_reserve for turn in episode.turns)
        again = decode_episode(encode_episode(episode))
        assert again == episode
        assert replay_episode(again, config).difference is None

    batches = st.lists(st.lists(calls(), min_size=1, max_size=3), min_size=1, max_size=TURNS)
    attack.try_all(batches, survives, 2_000)
    attack.report("actions", calls=sent, episodes=attack.times(2_000))
