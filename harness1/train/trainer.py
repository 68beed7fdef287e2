"""Optimizer steps on rows: micro-batches by token budget, forward, loss, backward, clip, step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from harness1.config import Train
from harness1.errors import UsageError
from harness1.rows.row import TrainRow
from harness1.train.algorithm import Algorithm
from harness1.train.lora import add_adapters
from harness1.train.micro_batch import (
    MicroBatch,
    by_token_budget,
    collate,
    of_targets,
    precision,
    trained_distributions,
    trained_tokens,
)
from harness1.train.off_policy_metrics import OffPolicyMetrics
from harness1.train.process_group import ALONE, ProcessGroup
from harness1.train.schedule import rate_at

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel


class Diverged(UsageError):
    """The loss or the gradient is not finite; the step changed nothing. Users set the rate, so it is their error."""


class Trainer:
    """Trains a model of `load_trainable` in place on rows; it knows nothing of episodes. The schedule of the rate ends
    after `steps`. All processes of the group must get the same rows."""

    def __init__(
        self, model: PreTrainedModel, algorithm: Algorithm, train: Train, steps: int, group: ProcessGroup = ALONE
    ) -> None:
        import torch

        self.model, self.algorithm, self.train, self.steps, self.group = model, algorithm, train, steps, group
        if train.lora.rank:
            add_adapters(model, train.lora, train.seed)
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(
            self.parameters,
            lr=train.rate,
            betas=(train.beta1, train.beta2),
            eps=train.epsilon,
            weight_decay=train.weight_decay,
        )
        self.step_count = 0
        if train.checkpointing:
            _forget_activations(model)

    def step(
        self, rows: Sequence[TrainRow], on_tokens: Callable[[int, int], None] = lambda _done, _of: None
    ) -> dict[str, float]:
        """Take one optimizer step and return its loss, gradient norm (before clipping), rate and trained tokens.

        Args:
            on_tokens: called after each backward pass of this process with the tokens done and those of all its rows.

        If all rows have log probabilities of the rollout, add `OffPolicyMetrics` of the weights before the step.
        """
        import torch

        normaliser = self.algorithm.normaliser(rows) or 1.0  # 0 if no token has a weight; then every loss is 0
        total = torch.zeros((), device=self.model.device)
        known = all(row.rollout_logprobs is not None for row in rows)
        off_policy = OffPolicyMetrics(self.algorithm, self.model.device) if known else None
        done, of = 0, sum(len(row.token_ids) for row in rows) // self.group.size
        for batch in self._passes(rows):
            with _within_memory(self.train.micro_tokens):
                loss = self._loss(batch, off_policy) / normaliser
                loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
            done = min(of, done + (batch.ids.numel() if batch.attention is None else int(batch.attention.sum())))
            on_tokens(done, of)
        self.group.add_up(total)
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            self.group.add_up(parameter.grad)
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.train.clip or math.inf)
        rate = rate_at(self.step_count, self.steps, self.train)
        if not (math.isfinite(float(total)) and math.isfinite(float(norm))):
            self.optimizer.zero_grad()
            raise Diverged(
                f"training diverged at step {self.step_count + 1} (loss {float(total)}, gradient norm {float(norm)}): "
                "try a smaller train.rate"
            )
        for settings in self.optimizer.param_groups:
            settings["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step_count += 1
        trained = float(sum(map(trained_tokens, rows)))
        taken = {"loss": float(total), "gradient": float(norm), "rate": rate, "trained_tokens": trained}
        return taken if off_policy is None else taken | off_policy.values(self.group)

    def loss(self, rows: Sequence[TrainRow]) -> float:
        """Return the loss of rows under the present weights."""
        import torch

        total = torch.zeros((), device=self.model.device)
        with torch.no_grad():
            for batch in self._passes(rows):
                total += self._loss(batch)
        self.group.add_up(total)
        return float(total) / (self.algorithm.normaliser(rows) or 1.0)

    def state(self) -> dict[str, Any]:
        """Return everything that the next step depends on: trained weights, optimizer, step."""
        weights = [parameter.detach() for parameter in self.parameters]
        return {"step": self.step_count, "weights": weights, "optimizer": self.optimizer.state_dict()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from a value of `state`."""
        import torch

        with torch.no_grad():
            for parameter, weight in zip(self.parameters, state["weights"], strict=True):
                parameter.copy_(weight)
        self.optimizer.load_state_dict(state["optimizer"])
        self.step_count = state["step"]

    def _passes(self, rows: Sequence[TrainRow]) -> Iterator[MicroBatch]:
        """Yield this process's share of the forward passes over rows."""
        groups = by_token_budget([len(row.token_ids) for row in rows], self.train.micro_tokens)
        for places in groups[self.group.rank :: self.group.size]:
            yield collate([rows[place] for place in places], self.model.device)

    def _loss(self, batch: MicroBatch, off_policy: OffPolicyMetrics | None = None) -> Tensor:
        """Return the summed loss of a micro-batch."""
        with precision(self.model, self.train.dtype):
            distributions = trained_distributions(self.model, batch)
        logprobs = of_targets(distributions, batch)
        if off_policy is not None:
            off_policy.add(distributions, logprobs, batch)
        summed: Tensor = self.algorithm.token_losses(logprobs, batch).sum()
        return summed


@contextmanager
def _within_memory(micro_tokens: int) -> Iterator[None]:
    import torch

    try:
        yield
    except torch.OutOfMemoryError as error:
        raise UsageError(
            f"{micro_tokens} tokens do not fit into GPU memory at once: lower train.micro_tokens, or turn on"
            " train.checkpointing"
        ) from error


def _forget_activations(model: PreTrainedModel) -> None:
    """Turn on gradient checkpointing. transformers requires training mode for it; only the layers themselves are set to
    it, not their parts, which would bring dropout."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.training = True
