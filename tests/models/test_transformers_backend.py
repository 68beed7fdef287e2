"""The backend that runs a transformers model in this process: what it samples, what it reuses, what it survives."""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import pre_tokenizers
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from harness1.config import Lora
from harness1.errors import InfrastructureFault, MissingExtra, UsageError
from harness1.models import block_attention, causal_model
from harness1.models.adapters import adapters_of, add_adapters
from harness1.models.backend import Grammar, SampledOutput, check_sampling, draw, process_logprobs
from harness1.models.block_attention import BlockAttention
from harness1.models.causal_model import MemoryReturns, load_causal_model
from harness1.models.decoding import Decoder, DecodingRow, SlotModel
from harness1.models.grammar import GrammarCompiler
from harness1.models.transformers_backend import TransformersBackend, open_transformers
from harness1.records import Sampling
from harness1.rl.logprobs import SampledCall, compare_calls
from tests.support import in_loop
from tests.tiny_models import STOP, VOCABULARY, save_byte_tokenizer, save_tiny_model

SETTINGS = [
    Sampling(temperature=temperature, top_p=top_p, top_k=top_k)
    for temperature, top_p, top_k in (
        *((0.0, 1, 0), (0.5, 1, 0), (0.7, 0.9, 0), (1.0, 1, 0), (1.0, 1, 5), (1.0, 0.8, 20), (1.5, 1, 0)),
        (1.5, 0.95, 0),
    )
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_byte_tokenizer(save_tiny_model(tmp_path_factory.mktemp("tiny")))


def opened(
    folder: Path, dtype: Any = "float32", rows: int = 8, cache_tokens: int = 2000, prefill_tokens: int = 0
) -> TransformersBackend:
    sizes = {"rows": rows, "cache_tokens": cache_tokens, "prefill_tokens": prefill_tokens}
    return open_transformers(folder, device="cpu", dtype=dtype, threads=0, **sizes)


def prompt(seed: int, tokens: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, 256, (tokens,), generator=generator).tolist())


def drawn(sampling: Sampling, seed: int = 0, max_tokens: int = 12, stop_ids: tuple[int, ...] = ()) -> Sampling:
    return msgspec.structs.replace(sampling, seed=seed, max_tokens=max_tokens, stop_ids=stop_ids)


def outcomes(backend: TransformersBackend, asked: Sequence[tuple[Any, ...]]) -> list[Any]:
    """The outputs of calls made at once, or their errors."""

    async def make() -> list[Any]:
        return await asyncio.gather(*[backend.generate(*each) for each in asked], return_exceptions=True)

    return asyncio.run(make())


def sampled(backend: TransformersBackend, asked: Sequence[tuple[tuple[int, ...], Sampling]]) -> list[SampledCall]:
    outputs = zip(asked, outcomes(backend, asked), strict=True)
    return [SampledCall(ids, out.output_ids, out.output_logprobs, how) for (ids, how), out in outputs]


def assert_replayed(folder: Path, calls: Sequence[SampledCall], dtype: Any = "float32") -> None:
    report = compare_calls(load_causal_model(folder, "cpu", dtype), calls)
    assert report.passes(dtype), report


class Watched(SlotModel):
    """A model that shows every pass to `watch` before it is made."""

    def __init__(self, folder: Path, watch: Callable[[list[list[int]]], None]) -> None:
        super().__init__(load_causal_model(folder, "cpu", "float32"))
        self.watch = watch

    def logits(self, ids: list[list[int]], slot_pass: Any) -> torch.Tensor:
        getattr(self, "watch", len)(ids)
        return super().logits(ids, slot_pass)


def watched(
    folder: Path, watch: Callable[[list[list[int]]], None], rows: int = 8, prefill_tokens: int = 0
) -> TransformersBackend:
    return TransformersBackend(Watched(folder, watch), folder, "float32", rows, 2000, prefill_tokens)


@pytest.mark.parametrize(("rows", "prefill_tokens"), [(3, 0), (8, 400)])
def test_calls_of_all_lengths_and_settings_are_decoded_together_and_pass_the_gate(
    folder: Path, prefill_tokens: int, rows: int
) -> None:
    widths: list[int] = []
    backend = watched(folder, lambda ids: widths.append(len(ids)), rows, prefill_tokens)
    asked = [(prompt(at, 3 + 17 * at), drawn(how, at, 9 + at)) for at, how in enumerate(SETTINGS)]
    calls = sampled(backend, asked)
    assert max(widths) == rows
    assert [len(call.output_ids) for call in calls] == [9 + at for at in range(8)]
    assert set(calls[0].output_logprobs) == {0.0}
    assert_replayed(folder, calls)


def test_a_prompt_computes_only_what_no_finished_call_and_no_row_at_work_begins_with(folder: Path) -> None:
    backend = opened(folder)
    first = sampled(backend, [(prompt(1, 40), drawn(SETTINGS[3], max_tokens=10))])
    longer = first[0].prompt_ids + first[0].output_ids + prompt(2, 7)
    second = sampled(backend, [(longer, drawn(SETTINGS[1]))])
    # The last output was drawn but never read by the model.
    assert (backend.decoder.reused_tokens, backend.decoder.prefilled_tokens) == (49, 40 + 8)
    again = sampled(backend, [(longer, drawn(SETTINGS[3]))])
    assert backend.decoder.prefilled_tokens == 40 + 8 + 1, "of an equal prompt only the last token is new"
    assert_replayed(folder, first + second + again)
    backend = opened(folder, cache_tokens=0)
    asked = [(prompt(1, 50) + prompt(10 + at, 4 + at), drawn(SETTINGS[3], at)) for at in range(4)]
    assert_replayed(folder, sampled(backend, asked))
    assert (backend.decoder.reused_tokens, backend.decoder.prefilled_tokens) == (150, 50 + 4 + 5 + 6 + 7)


def decoder_of(folder: Path, prefill_tokens: int, dtype: Any = "float32") -> Decoder:
    return Decoder(SlotModel(load_causal_model(folder, "cpu", dtype)), 8, 2000, prefill_tokens)


def decoded(
    decoder: Decoder, asked: Sequence[tuple[tuple[int, ...], Sampling]]
) -> tuple[list[SampledCall], list[list[int]]]:
    """The calls, and the prompts of each pass by their places."""
    rows = [DecodingRow(np.asarray(ids), sampling) for ids, sampling in asked]
    waiting, passes = list(rows), list[list[int]]()
    while waiting:
        admitted = [waiting[place] for place in decoder.next_pass([row.prompt for row in waiting])]
        decoder.admit(admitted)
        waiting = [row for row in waiting if row not in admitted]
        passes.append([rows.index(row) for row in admitted])
    running = list(rows)
    while running:
        for row in [row for row in running if row.finish_reason]:
            decoder.release(row)
            running.remove(row)
        if running:
            decoder.step()
    calls = zip(rows, asked, strict=True)
    return [SampledCall(ids, row.output_ids, tuple(row.logprobs), how) for row, (ids, how) in calls], passes


def test_prompts_of_different_lengths_are_computed_in_passes_of_bounded_size(folder: Path) -> None:
    decoder = decoder_of(folder, 120)
    lengths = (30, 9, 25, 41, 60, 33, 4, 57)
    asked = [(prompt(at, lengths[at]), drawn(how, at, 6 + at)) for at, how in enumerate(SETTINGS)]
    calls, passes = decoded(decoder, asked)
    assert passes == [[0, 1, 2, 6], [3, 4], [5, 7]]
    longer = [call.prompt_ids + call.output_ids + prompt(90 + at, 3 * at + 1) for at, call in enumerate(calls)]
    again, passes = decoded(decoder, [(ids, drawn(SETTINGS[3], at)) for at, ids in enumerate(longer)])
    assert passes == [[0, 1], [2, 3], [4], [5], [6], [7]]  # what is computed already is read, too
    assert decoder.reused_tokens == sum(len(call.prompt_ids + call.output_ids) - 1 for call in calls)
    assert_replayed(folder, calls + again)


def test_a_prompt_that_begins_like_another_of_its_pass_waits_and_copies(folder: Path) -> None:
    decoder = decoder_of(folder, 400)
    groups = [prompt(1, 40), prompt(2, 50)]
    calls, passes = decoded(decoder, [(ids, drawn(SETTINGS[3], seed)) for ids in groups for seed in range(4)])
    assert passes == [[0, 4], [1, 2, 3, 5, 6, 7]]
    assert decoder.reused_tokens == 3 * 39 + 3 * 49
    assert_replayed(folder, calls)


def test_what_is_kept_is_bounded_and_the_least_recently_used_goes_first(folder: Path) -> None:
    backend = opened(folder, cache_tokens=60)
    for seed in (1, 2, 1, 3):  # of 20 + 9 tokens: 3 drives out 2
        sampled(backend, [(prompt(seed, 20), drawn(SETTINGS[3], 5, 10))])
    before = backend.decoder.reused_tokens
    assert before == 19
    sampled(backend, [(prompt(2, 20), drawn(SETTINGS[3], 5, 10))])
    assert backend.decoder.reused_tokens == before
    without = opened(folder, cache_tokens=0)
    for _ in range(2):
        sampled(without, [(prompt(1, 20), drawn(SETTINGS[3], 5, 10))])
    assert without.decoder.reused_tokens == 0


def test_what_a_seed_draws_does_not_depend_on_the_company(folder: Path) -> None:
    asked = [(prompt(at, 10 + 9 * at), drawn(SETTINGS[3], at)) for at in range(6)]
    together = sampled(opened(folder), asked)
    alone = [call for each in asked for call in sampled(opened(folder), [each])]
    assert [call.output_ids for call in together] == [call.output_ids for call in alone]
    without_seed = Sampling(max_tokens=20)
    assert len({call.output_ids for call in sampled(opened(folder), [(prompt(1, 9), without_seed)] * 4)}) == 4


def test_an_output_ends_with_its_stop_token_or_at_its_length(folder: Path) -> None:
    backend = opened(folder)
    (cut,) = outcomes(backend, [(prompt(3, 20), drawn(SETTINGS[6], 4, 30))])
    stop = next(token for token in cut.output_ids if token != cut.output_ids[0])
    (stopped,) = outcomes(backend, [(prompt(3, 20), drawn(SETTINGS[6], 4, 30, (stop, 299)))])
    assert (cut.finish_reason, len(cut.output_ids)) == ("length", 30)
    end = cut.output_ids.index(stopped.output_ids[-1]) + 1
    assert (stopped.finish_reason, stopped.output_ids) == ("stop", cut.output_ids[:end])


@in_loop
async def test_a_cancelled_call_gives_its_row_up(folder: Path) -> None:
    started, loop = asyncio.Event(), asyncio.get_running_loop()
    backend = watched(folder, lambda ids: loop.call_soon_threadsafe(started.set), rows=1)
    endless = drawn(SETTINGS[3], max_tokens=240)
    running = asyncio.create_task(backend.generate(prompt(1, 5), endless))
    await started.wait()
    waiting = asyncio.create_task(backend.generate(prompt(2, 5), endless))
    await asyncio.sleep(0)
    for task in (running, waiting):
        task.cancel()
    ended = await asyncio.gather(running, waiting, return_exceptions=True)
    assert [type(each) for each in ended] == [asyncio.CancelledError] * 2
    last = await backend.generate(prompt(3, 5), drawn(SETTINGS[3], max_tokens=3))
    assert len(last.output_ids) == 3
    assert backend.decoder.prefilled_tokens == 10  # the one that waited was never begun
    assert backend.decoder.decoded_tokens < 240


def test_a_prefill_that_fails_reaches_its_caller_only(folder: Path) -> None:
    def out_of_memory(ids: list[list[int]]) -> None:
        if 7 in ids[0] and len(ids[0]) > 1:
            raise torch.OutOfMemoryError("no room")

    asked = [(ids, drawn(SETTINGS[0])) for ids in ((1, 2, 3), (4, 7, 5), (6, 8, 9))]
    found = outcomes(watched(folder, out_of_memory), asked)
    assert [type(each) for each in found] == [SampledOutput, InfrastructureFault, SampledOutput]
    assert "no room" in str(found[1])


def test_a_step_that_fails_reaches_the_rows_of_that_step_and_the_backend_lives_on(folder: Path) -> None:
    broken = [True]

    def fail_once(ids: list[list[int]]) -> None:
        if len(ids) == 3 and broken[0]:
            broken[0] = False
            raise RuntimeError("a kernel failed")

    backend, asked = watched(folder, fail_once, rows=3), [(prompt(at, 9), drawn(SETTINGS[3], at)) for at in range(5)]
    found = outcomes(backend, asked)
    assert [type(each) for each in found] == [InfrastructureFault] * 3 + [SampledOutput] * 2
    assert_replayed(folder, sampled(backend, asked[:3]))


@pytest.mark.parametrize("prefill_tokens", [0, 400])
def test_logits_that_are_not_finite_are_a_fault_that_leaves_no_trace(folder: Path, prefill_tokens: int) -> None:
    model = SlotModel(load_causal_model(folder, "cpu", "float32"))
    with torch.no_grad():
        model.model.get_input_embeddings().weight[99] = torch.nan
        head = model.model.get_output_embeddings()
        head.weight = torch.nn.Parameter(head.weight.nan_to_num())
    backend = TransformersBackend(model, folder, "float32", 2, 100, prefill_tokens)

    # The last one gets the slot of the faulty one, beside a longer row, up to whose length its slot is read.
    found = outcomes(backend, [(ids, drawn(SETTINGS[3])) for ids in (prompt(1, 80), (99,) * 60, (1, 2, 3))])
    assert [type(each) for each in found] == [SampledOutput, InfrastructureFault, SampledOutput]
    assert "not finite" in str(found[1])


@pytest.mark.parametrize(("weights", "together"), [(10_000_000, [0, 1, 2]), (1, [0])])
def test_prompts_share_a_pass_on_a_cpu_where_the_model_is_small(
    folder: Path, monkeypatch: pytest.MonkeyPatch, weights: int, together: list[int]
) -> None:
    monkeypatch.setattr("harness1.models.decoding.SMALL_WEIGHTS", weights)
    backend = open_transformers(folder, device="cpu", dtype="float32", threads=0, rows=8, cache_tokens=2000)
    assert backend.decoder.next_pass([np.asarray(prompt(seed, 9)) for seed in range(3)]) == together


def test_other_weights_wait_for_the_rows_at_work_and_are_tagged(folder: Path, tmp_path: Path) -> None:
    other = save_tiny_model(tmp_path, seed=1)

    async def swap() -> list[SampledOutput]:
        release, loop, started = Event(), asyncio.get_running_loop(), asyncio.Event()

        def hold(ids: list[list[int]]) -> None:
            loop.call_soon_threadsafe(started.set)
            release.wait(30)

        backend = watched(folder, hold, rows=4)
        before = asyncio.create_task(backend.generate(prompt(1, 20), drawn(SETTINGS[3], 1)))
        await started.wait()
        loading = asyncio.create_task(backend.load_state(load_file(other / "model.safetensors"), 5))
        while not backend._swaps:
            await asyncio.sleep(0.01)
        after = asyncio.create_task(backend.generate(prompt(1, 20), drawn(SETTINGS[3], 1)))
        await asyncio.sleep(0)
        release.set()
        outcomes = [await before, await after]
        await loading
        assert backend.version == 5
        assert backend.decoder.reused_tokens == 0
        return outcomes

    before, after = asyncio.run(swap())
    assert [(each.version_start, each.version_end) for each in (before, after)] == [(0, 0), (5, 5)]
    how = drawn(SETTINGS[3], 1)
    calls = [SampledCall(prompt(1, 20), each.output_ids, each.output_logprobs, how) for each in (before, after)]
    assert_replayed(folder, calls[:1])
    assert_replayed(other, calls[1:])
    assert not compare_calls(load_causal_model(folder, "cpu", "float32"), calls[1:]).passes("float32")


def test_adapters_that_are_rounded_once_are_those_loaded_last(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness1.models.adapters.ROUNDED_ON", ("cpu",))
    first = load_causal_model(folder, "cpu", "bfloat16")
    add_adapters(first, Lora(rank=4), seed=0)
    backend = TransformersBackend(SlotModel(first), folder, "bfloat16", 8, 2000)
    for seed in (1, 2):
        model = load_causal_model(folder, "cpu", "bfloat16")
        add_adapters(model, Lora(rank=4), seed)
        for name, value in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(value, std=0.2, generator=torch.Generator().manual_seed(seed))
        state = adapters_of(model)
        assert state is not None
        asyncio.run(backend.load_state(state, seed))
        calls = sampled(backend, [(prompt(at, 20), drawn(SETTINGS[3], at, 20)) for at in range(4)])
        assert compare_calls(model, calls).passes("bfloat16")


def test_other_tied_weights_sample_as_a_model_opened_with_them(tmp_path: Path) -> None:
    first, second = (save_tiny_model(tmp_path / str(seed), seed=seed, tie_word_embeddings=True) for seed in (0, 1))
    backend, asked = opened(first), [(prompt(1, 20), drawn(SETTINGS[3]))]
    asyncio.run(backend.load_state(load_file(second / "model.safetensors"), 1))
    assert sampled(backend, asked) == sampled(opened(second), asked)


def test_weights_of_another_architecture_are_refused_and_change_nothing(folder: Path, tmp_path: Path) -> None:
    wider = load_file(save_tiny_model(tmp_path, intermediate_size=128) / "model.safetensors")
    backend = opened(folder)
    for state in (wider, {"lm_head.weight": torch.zeros(VOCABULARY, 64)}):
        with pytest.raises(UsageError, match=r"layers\.0"):
            asyncio.run(backend.load_state(state, 1))
    assert backend.version == 0


def test_rejects_what_the_model_cannot_do(folder: Path) -> None:
    backend = opened(folder)
    for ids, sampling in (
        ((), Sampling(max_tokens=1)),
        ((VOCABULARY,), Sampling(max_tokens=1)),
        ((-1,), Sampling(max_tokens=1)),
        (prompt(1, 250), Sampling(max_tokens=7)),
        ((1,), Sampling(temperature=-1.0, max_tokens=1)),
    ):
        with pytest.raises(UsageError):
            asyncio.run(backend.generate(ids, sampling))
    assert len(sampled(backend, [(prompt(1, 250), Sampling(max_tokens=6))])[0].output_ids) == 6


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {"num_key_value_heads": 4}),
        ("mistral", {"sliding_window": 8}),
        ("gemma2", {"sliding_window": 8, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 16}),
        ("gpt_oss", {"sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2}),
        ("gpt2", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256}),
    ],
)
def test_windows_sinks_and_soft_caps_pass_the_gate(kind: str, settings: dict[str, Any], tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path, kind, **settings)
    for prefill_tokens, count in ((0, 4), (2000, 1)):
        decoder = decoder_of(folder, prefill_tokens)
        asked = [(prompt(at, 5 + 12 * at), drawn(SETTINGS[3], at)) for at in range(4)]
        calls, _ = decoded(decoder, asked)
        longer = [(call.prompt_ids + call.output_ids + prompt(9, 3), call.sampling) for call in calls]
        extended, passes = decoded(decoder, longer)
        assert len(passes) == count
        assert_replayed(folder, calls + extended)
        assert decoder.reused_tokens > 0


def test_padding_stays_within_the_window_of_the_model(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path, "gpt2", n_embd=64, n_layer=2, n_head=4, max_position_embeddings=250)
    decoder = decoder_of(folder, 2000)
    first, _ = decoded(decoder, [(prompt(1, 200), drawn(SETTINGS[3]))])
    longer = first[0].prompt_ids + first[0].output_ids + prompt(2, 20)
    calls, passes = decoded(decoder, [(longer, drawn(SETTINGS[3])), (prompt(3, 40), drawn(SETTINGS[3]))])
    assert passes == [[0], [1]]  # together they would end at position 250
    assert_replayed(folder, first + calls)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("mamba", {}),
        ("bloom", {"n_layer": 2, "n_head": 4}),
        ("jamba", {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False, "num_experts": 1}),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}),
    ],
)
def test_models_that_need_more_than_slots_are_refused(kind: str, settings: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="vLLM"):
        opened(save_tiny_model(tmp_path, kind, **settings))


def test_a_model_that_computes_something_else_than_its_own_attention_is_refused(folder: Path) -> None:
    askew = type("Askew", (SlotModel,), {"logits": lambda self, *given: SlotModel.logits(self, *given) * 1.01})
    with pytest.raises(UsageError, match="needs an attention"):
        askew(load_causal_model(folder, "cpu", "float32"))


@pytest.mark.parametrize("rows", [1, 7, VOCABULARY])
def test_sampling_never_holds_the_output_head_in_float32_yet_has_its_logits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    monkeypatch.setattr(causal_model, "HEAD_ROWS", rows)
    head = load_causal_model(save_tiny_model(tmp_path), "cpu", "bfloat16").get_output_embeddings()
    hidden = torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    with torch.no_grad(), LargestConversion() as conversion:
        blocks = head(hidden)
    assert conversion.elements == max(rows * 64, hidden.numel())
    assert blocks.dtype == torch.float32
    torch.testing.assert_close(blocks, head(hidden).detach(), rtol=0, atol=1e-6)


class LargestConversion(TorchDispatchMode):
    """Remembers the size of the largest tensor that was converted to another type."""

    elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten._to_copy.default:
            self.elements = max(self.elements, args[0].numel())
        return function(*args, **(kwargs or {}))


def test_half_precision_has_logits_in_float32_and_passes_its_gate(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path, tie_word_embeddings=True)
    model = load_causal_model(folder, "cpu", "bfloat16")
    assert model(torch.tensor([[1, 2]])).logits.dtype == torch.float32
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert set(model.state_dict()) == set(load_causal_model(folder, "cpu", "float32").state_dict())
    asked = [(prompt(at, 10 + at), drawn(SETTINGS[3], at, 20)) for at in range(8)]
    assert_replayed(folder, sampled(opened(folder, "bfloat16"), asked), "bfloat16")
    decoder = decoder_of(folder, 2000, "bfloat16")
    calls, _ = decoded(decoder, asked)
    longer = [(call.prompt_ids + call.output_ids + prompt(9, 3 + at), call.sampling) for at, call in enumerate(calls)]
    again, passes = decoded(decoder, longer)  # of rows with different beginnings
    assert passes == [[*range(8)]]
    assert_replayed(folder, calls + again, "bfloat16")


def test_the_hash_names_weights_and_type(folder: Path, tmp_path: Path) -> None:
    other = save_tiny_model(tmp_path, seed=1)
    hashes = {opened(folder).hash, opened(folder, "bfloat16").hash, opened(other).hash}
    assert len(hashes) == 3
    assert opened(folder, rows=2).hash in hashes


def test_a_folder_without_all_weights_or_another_device_is_refused(folder: Path, tmp_path: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    with pytest.raises(UsageError, match=r"lacks weights.*model\.norm\.weight"):
        opened(tmp_path)
    with pytest.raises(UsageError, match="device"):
        open_transformers(folder, device="nowhere", dtype="float32", threads=0, rows=1, cache_tokens=0)


LIST = Grammar(ebnf='root ::= "[" item ("," item)* "]"\nitem ::= [a-c] [0-9]?', digest="list")
LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
"""The byte-level letter of each id from 0 to 255; those of ASCII text stand for themselves."""


def test_a_grammar_holds_and_its_masked_distribution_is_recorded(folder: Path) -> None:
    backend = opened(folder)

    compiler, calls = GrammarCompiler(folder, VOCABULARY), []
    hows = [drawn(how, seed, 40, (STOP,)) for how in SETTINGS for seed in range(4)]
    outputs = outcomes(backend, [(prompt(at, 9), how, LIST) for at, how in enumerate(hows)])
    for at, (how, out) in enumerate(zip(hows, outputs, strict=True)):
        text = "".join(LETTERS[token] for token in out.output_ids if token != STOP)
        assert text.startswith("[")
        assert set(text) <= set("[],abc0123456789")
        assert (STOP in out.output_ids) == (out.finish_reason == "stop") == text.endswith("]")
        calls.append(SampledCall(prompt(at, 9), out.output_ids, out.output_logprobs, how))
    assert any(call.output_ids[-1] == STOP for call in calls)
    model = load_causal_model(folder, "cpu", "float32")
    report = compare_calls(model, calls, lambda call: compiler.masks(LIST, (STOP,), call.output_ids))
    assert report.passes("float32"), report
    assert not compare_calls(model, calls).passes("float32")


def test_a_grammar_that_comes_to_a_dead_end_ends_its_own_call_alone(folder: Path) -> None:
    backend = opened(folder)
    # No character is outside of all characters.
    dead = [Grammar(ebnf=rf'root ::= "{"b" * length}" [^\u0000-\U0010FFFF]', digest=str(length)) for length in (0, 3)]

    free = [(prompt(at, 9), drawn(SETTINGS[3], at, 12)) for at in range(3)]
    ended = [((1,), drawn(SETTINGS[3], 0, 12, (STOP,)), each) for each in dead]
    outputs = outcomes(backend, [*free[:2], *ended, *free[2:]])
    assert [len(each.output_ids) for each in outputs if isinstance(each, SampledOutput)] == [12, 12, 12]
    faults = [str(each) for each in outputs if isinstance(each, InfrastructureFault)]
    assert faults == ["the grammar allows none of the tokenizer's tokens"] * 2
    assert len(asyncio.run(backend.generate((1,), drawn(SETTINGS[3], 0, 3))).output_ids) == 3


def test_a_stop_token_is_allowed_only_where_the_grammar_may_end(folder: Path) -> None:
    ids = {letter: token for token, letter in enumerate(LETTERS)}
    output = [ids["["], ids["a"], ids["]"], STOP]
    masks = GrammarCompiler(folder, VOCABULARY).masks(LIST, (STOP,), output)
    assert masks.shape == (4, VOCABULARY)
    assert masks[:, STOP].tolist() == [False, False, False, True]
    others = GrammarCompiler(folder, VOCABULARY).masks(LIST, (257, 299), [*output[:3], 299])
    assert others[:, [STOP, 257, 299]].any(0).tolist() == [False, True, True]
    assert masks[0].nonzero().flatten().tolist() == [ids["["]]
    assert masks[1].nonzero().flatten().tolist() == [ids[letter] for letter in "abc"]
    with pytest.raises(InfrastructureFault, match="does not allow"):
        GrammarCompiler(folder, VOCABULARY).masks(LIST, (STOP,), [ids["a"]])


def test_reports_an_unusable_grammar_as_a_usage_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = opened(folder)
    with pytest.raises(UsageError, match="stop token"):
        asyncio.run(backend.generate((1,), drawn(SETTINGS[3]), LIST))
    broken = Grammar(ebnf="root ::= (", digest="broken")
    with pytest.raises(UsageError, match="does not compile"):
        asyncio.run(backend.generate((1,), drawn(SETTINGS[3], stop_ids=(STOP,)), broken))
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    with pytest.raises(MissingExtra, match=r"xgrammar.*grammar"):
        asyncio.run(opened(folder).generate((1,), drawn(SETTINGS[3], stop_ids=(STOP,)), LIST))


ROWS, HEADS, KV_HEADS, WIDTH = 2, 6, 2, 8


def states(heads: int, tokens: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(ROWS, heads, tokens, WIDTH, generator=generator).requires_grad_()


def causal(queries: int, keys: int) -> Tensor:
    return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)[None, None].repeat(ROWS, 1, 1, 1)


@pytest.mark.parametrize(
    ("queries", "keys", "padded"),
    [(1, 1, False), (4, 4, False), (11, 11, False), (3, 11, False), (5, 21, False), (11, 11, True)],
)
def test_outputs_and_gradients_are_those_of_torch(
    queries: int, keys: int, padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_attention, "BLOCK", 4)
    query, key, value = states(HEADS, queries, 0), states(KV_HEADS, keys, 1), states(KV_HEADS, keys, 2)
    seen = causal(queries, keys)
    if padded:
        seen[1, :, :, 7:] = False
    groups = HEADS // KV_HEADS
    grouped = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    expected = scaled_dot_product_attention(query, *grouped, seen, scale=0.3)
    found = BlockAttention.apply(query, key, value, seen if padded else None, 0.3)
    torch.testing.assert_close(found, expected)
    given = torch.randn(expected.shape, generator=torch.Generator().manual_seed(3))
    for own, theirs in zip(
        torch.autograd.grad(found, (query, key, value), given),
        torch.autograd.grad(expected, (query, key, value), given),
        strict=True,
    ):
        torch.testing.assert_close(own, theirs)


LOGITS = torch.tensor([[2.0, 1.0, 0.0, -1.0], [0.0, 0.0, 3.0, 0.5]])


def test_without_settings_it_is_the_softmax_in_float32_of_logits_over_the_temperature() -> None:
    assert torch.equal(process_logprobs(LOGITS.bfloat16(), Sampling()), LOGITS.log_softmax(-1))
    assert torch.allclose(process_logprobs(LOGITS, Sampling(temperature=0.5)), (LOGITS / 0.5).log_softmax(-1))
    greedy = process_logprobs(LOGITS, Sampling(temperature=0.0, top_p=0.5, top_k=3))
    assert greedy.tolist() == [[0.0, -math.inf, -math.inf, -math.inf], [-math.inf, -math.inf, 0.0, -math.inf]]


def test_top_p_keeps_the_token_that_reaches_it() -> None:
    probabilities = torch.tensor([0.1, 0.5, 0.15, 0.25])
    for top_p, kept in ((0.4, 1), (0.5001, 2), (0.76, 3), (0.95, 4), (1e-9, 1)):
        logprobs = process_logprobs(probabilities.log(), Sampling(top_p=top_p))
        expected = probabilities.where(probabilities >= probabilities.sort(descending=True).values[kept - 1], 0.0)
        assert torch.allclose(logprobs.exp(), expected / expected.sum(), atol=1e-6), top_p


def test_grammar_temperature_top_k_and_top_p_come_in_this_order() -> None:
    probabilities = torch.tensor([0.4, 0.3, 0.2, 0.1])
    mask = torch.tensor([False, True, True, True])
    # Without the first: 1/2, 1/3, 1/6; squared: 9, 4, 1; two of them are 9/13 and 4/13; 0.69 needs one only.
    squared = {"temperature": 0.5, "top_k": 2}
    both = process_logprobs(probabilities.log(), Sampling(**squared, top_p=0.7), mask)
    assert torch.allclose(both.exp(), torch.tensor([0, 9 / 13, 4 / 13, 0]), atol=1e-6)
    one = process_logprobs(probabilities.log(), Sampling(**squared, top_p=0.69), mask)
    assert torch.allclose(one.exp(), torch.tensor([0.0, 1.0, 0.0, 0.0]), atol=1e-6)


def test_what_is_kept_can_be_differentiated() -> None:
    logits = LOGITS.clone().requires_grad_()
    process_logprobs(logits, Sampling(temperature=0.7, top_k=3, top_p=0.9))[0, 0].backward()
    assert logits.grad.isfinite().all()


def test_draws_follow_the_distribution_and_never_are_a_token_of_probability_0() -> None:
    logprobs = process_logprobs(LOGITS, Sampling(top_k=3))
    uniforms = torch.linspace(0, 1, 10_001, dtype=torch.float64)[:-1]
    for row in logprobs:
        ids = draw(row.expand(len(uniforms), -1), uniforms)
        shares = torch.bincount(ids, minlength=4) / len(uniforms)
        assert torch.allclose(shares, row.exp(), atol=2e-4)
    for uniform in (0.0, 0.5, 1 - 2**-53):
        one = torch.tensor([[-math.inf, 0.0, -math.inf]])
        assert draw(one, torch.tensor([uniform], dtype=torch.float64)).tolist() == [1]


def test_settings_that_name_no_distribution_are_refused() -> None:
    for name, value in (
        *(("temperature", -0.1), ("temperature", math.nan), ("top_p", 0.0), ("top_p", 1.1), ("top_k", -1)),
        ("max_tokens", 0),
    ):
        with pytest.raises(UsageError, match=name):
            check_sampling(Sampling(**{name: value}))


def test_memory_goes_back_to_the_system_at_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    now, trimmed = [100.0], list[int]()
    monkeypatch.setattr(causal_model.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(causal_model.ctypes, "CDLL", lambda _: SimpleNamespace(malloc_trim=trimmed.append))
    returns = MemoryReturns(30.0)
    for now[0], count in ((129.0, 0), (130.0, 1), (159.0, 1)):
        returns.tick()
        assert len(trimmed) == count
