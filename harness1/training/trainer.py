"""Optimizer steps on rows: micro-batches by token budget, forward, loss, backward, clip, step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from harness1.config import Train
from harness1.errors import UsageError
from harness1.freed_memory import MemoryReturns
from harness1.models.adapters import PEFT, adapters_of, add_adapters, tensors_of
from harness1.rows.row import TrainRow
from harness1.training.algorithm import Algorithm
from harness1.training.micro_batch import (
    by_token_budget,
    collate,
    of_targets,
    precision,
    trained_distributions,
    trained_logprobs,
    trained_tokens,
)
from harness1.training.off_policy_metrics import OffPolicyMetrics
from harness1.training.process_group import ALONE, ProcessGroup, Unanimous
from harness1.training.saving import read_weights
from harness1.training.schedule import rate_at
from harness1.training.sharding import forget_gathered, gathered, shard, shared_like, whole
from harness1.training.state import forget_tensors, load_tensors, save_tensors

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from harness1.models.adapters import Weights


MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's running means of a weight's gradient and of its square, as torch names them."""
IDLE = TrainRow((0, 0), (0, 1))
"""The row of a pass that counts for nothing."""


class Diverged(Unanimous):
    """The loss or the gradient is not finite; the step changed nothing. Users set the rate, so it is their error."""


class Trainer:
    """Trains a model of `load_trainable` in place on rows; it knows nothing of episodes. The schedule of the rate ends
    after `steps`.

    Several processes shard the model, and each takes a share of a step's passes: all must make the same calls with the
    same arguments. A single process leaves the model as it is.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        algorithm: Algorithm,
        train: Train,
        steps: int,
        group: ProcessGroup = ALONE,
    ) -> None:
        import torch

        self.model, self.algorithm, self.train, self.steps, self.group = model, algorithm, train, steps, group
        self._returns = MemoryReturns()
        if train.lora.rank and adapters_of(model) is None:
            add_adapters(model, train.lora, train.seed)
        if group.size > 1:
            shard(model, group)
        self._trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
        self.parameters = list(self._trained.values())
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
        for places in self._shares(rows):
            part = [rows[place] for place in places]
            with _within_memory(self.train.micro_tokens):
                loss = self._loss(part, off_policy) / normaliser
                loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
            done = min(of, done + sum(len(row.token_ids) for row in part))
            on_tokens(done, of)
            self._returns.tick()
        self.group.add_up(total)
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        norm = whole(torch.nn.utils.clip_grad_norm_(self.parameters, self.train.clip or math.inf))
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

    def loss(self, rows: Sequence[TrainRow], saved: Path | None = None) -> float:
        """Return the loss of rows under the present weights, or under those that the folder `saved` holds."""
        import torch

        total = torch.zeros((), device=self.model.device)
        with torch.no_grad(), self._holding(saved) if saved else nullcontext():
            for places in self._shares(rows):
                total += self._loss([rows[place] for place in places])
        self.group.add_up(total)
        return float(total) / (self.algorithm.normaliser(rows) or 1.0)

    def logprobs(self, rows: Sequence[TrainRow]) -> list[list[float]]:
        """Return the natural log probabilities of the trained tokens of each row, in order."""
        import torch

        model = self.model
        counts = [trained_tokens(row) for row in rows]
        starts = [0, *accumulate(counts)]
        found = torch.zeros(starts[-1], device=model.device)
        for places in self._shares(rows):
            batch = collate([rows[place] for place in places] or [IDLE], model.device)
            with torch.no_grad(), precision(model, self.train.dtype):
                logprobs = trained_logprobs(model, batch)
            ends = 0
            for place in places:
                ends += counts[place]
                found[starts[place] : starts[place + 1]] = logprobs[ends - counts[place] : ends]
        self.group.add_up(found)
        known = found.tolist()
        return [known[start:end] for start, end in pairwise(starts)]

    def weights(self) -> Weights:
        """Return the adapters, or the state dictionary where all weights are trained; that of a sharded model is on the
        CPU of the leading process, and empty in the others."""
        if not self.train.lora.rank:
            return gathered(self.model)
        adapters = adapters_of(self.model, {name: whole(value.detach()) for name, value in self._trained.items()})
        assert adapters is not None
        return adapters

    def save(self, root: Path) -> str:
        """Write everything that the next step depends on into a new folder within `root`, and return its name; raise
        UsageError as `save_tensors`. Of earlier saves only the last is kept."""
        return save_tensors(root, self._tensors(), self.group)

    def load(self, root: Path, name: str) -> None:
        """Continue from a save, and remove all others; raise UsageError if it is damaged."""
        import torch

        step = torch.zeros((), dtype=torch.long)
        load_tensors(root / name, {"step": step}, self.group)
        self.step_count = int(step)
        for weight in self.parameters if self.step_count else ():
            means = {moment: torch.zeros_like(weight) for moment in MOMENTS}
            self.optimizer.state[weight] = {"step": torch.tensor(float(step)), **means}
        load_tensors(root / name, self._tensors(), self.group)
        forget_gathered(self.model)
        if self.group.leads:
            forget_tensors(root, name)

    @contextmanager
    def _holding(self, folder: Path) -> Iterator[None]:
        """Hold the weights of a checkpoint of this model in place of those in training."""
        kept = [weight.detach().clone() for weight in self.parameters]
        weights = read_weights(folder)
        names = (f"{PEFT}{name}" if self.train.lora.rank else name for name in self._trained)
        try:
            for weight, name in zip(self.parameters, names, strict=True):
                weight.copy_(shared_like(tensors_of(weights)[name], weight))
            forget_gathered(self.model)
            yield
        finally:
            for weight, before in zip(self.parameters, kept, strict=True):
                weight.copy_(before)
            forget_gathered(self.model)

    def _tensors(self) -> dict[str, Tensor]:
        """Return the step, and the trained weights and their moments, which share memory with this trainer."""
        import torch

        found = {"step": torch.tensor(self.step_count)}
        for name, weight in self._trained.items():
            found[f"weight/{name}"] = weight.detach()
            if known := self.optimizer.state.get(weight):  # torch makes it in the first step
                found |= {f"{moment}/{name}": known[moment] for moment in MOMENTS}
        return found

    def _shares(self, rows: Sequence[TrainRow]) -> Iterator[list[int]]:
        """Yield the places of the rows of each forward pass of this process. All processes take equally many, because
        sharded layers need them all: a pass without rows fills a gap."""
        groups = by_token_budget([len(row.token_ids) for row in rows], self.train.micro_tokens)
        for start in range(0, len(groups), self.group.size):
            mine = start + self.group.rank
            yield groups[mine] if mine < len(groups) else []

    def _loss(self, rows: Sequence[TrainRow], off_policy: OffPolicyMetrics | None = None) -> Tensor:
        """Return the summed loss of the rows of a pass."""
        batch = collate(rows or [IDLE], self.model.device)
        with precision(self.model, self.train.dtype):
            distributions = trained_distributions(self.model, batch)
        logprobs = of_targets(distributions, batch)
        if not rows:
            return 0 * logprobs.sum()
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
