"""harness1 sft train: train a checkpoint on rows."""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from harness1.cli.dashboard import TrainingBoard
from harness1.cli.launched import launched, led_group
from harness1.cli.memory import refuse_oversized_sft
from harness1.cli.options import ConfigFile, EngineOption, Force, Json, Mlflow, Overrides, Tensorboard, Wandb, resolve
from harness1.cli.results import print_checkpoint
from harness1.engines.engine import open_service_engine
from harness1.engines.open import open_service
from harness1.errors import UsageError
from harness1.models.checkpoint import Checkpoint, read_checkpoint
from harness1.models.fetch import resolve_model
from harness1.models.open import preferred_device
from harness1.sft.data_card import TRAIN
from harness1.sft.train import VERB, FineTuning, fine_tune
from harness1.training.log import Trackers, clear_training
from harness1.training.process_group import ProcessGroup

SHOWN = ("loss", "nll", "valid", "tool_agreement", "action_agreement", "curated_recall")
"""The values shown for steps, and for validations."""


class TrainerName(StrEnum):
    """The trainer to use."""

    OWN = "own"
    TRL = "trl"


def train(
    dataset: Annotated[Path, Argument(help="A folder made by `harness1 sft build`.", metavar="ROWS")],
    model: Annotated[str, Option(help="A model's folder or name, e.g. smollm2-135m.", metavar="PATH")],
    out: Annotated[Path, Option(help="Folder for the checkpoint.", metavar="CHECKPOINT")],
    trainer: Annotated[
        TrainerName, Option(help="The trainer of harness1 (own), or TRL's SFTTrainer.")
    ] = TrainerName.OWN,
    packing: Annotated[bool, Option("--packing", help="With TRL: several rows in one sequence.")] = False,
    engine: EngineOption = "",
    tensorboard: Tensorboard = False,
    wandb: Wandb = "",
    mlflow: Mlflow = "",
    config: ConfigFile = None,
    overrides: Overrides = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Train a model on a dataset's rows; a stopped training run resumes from its last saved state.

    On several GPUs: torchrun --nproc-per-node 8 -m harness1 sft train ...

    Example: harness1 sft train rows --model smollm2-135m --out student --config sft/small
    """
    with led_group(joins=trainer is TrainerName.OWN) as group:
        if group is None:
            return
        settings = resolve(config, overrides)
        if packing and trainer is TrainerName.OWN:
            raise UsageError("--packing needs --trainer trl")
        if engine and trainer is TrainerName.TRL:
            raise UsageError("--engine trains in place of --trainer trl: give one of them")
        device = settings.machine.model.device or preferred_device()
        device = f"cuda:{group.local}" if device == "cuda" and launched().size > 1 else device
        base = resolve_model(model)
        trackers = Trackers(tensorboard=tensorboard, wandb=wandb, mlflow=mlflow)
        work = FineTuning(dataset, base, out, settings, trainer.value, device, packing, trackers)
        if engine:
            service = open_service(engine, base, settings, group.size)
            work = replace(work, open_engine=partial(open_service_engine, service, settings), sampler=service.sampler)
        if force and launched().size > group.size:
            raise UsageError(f"the processes of TRL cannot agree on --force: remove {out} first")
        if force:
            work.student()  # nothing is deleted if the training run is refused
            clear_training(out, VERB)
        done = (read_checkpoint(out) if work.is_done() else None) or fine_tune_aloud(work, group)
        if group.leads:
            print_checkpoint(done, work.out, "step", as_json, "last" if work.trainer == "trl" else "best")


def fine_tune_aloud(work: FineTuning, group: ProcessGroup) -> Checkpoint:
    """Train, and show the progress; raise as `fine_tune`."""
    with TrainingBoard(work.out.name, "step", SHOWN, hidden=not group.leads) as board:
        if work.sampler is not None:  # the weights are elsewhere
            return fine_tune(work, board.listen, group, board.doing)
        fits = partial(refuse_oversized_sft, work.config, work.model, work.dataset / TRAIN, group.size)
        return fine_tune(work, board.listen, group, board.doing, fits)
