"""What a model's server says of itself: its program, the tokens that it reads, and how its tokenizer counts."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import msgspec

from harness1.env.pieces import PerToken, kinds_of
from harness1.http.client import HttpFault
from harness1.http.model_endpoint import ModelEndpoint
from harness1.records import Record

PATIENCE_S, LOADING_S = 5.0, 120.0
OLLAMA_WINDOW = 4096  # tokens that Ollama reads of a prompt by default; it leaves out the rest in silence
MARGIN = 0.95
"""Share of the measured characters of a token that are counted on: names and numbers take more tokens than prose."""
SAMPLES = (
    'The Amazing Race Asia 4 is a reality show, hosted by Allan Wu (born 1972), that began on 7 October 2010. {"query":'
    ' "hosts of the show"} Search the corpus, and curate the documents that answer the question, the best of them'
    " first. D12.3 reads on. Its author, the daughter of a farmer from Michigan, wrote two novels.",
    "В 1837 году Пушкин был ранен. Ο Όμηρος έγραψε την Οδύσσεια. Élève à Orléans, né près de Besançon; Müller, Dvořák.",
    "王羲之是東晉時期的書法家，出生於瑯琊臨沂。この作品は一九六四年に発表された。세종은 한글을 만들었다. हिन्दी.",
)
"""Texts of the kinds of characters that `kinds_of` tells apart."""


Program = Literal["", "llama.cpp", "ollama", "vllm", "sglang"]
_PROGRAMS: Mapping[str, Program] = {"llamacpp": "llama.cpp", "library": "ollama", "vllm": "vllm", "sglang": "sglang"}
"""Programs by what they write as `owned_by` of a model."""
ENLARGING = {
    "llama.cpp": "-c", "ollama": "OLLAMA_CONTEXT_LENGTH", "vllm": "--max-model-len", "sglang": "--context-length",
}  # fmt: skip


class ServedModel(Record):
    """What is known of a model behind a server. `window`: tokens of prompt and output together; None: not told.
    `per_token`: characters of a token; None: it has no tokenizer to ask."""

    program: Program = ""
    window: int | None = None
    per_token: PerToken | None = None

    @property
    def enlarging(self) -> str:
        """How the server is made to read more."""
        return ENLARGING.get(self.program, "a larger context")


class _Listed(msgspec.Struct):
    id: str = ""
    owned_by: Any = None
    max_model_len: Any = None


class _Models(msgspec.Struct):
    data: list[_Listed]


def describe_served(endpoint: ModelEndpoint, root: ModelEndpoint, model: str) -> ServedModel:
    """Ask a server of itself, whose address goes up to and including `/v1`, or not (`root`); nothing is known of one
    that does not answer, or in another way."""
    with ThreadPoolExecutor(1) as thread:  # the caller may be on an event loop
        return thread.submit(asyncio.run, _describe(endpoint, root, model)).result()


async def _describe(endpoint: ModelEndpoint, root: ModelEndpoint, model: str) -> ServedModel:
    listed = await endpoint.client.ask("/models", None, _Models, PATIENCE_S)
    if isinstance(listed, HttpFault) or not listed.data:
        return ServedModel()
    entry = next((each for each in listed.data if each.id in (model, f"{model}:latest")), listed.data[0])
    program: Program = _PROGRAMS.get(str(entry.owned_by), "")
    # Ollama names the owners of models that are not of its library: hf.co/OWNER/MODEL:TAG.
    if not program and re.search(rf"(^|/){re.escape(str(entry.owned_by))}/.+:", entry.id):
        program = "ollama" if isinstance((await _ask(root, "/api/ps")).get("models"), list) else ""
    window: Any = entry.max_model_len
    if program == "llama.cpp":
        props = await _ask(root, "/props")
        settings = props.get("default_generation_settings")
        window = settings.get("n_ctx") if isinstance(settings, dict) else None
    elif program == "ollama":
        window = await _ollama_window(root, model)
    per_token = await _measure(root, program, model) if program in ("llama.cpp", "vllm", "sglang") else None
    return ServedModel(program, window if isinstance(window, int) and window > 0 else None, per_token)


async def _ask(
    root: ModelEndpoint, path: str, body: dict[str, Any] | None = None, patience_s: float = PATIENCE_S
) -> dict[str, Any]:
    sent = None if body is None else msgspec.json.encode(body)
    found = await root.client.ask(path, sent, dict[str, Any], patience_s)
    return {} if isinstance(found, HttpFault) else found


async def _ollama_window(root: ModelEndpoint, model: str) -> int:
    """Return what a model reads once it is loaded, as it would be anyway: before, only the server knows what its
    environment and its memory come to."""
    await _ask(root, "/api/generate", {"model": model}, LOADING_S)
    running = (await _ask(root, "/api/ps")).get("models")
    for each in running if isinstance(running, list) else ():
        names = (each.get("name"), each.get("model")) if isinstance(each, dict) else ()
        if {model, f"{model}:latest"}.intersection(map(str, names)):
            length = each.get("context_length")
            return length if isinstance(length, int) and length > 0 else OLLAMA_WINDOW
    return OLLAMA_WINDOW


async def _measure(root: ModelEndpoint, program: Program, model: str) -> PerToken | None:
    """Return the characters of a token by kind: of each sample, what the kinds before it do not explain."""
    found: list[float] = []
    for place, sample in enumerate(SAMPLES):
        text = {"content": sample} if program == "llama.cpp" else {"prompt": sample, "add_special_tokens": False}
        tokens = (await _ask(root, "/tokenize", {"model": model} | text)).get("tokens")
        if not isinstance(tokens, list) or not tokens:
            return None
        kinds = kinds_of(sample)
        left = len(tokens) - sum(size / each for size, each in zip(kinds, found, strict=False))
        found.append(kinds[place] / max(left, kinds[place] / 8))
    first, second, third = (round(max(each * MARGIN, 0.1), 2) for each in found)
    return first, second, third
