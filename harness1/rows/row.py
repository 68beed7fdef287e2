"""Training rows: sequences of tokens, some of them trained, made from recorded calls without re-tokenising."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import isfinite
from typing import Any

from harness1.records import Record
from harness1.rows.calls import CapturedCall


class TrainRow(Record):
    """One sequence for a trainer; all tuples of numbers have one entry per token.

    Raises:
        ValueError: lengths differ, the mask has values other than 0 and 1, a number is not finite, or a token that is
            not trained has a log probability.
    """

    token_ids: tuple[int, ...]
    loss_mask: tuple[int, ...]
    """1: the policy sampled this token, and it is trained."""
    rollout_logprobs: tuple[float, ...] | None = None
    """Natural logarithms as recorded when sampling, 0.0 where the mask is 0; None if some are unknown."""
    advantages: tuple[float, ...] | None = None
    episode_id: str = ""
    group_id: str | None = None
    versions: tuple[int, int] = (0, 0)
    """The smallest and the largest version of the weights that sampled."""
    call_ids: tuple[str, ...] = ()
    """The calls whose outputs are trained here, in order."""
    metadata: dict[str, Any] = {}
    """The origin of the row; no algorithm reads it."""
    token_weight: float = 1.0
    """Weight of each trained token in a policy gradient's mean: 1, or 1 / trained tokens of its episode or group."""

    def __post_init__(self) -> None:
        for name in ("loss_mask", "rollout_logprobs", "advantages"):
            numbers = getattr(self, name)
            if numbers is None:
                continue
            if len(numbers) != len(self.token_ids):
                raise ValueError(f"{len(numbers)} {name} for {len(self.token_ids)} tokens")
            if not all(map(isfinite, numbers)):
                raise ValueError(f"{name} has a number that is not finite")
        if not {0, 1}.issuperset(self.loss_mask):
            raise ValueError("loss_mask has values other than 0 and 1")
        if any(known and not mask for known, mask in zip(self.rollout_logprobs or (), self.loss_mask, strict=False)):
            raise ValueError("rollout_logprobs has a value for a token that is not trained")


def per_request(calls: Iterable[CapturedCall], group_id: str | None = None) -> tuple[TrainRow, ...]:
    """Return one row for each call that has an output, in the given order."""
    return tuple(chained([call], group_id) for call in calls if call.output_ids)


def chained(chain: Sequence[CapturedCall], group_id: str | None = None) -> TrainRow:
    """Return the row of a chain of calls, each continuing the prompt and output of the one before: the last prompt and
    output, trained wherever one of them sampled.

    Raises:
        AssertionError, ValueError: the calls are not such a chain.
    """
    last = chain[-1]
    token_ids = last.prompt_ids + last.output_ids
    mask, logprobs = [0] * len(token_ids), [0.0] * len(token_ids)
    for call in chain:
        begin, end = len(call.prompt_ids), len(call.prompt_ids) + len(call.output_ids)
        mask[begin:end] = [1] * len(call.output_ids)
        logprobs[begin:end] = call.output_logprobs or [0.0] * len(call.output_ids)
    row = TrainRow(
        token_ids=token_ids,
        loss_mask=tuple(mask),
        rollout_logprobs=None if any(call.output_logprobs is None for call in chain) else tuple(logprobs),
        episode_id=last.session_id,
        group_id=group_id,
        versions=(min(call.version_start for call in chain), max(call.version_end for call in chain)),
        call_ids=tuple(call.call_id for call in chain),
    )
    assert_contiguity(row, chain)
    return row


def assert_contiguity(row: TrainRow, calls: Iterable[CapturedCall]) -> None:
    """Check that the row before each call's output is exactly the call's prompt, that its output (and its log
    probabilities) follow, and that nothing else is trained.

    Args:
        calls: at least those that the row names.

    Raises:
        AssertionError: the row is different.
    """
    known, done = {call.call_id: call for call in calls}, 0
    _demand(known.keys() >= set(row.call_ids), "the row names calls that were not given")
    for call_id in row.call_ids:
        call = known[call_id]
        begin, end = len(call.prompt_ids), len(call.prompt_ids) + len(call.output_ids)
        _demand(done <= begin, f"call {call_id} begins within the output of the call before")
        _demand(row.token_ids[:begin] == call.prompt_ids, f"call {call_id} has another prompt than the row")
        _demand(row.token_ids[begin:end] == call.output_ids, f"the output of call {call_id} is not in the row")
        _demand(not any(row.loss_mask[done:begin]), f"the row trains tokens before call {call_id} that no call sampled")
        _demand(all(row.loss_mask[begin:end]), f"the row does not train all of call {call_id}")
        if row.rollout_logprobs is not None:
            equal = row.rollout_logprobs[begin:end] == call.output_logprobs
            _demand(equal, f"the log probabilities of call {call_id} are not in the row")
        done = end
    _demand(done == len(row.token_ids), "the row continues after its last call")


def _demand(holds: bool, otherwise: str) -> None:
    """Assert a condition, even under `python -O`."""
    if not holds:
        raise AssertionError(otherwise)
