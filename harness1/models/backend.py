"""The backend protocol: token ids in, sampled token ids and their log probabilities out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, cast, runtime_checkable

from harness1.errors import InfrastructureFault, UsageError
from harness1.records import Record, Sampling

if TYPE_CHECKING:
    from torch import Tensor


FinishReason = Literal["stop", "length"]


class Grammar(Record):
    """A restriction of outputs: a grammar in the EBNF of `xgrammar`, and the digest that identifies it in records."""

    ebnf: str
    digest: str


class SampledOutput(Record):
    """One sampled output. Its log probabilities, one for each id, are of the distribution that was sampled from: after
    temperature, `top_p`, `top_k` and grammar (all 0 at temperature 0). With `finish_reason` `stop` the last id is the
    stop token; with `length` the output was cut. The versions are those of the weights at the first and last token."""

    output_ids: tuple[int, ...]
    output_logprobs: tuple[float, ...]
    finish_reason: FinishReason
    version_start: int = 0
    version_end: int = 0


class Backend(Protocol):
    """A running language model. Implementations are safe to share between concurrent episodes of one process."""

    @property
    def hash(self) -> str:
        """A hash of the weights it was opened with and of everything else that decides the distribution."""

    @property
    def version(self) -> int:
        """The version of the weights in use, initially 0."""

    async def generate(self, ids: Sequence[int], sampling: Sampling, grammar: Grammar | None = None) -> SampledOutput:
        """Sample one output; cancelling the call frees its place. Raise InfrastructureFault if the model failed;
        UsageError if prompt and output exceed its window, or it does not support this sampling."""


@runtime_checkable
class WeightLoader(Protocol):
    """A backend that takes other weights from a folder."""

    async def load_weights(self, folder: Path, version: int) -> None:
        """Switch to whole weights of the same architecture, or to adapters on the opened base. Calls in flight end with
        the old ones. Raise UsageError if the folder holds no such weights, InfrastructureFault if loading failed."""


@runtime_checkable
class Sleeper(Protocol):
    """A backend that can lend the memory of its devices to a trainer."""

    def asleep(self) -> AbstractAsyncContextManager[None]:
        """Free the memory of the devices within the context. Calls in flight end first, and calls that come meanwhile
        wait; weights must not be loaded within. Raise UsageError if the backend was not started for this."""


LEAST = -9000.0  # lower bound of a credible log probability; vLLM's server writes -9999 for minus infinity
IDS = 2**31  # limit of token ids: records store them as signed 32-bit integers
ROUNDING = 1e-4  # most by which a log probability may exceed 0


class EngineOutput(Record):
    """One output as an engine gave it; None: not given."""

    ids: Sequence[int] | None
    logprobs: Sequence[float | None] | None
    finish: str | None
    stopped_by: int | str | None = None  # with `finish` `stop`: the token or text that ended the output
    version: int | None = None  # of the weights, if the engine reports it


def check_output(sampled: EngineOutput, sampling: Sampling, version: int) -> SampledOutput:
    """Validate an output. Raise InfrastructureFault unless its ids have log probabilities and end as asked."""
    ids, logprobs = tuple(sampled.ids or ()), tuple(sampled.logprobs or ())
    if wrong := _find_fault(ids, logprobs, sampled, sampling):
        raise InfrastructureFault(f"the model's server: {wrong}")
    values = tuple(min(cast(float, value), 0.0) for value in logprobs)
    # At temperature 0 the distribution is one token; engines report its probability without temperature.
    values = values if sampling.temperature else (0.0,) * len(ids)
    version = version if sampled.version is None else sampled.version
    return SampledOutput(ids, values, cast(FinishReason, sampled.finish), version, version)


def _find_fault(
    ids: Sequence[int], logprobs: Sequence[float | None], sampled: EngineOutput, sampling: Sampling
) -> str | None:
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
    if len(logprobs) != len(ids):
        return f"{len(logprobs)} log probabilities for {len(ids)} tokens"
    if not all(value is not None and math.isfinite(value) and LEAST < value <= ROUNDING for value in logprobs):
        return "invalid log probabilities"
    return None


def check_sampling(sampling: Sampling) -> None:
    """Raise UsageError for sampling parameters out of range."""
    for name, fits, range_ in (
        ("temperature", sampling.temperature >= 0, "0 or more"),
        ("top_p", 0 < sampling.top_p <= 1, "above 0 and at most 1"),
        ("top_k", sampling.top_k >= 0, "0 (no limit) or more"),
        ("max_tokens", sampling.max_tokens >= 1, "at least 1"),
    ):
        if not fits:
            raise UsageError(f"{name} must be {range_}, not {getattr(sampling, name)}")


def process_logprobs(logits: Tensor, sampling: Sampling, mask: Tensor | None = None) -> Tensor:
    """Return the log probabilities that `sampling` draws from: grammar mask, temperature, top_k, top_p, in this order,
    the rest renormalised after each cut. At temperature 0 the most likely token has 0 and all others -inf. Logits are
    [..., vocabulary] of any floating type, `mask` is bool; the result is float32 and differentiable."""
    import torch

    logits = logits.float()
    if mask is not None:
        logits = logits.masked_fill(~mask, -torch.inf)
    if sampling.temperature == 0:
        return torch.full_like(logits, -torch.inf).scatter(-1, logits.argmax(-1, keepdim=True), 0.0)
    logits = logits / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        least = logits.topk(sampling.top_k).values[..., -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if sampling.top_p < 1:
        # The likeliest tokens whose probabilities add up to top_p, the last included (Holtzman et al., ICLR 2020).
        likely, order = logits.softmax(-1).sort(dim=-1, descending=True, stable=True)
        kept = likely.cumsum(-1) - likely < sampling.top_p
        kept[..., 0] = True
        logits = logits.masked_fill(~torch.zeros_like(kept).scatter(-1, order, kept), -torch.inf)
    return logits.log_softmax(-1)


def draw(logprobs: Tensor, uniforms: Tensor) -> Tensor:
    """Draw one id for each row of `logprobs`, [rows, vocabulary], by inversion; `uniforms`, [rows], are in [0, 1)."""
    import torch

    cumulative = logprobs.double().exp().cumsum(-1)
    aims = uniforms.unsqueeze(-1) * cumulative[:, -1:]
    return torch.searchsorted(cumulative, aims, right=True).squeeze(-1).clamp(max=logprobs.shape[-1] - 1)
