"""The datasets of a cache folder, found and fetched by name: BEIR's sets, the benchmarks of the paper, ids of the hub.

A dataset `NAME` is the folder `NAME` of the cache, in BEIR or TREC layout or with a benchmark's official files, whoever
put it there. What is fetched, by the client of the Hugging Face hub, is checked, and put in its place in one step.
"""

from __future__ import annotations

import hashlib
import lzma
import re
import shutil
import stat
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from importlib import resources
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any, cast

import msgspec

from harness1.data import beir
from harness1.data.benchmarks import BENCHMARKS, Benchmark, Hub
from harness1.data.tables import INFLATION, LEAST_INFLATED, find_files
from harness1.errors import MALFORMED, InfrastructureFault, UsageError, optional
from harness1.plain import file_digest, meant
from harness1.records import Record
from harness1.runs.files import (
    STAGE,
    Stage,
    lock,
    read_json,
    read_stage,
    refuse_foreign,
    refuse_full_disk,
    under_way,
    write_json,
    writing,
)

GET = "data get"
PREFIX = "beir/"
"""Names the archive of BEIR where a benchmark of the paper has the plain name."""
SUMS = "sums.json"
"""The file of the checksums of what was fetched, by which it is checked when it is fetched again."""
LAYOUT = ("corpus.jsonl*", "queries.jsonl*", "qrels/*.tsv*")
"""The files of a dataset in BEIR layout."""
MOST_FILES = 10_000
MIRROR = "https://public.ukp.informatik.tu-darmstadt.de/thakur/BEIR/datasets"
"""The address below which BEIR's archives are, `NAME.zip`."""
WAITS_S = (1.0, 2.0, 4.0, 8.0)
"""The waits before a server that failed is asked again; the hub's client itself goes on after a lost connection."""
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

    @property
    def own_name(self) -> str:
        """The name of its folder in the cache."""
        return f"{PREFIX}{self.name}" if self.name in BENCHMARKS else self.name


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


@dataclass(frozen=True)
class DatasetCache:
    """A cache folder of datasets. `say`: called with each line about the work."""

    folder: Path
    say: Callable[[str], None] = lambda line: None
    progress: Progress = lambda part, done, of: None

    def find(self, name: str) -> str | None:
        """Return what `open_source` opens a dataset by, or None if it is not here, or not whole."""
        name, place = plain_name(name), self.place(name)
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
        return str(self.place(name))

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
        archive = self._work(known.own_name) / f"{known.name}.zip"
        archive.parent.mkdir(parents=True, exist_ok=True)
        self.say(f"fetching {known.name} ({known.size}) from {url}")
        is_resumed, show = archive.exists(), partial(self.progress, f"fetching {known.name}")
        try:
            download(url, archive, show)
            if is_resumed and _md5(archive) != known.md5:  # the server has another file by now
                archive.unlink()
                download(url, archive, show)
        except InfrastructureFault as error:
            raise InfrastructureFault(
                f"{known.name} is not in {self.folder}, and {url} cannot be downloaded: {error}. Try again, put a BEIR"
                f" folder at {self.place(known.own_name)}, or download that file elsewhere, then: harness1 data import"
                f" {known.name} FILE"
            ) from error
        self._unpack(known, archive)

    def _unpack(self, known: BeirSet, archive: Path) -> None:
        work = self._work(known.own_name)
        if (found := _md5(archive)) != known.md5:
            if archive.parent == work:
                shutil.rmtree(work)
            raise UsageError(f"{archive} is not the archive of {known.name}: its MD5 is {found}, not {known.md5}")
        content = work / "content"
        shutil.rmtree(content, ignore_errors=True)
        unpack(archive, content)
        folder = content / known.name if (content / known.name).is_dir() else content
        if not all(beir.is_beir(folder / part) for part in known.parts or (".",)):
            raise UsageError(f"{archive} holds no dataset in BEIR layout")
        self._install(known.own_name, folder, {"md5": known.md5})

    def _get_from_hub(self, name: str, force: bool) -> None:
        benchmark, place = BENCHMARKS.get(name), self.place(name)
        hubs = benchmark.hub if benchmark else (Hub(repository=name, patterns=LAYOUT),)
        wanted: dict[str, str] = {} if force else self._sums().get(name, {})
        content = self._work(name) / "content"
        if force:
            shutil.rmtree(content, ignore_errors=True)
        content.parent.mkdir(parents=True, exist_ok=True)
        self.say(f"fetching {name} from the hub")
        otherwise = by_hand(benchmark) if benchmark else f"Or put a BEIR folder at {place}"
        revisions = {key: value for key, value in wanted.items() if key != "sha256"}
        try:
            taken = get_from_hub(name, hubs, content, otherwise, revisions)
        except (InfrastructureFault, UsageError):
            with suppress(OSError):  # of a download that began, the files that are whole are kept
                content.parent.rmdir()
            raise
        shutil.rmtree(content / ".cache", ignore_errors=True)  # the client's notes
        files = sorted(path for path in content.rglob("*") if path.is_file() and path != content / STAGE)
        lines = [f"{path.relative_to(content).as_posix()}\0{file_digest(path)}\n" for path in files]
        found, fault = hashlib.sha256("".join(lines).encode()).hexdigest(), ""
        if found != wanted.get("sha256", found):
            fault = f"the files of {name} have another checksum than when they were first fetched: {found}"
        elif not benchmark and not beir.is_beir(content):
            fault = f"{name} on the hub is not in BEIR layout: it has no corpus.jsonl"
        if fault:
            shutil.rmtree(content.parent)
            raise UsageError(fault)
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
        path = self._work(known.own_name if known else name).with_suffix(".lock")
        with path.open("w") as file:
            lock(file, "", lambda: self.say(f"waiting for another process that fetches {name}"))
            yield


def _md5(archive: Path) -> str:
    with archive.open("rb") as file:
        return hashlib.file_digest(file, "md5").hexdigest()


def unpack(archive: Path, into: Path) -> None:
    """Unpack the files of a zip archive into a folder; hidden files and what a Mac adds are left out. Raises
    UsageError: the archive is torn or encrypted, a name leads out of the folder, an entry is not a regular file, or
    there are more than `MOST_FILES` files or more bytes than `tables.INFLATION` times the archive."""
    refusal = f"{archive.name} is not unpacked:"
    try:
        with writing(into), zipfile.ZipFile(archive) as opened:
            entries: list[tuple[zipfile.ZipInfo, Path]] = []
            for each in opened.infolist():
                name, place = each.filename, PurePosixPath(each.filename)
                if name.endswith("/"):
                    continue
                outside = not place.parts or place.is_absolute() or ".." in place.parts
                if outside or any(mark in name for mark in "\\:\0"):
                    raise UsageError(f"{refusal} the name {name!r} is empty or leads out of the folder")
                if stat.S_IFMT(each.external_attr >> 16) not in (0, stat.S_IFREG) or each.flag_bits & 1:
                    raise UsageError(f"{refusal} {name!r} is a link or encrypted")
                if not any(part.startswith((".", "__MACOSX")) for part in place.parts):
                    entries.append((each, into / place))
            size = sum(each.file_size for each, _ in entries)
            if len(entries) > MOST_FILES or size > max(INFLATION * archive.stat().st_size, LEAST_INFLATED):
                what = f"{len(entries):,} files" if len(entries) > MOST_FILES else f"{size / 1e6:,.0f} MB"
                raise UsageError(f"{refusal} it would unpack to {what}, more than is allowed")
            refuse_full_disk(into, size)
            for each, target in entries:
                target.parent.mkdir(parents=True, exist_ok=True)
                with opened.open(each) as packed, target.open("xb") as file:
                    shutil.copyfileobj(packed, file)
    except (zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, NotImplementedError, *MALFORMED) as error:
        raise UsageError(f"{archive.name} is damaged: {error}") from error


def download(url: str, into: Path, on_bytes: Callable[[int, int], None] = lambda done, of: None) -> None:
    """Download a file over HTTP; what a lost connection or a killed process left is completed. Its checksum has to be
    compared, because the server may have another file by now. `on_bytes`: called with the bytes that are there and
    their total, 0 if unknown. Raises MissingExtra: the hub's client, which downloads from any server, is not installed;
    InfrastructureFault: the server does not hand the file out; UsageError: no address of HTTP, or the disk is full."""
    with optional("data", "huggingface_hub"):
        from httpx import HTTPError
        from huggingface_hub.errors import HfHubHTTPError
        from huggingface_hub.file_download import http_get
    if not url.startswith(("http://", "https://")):
        raise UsageError(f"{url} is not an address of HTTP")

    @contextmanager
    def show(*, total: int | None, initial: int, **_: object) -> Iterator[Any]:
        """Take the place of the bar that a download shows."""
        refuse_full_disk(into, (total or 0) - initial)
        done = [initial]

        def update(count: int) -> None:
            done[0] += count
            on_bytes(done[0], total or 0)

        yield SimpleNamespace(update=update)

    for wait_s in (*WAITS_S, None):
        try:
            with into.open("ab") as file:
                http_get(url, file, resume_size=file.tell(), tqdm_class=cast("Any", show))
            return
        except HfHubHTTPError as error:
            answer = error.response
            if answer.status_code == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
                return  # all of it is there
            if wait_s is None or not answer.is_server_error:
                raise InfrastructureFault(f"the server answers {answer.status_code} {answer.reason_phrase}") from error
            time.sleep(wait_s)
        except (HTTPError, OSError) as error:
            if isinstance(error, OSError) and error.errno:
                raise  # of this machine's disk
            raise InfrastructureFault(f"no connection: {error}") from error


def by_hand(benchmark: Benchmark) -> str:
    """Say how the files of a benchmark are placed without the hub."""
    return f"Fetch them by other means ({benchmark.origin}), then: harness1 data import {benchmark.name} PATH"


def get_from_hub(
    name: str, hubs: Sequence[Hub], out: Path, otherwise: str, wanted: Mapping[str, str] = {}, *, force: bool = False
) -> dict[str, str]:
    """Download files of the hub, unchanged, into a folder, if that is not done yet; return their revisions. An
    interrupted download is resumed. `wanted`: revisions of repositories; others are taken as they are now. `otherwise`:
    what to do where they cannot be downloaded. Raises MissingExtra: the hub's client is not installed;
    InfrastructureFault: the hub cannot be reached; UsageError: it refuses, or the folder holds something else."""
    with optional("data", "huggingface_hub"):
        from huggingface_hub import HfApi, snapshot_download
    stage = Stage(GET, {"benchmark": name, "hub": [[hub.repository, *hub.patterns] for hub in hubs]})
    if stage.is_done(out) and not force:
        done = read_stage(out)
        return done.hashes if done else {}
    refuse_foreign(out, GET)
    taken: dict[str, str] = {}
    for hub in hubs:
        cannot = f"the files of {name} ({hub.repository}) cannot be downloaded: the hub"
        with _explain(cannot, otherwise):
            # Offline, a download into an existing folder does nothing, so the hub is asked before the folder exists.
            found = str(HfApi().dataset_info(hub.repository).sha)
        revision = taken[hub.repository] = wanted.get(hub.repository, found)
        patterns, folder = list(hub.patterns), out / hub.folder
        with under_way(stage, out), _explain(cannot, otherwise):
            snapshot_download(
                hub.repository, repo_type="dataset", revision=revision, allow_patterns=patterns, local_dir=folder
            )
        if not find_files(folder, *patterns):
            raise UsageError(f"{cannot} does not have them any more. {otherwise}")
    stage.write(out, status="finished", hashes=taken)
    return taken


@contextmanager
def _explain(cannot: str, otherwise: str) -> Iterator[None]:
    import httpx
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        yield
    except (HfHubHTTPError, HFValidationError) as error:
        raise UsageError(f"{cannot} refuses them. {otherwise}") from error
    except (LocalEntryNotFoundError, httpx.HTTPError, ConnectionError) as error:
        raise InfrastructureFault(f"{cannot} cannot be reached. {otherwise}") from error
