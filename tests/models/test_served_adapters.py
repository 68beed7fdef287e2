"""Adapters behind a server: loaded by whoever names their folder, once, under a name of their content."""

import asyncio
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness1.config import load_config
from harness1.errors import UsageError
from harness1.models.open import open_backend
from harness1.models.spec import ModelSpec
from harness1.models.token_server import SglangServer, TokenServer, VllmServer
from harness1.records import Sampling
from tests.models.test_adapters import save_adapters, settings
from tests.models.test_token_server import PROMPT, SAMPLING, completion, generated
from tests.serving import imitating
from tests.support import run
from tests.tiny_models import save_tiny_model
from tests.vocabularies import vocabulary


class Imitation:
    """A server of a base and its adapters, with the statuses and messages of vLLM 0.31 and SGLang."""

    def __init__(self, base: str, updating: bool = True) -> None:
        self.base, self.updating = base, updating
        self.loaded: dict[str, str] = {}
        self.asked: list[str] = []

    def answer(self, method: str, path: str, sent: bytes) -> tuple[int, bytes]:
        body = json.loads(sent) if sent else {}
        status, made = self.reply(path, body)
        self.asked.append(path)
        return status, json.dumps(made).encode()

    def reply(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        name = body.get("lora_name", "")
        if path == "/v1/models":
            cards = [{"id": each, "root": place, "parent": "served"} for each, place in self.loaded.items()]
            return 200, {"data": [{"id": "served", "root": self.base, "parent": None}, *cards]}
        if "load_lora_adapter" in path:
            if not self.updating:
                return 404, {"detail": "Not Found"}
            if name in self.loaded:
                return 400, {"success": False, "message": f"The lora adapter '{name}' has already been loaded."}
            self.loaded = {**self.loaded, name: body["lora_path"]}
            return 200, {"success": True}
        if path == "/generate":
            if body.get("lora_path") in self.loaded:
                return 200, generated()
            return 400, {"error": {"message": f"The following requested LoRA adapters are not loaded: {body}"}}
        if body["model"] in self.loaded:
            top = [{"a": -3.0 * body["temperature"]}]
            return 200, completion(logprobs={"token_logprobs": [-0.5, -1.25, -0.125], "top_logprobs": top})
        return 404, {"error": {"message": f"The model `{body['model']}` does not exist."}}


def save_vocabulary(folder: Path) -> Path:
    (folder / "tokenizer.json").write_bytes(vocabulary("chatml"))
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_vocabulary(save_tiny_model(tmp_path_factory.mktemp("models") / "base"))


@pytest.fixture(scope="module")
def adapters(base: Path) -> Path:
    save_adapters(base.with_name("lora"), base)
    return base.with_name("lora")


@pytest.fixture
def imitation(base: Path) -> Imitation:
    return Imitation(str(base))


def opened(folder: Path, url: str, kind: str = "vllm") -> TokenServer:
    backend, _ = open_backend(ModelSpec.read(f"{kind}:{folder}@{url}/v1"), load_config(None, ["policy.format=compact"]))
    assert isinstance(backend, {"vllm": VllmServer, "sglang": SglangServer}[kind])
    return backend


async def sample_many(server: TokenServer, sampling: Sampling = SAMPLING) -> None:
    await asyncio.gather(*[server.generate(PROMPT, sampling) for _ in range(3)])


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_adapters_named_by_their_folder_are_loaded_with_the_first_call_and_again_where_they_are_gone(
    kind: str, imitation: Imitation, adapters: Path
) -> None:
    with imitating(imitation.answer) as url:
        server, other = opened(adapters, url, kind), opened(adapters, url, kind)
        assert not imitation.asked, "training replaces them before the first call"
        run(sample_many(server))
        (name,) = imitation.loaded
        assert imitation.loaded[name] == str(adapters)
        run(sample_many(other))
        imitation.loaded = {}  # a server that was started anew
        run(sample_many(other))
        assert name in imitation.loaded


def test_log_probabilities_are_tested_with_the_adapters_themselves(imitation: Imitation, adapters: Path) -> None:
    with imitating(imitation.answer) as url:
        run(sample_many(opened(adapters, url), msgspec.structs.replace(SAMPLING, temperature=0.7)))


def test_adapters_have_a_name_and_a_hash_by_their_content(
    imitation: Imitation, adapters: Path, base: Path, tmp_path: Path
) -> None:
    def names(folder: Path) -> tuple[str, str]:
        with imitating(imitation.answer) as url:
            server = opened(folder, url)
            run(server.generate(PROMPT, SAMPLING))
            (name,) = imitation.loaded
            imitation.loaded = {}
            return name, server.hash

    copy, other = tmp_path / "copy" / "lora", tmp_path / "other" / "lora"
    save_adapters(copy, base)
    save_adapters(other, base)
    settings(other, lora_alpha=99)
    first, same, changed = map(names, (adapters, copy, other))
    assert first == same
    assert first[0] != changed[0]
    assert first[1] != changed[1]


@pytest.mark.parametrize(
    ("served", "updating", "says"),
    [
        ("Qwen/other", True, r"serves Qwen/other or served, and the adapters in .*lora belong to .*base"),
        ("owner/base", False, r"404 Not Found; to load adapters, start vLLM with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"),
    ],
)
def test_a_server_of_another_base_or_without_updates_is_refused_in_one_line(
    adapters: Path, served: str, updating: bool, says: str
) -> None:
    with imitating(Imitation(served, updating).answer) as url, pytest.raises(UsageError, match=says) as refused:
        run(opened(adapters, url).generate(PROMPT, SAMPLING))
    assert "\n" not in str(refused.value)


def test_another_folder_of_the_same_base_is_its_base_and_one_of_its_name_with_other_weights_is_not(
    adapters: Path, tmp_path: Path
) -> None:
    same, other = save_tiny_model(tmp_path / "same"), save_tiny_model(tmp_path / "wrong" / "base", seed=5)
    save_vocabulary(same)
    for served, fits in ((same, True), (other, False)):
        refused = nullcontext() if fits else pytest.raises(UsageError, match="belong to")
        with imitating(Imitation(str(served)).answer) as url, refused:
            run(opened(adapters, url).generate(PROMPT, SAMPLING))
