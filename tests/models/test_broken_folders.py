"""A model's folder whose files are broken, too deep or hold code is refused in one line, and its code never runs."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from harness1.config import Dense, Machine
from harness1.errors import UsageError
from harness1.models.causal_model import context_window, load_causal_model
from harness1.models.checkpoint import CHECKPOINT, read_checkpoint
from harness1.models.convert import convert_gguf
from harness1.models.token_server import weight_shapes
from harness1.models.tokenizer import open_tokenizer
from harness1.retrieval.models import open_cross_encoder, open_embedder
from tests.retrieval.test_retrieval_models import save_pair_model
from tests.tiny_models import save_byte_tokenizer, save_tiny_model

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
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A language model, and the working folder in which code of its files would leave a trap."""
    monkeypatch.chdir(tmp_path)
    save_byte_tokenizer(tmp_path / "model")
    return save_tiny_model(tmp_path / "model")


def load_all(folder: Path) -> None:
    """Read all that a policy needs of a folder."""
    open_tokenizer(folder)
    context_window(folder)
    weight_shapes(folder)
    load_causal_model(folder, "cpu", "float32")


def refused(load: Callable[[], object]) -> None:
    with pytest.raises(UsageError) as caught:
        load()
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000
    assert not TRAP.exists()


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_file_of_a_language_model_is_one_line(folder: Path, name: str, kind: str) -> None:
    load_all(folder)
    (folder / name).write_bytes(BROKEN[kind])
    refused(lambda: load_all(folder))


def test_settings_of_wrong_types_are_one_line(folder: Path) -> None:
    for name, text in (
        ("generation_config.json", '"x"'),
        ("generation_config.json", '{"eos_token_id": [[]], "pad_token_id": []}'),
        ("config.json", '{"model_type": "llama", "intermediate_size": "wide"}'),
        ("config.json", '{"model_type": "llama", "hidden_size": 0}'),
    ):
        before = (folder / name).read_bytes()
        (folder / name).write_text(text)
        refused(lambda: load_causal_model(folder, "cpu", "float32"))
        (folder / name).write_bytes(before)


def test_pickled_weights_are_not_unpickled(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    for content in BROKEN.values():
        (folder / "pytorch_model.bin").write_bytes(content)
        refused(lambda: load_causal_model(folder, "cpu", "float32"))


@pytest.mark.parametrize("kind", BROKEN)
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
