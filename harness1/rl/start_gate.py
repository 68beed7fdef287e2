"""What must hold before the first step: the trainer computes the probabilities that were sampled by."""

from __future__ import annotations

from collections.abc import Sequence

from harness1.errors import UsageError
from harness1.rl.logprobs import BOUND, MEAN_K3_BOUND, LogprobReport, report_of
from harness1.rl.reference import row_logprobs
from harness1.rows.row import TrainRow
from harness1.train.trainer import Trainer


def check_start(trainer: Trainer, rows: Sequence[TrainRow]) -> LogprobReport:
    """Compare the log probabilities recorded in rows with those of the model that is to be trained on them, which is
    still the one that sampled.

    Raises:
        UsageError: they differ by more than computing in another order explains.
    """
    train = trainer.train
    replayed = row_logprobs(trainer.model, rows, train)
    recorded = [
        known for row in rows for known, mask in zip(row.rollout_logprobs or (), row.loss_mask, strict=False) if mask
    ]
    report = report_of([again for each in replayed for again in each], recorded)
    if not report.passes(train.dtype):
        raise UsageError(
            "the rollouts are not of the model that is trained: log probabilities differ by up to"
            f" {report.max_difference:.2g} (mean k3 {report.mean_k3:.2g}) over {report.tokens} tokens, where"
            f" {BOUND:g} in float32 and a mean k3 of {MEAN_K3_BOUND:g} in bfloat16 are allowed; is"
            f" policy.dtype that of training, {train.dtype}?"
        )
    return report
