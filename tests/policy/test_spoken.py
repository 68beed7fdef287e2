"""A policy without a model speaks a format: its episodes hold the tokens that a model would have said."""

from __future__ import annotations

import pytest

from harness1.config import ChatPolicy, Env, Rendering
from harness1.episodes.rollout import replay_episode, rollout
from harness1.errors import InfrastructureFault
from harness1.models.backend import SampledOutput
from harness1.policy.language_model import LanguageModelPolicy
from harness1.policy.policy import Policy, counter_of
from harness1.policy.scripted import RandomPolicy, ScriptedPolicy
from harness1.policy.wrappers import StudentFormatPolicy, in_student_format
from harness1.records import Episode, Status, Task, ToolCall
from harness1.rows.calls import calls_of, prompt_ids
from harness1.tools.registry import Toolbox
from tests.support import END, Script, curate, make_env, run, search, wide_corpus
from tests.vocabularies import SPOKEN, chat_format

TASK = Task("t", "Which river flows past the castle of the king in Rome?")
CORPUS = wide_corpus(30)


def spoken(policy: Policy, name: str = "hermes", kind: str = "chatml", order: str = "epoch") -> Episode:
    taught = StudentFormatPolicy(policy, chat_format(name, kind))
    config = Env(rendering=Rendering(order=order))  # type: ignore[arg-type]
    env = make_env(config, CORPUS, counter=counter_of(taught))
    return run(rollout(env, taught, TASK, seed=5))


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
        def open(self, task: Task, seed: int) -> Seen:  # type: ignore[override]
            self.session = super().open(task, seed)
            return self

        async def act(self, context):  # type: ignore[no-untyped-def]
            seen.append(tuple(token for _, ids in [*chat.segments(context), chat.prompt_end()] for token in ids))
            return await self.session.act(context)

    taught = Seen(Script(search("river"), search("war"), curate(add_ids=["D1"])), chat)
    episode = run(rollout(make_env(Env(), CORPUS, counter=chat), taught, TASK))
    assert [prompt_ids(episode, each) for each in calls_of(episode)] == seen
    assert len(seen) == 4


def test_of_several_actions_it_says_the_one_that_counts() -> None:
    episode = spoken(Script([END, search("river"), search("war")], END))
    assert [turn.action for turn in episode.turns] == [search("river"), END]
    assert episode.turns[0].ignored == ()
    said = chat_format("hermes", "chatml").parse(episode.turns[0].calls[0].output_ids, Toolbox.of(Env()).specs)
    assert said.actions == (search("river"),)


def test_what_is_no_plain_json_is_spoken_as_it_is_recorded() -> None:
    episode = spoken(Script(ToolCall("search_corpus", {"query": "castle \ud800", "k": float("nan")}), END))
    said = chat_format("hermes", "chatml").parse(episode.turns[0].calls[0].output_ids, Toolbox.of(Env()).specs)
    assert said.actions == (episode.turns[0].action,)


@pytest.mark.parametrize("order", ["paper", "stable_first", "epoch", "transcript"])
def test_its_episodes_are_replayed_without_a_tokenizer(order: str) -> None:
    episode = spoken(ScriptedPolicy(), order=order)
    report = replay_episode(episode, Env(rendering=Rendering(order=order)))  # type: ignore[arg-type]
    assert (report.equal, report.difference) == (len(episode.turns), None)


class Outputs:
    """A model that says given outputs and remembers its prompts; then it fails."""

    hash = "outputs"

    def __init__(self, *outputs: tuple[int, ...]) -> None:
        self.outputs, self.prompts = list(outputs), list[list[int]]()

    async def generate(self, prompt_ids, sampling, grammar=None) -> SampledOutput:  # type: ignore[no-untyped-def]
        self.prompts.append(list(prompt_ids))
        if not self.outputs:
            raise InfrastructureFault("the model is gone")
        return SampledOutput(self.outputs.pop(0), (), "stop")


def taught_by(*outputs: tuple[int, ...], retries: int = 3) -> tuple[Episode, Outputs]:
    """An episode of a model of one vocabulary that teaches a student of another."""
    model = Outputs(*outputs)
    settings = ChatPolicy(format_retries=retries)
    teacher = LanguageModelPolicy(model, TEACHER, 2048, settings)  # type: ignore[arg-type]
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


def test_a_model_of_the_very_format_speaks_for_itself() -> None:
    model = LanguageModelPolicy(Outputs(), TEACHER, 2048)  # type: ignore[arg-type]
    assert in_student_format(model, chat_format("hermes", "qwen")) is model
    assert isinstance(in_student_format(model, chat_format("compact", "qwen")), StudentFormatPolicy)
    assert isinstance(in_student_format(ScriptedPolicy(), TEACHER), StudentFormatPolicy)


def test_forks_go_on_alike() -> None:
    taught = StudentFormatPolicy(ScriptedPolicy(), chat_format("compact", "chatml"))

    async def play() -> None:
        env = make_env(chunks=CORPUS, counter=taught.counter)
        context = await env.reset(TASK)
        assert context is not None
        session = taught.open(TASK, 0)
        decision = await session.act(context)
        context = (await env.step(decision.actions, "", decision.calls)).context
        assert context is not None
        twin = session.fork()
        assert await twin.act(context) == await session.act(context)

    run(play())


def test_the_hash_names_policy_and_format() -> None:
    hashes = {
        StudentFormatPolicy(policy, chat_format(name, kind)).hash
        for policy in (ScriptedPolicy(), RandomPolicy())
        for name, kind in SPOKEN
    }
    assert len(hashes) == 2 * len(SPOKEN)
    assert StudentFormatPolicy(ScriptedPolicy(), chat_format("hermes", "qwen")).name == "scripted"
