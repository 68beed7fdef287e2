"""The headers of weights tell what a folder holds, before an engine is sent there."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from harness1.errors import UsageError
from harness1.models.token_server import check_same_shapes, weight_shapes


def write_weights(folder: Path, shapes: Mapping[str, tuple[int, ...]], name: str = "model") -> None:
    """A folder with a configuration, and tensors of one byte types that hold nothing of interest."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    header |= {key: {"dtype": "U8", "shape": shape, "data_offsets": [0, 0]} for key, shape in shapes.items()}
    encoded = json.dumps(header).encode()
    (folder / f"{name}.safetensors").write_bytes(len(encoded).to_bytes(8, "little") + encoded)
    (folder / "config.json").write_text("{}")


def test_the_shapes_are_those_of_all_files(tmp_path: Path) -> None:
    write_weights(tmp_path, {"a": (2, 3)}, "model-1")
    write_weights(tmp_path, {"b": ()}, "model-2")
    assert weight_shapes(tmp_path) == {"a": (2, 3), "b": ()}


def test_weights_of_another_architecture_are_refused_by_name(tmp_path: Path) -> None:
    write_weights(tmp_path, {"a": (2, 3), "b": (1,)})
    check_same_shapes({"b": (1,), "a": (2, 3)}, tmp_path)
    for opened in ({"a": (3, 2), "b": (1,)}, {"a": (2, 3)}, {"a": (2, 3), "b": (1,), "c": (1,)}):
        with pytest.raises(UsageError, match="weights of another model"):
            check_same_shapes(opened, tmp_path)


def test_a_tied_output_head_may_be_left_out_on_either_side_but_not_differ(tmp_path: Path) -> None:
    write_weights(tmp_path, {"a": (1,), "lm_head.weight": (4, 2)})
    check_same_shapes({"a": (1,)}, tmp_path)
    with pytest.raises(UsageError, match=r"lm_head\.weight"):
        check_same_shapes({"a": (1,), "lm_head.weight": (5, 2)}, tmp_path)
    write_weights(tmp_path, {"a": (1,)})
    check_same_shapes({"a": (1,), "lm_head.weight": (4, 2)}, tmp_path)


@pytest.mark.parametrize(
    "content", [b"", b"\x05\0\0\0\0\0\0\0{}", b"\xff" * 64, b"\x02\0\0\0\0\0\0\0[]", b'\x08\0\0\0\0\0\0\0{"a": 3}']
)
def test_a_file_that_is_no_safetensors_file_is_refused(tmp_path: Path, content: bytes) -> None:
    write_weights(tmp_path, {"a": (1,)})
    (tmp_path / "broken.safetensors").write_bytes(content)
    with pytest.raises(UsageError, match="cannot be read"):
        weight_shapes(tmp_path)


def test_a_folder_without_weights_or_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a model"):
        weight_shapes(tmp_path)
    write_weights(tmp_path, {"a": (1,)})
    (tmp_path / "config.json").unlink()
    with pytest.raises(UsageError, match="is not a model"):
        weight_shapes(tmp_path)
