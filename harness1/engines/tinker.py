"""Train on a service of the Tinker API, hosted or SkyRL's server, by low-rank adapters that stay with the service.

    harness1 rl train --engine tinker:MODEL          hosted
    harness1 rl train --engine tinker:MODEL@URL      a server of one's own

The service sums the loss of each token over all rows. With `n` the normaliser of an optimizer step, `u` a row's token
weight and `A` an advantage, a trained token has the weight `u A / n` (CISPO, REINFORCE) or `A / n` (negative log
likelihood), and every other token 0. In the package `tinker` until 0.37 some methods return a result and some a future;
from 0.38 all return futures, and those named `_async` are deprecated: none is used here, and `settle` takes both.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import cached_property, partial
from importlib import import_module
from itertools import compress
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from harness1.config import Config, Machine, Train
from harness1.engines.engine import Deliver, TrainingService
from harness1.errors import InfrastructureFault, UsageError, optional
from harness1.model_folder import first_line
from harness1.models.backend import EngineOutput, Grammar, SampledOutput, check_output, check_sampling
from harness1.models.checkpoint import Checkpoint, read_checkpoint
from harness1.plain import digest
from harness1.records import Sampling
from harness1.rows import TrainRow
from harness1.training.algorithm import LOG_RATIO_LIMIT, Algorithm, Cispo, NegativeLogLikelihood
from harness1.training.saving import copy_beside_weights, write_card
from harness1.training.trainer import BETAS, CLIP, DECAY, EPSILON, Diverged, OnTokens, rate_at

Reduction = Literal["sum", "row_mean"]
Loss = tuple[str, dict[str, float] | None]  # a loss of the service, by name, with its settings


def loss_of(algorithm: Algorithm, reduction: Reduction) -> Loss:
    """Return the service's name of an algorithm. Bounds of 1 and 1 make every ratio 1, which turns CISPO into REINFORCE
    and into the negative log likelihood: servers that take means over rows have no other loss with free weights."""
    if reduction == "sum" and not isinstance(algorithm, Cispo):
        return "cross_entropy", None
    bounds = (algorithm.ratio_min, algorithm.ratio_max) if isinstance(algorithm, Cispo) else (1.0, 1.0)
    return "cispo", {"clip_low_threshold": bounds[0], "clip_high_threshold": bounds[1]}


def target_fields(rows: Sequence[TrainRow], algorithm: Algorithm, reduction: Reduction) -> list[dict[str, list[float]]]:
    """Return what the loss of an optimizer step needs of each row, one number for each target; all rows must be sent
    as one. `row_mean` undoes that a server divides a row's loss by its targets, and the sum over rows by their number.
    """
    (name, _), normaliser = loss_of(algorithm, reduction), algorithm.normaliser(rows) or 1.0
    made = []
    for row in rows:
        scale = 1.0 if reduction == "sum" else (len(row.token_ids) - 1) * len(rows)
        weights = [weight * scale for weight in _weights(row, algorithm, normaliser)]
        # Without recorded log probabilities the bounds of `cispo` are 1 and 1, and any value serves.
        recorded = row.rollout_logprobs or (0.0,) * len(row.token_ids)
        cispo = {"logprobs": list(recorded[1:]), "advantages": weights}
        made.append(cispo if name == "cispo" else {"weights": weights})
    return made


def _weights(row: TrainRow, algorithm: Algorithm, normaliser: float) -> list[float]:
    token = 1.0 if isinstance(algorithm, NegativeLogLikelihood) else row.token_weight
    values = row.advantages or (1.0,) * len(row.token_ids)
    return [token * value * mask / normaliser for value, mask in zip(values[1:], row.loss_mask[1:], strict=True)]


def step_loss(rows: Sequence[TrainRow], logprobs: Sequence[Sequence[float]], algorithm: Algorithm) -> float:
    """Return the loss of rows from the log probabilities of their trained tokens, as `Trainer.step` computes it."""
    normaliser, total = algorithm.normaliser(rows) or 1.0, 0.0
    for row, known in zip(rows, logprobs, strict=True):
        weights = compress(_weights(row, algorithm, normaliser), row.loss_mask[1:])
        ratios = [1.0] * len(known)
        if isinstance(algorithm, Cispo):
            exact = (math.exp(log) for log in _log_ratios(row, known))
            ratios = [min(max(ratio, algorithm.ratio_min), algorithm.ratio_max) for ratio in exact]
        total -= sum(weight * ratio * logprob for weight, ratio, logprob in zip(weights, ratios, known, strict=True))
    return total


def distance(rows: Sequence[TrainRow], logprobs: Sequence[Sequence[float]], algorithm: Algorithm) -> dict[str, float]:
    """Return the metrics of `OffPolicyMetrics` that need no distributions; none without recorded ones to compare."""
    if isinstance(algorithm, NegativeLogLikelihood) or any(row.rollout_logprobs is None for row in rows):
        return {}
    logs = [log for row, known in zip(rows, logprobs, strict=True) for log in _log_ratios(row, known)]
    ratios, count = [math.exp(log) for log in logs], max(1, len(logs))
    return {
        "k3": math.fsum(math.expm1(log) - log for log in logs) / count,
        "log_ratio_mean": math.fsum(map(abs, logs)) / count,
        "ratio_above_2": sum(ratio > 2 for ratio in ratios) / count,
        "ratio_below_half": sum(ratio < 0.5 for ratio in ratios) / count,
        "clipped": sum(not algorithm.ratio_min <= ratio <= algorithm.ratio_max for ratio in ratios) / count,
        "log_ratio_max": max(map(abs, logs), default=0.0),
    }


def _log_ratios(row: TrainRow, logprobs: Sequence[float]) -> list[float]:
    recorded = [known for known, mask in zip(row.rollout_logprobs or (), row.loss_mask, strict=True) if mask]
    logs = (now - then for now, then in zip(logprobs, recorded, strict=True))
    return [min(max(log, -LOG_RATIO_LIMIT), LOG_RATIO_LIMIT) for log in logs]


ANONYMOUS = "tml-none"  # the key for a server that asks for none; the client demands the form
ADVICE = "SkyRL 0.3 needs tinker==0.24.1, SkyRL 0.4 tinker>=0.25,<0.26, and the hosted service the newest"
_NAME = re.compile(r"tinker:(?P<model>[^@]+)(@(?P<url>https?://[^@]+))?")


class Service(NamedTuple):
    """A connected client, the package that it comes from, and the base model to train."""

    sdk: Any
    client: Any
    model: str

    def call(self, work: Callable[[], Any]) -> Any:
        """Return the result of a request, in this thread; raise InfrastructureFault if the service gave none."""
        with self._failing():
            return settle(work())

    async def ask(self, work: Callable[[], Any]) -> Any:
        """Do as `call` within an event loop; cancelling it cancels the request."""
        with self._failing():
            answer = work()
            # The client's own futures have one of the standard library within, and will not stay one themselves.
            future = answer.future() if hasattr(answer, "future") else answer
            return await (asyncio.wrap_future(future) if isinstance(future, Future) else future)

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except (self.sdk.TinkerError, RuntimeError, OSError) as error:
            reason = f"{type(error).__name__}: {first_line(error)}"
            raise InfrastructureFault(f"the service of {self.model} failed: {reason}") from error


def connect(model: str, url: str | None, machine: Machine, sdk: Any = None) -> Service:
    """Connect to a service by the package `tinker`; raise UsageError if the server is not there, does not speak the
    client's version, or does not have the model."""
    if sdk is None:
        with optional("tinker"):
            sdk = import_module("tinker")
    where, key = url or "the hosted service", machine.model.key or (ANONYMOUS if url else None)
    try:
        client = sdk.ServiceClient(base_url=url, api_key=key)
        asked = sdk.RestClient(base_url=url, api_key=key) if hasattr(sdk, "RestClient") else client
        models = [each.model_name for each in settle(asked.get_server_capabilities()).supported_models]
    except (sdk.TinkerError, RuntimeError, OSError, ValueError, TypeError, AttributeError) as error:
        reason = f"{first_line(error)}; client and server must match: {ADVICE}"
        raise UsageError(f"tinker {sdk.__version__} cannot talk to {where}: {reason}") from error
    if model not in models:
        raise UsageError(f"{where} does not train {model}; it has {', '.join(sorted(filter(None, models)))}")
    return Service(sdk, client, model)


def settle(answer: Any) -> Any:
    """Return the result of a future, or what is not a future."""
    return answer.result() if hasattr(answer, "result") else answer


class TinkerBackend:
    """A `Backend` over the sampling client of a service: each set of weights has its own, so calls in flight end with
    those they began with. `begun` is the remote name of the weights that training begins with."""

    def __init__(self, service: Service, begun: str = "") -> None:
        self.hash = digest(["tinker", service.model, begun])
        self.service = service
        self._current: tuple[Any, int] | None = None

    @property
    def version(self) -> int:
        return 0 if self._current is None else self._current[1]

    def switch(self, client: Any, version: int) -> None:
        self._current = client, version

    async def generate(self, ids: Sequence[int], sampling: Sampling, grammar: Grammar | None = None) -> SampledOutput:
        check_sampling(sampling)
        if grammar is not None:
            raise UsageError("a training service has no grammars: set policy.constrained=false")
        if sampling.temperature not in (0.0, 1.0) or sampling.top_p < 1 or sampling.top_k > 0:
            raise UsageError("a training service samples at temperature 1 or 0, from all tokens")
        if self._current is None:
            raise InfrastructureFault("no weights were published to the sampler yet")
        (client, version), sdk = self._current, self.service.sdk
        prompt = sdk.ModelInput.from_ints(list(ids))
        params = sdk.SamplingParams(
            max_tokens=sampling.max_tokens,
            seed=sampling.seed,
            stop=list(sampling.stop_ids),
            temperature=sampling.temperature,
            top_k=-1,
            top_p=1.0,
        )
        answer = await self.service.ask(lambda: client.sample(prompt, 1, params))
        sequence = answer.sequences[0]
        ids = list(sequence.tokens)
        stopped_by = ids[-1] if ids and ids[-1] in sampling.stop_ids else None
        found = EngineOutput(ids, sequence.logprobs, str(sequence.stop_reason), stopped_by)
        return check_output(found, sampling, version)


ALGORITHMS = ("cispo", "reinforce")  # those of `rl.algorithm` that a service has


def check_supported(config: Config, processes: int = 1) -> None:
    """Raise UsageError for settings that need whole distributions, all weights or a model in this process."""
    rl, train = config.rl, config.train
    behind = rl.staleness > 0 and config.machine.service.reduction == "row_mean"
    refused = {
        f"rl.algorithm={rl.algorithm}; it has {' and '.join(ALGORITHMS)}": rl.algorithm not in ALGORITHMS,
        "train.lora.rank=0: it trains adapters alone": train.lora.rank == 0,
        "train.lora.layers: it adapts all": train.lora.layers > 0,
        "machine.fleet.workers: its sampler belongs to one process": config.machine.fleet.workers > 0,
        "several processes: the service shards by itself": processes > 1,
        "rl.staleness with machine.service.reduction=row_mean, because SkyRL's JAX server samples from the weights in"
        " training: calls under an older version would change with them, or undo a step": behind,
    }
    if found := [reason for reason, holds in refused.items() if holds]:
        raise UsageError(f"a training service does not support {'; nor '.join(found)}")


def open_tinker(name: str, base: Path, config: Config, processes: int = 1) -> TrainingService:
    """Connect to the service of `tinker:MODEL` or `tinker:MODEL@URL`; raise as `check_supported` and `connect`."""
    check_supported(config, processes)
    if not (found := _NAME.fullmatch(name)):
        raise UsageError(f"{name!r} names no engine: write tinker:MODEL or tinker:MODEL@URL, without a password")
    service = connect(found["model"], found["url"], config.machine)
    return tinker_service(TinkerBackend(service, remote_name(base)))


def tinker_service(sampler: TinkerBackend) -> TrainingService:
    """Return the service that a sampler is connected to."""
    return TrainingService(
        sampler,
        lambda base, algorithm, config, steps: TinkerEngine(
            sampler, base, algorithm, config.train, steps, config.machine.service.reduction
        ),
    )


class TinkerEngine:
    """The `Engine` over a service, by low-rank adapters made at the first call that needs them, so that a resumed run
    takes only one of a server's places. The `checkpoint.json` in `base` may name remote weights to begin with."""

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
        client, train, model = self._service.client, self._train, self._service.model
        if self._resumed:
            opened = partial(client.create_training_client_from_state_with_optimizer, self._resumed)
        elif begun := remote_name(self._base):
            opened = partial(client.create_training_client_from_state, begun)
        else:
            opened = partial(client.create_lora_training_client, model, rank=train.lora.rank, seed=train.seed)
        return self._service.call(opened)

    def step(self, rows: Sequence[TrainRow], on_tokens: OnTokens = lambda _done, _of: None) -> dict[str, float]:
        """Do as `Engine.step`; what the service tells of its optimizer is named `service/...`."""
        data = self._data(rows, target_fields(rows, self._algorithm, self._reduction))
        answer = self._service.call(lambda: self._training.forward_backward(data, *self._loss))
        logprobs = self._logprobs(rows, answer)
        loss = step_loss(rows, logprobs, self._algorithm)
        if not math.isfinite(loss):
            raise Diverged(f"training diverged at step {self.step_count + 1} (loss {loss}): try a smaller train.rate")
        rate = rate_at(self.step_count, self._steps, self._train)
        adam = self._service.sdk.AdamParams(
            learning_rate=rate, beta1=BETAS[0], beta2=BETAS[1], eps=EPSILON, weight_decay=DECAY, grad_clip_norm=CLIP
        )
        answer = self._service.call(lambda: self._training.optim_step(adam))
        self.step_count += 1
        on_tokens(*[sum(len(row.token_ids) for row in rows)] * 2)
        taken = {"loss": loss, "rate": rate, "trained_tokens": float(sum(sum(row.loss_mask) for row in rows))}
        told = {f"service/{key}": float(value) for key, value in (getattr(answer, "metrics", None) or {}).items()}
        return taken | distance(rows, logprobs, self._algorithm) | told

    def loss(self, rows: Sequence[TrainRow]) -> float:
        return step_loss(rows, self.logprobs(rows), self._algorithm)

    def logprobs(self, rows: Sequence[TrainRow]) -> list[list[float]]:
        data = self._data(rows, [{"weights": [float(mask) for mask in row.loss_mask[1:]]} for row in rows])
        return self._logprobs(rows, self._service.call(lambda: self._training.forward(data, "cross_entropy")))

    async def publish(self, version: int, deliver: Deliver) -> None:
        new = await asyncio.to_thread(self._service.call, lambda: self._training.save_weights_and_get_sampling_client())
        self._backend.switch(new, version)

    def save(self, root: Path) -> str:
        return self._save_state("state")

    def load(self, root: Path, name: str) -> None:
        self._resumed, self.step_count = name, int(name.rpartition("-")[2])

    def write(self, folder: Path, card: Checkpoint) -> Checkpoint:
        """Write the tokenizer and the card, with the name under which the service keeps the weights."""
        card = msgspec.structs.replace(card, remote=self._save_state("checkpoint"))
        try:
            copy_beside_weights(self._base, folder)
        except OSError as error:
            raise UsageError(f"cannot write the checkpoint to {folder}: {error}") from error
        write_card(folder, card)
        return card

    def _save_state(self, kind: str) -> str:
        self._saves += 1
        name = f"{kind}-{self._saves}-step-{self.step_count}"
        return str(self._service.call(lambda: self._training.save_state(name)).path)

    def _data(self, rows: Sequence[TrainRow], fields: Sequence[dict[str, list[float]]]) -> list[Any]:
        sdk = self._service.sdk
        return [
            sdk.Datum(
                model_input=sdk.ModelInput.from_ints(list(row.token_ids[:-1])),
                loss_fn_inputs={"target_tokens": list(row.token_ids[1:]), **own},
            )
            for row, own in zip(rows, fields, strict=True)
        ]

    def _logprobs(self, rows: Sequence[TrainRow], answer: Any) -> list[list[float]]:
        found = [[float(value) for value in output["logprobs"].tolist()] for output in answer.loss_fn_outputs]
        if [len(each) for each in found] != [len(row.token_ids) - 1 for row in rows]:
            raise InfrastructureFault("the service did not return one log probability for each target of each row")
        return [list(compress(each, row.loss_mask[1:])) for each, row in zip(found, rows, strict=True)]


def remote_name(base: Path) -> str:
    """Return the name under which a service keeps the weights of a checkpoint; empty for any other folder."""
    card = read_checkpoint(base)
    return "" if card is None else card.remote
