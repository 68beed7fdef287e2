"""A service of the Tinker API with our own trainer behind it, in this process: what `tinker` would be, in both
spellings of its client."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass
from functools import partialmethod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from harness1.config import Train
from harness1.engines.engine import TrainerJob, open_local_engine
from harness1.models.transformers_backend import TransformersBackend
from harness1.records import Sampling
from harness1.training.algorithm import NegativeLogLikelihood
from tests.rl.toy import open_toy

MODEL = "toy"


class TinkerError(Exception):
    """As the package raises for everything that fails."""


@dataclass(frozen=True)
class ModelInput:
    ids: list[int]
    from_ints = classmethod(lambda cls, ids: cls(ids))


@dataclass(frozen=True)
class Datum:
    model_input: ModelInput
    loss_fn_inputs: Mapping[str, Sequence[float]]


def done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


class FakeTinker:
    """The package, whose services train the model in `base`.

    Args:
        late: client constructors return futures, as from 0.38.
        reduction: of the losses: as Tinker's or as SkyRL's.
    """

    __version__ = "0.0"
    TinkerError, ModelInput, Datum = TinkerError, ModelInput, Datum
    SamplingParams = AdamParams = SimpleNamespace

    def __init__(self, base: Path, train: Train, *, late: bool = True, reduction: str = "sum") -> None:
        self.base, self.train, self.late, self.reduction = base, train, late, reduction
        self.states: dict[str, Any] = {}
        self.failing: set[str] = set()
        self.sent: list[tuple[list[Datum], str, Any]] = []
        self.gradients: list[Tensor] = []
        self.sampled = open_toy(base, rows=1)
        self.models = [MODEL]

    def ServiceClient(self, **_: object) -> FakeService:  # noqa: N802
        return FakeService(self)

    def maybe_late(self, value: Any) -> Any:
        return done(value) if self.late else value

    def check(self, name: str) -> None:
        if name in self.failing:
            raise TinkerError(f"{name} is down")


class FakeService:
    def __init__(self, sdk: FakeTinker) -> None:
        self.sdk = sdk

    def get_server_capabilities(self) -> Any:
        self.sdk.check("capabilities")
        return SimpleNamespace(supported_models=[SimpleNamespace(model_name=name) for name in self.sdk.models])

    def create_lora_training_client(self, model: str, rank: int, seed: int) -> Any:
        assert (model, rank, seed) == (MODEL, self.sdk.train.lora.rank, self.sdk.train.seed)
        return self.sdk.maybe_late(FakeTraining(self.sdk))

    def create_training_client_from_state(self, path: str, with_optimizer: bool = False) -> Any:
        if path not in self.sdk.states:
            raise TinkerError(f"there is no {path}")
        training, (weights, optimizer) = FakeTraining(self.sdk), self.sdk.states[path]
        with torch.no_grad():
            for parameter, weight in zip(training.trainer.parameters, weights, strict=True):
                parameter.copy_(weight)
        if with_optimizer:
            training.trainer.optimizer.load_state_dict(deepcopy(optimizer))
        return self.sdk.maybe_late(training)

    create_training_client_from_state_with_optimizer = partialmethod(
        create_training_client_from_state, with_optimizer=True
    )


class FakeTraining:
    def __init__(self, sdk: FakeTinker) -> None:
        self.sdk, self.rows = sdk, 0
        self.trainer = open_local_engine(TrainerJob(sdk.base, NegativeLogLikelihood(), sdk.train, 1, threads=1))

    def forward(self, data: list[Datum], loss: str, settings: Any = None) -> Future[Any]:
        self.sdk.check("forward")
        with torch.no_grad():
            return done(SimpleNamespace(loss_fn_outputs=[{"logprobs": self._logprobs(each)} for each in data]))

    def forward_backward(self, data: list[Datum], loss: str, settings: Any = None) -> Future[Any]:
        self.sdk.check("forward_backward")
        self.sdk.sent.append((data, loss, settings))
        logprobs = [self._logprobs(each) for each in data]
        for each, own in zip(data, logprobs, strict=True):
            fields = {name: torch.tensor(values) for name, values in each.loss_fn_inputs.items()}
            total = {"cispo": cispo, "cross_entropy": cross_entropy}[loss](own, fields, settings).sum()
            whole = fields.get("weights", torch.ones(len(own))).sum()
            (total if self.sdk.reduction == "sum" else total / whole.clamp(min=1e-9)).backward()
        self.rows += len(data)
        return done(SimpleNamespace(loss_fn_outputs=[{"logprobs": own.detach()} for own in logprobs]))

    def optim_step(self, adam: Any) -> Future[Any]:
        self.sdk.check("optim_step")
        optimizer, parameters = self.trainer.optimizer, self.trainer.parameters
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            if self.sdk.reduction == "row_mean":
                parameter.grad /= self.rows
        self.rows = 0
        norm = torch.nn.utils.clip_grad_norm_(parameters, adam.grad_clip_norm or torch.inf)
        self.sdk.gradients = [parameter.grad.clone() for parameter in parameters if parameter.grad is not None]
        known = {"lr": adam.learning_rate, "betas": (adam.beta1, adam.beta2), "eps": adam.eps}
        optimizer.param_groups[0].update(known, weight_decay=adam.weight_decay)
        optimizer.step()
        optimizer.zero_grad()
        return done(SimpleNamespace(metrics={"grad_norm": float(norm)}))

    def save_state(self, name: str) -> Future[Any]:
        path = f"tinker://run-{len(self.sdk.states)}/weights/{name}"
        weights = [parameter.detach().clone() for parameter in self.trainer.parameters]
        self.sdk.states[path] = weights, deepcopy(self.trainer.optimizer.state_dict())
        return done(SimpleNamespace(path=path))

    def save_weights_and_get_sampling_client(self) -> Any:
        asyncio.run(self.sdk.sampled.load_state(self.trainer.weights(), 0))
        return self.sdk.maybe_late(FakeSampling(self.sdk, self.sdk.sampled))

    def _logprobs(self, each: Datum) -> Tensor:
        logits = self.trainer.model(input_ids=torch.tensor([each.model_input.ids])).logits[0]
        targets = torch.tensor([int(target) for target in each.loss_fn_inputs["target_tokens"]])
        found: Tensor = logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0]
        return found


class FakeSampling:
    """Of one set of weights: calls under an older one would be answered by it."""

    def __init__(self, sdk: FakeTinker, backend: TransformersBackend) -> None:
        self.sdk, self.backend = sdk, backend

    def sample(self, prompt: ModelInput, count: int, params: Any) -> Future[Any]:
        self.sdk.check("sample")
        kept = {name: getattr(params, name) for name in ("temperature", "max_tokens", "seed")}
        with ThreadPoolExecutor(1) as pool:  # a thread of its own has no event loop
            return pool.submit(self._sampled, prompt.ids, Sampling(**kept, stop_ids=tuple(params.stop)))

    def _sampled(self, ids: list[int], sampling: Sampling) -> Any:
        output = asyncio.run(self.backend.generate(ids, sampling))
        told = {"tokens": list(output.output_ids), "logprobs": list(output.output_logprobs)}
        return SimpleNamespace(sequences=[SimpleNamespace(**told, stop_reason=output.finish_reason)])


def cross_entropy(logprobs: Tensor, fields: Mapping[str, Tensor], _: Any) -> Tensor:
    return -logprobs * fields["weights"]


def cispo(logprobs: Tensor, fields: Mapping[str, Tensor], settings: Any) -> Tensor:
    ratios = (logprobs.detach() - fields["logprobs"]).exp()
    clipped = ratios.clamp(settings["clip_low_threshold"], settings["clip_high_threshold"])
    return -clipped * fields["advantages"] * logprobs
