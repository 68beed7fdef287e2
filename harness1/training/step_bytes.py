"""The bytes of a training step and of sampling, counted by running the code of trainer and sampler without data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from harness1.config import Train
from harness1.models.causal_model import Dtype, compute_logits_in_float32, output_head
from harness1.models.slots import ATTENTION as SLOTS
from harness1.models.slots import KvSlots, SlotPass, attend
from harness1.training.algorithm import Algorithm
from harness1.training.live_bytes import (
    Parts,
    live_bytes,
    of_all_layers,
    shaped_model,
    weights_of,
    without_data,
)
from harness1.training.micro_batch import MicroBatch, of_targets, precision, trained_distributions
from harness1.training.off_policy_metrics import OffPolicyMetrics
from harness1.training.trainable import stored_dtype
from harness1.training.trainer import Trainer

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedConfig, PreTrainedModel


class MicroBatchShape(NamedTuple):
    """A forward pass over rows of one length."""

    rows: int
    length: int
    """Tokens of each row."""
    trained: int
    """Trained tokens of all rows together."""


class StepBytes(NamedTuple):
    """Bytes of a training step, beside gradients (as many as `trained`) and the optimizer's moments (twice as many)."""

    frozen: int
    """Weights that are not trained."""
    trained: int
    """Weights that are, in float32."""
    layer: int
    """Weights of the largest layer."""
    outside: int
    """Weights of everything but the layers."""
    kept: int
    """Activations that the layers keep for their backward pass."""
    forward: int
    """The most at any time of the forward pass through the layers; as all that follow, weights not counted."""
    head: int
    """The most until log probabilities are there."""
    loss: int
    """The most from there through the loss to the gradient of the last hidden states."""
    backward: int
    """The most in the backward pass through the layers."""
    embedding: int
    """The most in that of the embedding."""

    @property
    def logits(self) -> int:
        """The most that logits and their gradients take beside what the layers keep."""
        return max(0, self.head - self.kept, self.loss - self.kept)

    @property
    def working(self) -> int:
        """The most that a layer takes beside what the layers keep: recomputed activations and gradients."""
        return max(0, self.forward - self.kept, self.backward - self.kept)

    @property
    def activations(self) -> int:
        """The most at any time."""
        return max(self.forward, self.head, self.loss, self.backward, self.embedding)


class PrefillBytes(NamedTuple):
    """Bytes of sampling in this process."""

    weights: int
    cache: int
    """Keys and values of all rows."""
    working: int
    """For the prefill of one prompt."""


def step_bytes(
    shape: PreTrainedConfig, train: Train, algorithm: Algorithm, batch: MicroBatchShape, attention: str = ""
) -> StepBytes:
    """Return the bytes of a training step whose gradients already exist, as they do after its first forward pass.

    Args:
        algorithm: with one that has bounds of ratios, the metrics of `OffPolicyMetrics` are computed too.
        attention: an attention of transformers or of `shape_attention`; empty: the one that transformers chooses.

    Raises:
        UsageError: transformers cannot build such a model, or not compute it without data.
        MissingExtra: torch or transformers is not installed.
    """

    def count(some: PreTrainedConfig) -> Parts:
        return _step(some, train, algorithm, batch, attention)

    # With adapters in some layers, layers do not repeat.
    return StepBytes(**(count(shape) if train.lora.layers else of_all_layers(shape, count)))


def prefill_bytes(shape: PreTrainedConfig, dtype: Dtype, rows: int, tokens: int) -> PrefillBytes:
    """Return the bytes of sampling `rows` rows of `tokens` tokens in this process.

    Raises:
        UsageError: transformers cannot build such a model, or not compute it without data.
        MissingExtra: torch or transformers is not installed.
    """
    return PrefillBytes(**of_all_layers(shape, lambda some: _prefill(some, dtype, rows, tokens)))


def parameter_count(shape: PreTrainedConfig) -> int:
    """Return the number of a model's parameters; tied ones count once.

    Raises:
        UsageError, MissingExtra: as `step_bytes`.
    """
    with without_data(shape):
        return sum(each.numel() for each in shaped_model(shape, "float32").parameters())


def _step(shape: PreTrainedConfig, train: Train, algorithm: Algorithm, load: MicroBatchShape, attention: str) -> Parts:
    import torch

    with without_data(shape):
        model = shaped_model(shape, stored_dtype(train), attention)
        if train.dtype != stored_dtype(train):
            compute_logits_in_float32(model)
        trainer = Trainer(model, algorithm, train, steps=1)
        for parameter in trainer.parameters:
            parameter.grad = torch.zeros_like(parameter)
        batch = _micro_batch(load)
        metrics = OffPolicyMetrics(algorithm, torch.device("cpu")) if hasattr(algorithm, "ratio_max") else None
        with live_bytes(model) as live:
            phases = _Phases(live, model)
            with precision(model, train.dtype):
                distributions = trained_distributions(model, batch)
            phases.end("loss")
            logprobs = of_targets(distributions, batch)
            if metrics is not None:
                metrics.add(distributions, logprobs, batch)
            loss = algorithm.token_losses(logprobs, batch).sum()
            del distributions, logprobs
            loss.backward()  # type: ignore[no-untyped-call]
            phases.end("")
        return {**weights_of(model)._asdict(), "kept": phases.kept, **phases.peaks}


class _Phases:
    """The peaks of a step by phase, named as in `StepBytes`."""

    def __init__(self, live: Any, model: PreTrainedModel) -> None:
        self._live = live
        self.peaks = dict.fromkeys(("forward", "head", "loss", "backward", "embedding"), 0)
        self.kept = 0
        self._phase = "forward"
        embedding: Any = model.get_input_embeddings()
        embedding.register_forward_hook(self._watch_embedding)
        output_head(model).register_forward_pre_hook(self._watch_head)

    def end(self, following: str) -> None:
        """End a phase, and begin another."""
        self.peaks[self._phase] = self._live.peak
        self._live.peak, self._phase = self._live.now, following

    def _watch_embedding(self, _: Any, __: Any, embedded: Tensor) -> None:
        if embedded.requires_grad:
            embedded.register_hook(lambda _: self.end("embedding"))  # type: ignore[no-untyped-call]

    def _watch_head(self, _: Any, given: tuple[Tensor]) -> None:
        self.end("head")
        given[0].register_hook(self._leave_head)  # type: ignore[no-untyped-call]

    def _leave_head(self, _: Any) -> None:
        self.kept = self._live.now
        self.end("backward")


def _micro_batch(load: MicroBatchShape) -> MicroBatch:
    import torch

    numbers, places = torch.zeros(load.trained), torch.zeros(load.trained, dtype=torch.long)
    ids = torch.zeros((load.rows, load.length), dtype=torch.long)
    return MicroBatch(ids, None, places, places, places, numbers, numbers, numbers)


def _prefill(shape: PreTrainedConfig, dtype: Dtype, rows: int, tokens: int) -> Parts:
    import torch
    from transformers import AttentionInterface

    AttentionInterface.register(SLOTS, attend)
    with without_data(shape), torch.no_grad():
        model = shaped_model(shape, dtype, SLOTS)
        weights = weights_of(model)
        slots = KvSlots(rows)
        with live_bytes(model) as live:
            slot_pass = SlotPass(slots, 0, [0], tokens, "cpu")
            ids = torch.zeros((1, tokens), dtype=torch.long)
            model(ids, position_ids=slot_pass.positions, use_cache=False, logits_to_keep=1, slot_pass=slot_pass)
            del slot_pass, ids
            cache = live.now
    return {"weights": weights.frozen + weights.trained, "cache": cache, "working": live.peak - cache}
