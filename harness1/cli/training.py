"""What the verbs that train share: the memory that training takes, refused where it cannot fit; their processes; a
training in progress, and what it came to."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from harness1.cli.printing import print_json, put, say
from harness1.cli.progress import OF, Board, print_table
from harness1.config import Config, Train
from harness1.engines.engine import follow, leading
from harness1.errors import UsageError
from harness1.models.checkpoint import Checkpoint
from harness1.models.fetch import model_shape, resolve_model
from harness1.models.open import choose_device
from harness1.models.spec import ModelSpec
from harness1.rows import RowFile
from harness1.training.algorithm import make_algorithm
from harness1.training.log import read_log, validation_values
from harness1.training.memory_plan import BatchSize, Devices, MemoryPlanner, Plan, Sampling
from harness1.training.process_group import ProcessGroup, join_group
from harness1.training.trainer import by_token_budget

GB = 1e9
MOST_TRAINERS, RANK, FEW_ROWS = 64, 32, 4  # what advice goes up or down to; the rank is that of the published recipe
Make = Callable[[Config, Devices], Plan]  # returns the plan of settings on devices


def refuse_oversized_rl(config: Config, model: str, trainers: int = 1) -> None:
    """Say what `rl train` will hold with the model that samples; raise UsageError if it cannot fit."""
    spec = ModelSpec.read(model)
    if spec.kind == "openai":
        return  # which is refused for another reason
    sampling: Sampling = "none"
    if spec.url is None and not config.machine.fleet.workers and not config.machine.model.sleep:
        sampling = "reserved" if spec.kind == "vllm" else "beside"
    planner = MemoryPlanner(model_shape(resolve_model(spec.model)), make_algorithm(config.rl.algorithm, config.rl))
    _refuse_oversized(planner, config, None, Devices(memory=0, trainers=trainers, sampling=sampling))


def refuse_oversized_sft(config: Config, model: Path, rows: Path, trainers: int = 1) -> None:
    """Say what `sft train` will hold on the largest of its rows; refuse and raise as `refuse_oversized_rl`."""
    planner = MemoryPlanner(model_shape(model), make_algorithm("nll"))
    _refuse_oversized(planner, config, RowFile(rows), Devices(memory=0, trainers=trainers))


def _refuse_oversized(planner: MemoryPlanner, config: Config, rows: RowFile | None, devices: Devices) -> None:
    device = config.machine.device or choose_device()
    if not (memory := device_memory(device)):
        return
    if device.startswith("cuda"):
        devices = replace(devices, memory=memory)
    else:  # vLLM reserves a share of GPUs only; processes share the memory of a machine
        where: Sampling = "none" if devices.sampling == "reserved" else devices.sampling
        devices = replace(devices, kind="cpu", memory=memory // devices.trainers, sampling=where)

    def make(config: Config, devices: Devices) -> Plan:
        return planner.plan(config, batch_of_rows(rows, config.train) if rows else episode_batch(config), devices)

    try:
        plan = make(config, devices)
    except UsageError as error:
        say(f"no memory plan: {error}")
        return
    parts = ", ".join(f"{name} {size / GB:.1f}" for name, size in {**plan.held, **plan.moments}.items())
    say(f"memory: at most {plan.needs / GB:.1f} of {plan.devices.memory / GB:.1f} GB ({parts})")
    if plan.needs > plan.devices.memory and config.machine.check_memory:
        raise UsageError(
            f"this training needs {plan.needs / GB:.1f} GB and {device} has {memory / GB:.1f}; "
            f"{describe_advice(advise(make, config, devices))}; --set machine.check_memory=false tries it anyway"
        )


def advise(make: Make, config: Config, devices: Devices) -> tuple[list[str], Plan] | None:
    """Return the fewest changes, cheapest first, with which a run fits, and its plan; None if none are enough."""

    def plan(changes: list[tuple[str, Any]]) -> Plan:
        changed, on = config, devices
        for name, value in changes:
            if isinstance(value, dict):
                on = replace(on, **value)
            else:
                changed = _replace(changed, name.split("."), value)
        return make(changed, on)

    changes = list(_changes(config, devices))
    needed = next((some for end in range(len(changes)) if plan(some := changes[: end + 1]).fits), [])
    for change in needed[-2::-1]:  # without each of the others, the dearest first
        fewer = [each for each in needed if each is not change]
        needed = fewer if plan(fewer).fits else needed
    words = [name if isinstance(value, dict) else f"--set {name}={str(value).lower()}" for name, value in needed]
    return (words, plan(needed)) if needed else None


def describe_advice(found: tuple[list[str], Plan] | None) -> str:
    """Return the changes with which a run fits, in words."""
    if found is None:
        return "no settings make it fit these devices"
    return f"{found[1].needs / GB:.1f} GB with: {' '.join(found[0])}"


def _changes(config: Config, devices: Devices) -> Iterator[tuple[str, Any]]:
    """Yield settings with their values, or words with changed devices, in the order of what they cost."""
    train, model, where = config.train, config.machine.model, devices.sampling
    cuda, context = devices.kind == "cuda", config.env.context_window
    settings = [
        ("train.checkpointing", True, not train.checkpointing),
        ("train.attention", "flex_attention", cuda and train.attention in ("auto", "eager")),  # part of torch
        ("train.micro_tokens", context, train.micro_tokens > context),
        ("train.dtype", "bfloat16", train.dtype != "bfloat16"),
        ("policy.dtype", "bfloat16", where in ("beside", "apart") and config.policy.dtype != "bfloat16"),
        ("machine.model.cache_tokens", 0, where == "beside" and model.cache_tokens > 0),
        ("machine.concurrency", FEW_ROWS, where == "beside" and config.machine.concurrency > FEW_ROWS),
        ("train.lora.rank", RANK, not train.lora.rank),
    ]
    yield from ((name, value) for name, value, helps in settings if helps)
    if where in ("beside", "reserved"):
        apart = {"sampling": "apart", "samplers": max(1, devices.samplers)}
        yield "sample on another GPU: --model vllm:MODEL@URL", apart
    trainers = devices.trainers
    while cuda and trainers < MOST_TRAINERS:
        trainers *= 2
        yield f"shard over {trainers} GPUs: torchrun --nproc-per-node {trainers}", {"trainers": trainers}


def _replace(settings: Any, path: list[str], value: Any) -> Any:
    return replace(settings, **{path[0]: _replace(getattr(settings, path[0]), path[1:], value) if path[1:] else value})


def episode_batch(config: Config, length: int = 0, trained: int = 0) -> BatchSize:
    """Return the largest forward pass of rows of episodes (0: the context window, and as many as turns may write)."""
    length = length or config.env.context_window
    turns = config.env.rendering.epoch_turns if config.rl.rows == "epoch" else 1
    trained = min(trained or turns * config.env.generation_reserve, length - 1)
    rows = max(1, config.train.micro_tokens // length)
    return BatchSize(rows, length, rows * trained)


def batch_of_rows(rows: RowFile, train: Train) -> BatchSize:
    """Return a forward pass that is at least as large as any over the rows of a dataset."""
    groups = [group[: train.batch_rows] for group in by_token_budget(list(rows.lengths), train.micro_tokens)]
    largest = max(groups, key=lambda group: rows.lengths[group[0]] * len(group))
    trained = max(sum(int(rows.trained[place]) for place in group) for group in groups)
    return BatchSize(len(largest), int(rows.lengths[largest[0]]), trained)


def device_memory(device: str) -> int:
    """Return the bytes of a GPU, or of this machine for `cpu`; 0 if they are not known."""
    import torch

    if device.startswith("cuda") and torch.cuda.is_available():
        return int(torch.cuda.get_device_properties(device).total_memory)
    names = ("SC_PHYS_PAGES", "SC_PAGE_SIZE")
    if device != "cpu" or not set(names) <= set(getattr(os, "sysconf_names", ())):
        return 0
    return max(0, math.prod(map(os.sysconf, names)))


def count_launched() -> ProcessGroup:
    """Return the place that the launcher gave this process, by its environment variables."""
    rank, size, local = (os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    return ProcessGroup(int(rank or 0), int(size or 1), int(local or 0))


@contextmanager
def lead_group(*, joins: bool = True) -> Iterator[ProcessGroup | None]:
    """Yield the group, in the process that leads it or is alone; None in the others, which follow until that one ends.
    Without `joins`, for work that joins its processes itself, each yields its place and a size of 1."""
    place = count_launched()
    with join_group(place if joins else dataclasses.replace(place, size=1)) as group:
        if joins and not group.leads:
            follow(group)
            yield None
            return
        with leading(group):
            yield group


class TrainingBoard(Board):
    """Listens to a training run by `listen`, of steps that it calls `unit`; `names`: the values to show, best first."""

    def __init__(self, title: str, unit: str, names: Sequence[str], **shown: Any) -> None:
        super().__init__(title, f"{unit} {OF}", **shown)
        self._unit, self._names, self._values = unit, names, dict[str, float]()

    def listen(self, step: int, steps: int, values: Mapping[str, float]) -> None:
        """Take the values of a step; print those of a validation in a line that stays."""
        self.begin(step, steps)
        if found := validation_values(values):
            self.say(f"{self._unit} {step}, held out: {self._list(found)}")
        elif values:
            self._values = dict(values)
        self.advance(step)

    def parts(self) -> Sequence[str]:
        """Return the values of the last step."""
        return (self._list(self._values),)

    def _list(self, values: Mapping[str, float]) -> str:
        return ", ".join(f"{name} {values[name]:.3g}" for name in self._names if name in values)


def print_checkpoint(done: Checkpoint, out: Path, unit: str, as_json: bool, which: str = "best") -> None:
    """Print the final checkpoint of a training run, of so many `unit`s, and its held-out metrics beside the start's."""
    began = next((found for line in read_log(out) if line["step"] == 0 and (found := validation_values(line))), {})
    if as_json:
        print_json({"checkpoint": str(out), unit: done.step, "metrics": done.metrics, "start": began})
        return
    if done.metrics:
        put(f"the {which} checkpoint, of {unit} {done.step}")
        start = {name: f"{value:.3f}" for name, value in began.items()}
        rows = [(name, start.get(name, ""), f"{value:.3f}") for name, value in done.metrics.items()]
        print_table(("held out", "start", "checkpoint"), rows)
    put(f"The checkpoint is in {out}: harness1 eval DATASET --policy hf:{out}")
