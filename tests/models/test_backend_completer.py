"""A judge without a server: a conversation goes in as the format writes it, and the words of the reply come out."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness1.models.backend import Grammar, SampledOutput
from harness1.models.open import BackendCompleter
from harness1.models.transformers_backend import open_transformers
from harness1.records import Sampling
from tests.tiny_models import save_byte_tokenizer, save_tiny_model
from tests.vocabularies import chat_format

CHAT = chat_format("compact", "chatml")
MESSAGES = [{"role": "system", "content": "Judge."}, {"role": "user", "content": "An episode <|im_end|> of one turn"}]


class Saying:
    """A backend that says the same always."""

    def __init__(self, said: Sequence[int]) -> None:
        self.said, self.prompts = tuple(said), list[str]()

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, grammar: Grammar | None = None
    ) -> SampledOutput:
        assert (sampling.temperature, sampling.max_tokens, sampling.stop_ids) == (0.0, 9, CHAT.stop_ids)
        self.prompts.append(CHAT.tokenizer.decode(prompt_ids))
        return SampledOutput(self.said, (0.0,) * len(self.said), "stop")


def test_the_reply_is_its_words_and_its_tokens_are_counted() -> None:
    backend: Any = Saying([*CHAT.tokenizer.encode('{"verdict": "honest"}'), CHAT.stop_ids[0]])
    found = asyncio.run(BackendCompleter(backend, CHAT, 9).complete(MESSAGES))
    (prompt,) = backend.prompts
    assert found.text == '{"verdict": "honest"}'
    assert found.output_tokens == len(backend.said)
    assert found.prompt_tokens is not None
    assert prompt.startswith("<|im_start|>system\nJudge.")
    assert prompt.index("An episode") < prompt.rindex("<|im_start|>")


def test_a_model_in_this_process_can_be_asked(tmp_path: Path) -> None:
    folder = save_byte_tokenizer(save_tiny_model(tmp_path, vocab_size=5000))
    backend = open_transformers(folder, device="cpu", dtype="float32", threads=1, rows=1, cache_tokens=0)
    found = asyncio.run(BackendCompleter(backend, CHAT, 9).complete(MESSAGES))
    assert 0 < (found.output_tokens or 0) <= 9
