"""Write weights into folders, for engines that load them by path."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from harness1.errors import InfrastructureFault
from harness1.train.saving import copy_beside_weights

if TYPE_CHECKING:
    from torch import Tensor

KEPT = 2
"""Versions on disk: an engine may still be reading the one before the last."""


def write_version(root: Path, base: Path, state: Mapping[str, Tensor], version: int) -> Path:
    """Write a version of a model beside the previous one, remove older ones, and return its folder.

    Args:
        base: the folder of the original model, whose other files are copied.

    Raises:
        InfrastructureFault: there is no room, or the folder cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    folder = root / f"version-{version}"
    try:
        shutil.rmtree(folder, ignore_errors=True)
        copy_beside_weights(base, folder)
        save_file(_untied(state), folder / "model.safetensors", metadata={"format": "pt"})
    except (OSError, SafetensorError) as error:
        raise InfrastructureFault(f"version {version} of the weights cannot be written to {root}: {error}") from error
    for old in sorted(root.glob("version-*"), key=lambda path: int(path.name.partition("-")[2]))[:-KEPT]:
        shutil.rmtree(old, ignore_errors=True)
    return folder


def _untied(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Keep each storage once: of names that share one, as a tied head does, readers need only the first."""
    seen: set[int] = set()
    kept = {}
    for name, value in state.items():
        if value.data_ptr() not in seen:
            seen.add(value.data_ptr())
            kept[name] = value.detach().cpu().contiguous()
    return kept
