"""Memory plans in words, and the refusal of training that cannot fit."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from harness1.cli.printing import say
from harness1.config import Config
from harness1.errors import UsageError
from harness1.models.fetch import model_shape, resolve_model
from harness1.models.open import preferred_device
from harness1.models.spec import ModelSpec
from harness1.rows.file import RowFile
from harness1.training.algorithm import make_algorithm
from harness1.training.memory_advice import Change, advice
from harness1.training.memory_plan import (
    Devices,
    MemoryPlanner,
    Plan,
    Sampling,
    batch_of_rows,
    device_memory,
    episode_batch,
)

GB = 1e9


def refuse_oversized_rl(config: Config, model: str, trainers: int = 1) -> None:
    """Say what `rl train` will hold, and refuse what cannot fit.

    Args:
        model: the model that samples, as the verb takes it.
        trainers: processes that train together.

    Raises:
        UsageError: it cannot fit, or there is no such model.
    """
    asked = ModelSpec.read(model)
    if asked.kind == "openai":
        return  # which is refused for another reason
    sampling: Sampling = "none"
    if asked.url is None and not config.machine.fleet.workers and not config.machine.model.sleep:
        sampling = "reserved" if asked.kind == "vllm" else "beside"
    planner = MemoryPlanner(model_shape(resolve_model(asked.model)), make_algorithm(config.rl.algorithm, config.rl))
    _refuse_oversized(planner, config, None, Devices(memory=0, trainers=trainers, sampling=sampling))


def refuse_oversized_sft(config: Config, model: Path, rows: Path, trainers: int = 1) -> None:
    """Say what `sft train` will hold on the largest of its rows, and refuse what cannot fit; raise as
    `refuse_oversized_rl`."""
    planner = MemoryPlanner(model_shape(model), make_algorithm("nll"))
    _refuse_oversized(planner, config, RowFile(rows), Devices(memory=0, trainers=trainers))


def words_of(plan: Plan) -> str:
    """Return a plan as one line, in GB of 10^9 bytes."""
    parts = ", ".join(f"{name} {size / GB:.1f}" for name, size in {**plan.held, **plan.moments}.items())
    return f"memory: at most {plan.needs / GB:.1f} of {plan.devices.memory / GB:.1f} GB ({parts})"


def advised(found: tuple[list[Change], Plan] | None) -> str:
    """Return the changes with which a run fits, in words."""
    if found is None:
        return "no settings make it fit these devices"
    changes, plan = found
    return f"{plan.needs / GB:.1f} GB with: {' '.join(map(str, changes))}"


def _refuse_oversized(planner: MemoryPlanner, config: Config, rows: RowFile | None, devices: Devices) -> None:
    device = config.machine.model.device or preferred_device()
    if not (memory := device_memory(device)):
        return
    if not device.startswith("cuda"):  # vLLM reserves a share of GPUs only; processes share the memory of a machine
        sampling: Sampling = "none" if devices.sampling == "reserved" else devices.sampling
        devices = replace(devices, kind="cpu", memory=memory // devices.trainers, sampling=sampling)
    else:
        devices = replace(devices, memory=memory)

    def make(config: Config, devices: Devices) -> Plan:
        batch = episode_batch(config) if rows is None else batch_of_rows(rows, config.train)
        return planner.plan(config, batch, devices)

    try:
        plan = make(config, devices)
    except UsageError as error:
        say(f"no memory plan: {error}")
        return
    say(words_of(plan))
    if plan.is_hopeless and config.machine.check_memory:
        raise UsageError(
            f"this training needs {plan.needs / GB:.1f} GB and {device} has {memory / GB:.1f}; "
            f"{advised(advice(make, config, devices))}; --set machine.check_memory=false tries it anyway"
        )
