"""Layers with low-rank adapters (Hu et al., arXiv 2106.09685): W x + (alpha / rank) B A x, with A and B in float32.

Parts are named as in peft: `base_layer`, `lora_A`, `lora_B`. The update is applied beside the weights and in float32,
also under automatic mixed precision, so that it is never rounded to the precision of the weights. Only linear layers
with weights in bfloat16 on a GPU multiply rounded copies of A and B: launching kernels takes the time there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from harness1.config import Lora
from harness1.errors import UsageError, optional
from harness1.model_folder import ADAPTER_CONFIG, refusing
from harness1.runs.files import write_atomically

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedModel


DOWN, UP, BASE = "lora_A", "lora_B", "base_layer"
EXPERTS = ("gate_up_proj", "down_proj")  # the parameters of a mixture's experts, each [experts, rows, columns]
ROUNDED_ON = ("cuda",)  # types of devices on which factors are rounded beside weights in bfloat16


def is_mixture(module: nn.Module) -> bool:
    """Return True for the experts of a mixture in two 3-D parameters, as transformers builds them."""
    return all(getattr(getattr(module, name, None), "ndim", 0) == 3 for name in EXPERTS)


def factor_shapes(layer: Any, rank: int) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Return the shapes of A and B of each adapter of a layer: one if linear, two of experts, ordered as in peft."""
    import torch

    if isinstance(layer, torch.nn.Linear):
        return [((rank, layer.in_features), (layer.out_features, rank))]
    shapes = []
    for name in EXPERTS if is_mixture(layer) else ():
        count, rows, columns = getattr(layer, name).shape
        inputs, outputs = (rows, columns) if getattr(layer, "is_transposed", False) else (columns, rows)
        shapes.append(((rank * count, inputs), (outputs, rank * count)))
    return shapes


def _adapt(model: PreTrainedModel, name: str, lora: Lora) -> None:
    """Give a layer adapters of zeros; those of experts are around each other. `target`: the adapted parameter."""
    layer = around = model.get_submodule(name)
    shapes = factor_shapes(layer, lora.rank)
    if is_mixture(layer):
        for parameter, pair in zip(EXPERTS, shapes, strict=True):
            around = _adapt_parameter(around, layer, parameter, lora.rank, lora.alpha, *pair)
    else:
        around = _adapt_linear(layer, lora.rank, lora.alpha, *shapes[0])
    model.set_submodule(name, around)


def _adapt_linear(layer: Any, rank: int, alpha: float, down: tuple[int, int], up: tuple[int, int]) -> nn.Module:
    import torch

    scale = alpha / rank

    class AdaptedLinear(torch.nn.Module):
        target = "weight"

        def __init__(self) -> None:
            super().__init__()
            self.base_layer, self.rank, self.alpha = layer, rank, alpha
            self.lora_A, self.lora_B = _factor(down, layer), _factor(up, layer)
            self.kept: tuple[Tensor, Tensor] | None = None

        def forward(self, hidden: Tensor) -> Tensor:
            plain: Tensor = self.base_layer(hidden)
            with torch.autocast(hidden.device.type, enabled=False):
                if plain.dtype == torch.bfloat16 and plain.device.type in ROUNDED_ON:
                    first, second = self.kept or self.rounded()
                    inner = hidden.to(torch.bfloat16).flatten(0, -2) @ first.T
                    return torch.addmm(plain.flatten(0, -2), inner, second.T).view_as(plain)
                change: Tensor = scale * self.lora_B(self.lora_A(hidden.float()))
                return plain + change.to(plain.dtype)

        def rounded(self) -> tuple[Tensor, Tensor]:
            return self.lora_A.weight.to(torch.bfloat16), (scale * self.lora_B.weight).to(torch.bfloat16)

        def update(self) -> Tensor:
            return scale * (self.lora_B.weight @ self.lora_A.weight)

    return AdaptedLinear()


def _adapt_parameter(
    around: Any, experts: Any, name: str, rank: int, alpha: float, down: tuple[int, int], up: tuple[int, int]
) -> nn.Module:
    import torch

    scale, count = alpha / rank, len(getattr(experts, name))
    transposed = getattr(experts, "is_transposed", False)  # [experts, in, out], as gpt-oss has its parameters

    class AdaptedParameter(torch.nn.Module):
        target = name

        def __init__(self) -> None:
            super().__init__()
            self.base_layer, self.rank, self.alpha = around, rank, alpha
            self.lora_A, self.lora_B = _factor(down, experts), _factor(up, experts)

        def forward(self, hidden: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
            """Return the weighted sum of each token's experts; [tokens, chosen]. Only the outer adapter is called."""
            total = torch.zeros_like(hidden)
            for expert, token, place in _route(indices, count):
                inner = experts._apply_gate(self.base_layer.product(hidden[token], expert))
                out = self.product(inner, expert) * weights[token, place, None]
                total.index_add_(0, token, out.to(total.dtype))
            return total

        def product(self, hidden: Tensor, expert: int) -> Tensor:
            """Return the product of one expert's matrix and its tokens, [tokens, in] -> [tokens, out]."""
            own, bias = getattr(experts, name)[expert], getattr(experts, f"{name}_bias", None)
            plain: Tensor = hidden @ (own if transposed else own.T)
            if bias is not None:
                plain = plain + bias[expert]
            with torch.autocast(hidden.device.type, enabled=False):
                first, second = (factor[expert] for factor in self.factors())
                change = scale * (hidden.float() @ first.T @ second.T)
            return plain + change.to(plain.dtype)

        def factors(self) -> tuple[Tensor, Tensor]:
            """Return A, [experts, rank, in], and B, [experts, out, rank]."""
            first = self.lora_A.weight.reshape(count, rank, down[1])
            return first, self.lora_B.weight.reshape(up[0], rank, count).permute(2, 0, 1)

        def update(self) -> Tensor:
            first, second = self.factors()
            made = scale * (second @ first)
            return made.transpose(1, 2) if transposed else made

    return AdaptedParameter()


def _route(indices: Tensor, count: int) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield each chosen expert with its tokens and their places; in a memory plan, without data, equal shares."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensor

    if isinstance(indices, FakeTensor):
        used = min(count, indices.numel())
        some = indices.new_zeros(-(-indices.numel() // used))
        yield from ((expert, some, some) for expert in range(used))
        return
    for expert in sorted(set(indices.flatten().tolist())):
        token, place = torch.where(indices == expert)
        yield expert, token, place


def _factor(shape: tuple[int, int], beside: nn.Module) -> nn.Linear:
    import torch

    device = next(beside.parameters()).device
    layer = torch.nn.Linear(shape[1], shape[0], bias=False, device=device, dtype=torch.float32)
    torch.nn.init.zeros_(layer.weight)
    return layer


PEFT = "base_model.model."  # what peft puts before the name of each tensor


@dataclass(frozen=True)
class Adapters:
    """The adapters of a model: their tensors by peft's names, in float32, each [rank, in] (A) or [out, rank] (B)."""

    rank: int
    alpha: float
    tensors: Mapping[str, Tensor]

    @property
    def lora(self) -> Lora:
        return Lora(rank=self.rank, alpha=self.alpha, experts=any(f".{BASE}." in name for name in self.tensors))


if TYPE_CHECKING:
    Weights = Adapters | Mapping[str, Tensor]  # adapters on a base that the reader has, or a whole state dictionary


def add_adapters(model: PreTrainedModel, lora: Lora, seed: int) -> None:
    """Freeze a model and add an adapter to each linear layer except the output head, to experts with `lora.experts`,
    and only in the last `lora.layers`. B starts at zero, so outputs stay. Raise UsageError if the model lacks them."""
    import torch

    model.requires_grad_(False)
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    linear = [name for name, layer in model.named_modules() if isinstance(layer, torch.nn.Linear) and layer is not head]
    mixtures = [name for name, layer in model.named_modules() if lora.experts and is_mixture(layer)]
    if not linear:
        raise UsageError(f"{type(model).__name__} has no linear layers for adapters: train.lora.rank=0 trains all")
    if lora.experts and not mixtures:
        raise UsageError(f"{type(model).__name__} has no mixture of experts: set train.lora.experts=false")
    count = int(model.config.get_text_config().num_hidden_layers)
    if lora.layers > count:
        raise UsageError(f"{type(model).__name__} has {count} layers: train.lora.layers={lora.layers} is too many")
    first = count - lora.layers if lora.layers else -1
    generator = torch.Generator().manual_seed(seed)
    for name in linear + mixtures:
        if layer_of(name) >= first:
            _adapt(model, name, lora)
    for _, layer in list_adapters(model):
        drawn = torch.rand(layer.lora_A.weight.shape, generator=generator)
        with torch.no_grad():
            layer.lora_A.weight.copy_((2 * drawn - 1) * layer.lora_A.in_features**-0.5)


def layer_of(name: str) -> int:
    """Return the number of the transformer layer that a part of a model, or a tensor, belongs to; -1: to none."""
    return next((int(part) for part in name.split(".") if part.isdecimal()), -1)


def list_adapters(model: PreTrainedModel) -> Iterator[tuple[str, Any]]:
    """Yield every layer with an adapter, and its name."""
    for name, layer in model.named_modules():
        if hasattr(layer, DOWN) and hasattr(layer, BASE):
            yield name, layer


def adapters_of(model: PreTrainedModel, state: Mapping[str, Tensor] | None = None) -> Adapters | None:
    """Return the adapters of a model, which share memory with it, or None; `state` has tensors that were gathered."""
    first = next(list_adapters(model), None)
    if first is None:
        return None
    found = {name: value for name, value in (state or model.state_dict()).items() if _is_part(name)}
    return Adapters(first[1].rank, first[1].alpha, {f"{PEFT}{name}": value.detach() for name, value in found.items()})


def _layer_names(adapters: Adapters) -> list[str]:
    return list(dict.fromkeys(name.removeprefix(PEFT).rsplit(".", 2)[0] for name in adapters.tensors))


def tensors_of(weights: Weights) -> Mapping[str, Tensor]:
    """Return the tensors of adapters, or of a state dictionary, by name."""
    return weights.tensors if isinstance(weights, Adapters) else weights


def on_cpu(weights: Weights) -> Weights:
    """Return weights in the memory of the CPU, without gradients."""
    moved = {name: value.detach().cpu() for name, value in tensors_of(weights).items()}
    return replace(weights, tensors=moved) if isinstance(weights, Adapters) else moved


def put_adapters(model: PreTrainedModel, adapters: Adapters) -> None:
    """Give adapters to a model, in place of its own, and freeze everything else; raise as `check_adapters`."""
    check_adapters(model, adapters)
    present = adapters_of(model)
    if present is None or (present.lora, present.tensors.keys()) != (adapters.lora, adapters.tensors.keys()):
        drop_adapters(model)
        model.requires_grad_(False)
        for name in _layer_names(adapters):
            if not name.endswith(f".{BASE}"):
                _adapt(model, name, adapters.lora)
    own = model.state_dict()
    for name, value in adapters.tensors.items():
        own[name.removeprefix(PEFT)].copy_(value)


def keep_rounded(model: PreTrainedModel) -> None:
    """Round adapters of a model that is only sampled once, not in every pass; call it after every change of them."""
    import torch

    with torch.no_grad():
        for _, layer in list_adapters(model):
            if hasattr(layer, "rounded"):
                layer.kept = layer.rounded()


def check_adapters(model: PreTrainedModel, adapters: Adapters) -> None:
    """Raise UsageError for adapters of another model: a layer is missing, cannot be adapted, or has another shape."""
    modules = {_plain(name): layer for name, layer in model.named_modules()}  # of equal names, the innermost
    expected: dict[str, tuple[int, ...]] = {}
    for name in map(_plain, _layer_names(adapters)):
        pairs = factor_shapes(modules.get(name), adapters.rank)
        for at, shapes in enumerate(pairs):
            inside = f".{BASE}" * (len(pairs) - 1 - at)
            expected |= {f"{PEFT}{name}{inside}.{part}.weight": s for part, s in zip((DOWN, UP), shapes, strict=True)}
    found = {name: tuple(value.shape) for name, value in adapters.tensors.items()}
    if found != expected:
        wrong = min(name for name, _ in found.items() ^ expected.items())
        raise UsageError(f"these adapters do not fit {type(model).__name__}: {wrong}")


def drop_adapters(model: PreTrainedModel) -> None:
    """Take all adapters off a model; its weights are those of the base, and stay frozen."""
    for name, layer in list(list_adapters(model)):
        if not name.endswith(f".{BASE}"):
            while hasattr(layer, BASE):
                layer = layer.base_layer
            model.set_submodule(name, layer)


def plain_state(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the state dictionary of the model without its adapters, which shares memory with it."""
    return {_plain(name): value for name, value in model.state_dict().items() if not _is_part(name)}


def merge_state(model: PreTrainedModel, dtype: str | None = None) -> dict[str, Tensor]:
    """Return the plain model's state dictionary, with adapters added in float32, in the weights' type or `dtype`."""
    import torch

    merged = plain_state(model)
    with torch.no_grad():
        for name, weight, change in list_updates(model):
            merged[name] = (weight.float() + change).to(weight.dtype if dtype is None else getattr(torch, dtype))
    return merged if dtype is None else {name: value.to(getattr(torch, dtype)) for name, value in merged.items()}


def list_updates(model: PreTrainedModel) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield every weight with an adapter, by its name in the plain model, and what the adapter adds, in float32."""
    own = plain_state(model)
    for name, layer in list_adapters(model):
        target = f"{_plain(name)}.{layer.target}"
        yield target, own[target], layer.update()


def merge_adapters(model: PreTrainedModel) -> None:
    """Merge the adapters of a model into its weights, in place."""
    merged = merge_state(model)
    drop_adapters(model)
    model.load_state_dict(merged, strict=False)


def _is_part(name: str) -> bool:
    return f".{DOWN}." in name or f".{UP}." in name


def _plain(name: str) -> str:
    return name.replace(f".{BASE}", "")


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
    """Write adapters to a folder that peft and vLLM read; the configuration, which makes it one, comes last."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    names = _layer_names(adapters)
    mixtures = {name.removesuffix(f".{BASE}") for name in names if name.endswith(f".{BASE}")}
    modules = {name.rpartition(".")[2] for name in names if name.removesuffix(f".{BASE}") not in mixtures}
    ends = sorted({".".join(name.split(".")[-2:]) for name in mixtures})
    layers = sorted({layer_of(name) for name in adapters.tensors})
    config = AdapterConfig(
        base_model_name_or_path=str(base.resolve()),
        r=adapters.rank,
        lora_alpha=int(adapters.alpha) if adapters.alpha.is_integer() else adapters.alpha,
        target_modules=sorted(modules),
        target_parameters=[f"{end}.{parameter}" for end in ends for parameter in EXPERTS] or None,
        layers_to_transform=layers if layers[0] > 0 else None,
    )
    tensors = {name: value.cpu().contiguous() for name, value in adapters.tensors.items()}
    save_file(tensors, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    write_atomically(folder / ADAPTER_CONFIG, msgspec.json.format(msgspec.json.encode(config)))


def read_adapter_config(folder: Path) -> AdapterConfig:
    """Return the settings of the adapters in a folder; raise UsageError if they are damaged or not plain LoRA."""
    path = folder / ADAPTER_CONFIG
    with refusing(f"{path} is not a configuration of adapters"):
        config = msgspec.json.decode(path.read_bytes(), type=AdapterConfig)
    other = config.use_rslora or config.use_dora or config.rank_pattern or config.alpha_pattern or config.fan_in_fan_out
    if config.peft_type != "LORA" or config.bias != "none" or config.modules_to_save or other or config.r < 1:
        raise UsageError(f"{path} describes other adapters than plain LoRA of one rank: merge them with peft first")
    return config


def read_adapters(folder: Path) -> Adapters:
    """Return the adapters in a folder, in float32; raise UsageError if there are none that can be used."""
    config = read_adapter_config(folder)
    if not (folder / ADAPTER_WEIGHTS).is_file():
        raise UsageError(f"{folder} has no file {ADAPTER_WEIGHTS}")
    with optional("train"):
        from safetensors.torch import load_file
    with refusing(f"{folder / ADAPTER_WEIGHTS} is damaged"):
        tensors = {name: value.float() for name, value in load_file(folder / ADAPTER_WEIGHTS).items()}
    return Adapters(config.r, float(config.lora_alpha), tensors)
