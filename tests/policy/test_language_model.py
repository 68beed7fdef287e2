"""A model as a policy: every attempt is recorded as it was, a faulty one leaves no trace in what comes after."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness1.config import ChatPolicy, Env, Rendering
from harness1.env.environment import SearchEnv
from harness1.env.pieces import counter_of
from harness1.episodes.rollout import replay_episode, rollout
from harness1.errors import InfrastructureFault, UsageError
from harness1.models.backend import Grammar, SampledOutput
from harness1.models.chat_format import ChatFormat
from harness1.plain import digest
from harness1.policy.language_model import LanguageModelPolicy, call_seed
from harness1.records import Episode, ModelCall, Sampling, Status, StopReason, Task, ToolCall
from harness1.rows.calls import calls_of, calls_to_train, prompt_ids
from tests.support import END, curate, make_env, run, search, wide_corpus
from tests.vocabularies import SPOKEN, chat_format

TASK = Task("t", "Where did the father of Ada Lovelace die?")
NONSENSE = "the secret nonsense of a faulty attempt"
RESERVE = 400


class Sayer:
    """A backend that says what it is told, one output for each call; a string stands for words without a call."""

    hash = "sayer"
    version = 7

    def __init__(self, chat: ChatFormat, *outputs: ToolCall | str | Exception) -> None:
        self.chat, self.outputs = chat, list(outputs)
        self.prompts: list[tuple[int, ...]] = []
        self.samplings: list[Sampling] = []
        self.grammars: list[Grammar | None] = []

    async def generate(self, ids: Sequence[int], sampling: Sampling, grammar: Grammar | None = None) -> SampledOutput:
        self.prompts.append(tuple(ids))
        self.samplings.append(sampling)
        self.grammars.append(grammar)
        output = self.outputs.pop(0) if self.outputs else END
        if isinstance(output, Exception):
            raise output
        if isinstance(output, str):
            ids = (*self.chat.text(output), self.chat.stop_ids[0])
        else:
            ids = self.chat.format_action("Because.", output)
        logprobs = tuple(-(number + 1) / 7 for number in range(len(ids)))
        return SampledOutput(ids, logprobs, "stop", self.version, self.version + 1)

    async def load_weights(self, folder: Path, version: int) -> None:
        raise UsageError("it has none")


def policy_of(model: Sayer, **settings: Any) -> LanguageModelPolicy:
    return LanguageModelPolicy(model, model.chat, RESERVE, ChatPolicy(**settings))


def env_of(chat: ChatFormat, order: str = "paper", **settings: Any) -> SearchEnv:
    config = Env(generation_reserve=RESERVE, rendering=Rendering(order=order), **settings)
    return make_env(config, wide_corpus(20), counter=chat)


def episode_of(model: Sayer, order: str = "paper", seed: int = 0, **settings: Any) -> Episode:
    policy = policy_of(model, **settings)
    assert counter_of(policy) is model.chat
    return run(rollout(env_of(model.chat, order), policy, TASK, seed=seed))


def sayer(*outputs: ToolCall | str | Exception, name: str = "hermes", kind: str = "chatml") -> Sayer:
    return Sayer(chat_format(name, kind), *outputs)


@pytest.mark.parametrize("order", ["paper", "stable_first", "epoch", "transcript"])
@pytest.mark.parametrize(("name", "kind"), SPOKEN)
def test_every_call_of_an_episode_puts_its_prompt_together_again(name: str, kind: str, order: str) -> None:
    said = search("river"), NONSENSE, curate(add_ids=["D1"]), search("war"), NONSENSE, NONSENSE, search("town")
    model = sayer(*said, name=name, kind=kind)
    episode = episode_of(model, order)
    assert episode.stop_reason is StopReason.END_SEARCH
    assert [prompt_ids(episode, each) for each in calls_of(episode)] == model.prompts
    assert len(model.prompts) == 8
    window = env_of(model.chat, order).config.context_window
    for prompt, sampling in zip(model.prompts, model.samplings, strict=True):
        assert len(prompt) + sampling.max_tokens <= window
        assert sampling.stop_ids == model.chat.stop_ids


def test_attempts_are_recorded_with_their_numbers_and_their_parents() -> None:
    model = sayer(search("river"), NONSENSE, NONSENSE, search("war"), NONSENSE, END)
    episode = episode_of(model)
    recorded = [(each.call_id, each.parent_call_id) for each in calls_of(episode)]
    of_second = [(f"2.{attempt}", "1.0") for attempt in range(3)]
    assert recorded == [("1.0", None), *of_second, ("3.0", "2.2"), ("3.1", "2.2")]
    assert all(each.call_id.endswith(f".{each.attempt}") for each in calls_of(episode))
    assert [turn.action for turn in episode.turns] == [search("river"), search("war"), END]
    assert {(each.policy_version_start, each.policy_version_end) for each in calls_of(episode)} == {(7, 8)}
    assert episode.policy_versions == (7, 8)
    assert [each.call_id for each in calls_to_train(episode)] == ["1.0", "2.2", "3.1"]


def test_a_retry_is_the_same_context_and_one_short_note() -> None:
    model = sayer(search("river"), NONSENSE, search("war"))
    episode_of(model)
    first, retry = model.prompts[1:3]
    end = model.chat.prompt_end().ids
    told = first[: -len(end)]
    assert retry[: len(told)] == told
    assert retry[-len(end) :] == end
    note = model.chat.tokenizer.decode(retry[len(told) : -len(end)])
    assert note.startswith("<|im_start|>user\nYour last output was not valid: there is no call. End with one call:")
    assert len(note) < 250
    assert model.samplings[1].max_tokens == RESERVE
    assert model.samplings[2].max_tokens == RESERVE - (len(retry) - len(first))


def test_nothing_of_a_faulty_attempt_is_in_any_later_prompt() -> None:
    for order in ("paper", "stable_first", "epoch", "transcript"):
        model = sayer(search("river"), NONSENSE, NONSENSE, search("war"), search("town"), search("rain"))
        episode_of(model, order)
        assert all(NONSENSE not in model.chat.tokenizer.decode(prompt) for prompt in model.prompts)
        notes = [model.chat.tokenizer.decode(prompt).count("not valid") for prompt in model.prompts]
        assert notes == [0, 0, 1, 1, 0, 0, 0]


@pytest.mark.parametrize("retries", [0, 1, 3])
def test_after_so_many_failures_the_episode_ends_by_its_policys_error(retries: int) -> None:
    model = sayer(search("river"), *[NONSENSE] * 9)
    episode = episode_of(model, format_retries=retries)
    assert (episode.stop_reason, episode.status) == (StopReason.FORMAT_LIMIT, Status.POLICY_ERROR)
    failed = episode.turns[-1]
    assert (failed.parse_error, failed.action) == ("there is no call", None)
    assert [each.attempt for each in failed.calls] == list(range(retries + 1))
    assert [each.call_id for each in calls_to_train(episode)] == ["1.0", *[f"2.{at}" for at in range(retries + 1)]]
    assert [prompt_ids(episode, each) for each in calls_of(episode)] == model.prompts


def test_an_output_that_was_cut_says_so_and_there_is_no_retry_where_its_note_would_fill_the_window() -> None:
    class Cut(Sayer):
        async def generate(self, *arguments: Any) -> SampledOutput:
            return msgspec.structs.replace(await super().generate(*arguments), finish_reason="length")

    model = Cut(chat_format("hermes", "chatml"), NONSENSE, search("river"), NONSENSE)
    assert episode_of(model, format_retries=1).turns[0].action == search("river")
    assert "not valid: the output was too long and is cut." in model.chat.tokenizer.decode(model.prompts[1])
    model = Cut(chat_format("hermes", "chatml"), NONSENSE, search("river"), NONSENSE)
    episode_of(model, format_retries=1, max_tokens=50)
    assert [each.max_tokens > 50 for each in model.samplings[:3]] == [False, True, False]
    model = sayer(NONSENSE)
    env = make_env(Env(generation_reserve=10), counter=model.chat)
    episode = run(rollout(env, LanguageModelPolicy(model, model.chat, 10, ChatPolicy()), TASK))
    assert (episode.status, len(model.prompts)) == (Status.POLICY_ERROR, 1)
    assert episode.turns[0].parse_error == "there is no call"


@pytest.mark.parametrize(("name", "kind"), SPOKEN)
def test_inside_an_epoch_each_prompt_and_output_begins_the_next_prompt(name: str, kind: str) -> None:
    words = ["river", "war", NONSENSE, "town", "rain", "king", "Rome", "Paris", "castle"]
    model = sayer(*[each if each == NONSENSE else search(each) for each in words], name=name, kind=kind)
    episode = episode_of(model, "epoch")
    accepted = [turn.calls[-1] for turn in episode.turns]
    prompts = [prompt_ids(episode, each) for each in accepted]
    wholes = [(*prompt, *each.output_ids) for prompt, each in zip(prompts, accepted, strict=True)]
    merged = [after[: len(whole)] == whole for whole, after in zip(wholes, prompts[1:], strict=False)]
    # An epoch has five turns; the third turn was retried, so that its note stands between prompt and output.
    assert merged == [True, True, False, True, False, True, True, True]


def test_seeds_differ_by_turn_and_attempt_and_are_equal_for_equal_episodes() -> None:
    def seeds(seed: int) -> set[int | None]:
        model = sayer(search("river"), NONSENSE, search("war"))
        episode_of(model, seed=seed)
        return {sampling.seed for sampling in model.samplings}

    assert len(seeds(1)) == 4
    assert seeds(1) == seeds(1)
    assert not seeds(1) & seeds(2)
    assert 0 <= call_seed("x", 1, 0) < 2**31


def test_a_fork_goes_on_from_where_it_was() -> None:
    model = sayer(search("river"), search("war"), search("war"))

    async def play() -> list[ModelCall]:
        env, session = env_of(model.chat), policy_of(model).open(TASK, 3)
        decision = await session.act(await env.reset(TASK))
        context = (await env.step(decision.actions, "", decision.calls)).context
        return [(await twin.act(context)).calls[0] for twin in (session.fork(), session)]

    calls = [(each.call_id, each.parent_call_id, each.sampling.seed) for each in run(play())]
    assert calls[0] == calls[1] == ("2.0", "1.0", call_seed(digest([TASK.query, 3]), 2, 0))


def test_a_fault_of_the_backend_breaks_the_episode_after_its_attempts_and_a_misuse_ends_it_all() -> None:
    model = sayer(search("river"), NONSENSE, InfrastructureFault("gone"))
    episode = episode_of(model)
    assert (episode.status, episode.error) == (Status.INFRA_ERROR, "gone")
    assert [call.call_id for call in calls_of(episode)] == ["1.0", "2.0"]
    assert [prompt_ids(episode, call) for call in calls_of(episode)] == model.prompts[:2]
    assert list(calls_to_train(episode)) == []
    late = episode_of(sayer(search("river"), InfrastructureFault("gone")))
    assert [call.call_id for call in calls_of(late)] == ["1.0"]
    with pytest.raises(UsageError, match="too long"):
        episode_of(sayer(UsageError("too long")))


def test_sampling_is_as_configured_and_a_grammar_is_named() -> None:
    model = sayer(END)
    episode_of(model, temperature=0.5, constrained=True)
    grammar = model.grammars[0]
    sampling = msgspec.structs.replace(model.samplings[0], seed=None)
    assert sampling == Sampling(0.5, 1.0, 0, RESERVE, None, model.chat.stop_ids, grammar.digest)
    plain = sayer(END)
    episode_of(plain)
    assert plain.grammars == [None]
    assert plain.samplings[0].grammar is None


def test_the_hash_names_model_format_settings_and_reserve_but_not_how_the_format_was_chosen() -> None:
    model = sayer()
    plain = policy_of(model).hash
    assert policy_of(model, format="hermes").hash == plain
    assert policy_of(model, temperature=0.5).hash != plain
    assert LanguageModelPolicy(model, model.chat, RESERVE + 1, ChatPolicy()).hash != plain
    assert policy_of(sayer(name="compact")).hash != plain
    assert policy_of(sayer(kind="qwen")).hash != plain


def told_again(order: str) -> Episode:
    return episode_of(sayer(search("river"), NONSENSE, curate(add_ids=["D1"]), search("war"), search("town")), order)


@pytest.mark.parametrize("order", ["paper", "stable_first", "epoch", "transcript"])
def test_an_episode_is_replayed_without_its_tokenizer(order: str) -> None:
    env = env_of(chat_format("hermes", "chatml"), order).config
    ended = episode_of(sayer(search("river"), *[NONSENSE] * 4), order)
    for episode, turns in ((told_again(order), 5), (ended, 2)):
        report = replay_episode(episode, env)
        assert (report.equal, report.turns, report.difference) == (turns, turns, None)


@pytest.mark.parametrize("prefix", ["action/2", "turn/1", "hit/1"])
@pytest.mark.parametrize("change", [0, 1])
def test_a_replay_notices_a_count_that_is_changed_or_missing(prefix: str, change: int) -> None:
    episode = told_again("paper")
    sizes: list[dict[str, Any]] = [dict(episode.counts), dict(episode.segments)]
    for each, more in zip(sizes, (1, (1,)), strict=True):
        for key in [key for key in each if key.startswith(prefix)]:
            size = each.pop(key)
            each |= {key: size + more} if change else {}
    forged = msgspec.structs.replace(episode, counts=sizes[0], segments=sizes[1])
    assert forged != episode
    report = replay_episode(forged, env_of(chat_format("hermes", "chatml")).config)
    assert report.difference is not None
    assert report.equal < report.turns
