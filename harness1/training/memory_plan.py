"""A memory plan: what training holds on each device, before anything is loaded. The code of trainer and sampler runs on
tensors that have shapes but no data, with every storage counted, without any formula. Two short stacks of layers give
the bytes of each further layer, exactly, as what a layer needs is freed before the next."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from harness1.config import Config, Train
from harness1.errors import optional
from harness1.model_folder import refusing
from harness1.models.causal_model import Dtype, compute_logits_in_float32, output_head
from harness1.models.decoding import ATTENTION as SLOTS
from harness1.models.decoding import PREFILL_TOKENS, KvSlots, SlotPass, attend
from harness1.records import Record
from harness1.training.algorithm import Algorithm, MicroBatch, OffPolicyMetrics
from harness1.training.trainable import choose_stored_dtype
from harness1.training.trainer import Trainer, compute_logprobs, precision

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

FREE = 0.06  # the share of a GPU that a plan leaves to CUDA's context, kernels and fragments; it depends on the driver
PHASES = ("forward", "logits", "backward", "embedding")
GATHERED = 2  # layers that sharded training holds whole: the one that computes, and the one that is fetched meanwhile
CACHE_ROOM = "room for keys and values"
LINEAR = "harness1_linear"  # the attention to count any fused kernel with: torch's own, without a mask
Sampling = Literal["beside", "reserved", "apart", "none"]
Parts = dict[str, int]  # bytes by name


class Devices(Record):
    """Devices of `memory` bytes each: those that train, sharing all weights, and those that only sample. Episodes are
    sampled in the process that trains, there by vLLM with a share of its own, elsewhere, or nowhere."""

    memory: int
    kind: Literal["cuda", "cpu"] = "cuda"
    trainers: int = 1
    samplers: int = 0
    sampling: Sampling = "none"


class BatchSize(NamedTuple):
    """A forward pass over rows of one length, with the trained tokens of all rows together."""

    rows: int
    length: int
    trained: int


class Plan(Record):
    """Bytes on a device that trains: `held` throughout, the most beside it in each of the `moments`, in all `needs`.
    `sampler` is on a device that only samples, `token` the keys and values of one token."""

    parameters: int  # without adapters
    trained: int
    batch: BatchSize
    devices: Devices
    held: Parts
    moments: Parts
    token: int
    sampler: Parts
    needs: int

    @property
    def fits(self) -> bool:
        usable = int(self.devices.memory * (1 - FREE if self.devices.kind == "cuda" else 1))
        return self.needs <= usable and self.sampler.get(CACHE_ROOM, 1) > 0


class MemoryPlanner:
    """Makes memory plans of one model and loss, and remembers what it has counted; raises UsageError for a model that
    transformers cannot build or not compute without data."""

    def __init__(self, shape: PreTrainedConfig, algorithm: Algorithm) -> None:
        self.shape, self._algorithm = shape, algorithm
        self._step, self._prefill = cache(self._count_step), cache(self._count_prefill)

    def plan(self, config: Config, batch: BatchSize, devices: Devices) -> Plan:
        """Return the plan of a run whose largest forward pass is `batch`."""
        train, model, context = config.train, config.machine.model, config.env.context_window
        rows = config.machine.slots
        step = self.step(train, batch, {"auto": "", "eager": "eager", "sdpa": "sdpa"}.get(train.attention, LINEAR))
        shards, whole = devices.trainers, not (step["frozen"] and train.lora.rank)
        trained = step["trained"] // shards
        held = {"weights": (step["frozen"] + whole * step["trained"]) // shards}
        held |= {} if whole else {"adapters": trained}
        held |= {"gradients": trained, "optimizer": 2 * step["trained"] // shards}
        moments = {"forward and backward pass": max(step[phase] for phase in PHASES)}
        if devices.kind == "cuda":  # there, AdamW makes the divisors of all weights at once
            moments["optimizer step"] = trained
        if shards > 1:
            held["layers gathered whole"] = step["outside"] + GATHERED * step["layer"]
        sampler, token, share = Parts(), 0, int(model.memory_share * devices.memory)
        if devices.sampling in ("beside", "apart"):
            sampled = self._prefill(config.policy.dtype, rows, context)
            token = sampled["cache"] // (rows * context)
        if devices.sampling == "beside":
            held["weights of the sampler"] = sampled["weights"]
            held["keys and values"] = sampled["cache"] + model.cache_tokens * token
            prompts = min(rows, PREFILL_TOKENS / context) if devices.kind == "cuda" else 1
            moments["prefill"] = math.ceil(sampled["working"] * max(1, prompts))
        elif devices.sampling == "reserved":
            held["vLLM"] = share
        elif devices.sampling == "apart":  # servers keep a layer's window alone, and share heads like weights
            parts = 1
            while sampled["weights"] // parts > share / 2 and 2 * parts <= devices.samplers:
                parts *= 2
            sampler = {"weights": sampled["weights"] // parts, CACHE_ROOM: share - sampled["weights"] // parts}
            kinds = getattr(self.shape.get_text_config(), "layer_types", None) or ["full_attention"]
            token = int(token * (1 - kinds.count("sliding_attention") / len(kinds))) // parts
        needs = sum(held.values()) + max(moments.values())
        counts = step["parameters"], step["trained"] // 4
        return Plan(*counts, batch, devices, held, moments, token, sampler, needs)

    def step(self, train: Train, batch: BatchSize, attention: str = "") -> Parts:
        """Return the bytes of a training step whose gradients exist, as `count_step`."""
        matter = Train(dtype=train.dtype, lora=train.lora, checkpointing=train.checkpointing)
        return self._step(matter, batch, attention)

    def _count_step(self, train: Train, batch: BatchSize, attention: str) -> Parts:
        count = partial(count_step, train=train, algorithm=self._algorithm, size=batch, attention=attention)
        # With adapters in some layers, layers do not repeat.
        return count(self.shape) if train.lora.layers else count_in_stacks(self.shape, count)

    def _count_prefill(self, dtype: Dtype, rows: int, tokens: int) -> Parts:
        return count_in_stacks(self.shape, partial(count_prefill, dtype=dtype, rows=rows, tokens=tokens))


def count_in_stacks(shape: PreTrainedConfig, count: Callable[[PreTrainedConfig], Parts]) -> Parts:
    """Return what `count` returns for a model, computed from two short stacks where the types of its layers repeat."""
    text = shape.get_text_config()
    kinds = list(getattr(text, "layer_types", None) or [""])
    period = next(each for each in range(1, len(kinds) + 1) if kinds == (kinds[:each] * len(kinds))[: len(kinds)])
    short = max(period, 2)  # the input of a single layer needs no gradient
    more, rest = divmod(text.num_hidden_layers - short, period)
    if more < 2 or rest:
        return count(shape)
    parts = []
    for layers in (short, short + period):
        stack = deepcopy(shape)
        own = stack.get_text_config()
        own.num_hidden_layers = layers
        if kinds != [""]:
            own.layer_types = kinds[:layers]
        parts.append(count(stack))
    return {name: size + more * (parts[1][name] - size) for name, size in parts[0].items()}


def count_step(
    shape: PreTrainedConfig, train: Train, algorithm: Algorithm, size: BatchSize, attention: str = ""
) -> Parts:
    """Return the bytes of a training step: of weights those `frozen`, `trained`, in the largest `layer` and `outside`
    all layers; what layers have `kept` after the forward pass; the most in each of `PHASES`; the `parameters`."""
    import torch

    with _without_data(shape):
        model = _model(shape, choose_stored_dtype(train), attention)
        parameters = sum(each.numel() for each in model.parameters())
        if train.dtype != choose_stored_dtype(train):
            compute_logits_in_float32(model)
        trainer = Trainer(model, algorithm, train, steps=1)
        for parameter in trainer.parameters:
            parameter.grad = torch.zeros_like(parameter)
        numbers, places = torch.zeros(size.trained), torch.zeros(size.trained, dtype=torch.long)
        ids = torch.zeros((size.rows, size.length), dtype=torch.long)
        batch = MicroBatch(ids, places, places, places, numbers, numbers, numbers)
        metrics = OffPolicyMetrics(algorithm, torch.device("cpu"))
        with _live_bytes(model) as live:
            embedding: Any = model.get_input_embeddings()
            embedding.register_forward_hook(lambda _, given, made: live.end_at_gradient(made, "embedding"))
            output_head(model).register_forward_pre_hook(live.end_at_head)
            with precision(model, train.dtype):
                logprobs, distributions = compute_logprobs(model, batch)
            metrics.add(distributions, logprobs, batch)
            loss = algorithm.token_losses(logprobs, batch).sum()
            del distributions, logprobs
            loss.backward()  # type: ignore[no-untyped-call]
            live.end("")
        return {**_weights(model), "parameters": parameters, "kept": live.starts["backward"], **live.peaks}


def count_prefill(shape: PreTrainedConfig, dtype: Dtype, rows: int, tokens: int) -> Parts:
    """Return the bytes of sampling here: `weights`, the `cache` of all rows, and what is `working` in one prefill."""
    import torch
    from transformers import AttentionInterface

    AttentionInterface.register(SLOTS, attend)
    with _without_data(shape), torch.no_grad():
        model, slots = _model(shape, dtype, SLOTS), KvSlots(rows)
        with _live_bytes(model) as live:
            slot_pass, ids = SlotPass(slots, 0, [0], tokens, "cpu"), torch.zeros((1, tokens), dtype=torch.long)
            model(ids, position_ids=slot_pass.positions, use_cache=False, logits_to_keep=1, slot_pass=slot_pass)
            del slot_pass, ids
        weights = _weights(model)
        return {"weights": weights["frozen"] + weights["trained"], "cache": live.now, "working": live.peak - live.now}


@contextmanager
def _without_data(shape: PreTrainedConfig) -> Iterator[None]:
    with optional("train"):
        from torch._subclasses.fake_tensor import FakeTensorMode
    with refusing(f"the memory of a {shape.model_type} model cannot be computed"), FakeTensorMode():
        yield


def _model(shape: PreTrainedConfig, dtype: Dtype, attention: str) -> PreTrainedModel:
    import torch
    from transformers import AttentionInterface, AutoModelForCausalLM
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(LINEAR, sdpa_attention_forward)
    AttentionMaskInterface.register(LINEAR, lambda *_, **__: None)
    auto: Any = AutoModelForCausalLM
    model: PreTrainedModel = auto.from_config(deepcopy(shape), dtype=getattr(torch, dtype)).eval()
    capped = getattr(shape.get_text_config(), "attn_logit_softcapping", None) is not None
    attention = attention or ("eager" if capped else model.config._attn_implementation)
    model.set_attn_implementation(LINEAR if attention == "sdpa" else attention)
    if dtype != "float32":
        compute_logits_in_float32(model)
    return model


def _weights(model: PreTrainedModel) -> Parts:
    import torch

    def size(tensors: Any) -> int:
        return sum(each.numel() * each.element_size() for each in tensors)

    trained = size(each for each in model.parameters() if each.requires_grad)
    everything, layers = size([*model.parameters(), *model.buffers()]), model.config.get_text_config().num_hidden_layers
    stacks = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    sizes = [size(layer.parameters()) for layer in next((stack for stack in stacks if len(stack) == layers), ())]
    outside = everything - sum(sizes)
    return {"frozen": everything - trained, "trained": trained, "layer": max(sizes, default=0), "outside": outside}


def _live_bytes(model: PreTrainedModel) -> Any:
    """Return a context that counts the bytes of storages made in it, beyond those of the model: `now`, and `peak`, the
    most since a phase began. Its `end` ends a phase and begins another; the first is `forward`."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __init__(self) -> None:
            super().__init__()  # type: ignore[no-untyped-call]
            self.now = self.peak = 0
            self.peaks, self.starts, self.phase = Parts(logits=0, backward=0, embedding=0), Parts(), "forward"
            own = [*model.parameters(), *model.buffers()]
            own += [each.grad for each in own if each.grad is not None]
            self.sizes = {each.untyped_storage()._cdata: 0 for each in own}

        def end(self, following: str) -> None:
            self.peaks[self.phase], self.starts[following] = self.peak, self.now
            self.peak, self.phase = self.now, following

        def end_at_gradient(self, tensor: Any, following: str) -> None:
            if tensor.requires_grad:
                tensor.register_hook(lambda _: self.end(following))

        def end_at_head(self, _: Any, hidden: tuple[Any, ...]) -> None:
            self.end("logits")
            self.end_at_gradient(hidden[0], "backward")

        def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if call is torch.ops.aten._grouped_mm.default and args[0].dtype == torch.float32:
                # Without data, torch knows the shape of a grouped matrix product in bfloat16 only.
                left, right, offs = args[:3]
                groups = [len(offs)] if left.dim() == right.dim() == 2 else []
                made = left.new_empty(*groups, left.shape[-2], right.shape[-1])
            else:
                made = call(*args, **(kwargs or {}))
            for each in tree_leaves(made):
                if isinstance(each, torch.Tensor) and (key := each.untyped_storage()._cdata) not in self.sizes:
                    self.sizes[key] = each.untyped_storage().nbytes()
                    self.now += self.sizes[key]
                    self.peak = max(self.peak, self.now)
                    weakref.finalize(each.untyped_storage(), self.free, key)
            return made

        def free(self, key: int) -> None:
            self.now -= self.sizes.pop(key)

    return LiveBytes()
