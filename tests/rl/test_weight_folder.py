"""Versions of weights on disk."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import torch

from harness1.models.causal_model import load_causal_model
from harness1.rl.rollouts import publish_to, write_version
from tests.tiny_models import save_byte_tokenizer, save_tiny_model


def test_a_version_is_a_model_that_loads_with_its_weights(tmp_path: Path) -> None:
    save_byte_tokenizer(tmp_path / "base")
    base = save_tiny_model(tmp_path / "base", tie_word_embeddings=True)
    model = load_causal_model(base, "cpu", "float32")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.25)
    folder = write_version(tmp_path / "versions", base, model.state_dict(), 3)
    again = load_causal_model(folder, "cpu", "float32")
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), again.parameters(), strict=True))
    assert (folder / "tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()


class Server:
    """Loads weights by path, as an engine does."""

    def __init__(self) -> None:
        self.loaded: list[tuple[Path, int]] = []

    async def load_weights(self, folder: Path, version: int) -> None:
        self.loaded.append((folder, version))


def test_a_server_gets_new_weights_by_path(tmp_path: Path) -> None:
    base = save_tiny_model(save_byte_tokenizer(tmp_path / "base"))
    model, server = load_causal_model(base, "cpu", "float32"), Server()
    with torch.no_grad():
        model.lm_head.weight.add_(0.25)
    state = model.state_dict()
    for version in (1, 2):
        asyncio.run(publish_to(cast(Any, server), state, version, base, tmp_path / "versions"))
    assert [version for _, version in server.loaded] == [1, 2]
    again = load_causal_model(server.loaded[1][0], "cpu", "float32").state_dict()
    assert all(torch.equal(state[name], again[name]) for name in state)


def test_the_last_two_versions_are_kept(tmp_path: Path) -> None:
    base = save_tiny_model(tmp_path / "base")
    state = load_causal_model(base, "cpu", "float32").state_dict()
    for version in (8, 9, 10, 11):
        write_version(tmp_path / "versions", base, state, version)
    assert {path.name for path in (tmp_path / "versions").iterdir()} == {"version-10", "version-11"}


def test_a_training_that_goes_on_from_an_earlier_version_has_it_and_none_of_the_later_ones(tmp_path: Path) -> None:
    base = save_tiny_model(tmp_path / "base")
    state = load_causal_model(base, "cpu", "float32").state_dict()
    for version in (7, 8, 5):
        folder = write_version(tmp_path / "versions", base, state, version)
    assert list((tmp_path / "versions").iterdir()) == [folder]
    write_version(tmp_path / "versions", base, state, 6)
    assert {path.name for path in (tmp_path / "versions").iterdir()} == {"version-5", "version-6"}
