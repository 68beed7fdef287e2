"""A training's tensors come back as they were written, and a save never takes away what is still referred to."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from harness1.errors import UsageError
from harness1.training.saving import forget_tensors, load_tensors, save_tensors


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def made(value: float) -> dict[str, Tensor]:
    return {"step": torch.tensor(3), "weight/a.b": torch.full((5, 2), value), "half": torch.ones(3).bfloat16() * value}


def test_tensors_are_filled_in_place_as_they_were_written(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    name = save_tensors(tmp_path, made(0.1))
    found = made(0.0)
    places = {key: value.data_ptr() for key, value in found.items()}
    load_tensors(tmp_path / name, found)
    assert all(torch.equal(found[key], value) for key, value in made(0.1).items())
    assert {key: value.data_ptr() for key, value in found.items()} == places
    assert not [each for each in recwarn if "torch.distributed" in str(each.message)]


def test_a_part_can_be_read_alone(tmp_path: Path) -> None:
    step = torch.tensor(0)
    load_tensors(tmp_path / save_tensors(tmp_path, made(1.0)), {"step": step})
    assert int(step) == 3


def test_a_save_keeps_the_one_before_it_and_removes_older_ones(tmp_path: Path) -> None:
    (tmp_path / "state.pt").touch()
    first, second, third = (save_tensors(tmp_path, made(float(each))) for each in range(3))
    assert names(tmp_path) == ["state.pt", second, third]
    assert len({first, second, third}) == 3
    forget_tensors(tmp_path, second)
    assert names(tmp_path) == ["state.pt", second]
    found = made(9.0)
    load_tensors(tmp_path / second, found)
    assert torch.equal(found["weight/a.b"], made(1.0)["weight/a.b"])


def test_a_save_that_was_torn_is_followed_by_a_whole_one(tmp_path: Path) -> None:
    kept = save_tensors(tmp_path, made(1.0))
    torn = tmp_path / save_tensors(tmp_path, made(2.0))
    (torn / ".metadata").unlink()
    forget_tensors(tmp_path, kept)
    again = save_tensors(tmp_path, made(3.0))
    assert names(tmp_path) == [kept, again]


@pytest.mark.parametrize("share", [0.0, 0.3, None])
@pytest.mark.parametrize("file", [".metadata", "__0_0.distcp"])
def test_a_damaged_state_says_what_to_do(tmp_path: Path, file: str, share: float | None) -> None:
    folder = tmp_path / save_tensors(tmp_path, made(1.0))
    path = folder / file
    whole = path.read_bytes()
    path.unlink() if share is None else path.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(UsageError, match=f"{folder.name} is damaged: begin again with --force"):
        load_tensors(folder, made(0.0))


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"cannot write the state of training to .*file"):
        save_tensors(tmp_path / "file", made(1.0))
