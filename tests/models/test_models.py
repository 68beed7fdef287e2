"""A model is found by what a user typed, and whatever is wrong with that is said in one clear line, without secrets."""

from __future__ import annotations

import asyncio
import json
import pickle
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from harness1 import errors
from harness1.config import Config, Dense, Machine, load_config
from harness1.errors import MissingExtra, UsageError
from harness1.models.backend import Grammar, SampledOutput
from harness1.models.causal_model import context_window, load_causal_model
from harness1.models.checkpoint import CHECKPOINT, read_checkpoint
from harness1.models.convert import convert_gguf
from harness1.models.open import BackendCompleter, format_at, open_backend
from harness1.models.spec import NAMES, ModelSpec, is_model
from harness1.models.token_server import SglangServer, VllmServer
from harness1.models.tokenizer import open_tokenizer
from harness1.models.transformers_backend import open_transformers
from harness1.models.weight_gate import weight_shapes
from harness1.policy.language_model import ChatCompletionsPolicy, LanguageModelPolicy
from harness1.policy.registry import check_policy, open_model, open_policy
from harness1.records import Sampling
from harness1.retrieval.models import open_cross_encoder, open_embedder
from tests.retrieval.test_retrieval_models import save_pair_model
from tests.tiny_models import save_byte_tokenizer, save_tiny_model
from tests.vocabularies import chat_format, tokenizer, vocabulary

SECRET = "sk-most-secret"
URL = "http://localhost:8000/v1"
SMALL = Config(env=load_config(None, ["env.context_window=2432", "env.generation_reserve=128"]).env)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with a ChatML tokenizer, in a folder whose name looks like an address."""
    made = tmp_path_factory.mktemp("models") / "a:b@c@httpd"
    made.mkdir()
    (made / "tokenizer.json").write_bytes(vocabulary("chatml"))
    size = max(tokenizer("chatml").control.values()) + 1
    return save_tiny_model(made, vocab_size=size, max_position_embeddings=4096)


def complaint(spec: str, config: Config = SMALL) -> str:
    """What a user is told, which must be one line."""
    with pytest.raises(UsageError) as caught:
        open_model(spec, config)
    said = str(caught.value)
    assert "\n" not in said
    return said


@pytest.mark.parametrize(
    ("spec", "read"),
    [
        ("hf:smollm2-135m", ("hf", "smollm2-135m", None)),
        ("hf:/a/b:c@d/e", ("hf", "/a/b:c@d/e", None)),
        ("hf:/runs/x@https-mirror", ("hf", "/runs/x@https-mirror", None)),
        ("hf:C:\\models\\x", ("hf", "C:\\models\\x", None)),
        ("vllm:/a/b", ("vllm", "/a/b", None)),
        (f"vllm:Qwen/Qwen3-8B@{URL}", ("vllm", "Qwen/Qwen3-8B", URL)),
        ("sglang:m@https://[::1]:30000", ("sglang", "m", "https://[::1]:30000")),
        ("openai:gpt-oss:20b@http://10.0.0.1:11434/v1", ("openai", "gpt-oss:20b", "http://10.0.0.1:11434/v1")),
        ("openai:a@b/c@HTTPS://host/v1/", ("openai", "a@b/c", "HTTPS://host/v1/")),
        ("openai:m@http-x@http://host:1", ("openai", "m@http-x", "http://host:1")),
    ],
)
def test_a_model_is_read_by_kind_name_and_address(spec: str, read: tuple[str, str, str | None]) -> None:
    assert ModelSpec.read(spec) == read
    assert is_model(spec)
    check_policy(spec)


@pytest.mark.parametrize(
    "spec",
    [
        *("hf:", "vllm:", "sglang:", "openai:", "openai", "llama:x", ""),
        *(f"hf:x@{URL}", "sglang:x", "openai:x", "openai:x@localhost:8000/v1", f"openai:@{URL}", "openai:x@http://"),
    ],
)
def test_rejects_what_names_no_model_and_lists_the_forms(spec: str) -> None:
    with pytest.raises(UsageError) as caught:
        ModelSpec.read(spec)
    assert str(caught.value) == f"{spec!r} names no model: write one of {', '.join(NAMES)}"
    if not spec or spec == "llama:x":
        assert not is_model(spec)
        with pytest.raises(UsageError, match="there is no policy"):
            check_policy(spec)


@pytest.mark.parametrize(
    "spec",
    [
        f"openai:m@http://me:{SECRET}@host/v1",
        f"vllm:m@https://{SECRET}@host:1",
        f"openai:m@http://host/v1?key={SECRET}",
    ],
)
def test_a_password_in_an_address_is_refused_unrepeated_because_names_are_recorded(spec: str) -> None:
    said = complaint(spec)
    assert SECRET not in said
    assert "machine.model.key" in said


def test_a_local_model_is_opened_whatever_its_folder_is_called(folder: Path) -> None:
    policy = open_policy(f"hf:{folder}", {}, SMALL)
    assert isinstance(policy, LanguageModelPolicy)
    assert (policy.name, policy.counter.name, policy.reserve) == (f"hf:{folder}", "hermes", 128)
    assert open_model(f"hf:{folder}", SMALL).hash == policy.hash


@pytest.mark.parametrize(("kind", "server"), [("vllm", VllmServer), ("sglang", SglangServer)])
def test_a_model_behind_a_server_counts_by_the_tokenizer_said_to_be_its(folder: Path, kind: str, server: type) -> None:
    config = load_config(None, [f"machine.model.tokenizer={folder}", "policy.format=compact"])
    policy = open_model(f"{kind}:some/name@{URL}", config)
    assert isinstance(policy, LanguageModelPolicy)
    assert isinstance(policy.model, server)
    assert (policy.counter.name, policy.counter.tokenizer.hash) == ("compact", tokenizer("chatml").hash)
    assert policy.model._endpoint.url == URL.removesuffix("/v1")
    assert open_model(f"{kind}:other/name@{URL}", config).hash != policy.hash
    assert "--set machine.model.tokenizer=FOLDER" in complaint(f"{kind}:an-alias@{URL}")


def test_a_hosted_model_is_opened_without_asking_its_server() -> None:
    policy = open_model(f"openai:gpt@{URL}", Config())
    assert isinstance(policy, ChatCompletionsPolicy)
    assert (policy.model, policy.endpoint.url, policy.reserve) == ("gpt", URL, 2048)


def test_reports_what_is_not_the_folder_of_a_model(tmp_path: Path, folder: Path) -> None:
    absent = tmp_path / "deep" / "absent"
    assert f"no model '{absent}'" in complaint(f"hf:{absent}")
    assert complaint(f"hf:{tmp_path}").startswith(f"{tmp_path} has no tokenizer.json")
    (tmp_path / "tokenizer.json").write_text("{}")
    assert "not a tokenizer.json" in complaint(f"hf:{tmp_path}")
    (tmp_path / "tokenizer.json").write_bytes(vocabulary("chatml"))
    assert complaint(f"hf:{tmp_path}").startswith(f"{tmp_path} has no readable config.json")
    (tmp_path / "config.json").write_text('{"max_position_embeddings": "many"}')
    assert "has no readable config.json" in complaint(f"hf:{tmp_path}")
    (tmp_path / "config.json").write_text('{"model_type": "odd"}')
    assert "not a causal language model" in complaint(f"hf:{tmp_path}")


def test_a_window_that_the_model_does_not_have_is_refused_before_it_is_loaded(folder: Path) -> None:
    for kind in ("hf", "vllm"):
        said = complaint(f"{kind}:{folder}", Config())
        assert said.startswith("env.context_window=32768 is more than the 4096 tokens")
    assert "--config small" in said


def test_vllm_in_this_process_gets_its_share_of_the_gpus(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, object] = {}
    monkeypatch.setattr("harness1.models.open.open_vllm", lambda folder, **options: given.update(options))
    settings = ["machine.model.memory_share=0.5", "policy.dtype=bfloat16", "env.context_window=4096"]
    open_backend(ModelSpec.read(f"vllm:{folder}"), load_config("small", settings))
    sizes = {"max_model_len": 4096, "memory_share": 0.5, "adapter_rank": 0}
    assert given == sizes | {"dtype": "bfloat16", "enable_sleep_mode": False}


def test_settings_that_do_not_fit_a_model_are_refused(folder: Path) -> None:
    with pytest.raises(UsageError, match="needs a tokenizer with"):
        open_model(f"hf:{folder}", load_config(None, ["policy.format=harmony"]))
    for key in ("se\ncret", "sécret"):
        config = load_config(None, [f"machine.model.key={json.dumps(key)}"])
        assert key not in complaint(f"openai:gpt@{URL}", config)


def test_a_bundled_model_that_was_not_fetched_is_named_with_what_fetches_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert complaint("hf:smollm2-135m").endswith("run: harness1 models get smollm2-135m")


@pytest.mark.parametrize(
    ("kind", "module", "extra"),
    [
        ("hf", "tokenizers", "train"),
        ("hf", "transformers", "train"),
        ("hf", "torch", "train"),
        ("vllm", "vllm", "vllm"),
        ("openai", "httpx", "serve"),
        ("sglang", "httpx", "serve"),
    ],
)
def test_what_is_not_installed_is_named_with_what_installs_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str, module: str, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    spec = f"{kind}:{folder}" if kind in ("hf", "vllm") else f"{kind}:m@{URL}"
    config = load_config(None, [f"machine.model.tokenizer={folder}", "env.context_window=4096"])
    with pytest.raises(MissingExtra) as caught:
        open_model(spec, config)
    assert str(caught.value) == str(MissingExtra(module, extra))


def test_an_extra_is_installed_from_where_the_package_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "__file__", str(tmp_path / "harness1" / "errors.py"))
    assert str(MissingExtra("torch", "train")) == "torch is not installed; run: pip install 'harness1[train]'"
    (tmp_path / "pyproject.toml").touch()
    assert str(MissingExtra("torch", "train")).endswith(f"pip install -e '{tmp_path}[train]'")
    monkeypatch.setitem(sys.modules, "openai_harmony", None)
    with pytest.raises(MissingExtra, match=r"\[harmony\]"):
        format_at("harmony", Config())


CHAT = chat_format("compact", "chatml")
MESSAGES = [{"role": "system", "content": "Judge."}, {"role": "user", "content": "An episode <|im_end|> of one turn"}]


class Saying:
    """A backend that says the same always."""

    def __init__(self, said: Sequence[int]) -> None:
        self.said, self.prompts = tuple(said), list[str]()

    async def generate(self, ids: Sequence[int], sampling: Sampling, grammar: Grammar | None = None) -> SampledOutput:
        assert (sampling.temperature, sampling.max_tokens, sampling.stop_ids) == (0.0, 9, CHAT.stop_ids)
        self.prompts.append(CHAT.tokenizer.decode(ids))
        return SampledOutput(self.said, (0.0,) * len(self.said), "stop")


def test_a_reply_is_the_words_of_an_output_and_its_tokens_are_counted(tmp_path: Path) -> None:
    backend: Any = Saying([*CHAT.tokenizer.encode('{"verdict": "honest"}'), CHAT.stop_ids[0]])
    found = asyncio.run(BackendCompleter(backend, CHAT, 9).complete(MESSAGES))
    (prompt,) = backend.prompts
    assert (found.text, found.output_tokens) == ('{"verdict": "honest"}', len(backend.said))
    assert found.prompt_tokens is not None
    assert prompt.startswith("<|im_start|>system\nJudge.")
    assert prompt.index("An episode") < prompt.rindex("<|im_start|>")
    folder = save_byte_tokenizer(save_tiny_model(tmp_path, vocab_size=5000))
    local = open_transformers(folder, device="cpu", dtype="float32", threads=1, rows=1, cache_tokens=0)
    assert 0 < (asyncio.run(BackendCompleter(local, CHAT, 9).complete(MESSAGES)).output_tokens or 0) <= 9


TRAP = Path("trap")


class Code:
    """Whoever unpickles it makes a file."""

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return Path.touch, (TRAP,)


BROKEN = {
    "pickle": pickle.dumps({"model_type": Code()}),
    "deep": b'{"a":' * 200_000,
    "deep_list": b"[" * 200_000,
    "cut": b'{"model_type": "lla',
    "latin": b'{"model_type": "\xe9\xff"}',
    "list": b"[]",
    "number": b"3",
    "empty": b"",
}


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A language model, and the working folder in which code of its files would leave a trap."""
    monkeypatch.chdir(tmp_path)
    save_byte_tokenizer(tmp_path / "model")
    return save_tiny_model(tmp_path / "model")


def load_all(model: Path) -> None:
    """Read all that a policy needs of a folder."""
    open_tokenizer(model)
    context_window(model)
    weight_shapes(model)
    load_causal_model(model, "cpu", "float32")


def refused(load: Callable[[], object]) -> None:
    with pytest.raises(UsageError) as caught:
        load()
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000
    assert not TRAP.exists()


def test_a_broken_file_of_a_language_model_and_settings_of_wrong_types_are_one_line(model: Path) -> None:
    load_all(model)
    names = ("config.json", "tokenizer.json", "model.safetensors")
    for name, content in (
        *((name, content) for name in names for content in BROKEN.values()),
        ("generation_config.json", b'"x"'),
        ("generation_config.json", b'{"eos_token_id": [[]], "pad_token_id": []}'),
        ("config.json", b'{"model_type": "llama", "intermediate_size": "wide"}'),
        ("config.json", b'{"model_type": "llama", "hidden_size": 0}'),
    ):
        before = (model / name).read_bytes()
        (model / name).write_bytes(content)
        refused(lambda: load_all(model))
        (model / name).write_bytes(before)


def test_pickled_weights_are_not_unpickled(model: Path) -> None:
    (model / "model.safetensors").unlink()
    for content in BROKEN.values():
        (model / "pytorch_model.bin").write_bytes(content)
        refused(lambda: load_causal_model(model, "cpu", "float32"))


@pytest.mark.parametrize("kind", ["pickle", "deep", "list"])
def test_a_broken_model_for_retrieval_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.chdir(tmp_path)
    whole = save_pair_model(tmp_path / "whole")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"):
        broken = tmp_path / f"broken-{name}"
        shutil.copytree(whole, broken)
        (broken / name).write_bytes(BROKEN[kind])
        if name != "tokenizer.json" or kind not in ("list", "number", "empty"):
            for load in (
                lambda at=broken: open_cross_encoder(Machine(reranker=str(at))),
                lambda at=broken: open_embedder(Dense(model=str(at)), Machine()),
            ):
                try:
                    load()  # the libraries manage without some files
                except UsageError as error:
                    message = str(error)
                    assert "\n" not in message
                assert not TRAP.exists()


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_gguf_file_or_card_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.chdir(tmp_path)
    for content in (BROKEN[kind], b"GGUF\3\0\0\0" + BROKEN[kind][:64].ljust(64, b"\xff")):
        (tmp_path / "model.gguf").write_bytes(content)
        refused(lambda: convert_gguf(tmp_path / "model.gguf", tmp_path / "out"))
    (tmp_path / CHECKPOINT).write_bytes(BROKEN[kind])
    refused(lambda: read_checkpoint(tmp_path))
