"""MXFP4, the type of gpt-oss's experts: numbers of four bits, and a power of two for every 32 of them (OCP Microscaling
Formats 1.0)."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import msgspec

from harness1.errors import UsageError, optional
from harness1.hashing import file_digest
from harness1.model_folder import folder_hash, refusing
from harness1.models.gguf import convert_gguf
from harness1.records import Record
from harness1.runs.files import (
    STAGE,
    Stage,
    read_json,
    refuse_foreign,
    refuse_full_disk,
    refuse_other,
    remove,
    replacing,
    under_way,
    write_json,
    writing,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor


MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""E2M1: the numbers of the lower three bits; the fourth is the sign."""
BIAS = 127
"""Of the exponents, which are bytes (E8M0)."""
BLOCK = 32
"""Numbers that share an exponent, two in a byte, the lower half first."""


def dequantized(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a matrix as models multiply with it, [inputs, outputs].

    Args:
        blocks: [outputs, inputs / 32, 16], bytes.
        scales: [outputs, inputs / 32], bytes: exponents.

    Every number is exact in bfloat16 and float32 (one bit of mantissa), unless it overflows.
    """
    import torch

    signed = torch.tensor([*MAGNITUDES, *(-one for one in MAGNITUDES)])
    pairs = torch.stack([signed.repeat(16), signed.repeat_interleave(16)], dim=-1)  # [byte, half]
    powers = torch.exp2(scales.float() - BIAS)
    numbers = pairs[blocks.int()].flatten(-2) * powers.unsqueeze(-1)
    return numbers.flatten(-2).T.to(dtype).contiguous()


BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4,
    "F16": 2, "BF16": 2, "I16": 2, "U16": 2, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip
"""Sizes of the types that are written, by their names in the format."""
ALIGNMENT = 8
"""The header ends at a multiple of this many bytes."""


class TensorInfo(NamedTuple):
    """The description of a tensor; `kind` is the format's name of its type."""

    name: str
    kind: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Return its size in bytes."""
        return prod(self.shape) * BYTES[self.kind]


def write_shards(
    folder: Path,
    tensors: Sequence[TensorInfo],
    load: Callable[[TensorInfo], Tensor],
    shard_bytes: int,
    on_file: Callable[[int, int], None],
) -> list[str]:
    """Write tensors into `model.safetensors`, or into several files and their index; return the names of the files.

    Args:
        load: returns a tensor as described; it is called once for each, in order.
        shard_bytes: the size at which a file ends; a file holds at least one tensor.
        on_file: called with the number of files done and of all.
    """
    shards = list(_shards(tensors, shard_bytes))
    names = [f"model-{at:05}-of-{len(shards):05}.safetensors" for at in range(1, len(shards) + 1)]
    if len(shards) == 1:
        names = ["model.safetensors"]
    for done, (name, shard) in enumerate(zip(names, shards, strict=True)):
        on_file(done, len(shards))
        _write(folder / name, shard, load)
    if len(shards) > 1:
        places = {each.name: name for name, shard in zip(names, shards, strict=True) for each in shard}
        total = sum(each.size for each in tensors)
        write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": places})
    return names


def _shards(tensors: Sequence[TensorInfo], shard_bytes: int) -> Iterator[list[TensorInfo]]:
    shard: list[TensorInfo] = []
    size = 0
    for each in tensors:
        if shard and size + each.size > shard_bytes:
            yield shard
            shard, size = [], 0
        shard.append(each)
        size += each.size
    yield shard


def _write(path: Path, tensors: Sequence[TensorInfo], load: Callable[[TensorInfo], Tensor]) -> None:
    """Write one file: 8 bytes with the size of the header, little-endian, the header as JSON, then the tensors."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for each in tensors:
        begin, end = end, end + each.size
        header[each.name] = {"dtype": each.kind, "shape": each.shape, "data_offsets": (begin, end)}
    encoded = msgspec.json.encode(header)
    encoded += b" " * (-len(encoded) % ALIGNMENT)
    with replacing(path) as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for each in tensors:
            file.write(_bytes(load(each), each))


def _bytes(value: Tensor, described: TensorInfo) -> memoryview:
    import torch

    assert tuple(value.shape) == described.shape, f"{described.name} has the shape {tuple(value.shape)}"
    return value.contiguous().reshape(-1).view(torch.uint8).numpy().data


VERB = "models convert"
SHARD_BYTES = 4_000_000_000
CHECKED = 1 << 24
"""Numbers that are checked at a time."""
CONFIG = "config.json"
WEIGHTS = "*.safetensors*"
OTHERS = (".json", ".txt", ".model", ".jinja", ".md")
"""Suffixes of the files that are copied: tokenizer, chat template, licence and card."""
PACKED = "_blocks"
SCALES = "_scales"
LAYER = re.compile(r"(model\.layers\.)(\d+)(\..+)")
Target = Literal["bfloat16", "float16", "float32"]
KINDS: Mapping[str, str] = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
FLOATS = ("F64", "F32", "F16", "BF16")


class StoredTensor(NamedTuple):
    """A tensor in an open file, where it may have another name than in the new model."""

    file: Any
    name: str

    def view(self) -> Any:
        """Return what reads parts of it, and knows its type and shape."""
        return self.file.get_slice(self.name)


Stored = Mapping[str, StoredTensor]
"""Tensors by their names in the new model."""


class Converted(Record, kw_only=True):
    """The contents of a converted model."""

    dtype: str
    files: int
    tensors: int
    size: int
    """Bytes of all weights."""
    dequantized: int
    """Tensors that were MXFP4."""


def convert_model(
    source: Path,
    out: Path,
    dtype: Target = "bfloat16",
    *,
    layers: Sequence[int] = (),
    shard_bytes: int = SHARD_BYTES,
    force: bool = False,
    on_file: Callable[[int, int], None] = lambda done, of: None,
) -> Converted:
    """Write a model's weights in one type into a folder, with its tokenizer and its configuration, unless it is there.

    Args:
        source: a folder of `config.json` and safetensors, whose tensors are MXFP4 or plain; or a GGUF file of a Llama.
        layers: keep only these, numbered from 0 and in this order; none given: all.
        shard_bytes: the size at which a file of weights ends.
        on_file: called with the number of files done and of all.

    Raises:
        UsageError: the source is no such model, lacks one of the layers, its numbers do not fit the type, or the
            folder holds something else, is the source, or has too little room.
        MissingExtra: a package that the conversion needs is not installed.
    """
    if dtype not in get_args(Target):
        raise UsageError(f"no conversion to {dtype}: choose one of {', '.join(get_args(Target))}")
    if source.resolve() == out.resolve():
        raise UsageError(f"{out} is the model itself: choose another --out")
    with optional("train"):
        import safetensors  # noqa: F401
        import torch  # noqa: F401
    stage = Stage(VERB, {"model": _digest(source), "dtype": dtype} | ({"layers": [*layers]} if layers else {}))
    if not force and stage.is_done(out):
        return msgspec.convert(read_json(out / STAGE)["outputs"], Converted)
    refuse_foreign(out, VERB) if force else refuse_other(stage, out, "model")
    with _folder_of(source, out) as folder, _opened(folder) as stored:
        config = _plain_config(folder, dtype)
        if layers:
            config, stored = _kept_config(config, layers), _kept_tensors(stored, layers)
        tensors = _planned(stored, KINDS[dtype])
        refuse_full_disk(out, sum(each.size for each in tensors))
        with under_way(stage, out):
            remove(out, WEIGHTS, keep_card=True)
            files = write_shards(out, tensors, lambda each: _loaded(stored, each), shard_bytes, on_file)
            _copy_others(folder, out)
            write_json(out / CONFIG, config)
            packed = sum(each.name + PACKED in stored for each in tensors)
            size = sum(each.size for each in tensors)
            made = Converted(dtype=dtype, files=len(files), tensors=len(tensors), size=size, dequantized=packed)
            stage.write(out, status="finished", outputs=msgspec.to_builtins(made))
    return made


def _digest(source: Path) -> str:
    if source.is_dir():
        return folder_hash(source)
    with writing(source):
        return file_digest(source)


@contextmanager
def _folder_of(source: Path, out: Path) -> Iterator[Path]:
    """Yield the folder of the model; that of a GGUF file is temporary, beside the output."""
    if source.is_dir():
        yield source
        return
    with writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as folder:
            convert_gguf(source, Path(folder))
            yield Path(folder)


@contextmanager
def _opened(folder: Path) -> Iterator[Stored]:
    from safetensors import safe_open

    if (folder / "adapter_config.json").is_file():
        raise UsageError(f"{folder} holds adapters, not a whole model: merge them first")
    stored: dict[str, StoredTensor] = {}
    with ExitStack() as stack:
        with refusing(f"the weights in {folder} cannot be read"):
            for path in sorted(folder.glob("*.safetensors")):
                file = stack.enter_context(safe_open(path, framework="pt"))
                names: list[str] = file.keys()
                stored |= {name: StoredTensor(file, name) for name in names}
        if not stored or not (folder / CONFIG).is_file():
            raise UsageError(f"{folder} is not a model: it needs config.json and safetensors weights")
        yield stored


def _plain_config(folder: Path, dtype: str) -> dict[str, Any]:
    """Return the configuration of the converted model: of that type, and not quantized.

    Raises:
        UsageError: the model is quantized in another way.
    """
    with refusing(f"{folder} has no readable {CONFIG}"):
        config = read_json(folder / CONFIG)
    method = (config.pop("quantization_config", None) or {"quant_method": "mxfp4"}).get("quant_method")
    if method != "mxfp4":
        raise UsageError(f"{folder} is quantized as {method}: only MXFP4 can be converted")
    config.pop("torch_dtype", None)  # the name that the setting once had
    return config | {"dtype": dtype}


def _kept_config(config: dict[str, Any], layers: Sequence[int]) -> dict[str, Any]:
    """Return the configuration of a model that has only some of its layers.

    Raises:
        UsageError: the model lacks one, or is not described as a plain language model.
    """
    count = config.get("num_hidden_layers", 0)
    wrong = [layer for layer in layers if not 0 <= layer < count]
    if wrong:
        raise UsageError(f"the model has {count} layers, numbered from 0, and no layer {wrong[0]}")
    kept: dict[str, Any] = {"num_hidden_layers": len(layers)}
    if "layer_types" in config:
        kept["layer_types"] = [config["layer_types"][layer] for layer in layers]
    return config | kept


def _kept_tensors(stored: Stored, layers: Sequence[int]) -> Stored:
    """Return all tensors but those of other layers, by their names in the new model."""
    kept: dict[str, StoredTensor] = {}
    for name, tensor in stored.items():
        found = LAYER.fullmatch(name)
        if found is None:
            kept[name] = tensor
            continue
        begin, layer, rest = found.groups()
        kept |= {f"{begin}{place}{rest}": tensor for place, each in enumerate(layers) if each == int(layer)}
    return kept


def _planned(stored: Stored, kind: str) -> list[TensorInfo]:
    """Return the tensors to write, in the order of their names.

    Raises:
        UsageError: one is of a type that cannot be converted, or blocks have no scales of their shape.
    """
    planned = []
    for name in sorted(stored):
        view = stored[name].view()
        found, shape = view.get_dtype(), tuple(view.get_shape())
        whole = name.removesuffix(PACKED)
        if whole != name and found == "U8":
            *experts, outputs, groups, _ = shape
            if _shape_of(stored, whole + SCALES) != shape[:-1] or 2 * shape[-1] != BLOCK:
                raise UsageError(f"{name} has no {SCALES[1:]} of its shape")
            planned.append(TensorInfo(whole, kind, (*experts, groups * BLOCK, outputs)))
        elif name.endswith(SCALES) and name.removesuffix(SCALES) + PACKED in stored:
            continue
        elif found in BYTES:
            planned.append(TensorInfo(name, kind if found in FLOATS else found, shape))
        else:
            raise UsageError(f"{name} is of the type {found}, which cannot be converted")
    return planned


def _shape_of(stored: Stored, name: str) -> tuple[int, ...]:
    return tuple(stored[name].view().get_shape()) if name in stored else ()


def _loaded(stored: Stored, wanted: TensorInfo) -> Tensor:
    """Return a tensor in its new type; experts are converted one at a time.

    Raises:
        UsageError: a number does not fit the type.
    """
    import torch

    target = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}.get(wanted.kind)
    name = wanted.name
    if name in stored:
        value: Tensor = stored[name].file.get_tensor(stored[name].name)
        value = value if target is None else value.to(target)
    else:
        blocks, scales = (stored[name + end].view() for end in (PACKED, SCALES))
        value = torch.empty(wanted.shape, dtype=target)
        matrices = value if value.dim() > 2 else value[None]
        for at, matrix in enumerate(matrices):
            one = at if value.dim() > 2 else slice(None)
            matrix.copy_(dequantized(blocks[one], scales[one], matrix.dtype))
    # In parts, because the check takes more memory than what it checks.
    parts = torch.split(value.reshape(-1), CHECKED)
    if target is not None and not all(bool(torch.isfinite(part).all()) for part in parts):
        raise UsageError(f"{name} has numbers that are not finite in {str(target).removeprefix('torch.')}")
    return value


def _copy_others(folder: Path, out: Path) -> None:
    """Copy the tokenizer and the other small files of a model."""
    for path in sorted(folder.iterdir()):
        known = path.suffix in OTHERS and not path.match("*.index.json") and path.name not in (CONFIG, STAGE)
        if path.is_file() and known:
            shutil.copyfile(path, out / path.name)
