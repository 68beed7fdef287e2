"""Train on a service of the Tinker API, by low-rank adapters that stay with the service."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from functools import cached_property, partial
from itertools import compress
from pathlib import Path
from typing import Any

import msgspec

from harness1.config import Config, Train
from harness1.engines.datums import Fields, Loss, Reduction, distance, loss_of, plain_fields, row_fields, step_loss
from harness1.engines.engine import Deliver, OnTokens, TrainingService, ignore_tokens
from harness1.engines.service import EngineName, connect
from harness1.engines.tinker_backend import TinkerBackend
from harness1.errors import InfrastructureFault, UsageError
from harness1.models.checkpoint import Checkpoint, read_checkpoint
from harness1.rows.row import TrainRow
from harness1.training.algorithm import Algorithm
from harness1.training.micro_batch import trained_tokens
from harness1.training.saving import copy_beside_weights, write_card
from harness1.training.schedule import rate_at
from harness1.training.trainer import Diverged

ALGORITHMS = ("cispo", "reinforce")
"""Those of `rl.algorithm` that a service has."""


def check_supported(config: Config, processes: int = 1) -> None:
    """Refuse what a service cannot do, before anything starts.

    Raises:
        UsageError: the settings need whole distributions, all weights or a model in this process.
    """
    rl, train = config.rl, config.train
    refused = {
        f"rl.algorithm={rl.algorithm}; it has {' and '.join(ALGORITHMS)}": rl.algorithm not in ALGORITHMS,
        "train.lora.rank=0: it trains adapters alone": train.lora.rank == 0,
        "train.lora.layers: it adapts all": train.lora.layers > 0,
        "machine.fleet.workers: its sampler belongs to one process": config.machine.fleet.workers > 0,
        "several processes: the service shards by itself": processes > 1,
        "rl.staleness with machine.service.reduction=row_mean, because SkyRL's JAX server samples from the weights in"
        " training: calls under an older version would change with them, or undo a step": (
            rl.staleness > 0 and config.machine.service.reduction == "row_mean"
        ),
    }
    if found := [reason for reason, holds in refused.items() if holds]:
        raise UsageError(f"a training service does not support {'; nor '.join(found)}")


def open_tinker(name: str, base: Path, config: Config, processes: int = 1) -> TrainingService:
    """Connect to the service of an engine's name. Its sampler has no weights before the first `publish`.

    Args:
        base: as in `TinkerEngine`.

    Raises:
        UsageError: the service cannot do what is asked (`check_supported`), or as `connect`.
        MissingExtra: tinker is not installed.
    """
    check_supported(config, processes)
    return tinker_service(TinkerBackend(connect(EngineName.read(name), config.machine), remote_name(base)))


def tinker_service(sampler: TinkerBackend) -> TrainingService:
    """Return the service that a sampler is connected to."""

    def open_engine(base: Path, algorithm: Algorithm, config: Config, steps: int) -> TinkerEngine:
        return TinkerEngine(sampler, base, algorithm, config.train, steps, config.machine.service.reduction)

    return TrainingService(sampler, open_engine)


class TinkerEngine:
    """The `Engine` over a service, which needs no GPU and no weights here.

    The adapters are made at the first call that needs them, so that a resumed run takes only one of the places that a
    server has for adapters.

    Args:
        base: a folder with the tokenizer; the remote weights that its `checkpoint.json` names are the start.
        backend: the sampler that `publish` tells; its service trains.
        steps: the steps of the schedule of the rate.
        reduction: see `row_fields`.
    """

    def __init__(
        self,
        backend: TinkerBackend,
        base: Path,
        algorithm: Algorithm,
        train: Train,
        steps: int,
        reduction: Reduction = "sum",
    ) -> None:
        self.step_count = 0
        self._service, self._backend, self._base = backend.service, backend, base
        self._algorithm, self._train, self._steps, self._reduction = algorithm, train, steps, reduction
        self._loss: Loss = loss_of(algorithm, reduction)
        self._resumed, self._saves = "", 0

    @cached_property
    def _training(self) -> Any:
        """The client of the adapters in training: resumed, begun from a checkpoint, or fresh."""
        client, train = self._service.client, self._train
        if self._resumed:
            opened = partial(client.create_training_client_from_state_with_optimizer, self._resumed)
        elif begun := remote_name(self._base):
            opened = partial(client.create_training_client_from_state, begun)
        else:
            opened = partial(
                client.create_lora_training_client, self._service.model, rank=train.lora.rank, seed=train.seed
            )
        return self._service.call(opened)

    def step(self, rows: Sequence[TrainRow], on_tokens: OnTokens = ignore_tokens) -> dict[str, float]:
        """Do as `Engine.step`; what the service tells of its optimizer is named `service/...`."""
        data = self._data(row_fields(rows, self._algorithm, self._reduction))
        name, settings = self._loss
        answer = self._service.call(lambda: self._training.forward_backward(data, name, settings))
        logprobs = self._logprobs(rows, answer)
        loss = step_loss(rows, logprobs, self._algorithm)
        if not math.isfinite(loss):
            raise Diverged(f"training diverged at step {self.step_count + 1} (loss {loss}): try a smaller train.rate")
        rate = rate_at(self.step_count, self._steps, self._train)
        answer = self._service.call(lambda: self._training.optim_step(self._adam(rate)))
        self.step_count += 1
        on_tokens(*[sum(len(row.token_ids) for row in rows)] * 2)
        taken = {"loss": loss, "rate": rate, "trained_tokens": float(sum(map(trained_tokens, rows)))}
        told = {f"service/{key}": float(value) for key, value in (getattr(answer, "metrics", None) or {}).items()}
        return taken | distance(rows, logprobs, self._algorithm) | told

    def loss(self, rows: Sequence[TrainRow], saved: Path | None = None) -> float:
        return step_loss(rows, self.logprobs(rows), self._algorithm)

    def logprobs(self, rows: Sequence[TrainRow]) -> list[list[float]]:
        """Do as `Engine.logprobs`, by a forward pass of the service."""
        data = self._data(plain_fields(rows))
        return self._logprobs(rows, self._service.call(lambda: self._training.forward(data, "cross_entropy")))

    async def publish(self, version: int, deliver: Deliver) -> None:
        self._backend.switch(await asyncio.to_thread(self.sampling_client), version)

    def sampling_client(self) -> Any:
        """Return the service's client that samples with the present weights."""
        return self._service.call(lambda: self._training.save_weights_and_get_sampling_client())

    def save(self, root: Path) -> str:
        self._saves += 1
        return self._saved(f"state-{self._saves}-step-{self.step_count}")

    def load(self, root: Path, name: str) -> None:
        self._resumed, self.step_count = name, int(name.rpartition("-")[2])

    def write(self, folder: Path, card: Checkpoint) -> Checkpoint:
        """Write the tokenizer and the card, with the name under which the service keeps the weights."""
        self._saves += 1
        card = msgspec.structs.replace(card, remote=self._saved(f"checkpoint-{self._saves}-step-{self.step_count}"))
        try:
            copy_beside_weights(self._base, folder)
        except OSError as error:
            raise UsageError(f"cannot write the checkpoint to {folder}: {error}") from error
        write_card(folder, card)
        return card

    def _saved(self, name: str) -> str:
        path: str = self._service.call(lambda: self._training.save_state(name)).path
        return path

    def _data(self, rows: Sequence[Fields]) -> list[Any]:
        sdk = self._service.sdk
        return [sdk.Datum(model_input=sdk.ModelInput.from_ints(row.inputs), loss_fn_inputs=row.fields) for row in rows]

    def _logprobs(self, rows: Sequence[TrainRow], answer: Any) -> list[list[float]]:
        """Return the log probabilities of the trained tokens from those of all targets."""
        found = [[float(value) for value in output["logprobs"].tolist()] for output in answer.loss_fn_outputs]
        if [len(each) for each in found] != [len(row.token_ids) - 1 for row in rows]:
            raise InfrastructureFault("the service did not return one log probability for each target of each row")
        return [list(compress(each, row.loss_mask[1:])) for each, row in zip(found, rows, strict=True)]

    def _adam(self, rate: float) -> Any:
        train = self._train
        return self._service.sdk.AdamParams(
            learning_rate=rate,
            beta1=train.beta1,
            beta2=train.beta2,
            eps=train.epsilon,
            weight_decay=train.weight_decay,
            grad_clip_norm=train.clip,
        )


def remote_name(base: Path) -> str:
    """Return the name under which a service keeps the weights of a checkpoint; empty for any other folder."""
    card = read_checkpoint(base)
    return "" if card is None else card.remote
