"""The prompts of a language model exactly as sent, decoded from the recorded token ids."""

from __future__ import annotations

from typing import Any

import msgspec

from harness1.errors import SchemaError
from harness1.models.tokenizer import Tokenizer
from harness1.records import Episode, ModelCall
from harness1.rows.calls import calls_of
from harness1.viewer.tables import Tables


class SentPrompts:
    """The model calls of one episode as JSON data. Every segment is decoded once; without a tokenizer, segments have
    names but no texts."""

    def __init__(self, episode: Episode, tables: Tables, tokenizer: Tokenizer | None) -> None:
        self._episode, self._tables, self._tokenizer = episode, tables, tokenizer
        self._outputs = {f"call/{call.call_id}": call.output_ids for call in calls_of(episode)}
        self._numbers: dict[str, int] = {}

    def attempt(self, call: ModelCall) -> dict[str, Any]:
        """Return a call: its prompt as numbers of segments, its output and its sampling parameters. Raise SchemaError
        if a segment of the prompt is missing in the episode."""
        sampling = msgspec.to_builtins(call.sampling)
        sampling.pop("stop_ids", None)
        logprobs = call.output_logprobs
        return {
            "attempt": call.attempt,
            "prompt": [self._segment(key) for key in call.prompt],
            "output": self._decoded(call.output_ids),
            "output_tokens": len(call.output_ids),
            "mean_logprob": sum(logprobs) / len(logprobs) if logprobs else None,
            "finish": call.finish_reason,
            "sampling": sampling,
            "versions": [call.policy_version_start, call.policy_version_end],
            "seconds": round(call.t_end - call.t_start, 3),
        }

    def _segment(self, key: str) -> int:
        if key not in self._numbers:
            ids = self._outputs.get(key, self._episode.segments.get(key))
            if ids is None:
                raise SchemaError(f"episode {self._episode.episode_id} lacks the prompt segment {key!r}")
            self._numbers[key] = self._tables.sent(key, self._decoded(ids), len(ids))
        return self._numbers[key]

    def _decoded(self, ids: tuple[int, ...]) -> str | None:
        return self._tokenizer.decode(ids) if self._tokenizer is not None and ids else None
