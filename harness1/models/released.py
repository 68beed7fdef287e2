"""Policies that come with the package: adapters with their card and configuration, each a folder of `policies/`."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from harness1.model_folder import ADAPTER_CONFIG

CONFIG = "config.toml"


def released_names() -> list[str]:
    """Return the names of the released policies."""
    return sorted(path.parent.name for path in _home().glob(f"*/{ADAPTER_CONFIG}"))


def released_folder(name: str) -> Path | None:
    """Return the folder of a released policy; None if there is none of that name."""
    return _home() / name if name in released_names() else None


def released_config(name: str) -> str | None:
    """Return the path of the configuration that a released policy was measured with; None if there is none of that
    name."""
    folder = released_folder(name)
    return str(folder / CONFIG) if folder else None


def _home() -> Path:
    return Path(str(resources.files("harness1"))) / "policies"
