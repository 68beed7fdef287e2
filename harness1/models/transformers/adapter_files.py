"""Adapters as peft stores them: `adapter_model.safetensors` and `adapter_config.json` in a folder."""

from __future__ import annotations

from pathlib import Path

import msgspec

from harness1.errors import UsageError, optional
from harness1.model_folder import ADAPTER_CONFIG, refusing
from harness1.models.transformers.adapted_layers import BASE, EXPERTS
from harness1.models.transformers.adapters import Adapters, adapted_names, layer_of
from harness1.runs.files import write_atomically

ADAPTER_WEIGHTS = "adapter_model.safetensors"


class AdapterConfig(msgspec.Struct, kw_only=True):
    """The settings that peft needs (peft 0.21, `LoraConfig`); others have its defaults."""

    base_model_name_or_path: str
    r: int
    lora_alpha: float
    target_modules: list[str] | str | None = None
    target_parameters: list[str] | None = None
    layers_to_transform: list[int] | None = None
    peft_type: str = "LORA"
    task_type: str | None = "CAUSAL_LM"
    inference_mode: bool = True
    lora_dropout: float = 0.0
    bias: str = "none"
    use_rslora: bool = False
    use_dora: bool = False
    fan_in_fan_out: bool = False
    modules_to_save: list[str] | None = None
    rank_pattern: dict[str, int] = {}
    alpha_pattern: dict[str, float] = {}


def write_adapters(folder: Path, adapters: Adapters, base: Path) -> None:
    """Write adapters of the model in `base` to a folder. peft and vLLM read it; the configuration, which makes it a
    folder of adapters, is written last.

    Raises:
        OSError: the folder cannot be written.
        SafetensorError: the disk is full.
    """
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    modules, parameters = _targets(adapters)
    config = AdapterConfig(
        base_model_name_or_path=str(base.resolve()),
        r=adapters.rank,
        lora_alpha=int(adapters.alpha) if adapters.alpha.is_integer() else adapters.alpha,
        target_modules=modules,
        target_parameters=parameters or None,
        layers_to_transform=_layers(adapters),
    )
    tensors = {name: value.cpu().contiguous() for name, value in adapters.tensors.items()}
    save_file(tensors, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    write_atomically(folder / ADAPTER_CONFIG, msgspec.json.format(msgspec.json.encode(config)))


def read_adapter_config(folder: Path) -> AdapterConfig:
    """Return the settings of the adapters in a folder.

    Raises:
        UsageError: they are damaged, or adapters of another kind than low-rank products beside frozen weights.
    """
    path = folder / ADAPTER_CONFIG
    with refusing(f"{path} is not a configuration of adapters"):
        config = msgspec.json.decode(path.read_bytes(), type=AdapterConfig)
    other = config.use_rslora or config.use_dora or config.rank_pattern or config.alpha_pattern or config.fan_in_fan_out
    if config.peft_type != "LORA" or config.bias != "none" or config.modules_to_save or other or config.r < 1:
        raise UsageError(f"{path} describes other adapters than plain LoRA of one rank: merge them with peft first")
    return config


def read_adapters(folder: Path) -> Adapters:
    """Return the adapters in a folder, in float32.

    Raises:
        UsageError: as `read_adapter_config`, or their weights are missing or damaged.
        MissingExtra: torch is not installed.
    """
    config = read_adapter_config(folder)
    with optional("train"):
        from safetensors.torch import load_file
    with refusing(f"{folder / ADAPTER_WEIGHTS} is damaged"):
        tensors = {name: value.float() for name, value in load_file(folder / ADAPTER_WEIGHTS).items()}
    return Adapters(config.r, float(config.lora_alpha), tensors)


def _layers(adapters: Adapters) -> list[int] | None:
    """Return the layers that have adapters, or None if that is the first one and all that follow."""
    layers = sorted({layer_of(name) for name in adapters.tensors})
    return layers if layers[0] > 0 else None


def _targets(adapters: Adapters) -> tuple[list[str], list[str]]:
    """Return the names by which peft finds the adapted modules and parameters: their last parts."""
    names = adapted_names(adapters)
    mixtures = {name.removesuffix(f".{BASE}") for name in names if name.endswith(f".{BASE}")}
    modules = {name.rpartition(".")[2] for name in names if name.removesuffix(f".{BASE}") not in mixtures}
    ends = {".".join(name.split(".")[-2:]) for name in mixtures}
    return sorted(modules), [f"{end}.{parameter}" for end in sorted(ends) for parameter in EXPERTS]
