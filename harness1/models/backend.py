"""The backend protocol: token ids in, sampled token ids and their log probabilities out."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

from harness1.records import Record, Sampling

FinishReason = Literal["stop", "length"]


class Grammar(Record):
    """A restriction of outputs: a grammar in the EBNF of `xgrammar`, and the digest that identifies it in records."""

    ebnf: str
    digest: str


class SampledOutput(Record):
    """One sampled output.

    `output_logprobs` are natural logarithms, one for each id, of the distribution that was sampled from: after
    temperature, `top_p`, `top_k` and grammar (all 0 at temperature 0, where that distribution is a single token). With
    `finish_reason` `stop` the last id is the stop token; with `length` the output was cut. The versions are those of
    the weights at the first and at the last token.
    """

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
        ...

    @property
    def version(self) -> int:
        """The version of the weights in use, initially 0."""
        ...

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, grammar: Grammar | None = None
    ) -> SampledOutput:
        """Sample one output. Cancelling the call frees its place.

        Raises:
            InfrastructureFault: the model failed, or answered without ids or log probabilities.
            UsageError: prompt and output exceed the model's window, or it does not support this sampling.
        """
        ...

    async def load_weights(self, folder: Path, version: int) -> None:
        """Switch to other weights of the same architecture; calls in flight finish with the old ones.

        Raises:
            UsageError: the folder does not hold such weights.
            InfrastructureFault: the model failed to load them.
        """
        ...

    async def load_adapter(self, folder: Path, version: int) -> None:
        """Switch to the adapters in a folder, on the base that the model was opened with and in place of the adapters
        before them; they are not merged. Calls in flight finish with the old ones.

        Raises:
            UsageError: the folder holds no adapters, or those of another model, or the model cannot have any.
            InfrastructureFault: the model failed to load them.
        """
        ...


@runtime_checkable
class Sleeper(Protocol):
    """A backend that can lend the memory of its devices to a trainer."""

    def asleep(self) -> AbstractAsyncContextManager[None]:
        """Free the memory of the devices within the context, and take it again at its end. Calls in flight end first,
        and calls that come meanwhile wait; adapters and weights must not be loaded within.

        Raises:
            UsageError: the backend was not started for this.
            InfrastructureFault: it failed.
        """
        ...
