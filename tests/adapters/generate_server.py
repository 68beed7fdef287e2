"""vLLM's `/inference/v1/generate` with a script as its model: token ids in, token ids and log probabilities out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.adapters.chat_server import answering_json, next_call
from tests.vocabularies import tokenizer

THOUGHT = "<think>", "\nNext.\n", "</think>", "\n\n"


@dataclass(frozen=True)
class Sampled:
    """One call: what was asked, and what was sampled."""

    prompt: list[int]
    output: list[int]
    logprobs: list[float]


@dataclass
class GenerateServer:
    """The script and its calls. Its ids are those of single characters: of the same text, a tokenizer makes others."""

    searches: int = 1
    calls: list[Sampled] = field(default_factory=list)

    def answer(self, path: str, asked: dict[str, Any]) -> dict[str, Any]:
        assert path == "/inference/v1/generate"
        assert asked["sampling_params"]["logprobs"] == 1
        found = self._sample(asked["token_ids"])
        self.calls.append(found)
        content = [
            {"token": f"token_id:{token}", "logprob": logprob}
            for token, logprob in zip(found.output, found.logprobs, strict=True)
        ]
        choice = {"token_ids": found.output, "finish_reason": "stop", "logprobs": {"content": content}}
        return {"request_id": str(len(self.calls)), "choices": [choice]}

    def _sample(self, prompt: list[int]) -> Sampled:
        spoken = tokenizer("qwen")
        name, arguments = next_call(spoken.decode(prompt), self.searches)
        call = json.dumps({"name": name, "arguments": arguments})
        written = *THOUGHT, "<tool_call>", f"\n{call}\n", "</tool_call>", "<|im_end|>"
        output = [token for part in written for token in self._ids(part)]
        return Sampled(prompt, output, [-(len(prompt) + place) / 1e4 for place in range(len(output))])

    def _ids(self, part: str) -> list[int]:
        spoken = tokenizer("qwen")
        if part in spoken.control:
            return [spoken.control[part]]
        return [token for character in part for token in spoken.encode(character)]


@contextmanager
def generate_server(searches: int = 1) -> Iterator[tuple[GenerateServer, str]]:
    """Yield a server with its address, with /v1."""
    server = GenerateServer(searches)
    with answering_json(server.answer) as address:
        yield server, address
