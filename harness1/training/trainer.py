"""The trainer: micro-batches of rows, loss, step, the learning rate schedule, and when a state is saved."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate, compress, pairwise
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from harness1.config import Train
from harness1.errors import UsageError
from harness1.models.adapters import adapters_of, add_adapters
from harness1.models.causal_model import Dtype, MemoryReturns, logits_at
from harness1.rows import TrainRow
from harness1.training.algorithm import Algorithm, MicroBatch, OffPolicyMetrics
from harness1.training.process_group import ALONE, ProcessGroup, Unanimous, forget_gathered, gather, gather_state, shard
from harness1.training.saving import forget_tensors, load_tensors, save_tensors

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PreTrainedModel

    from harness1.models.adapters import Weights


BETAS, EPSILON, DECAY = (0.9, 0.95), 1e-8, 0.0  # of AdamW; the decay: share of a weight, times rate, that a step takes
CLIP = 1.0  # the largest gradient norm


def rate_at(step: int, steps: int, train: Train) -> float:
    """Return the rate of step `step` (from 0) of `steps`: a linear rise to `train.rate` over the warm-up, then the same
    rate, or a linear or cosine decay that would reach 0 at the step after the last."""
    rising = round(train.warmup * steps)
    if step < rising:
        return train.rate * (step + 1) / rising
    done = (step - rising) / max(1, steps - rising)
    if train.schedule == "linear":
        return train.rate * max(0.0, 1 - done)
    if train.schedule == "cosine":
        return train.rate * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    return train.rate


def shuffle_steps(rows: int, batch_rows: int, epochs: int, seed: int) -> Iterator[list[int]]:
    """Yield the rows of every optimizer step. Each epoch has its own order, and its last step may be smaller. The order
    depends only on the arguments, so a resumed run finds its position by counting."""
    for epoch in range(epochs):
        order = list(range(rows))
        Random(f"{seed}/{epoch}").shuffle(order)
        for start in range(0, rows, batch_rows):
            yield order[start : start + batch_rows]


def by_token_budget(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Return the indices of the rows of each forward pass: longest rows first, as many as fit the budget with padding.
    A row longer than the budget is a group of its own."""
    groups: list[list[int]] = []
    for place in sorted(range(len(lengths)), key=lambda at: (-lengths[at], at)):
        if groups and lengths[groups[-1][0]] * (len(groups[-1]) + 1) <= budget:
            groups[-1].append(place)
        else:
            groups.append([place])
    return groups


def collate(rows: Sequence[TrainRow], device: str | torch.device = "cpu") -> MicroBatch:
    """Return rows as one micro-batch; ValueError if it trains no token, or the first of a row. It needs no attention
    mask: no token sees the padding behind it, and kernels without a mask are faster."""
    import torch

    longest = max(len(row.token_ids) for row in rows)
    ids = torch.zeros((len(rows), longest), dtype=torch.long)
    trained: list[tuple[int, int]] = []
    weights, logprobs = list[float](), list[float]()
    for at, row in enumerate(rows):
        ids[at, : len(row.token_ids)] = torch.tensor(row.token_ids)
        trained += [(at, place) for place, mask in enumerate(row.loss_mask) if mask]
        weights += compress(row.advantages or (1.0,) * len(row.token_ids), row.loss_mask)
        logprobs += compress(row.rollout_logprobs or (), row.loss_mask)
    if not trained or any(place == 0 for _, place in trained):
        raise ValueError("a micro-batch needs trained tokens, none of them the first of its row")
    row_of, place_of = torch.tensor(trained).T
    known = all(row.rollout_logprobs is not None for row in rows)
    return MicroBatch(
        ids=ids.to(device),
        row=row_of.to(device),
        column=(place_of - 1).to(device),
        targets=ids[row_of, place_of].to(device),
        weights=torch.tensor(weights, device=device),
        token_weights=torch.tensor([rows[at].token_weight for at, _ in trained], device=device),
        rollout_logprobs=torch.tensor(logprobs, device=device) if known else None,
    )


def precision(model: PreTrainedModel, dtype: Dtype) -> AbstractContextManager[Any]:
    """Return the context of forward passes. With bfloat16, only matrix products use it."""
    import torch

    if dtype == "float32":
        return nullcontext()
    # Each weight is used once in a pass, so a cache of rounded ones would only keep a sharded model whole.
    return torch.autocast(model.device.type, torch.bfloat16, cache_enabled=False)


def compute_logprobs(model: PreTrainedModel, batch: MicroBatch) -> tuple[Tensor, Tensor]:
    """Return the log probabilities of the trained tokens, [trained] in float32, and of the vocabulary in their places,
    [trained, vocabulary]. Logits are computed nowhere else: for a long context they would cost more than the layers."""
    import torch

    with logits_at(model, batch.row, batch.column):
        logits = model(input_ids=batch.ids, use_cache=False).logits
    distributions = torch.log_softmax(logits[0].float(), -1)
    return distributions.gather(-1, batch.targets[:, None])[:, 0], distributions


MOMENTS = ("exp_avg", "exp_avg_sq")  # AdamW's running means of a weight's gradient and of its square
OnTokens = Callable[[int, int], None]  # called within a step with the tokens done and those of all its rows
IDLE = TrainRow((0, 0), (0, 1))  # the row of a pass that counts for nothing


class Diverged(Unanimous):
    """The loss or the gradient is not finite; the step changed nothing. Users set the rate, so it is their error."""


class Trainer:
    """Trains a model of `load_trainable` in place on rows; the schedule of the rate ends after `steps`. Several
    processes shard the model and a step's passes: all must make the same calls with the same arguments."""

    def __init__(
        self, model: PreTrainedModel, algorithm: Algorithm, train: Train, steps: int, group: ProcessGroup = ALONE
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
        self.optimizer = torch.optim.AdamW(self.parameters, train.rate, BETAS, EPSILON, DECAY)
        self.step_count = 0
        if train.checkpointing:
            from transformers.modeling_layers import GradientCheckpointingLayer

            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            for module in model.modules():  # transformers requires training mode; in other parts it would bring dropout
                if isinstance(module, GradientCheckpointingLayer):
                    module.training = True

    def step(self, rows: Sequence[TrainRow], on_tokens: OnTokens = lambda _done, _of: None) -> dict[str, float]:
        """Take one optimizer step and return its loss, gradient norm (before clipping), rate and trained tokens; if all
        rows have log probabilities of the rollout, also `OffPolicyMetrics` of the weights before the step. `on_tokens`
        is called after each backward pass of this process with the tokens done and those of all its rows."""
        import torch

        normaliser = self.algorithm.normaliser(rows) or 1.0  # 0 if no token has a weight; then every loss is 0
        total = torch.zeros((), device=self.model.device)
        known = all(row.rollout_logprobs is not None for row in rows)
        off_policy = OffPolicyMetrics(self.algorithm, self.model.device) if known else None
        done, of = 0, sum(len(row.token_ids) for row in rows) // self.group.size
        for places in self._shares(rows):
            part = [rows[place] for place in places]
            try:
                loss = self._loss(part, off_policy) / normaliser
                loss.backward()  # type: ignore[no-untyped-call]
            except torch.OutOfMemoryError as error:
                fitting = "lower train.micro_tokens, or turn on train.checkpointing"
                at_once = f"{self.train.micro_tokens} tokens do not fit into GPU memory at once"
                raise UsageError(f"{at_once}: {fitting}") from error
            total += loss.detach()
            done = min(of, done + sum(len(row.token_ids) for row in part))
            on_tokens(done, of)
            self._returns.tick()
        self.group.add_up(total)
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        norm = float(gather(torch.nn.utils.clip_grad_norm_(self.parameters, CLIP)))
        if not (math.isfinite(float(total)) and math.isfinite(norm)):
            self.optimizer.zero_grad()
            measured = f"(loss {float(total)}, gradient norm {norm})"
            raise Diverged(f"training diverged at step {self.step_count + 1} {measured}: try a smaller train.rate")
        rate = rate_at(self.step_count, self.steps, self.train)
        for settings in self.optimizer.param_groups:
            settings["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step_count += 1
        trained = sum(sum(row.loss_mask) for row in rows)
        taken = {"loss": float(total), "gradient": norm, "rate": rate, "trained_tokens": float(trained)}
        return taken if off_policy is None else taken | off_policy.values(self.group)

    def loss(self, rows: Sequence[TrainRow]) -> float:
        """Return the loss of rows under the present weights."""
        import torch

        total = torch.zeros((), device=self.model.device)
        with torch.no_grad():
            for places in self._shares(rows):
                total += self._loss([rows[place] for place in places])
        self.group.add_up(total)
        return float(total) / (self.algorithm.normaliser(rows) or 1.0)

    def logprobs(self, rows: Sequence[TrainRow]) -> list[list[float]]:
        """Return the natural log probabilities of the trained tokens of each row, in order."""
        import torch

        model = self.model
        counts = [sum(row.loss_mask) for row in rows]
        starts = [0, *accumulate(counts)]
        found = torch.zeros(starts[-1], device=model.device)
        for places in self._shares(rows):
            batch = collate([rows[place] for place in places] or [IDLE], model.device)
            with torch.no_grad(), precision(model, self.train.dtype):
                logprobs = compute_logprobs(model, batch)[0]
            ends = 0
            for place in places:
                ends += counts[place]
                found[starts[place] : starts[place + 1]] = logprobs[ends - counts[place] : ends]
        self.group.add_up(found)
        known = found.tolist()
        return [known[start:end] for start, end in pairwise(starts)]

    def weights(self) -> Weights:
        """Return the adapters, or the state dictionary where all weights are trained (`gather_state`)."""
        if not self.train.lora.rank:
            return gather_state(self.model)
        adapters = adapters_of(self.model, {name: gather(value.detach()) for name, value in self._trained.items()})
        assert adapters is not None
        return adapters

    def save(self, root: Path) -> str:
        """Write all that the next step depends on into a new folder, as `save_tensors`; return its name."""
        return save_tensors(root, self._tensors(), self.group)

    def load(self, root: Path, name: str) -> None:
        """Continue from a save, and remove all others; raise Unanimous if it is damaged."""
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

    def _tensors(self) -> dict[str, Tensor]:
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
        batch = collate(rows or [IDLE], self.model.device)
        with precision(self.model, self.train.dtype):
            logprobs, distributions = compute_logprobs(self.model, batch)
        if not rows:
            return 0 * logprobs.sum()
        if off_policy is not None:
            off_policy.add(distributions, logprobs, batch)
        summed: Tensor = self.algorithm.token_losses(logprobs, batch).sum()
        return summed
