"""The datasets of a cache folder, found and fetched by name: BEIR's sets, the benchmarks of the paper, ids of the hub.

A dataset `NAME` is the folder `NAME` of the cache, in BEIR or TREC layout or with a benchmark's official files, whoever
put it there. What is fetched is checked, and put in its place in one step.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib import resources
from pathlib import Path

import msgspec

from harness1.data import beir
from harness1.data.benchmarks import BENCHMARKS, Hub
from harness1.data.fetch import GET, LAYOUT, by_hand, download, get_from_hub, unpack
from harness1.errors import InfrastructureFault, UsageError
from harness1.plain import file_digest, meant
from harness1.records import Record
from harness1.runs.files import STAGE, Stage, lock_or_wait, read_json, read_stage, write_json, writing

PREFIX = "beir/"
"""Names the archive of BEIR where a benchmark of the paper has the plain name."""
SUMS = "sums.json"
"""The file of the checksums of what was fetched, by which it is checked when it is fetched again."""
Progress = Callable[[str, int, int], None]
"""Called with the part of the work, the bytes done, and their total (0 if unknown)."""
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
_FILES = (".jsonl", ".json", ".gz", ".zip", ".md", ".txt", ".html", ".htm", ".pdf")


class BeirSet(Record):
    """A public dataset of BEIR. `md5` is the checksum of its archive, `parts` are the datasets in it, if several."""

    name: str
    what: str
    size: str
    md5: str
    parts: tuple[str, ...] = ()


_SETS = resources.files(__package__).joinpath("beir_sets.toml").read_bytes()
BEIR_SETS = {each.name: each for each in msgspec.toml.decode(_SETS, type=dict[str, list[BeirSet]])["set"]}


def is_name(spec: str) -> bool:
    """Return whether a dataset is given as NAME or OWNER/NAME, and not as what is plainly a path."""
    return _NAME.fullmatch(spec) is not None and not spec.endswith(_FILES)


def plain_name(name: str) -> str:
    """Return the one name of a dataset: BEIR's prefix stays only where a benchmark of the paper has the plain name."""
    plain = name.removeprefix(PREFIX)
    return plain if plain in BEIR_SETS and plain not in BENCHMARKS else name


def beir_set(name: str) -> BeirSet | None:
    """Return the set of BEIR whose archive holds a dataset, or None. Raises UsageError: the archive holds several
    datasets, and the name is not that of one."""
    first, _, part = name.removeprefix(PREFIX).partition("/")
    found = BEIR_SETS.get(first)
    if found is None or name in BENCHMARKS or (part and not found.parts):
        return None
    if found.parts and part not in found.parts:
        names = ", ".join(f"{first}/{each}" for each in found.parts)
        raise UsageError(f"{first} holds several datasets; name one: {names}")
    return found


MIRROR = "https://public.ukp.informatik.tu-darmstadt.de/thakur/BEIR/datasets"
"""The address below which BEIR's archives are, `NAME.zip`."""


@dataclass(frozen=True)
class DatasetCache:
    """A cache folder of datasets. `say`: called with each line about the work."""

    folder: Path
    say: Callable[[str], None] = lambda line: None
    progress: Progress = lambda part, done, of: None

    def find(self, name: str) -> str | None:
        """Return what `open_source` opens a dataset by, or None if it is not here, or not whole."""
        name = plain_name(name)
        place = self.place(name)
        if not place.is_dir() or not any(each.name != STAGE for each in place.iterdir()):
            return None
        stage = read_stage(place)
        if stage is not None and stage.status != "finished":
            return None
        return f"{name}:{place}" if name in BENCHMARKS and not beir.is_beir(place) else str(place)

    def get(self, name: str, *, force: bool = False) -> str:
        """Return what `open_source` opens a dataset by, fetching it if it is not here. `force`: fetch it in any case,
        and whatever its checksum was before. Raises InfrastructureFault: it cannot be downloaded; the message says what
        was tried, and how to place it by hand; UsageError: there is no dataset of that name, or its checksum or layout
        is wrong; MissingExtra: the client of the hub, which fetches archives too, is not installed."""
        name = plain_name(name)
        known = beir_set(name)
        if not is_name(name) or ("/" not in name and name not in BENCHMARKS and known is None):
            raise UsageError(
                f"there is no dataset {name!r}{meant(name, [*BENCHMARKS, *BEIR_SETS])}; `harness1 data list` shows the"
                f" names. Nor is it a file or folder, here or in {self.folder}"
            )
        if not force and (found := self.find(name)):
            return found
        with writing(self.folder), self._alone(name):
            if force or not self.find(name):
                self._get_archive(known) if known else self._get_from_hub(name, force)
        if found := self.find(name):
            return found
        raise UsageError(f"{self.place(name)} is not a whole dataset: remove it, and try again")

    def place_archive(self, name: str, archive: Path) -> str:
        """Put an archive of BEIR that was downloaded by other means in its place, and return as `get` does. Raises
        UsageError: no archive of BEIR has that name, or it is not what it should be."""
        if (known := beir_set(plain_name(name))) is None:
            raise UsageError(f"{name} is not an archive of BEIR; those are: {', '.join(BEIR_SETS)}")
        with writing(self.folder), self._alone(known.name):
            self._unpack(known, archive)
        return str(self.place(plain_name(name)))

    def datasets(self) -> list[str]:
        """Return the names of the datasets that are here, sorted."""
        below = [path for depth in ("*", "*/*") for path in self.folder.glob(depth) if path.is_dir()]
        names = [str(path.relative_to(self.folder)) for path in below if not path.name.startswith(".")]
        is_here = [name for name in names if name in BENCHMARKS or beir.is_beir(self.folder / name)]
        return sorted(name for name in is_here if self.find(name))

    def place(self, name: str) -> Path:
        """Return the folder of a dataset, whether or not it is there."""
        return self.folder.joinpath(*plain_name(name).split("/"))

    def _get_archive(self, known: BeirSet) -> None:
        url = f"{MIRROR}/{known.name}.zip"
        archive = self._work(_of_set(known)) / f"{known.name}.zip"
        archive.parent.mkdir(parents=True, exist_ok=True)
        self.say(f"fetching {known.name} ({known.size}) from {url}")
        is_resumed = archive.exists()
        try:
            download(url, archive, partial(self.progress, f"fetching {known.name}"))
            if is_resumed and _md5(archive) != known.md5:  # the server has another file by now
                archive.unlink()
                download(url, archive, partial(self.progress, f"fetching {known.name}"))
        except InfrastructureFault as error:
            raise InfrastructureFault(
                f"{known.name} is not in {self.folder}, and {url} cannot be downloaded: {error}. Try again, put a BEIR"
                f" folder at {self.place(_of_set(known))}, or download that file elsewhere, then: harness1 data import"
                f" {known.name} FILE"
            ) from error
        self._unpack(known, archive)

    def _unpack(self, known: BeirSet, archive: Path) -> None:
        work = self._work(_of_set(known))
        if (found := _md5(archive)) != known.md5:
            if archive.parent == work:
                shutil.rmtree(work)
            raise UsageError(f"{archive} is not the archive of {known.name}: its MD5 is {found}, not {known.md5}")
        content = work / "content"
        shutil.rmtree(content, ignore_errors=True)
        unpack(archive, content)
        folder = content / known.name if (content / known.name).is_dir() else content
        for part in known.parts or (".",):
            if not beir.is_beir(folder / part):
                raise UsageError(f"{archive} holds no dataset in BEIR layout")
        self._install(_of_set(known), folder, {"md5": known.md5})

    def _get_from_hub(self, name: str, force: bool) -> None:
        benchmark, place = BENCHMARKS.get(name), self.place(name)
        hubs = benchmark.hub if benchmark else (Hub(repository=name, patterns=LAYOUT),)
        wanted = {} if force else self._sums().get(name, {})
        content = self._work(name) / "content"
        if force:
            shutil.rmtree(content, ignore_errors=True)
        content.parent.mkdir(parents=True, exist_ok=True)
        self.say(f"fetching {name} from the hub")
        otherwise = by_hand(benchmark) if benchmark else f"Or put a BEIR folder at {place}"
        revisions = {key: value for key, value in wanted.items() if key != "sha256"}
        try:
            taken = get_from_hub(name, hubs, content, otherwise, revisions=revisions)
        except (InfrastructureFault, UsageError):
            with suppress(OSError):  # of a download that began, the files that are whole are kept
                content.parent.rmdir()
            raise
        shutil.rmtree(content / ".cache", ignore_errors=True)  # the client's notes
        found = _sum_of(content)
        if found != wanted.get("sha256", found):
            shutil.rmtree(content.parent)
            raise UsageError(f"the files of {name} have another checksum than when they were first fetched: {found}")
        if not benchmark and not beir.is_beir(content):
            shutil.rmtree(content.parent)
            raise UsageError(f"{name} on the hub is not in BEIR layout: it has no corpus.jsonl")
        self._install(name, content, {**taken, "sha256": found})
        if benchmark and benchmark.by_hand:
            raise UsageError(f"{place} holds what the hub has of {name}. Still needed: {benchmark.by_hand}")

    def _install(self, name: str, folder: Path, sums: dict[str, str]) -> None:
        place, work = self.place(name), self._work(name)
        Stage(GET, {"dataset": name}).write(folder, status="finished", hashes=sums)
        place.parent.mkdir(parents=True, exist_ok=True)
        if place.exists():
            if read_stage(place) is None and any(place.iterdir()):
                raise UsageError(f"{place} was not put there by harness1: remove it first")
            place.rename(work / "replaced")
        folder.rename(place)
        write_json(self.folder / SUMS, {**self._sums(), name: sums})
        shutil.rmtree(work)

    def _sums(self) -> dict[str, dict[str, str]]:
        path = self.folder / SUMS
        return read_json(path) if path.is_file() else {}

    def _work(self, name: str) -> Path:
        """Return the folder of an unfinished download, which is kept so that it can go on."""
        return self.folder / f".{name.replace('/', '--')}.partial"

    @contextmanager
    def _alone(self, name: str) -> Iterator[None]:
        self.folder.mkdir(parents=True, exist_ok=True)
        known = beir_set(name)
        lock = self._work(_of_set(known) if known else name).with_suffix(".lock")
        with lock.open("w") as file:
            lock_or_wait(file, lambda: self.say(f"waiting for another process that fetches {name}"))
            yield


def _md5(archive: Path) -> str:
    with archive.open("rb") as file:
        return hashlib.file_digest(file, "md5").hexdigest()


def _of_set(known: BeirSet) -> str:
    return f"{PREFIX}{known.name}" if known.name in BENCHMARKS else known.name


def _sum_of(folder: Path) -> str:
    """Return one SHA-256 over the names and contents of all files below a folder but its card."""
    total = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / STAGE):
        total.update(f"{path.relative_to(folder).as_posix()}\0{file_digest(path)}\n".encode())
    return total.hexdigest()
