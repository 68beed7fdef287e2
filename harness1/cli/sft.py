"""harness1 sft: collect episodes of teachers, build rows from them, and train on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from typer import Argument, Option

from harness1.cli import options
from harness1.cli.options import evaluation_places, place_of, resolve
from harness1.cli.playing import evaluate_aloud, print_metrics, refuse_faults
from harness1.cli.policies import POLICY_NAMES
from harness1.cli.printing import print_result, put, say, say_torn
from harness1.cli.progress import print_table, progress_of_parts, read_aloud
from harness1.cli.training import TrainingBoard, count_launched, lead_group, print_checkpoint, refuse_oversized_sft
from harness1.config import Config
from harness1.data.indexing import index_of
from harness1.data.leaks import TaskFilter
from harness1.data.open import open_source
from harness1.engines.engine import open_service_engine
from harness1.engines.open import open_service
from harness1.errors import UsageError
from harness1.eval.evaluate import Evaluation
from harness1.eval.metrics import fault_count
from harness1.models.chat_format import ChatFormat
from harness1.models.checkpoint import Checkpoint, read_checkpoint
from harness1.models.fetch import resolve_model
from harness1.models.open import choose_device, format_at
from harness1.runs.folder import run_config
from harness1.sft import collect as teaching
from harness1.sft.build import Build
from harness1.sft.build import build as build_dataset
from harness1.sft.data_card import TRAIN, DataCard
from harness1.sft.train import VERB, FineTuning, fine_tune
from harness1.training.log import Trackers, clear_training
from harness1.training.process_group import ProcessGroup


def collect(
    data: Annotated[str, Option(help="A name in `data list`, a BEIR or TREC folder, world:SIZE.", metavar="DATASET")],
    out: Annotated[Path, Option(help="Run folder.", metavar="RUN")],
    teacher: Annotated[str, Option(help=f"The policy to learn from: {POLICY_NAMES}.", metavar="NAME")] = "oracle",
    split: Annotated[str, Option(help="The split to take tasks from; never test.")] = "train",
    chat: Annotated[
        str | None, Option("--format", help="The student's format; default policy.format.", metavar="FORMAT")
    ] = None,
    tokenizer: Annotated[
        str | None,
        Option(
            help="The student's model, or a folder with its tokenizer.json, whose tokens are counted and recorded;"
            " without, `sft build` needs --rerender.",
            metavar="PATH",
        ),
    ] = None,
    share: options.ShareOf = "",
    exclude: options.Exclude = None,
    limit: options.Limit = 0,
    samples: options.Samples = 1,
    seed: options.Seed = 0,
    index: options.IndexSpec = None,
    cache: options.Cache = None,
    tools: options.Tools = None,
    rewards: options.Rewards = None,
    config: options.ConfigFile = None,
    overrides: options.Overrides = None,
    faults: options.CountedFaults = "exclude",
    allow_faults: options.AllowFaults = 0,
    force: options.Force = False,
    as_json: options.Json = False,
) -> None:
    """Record a teacher's episodes to learn from. The same command resumes a stopped collection.

    Where the infrastructure broke an episode even after retries, the exit code is 3; the same command plays it again.

    Example: harness1 sft collect --data world:1000 --teacher oracle --out runs/teacher --tokenizer models/smollm2"""
    if chat and not tokenizer:
        raise UsageError("--format is the student's: give its --tokenizer too")
    overrides = [*(overrides or []), *([f"policy.format={chat}"] if chat else [])]
    settings = resolve(config, overrides, teacher, tokenizer or "", tools=tools, rewards=rewards)
    policy = teaching.teacher_policy(teacher, settings)
    source = open_source(data := place_of(data, settings))
    sieve = TaskFilter(settings.data, (), share, teaching.tasks_of_runs(exclude or ()))
    tasks = teaching.teaching_tasks(source, split, limit, settings, sieve)
    student = teaching.student_place(tokenizer, source, tasks, settings) if tokenizer else ""
    asked = index_of(source, index, cache, settings, read_aloud, say)
    hosted = teaching.is_hosted(policy)
    evaluation = Evaluation(data, split, tasks, asked, policy, settings, samples, seed, hosted, student, share, faults)
    metrics = evaluate_aloud(evaluation, out, force)
    print_result(metrics, as_json, print_metrics, f"{policy} on {source.name}/{split}", out)
    refuse_faults({policy: fault_count(metrics)}, metrics["episodes"], allow_faults)


def build(
    runs: Annotated[list[Path], Argument(help="Run folders, all of one environment.", metavar="RUN")],
    out: Annotated[Path, Option(help="The dataset folder to create.", metavar="DATASET")],
    against: options.Against = None,
    exclude: options.Exclude = None,
    rerender: Annotated[bool, Option("--rerender", help="Render again, for the student of --tokenizer.")] = False,
    chat_format: Annotated[
        str, Option("--format", help="With --rerender: auto, hermes, harmony or compact.", metavar="NAME")
    ] = "",
    tokenizer: Annotated[str, Option(help="With --rerender: the student's tokenizer.", metavar="PATH")] = "",
    partial: Annotated[bool, Option("--partial", help="Accept unfinished collections with what they have.")] = False,
    licence: Annotated[list[str] | None, Option(help="A note on the licence of data.", metavar="[NAME=]TEXT")] = None,
    config: options.ConfigFile = None,
    overrides: options.Overrides = None,
    force: options.Force = False,
    as_json: options.Json = False,
) -> None:
    """Keep good episodes, make training rows from their turns, and write them with a data card.

    Example: harness1 sft build runs/teacher --out data/teacher --config sft/small"""
    settings = resolve(config, overrides)
    student = _student(settings, runs, chat_format, tokenizer, rerender=rerender)
    place = teaching.tokenizer_place(tokenizer) if student else ""
    given = settings.sft, settings.data, evaluation_places(against, settings), exclude or (), licence or ()
    job = Build(runs, *given, student, place, partial)
    with progress_of_parts() as show:
        card = build_dataset(job, out, force=force, on_torn=say_torn, on_progress=show)
    print_result(card, as_json, print_card, out)


def print_card(card: DataCard, out: Path) -> None:
    """Print the counts of each gate, and the number of rows."""
    put(f"{card.format} rows of {', '.join(run.name for run in card.runs)}")
    print_table(("gate", "in", "out"), [(each.name, str(each.entered), str(each.passed)) for each in card.gates])
    for name, counts in (("train", card.train), ("held out", card.held_out)):
        trained = f"{counts.trained_tokens} of {counts.tokens} tokens trained"
        put(f"{name}: {counts.rows} rows of {counts.tasks} tasks, {trained}")
    for run in card.runs:
        if run.missing:
            put(f"{run.folder} is not finished: {run.missing} of its tasks are missing")
    dropped = ", ".join(f"{count} {name}" for name, count in card.dropped_turns.items() if count) or "none"
    put(f"turns left out: {dropped}. Everything is in {out}.")


def _student(
    config: Config, runs: Sequence[Path], chat_format: str, tokenizer: str, *, rerender: bool
) -> ChatFormat | None:
    """Return the format for rendering again, of the environment that the rows come from, that of the runs."""
    if not rerender:
        if chat_format or tokenizer:
            raise UsageError("--format and --tokenizer say how to render again: give --rerender too")
        return None
    if not tokenizer:
        raise UsageError("--rerender needs --tokenizer, the path of the student's tokenizer")
    policy = msgspec.structs.replace(config.policy, format=chat_format or config.policy.format)
    env = run_config(runs[0])[0].env
    return format_at(tokenizer, msgspec.structs.replace(config, policy=policy, env=env))


SHOWN = ("loss", "nll", "valid", "tool_agreement", "action_agreement", "curated_recall")
"""The values shown for steps, and for validations."""


def train(
    dataset: Annotated[Path, Argument(help="A folder made by `harness1 sft build`.", metavar="ROWS")],
    model: Annotated[str, Option(help="A model's folder or name, e.g. smollm2-135m.", metavar="PATH")],
    out: Annotated[Path, Option(help="Folder for the checkpoint.", metavar="CHECKPOINT")],
    trainer: Annotated[Literal["own", "trl"], Option(help="The trainer of harness1 (own), or TRL's.")] = "own",
    packing: Annotated[bool, Option("--packing", help="With TRL: several rows in one sequence.")] = False,
    engine: options.EngineOption = "",
    tensorboard: options.Tensorboard = False,
    wandb: options.Wandb = "",
    config: options.ConfigFile = None,
    overrides: options.Overrides = None,
    force: options.Force = False,
    as_json: options.Json = False,
) -> None:
    """Train a model on a dataset's rows; a stopped training run resumes from its last saved state.

    On several GPUs: torchrun --nproc-per-node 8 -m harness1 sft train ...

    Example: harness1 sft train rows --model smollm2-135m --out student --config sft/small"""
    with lead_group(joins=trainer == "own") as group:
        if group is None:
            return
        settings = resolve(config, overrides)
        if packing and trainer == "own":
            raise UsageError("--packing needs --trainer trl")
        if engine and trainer == "trl":
            raise UsageError("--engine trains in place of --trainer trl: give one of them")
        device = settings.machine.device or choose_device()
        device = f"cuda:{group.local}" if device == "cuda" and count_launched().size > 1 else device
        base = resolve_model(model)
        trackers = Trackers(tensorboard, wandb)
        work = FineTuning(dataset, base, out, settings, trainer, device, packing, trackers)
        if engine:
            service = open_service(engine, base, settings, group.size)
            work = replace(work, open_engine=partial(open_service_engine, service, settings), sampler=service.sampler)
        if force and count_launched().size > group.size:
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
