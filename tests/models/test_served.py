"""What is known of the server of a model before it is asked anything, and what follows from it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from harness1.config import Config, load_config
from harness1.env.pieces import ApproximateCounter, kinds_of
from harness1.errors import ConfigError
from harness1.models.served import OLLAMA_WINDOW, SAMPLES, ServedModel
from harness1.models.spec import ModelSpec
from harness1.policy.registry import fit_window, open_policy, served_model
from tests.serving import imitating

Pages = dict[str, Any]
LLAMA: Pages = {
    "/v1/models": {"object": "list", "data": [{"id": "qwen", "owned_by": "llamacpp", "meta": {"n_ctx_train": 32768}}]},
    "/props": {"default_generation_settings": {"params": {}, "n_ctx": 8192}, "total_slots": 1},
    "/tokenize": {"tokens": 50},
}
VLLM = {
    "/v1/models": {
        "data": [{"id": "other", "max_model_len": 1}, {"id": "m", "owned_by": "vllm", "max_model_len": 16384}]
    },
    "/tokenize": {"count": 50, "max_model_len": 16384, "tokens": 50},
}
OLLAMA = {"/v1/models": {"data": [{"id": "m", "owned_by": "library"}]}, "/api/ps": {"models": []}}
RUNNING = {"models": [{"name": "m", "model": "m", "context_length": 12000}]}
TAGGED = {"name": "m:latest", "context_length": 12000}


def hub_models(owner: str, name: str) -> Pages:
    return {"data": [{"id": name, "owned_by": owner}]}


def described(pages: Pages, model: str = "m") -> ServedModel:
    """What is known of a server with these pages; a number in place of tokens is so many."""

    def reply(method: str, path: str, body: bytes) -> tuple[int, bytes]:
        if path == "/tokenize":
            assert {"content", "prompt"} & json.loads(body).keys()
        page = pages.get(path)
        if page and isinstance(page.get("tokens"), int):
            page = page | {"tokens": [1] * page["tokens"]}
        return (404, b"{}") if page is None else (200, json.dumps(page).encode())

    with imitating(reply) as url:
        return served_model(ModelSpec.read(f"openai:{model}@{url}/v1"), Config())


@pytest.mark.service
@pytest.mark.parametrize(
    ("pages", "program", "window"),
    [
        (LLAMA, "llama.cpp", 8192),
        (VLLM, "vllm", 16384),
        (OLLAMA, "ollama", OLLAMA_WINDOW),  # whatever its model was made for
        (OLLAMA | {"/api/ps": RUNNING}, "ollama", 12000),
        (OLLAMA | {"/api/ps": {"models": [TAGGED]}}, "ollama", 12000),
        (OLLAMA | {"/api/ps": {"models": [1, {"name": "m", "context_length": "?"}]}}, "ollama", OLLAMA_WINDOW),
        (OLLAMA | {"/v1/models": hub_models("o", "hf.co/o/x:Q8_0"), "/api/ps": RUNNING}, "ollama", 12000),
        ({"/v1/models": hub_models("o", "o/x:free")}, "", None),
        ({"/v1/models": {"data": [{"id": "m", "owned_by": "system"}]}}, "", None),
        ({"/v1/models": {"data": []}}, "", None),
        ({"/v1/models": LLAMA["/v1/models"]}, "llama.cpp", None),
        ({"/v1/models": LLAMA["/v1/models"], "/props": {"default_generation_settings": [1]}}, "llama.cpp", None),
        ({"/v1/models": {"models": "?"}}, "", None),
        ({}, "", None),
    ],
)
def test_a_server_says_what_it_is_and_how_much_it_reads(pages: Pages, program: str, window: int | None) -> None:
    served = described(pages)
    assert (served.program, served.window) == (program, window)
    assert bool(served.per_token) is ("/tokenize" in pages)


@pytest.mark.service
def test_a_model_of_ollama_is_loaded_to_see_what_it_reads() -> None:
    asked: list[str] = []

    def reply(method: str, path: str, body: bytes) -> tuple[int, bytes]:
        asked.append(path)
        loaded = {"/api/generate": {"done": True}, "/api/ps": RUNNING if "/api/generate" in asked else {"models": []}}
        return 200, json.dumps((OLLAMA | loaded).get(path, {})).encode()

    with imitating(reply) as url:
        spec = ModelSpec.read(f"openai:m@{url}/v1")
        assert served_model(spec, Config()).window == 12000


@pytest.mark.service
def test_tokens_are_counted_as_the_servers_tokenizer_counts_each_kind_of_character() -> None:
    counter = ApproximateCounter(described(LLAMA).per_token)
    assert ApproximateCounter.of_hash(counter.hash).hash == counter.hash  # type: ignore[union-attr]
    for sample in SAMPLES:
        assert 50 <= counter._count(sample) <= 55
    han = "漢" * 54_000
    assert counter._count(han) > 2 * ApproximateCounter()._count(han) == 27_000
    assert ApproximateCounter.of_hash("characters/4").hash == ApproximateCounter.hash  # type: ignore[union-attr]
    for other in ("0123abc", "characters/x", "characters/1,2", "characters/0,1,1", "characters/nan,1,1"):
        assert ApproximateCounter.of_hash(other) is None
    assert kinds_of("aéж漢") == (1, 2, 1)


@pytest.mark.service
def test_a_context_that_the_server_does_not_read_is_refused_and_a_search_fits_itself() -> None:
    def reply(method: str, path: str, body: bytes) -> tuple[int, bytes]:
        page = LLAMA.get(path, {}) if path != "/tokenize" else {}
        return 200, json.dumps(page).encode()

    with imitating(reply) as url:
        spec = f"openai:qwen@{url}/v1"
        with pytest.raises(ConfigError, match=r"8192 tokens .* --set env.context_window=8192, .*\(-c\)"):
            open_policy(spec, {}, Config())
        fitted = fit_window(spec, Config())
        assert (fitted.env.context_window, fitted.env.generation_reserve) == (8192, 2048)
        assert open_policy(spec, {}, fitted).name == spec
        small = load_config(None, ["env.context_window=4096"])
        assert fit_window(spec, small) is small
    assert fit_window("scripted", small) is small
