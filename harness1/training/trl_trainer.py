"""Training on rows with TRL's `SFTTrainer`: packing, and several GPUs with `accelerate launch`."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness1.config import Train
from harness1.errors import UsageError, optional
from harness1.model_folder import base_folder, holds_adapters, no_progress_bars
from harness1.models.adapters import Adapters, write_adapters
from harness1.rows import TrainRow
from harness1.training.saving import copy_beside_weights
from harness1.training.trainable import check_form, load_trainable
from harness1.training.trainer import BETAS, CLIP, DECAY, EPSILON, rate_at

if TYPE_CHECKING:
    from datasets import Dataset
    from trl.trainer.sft_config import SFTConfig

STATES = "states"  # folder within a checkpoint that holds the states to resume from until training ends
NO_LOSS = -100  # label of a token that is not trained
OnLog = Callable[[dict[str, float]], None]


def train_with_trl(
    rows: Sequence[TrainRow],
    held_out: Sequence[TrainRow],
    model_folder: Path,
    out: Path,
    settings: Train,
    on_log: OnLog,
    *,
    packing: bool = False,
    cpu: bool = False,
) -> Path:
    """Train a model on rows, and write the weights of the last step, or only the adapters, to a folder; with them the
    tokenizer. Training resumes from the state of an unfinished call in `out`. The loss of a step is `-sum(log p) /
    count` over all trained tokens of its rows, on all processes, as with our trainer. Nothing is tokenised, truncated
    or downloaded. `on_log` gets the values of each step and evaluation; `eval_loss` is the mean over the first
    `watch.rows` of `held_out` of their mean losses per token. With `packing`, several short rows share a sequence of at
    most `micro_tokens` (best fit decreasing), and a step has `batch_rows` of them on average; they do not attend to
    each other. Under `accelerate launch`, every process calls this with equal arguments. Raise UsageError if there are
    no rows, rows have weights, or TRL lacks a requested feature; MissingExtra without it."""
    with optional("trl"):
        import accelerate  # noqa: F401
        import datasets  # noqa: F401
        import peft
        import trl  # noqa: F401
    _refuse(rows, settings)
    validation = held_out[: settings.watch.rows]
    config = _config(settings, out / STATES, validated=bool(validation), packing=packing, cpu=cpu)
    data, passes = _steps(rows, settings, config.world_size, packing)
    config.per_device_train_batch_size, config.gradient_accumulation_steps = passes
    model = _model(model_folder, settings)
    described = deepcopy((model.config, model.generation_config))  # TRL writes the tokenizer's special tokens there
    evaluated = _dataset(validation) if validation else None
    given = {"train_dataset": data, "eval_dataset": evaluated}
    trainer = _trainer(model, model_folder, config, settings, on_log, **given)
    with no_progress_bars():
        step = find_saved_step(out)
        trainer.train(resume_from_checkpoint=str(out / STATES / f"checkpoint-{step}") if step else None)
        if evaluated is not None and config.eval_strategy == "no":
            trainer.evaluate()
        trainer.accelerator.wait_for_everyone()
        if trainer.is_world_process_zero():
            copy_beside_weights(model_folder, out)
            if settings.lora.rank:
                lora = trainer.model.peft_config[trainer.model.active_adapter]
                state = peft.get_peft_model_state_dict(trainer.model)
                write_adapters(out, Adapters(lora.r, float(lora.lora_alpha), state), base_folder(model_folder))
            else:
                trainer.model.config, trainer.model.generation_config = described
                trainer.model.save_pretrained(out)
            shutil.rmtree(out / STATES, ignore_errors=True)  # its files would count as part of the model
        trainer.accelerator.wait_for_everyone()
    return out


def find_saved_step(out: Path) -> int:
    """Return the step from which a call with this folder would resume; 0 for the beginning."""
    steps = [path.name.rpartition("-")[2] for path in (out / STATES).glob("checkpoint-*")]
    return max((int(step) for step in steps if step.isdecimal()), default=0)


def passes_of(batch_rows: int, longest: int, micro_tokens: int, processes: int) -> tuple[int, int]:
    """Return the rows of a forward pass, and its passes in a step of exactly `batch_rows`, of each process: the largest
    equal passes within the budget, were all as long as the longest. UsageError if rows cannot be shared."""
    share, rest = divmod(batch_rows, processes)
    if rest:
        raise UsageError(f"train.batch_rows={batch_rows} cannot be shared equally by {processes} processes")
    fitting = max(1, micro_tokens // longest)
    rows = max(size for size in range(1, min(share, fitting) + 1) if share % size == 0)
    return rows, share // rows


def _refuse(rows: Sequence[TrainRow], settings: Train) -> None:
    if not rows:
        raise UsageError("there are no rows to train on")
    watch, lora = settings.watch, settings.lora
    wanted = {
        "some rows have token weights: training on them": any(row.advantages is not None for row in rows),
        # It cannot be checked before TRL has placed the model.
        f"train.attention={settings.attention}": settings.attention not in ("auto", "eager", "sdpa"),
        "train.lora.experts": lora.experts,
        "train.lora.layers": lora.layers,
        "TRL's trainer saves the last weights: train.watch.metric": watch.metric != "nll",
    }
    if what := next((what for what, is_wanted in wanted.items() if is_wanted), ""):
        raise UsageError(f"{what} needs our own trainer, without --trainer trl")


def _config(settings: Train, states: Path, *, validated: bool, packing: bool, cpu: bool) -> SFTConfig:
    from accelerate.utils import DistributedType
    from torch.cuda import is_available
    from trl.trainer.sft_config import SFTConfig

    watch = settings.watch
    config = SFTConfig(
        output_dir=str(states),
        num_train_epochs=settings.epochs,
        max_steps=settings.max_steps or -1,
        learning_rate=settings.rate,
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        adam_epsilon=EPSILON,
        weight_decay=DECAY,
        max_grad_norm=CLIP,
        bf16=settings.dtype == "bfloat16",
        gradient_checkpointing=settings.checkpointing,
        seed=settings.seed,
        use_cpu=cpu or not is_available(),
        dataset_kwargs={"skip_prepare_dataset": True},
        max_length=None,
        packing=packing,
        eval_packing=False,
        router_aux_loss_coef=0.0,
        save_strategy="steps" if settings.save_every else "no",
        save_steps=settings.save_every or 1,
        save_total_limit=1,
        eval_strategy="steps" if validated and watch.every else "no",
        eval_steps=watch.every or None,
        per_device_eval_batch_size=1,
        prediction_loss_only=True,
        logging_steps=1,
        disable_tqdm=True,
        report_to="none",
        push_to_hub=False,
    )
    if config.n_gpu > 1:
        raise UsageError("several GPUs are visible: start it with `accelerate launch`, or set CUDA_VISIBLE_DEVICES")
    if config.distributed_state.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED):
        raise UsageError("only unsharded models can be saved: launch without FSDP and DeepSpeed")
    return config


def _model(folder: Path, settings: Train) -> Any:
    if not (settings.lora.rank and holds_adapters(folder)):
        return load_trainable(folder, settings, "cpu")
    from peft import PeftModel

    check_form(folder, settings)
    base: Any = load_trainable(base_folder(folder), settings, "cpu")
    return PeftModel.from_pretrained(base, str(folder), is_trainable=True)


def _steps(rows: Sequence[TrainRow], settings: Train, processes: int, packing: bool) -> tuple[Dataset, tuple[int, int]]:
    from datasets import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
    from trl.data_utils import pack_dataset

    data, longest = _dataset(rows), max(len(row.token_ids) for row in rows)
    if not packing:
        return data, passes_of(settings.batch_rows, longest, settings.micro_tokens, processes)
    hidden = are_progress_bars_disabled()
    disable_progress_bars()
    try:
        data = pack_dataset(data, max(longest, settings.micro_tokens), "bfd")
    finally:
        if not hidden:
            enable_progress_bars()
    share = settings.batch_rows * len(data) / len(rows) / processes
    return data, (1, max(1, round(share)))


def _dataset(rows: Sequence[TrainRow]) -> Dataset:
    from datasets import Dataset

    # Labels are the final form of a mask in TRL: neither packing nor its collator changes them.
    labels = [[each if on else NO_LOSS for each, on in zip(row.token_ids, row.loss_mask, strict=True)] for row in rows]
    return Dataset.from_dict({"input_ids": [row.token_ids for row in rows], "labels": labels})


def _trainer(model: Any, base: Path, config: SFTConfig, settings: Train, on_log: OnLog, **data: Dataset | None) -> Any:
    from peft import LoraConfig, PeftModel
    from transformers import AutoTokenizer, PrinterCallback, TrainerCallback
    from trl.trainer.utils import add_fused_lm_head

    class LogCallback(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
            if state.is_world_process_zero:
                numbers = {name: float(value) for name, value in (logs or {}).items() if isinstance(value, int | float)}
                on_log({**numbers, "step": float(state.global_step)})

    tokenizer = AutoTokenizer.from_pretrained(base, local_files_only=True)
    if tokenizer.pad_token is None:  # TRL needs a token to pad with
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
    form = {"r": settings.lora.rank, "lora_alpha": settings.lora.alpha}
    adapter: Any = LoraConfig
    lora = adapter(**form, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = _trainer_class(settings)(
        model,
        config,
        processing_class=tokenizer,
        peft_config=lora if settings.lora.rank and not isinstance(model, PeftModel) else None,
        callbacks=[LogCallback()],
        **data,
    )
    trainer.remove_callback(PrinterCallback)
    plain = trainer.model.get_base_model() if settings.lora.rank else trainer.model
    # TRL also multiplies the head in bfloat16; rounding logits loses more precision than all other layers do.
    add_fused_lm_head(plain, cast_lm_head_to_fp32=True, outputs=("log_probs", "entropy", "is_top1"))
    return trainer


def _trainer_class(settings: Train) -> Any:
    from torch.optim.lr_scheduler import LambdaLR
    from trl.trainer.sft_trainer import SFTTrainer

    class OurScheduleTrainer(SFTTrainer):
        """TRL's trainer with our schedule and weight decay, and without telemetry."""

        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            def share(step: int) -> float:
                return rate_at(step, num_training_steps, settings) / settings.rate

            changed: Any = optimizer or self.optimizer
            self.lr_scheduler = LambdaLR(changed, share)
            return self.lr_scheduler

        def get_decay_parameter_names(self, model: Any) -> list[str]:
            return [name for name, _ in model.named_parameters()]

        def _send_telemetry(self) -> None:
            pass

    return OurScheduleTrainer
