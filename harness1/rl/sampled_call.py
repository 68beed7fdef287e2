"""A call of a model by its tokens alone: what a replay of it, and training on it, start from."""

from __future__ import annotations

from harness1.records import Record, Sampling


class SampledCall(Record):
    """One recorded output behind its whole prompt; `version` is that of the weights that sampled it."""

    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    output_logprobs: tuple[float, ...]
    sampling: Sampling
    version: int = 0
