"""Training on a service: the gradients of our own trainer, under rising versions, and no loss when it breaks."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import torch

from harness1.config import Lora, Machine, Train, load_config
from harness1.engines.engine import LocalEngine, TrainerJob, open_local_engine, open_service_engine
from harness1.engines.tinker import TinkerBackend, TinkerEngine, check_supported, connect, open_tinker, tinker_service
from harness1.errors import InfrastructureFault, UsageError
from harness1.models.causal_model import load_causal_model
from harness1.models.checkpoint import Checkpoint, read_checkpoint
from harness1.records import Sampling
from harness1.rl.train import EPISODES, train_policy
from harness1.rows import TrainRow
from harness1.runs.journal import read_episodes
from harness1.training.algorithm import Algorithm, Cispo, NegativeLogLikelihood, Reinforce
from harness1.training.trainable import load_trainable
from tests.engines.fake_tinker import MODEL, FakeTinker
from tests.rl.test_learning import CHAT, Stopped, steps, work_in
from tests.rl.toy import ToyRollouts, toy_config
from tests.tiny_models import save_byte_tokenizer, save_tiny_model
from tests.train.test_process_group import PLAYED, STEPS

TRAIN = Train(lora=Lora(rank=4, alpha=4.0), dtype="float32", rate=1e-2, micro_tokens=64)
WEIGHTED = [msgspec.structs.replace(row, token_weight=1 / (at + 2)) for at, row in enumerate(PLAYED[0])]
CARD = Checkpoint(format="compact", counter="c", env={}, env_hash="e", base="b")


@pytest.fixture(autouse=True)
def large_epsilon(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a smaller epsilon, Adam makes much of the rounding of gradients that are next to 0."""
    for module in ("engines.tinker", "training.trainer"):
        monkeypatch.setattr(f"harness1.{module}.EPSILON", 1e-4)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    save_byte_tokenizer(folder)
    return save_tiny_model(folder, initializer_range=0.05)


def engine_of(sdk: FakeTinker, algorithm: Algorithm, base: Path | None = None, count: int = 4) -> TinkerEngine:
    service = connect(MODEL, "http://localhost:1", Machine(), sdk)
    reduction = cast(Any, sdk.reduction)
    return TinkerEngine(TinkerBackend(service), base or sdk.base, algorithm, sdk.train, count, reduction)


def local_of(base: Path, algorithm: Algorithm) -> tuple[LocalEngine, list[torch.Tensor]]:
    """Our own trainer, and the gradients of its last step."""
    engine, seen = open_local_engine(TrainerJob(base, algorithm, TRAIN, 4, threads=1)), list[torch.Tensor]()

    def note(*_: object) -> None:
        seen[:] = [parameter.grad.clone() for parameter in engine.parameters if parameter.grad is not None]

    engine.optimizer.register_step_pre_hook(note)
    return engine, seen


@pytest.mark.parametrize("reduction", ["sum", "row_mean"])
@pytest.mark.parametrize(
    ("algorithm", "rows"),
    [
        (Cispo(), WEIGHTED),
        (Cispo(0.8, 1.2), PLAYED[2]),
        (Reinforce(), WEIGHTED),
        (NegativeLogLikelihood(), STEPS[0]),
        (NegativeLogLikelihood(), STEPS[2]),
    ],
    ids=["cispo", "clipped", "reinforce", "nll", "weighted nll"],
)
def test_gradients_losses_and_steps_are_those_of_our_trainer(
    base: Path, algorithm: Algorithm, rows: list[TrainRow], reduction: str
) -> None:
    if algorithm == NegativeLogLikelihood() and any(row.advantages is not None for row in rows):
        rows = [
            row if row.advantages else msgspec.structs.replace(row, advantages=(0.7,) * len(row.token_ids))
            for row in rows
        ]
    sdk = FakeTinker(base, TRAIN, reduction=reduction)
    engine, (local, gradients) = engine_of(sdk, algorithm), local_of(base, algorithm)
    for _ in range(2):
        ours, theirs = engine.step(rows), local.step(rows)
        largest = max(float((one - other).abs().max()) for one, other in zip(sdk.gradients, gradients, strict=True))
        assert largest < 1e-6
        assert max(float(each.abs().max()) for each in gradients) > 1e-3
        for name in theirs.keys() & ours.keys():
            assert ours[name] == pytest.approx(theirs[name], abs=1e-5, rel=1e-5), name
        assert ours["service/grad_norm"] == pytest.approx(theirs["gradient"], rel=1e-4)
    assert engine.step_count == 2
    assert engine.loss(rows) == pytest.approx(local.loss(rows), abs=1e-5)
    for one, other in zip(engine.logprobs(rows), local.logprobs(rows), strict=True):
        assert one == pytest.approx(other, abs=1e-5)


def test_untrained_tokens_have_no_weight_and_bounds_the_names_of_the_service(base: Path) -> None:
    sdk = FakeTinker(base, TRAIN)
    engine_of(sdk, Cispo(0.5, 4.0)).step(WEIGHTED)
    ((data, *loss),) = sdk.sent
    assert loss == ["cispo", {"clip_low_threshold": 0.5, "clip_high_threshold": 4.0}]
    for datum, row in zip(data, WEIGHTED, strict=True):
        weights = datum.loss_fn_inputs["advantages"]
        assert {weight for weight, mask in zip(weights, row.loss_mask[1:], strict=True) if not mask} == {0.0}


async def nowhere(state: Mapping[str, Any], version: int) -> None:
    raise AssertionError("a service delivers nothing to this process")


@pytest.mark.parametrize("late", [True, False], ids=["futures", "results"])
def test_each_publication_is_sampled_under_its_version_with_exact_ids(base: Path, late: bool) -> None:
    sdk = FakeTinker(base, TRAIN, late=late)
    engine = engine_of(sdk, Cispo())
    backend, sampling = engine._backend, Sampling(max_tokens=6, seed=3, stop_ids=(256,))
    with pytest.raises(InfrastructureFault, match="no weights"):
        asyncio.run(backend.generate((1, 2, 3), sampling))
    for version in (0, 1):
        asyncio.run(engine.publish(version, nowhere))
        said = asyncio.run(backend.generate((1, 2, 3), sampling))
        assert (said.version_start, said.version_end, backend.version) == (version,) * 3
        length = len(said.output_ids)
        row = TrainRow((1, 2, 3, *said.output_ids), (0,) * 3 + (1,) * length, (0.0,) * 3 + said.output_logprobs)
        (known,) = engine.logprobs([row])
        assert said.output_logprobs == pytest.approx(known, abs=1e-5)
        engine.step([msgspec.structs.replace(row, advantages=(1.0,) * len(row.token_ids))])


def test_faults_of_the_service_are_infrastructure_faults(base: Path) -> None:
    sdk = FakeTinker(base, TRAIN)
    engine = engine_of(sdk, Cispo())
    asyncio.run(engine.publish(0, nowhere))
    for name in ("forward_backward", "optim_step"):
        sdk.failing = {name}
        with pytest.raises(InfrastructureFault, match=f"{name} is down"):
            engine.step(WEIGHTED)
    sdk.failing = {"sample"}
    with pytest.raises(InfrastructureFault, match="sample is down"):
        asyncio.run(engine._backend.generate((1, 2), Sampling(max_tokens=2)))
    sdk.failing = set()
    lost = engine_of(sdk, Cispo())
    lost.load(base, "tinker://gone/weights/state-1-step-3")
    with pytest.raises(InfrastructureFault, match="there is no"):
        lost.step(WEIGHTED)


def test_a_resumed_engine_takes_the_steps_of_one_that_went_on(base: Path) -> None:
    sdk = FakeTinker(base, TRAIN)
    engine, resumed = engine_of(sdk, Cispo()), engine_of(sdk, Cispo())
    engine.step(WEIGHTED)
    resumed.load(base, engine.save(base))
    assert (resumed.step(PLAYED[1]), resumed.step_count) == (engine.step(PLAYED[1]), 2)
    assert resumed.logprobs(WEIGHTED) == engine.logprobs(WEIGHTED)  # the optimizer's state came along


def test_a_checkpoint_names_its_weights_and_another_training_begins_with_them(base: Path, tmp_path: Path) -> None:
    sdk = FakeTinker(base, TRAIN)
    engine = engine_of(sdk, NegativeLogLikelihood())
    engine.step(STEPS[0])
    card = engine.write(tmp_path / "out", CARD)
    assert card == read_checkpoint(tmp_path / "out")
    assert card.remote in sdk.states
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    assert not list((tmp_path / "out").glob("*.safetensors"))
    begun = engine_of(sdk, Cispo(), tmp_path / "out")
    assert begun.logprobs(WEIGHTED) == engine.logprobs(WEIGHTED)


def test_a_checkpoint_of_a_service_is_not_opened_here_and_says_what_to_do(base: Path, tmp_path: Path) -> None:
    card = engine_of(FakeTinker(base, TRAIN), Cispo()).write(tmp_path / "out", CARD)
    ways = partial(load_causal_model, device="cpu", dtype="float32"), partial(load_trainable, train=TRAIN, device="cpu")
    for opened in ways:
        with pytest.raises(UsageError, match=f"are with a training service, as {card.remote}.*--engine") as refused:
            opened(tmp_path / "out")
        assert "\n" not in str(refused.value)


def learned(out: Path, sdk: FakeTinker, stop_at: int | None = None) -> Checkpoint:
    """The whole loop on the toy, with the service for engine and sampler."""
    config = toy_config([f"train.lora.rank={TRAIN.lora.rank}", "train.lora.alpha=4", "rl.batches=4"])
    backend = engine_of(sdk, Cispo())._backend
    work = work_in(out, sdk.base, config, open_engine=partial(open_service_engine, tinker_service(backend), config))

    def on_step(batch: int, batches: int, values: Mapping[str, float]) -> None:
        if batch == stop_at and "loss" in values:
            raise Stopped

    return train_policy(work, nullcontext(ToyRollouts(cast(Any, backend))), CHAT, "toy", on_step)


def test_a_training_passes_its_gate_raises_versions_and_survives_a_kill(base: Path, tmp_path: Path) -> None:
    sdk = FakeTinker(base, TRAIN)
    with pytest.raises(Stopped):
        learned(tmp_path, sdk, stop_at=2)
    begun = len(steps(tmp_path))
    done = learned(tmp_path, sdk)
    lines = steps(tmp_path)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert 0 < begun < 4
    assert lines[0]["gate/max_difference"] < 1e-5
    assert all(line["k3"] < 1e-6 for line in lines)
    assert done.remote in sdk.states
    versions = {episode.policy_versions for episode in read_episodes(tmp_path / EPISODES) if episode.group_id}
    assert versions >= {(0, 0), (1, 1), (2, 2), (3, 3)}


def test_what_a_service_cannot_do_is_refused_in_one_line() -> None:
    for fine in ("rl.algorithm=cispo", "rl.staleness=1"):
        check_supported(load_config(None, [fine]))
    for settings, named in {
        ("rl.algorithm=double_sided",): "double_sided",
        ("train.lora.rank=0",): r"lora\.rank",
        ("train.lora.layers=1",): r"lora\.layers",
        ("machine.fleet.workers=2",): r"fleet\.workers",
        ("rl.staleness=1", "machine.service.reduction=row_mean"): r"rl\.staleness",
    }.items():
        with pytest.raises(UsageError, match=named) as refused:
            check_supported(load_config(None, settings))
        assert "\n" not in str(refused.value)
    with pytest.raises(UsageError, match="several processes"):
        check_supported(load_config(), processes=2)


def test_a_server_of_another_version_or_model_is_refused_at_connecting(base: Path) -> None:
    sdk = FakeTinker(base, TRAIN)
    sdk.failing = {"capabilities"}
    with pytest.raises(UsageError, match=r"tinker 0\.0 cannot talk to http.*must match: SkyRL 0\.3 needs"):
        connect(MODEL, "http://localhost:1", Machine(), sdk)
    sdk.failing, sdk.models = set(), ["other"]
    with pytest.raises(UsageError, match="does not train toy; it has other"):
        connect(MODEL, None, Machine(), sdk)


@pytest.mark.parametrize("name", ["tinker:", "tinker:m@ftp://x", "prime:m", "tinker:m@http://user:word@host"])
def test_names_of_no_engine_are_refused(name: str, base: Path) -> None:
    with pytest.raises(UsageError, match="names no engine"):
        open_tinker(name, base, load_config())
