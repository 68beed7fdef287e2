"""The protocol of what runs a language model: token ids in, sampled token ids and their log probabilities out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Protocol

from harness1.records import Record, Sampling

FinishReason = Literal["stop", "length"]


class Grammar(Record):
    """What an output may be: a grammar in the EBNF of `xgrammar`, with the digest that names it in a record."""

    ebnf: str
    digest: str


class SampledOutput(Record):
    """One sampled output.

    `output_logprobs` are natural logarithms, one for each id, of the distribution that was sampled from: after
    temperature, `top_p`, `top_k` and grammar (at temperature 0 that distribution is one token, and each is 0). With
    `finish_reason` `stop` the last id is the stop token; with `length` the output was cut. The versions are those of
    the weights at the first and at the last token.
    """

    output_ids: tuple[int, ...]
    output_logprobs: tuple[float, ...]
    finish_reason: FinishReason
    version_start: int = 0
    version_end: int = 0


class Backend(Protocol):
    """A language model at work. Implementations are safe to share between concurrent episodes of one process."""

    @property
    def hash(self) -> str:
        """Names the weights that it was opened with, and whatever else decides the distribution."""
        ...

    @property
    def version(self) -> int:
        """The version of the weights in use: 0 at first."""
        ...

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, grammar: Grammar | None = None
    ) -> SampledOutput:
        """Sample one output. Cancelling it gives its place up.

        Raises:
            InfrastructureFault: the model failed, or answered without ids or log probabilities.
            UsageError: prompt and output do not fit the model's window, or it cannot sample in this way.
        """
        ...

    async def load_weights(self, folder: Path, version: int) -> None:
        """Go on with other weights of the same architecture; calls in flight end with the old ones.

        Raises:
            UsageError: the folder does not hold them.
            InfrastructureFault: the model failed to load them.
        """
        ...
