"""What an engine says that it sampled, checked before it becomes part of a record."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

from harness1.errors import InfrastructureFault
from harness1.models.backend import FinishReason, SampledOutput
from harness1.records import Record, Sampling

LEAST = -9000.0
"""No sampled token is as unlikely; vLLM's server writes -9999 for minus infinity."""
IDS = 2**31
"""Records store ids in 32 bits, signed."""
ROUNDING = 1e-4
"""A log probability may exceed 0 by this much."""


class EngineOutput(Record):
    """One output as an engine gave it; what is None was not given."""

    ids: Sequence[int] | None
    logprobs: Sequence[float | None] | None
    finish: str | None
    stopped_by: int | str | None = None
    """With `finish` `stop`: the token or text that ended the output."""
    version: int | None = None
    """Of the weights, where the engine says it."""


def checked(sampled: EngineOutput, sampling: Sampling, version: int) -> SampledOutput:
    """The output as a `SampledOutput`, of the version that the engine says, or else of this one.

    Raises:
        InfrastructureFault: it is no output of this sampling, or is not whole. It has ids and a finite log probability
            for each; a stop token at its end where it stopped, and nowhere else; no more tokens than were asked for.
    """
    ids, logprobs = tuple(sampled.ids or ()), tuple(sampled.logprobs or ())
    wrong = _wrong_ids(ids, sampled, sampling) or _wrong_logprobs(logprobs, len(ids))
    if wrong:
        raise InfrastructureFault(f"the model's server: {wrong}")
    values = tuple(min(cast(float, value), 0.0) for value in logprobs)
    # At temperature 0 the distribution is one token; engines give the probability that it had before.
    values = values if sampling.temperature else (0.0,) * len(ids)
    version = version if sampled.version is None else sampled.version
    return SampledOutput(ids, values, cast(FinishReason, sampled.finish), version, version)


def _wrong_ids(ids: Sequence[int], sampled: EngineOutput, sampling: Sampling) -> str | None:
    if not ids:
        return "an answer without token ids"
    if len(ids) > sampling.max_tokens:
        return f"{len(ids)} tokens where {sampling.max_tokens} were asked for"
    if min(ids) < 0 or max(ids) >= IDS or set(ids[:-1]) & set(sampling.stop_ids):
        return "token ids that go on behind a stop token, or are none"
    if sampled.finish not in ("stop", "length"):
        return f"an output that ended by {sampled.finish!r}"
    if sampled.finish == "stop" and sampled.stopped_by != ids[-1]:
        return f"an output that stopped by {sampled.stopped_by!r} and whose last token is {ids[-1]}"
    return None


def _wrong_logprobs(logprobs: Sequence[float | None], tokens: int) -> str | None:
    if len(logprobs) != tokens:
        return f"{len(logprobs)} log probabilities for {tokens} tokens"
    if not all(value is not None and math.isfinite(value) and LEAST < value <= ROUNDING for value in logprobs):
        return "log probabilities that are none"
    return None
