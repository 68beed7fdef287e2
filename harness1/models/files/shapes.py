"""Shapes of models: the configuration in a folder or file, and those of published models that come with the package."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from harness1.errors import UsageError, optional
from harness1.model_folder import refusing
from harness1.models.files.fetch import resolve_model
from harness1.records import Record

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

CONFIG = "config.json"


class Shape(Record):
    """The shape of a published model: the keys of its public `config.json` that decide its memory."""

    name: str
    source: str
    parameters: int
    """As published."""
    config: dict[str, Any]


SHAPES = {
    shape.name: shape
    for shape in msgspec.toml.decode(
        resources.files(__package__).joinpath("shapes.toml").read_bytes(), type=dict[str, tuple[Shape, ...]]
    )["shape"]
}


def model_shape(place: str | Path) -> PreTrainedConfig:
    """Return the configuration of a model, without its weights and without their quantization: quantized weights are
    trained as bfloat16.

    Args:
        place: a model's folder or name, a `config.json`, or a name of `SHAPES`.

    Raises:
        UsageError: there is no such model, or transformers does not know its type.
        MissingExtra: transformers is not installed.
    """
    with optional("train"):
        from transformers import AutoConfig
    shape = SHAPES.get(str(place))
    if shape is not None:
        return AutoConfig.for_model(**shape.config)
    path = Path(place).expanduser()
    if path.suffix == ".json" and not path.is_file():
        raise UsageError(f"no model at {str(place)!r}; the shapes of {', '.join(SHAPES)} come with the package")
    path = path if path.is_file() else resolve_model(str(place)) / CONFIG
    with refusing(f"{path} is not the configuration of a model that transformers knows"):
        keys = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        keys.pop("quantization_config", None)
        return AutoConfig.for_model(keys.pop("model_type"), **keys)
