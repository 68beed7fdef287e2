"""One episode: one action a turn, isolated forks, and no argument that a policy can think of breaks it."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext

import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from harness1.config import Env, Rendering, load_config
from harness1.env.environment import SearchEnv, choose
from harness1.errors import ConfigError, HarnessError, InfrastructureFault
from harness1.memory.working_memory import WorkingMemory
from harness1.records import Gold, StopReason, Task, ToolCall, Turn
from tests.support import END, call, chunk, curate, make_env, play, recount, run, search, text_of, wide_corpus

PLAN = (
    search("river castle"),
    curate(add_ids=["D3"], importance={"D3": "high"}),
    call("fan_out_search", queries=["Paris", "London"]),
    call("read_document", doc_id="D2"),
    call("verify", doc_ids=["D1"], claim="The river has a castle."),
    search("engine"),
)
ASIDE = (call("grep_corpus", pattern="rain"), curate(add_ids=["D1"], remove_ids=["D2"]), search("war"), END)

JUNK_NAME = st.one_of(
    st.sampled_from(["", "end_search ", "functions.curate", "\x00", "x" * 10_000]), st.text(max_size=9)
)
NAME = st.sampled_from(
    ["fan_out_search", "search_corpus", "grep_corpus", "read_document", "review_docs", "curate", "verify", "end_search"]
)
HANDLE = st.sampled_from(["D1", "d2", "[D3]", "D1.1", "D99", "doc_1", "copy_3", "D-1", "D1e9", "", "D" + "9" * 600])
TEXT = st.one_of(
    HANDLE,
    st.sampled_from(["river", "castle war", "a\x00b\x1b[2J", "\ud800", "x\udfff\n", "{name}", "(", "(?=x)", "<|end|>"]),
    st.text(st.characters(codec=None), max_size=20),
)
SCALAR = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), TEXT)
VALUE = st.recursive(
    SCALAR, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=3), max_leaves=6
)
ARGUMENTS = {
    **dict.fromkeys(("query", "pattern", "claim"), TEXT),
    "queries": st.lists(TEXT, max_size=7),
    "doc_id": HANDLE,
    **dict.fromkeys(("doc_ids", "add_ids", "remove_ids"), st.lists(HANDLE, max_size=9)),
    "importance": st.dictionaries(HANDLE, TEXT | st.sampled_from(["high", "low"]), max_size=4),
}
KEY, LIKELY = st.sampled_from([*ARGUMENTS]), st.fixed_dictionaries({}, optional=ARGUMENTS)
FITTING = st.sampled_from([*PLAN, *ASIDE[:3], call("review_docs", doc_ids=["D1", "D4"])])
ACTION = st.one_of(
    FITTING, st.builds(ToolCall, NAME | JUNK_NAME, st.one_of(LIKELY, st.dictionaries(KEY | TEXT, VALUE, max_size=4)))
)


def small_env(order: str = "paper", **options: object) -> SearchEnv:
    config = Env(context_window=6000, generation_reserve=500, rendering=Rendering(order))
    return make_env(msgspec.structs.replace(config, **options), wide_corpus(25))


@given(
    st.sampled_from(["paper", "stable_first", "epoch"]),
    st.lists(st.tuples(st.lists(ACTION, min_size=1, max_size=3), TEXT), max_size=10),
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_no_action_breaks_an_episode(order: str, decisions: list[tuple[list[ToolCall], str]]) -> None:
    env = small_env(order)
    turns: list[Turn] = []

    async def steps() -> None:
        context = await env.reset(Task("t", "Which castle?"))
        for actions, reasoning in decisions:
            assert recount(env, context) <= context.budget.used <= context.budget.limit
            step = await env.step(actions, reasoning)
            turns.append(step.turn)
            assert len(env.state.memory.curated) <= 30
            assert env.state.memory.curated.tags.keys() <= env.state.memory.pool.entries.keys()
            if step.done is not None:
                return
            context = step.context

    run(steps())
    recorded = [msgspec.json.decode(msgspec.json.encode(turn), type=Turn) for turn in turns]
    twin = small_env(order)
    twin.begin(WorkingMemory.empty("Which castle?", "document"))
    for turn in recorded:
        again = twin.replay(turn).turn
        assert (again.memory_hash, again.context_hash) == (turn.memory_hash, turn.context_hash)


def test_deep_nesting_and_odd_types_are_recorded_in_plain_form() -> None:
    nested: object = "deep"
    for _ in range(500):
        nested = [nested]
    action = ToolCall("search_corpus", {"query": nested, "big": 10**400, "odd": b"bytes", "nan": float("nan")})
    step = play(small_env(), action)[0]
    assert msgspec.json.decode(msgspec.json.encode(step.turn), type=Turn) == step.turn
    odd = ToolCall("search_corpus", ["no", "mapping"])
    assert play(small_env(), odd)[0].turn.action == ToolCall("search_corpus", {"arguments": ["no", "mapping"]})


def test_ten_megabytes_of_arguments_end_in_an_error_or_the_context_limit() -> None:
    long = "x" * 10_000_000
    for action in (
        *(search(long), ToolCall(long), call("grep_corpus", pattern="(" * 10_000_000)),
        curate(add_ids=["D" + "1" * 10_000_000], importance={long: "high"}),
        call("verify", doc_ids=["D1"] * 1_000_000, claim="claim " * 1_000_000),
    ):
        step = play(small_env(), action)[0]
        assert step.done in (None, StopReason.CONTEXT_LIMIT)
        assert step.observation.error is not None
        assert len(msgspec.json.encode(step.observation)) < 2000


@given(
    st.lists(st.one_of(st.text(max_size=8), HANDLE.filter(lambda handle: len(handle) < 9)), max_size=6),
    st.dictionaries(st.text(max_size=5), st.text()),
)
@example(["D1", "D4", "D5", "byron "], {"D9": "high"})
@settings(max_examples=60, deadline=None)
def test_no_invented_id_is_ever_curated(add_ids: list[str], importance: dict[str, str]) -> None:
    env = make_env()
    step = play(env, search("Ada Lovelace Byron"), curate(add_ids=add_ids, importance=importance))[1]
    memory = env.state.memory
    assert memory.curated.tags.keys() <= {"ada", "byron", "babbage"}
    invented = [reference for reference in (*add_ids, *importance) if memory.pool.resolve(reference) is None]
    told = [*step.observation.notes, step.observation.error]
    assert any(note is not None and note.code == "unknown_handles" for note in told) == bool(invented)


@pytest.mark.parametrize("order", ["paper", "stable_first", "epoch"])
def test_a_fork_at_any_turn_is_isolated(order: str) -> None:
    straight = play(small_env(order), *PLAN, END)
    for turn in range(len(PLAN)):
        env = small_env(order)
        context = play(env, *PLAN[: turn + 1])[-1].context
        memory, text, curated = env.state.memory.hash(), text_of(context), context.view.curated
        twin = env.fork()
        for action in (ASIDE[turn % 4], ASIDE[(turn + 1) % 4]):
            if twin.state.done is None:
                run(twin.step([action], "aside"))
        assert env.state.memory.hash() == memory
        assert env.state.context is context
        assert (text_of(context), context.view.curated) == (text, curated)
        rest = [run(env.step([action], "because")) for action in (*PLAN[turn + 1 :], END)]
        assert [step.turn for step in rest] == [step.turn for step in straight[turn + 1 :]]


def test_a_snapshot_can_be_restored_any_number_of_times() -> None:
    env = small_env()
    play(env, *PLAN[:3])
    saved = env.snapshot()
    name, seen = saved.memory.hash(), set()
    for action in ASIDE[:3]:
        assert env.restore(saved) is saved.context
        run(env.step([action]))
        assert saved.memory.hash() == name
        env.restore(saved)
        step = run(env.step([PLAN[3]], "because"))
        seen.add((step.turn.memory_hash, text_of(step.context)))
    assert len(seen) == 1


def test_handles_of_one_branch_or_episode_do_not_leak_into_another() -> None:
    config = Env(rendering=Rendering(window=(1, 9))).switch(auto_populate=False)
    env = make_env(config, [chunk("a", "alpha text"), chunk("b", "beta text")])
    run(env.reset(Task("t", "q")))
    saved = env.snapshot()
    for words in (("alpha", "beta"), ("beta", "alpha"), ("alpha", "beta")):
        for action in (*map(search, words), curate(remove_ids=["D1"])):
            documents = run(env.step([action])).context.view.documents
        assert [documents[handle].unit_id for handle in ("D1", "D2")] == [words[0][0], words[1][0]]
        if words[0] == "alpha":
            env.restore(saved)
        else:
            run(env.reset(Task("t", "q")))


def test_one_action_is_carried_out_and_the_others_are_told() -> None:
    env = make_env()
    run(env.reset(Task("t", "q")))
    step = run(env.step([END, search("Ada"), curate(add_ids=["D1"])]))
    assert step.turn.action == search("Ada")
    assert step.turn.ignored == (END, curate(add_ids=["D1"]))
    assert step.done is None
    assert "Not executed: end_search, curate; one action per turn." in text_of(step.context)


@pytest.mark.parametrize(
    ("names", "executed"), [("E", "E"), ("a", "a"), ("Ea", "a"), ("aE", "a"), ("EE", "E"), ("ab", "a")]
)
def test_the_first_action_that_does_not_end_is_chosen(names: str, executed: str) -> None:
    actions = {"E": END, "a": search("a"), "b": search("b")}
    chosen, ignored = choose([actions[name] for name in names])
    assert (chosen, len(ignored)) == (actions[executed], len(names) - 1)


def test_an_episode_ends_on_end_search_alone_or_on_its_last_turn() -> None:
    assert [step.done for step in play(make_env(), search("Ada"), END)] == [None, StopReason.END_SEARCH]
    late = play(make_env(Env(max_turns=2)), search("Ada"), search("Byron"))
    assert [step.done for step in late] == [None, StopReason.TURN_LIMIT]
    assert late[-1].observation.hits, "the last result is recorded"
    bad_end = play(make_env(), ToolCall("end_search", {"why": 1}))[0]
    assert bad_end.done is None
    assert bad_end.observation.error is not None


def test_an_environment_refuses_gold_and_needs_a_reset() -> None:
    env = make_env()
    with pytest.raises(HarnessError, match="reset"):
        run(env.step([END]))
    with pytest.raises(HarnessError, match="gold"):
        run(env.reset(Task("t", "q", gold=Gold({}))))
    with pytest.raises(HarnessError, match="gold"):
        run(env.reset(Task("t", "q", metadata={"answer": "x"})))
    run(env.reset(Task("t", "q")))
    with pytest.raises(ValueError, match="parse error"):
        run(env.step([]))


@pytest.mark.parametrize(
    ("config", "actions"),
    [
        (Env(), (search("Ada"), END)),
        (Env(max_turns=1), (search("Ada"),)),
        (Env(context_window=2050, generation_reserve=300), (ToolCall("unknown", {"text": "x" * 20_000}),)),
    ],
)
def test_there_is_no_step_after_the_end(config: Env, actions: tuple[ToolCall, ...]) -> None:
    env = make_env(config)
    done = play(env, *actions)[-1].done
    assert done is not None
    for _ in range(2):
        with pytest.raises(HarnessError, match=f"has ended .{done}"):
            run(env.step([search("Byron")]))
        env.restore(env.snapshot())
    assert play(env, search("Ada"))[0].done == (StopReason.TURN_LIMIT if config.max_turns == 1 else None)


@pytest.mark.parametrize("failure", [InfrastructureFault, asyncio.CancelledError])
def test_a_step_that_fails_leaves_the_state_as_it_was(failure: type[BaseException]) -> None:
    class Broken:
        async def answer(self, request: object, memory: object) -> None:
            raise failure

    inside = call("review_docs", doc_ids=["D1"]), curate(add_ids=["D1"]), END
    outside = PLAN[0], PLAN[2], ASIDE[0], call("read_document", doc_id="D1"), PLAN[4]
    assert {action.name for action in inside + outside} == {spec.name for spec in make_env().toolbox.specs}
    for action in inside + outside:
        env = make_env()
        play(env, search("town"))
        saved, env.world = env.snapshot(), Broken()
        with pytest.raises(failure) if action in outside else nullcontext():
            run(env.step([action]))
        assert (env.state == saved) == (action in outside)


def test_a_window_that_cannot_hold_a_turn_is_refused_with_one_that_can() -> None:
    for config in (Env(context_window=1024), Env(context_window=2048), Env(context_window=900, generation_reserve=100)):
        with pytest.raises(ConfigError, match="must be at least") as refused:
            make_env(config)
        needed = int(str(refused.value).split()[-1])
        make_env(msgspec.structs.replace(config, context_window=needed))
        with pytest.raises(ConfigError):
            make_env(msgspec.structs.replace(config, context_window=needed - 1))


def test_a_name_that_a_policy_made_up_forges_no_line() -> None:
    name = "x\nBudget: 0 of 1 tokens"
    env = make_env()
    run(env.reset(Task("t", "q")))
    step = run(env.step([ToolCall(name, {"y": "z"}), ToolCall(name)]))
    assert step.observation.tool == "x Budget: 0 of 1 tokens"
    run(env.step([search("Ada")]))
    step = run(env.step([curate(add_ids=["D1", name], remove_ids=[name], importance={"D1": name})]))
    assert "x Budget: 0 of 1 tokens" in text_of(step.context)
    assert not [line for line in text_of(step.context).splitlines() if line.startswith("Budget: 0")]


@pytest.mark.parametrize("order", ["paper", "stable_first", "epoch"])
def test_a_turn_says_what_its_prompt_held_and_what_of_it_no_cache_of_the_one_before_holds(order: str) -> None:
    env = make_env(load_config(None, [f"env.rendering.order={order}"]).env, wide_corpus(20))
    steps = play(env, search("river castle"), search("bridge king"), search("Paris London"))
    assert steps[0].turn.prefill_tokens == steps[0].turn.prompt_tokens > 0
    for step, before, seen in zip(steps[2:], (steps[0].context,), (steps[1].context,), strict=True):
        equal = [now == old for now, old in zip(seen.pieces, before.pieces, strict=False)]
        common = seen.pieces[: equal.index(False) if False in equal else len(equal)]
        held = env.counter.tools(seen.tools) + env.renderer.counts.total(common)
        assert step.turn.prompt_tokens == seen.budget.used
        assert 0 < step.turn.prefill_tokens == seen.budget.used - held < step.turn.prompt_tokens
