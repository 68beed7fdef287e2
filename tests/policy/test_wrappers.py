"""Policies made of policies: turns by shares, and decisions without reasons."""

from __future__ import annotations

import pytest

from harness1.config import ChatPolicy, Env, Rendering
from harness1.env.render import Context
from harness1.episodes.rollout import replay_episode, rollout
from harness1.errors import InfrastructureFault, UsageError
from harness1.models.backend import SampledOutput
from harness1.policy.language_model import LanguageModelPolicy
from harness1.policy.policy import Decision, Policy, counter_of
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


def played(shares: tuple[float, float], seed: int = 0) -> tuple[Episode, Always, Always]:
    good, bad = Always(search("Ada")), Always(search("rain"))
    episode = run(rollout(make_env(), MixedPolicy((good, bad), shares), TASK, seed=seed))
    return episode, good, bad


def test_turns_are_shared_out_and_only_who_takes_one_is_asked() -> None:
    episode, good, bad = played((3, 1))
    assert good.asked + bad.asked == len(episode.turns) == 40
    assert 22 <= good.asked <= 37
    assert [policy.asked for policy in played((1, 0))[1:]] == [40, 0]


def test_the_seed_decides_who_is_next() -> None:
    actions = [[turn.action for turn in played((1, 1), seed)[0].turns] for seed in (0, 0, 1)]
    assert actions[0] == actions[1] != actions[2]


@pytest.mark.parametrize("shares", [(1.0,), (1.0, -1.0), (0.0, 0.0)])
def test_shares_that_are_none_are_refused(shares: tuple[float, ...]) -> None:
    with pytest.raises(UsageError, match="shares"):
        MixedPolicy((Script(END), Script(END)), shares)


def test_policies_and_shares_are_in_the_hash() -> None:
    hashes = {
        open_policy(spec, GOLDS).hash for spec in ("mixed:0.5", "mixed:0.6", "silent:mixed:0.6", "oracle-teacher")
    }
    assert len(hashes) == 4


def test_a_silent_policy_gives_no_reasons_and_does_the_same() -> None:
    script = Script(search("Ada"), ToolCall("end_search", {"reasoning": "All is found."}))
    spoken, silent = (run(rollout(make_env(), each, TASK)) for each in (script, SilentPolicy(script)))
    assert [turn.observation for turn in silent.turns] == [turn.observation for turn in spoken.turns]
    assert {turn.reasoning for turn in silent.turns} == {""}
    assert silent.turns[-1].action == ToolCall("end_search")


@pytest.mark.parametrize(
    "spec", ["mixed:", "mixed:2", "mixed:x", "mixed:nan", "silent:", "silent:silent:random", "silent:hf:x"]
)
def test_names_of_nothing_are_refused(spec: str) -> None:
    with pytest.raises(UsageError, match="there is no policy"):
        check_policy(spec)


class Fixed(Script):
    """Makes the same decision at every turn and remembers what it was shown."""

    def __init__(self, decision: Decision) -> None:
        super().__init__()
        self.decision, self.shown = decision, list[Context]()
        self.pending: Decision | None = None

    def open(self, task: Task, seed: int) -> Fixed:
        return self

    async def act(self, context: Context) -> Decision:
        self.shown.append(context)
        return self.decision

    def fork(self) -> Fixed:
        return self


def decided(*actions: ToolCall, reasoning: str = "", env: Env = Env(), error: str | None = None) -> Decision:  # noqa: B008
    async def act() -> Decision:
        context = await make_env(env).reset(TASK)
        assert context is not None
        return await ReasonedPolicy(Fixed(Decision(actions, reasoning, parse_error=error))).open(TASK, 0).act(context)

    return run(act())


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
    decision = decided(call("search_corpus", query="poet", reasoning=" The father is missing. "), reasoning="hm")
    assert decision.actions == (call("search_corpus", query="poet"),)
    assert decision.reasoning == "The father is missing."
    end = call("end_search", reasoning="All is found.")
    assert (decided(end).actions, decided(end).reasoning) == ((end,), "All is found."), "the end keeps its reason"


@pytest.mark.parametrize("given", [{}, {"reasoning": ""}, {"reasoning": ["because"]}])
def test_what_was_said_beside_a_call_stands_where_no_reason_was_given(given: dict[str, object]) -> None:
    decision = decided(call("search_corpus", query="poet", **given), reasoning="said beside")
    assert (decision.actions, decision.reasoning) == ((call("search_corpus", query="poet"),), "said beside")


def test_of_several_calls_the_reason_is_that_of_the_one_carried_out() -> None:
    end, search = call("end_search", reasoning="one"), call("search_corpus", query="poet", reasoning="two")
    decision = decided(end, search, call("no_such_tool", reasoning="three"))
    assert decision.reasoning == "two"
    assert decision.actions == (end, call("search_corpus", query="poet"), call("no_such_tool"))


def test_forks_and_names_are_those_of_the_policy() -> None:
    inner = Fixed(Decision((call("search_corpus", query="poet", reasoning="who"),)))
    taught = ReasonedPolicy(inner)
    session = taught.open(TASK, 0)
    assert session.pending is None
    inner.pending = Decision(parse_error="cut")
    assert session.fork().pending == inner.pending
    assert (taught.name, taught.hash != inner.hash) == ("script", True)
    assert ReasonedPolicy(Script("x")).hash != taught.hash


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
        def open(self, task: Task, seed: int) -> Seen:
            self.session = super().open(task, seed)
            return self

        async def act(self, context):
            seen.append(tuple(token for _, ids in [*chat.segments(context), chat.prompt_end()] for token in ids))
            return await self.session.act(context)

    taught = Seen(Script(search("river"), search("war"), curate(add_ids=["D1"])), chat)
    episode = run(rollout(make_env(Env(), CORPUS, counter=chat), taught, TASK_SPOKEN))
    assert [prompt_ids(episode, each) for each in calls_of(episode)] == seen
    assert len(seen) == 4


def test_of_several_actions_it_says_the_one_that_counts() -> None:
    episode = spoken(Script([END, search("river"), search("war")], END))
    assert [turn.action for turn in episode.turns] == [search("river"), END]
    assert episode.turns[0].ignored == ()
    said = chat_format("hermes", "chatml").parse(episode.turns[0].calls[0].output_ids, Toolbox.of(Env()).specs)
    assert said.actions == (search("river"),)
    odd = spoken(Script(ToolCall("search_corpus", {"query": "castle \ud800", "k": float("nan")}), END)).turns[0]
    said = chat_format("hermes", "chatml").parse(odd.calls[0].output_ids, Toolbox.of(Env()).specs)
    assert said.actions == (odd.action,), "what is no plain JSON is spoken as it is recorded"


@pytest.mark.parametrize("order", ["paper", "stable_first", "epoch", "transcript"])
def test_its_episodes_are_replayed_without_a_tokenizer(order: str) -> None:
    episode = spoken(ScriptedPolicy(), order=order)
    report = replay_episode(episode, Env(rendering=Rendering(order=order)))
    assert (report.equal, report.difference) == (len(episode.turns), None)


class Outputs:
    """A model that says given outputs and remembers its prompts; then it fails."""

    hash = "outputs"

    def __init__(self, *outputs: tuple[int, ...]) -> None:
        self.outputs, self.prompts = list(outputs), list[list[int]]()

    async def generate(self, prompt_ids, sampling, grammar=None) -> SampledOutput:
        self.prompts.append(list(prompt_ids))
        if not self.outputs:
            raise InfrastructureFault("the model is gone")
        return SampledOutput(self.outputs.pop(0), (), "stop")


def taught_by(*outputs: tuple[int, ...], retries: int = 3) -> tuple[Episode, Outputs]:
    """An episode of a model of one vocabulary that teaches a student of another."""
    model = Outputs(*outputs)
    settings = ChatPolicy(format_retries=retries)
    teacher = LanguageModelPolicy(model, TEACHER, 2048, settings)
    return spoken(teacher, "compact", "chatml", "paper"), model


TEACHER = chat_format("hermes", "qwen")
SEARCHED = TEACHER.format_action("The river is missing.", search("river"))
NONSENSE = (*TEACHER.text("Nothing to call."), *TEACHER.stop_ids)


def test_a_model_of_another_vocabulary_never_sees_the_ids_of_its_student() -> None:
    episode, model = taught_by(SEARCHED, TEACHER.format_action("", END))
    student = chat_format("compact", "chatml")
    assert [turn.action for turn in episode.turns] == [search("river"), END]
    assert episode.turns[0].calls[0].output_ids == student.format_action("The river is missing.", search("river"))
    shown = TEACHER.tokenizer.decode(model.prompts[1])
    assert "The river is missing." in shown
    assert '"query": "river"' in shown
    assert replay_episode(episode, Env(rendering=Rendering(order="paper"))).difference is None


def test_attempts_of_a_model_that_came_to_nothing_leave_nothing_in_the_record() -> None:
    episode, model = taught_by(SEARCHED, NONSENSE, NONSENSE, retries=1)
    assert (episode.status, len(episode.turns), len(model.prompts)) == (Status.POLICY_ERROR, 2, 3)
    assert (episode.turns[1].parse_error, episode.turns[1].calls) == ("there is no call", ())
    assert replay_episode(episode, Env(rendering=Rendering(order="paper"))).difference is None


def test_a_model_that_fails_within_a_turn_leaves_the_turn_without_its_calls() -> None:
    episode, _ = taught_by(SEARCHED, NONSENSE)
    assert (episode.status, episode.error) == (Status.INFRA_ERROR, "the model is gone")
    assert (episode.turns[1].parse_error, episode.turns[1].calls) == ("there is no call", ())
    named = {key for turn in episode.turns for each in turn.calls for key in each.prompt}
    assert episode.segments.keys() <= named


def test_the_hash_names_policy_and_format() -> None:
    hashes = {
        StudentFormatPolicy(policy, chat_format(name, kind)).hash
        for policy in (ScriptedPolicy(), RandomPolicy())
        for name, kind in SPOKEN
    }
    assert len(hashes) == 2 * len(SPOKEN)
    model = LanguageModelPolicy(Outputs(), TEACHER, 2048)
    assert in_student_format(model, chat_format("hermes", "qwen")) is model, "it speaks for itself"
    assert isinstance(in_student_format(model, chat_format("compact", "qwen")), StudentFormatPolicy)
    assert isinstance(in_student_format(ScriptedPolicy(), TEACHER), StudentFormatPolicy)
    assert StudentFormatPolicy(ScriptedPolicy(), chat_format("hermes", "qwen")).name == "scripted"
