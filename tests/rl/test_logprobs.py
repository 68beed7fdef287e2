"""The replay of recorded calls by a plain forward pass, and what its gate lets through."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import PreTrainedModel

from harness1.config import Config, load_config
from harness1.data.open import open_source
from harness1.episodes.jobs import EpisodeJob, EpisodeSetup, play_in_loop
from harness1.errors import UsageError
from harness1.models.backend import Grammar
from harness1.models.causal_model import load_causal_model
from harness1.models.formats import Compact
from harness1.models.transformers_backend import TransformersBackend, open_transformers
from harness1.plain import digest
from harness1.policy.language_model import LanguageModelPolicy
from harness1.records import Episode, Sampling
from harness1.retrieval.build import build_index
from harness1.rl.logprobs import (
    LogprobReport,
    SampledCall,
    calls_to_replay,
    check_start,
    chosen_logprobs,
    compare_calls,
    grammar_masks,
    next_logits,
)
from harness1.rows.calls import calls_of, prompt_ids
from harness1.tools.registry import Toolbox
from harness1.tools.tool import ToolSpec
from tests.support import run
from tests.tiny_models import save_tiny_model
from tests.vocabularies import tokenizer, vocabulary

replace = msgspec.structs.replace


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def calls(folder: Path) -> list[SampledCall]:
    backend = open_transformers(folder, device="cpu", dtype="float32", threads=0, rows=8, cache_tokens=500)
    hows = [Sampling(temperature=t, top_p=p, seed=1, max_tokens=16) for t in (0.5, 1.5) for p in (1.0, 0.9)]
    prompts = [tuple(range(at, 20 + 3 * at)) for at in range(len(hows))]

    async def make() -> list[SampledCall]:
        outs = await asyncio.gather(*[backend.generate(*pair) for pair in zip(prompts, hows, strict=True)])
        made = zip(prompts, outs, hows, strict=True)
        return [SampledCall(ids, out.output_ids, out.output_logprobs, how) for ids, out, how in made]

    return asyncio.run(make())


@cache
def loaded(folder: Path) -> PreTrainedModel:
    return load_causal_model(folder, "cpu", "float32")


def gate(folder: Path, calls: list[SampledCall]) -> LogprobReport:
    return compare_calls(loaded(folder), calls)


def test_each_token_has_the_log_probability_of_its_prefix(folder: Path) -> None:
    model, ids = loaded(folder), (5, 9, 9, 250, 3)
    found = chosen_logprobs(next_logits(model, ids, 4), ids[1:], Sampling(temperature=0.7))
    for at in range(1, len(ids)):
        logits = model(torch.tensor([ids[:at]])).logits[0, -1].detach()
        assert float(found[at - 1].detach()) == pytest.approx(float((logits / 0.7).log_softmax(-1)[ids[at]]), abs=1e-5)
    assert found.shape == (4,)
    found.sum().backward()


def test_what_was_sampled_passes(folder: Path, calls: list[SampledCall]) -> None:
    report = gate(folder, calls)
    assert report.tokens == 16 * len(calls)
    assert report.passes("float32"), report
    assert report.passes("bfloat16")


def test_what_was_sampled_otherwise_fails(folder: Path, calls: list[SampledCall]) -> None:
    for call, other in zip(calls, calls[1:] + calls[:1], strict=True):
        how = call.sampling
        hotter = replace(how, temperature=how.temperature * 1.02)
        for wrong in (hotter, replace(how, top_p={0.9: 0.8, 1.0: 0.9}[how.top_p]), replace(how, top_k=3)):
            assert not gate(folder, [replace(call, sampling=wrong)]).passes("float32")
        assert not gate(folder, [replace(call, prompt_ids=other.prompt_ids)]).passes("bfloat16")
        shifted = call.output_ids[1:] + call.output_ids[:1]
        assert not gate(folder, [replace(call, output_ids=shifted)]).passes("bfloat16")
    one = (calls[0].output_logprobs[0] + 5e-4, *calls[0].output_logprobs[1:])
    report = gate(folder, [replace(calls[0], output_logprobs=one), *calls[1:]])
    assert not report.passes("float32")
    assert report.worst_ratio == pytest.approx(2.5, rel=0.2)  # 5e-4 of 1e-4 / 0.5
    assert not gate(folder, []).passes("float32")


def test_the_mean_k3_is_that_of_its_formula(folder: Path, calls: list[SampledCall]) -> None:
    off = replace(calls[2], output_logprobs=tuple(each - 0.1 for each in calls[2].output_logprobs))
    report = gate(folder, [off])
    assert report.mean_k3 == pytest.approx(2.718281828**0.1 - 1 - 0.1, rel=1e-2)
    assert not report.passes("bfloat16")


def test_greedy_outputs_must_be_the_most_likely_with_0_recorded(folder: Path) -> None:
    model, ids = loaded(folder), [3, 4, 5]
    for _ in range(5):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    call = SampledCall(tuple(ids[:3]), tuple(ids[3:]), (0.0,) * 5, Sampling(temperature=0.0))
    assert compare_calls(model, [call]).passes("float32")
    assert compare_calls(model, [call]).greedy_tokens == 5
    assert not compare_calls(model, [replace(call, output_ids=(*ids[3:7], ids[7] - 1))]).passes("float32")
    assert not compare_calls(model, [replace(call, output_logprobs=(0.0, -0.5, 0.0, 0.0, 0.0))]).passes("bfloat16")


def test_what_is_no_number_never_passes_and_what_is_missing_is_an_error(folder: Path, calls: list[SampledCall]) -> None:
    for number in (math.nan, -math.inf):
        for call in (calls[0], replace(calls[0], sampling=Sampling(temperature=0.0))):
            broken = replace(call, output_logprobs=(number, *call.output_logprobs[1:]))
            assert not gate(folder, [broken]).passes("float32")
            assert not gate(folder, [broken]).passes("bfloat16")
    for broken in (replace(calls[0], output_logprobs=(0.0,)), replace(calls[0], output_ids=(), output_logprobs=())):
        with pytest.raises(UsageError, match="replayed"):
            gate(folder, [broken])


RECORDED = [-0.5, -1.0, -2.0, -0.25]


def gated(difference: float, sampler: str, trainer: str) -> dict[str, float]:
    """The gate for log probabilities that all differ by as much."""
    config = load_config(None, [f"policy.dtype={sampler}", f"train.dtype={trainer}"])
    return check_start([known + difference for known in RECORDED], RECORDED, config)


def test_in_float32_every_token_must_agree() -> None:
    assert gated(0.9e-4, "float32", "float32")["gate/max_difference"] == pytest.approx(0.9e-4)
    with pytest.raises(UsageError, match=r"a difference of 0\.0001 is allowed for policy\.dtype=float32"):
        gated(1.1e-4, "float32", "float32")


@pytest.mark.parametrize(("sampler", "trainer"), [("bfloat16", "bfloat16"), ("float32", "bfloat16")])
def test_of_rounded_log_probabilities_the_mean_k3_must_be_within_its_bound(sampler: str, trainer: str) -> None:
    """A difference of d has a k3 of about d^2 / 2."""
    near = math.sqrt(2 * 4e-3)
    assert gated(near, sampler, trainer)["gate/mean_k3"] == pytest.approx(math.exp(near) - 1 - near)
    with pytest.raises(UsageError, match=r"mean k3 of 0\.005 is allowed for policy\.dtype="):
        gated(math.sqrt(2 * 6e-3), sampler, trainer)
    for values in ([], [math.nan]):
        with pytest.raises(UsageError):
            check_start(values, values, load_config())


SOURCE = open_source("world:60")
SHORT = ("env.generation_reserve=192", "env.context_window=2240")


@pytest.fixture(scope="module")
def speaker(tmp_path_factory: pytest.TempPathFactory) -> Path:
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


def played(
    speaker: Path, index: str, config: Config, count: int = 6
) -> tuple[list[Episode], TransformersBackend, LanguageModelPolicy]:
    """Episodes at once, one batch of rows, with kept prefixes."""
    backend = open_transformers(
        speaker, device="cpu", dtype=config.policy.dtype, threads=0, rows=4, cache_tokens=20_000
    )
    policy = LanguageModelPolicy(backend, Brief(tokenizer("chatml")), config.env.generation_reserve, config.policy)
    episodes, tasks = list[Episode](), SOURCE.tasks("train")
    jobs = [EpisodeJob(tasks[at % len(tasks)], at, at) for at in range(count)]
    run(play_in_loop([EpisodeSetup(config, index, "hf:given", own=policy)], policy, jobs, episodes.append))
    return episodes, backend, policy


def calls_in(episodes: Sequence[Episode]) -> list[SampledCall]:
    return [call for episode in episodes for call in calls_to_replay(episode)]


def gate_of(speaker: Path, config: Config, episodes: Sequence[Episode]) -> LogprobReport:
    model: Any = load_causal_model(speaker, "cpu", config.policy.dtype)
    grammar = Brief(tokenizer("chatml")).grammar(Toolbox.of(config.env).specs)
    return compare_calls(model, calls_in(episodes), grammar_masks(speaker, model.config.vocab_size, [grammar]))


@pytest.mark.parametrize("temperature", [0.5, 1.5])
def test_calls_of_episodes_at_once_are_replayed_exactly(speaker: Path, index: str, temperature: float) -> None:
    config = settings(temperature)
    episodes, backend, _ = played(speaker, index, config, 4)
    assert backend.decoder.reused_tokens > backend.decoder.prefilled_tokens, "prefixes must have been kept"
    assert len(calls_in(episodes)) >= 4
    report = gate_of(speaker, config, episodes)
    assert report.passes("float32"), report


def test_every_call_is_replayed_in_half_precision_on_the_mean(speaker: Path, index: str) -> None:
    config = settings(1.0, "policy.dtype=bfloat16")
    episodes, _, _ = played(speaker, index, config, 4)
    report = gate_of(speaker, config, episodes)
    assert report.passes("bfloat16"), report
    # Where a processor sums in the same order, half precision repeats itself exactly; single precision never does.
    exact = gate_of(speaker, settings(1.0, "policy.dtype=float32"), episodes)
    assert not exact.passes("float32"), "half precision is not exact: this bound must see it"


def test_a_prompt_is_put_together_as_it_was_given(speaker: Path, index: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[int, ...]] = []
    generate = TransformersBackend.generate

    async def seen(self: TransformersBackend, ids: Sequence[int], *rest: Any) -> Any:
        given.append(tuple(ids))
        return await generate(self, ids, *rest)

    monkeypatch.setattr(TransformersBackend, "generate", seen)
    episodes, _, _ = played(speaker, index, settings(1.0), 3)
    monkeypatch.undo()
    alone, _, _ = played(speaker, index, settings(1.0), 1)  # draws by its own seed, alone or among others
    first = next(episode for episode in episodes if episode.sample_idx == 0)
    assert [call.output_ids for call in calls_of(first)] == [call.output_ids for call in calls_of(alone[0])]
    made = [prompt_ids(episode, call) for episode in episodes for call in calls_of(episode)]
    assert sorted(made) == sorted(given)
    assert len(made) >= 3
