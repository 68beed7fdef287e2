"""Datasets that the user names: found in the cache, or fetched into it."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from harness1.cli.bars import progress_of_bytes
from harness1.cli.printing import say
from harness1.config import Config
from harness1.data.dataset_cache import DatasetCache, Progress, is_name


def place_of(spec: str, config: Config) -> str:
    """Return a dataset as `open_source` takes it; one that is given by name is fetched unless the cache has it.

    Raises:
        InfrastructureFault: it cannot be fetched.
        UsageError: there is no dataset of that name.
    """
    if not names_dataset(spec):
        return spec
    if found := cache_of(config).find(spec):
        return found
    with progress_of_bytes() as show:
        return cache_of(config, show).get(spec)


def evaluation_places(specs: Sequence[str] | None, config: Config) -> tuple[str, ...]:
    """Return evaluation sets, `DATASET` or `DATASET:SPLIT`, as `evaluation_sets` takes them; datasets that are given by
    name are fetched unless the cache has them.

    Raises:
        InfrastructureFault: one cannot be fetched.
        UsageError: there is no dataset of that name.
    """
    return tuple(_evaluation_place(spec, config) for spec in specs or ())


def _evaluation_place(spec: str, config: Config) -> str:
    dataset, colon, split = spec.partition(":")
    # `world:SIZE` and `BENCHMARK:FOLDER` have a colon of their own.
    if not colon or dataset == "world" or Path(split).exists() or not names_dataset(dataset):
        return place_of(spec, config)
    return f"{place_of(dataset, config)}:{split}"


def names_dataset(spec: str) -> bool:
    """Return whether a dataset is given by name. What exists is a path, and so is a missing file in a folder that
    exists."""
    path = Path(spec)
    return spec != "stdlib" and is_name(spec) and not path.exists() and ("/" not in spec or not path.parent.exists())


def cache_of(config: Config, progress: Progress | None = None) -> DatasetCache:
    """Return the cache of datasets on this machine."""
    machine = config.machine
    folder = Path(machine.data).expanduser() if machine.data else cache_home(os.environ, sys.platform) / "data"
    shown = progress or (lambda part, done, of: None)
    return DatasetCache(folder, machine.data_mirror, say, shown)


def cache_home(environment: Mapping[str, str], system: str) -> Path:
    """Return the folder for what can be fetched again, where the system's conventions have it."""
    if system == "darwin":
        return Path.home() / "Library" / "Caches" / "harness1"
    name = "LOCALAPPDATA" if system == "win32" else "XDG_CACHE_HOME"
    below = Path(environment.get(name, ""))
    return (below if below.is_absolute() else Path.home() / ".cache") / "harness1"
