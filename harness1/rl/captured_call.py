"""One call of a language model as a recorder saw it pass: what training rows are built of."""

from __future__ import annotations

from math import isfinite

from harness1.records import Record


class CapturedCall(Record):
    """A prompt and the output sampled on it, as token ids that no tokenizer has touched since.

    Raises:
        ValueError: the prompt is empty, or the log probabilities are not finite or not one for each output id.
    """

    call_id: str
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...] = ()
    output_logprobs: tuple[float, ...] | None = None
    """Of the distribution that was sampled from; None where they are not known."""
    version_start: int = 0
    """The version of the weights at the first token, and below at the last."""
    version_end: int = 0
    session_id: str = ""
    """The episode."""
    agent_id: str = ""
    """Which of the agents of a session called, where it says so."""
    finish_reason: str = ""
    attempt: int = 0
    """How often the same request had been sent before, where the client says so."""

    def __post_init__(self) -> None:
        if not self.prompt_ids:
            raise ValueError(f"call {self.call_id} has no prompt")
        known = self.output_logprobs
        if known is not None and (len(known) != len(self.output_ids) or not all(map(isfinite, known))):
            raise ValueError(f"call {self.call_id} has not one finite log probability for each output id")
