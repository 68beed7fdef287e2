"""The names of language models, such as `hf:PATH` or `openai:MODEL@URL`, and of the released policies, which come with
the package: adapters with their card and configuration, each a folder of `policies/`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import NamedTuple

from harness1.data.origins import known_origins, united
from harness1.errors import UsageError
from harness1.model_folder import ADAPTER_CONFIG, holds_adapters
from harness1.plain import WITH_SERVER, at_home, public_address

SERVED: Mapping[str, bool | None] = {"hf": False, "vllm": None, "sglang": True, "openai": True}
"""Each kind of model, with True if it needs the address of a server; None: it may have one."""
NAMES = ("hf:PATH", "vllm:PATH", "vllm:MODEL@URL", "sglang:MODEL@URL", "openai:MODEL@URL")
CONFIG = "config.toml"
_PASSWORD = re.compile(r"https?://[^/]*@", re.I)


class ModelSpec(NamedTuple):
    """A kind of backend, the model, and the address of its server, if it has one."""

    kind: str
    model: str
    url: str | None

    @classmethod
    def read(cls, spec: str) -> ModelSpec:
        """Parse the name of a model or released policy; UsageError for another form, or a password in it."""
        if folder := policy_folder(spec):
            return cls("hf", str(folder), None)
        kind, _, rest = spec.partition(":")
        if _PASSWORD.search(rest):
            raise UsageError("the name of a policy is recorded: give machine.model.key, and no password in the address")
        if "@" in rest and re.search(r"https?://[^?#]*[?#]", rest, re.I):
            raise UsageError("the address of a model's server has no ? or #: give a key as machine.model.key")
        served = WITH_SERVER.fullmatch(rest)
        model, url = served.groups() if served else (rest, None)
        if kind not in SERVED or not model or SERVED[kind] not in (None, bool(url)):
            raise UsageError(f"{public_address(spec)!r} names no model: write one of {', '.join(NAMES)}")
        return cls(kind, model, url)


def is_model(spec: str) -> bool:
    """Return True for a language model, which runs in a single process."""
    return spec.partition(":")[0] in SERVED or spec in list_released()


def list_released() -> list[str]:
    """Return the names of the released policies."""
    return sorted(path.parent.name for path in _home().glob(f"*/{ADAPTER_CONFIG}"))


def policy_folder(name: str) -> Path | None:
    """Return the folder of a released policy; None if there is none of that name."""
    return _home() / name if name in list_released() else None


def policy_config(name: str) -> str | None:
    """Return the path of the configuration that a released policy was measured with; None as `policy_folder`."""
    folder = policy_folder(name)
    return str(folder / CONFIG) if folder else None


def policy_origins(name: str) -> tuple[str, ...]:
    """Return the known origins of a policy: of a released one, of a model in a folder, such as `hf:FOLDER`, or of what
    another kind is given, such as `replay:RUN`. A served model has none, whatever lies in a folder of its name, but
    adapters, which are loaded into the server."""
    if folder := policy_folder(name):
        return known_origins(folder)
    kind, colon, rest = name.partition(":")
    if kind in SERVED:
        served = WITH_SERVER.fullmatch(rest)
        loads = kind != "openai" and (served is None or holds_adapters(at_home(served[1])))
        return known_origins(rest) if loads else ()
    return united(known_origins(name), policy_origins(rest) if colon else ())


def _home() -> Path:
    return Path(str(resources.files("harness1"))) / "policies"
