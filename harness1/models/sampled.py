"""Validation of an engine's sampled output before it becomes part of a record."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

from harness1.errors import InfrastructureFault
from harness1.models.backend import FinishReason, SampledOutput
from harness1.records import Record, Sampling

LEAST = -9000.0
"""Lower bound of a credible log probability; vLLM's server writes -9999 for minus infinity."""
IDS = 2**31
"""Limit of token ids: records store them as signed 32-bit integers."""
ROUNDING = 1e-4
"""Most by which a log probability may exceed 0."""


class EngineOutput(Record):
    """One output as an engine gave it; None: not given."""

    ids: Sequence[int] | None
    logprobs: Sequence[float | None] | None
    finish: str | None
    stopped_by: int | str | None = None
    """With `finish` `stop`: the token or text that ended the output."""
    version: int | None = None
    """Version of the weights, if the engine reports it."""


def checked(sampled: EngineOutput, sampling: Sampling, version: int) -> SampledOutput:
    """Validate an output. Its version is the one that the engine reports, or else `version`.

    Raises:
        InfrastructureFault: it is incomplete or does not match the sampling: it needs ids and a finite log probability
            for each, a stop token at its end if it stopped and nowhere else, and no more tokens than requested.
    """
    ids, logprobs = tuple(sampled.ids or ()), tuple(sampled.logprobs or ())
    wrong = _wrong_ids(ids, sampled, sampling) or _wrong_logprobs(logprobs, len(ids))
    if wrong:
        raise InfrastructureFault(f"the model's server: {wrong}")
    values = tuple(min(cast(float, value), 0.0) for value in logprobs)
    # At temperature 0 the distribution is one token; engines report its probability without temperature.
    values = values if sampling.temperature else (0.0,) * len(ids)
    version = version if sampled.version is None else sampled.version
    return SampledOutput(ids, values, cast(FinishReason, sampled.finish), version, version)


def _wrong_ids(ids: Sequence[int], sampled: EngineOutput, sampling: Sampling) -> str | None:
    if not ids:
        return "an answer without token ids"
    if len(ids) > sampling.max_tokens:
        return f"{len(ids)} tokens where {sampling.max_tokens} were requested"
    if min(ids) < 0 or max(ids) >= IDS or set(ids[:-1]) & set(sampling.stop_ids):
        return "invalid token ids, or token ids after a stop token"
    if sampled.finish not in ("stop", "length"):
        return f"an output that ended by {sampled.finish!r}"
    if sampled.finish == "stop" and sampled.stopped_by != ids[-1]:
        return f"an output that was stopped by {sampled.stopped_by!r} but ends with token {ids[-1]}"
    return None


def _wrong_logprobs(logprobs: Sequence[float | None], tokens: int) -> str | None:
    if len(logprobs) != tokens:
        return f"{len(logprobs)} log probabilities for {tokens} tokens"
    if not all(value is not None and math.isfinite(value) and LEAST < value <= ROUNDING for value in logprobs):
        return "invalid log probabilities"
    return None
