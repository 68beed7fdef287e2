"""harness1 train plan: the memory that training a model takes, before anything is loaded."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

from msgspec.structs import replace
from typer import Option

from harness1.cli.memory import GB, advise, describe_advice, episode_batch
from harness1.cli.options import ConfigFile, Json, Overrides, resolve
from harness1.cli.printing import print_result, put
from harness1.config import Config, Train
from harness1.errors import UsageError
from harness1.models.fetch import model_shape
from harness1.training.algorithm import make_algorithm
from harness1.training.memory_plan import CACHE_ROOM, LINEAR, PHASES, BatchSize, Devices, MemoryPlanner, Plan, Sampling


class Sampled(StrEnum):
    """Where episodes are sampled."""

    BESIDE = "beside"
    RESERVED = "reserved"
    APART = "apart"
    NONE = "none"


def plan(
    model: Annotated[
        str,
        Option(help="A model's folder or config.json; or smollm2-135m, gpt-oss-20b, qwen3-30b-a3b.", metavar="MODEL"),
    ],
    gpu: Annotated[float, Option(help="Memory of each GPU in GB of 10^9 bytes.", min=0.001)] = 80.0,
    count: Annotated[int, Option(help="GPUs.", min=1)] = 1,
    context: Annotated[int, Option(help="Tokens of a row; default env.context_window.", min=0)] = 0,
    trained: Annotated[int, Option(help="Trained tokens of a row; default: all that it may write.", min=0)] = 0,
    sampling: Annotated[
        Sampled | None,
        Option(help="Sample beside training, there by vLLM (reserved), apart on half of the GPUs, or not (none: SFT)."),
    ] = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Print the memory that training takes, whether it fits, and the settings that make it fit; nothing is loaded.

    Example: harness1 train plan --model gpt-oss-20b --gpu 80 --count 8 --context 32768
    """
    settings = resolve(config, overrides)
    if context:
        settings = replace(settings, env=replace(settings.env, context_window=context))
    devices = _devices(int(gpu * GB), count, sampling)
    loss = "nll" if devices.sampling == "none" else settings.rl.algorithm
    planner = MemoryPlanner(model_shape(model), make_algorithm(loss, settings.rl))

    def make(config: Config, devices: Devices) -> Plan:
        return planner.plan(config, episode_batch(config, trained=trained), devices)

    made = make(settings, devices)
    found = None if made.fits else advise(make, settings, devices)
    shown = {
        "model": model,
        "plan": made,
        "needs": made.needs,
        "fits": made.fits,
        "activations": _activations(planner, settings.train, made.batch),
        "advice": found and found[0],
    }
    print_result(shown, as_json, _print, "" if made.fits else describe_advice(found))


def _activations(planner: MemoryPlanner, train: Train, batch: BatchSize) -> dict[str, dict[str, int]]:
    """Return the bytes of a forward and backward pass by attention, with and without checkpointing: `eager` makes every
    score, `linear` is what any fused kernel takes."""
    found: dict[str, dict[str, int]] = {}
    for name, attention in (("eager", "eager"), ("linear", LINEAR)):
        for kind in ("checkpointing", "plain"):
            step = planner.step(replace(train, checkpointing=kind == "checkpointing"), batch, attention)
            found.setdefault(name, {})[kind] = max(step[phase] for phase in PHASES)
    return found


def _devices(memory: int, count: int, sampled: Sampled | None) -> Devices:
    """Return the devices; where sampling is apart, half of them sample."""
    where: Sampling = (sampled or (Sampled.APART if count > 1 else Sampled.BESIDE)).value
    if where != "apart":
        return Devices(memory, trainers=count, sampling=where)
    if count == 1:
        raise UsageError("--sampling apart needs --count of at least 2")
    return Devices(memory, trainers=count - count // 2, samplers=count // 2, sampling="apart")


def _print(shown: dict[str, Any], fitting: str) -> None:
    made: Plan = shown["plan"]
    devices, batch = made.devices, made.batch
    put(f"{shown['model']}: {made.parameters:,} parameters, {made.trained:,} trained")
    put(f"largest forward pass: {batch.rows} x {batch.length:,} tokens, {batch.trained:,} of them trained")
    put(f"GB of 10^9 bytes on each of {devices.trainers} that train:")
    _lines(made.held)
    put("and one at a time:")
    _lines(made.moments)
    _lines({"in all at most": made.needs}, f" of {devices.memory / GB:.0f}")
    put(f"The forward and backward pass: {', '.join(f'{name} {size / GB:.2f}' for name, size in made.passes.items())}.")
    put("The same by attention, with checkpointing and without:")
    for name, sizes in shown["activations"].items():
        _lines({name: sizes["checkpointing"]}, f"{sizes['plain'] / GB:>10.2f}")
    if made.sampler:
        put(f"GB on each of {devices.samplers} that sample:")
        _lines(made.sampler, f", {max(0, made.sampler[CACHE_ROOM]) // made.token:,} tokens", CACHE_ROOM)
    put("It fits." if made.fits else f"It does not fit: {fitting}.")


def _lines(sizes: dict[str, int], note: str = "", noted: str = "") -> None:
    for name, size in sizes.items():
        put(f"  {name:<28}{size / GB:>10.2f}{note if noted in ('', name) else ''}")
