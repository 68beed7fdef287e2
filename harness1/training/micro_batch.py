"""Micro-batches: the division of rows into forward passes, and their tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any

from harness1.models.causal_model import Dtype, logits_at
from harness1.rows.row import TrainRow

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class MicroBatch:
    """The input of one forward pass: rows padded on the right, and their trained tokens as flat tensors."""

    ids: Tensor
    """[rows, longest]."""
    attention: Tensor | None
    """[rows, longest], 1 for a token, 0 for padding; None without padding."""
    row: Tensor
    """[trained]: the row of each trained token."""
    column: Tensor
    """[trained]: the column whose logits predict the token: the one before its own."""
    targets: Tensor
    """[trained]: its id."""
    weights: Tensor
    """[trained], float32: its advantage, or 1."""
    token_weights: Tensor
    """[trained], float32: its weight in the mean over tokens."""
    rollout_logprobs: Tensor | None
    """[trained], float32, as recorded; None if a row has none."""


def shuffled_steps(rows: int, batch_rows: int, epochs: int, seed: int) -> Iterator[list[int]]:
    """Yield the rows of every optimizer step. Each epoch has its own order, and its last step may be smaller.

    The order depends only on the arguments, so a resumed run finds its position by counting."""
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
    """Return rows as one micro-batch; raise ValueError if no row has a trained token, or a row trains its first token,
    which nothing predicts."""
    import torch

    longest = max(len(row.token_ids) for row in rows)
    ids = torch.zeros((len(rows), longest), dtype=torch.long)
    attention = torch.zeros((len(rows), longest), dtype=torch.long)
    trained: list[tuple[int, int]] = []
    for at, row in enumerate(rows):
        ids[at, : len(row.token_ids)] = torch.tensor(row.token_ids)
        attention[at, : len(row.token_ids)] = 1
        trained += [(at, place) for place, mask in enumerate(row.loss_mask) if mask]
    if not trained or any(place == 0 for _, place in trained):
        raise ValueError("a micro-batch needs trained tokens, none of them the first of its row")
    row_of, place_of = torch.tensor(trained).T
    logprobs = None
    if all(row.rollout_logprobs is not None for row in rows):
        recorded = [(rows[at].rollout_logprobs or ())[place] for at, place in trained]
        logprobs = torch.tensor(recorded, device=device)
    return MicroBatch(
        ids=ids.to(device),
        attention=None if bool(attention.all()) else attention.to(device),
        row=row_of.to(device),
        column=(place_of - 1).to(device),
        targets=ids[row_of, place_of].to(device),
        weights=torch.tensor([_weight(rows[at], place) for at, place in trained], device=device),
        token_weights=torch.tensor([rows[at].token_weight for at, _ in trained], device=device),
        rollout_logprobs=logprobs,
    )


def precision(model: PreTrainedModel, dtype: Dtype) -> AbstractContextManager[Any]:
    """Return the context of forward passes. With bfloat16, only matrix products use it."""
    import torch

    if dtype == "float32":
        return nullcontext()
    # Each weight is used once in a pass, so a cache of rounded ones would only keep a sharded model whole.
    return torch.autocast(model.device.type, torch.bfloat16, cache_enabled=False)


def trained_distributions(model: PreTrainedModel, batch: MicroBatch) -> Tensor:
    """Return the log probabilities of the vocabulary at each trained token, [trained, vocabulary] in float32.

    Logits are computed nowhere else: for a long context they would cost more than the layers."""
    import torch

    with logits_at(model, batch.row, batch.column):
        logits = model(input_ids=batch.ids, attention_mask=batch.attention, use_cache=False).logits
    return torch.log_softmax(logits[0].float(), -1)


def of_targets(distributions: Tensor, batch: MicroBatch) -> Tensor:
    """Return the log probabilities of the trained tokens, [trained]."""
    return distributions.gather(-1, batch.targets[:, None])[:, 0]


def trained_logprobs(model: PreTrainedModel, batch: MicroBatch) -> Tensor:
    """Return the log probabilities of the trained tokens under the model, [trained] in float32."""
    return of_targets(trained_distributions(model, batch), batch)


def trained_tokens(row: TrainRow) -> int:
    """Return the number of trained tokens of a row."""
    return sum(row.loss_mask)


def _weight(row: TrainRow, place: int) -> float:
    return 1.0 if row.advantages is None else float(row.advantages[place])
