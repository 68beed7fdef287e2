"""The replay of recorded calls by a plain forward pass, and what its gate lets through."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

import msgspec
import pytest
import torch

from harness1.config import load_config
from harness1.errors import UsageError
from harness1.models.causal_model import load_causal_model
from harness1.models.transformers_backend import open_transformers
from harness1.records import Sampling
from harness1.rl import logprobs
from harness1.rl.logprobs import LogprobReport, SampledCall, check_start, chosen_logprobs, compare_calls, next_logits
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


def test_weights_one_small_step_away_fail(folder: Path, calls: list[SampledCall]) -> None:
    model = load_causal_model(folder, "cpu", "float32")
    ids = calls[0].prompt_ids
    (-chosen_logprobs(next_logits(model, ids, len(ids) - 1), ids[1:], Sampling()).mean()).backward()
    torch.optim.SGD(model.parameters(), lr=1e-3).step()
    for call in calls:
        assert not compare_calls(model, [call]).passes("float32")


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


RECORDED = [-0.5, -1.0, -2.0, -0.25]


def gated(difference: float, sampler: str, trainer: str) -> dict[str, float]:
    """The gate for log probabilities that all differ by as much."""
    config = load_config(None, [f"policy.dtype={sampler}", f"train.dtype={trainer}"])
    return check_start([known + difference for known in RECORDED], RECORDED, config)


def test_in_float32_every_token_must_agree() -> None:
    assert gated(0.9e-4, "float32", "float32")["gate/max_difference"] == pytest.approx(0.9e-4)
    with pytest.raises(UsageError, match=r"a difference of 0\.0001 is allowed for policy\.dtype=float32"):
        gated(1.1e-4, "float32", "float32")


@pytest.mark.parametrize(
    ("sampler", "trainer"), [("bfloat16", "bfloat16"), ("float32", "bfloat16"), ("bfloat16", "float32")]
)
def test_of_rounded_log_probabilities_the_mean_k3_must_be_within_the_bound_of_the_pair(
    sampler: str, trainer: str
) -> None:
    """A difference of d has a k3 of about d^2 / 2."""
    near = math.sqrt(2 * 4e-3)
    logged = gated(near, sampler, trainer)
    assert logged["gate/mean_k3"] == pytest.approx(math.exp(near) - 1 - near)
    with pytest.raises(UsageError, match=r"mean k3 of 0\.005 is allowed.*effective sample is 100\.0% of the tokens"):
        gated(math.sqrt(2 * 6e-3), sampler, trainer)
    with pytest.raises(UsageError, match="the rollouts are not from the model in training"):
        gated(1.0, sampler, trainer)


def test_a_batch_without_tokens_or_with_what_is_no_number_is_refused() -> None:
    config = load_config()
    for values in ([], [math.nan]):
        with pytest.raises(UsageError):
            check_start(values, values, config)


def test_truncated_weights_are_those_computed_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ratios of 1, 8 and 0.5 between 0.6 and 4: weights 1, 4 and 0.5, (5.5)^2 / (3 * 17.25)."""
    monkeypatch.setattr(logprobs, "BOUND", 9.0)
    loose = ["policy.dtype=float32", "train.dtype=float32", "rl.ratio=[0.6, 4]"]
    found = check_start([0.0, math.log(8), math.log(0.5)], [0.0] * 3, load_config(None, loose))
    assert found["gate/beyond_bounds"] == pytest.approx(2 / 3)
    assert found["gate/effective_share"] == pytest.approx(5.5**2 / (3 * 17.25))
    assert found["gate/largest_ratio"] == pytest.approx(8.0)
