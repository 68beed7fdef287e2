"""The replay of recorded calls by a plain forward pass, and what its gate lets through."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

import msgspec
import pytest
import torch

from harness1.errors import UsageError
from harness1.models.causal_model import load_causal_model
from harness1.models.transformers_backend import open_transformers
from harness1.records import Sampling
from harness1.rl.logprobs import LogprobReport, SampledCall, chosen_logprobs, compare_calls, next_logits
from tests.tiny_models import save_tiny_model

replace = msgspec.structs.replace


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def calls(folder: Path) -> list[SampledCall]:
    backend = open_transformers(folder, device="cpu", dtype="float32", threads=0, rows=8, cache_tokens=500)
    hows = [Sampling(temperature=t, top_p=p, seed=1, max_tokens=16) for t in (0.5, 1.0, 1.5) for p in (1.0, 0.9)]
    prompts = [tuple(range(at, 20 + 3 * at)) for at in range(len(hows))]

    async def make() -> list[SampledCall]:
        outs = await asyncio.gather(*[backend.generate(*pair) for pair in zip(prompts, hows, strict=True)])
        made = zip(prompts, outs, hows, strict=True)
        return [SampledCall(ids, out.output_ids, out.output_logprobs, how) for ids, out, how in made]

    return asyncio.run(make())


def gate(folder: Path, calls: list[SampledCall]) -> LogprobReport:
    return compare_calls(load_causal_model(folder, "cpu", "float32"), calls)


def test_each_token_has_the_log_probability_of_its_prefix(folder: Path) -> None:
    model, ids = load_causal_model(folder, "cpu", "float32"), (5, 9, 9, 250, 3)
    found = chosen_logprobs(next_logits(model, ids, 4), ids[1:], Sampling(temperature=0.7))
    for at in range(1, len(ids)):
        logits = model(torch.tensor([ids[:at]])).logits[0, -1].detach()
        assert float(found[at - 1].detach()) == pytest.approx(float((logits / 0.7).log_softmax(-1)[ids[at]]), abs=1e-5)
    assert found.shape == (4,)
    found.sum().backward()


def test_masks_take_away_what_was_forbidden(folder: Path) -> None:
    model, ids = load_causal_model(folder, "cpu", "float32"), (5, 9, 3)
    masks = torch.zeros(2, 300, dtype=torch.bool)
    masks[0, 9] = True
    masks[1, [3, 4]] = True
    found = chosen_logprobs(next_logits(model, ids, 2), ids[1:], Sampling(), masks).detach()
    logits = model(torch.tensor([ids])).logits[0, 1].detach()
    assert float(found[0]) == 0.0
    assert float(found[1]) == pytest.approx(float(logits[[3, 4]].log_softmax(-1)[0]), abs=1e-5)


def test_a_token_that_was_cut_counts_as_the_one_kept_beyond_the_others(folder: Path) -> None:
    model, ids = load_causal_model(folder, "cpu", "float32"), [5, 9]
    best, third = model(torch.tensor([ids])).logits[0, -1].log_softmax(-1).detach().sort(descending=True)[0][[0, 2]]
    ids.append(int(model(torch.tensor([ids])).logits[0, -1].argsort(descending=True)[2]))
    found = chosen_logprobs(next_logits(model, ids, 2), ids[1:], Sampling(top_k=1)).detach()
    assert float(found[-1]) == pytest.approx(float(third - torch.logaddexp(best, third)), abs=1e-5)


def test_the_edge_of_the_nucleus_may_fall_on_either_side(folder: Path) -> None:
    model, ids = load_causal_model(folder, "cpu", "float32"), (5, 9)
    likely, order = model(torch.tensor([ids])).logits[0, -1].softmax(-1).detach().sort(descending=True)
    edge, of_two = float(likely[:2].sum()), float((likely[0] / likely[:2].sum()).log())
    passed = []
    for beyond in (-5e-6, 5e-6, 5e-5):
        call = SampledCall(ids, (int(order[0]),), (of_two,), Sampling(top_p=edge + beyond))
        passed.append(gate(folder, [call]).passes("float32"))
    assert passed == [True, True, False]


def test_what_was_sampled_passes(folder: Path, calls: list[SampledCall]) -> None:
    report = gate(folder, calls)
    assert report.tokens == 16 * len(calls)
    assert report.passes("float32"), report
    assert report.passes("bfloat16")


def test_another_temperature_fails(folder: Path, calls: list[SampledCall]) -> None:
    for call in calls:
        wrong = replace(call, sampling=replace(call.sampling, temperature=call.sampling.temperature * 1.02))
        report = gate(folder, [wrong])
        assert not report.passes("float32"), report


def test_another_cut_fails(folder: Path, calls: list[SampledCall]) -> None:
    for call in calls:
        cut = {0.9: 0.8, 1.0: 0.9}[call.sampling.top_p]
        assert not gate(folder, [replace(call, sampling=replace(call.sampling, top_p=cut))]).passes("float32")
        assert not gate(folder, [replace(call, sampling=replace(call.sampling, top_k=3))]).passes("float32")


def test_weights_one_small_step_away_fail(folder: Path, calls: list[SampledCall]) -> None:
    model = load_causal_model(folder, "cpu", "float32")
    ids = calls[0].prompt_ids
    (-chosen_logprobs(next_logits(model, ids, len(ids) - 1), ids[1:], Sampling()).mean()).backward()
    torch.optim.SGD(model.parameters(), lr=1e-3).step()
    for call in calls:
        assert not compare_calls(model, [call]).passes("float32")


def test_the_prompt_of_another_call_fails(folder: Path, calls: list[SampledCall]) -> None:
    for call, other in zip(calls, calls[1:] + calls[:1], strict=True):
        assert not gate(folder, [replace(call, prompt_ids=other.prompt_ids)]).passes("bfloat16")


def test_shifted_ids_fail(folder: Path, calls: list[SampledCall]) -> None:
    for call in calls:
        shifted = replace(call, output_ids=call.output_ids[1:] + call.output_ids[:1])
        assert not gate(folder, [shifted]).passes("bfloat16")


def test_one_wrong_token_among_many_fails_in_float32(folder: Path, calls: list[SampledCall]) -> None:
    wrong = (calls[0].output_logprobs[0] + 5e-4, *calls[0].output_logprobs[1:])
    report = gate(folder, [replace(calls[0], output_logprobs=wrong), *calls[1:]])
    assert not report.passes("float32")
    assert report.worst_ratio == pytest.approx(2.5, rel=0.2)  # 5e-4 of 1e-4 / 0.5


def test_the_mean_k3_is_that_of_its_formula(folder: Path, calls: list[SampledCall]) -> None:
    off = replace(calls[2], output_logprobs=tuple(each - 0.1 for each in calls[2].output_logprobs))
    report = gate(folder, [off])
    assert report.mean_k3 == pytest.approx(2.718281828**0.1 - 1 - 0.1, rel=1e-2)
    assert not report.passes("bfloat16")


def test_greedy_outputs_must_be_the_most_likely_with_0_recorded(folder: Path) -> None:
    model, ids = load_causal_model(folder, "cpu", "float32"), [3, 4, 5]
    for _ in range(5):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    call = SampledCall(tuple(ids[:3]), tuple(ids[3:]), (0.0,) * 5, Sampling(temperature=0.0))
    assert compare_calls(model, [call]).passes("float32")
    assert compare_calls(model, [call]).greedy_tokens == 5
    assert not compare_calls(model, [replace(call, output_ids=(*ids[3:7], ids[7] - 1))]).passes("float32")
    assert not compare_calls(model, [replace(call, output_logprobs=(0.0, -0.5, 0.0, 0.0, 0.0))]).passes("bfloat16")


def test_what_is_no_number_never_passes(folder: Path, calls: list[SampledCall]) -> None:
    for number in (math.nan, -math.inf, math.inf):
        for call in (calls[0], replace(calls[0], sampling=Sampling(temperature=0.0))):
            broken = replace(call, output_logprobs=(number, *call.output_logprobs[1:]))
            assert not gate(folder, [broken]).passes("float32")
            assert not gate(folder, [broken]).passes("bfloat16")


def test_log_probabilities_that_are_missing_are_an_error(folder: Path, calls: list[SampledCall]) -> None:
    for broken in (replace(calls[0], output_logprobs=(0.0,)), replace(calls[0], output_ids=(), output_logprobs=())):
        with pytest.raises(UsageError, match="replayed"):
            gate(folder, [broken])


def test_nothing_replayed_is_nothing_proven(folder: Path) -> None:
    assert not gate(folder, []).passes("float32")
