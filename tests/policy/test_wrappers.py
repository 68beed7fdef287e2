"""Policies made of policies: turns by shares, and decisions without reasons."""

from __future__ import annotations

import pytest

from harness1.config import ChatPolicy, Env, Rendering
from harness1.env.pieces import counter_of
from harness1.env.render import Context
from harness1.episodes.rollout import replay_episode, rollout
from harness1.errors import InfrastructureFault, UsageError
from harness1.policy.language_model import LanguageModelPolicy
from harness1.policy.policy import Decision, Policy
from harness1.policy.registry import check_policy, open_policy
from harness1.policy.scripted import RandomPolicy, ScriptedPolicy
from harness1.policy.wrappers import (
    MixedPolicy,
    ReasonedPolicy,
    SilentPolicy,
    StudentFormatPolicy,
    ask_for_reason,
    in_student_format,
)
from harness1.records import DocId, Episode, Gold, Status, Task, ToolCall
from harness1.rows.calls import calls_of, prompt_ids
from harness1.tools.registry import Toolbox
from tests.policy.test_language_model import NONSENSE, Sayer
from tests.support import END, Script, call, curate, make_env, run, search, wide_corpus
from tests.vocabularies import SPOKEN, chat_format

TASK = Task("t", "Where did the father of Ada Lovelace die?")
GOLDS = {"t": Gold({DocId("byron"): 1})}


class Always:
    """A policy that takes one action for ever, and counts how often it was asked."""

    def __init__(self, action: ToolCall) -> None:
        self.action, self.asked = action, 0
        self.name = self.hash = str(action)

    def open(self, task: Task, seed: int) -> Always:
        return self

    async def act(self, context: Context) -> Decision:
        self.asked += 1
        return Decision((self.action,), "because")

    def fork(self) -> Always:
        return self


def played(share: float, seed: int = 0) -> tuple[Episode, Always, Always]:
    good, bad = Always(search("Ada")), Always(search("rain"))
    return run(rollout(make_env(), MixedPolicy(good, bad, share), TASK, seed=seed)), good, bad


def test_turns_are_shared_out_by_the_seed_and_only_who_takes_one_is_asked() -> None:
    episode, good, bad = played(0.75)
    assert good.asked + bad.asked == len(episode.turns) == 40
    assert 22 <= good.asked <= 37
    assert [policy.asked for policy in played(1.0)[1:]] == [40, 0]
    actions = [[turn.action for turn in played(0.5, seed)[0].turns] for seed in (0, 0, 1)]
    assert actions[0] == actions[1] != actions[2]
    specs = ("mixed:0.5", "mixed:0.6", "silent:mixed:0.6", "oracle-teacher")
    assert len({open_policy(spec, GOLDS).hash for spec in specs}) == 4


def test_names_of_nothing_are_refused() -> None:
    for spec in ("mixed:", "mixed:2", "mixed:x", "mixed:nan", "silent:", "silent:silent:random", "silent:hf:x"):
        with pytest.raises(UsageError, match="there is no policy"):
            check_policy(spec)


def test_a_silent_policy_gives_no_reasons_and_does_the_same() -> None:
    script = Script(search("Ada"), ToolCall("end_search", {"reasoning": "All is found."}))
    spoken, silent = (run(rollout(make_env(), each, TASK)) for each in (script, SilentPolicy(script)))
    assert [turn.observation for turn in silent.turns] == [turn.observation for turn in spoken.turns]
    assert {turn.reasoning for turn in silent.turns} == {""}
    assert silent.turns[-1].action == ToolCall("end_search")


class Fixed(Always):
    """Makes the same decision at every turn."""

    def __init__(self, decision: Decision) -> None:
        super().__init__(END)
        self.decision, self.pending = decision, None

    async def act(self, context: Context) -> Decision:
        return self.decision


def decided(*actions: ToolCall, reasoning: str = "") -> Decision:
    context = run(make_env().reset(TASK))
    return run(ReasonedPolicy(Fixed(Decision(actions, reasoning))).open(TASK, 0).act(context))


def test_every_tool_demands_a_reason_first_and_curation_a_tag() -> None:
    for spec in Toolbox.of(Env()).specs:
        shown = ask_for_reason(spec).parameters
        assert next(iter(shown["properties"])) == "reasoning"
        assert shown["properties"]["reasoning"]["type"] == "string"
        assert shown["properties"].keys() == spec.parameters["properties"].keys() | {"reasoning"}
        wanted = {"reasoning", *spec.parameters["required"], *(["importance"] if spec.name == "curate" else [])}
        assert (set(shown["required"]), len(shown["required"])) == (wanted, len(wanted))
        assert "reasoning" not in spec.parameters["required"]
    (curate,) = [spec for spec in Toolbox.of(Env().switch(tags=False)).specs if spec.name == "curate"]
    assert ask_for_reason(curate).parameters["required"] == ["reasoning"]


def test_the_reason_becomes_the_reasoning_and_leaves_the_arguments() -> None:
    poet = call("search_corpus", query="poet")
    decision = decided(call("search_corpus", query="poet", reasoning=" The father is missing. "), reasoning="hm")
    assert (decision.actions, decision.reasoning) == ((poet,), "The father is missing.")
    end = call("end_search", reasoning="All is found.")
    assert (decided(end).actions, decided(end).reasoning) == ((end,), "All is found."), "the end keeps its reason"
    for given in ({}, {"reasoning": ""}, {"reasoning": ["because"]}):
        decision = decided(call("search_corpus", query="poet", **given), reasoning="said beside")
        assert (decision.actions, decision.reasoning) == ((poet,), "said beside")
    end, search = call("end_search", reasoning="one"), call("search_corpus", query="poet", reasoning="two")
    decision = decided(end, search, call("no_such_tool", reasoning="three"))
    assert decision.reasoning == "two", "of several calls, that of the one carried out"
    assert decision.actions == (end, poet, call("no_such_tool"))


def test_forks_and_names_are_those_of_the_policy() -> None:
    inner = Fixed(Decision((call("search_corpus", query="poet", reasoning="who"),)))
    taught = ReasonedPolicy(inner)
    session = taught.open(TASK, 0)
    assert session.pending is None
    inner.pending = Decision(parse_error="cut")
    assert session.fork().pending == inner.pending
    assert taught.name == inner.name
    assert len({taught.hash, inner.hash, ReasonedPolicy(Script("x")).hash}) == 3


TASK_SPOKEN = Task("t", "Which river flows past the castle of the king in Rome?")
CORPUS = wide_corpus(30)


def spoken(policy: Policy, name: str = "hermes", kind: str = "chatml", order: str = "epoch") -> Episode:
    taught = StudentFormatPolicy(policy, chat_format(name, kind))
    config = Env(rendering=Rendering(order=order))
    env = make_env(config, CORPUS, counter=counter_of(taught))
    return run(rollout(env, taught, TASK_SPOKEN, seed=5))


@pytest.mark.parametrize("policy", [ScriptedPolicy(), RandomPolicy()], ids=["scripted", "random"])
@pytest.mark.parametrize(("name", "kind"), SPOKEN)
def test_what_a_script_does_is_what_its_outputs_say(name: str, kind: str, policy: Policy) -> None:
    episode = spoken(policy, name, kind)
    chat = chat_format(name, kind)
    assert len(episode.turns) > 2
    for turn in episode.turns:
        (recorded,) = turn.calls
        found = chat.parse(recorded.output_ids, Toolbox.of(Env()).specs)
        assert (found.actions, found.error) == ((turn.action,), None)
        assert recorded.tokenizer_hash == chat.tokenizer.hash
        assert recorded.output_ids[-1] in chat.stop_ids
    assert episode.untrainable == "its outputs have no log probabilities"


def test_its_prompts_are_those_of_the_student() -> None:
    chat = chat_format("hermes", "chatml")
    seen: list[tuple[int, ...]] = []

    class Seen(StudentFormatPolicy):
        def wrap_decision(self, decision: Decision, context: Context) -> Decision:
            seen.append(tuple(token for _, ids in [*chat.segments(context), chat.prompt_end()] for token in ids))
            return super().wrap_decision(decision, context)

    taught = Seen(Script(search("river"), search("war"), curate(add_ids=["D1"])), chat)
    episode = run(rollout(make_env(Env(), CORPUS, counter=chat), taught, TASK_SPOKEN))
    assert [prompt_ids(episode, each) for each in calls_of(episode)] == seen
    assert len(seen) == 4


def test_of_several_actions_it_says_the_one_that_counts() -> None:
    chat, specs = chat_format("hermes", "chatml"), Toolbox.of(Env()).specs
    episode = spoken(Script([END, search("river"), search("war")], END))
    assert [turn.action for turn in episode.turns] == [search("river"), END]
    assert episode.turns[0].ignored == ()
    assert chat.parse(episode.turns[0].calls[0].output_ids, specs).actions == (search("river"),)
    odd = spoken(Script(ToolCall("search_corpus", {"query": "castle \ud800", "k": float("nan")}), END)).turns[0]
    said = chat.parse(odd.calls[0].output_ids, specs)
    assert said.actions == (odd.action,), "what is no plain JSON is spoken as it is recorded"


def taught_by(*outputs: ToolCall | str | Exception, retries: int = 3) -> tuple[Episode, Sayer]:
    """An episode of a model of one vocabulary that teaches a student of another."""
    model = Sayer(TEACHER, search("river"), *outputs)
    teacher = LanguageModelPolicy(model, TEACHER, 2048, ChatPolicy(format_retries=retries))
    return spoken(teacher, "compact", "chatml", "paper"), model


TEACHER = chat_format("hermes", "qwen")


def test_a_model_of_another_vocabulary_never_sees_the_ids_of_its_student() -> None:
    episode, model = taught_by()
    student = chat_format("compact", "chatml")
    assert [turn.action for turn in episode.turns] == [search("river"), END]
    assert episode.turns[0].calls[0].output_ids == student.format_action("Because.", search("river"))
    shown = TEACHER.tokenizer.decode(model.prompts[1])
    assert "Because." in shown
    assert '"query": "river"' in shown
    assert replay_episode(episode, Env(rendering=Rendering(order="paper"))).difference is None


def test_attempts_of_a_model_that_came_to_nothing_or_failed_leave_nothing_in_the_record() -> None:
    episode, model = taught_by(NONSENSE, NONSENSE, retries=1)
    assert (episode.status, len(episode.turns), len(model.prompts)) == (Status.POLICY_ERROR, 2, 3)
    assert replay_episode(episode, Env(rendering=Rendering(order="paper"))).difference is None
    failed, _ = taught_by(NONSENSE, InfrastructureFault("the model is gone"))
    assert (failed.status, failed.error) == (Status.INFRA_ERROR, "the model is gone")
    for each in (episode, failed):
        assert (each.turns[1].parse_error, each.turns[1].calls) == ("there is no call", ())
        assert each.segments.keys() <= {key for turn in each.turns for made in turn.calls for key in made.prompt}


def test_the_hash_names_policy_and_format() -> None:
    policies = ScriptedPolicy(), RandomPolicy()
    made = [StudentFormatPolicy(policy, chat_format(*names)) for policy in policies for names in SPOKEN]
    assert len({each.hash for each in made}) == len(made)
    assert made[0].name == "scripted"
    model = LanguageModelPolicy(Sayer(TEACHER), TEACHER, 2048)
    assert in_student_format(model, chat_format("hermes", "qwen")) is model, "it speaks for itself"
    assert isinstance(in_student_format(model, chat_format("compact", "qwen")), StudentFormatPolicy)
    assert isinstance(in_student_format(ScriptedPolicy(), TEACHER), StudentFormatPolicy)
