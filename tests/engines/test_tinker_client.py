"""The real package `tinker` against what the engine gives it and reads from it, without a service. `make test-skyrl`
runs this with both spellings of the client."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import msgspec
import pytest

from harness1.config import Lora, Machine, Train
from harness1.engines.tinker import Service, TinkerBackend, TinkerEngine, connect
from harness1.errors import UsageError
from harness1.records import Sampling
from harness1.rows import TrainRow
from harness1.training.algorithm import Algorithm, Cispo, NegativeLogLikelihood, Reinforce

tinker: Any = pytest.importorskip("tinker")

MODEL = "model"
TRAIN = Train(lora=Lora(rank=4), rate=0.5, schedule="constant")
ROWS = [
    TrainRow((1, 2, 3, 4), (0, 0, 1, 1), (0.0, 0.0, -0.5, -0.25), (0.0, 0.0, 2.0, -1.0)),
    TrainRow((5, 6, 7), (0, 1, 1), (0.0, -1.0, -2.0), (0.0, 1.0, 1.0), token_weight=3.0),
]
KNOWN = [[-9.0, -0.5, -0.25], [-1.0, -2.0]]
"""Log probabilities of all targets, as a service that agrees with the sampler returns them."""


class Standing:
    """Clients that take exactly the arguments of the real ones, and answer in the package's own types."""

    def __init__(self, late: bool) -> None:
        futures = import_module("tinker.lib.public_interfaces.api_future")

        def future(value: Any) -> Any:
            done: Future[Any] = Future()
            done.set_result(value)
            return futures.AwaitableConcurrentFuture(done)

        def made(value: Any) -> Any:
            return future(value) if late else value

        self.sampler = create_autospec(tinker.SamplingClient, instance=True)
        self.sampler.sample.return_value = future(sampled())
        self.training = create_autospec(tinker.TrainingClient, instance=True)
        outputs = [{"logprobs": tinker.TensorData(data=row, dtype="float32", shape=[len(row)])} for row in KNOWN]
        passed = future(tinker.ForwardBackwardOutput(loss_fn_output_type="", loss_fn_outputs=outputs, metrics={}))
        self.training.forward.return_value = self.training.forward_backward.return_value = passed
        self.training.optim_step.return_value = future(tinker.OptimStepResponse(metrics={"norm": 2.0}))
        self.training.save_state.side_effect = lambda name: future(
            tinker.types.SaveWeightsResponse(path=f"tinker://run/weights/{name}")
        )
        self.training.save_weights_and_get_sampling_client.return_value = made(self.sampler)
        self.service = create_autospec(tinker.ServiceClient, instance=True)
        for name in ("lora_training_client", "training_client_from_state", "training_client_from_state_with_optimizer"):
            getattr(self.service, f"create_{name}").return_value = made(self.training)


def sampled() -> Any:
    """An answer of one sequence, as the package builds it from what a server sends."""
    import numpy as np

    parts = {"stop_reason": "stop", "tokens_np": np.array([8, 9]), "logprobs_np": np.array([-0.5, -0.25])}
    if "sequence_id" in signature(tinker.SampledSequence).parameters:
        parts["sequence_id"] = "s"
    return tinker.SampleResponse(sequences=[tinker.SampledSequence(**parts)])


pytestmark = pytest.mark.filterwarnings("error::FutureWarning")  # the package's word for what it will drop


@pytest.fixture(params=[False, True], ids=["results", "futures"])
def there(request: pytest.FixtureRequest) -> Standing:
    return Standing(request.param)


def engine_of(
    there: Standing, algorithm: Algorithm, base: Path = Path("nowhere")
) -> tuple[TinkerEngine, TinkerBackend]:
    backend = TinkerBackend(Service(tinker, there.service, MODEL))
    return TinkerEngine(backend, base, algorithm, TRAIN, 4), backend


def fields(datum: Any) -> dict[str, Any]:
    return {name: (tensor.dtype, tensor.tolist()) for name, tensor in datum.loss_fn_inputs.items()}


def test_rows_become_data_of_the_package(there: Standing) -> None:
    engine, _ = engine_of(there, Cispo(0.0, 5.0))
    found = engine.step(ROWS)
    data, name, settings = there.training.forward_backward.call_args.args
    assert (name, settings) == ("cispo", {"clip_low_threshold": 0.0, "clip_high_threshold": 5.0})
    assert [datum.model_input.to_ints() for datum in data] == [[1, 2, 3], [5, 6]]
    assert fields(data[0])["target_tokens"] == ("int64", [2, 3, 4])
    assert fields(data[0])["logprobs"] == ("float32", [0.0, -0.5, -0.25])
    assert [fields(datum)["advantages"] for datum in data] == [
        ("float32", [0.0, 0.25, -0.125]),
        ("float32", [0.375, 0.375]),
    ]
    assert (found["log_ratio_max"], found["service/norm"], found["trained_tokens"]) == (0.0, 2.0, 4.0)
    (adam,) = there.training.optim_step.call_args.args
    assert isinstance(adam, tinker.AdamParams)
    assert (adam.learning_rate, adam.beta1, adam.beta2, adam.eps) == (0.5, 0.9, 0.95, 1e-8)
    assert (adam.weight_decay, adam.grad_clip_norm) == (0.0, 1.0)


@pytest.mark.parametrize("algorithm", [Reinforce(), NegativeLogLikelihood()])
def test_cross_entropy_gets_weights_and_gives_log_probabilities(there: Standing, algorithm: Algorithm) -> None:
    engine, _ = engine_of(there, algorithm)
    engine.step(ROWS)
    data, name, settings = there.training.forward_backward.call_args.args
    assert (name, settings) == ("cross_entropy", None)
    assert {*fields(data[0])} == {"target_tokens", "weights"}
    assert (fields(data[0])["weights"][0], fields(data[0])["weights"][1][0]) == ("float32", 0.0)
    assert engine.logprobs(ROWS) == [[-0.5, -0.25], [-1.0, -2.0]]
    assert there.training.forward.call_args.args[1] == "cross_entropy"


def test_each_way_to_the_adapters_is_one_that_the_package_has(there: Standing, tmp_path: Path) -> None:
    engine, _ = engine_of(there, Cispo())
    name = engine.save(Path("nowhere"))
    assert name == "tinker://run/weights/state-1-step-0"
    assert there.service.create_lora_training_client.call_args.args == (MODEL,)
    assert there.service.create_lora_training_client.call_args.kwargs == {"rank": 4, "seed": TRAIN.seed}
    resumed, _ = engine_of(there, Cispo())
    resumed.load(Path("nowhere"), name)
    resumed.step(ROWS)
    there.service.create_training_client_from_state_with_optimizer.assert_called_once_with(name)
    card = {"format": "compact", "counter": "c", "env": {}, "env_hash": "e", "base": "b", "remote": "tinker://begun"}
    (tmp_path / "checkpoint.json").write_bytes(msgspec.json.encode(card))
    engine_of(there, Cispo(), tmp_path)[0].step(ROWS)
    there.service.create_training_client_from_state.assert_called_once_with("tinker://begun")


def test_outputs_of_the_sampler_are_read_as_they_are(there: Standing) -> None:
    engine, backend = engine_of(there, Cispo())
    asyncio.run(engine.publish(3, nowhere))
    output = asyncio.run(backend.generate((1, 2), Sampling(max_tokens=2, seed=7, stop_ids=(9,))))
    assert (output.output_ids, output.output_logprobs, output.finish_reason) == ((8, 9), (-0.5, -0.25), "stop")
    assert (output.version_start, output.version_end) == (3, 3)
    prompt, count, params = there.sampler.sample.call_args.args
    assert (prompt.to_ints(), count) == ([1, 2], 1)
    assert isinstance(params, tinker.SamplingParams)
    assert (params.max_tokens, params.seed, list(params.stop)) == (2, 7, [9])
    assert (params.temperature, params.top_k, params.top_p) == (1.0, -1, 1.0)


async def nowhere(*_: object) -> None:
    raise AssertionError("a service delivers nothing to this process")


def test_a_pending_sample_leaves_the_event_loop_to_others(there: Standing) -> None:
    futures = import_module("tinker.lib.public_interfaces.api_future")
    pending: Future[Any] = Future()
    there.sampler.sample.return_value = futures.AwaitableConcurrentFuture(pending)
    engine, backend = engine_of(there, Cispo())

    async def play() -> tuple[int, ...]:
        await engine.publish(0, nowhere)
        asked = asyncio.create_task(backend.generate((1, 2), Sampling(max_tokens=2, stop_ids=(9,))))
        await asyncio.sleep(0)
        pending.set_result(sampled())
        return (await asked).output_ids

    assert asyncio.run(play()) == (8, 9)


def test_the_hosted_service_is_not_reached_without_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TINKER_API_KEY", raising=False)
    with pytest.raises(UsageError, match=f"tinker {tinker.__version__} cannot talk to the hosted service"):
        connect(MODEL, None, Machine())
