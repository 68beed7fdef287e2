"""What is recorded of a model's calls is what one plain forward pass of the same weights gives; nothing else is."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness1.config import Config, load_config
from harness1.data.open import open_source
from harness1.episodes.jobs import EpisodeJob, EpisodeSetup, play_in_loop
from harness1.episodes.rollout import rollout
from harness1.models.backend import Grammar
from harness1.models.causal_model import load_causal_model
from harness1.models.formats import Compact
from harness1.models.transformers_backend import TransformersBackend, open_transformers
from harness1.plain import digest
from harness1.policy.language_model import LanguageModelPolicy
from harness1.records import Episode
from harness1.retrieval.build import build_index
from harness1.retrieval.open import open_retriever
from harness1.rl.logprobs import LogprobReport, SampledCall, calls_to_replay, compare_calls, grammar_masks
from harness1.rows.calls import calls_of, prompt_ids
from harness1.tools.registry import Toolbox
from harness1.tools.tool import ToolSpec
from tests.support import run
from tests.tiny_models import save_tiny_model
from tests.vocabularies import tokenizer, vocabulary

ROOT = Path(__file__).parent.parent.parent
TEMPERATURES = (0.5, 1.5)
SOURCE = open_source("world:60")
SHORT = ("env.generation_reserve=192", "env.context_window=2240")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama over the words of a small ChatML tokenizer."""
    made = tmp_path_factory.mktemp("model")
    (made / "tokenizer.json").write_bytes(vocabulary("chatml"))
    (made / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    size = max(tokenizer("chatml").control.values()) + 1
    return save_tiny_model(made, vocab_size=size, max_position_embeddings=8192)


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> str:
    made = tmp_path_factory.mktemp("index") / "index"
    build_index(SOURCE.documents(), made, Config().index)
    return str(made)


def settings(temperature: float, *overrides: str) -> Config:
    chosen = [f"policy.temperature={temperature}", "policy.constrained=true", "env.max_turns=3", *SHORT, *overrides]
    return load_config("small", ["env.rendering.order=epoch", "machine.concurrency=6", *chosen])


class Brief(Compact):
    """A format whose grammar bounds words, too: a random model would seldom end one."""

    def grammar(self, specs: Sequence[ToolSpec]) -> Grammar:
        bounded = re.sub(r"\{0,\d+\}", "{0,3}", super().grammar(specs).ebnf)
        ebnf = bounded.replace("char+", "char{1,4}").replace("<>]+", "<>]{1,4}")
        return Grammar(ebnf, digest(ebnf))


class Given(EpisodeSetup):
    """A bench whose policy is given, not opened by its name."""

    policy_given: LanguageModelPolicy

    def policy_for(self, jobs: Sequence[EpisodeJob]) -> LanguageModelPolicy:
        return self.policy_given


def played(
    folder: Path, index: str, config: Config, count: int = 6
) -> tuple[list[Episode], TransformersBackend, LanguageModelPolicy]:
    """Episodes at once, one batch of rows, with kept prefixes."""
    backend = open_transformers(folder, device="cpu", dtype=config.policy.dtype, threads=0, rows=4, cache_tokens=20_000)
    policy = LanguageModelPolicy(backend, Brief(tokenizer("chatml")), config.env.generation_reserve, config.policy)
    setup = Given(config, index, "hf:given")
    object.__setattr__(setup, "policy_given", policy)
    episodes: list[Episode] = []
    tasks = SOURCE.tasks("train")
    jobs = [EpisodeJob(tasks[at % len(tasks)], at, at) for at in range(count)]
    run(play_in_loop([setup], setup.policy_for(jobs), jobs, episodes.append))
    return episodes, backend, policy


def masks(folder: Path, model: Any, config: Config) -> Any:
    grammar = Brief(tokenizer("chatml")).grammar(Toolbox.of(config.env).specs)
    return grammar_masks(folder, model.config.vocab_size, [grammar])


def gate(folder: Path, config: Config, calls: Sequence[SampledCall]) -> LogprobReport:
    model = load_causal_model(folder, "cpu", config.policy.dtype)
    return compare_calls(model, calls, masks(folder, model, config))


@pytest.fixture(scope="module")
def recorded(folder: Path, index: str) -> tuple[Config, list[Episode]]:
    config = settings(0.8)
    episodes, backend, _ = played(folder, index, config)
    assert backend.decoder.reused_tokens > backend.decoder.prefilled_tokens, "prefixes must have been kept"
    return config, episodes


def calls_in(episodes: Sequence[Episode]) -> list[SampledCall]:
    return [call for episode in episodes for call in calls_to_replay(episode)]


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_every_call_of_episodes_at_once_is_replayed_in_single_precision(
    folder: Path, index: str, temperature: float
) -> None:
    config = settings(temperature)
    episodes, _, _ = played(folder, index, config, 4)
    calls = calls_in(episodes)
    assert len(calls) >= 4
    report = gate(folder, config, calls)
    assert report.passes("float32"), report


def test_every_call_is_replayed_in_half_precision_on_the_mean(folder: Path, index: str) -> None:
    config = settings(1.0, "policy.dtype=bfloat16")
    episodes, _, _ = played(folder, index, config, 4)
    calls = calls_in(episodes)
    report = gate(folder, config, calls)
    assert report.passes("bfloat16"), report
    # Where a processor sums in the same order, half precision repeats itself exactly; single precision never does.
    exact = gate(folder, settings(1.0, "policy.dtype=float32"), calls)
    assert not exact.passes("float32"), "half precision is not exact: this bound must see it"


def test_text_that_was_decoded_and_encoded_again_is_found(folder: Path, recorded: tuple[Config, list[Episode]]) -> None:
    """A random model seldom spells a word as its tokenizer would: what a text-only record keeps is not what it said."""
    _, episodes = recorded
    words = tokenizer("chatml")
    stop = words.control["<|im_end|>"]
    drifted = []
    for call in calls_in(episodes):
        ids = (*words.encode(words.decode(call.output_ids[:-1])), stop)
        if ids != call.output_ids and call.output_ids[-1] == stop:
            kept = min(len(ids), len(call.output_ids))
            drifted.append(
                msgspec.structs.replace(call, output_ids=ids[:kept], output_logprobs=call.output_logprobs[:kept])
            )
    assert drifted
    model = load_causal_model(folder, "cpu", "float32")
    plain = [
        msgspec.structs.replace(call, sampling=msgspec.structs.replace(call.sampling, grammar=None)) for call in drifted
    ]
    assert not compare_calls(model, plain).passes("float32")


def test_a_prompt_is_put_together_as_the_model_was_given_it(
    folder: Path, index: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[tuple[int, ...]] = []
    generate = TransformersBackend.generate

    async def seen(self: TransformersBackend, ids: Sequence[int], *rest: Any) -> Any:
        given.append(tuple(ids))
        return await generate(self, ids, *rest)

    monkeypatch.setattr(TransformersBackend, "generate", seen)
    episodes, _, _ = played(folder, index, settings(1.0), 3)
    monkeypatch.undo()
    alone, _, _ = played(folder, index, settings(1.0), 1)  # draws by its own seed, alone or among others
    first = next(episode for episode in episodes if episode.sample_idx == 0)
    assert [call.output_ids for call in calls_of(first)] == [call.output_ids for call in calls_of(alone[0])]
    made = [prompt_ids(episode, call) for episode in episodes for call in calls_of(episode)]
    assert sorted(made) == sorted(given)
    assert len(made) >= 3


def test_calls_from_before_and_after_a_change_of_weights_carry_their_versions(folder: Path, index: str) -> None:
    config = settings(1.0)
    episodes, backend, policy = played(folder, index, config, 2)
    assert {call.version for call in calls_in(episodes)} == {0}
    state = {name: value * 1.05 for name, value in load_causal_model(folder, "cpu", "float32").state_dict().items()}
    run(backend.load_state(state, 7))
    task = SOURCE.tasks("train")[0]
    setup = EpisodeSetup(config, index, "hf:given")
    episode = run(rollout(setup.environment(open_retriever(index, config), policy), policy, task))
    assert episode.policy_versions == (7, 7)
    assert not gate(folder, config, calls_in([episode])).passes("float32"), "the folder has the weights of version 0"
