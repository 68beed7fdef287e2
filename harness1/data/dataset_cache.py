"""The datasets of a cache folder, found and fetched by name: BEIR's sets, the benchmarks of the paper, ids of the hub.

A dataset `NAME` is the folder `NAME` of the cache, in BEIR or TREC layout or with a benchmark's official files, whoever
put it there. What is fetched, by the client of the Hugging Face hub, is put in its place in one step.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec

from harness1.data import beir
from harness1.data.benchmarks import BENCHMARKS, Benchmark, Hub
from harness1.data.tables import find_files
from harness1.errors import InfrastructureFault, UsageError, optional
from harness1.plain import meant
from harness1.records import Record
from harness1.runs.files import STAGE, Stage, lock, read_stage, refuse_foreign, refuse_full_disk, under_way, writing

GET = "data get"
PREFIX = "beir/"
"""Names the archive of BEIR where a benchmark of the paper has the plain name."""
LAYOUT = ("corpus.jsonl*", "queries.jsonl*", "qrels/*.tsv*")
"""The files of a dataset in BEIR layout."""
MIRROR = "https://public.ukp.informatik.tu-darmstadt.de/thakur/BEIR/datasets"
"""The address below which BEIR's archives are, `NAME.zip`."""
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
    """Return the set of BEIR whose archive holds a dataset, or None. Raises UsageError: it holds several; name one."""
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
        """Return what `open_source` opens a dataset by, fetching it if it is not here, or with `force`. Raises
        InfrastructureFault: it cannot be downloaded; the message says what was tried, and how to place it by hand;
        UsageError: there is no dataset of that name, or it is not what it should be; MissingExtra: the client of the
        hub, which fetches archives too, is not installed."""
        name = plain_name(name)
        known = beir_set(name)
        if not is_name(name) or ("/" not in name and name not in BENCHMARKS and known is None):
            raise UsageError(
                f"there is no dataset {name!r}{meant(name, [*BENCHMARKS, *BEIR_SETS])}; `harness1 data list` shows the"
                f" names. Nor is it a file or folder, here or in {self.folder}"
            )
        if not force and (found := self.find(name)):
            return found
        whole = plain_name(f"{PREFIX}{known.name}") if known else name  # what is fetched may hold several datasets
        work = self.folder / f".{whole.replace('/', '--')}.partial"  # kept until it is whole, so that it can go on
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            with work.with_suffix(".lock").open("w") as file:
                lock(file, "", lambda: self.say(f"waiting for another process that fetches {name}"))
                if force or not self.find(name):
                    self._fetch(whole, known, work, force)
        if found := self.find(name):
            return found
        raise UsageError(f"{self.place(name)} is not a whole dataset: remove it, and try again")

    def datasets(self) -> list[str]:
        """Return the names of the datasets that are here, sorted."""
        below = [path for depth in ("*", "*/*") for path in self.folder.glob(depth) if path.is_dir()]
        names = [str(path.relative_to(self.folder)) for path in below if not path.name.startswith(".")]
        is_here = [name for name in names if name in BENCHMARKS or beir.is_beir(self.folder / name)]
        return sorted(name for name in is_here if self.find(name))

    def place(self, name: str) -> Path:
        """Return the folder of a dataset, whether or not it is there."""
        return self.folder.joinpath(*plain_name(name).split("/"))

    def _fetch(self, name: str, known: BeirSet | None, work: Path, force: bool) -> None:
        content, sums = self._archive(known, work) if known else self._from_hub(name, work, force)
        place, benchmark = self.place(name), BENCHMARKS.get(name)
        Stage(GET, {"dataset": name}).write(content, status="finished", hashes=sums)
        place.parent.mkdir(parents=True, exist_ok=True)
        if place.exists():
            if read_stage(place) is None and any(place.iterdir()):
                raise UsageError(f"{place} was not put there by harness1: remove it first")
            place.rename(work / "replaced")
        content.rename(place)
        shutil.rmtree(work)
        if benchmark and benchmark.by_hand:
            raise UsageError(f"{place} holds what the hub has of {name}. Still needed: {benchmark.by_hand}")

    def _archive(self, known: BeirSet, work: Path) -> tuple[Path, dict[str, str]]:
        url, archive, content = f"{MIRROR}/{known.name}.zip", work / f"{known.name}.zip", work / "content"
        work.mkdir(exist_ok=True)
        self.say(f"fetching {known.name} ({known.size}) from {url}")
        try:
            download(url, archive, partial(self.progress, f"fetching {known.name}"))
        except InfrastructureFault as error:
            raise InfrastructureFault(
                f"{known.name} is not in {self.folder}, and {url} cannot be downloaded: {error}. Try again, or put a"
                f" BEIR folder at {self.place(f'{PREFIX}{known.name}')}"
            ) from error
        with archive.open("rb") as file:
            found = hashlib.file_digest(file, "md5").hexdigest()
        if found != known.md5:
            shutil.rmtree(work)
            raise UsageError(
                f"{url} is not the archive of {known.name}: its MD5 is {found}, not {known.md5}; try again"
            )
        shutil.rmtree(content, ignore_errors=True)
        with zipfile.ZipFile(archive) as packed:  # by its checksum, it has neither links nor names that lead elsewhere
            refuse_full_disk(work, sum(each.file_size for each in packed.infolist()))
            packed.extractall(content)
        return content / known.name, {"md5": known.md5}

    def _from_hub(self, name: str, work: Path, force: bool) -> tuple[Path, dict[str, str]]:
        benchmark, content = BENCHMARKS.get(name), work / "content"
        hubs = benchmark.hub if benchmark else (Hub(repository=name, patterns=LAYOUT),)
        otherwise = by_hand(benchmark) if benchmark else f"Or put a BEIR folder at {self.place(name)}"
        if force:
            shutil.rmtree(content, ignore_errors=True)
        self.say(f"fetching {name} from the hub")
        revisions = get_from_hub(name, hubs, content, otherwise)
        shutil.rmtree(content / ".cache", ignore_errors=True)  # the client's notes
        if not benchmark and not beir.is_beir(content):
            shutil.rmtree(work)
            raise UsageError(f"{name} on the hub is not in BEIR layout: it has no corpus.jsonl")
        return content, revisions


def download(url: str, into: Path, on_bytes: Callable[[int, int], None]) -> None:
    """Download a file over HTTP; what a lost connection or a killed process left is completed, so that its checksum
    has to be compared. `on_bytes`: called with the bytes that are there and their total, 0 if unknown."""
    with optional("data", "huggingface_hub"):
        from httpx import HTTPError
        from huggingface_hub.errors import HfHubHTTPError
        from huggingface_hub.file_download import http_get

    @contextmanager
    def show(*, total: int | None, initial: int, **_: object) -> Iterator[Any]:
        """Take the place of the bar that a download shows."""
        refuse_full_disk(into, (total or 0) - initial)
        done = [initial]

        def update(count: int) -> None:
            done[0] += count
            on_bytes(done[0], total or 0)

        yield SimpleNamespace(update=update)

    try:
        with into.open("ab") as file:
            http_get(url, file, resume_size=file.tell(), tqdm_class=cast("Any", show))
    except HfHubHTTPError as error:
        answer = error.response
        if answer.status_code != HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:  # else all of it is there
            raise InfrastructureFault(f"the server answers {answer.status_code} {answer.reason_phrase}") from error
    except (HTTPError, OSError) as error:
        if isinstance(error, OSError) and error.errno:
            raise  # of this machine's disk
        raise InfrastructureFault(f"no connection: {error}") from error


def by_hand(benchmark: Benchmark) -> str:
    """Say how the files of a benchmark are placed without the hub."""
    return f"Fetch them by other means ({benchmark.origin}), then: harness1 data import {benchmark.name} PATH"


def get_from_hub(name: str, hubs: Sequence[Hub], out: Path, otherwise: str, *, force: bool = False) -> dict[str, str]:
    """Download files of the hub, unchanged, into a folder, if that is not done yet; return their revisions. An
    interrupted download is resumed. `otherwise`: what to do where they cannot be downloaded. Raises
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
        patterns, folder = list(hub.patterns), out / hub.folder
        with _explain(cannot, otherwise):
            # Offline, a download into an existing folder does nothing, so the hub is asked before the folder exists.
            revision = taken[hub.repository] = str(HfApi().dataset_info(hub.repository).sha)
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
