"""Downloads of datasets, from archives over HTTP and from the Hugging Face hub, by the client of the hub; and archives
unpacked: regular files below one folder, within bounds, or nothing."""

from __future__ import annotations

import shutil
import stat
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from http import HTTPStatus
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any, Self, cast

from harness1.data.benchmarks import Benchmark, Hub
from harness1.data.jsonl import INFLATION, LEAST_INFLATED
from harness1.data.tables import find_files
from harness1.errors import InfrastructureFault, UsageError, optional
from harness1.runs.files import Stage, read_stage, refuse_foreign, refuse_full_disk, under_way

GET = "data get"
MOST_FILES = 10_000
LAYOUT = ("corpus.jsonl*", "queries.jsonl*", "qrels/*.tsv*")
"""The files of a dataset in BEIR layout."""
WAITS_S = (1.0, 2.0, 4.0, 8.0)
"""The waits before a server that failed is asked again; the hub's client itself goes on after a lost connection."""
Count = Callable[[int, int], None]
"""Called with the bytes that are there and their total, 0 if unknown."""
Revisions = Mapping[str, str]
"""The revision of each repository."""
_ANY: Revisions = MappingProxyType({})


def unpack(archive: Path, into: Path) -> None:
    """Unpack the files of a zip archive into a folder; hidden files and what a Mac adds are left out. Raises
    UsageError: the archive is torn or encrypted, a name leads out of the folder, an entry is not a regular file, or
    there are more than `MOST_FILES` files or more bytes than `jsonl.INFLATION` times the archive."""
    try:
        with zipfile.ZipFile(archive) as opened:
            entries = [(each, _place(archive, each)) for each in opened.infolist() if not each.is_dir()]
            entries = [
                (each, place)
                for each, place in entries
                if not any(part.startswith((".", "__MACOSX")) for part in place.parts)
            ]
            size = sum(each.file_size for each, _ in entries)
            if len(entries) > MOST_FILES or size > max(INFLATION * archive.stat().st_size, LEAST_INFLATED):
                what = f"{len(entries):,} files" if len(entries) > MOST_FILES else f"{size / 1e6:,.0f} MB"
                raise UsageError(f"{archive.name} is not unpacked: it would unpack to {what}, more than is allowed")
            refuse_full_disk(into, size)
            for each, place in entries:
                (into / place).parent.mkdir(parents=True, exist_ok=True)
                with opened.open(each) as packed, (into / place).open("xb") as file:
                    shutil.copyfileobj(packed, file)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, FileExistsError) as error:
        raise UsageError(f"{archive.name} is damaged: {error}") from error


def _place(archive: Path, entry: zipfile.ZipInfo) -> PurePosixPath:
    place = PurePosixPath(entry.filename)
    if place.is_absolute() or ".." in place.parts or any(mark in entry.filename for mark in "\\:\0"):
        raise UsageError(f"{archive.name} is not unpacked: the name {entry.filename!r} leads out of the folder")
    if stat.S_IFMT(entry.external_attr >> 16) not in (0, stat.S_IFREG) or entry.flag_bits & 1:
        raise UsageError(f"{archive.name} is not unpacked: {entry.filename!r} is a link or encrypted")
    return place


class _Bytes:
    """Takes the place of the bar that a download shows, and tells how many bytes are there."""

    def __init__(self, into: Path, on_bytes: Count, *, total: int | None, initial: int, **_: object) -> None:
        refuse_full_disk(into, (total or 0) - initial)
        self._on_bytes, self._total, self._done = on_bytes, total or 0, initial

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def update(self, count: int) -> None:
        self._done += count
        self._on_bytes(self._done, self._total)


def download(url: str, into: Path, on_bytes: Count = lambda done, of: None) -> None:
    """Download a file over HTTP; what a lost connection or a killed process left is completed. Its checksum has to be
    compared, because the server may have another file by now. Raises MissingExtra: the hub's client, which downloads
    from any server, is not installed; InfrastructureFault: the server cannot be reached, does not have the file, or
    loses every connection; UsageError: the address is not one of HTTP, or the disk is full."""
    with optional("data", "huggingface_hub"):
        from httpx import HTTPError
        from huggingface_hub.errors import HfHubHTTPError
        from huggingface_hub.file_download import http_get
    if not url.startswith(("http://", "https://")):
        raise UsageError(f"{url} is not an address of HTTP")
    for wait_s in (*WAITS_S, None):
        try:
            with into.open("ab") as file:
                bar = cast("Any", partial(_Bytes, into, on_bytes))
                http_get(url, file, resume_size=file.tell(), tqdm_class=bar)
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
    name: str, hubs: Sequence[Hub], out: Path, otherwise: str, *, revisions: Revisions = _ANY, force: bool = False
) -> Revisions:
    """Download files of the hub, unchanged, into a folder, if that is not done yet; return the revisions that they are
    of. An interrupted download is resumed. `hubs`: the files; each repository is downloaded as it is now, unless
    `revisions` names it. `otherwise`: what to do where they cannot be downloaded, for the message. Raises MissingExtra:
    the hub's client is not installed; InfrastructureFault: the hub cannot be reached; UsageError: the hub does not hand
    the files out, or the folder holds something else."""
    with optional("data", "huggingface_hub"):
        from huggingface_hub import HfApi, snapshot_download
    stage = Stage(GET, {"benchmark": name, "hub": [[hub.repository, *hub.patterns] for hub in hubs]})
    if stage.is_done(out) and not force:
        done = read_stage(out)
        return done.hashes if done else {}
    refuse_foreign(out, GET)
    taken: dict[str, str] = {}
    for hub in hubs:
        with _explain(name, hub, otherwise):
            # Offline, a download into an existing folder does nothing, so the hub is asked before the folder exists.
            found = str(HfApi().dataset_info(hub.repository).sha)
        revision = taken[hub.repository] = revisions.get(hub.repository, found)
        patterns, folder = list(hub.patterns), out / hub.folder
        with under_way(stage, out), _explain(name, hub, otherwise):
            snapshot_download(
                hub.repository, repo_type="dataset", revision=revision, allow_patterns=patterns, local_dir=folder
            )
        if not find_files(folder, *patterns):
            raise UsageError(_unavailable(name, hub, "does not have them any more", otherwise))
    stage.write(out, status="finished", hashes=taken)
    return taken


@contextmanager
def _explain(name: str, hub: Hub, otherwise: str) -> Iterator[None]:
    import httpx
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        yield
    except (HfHubHTTPError, HFValidationError) as error:
        raise UsageError(_unavailable(name, hub, "refuses them", otherwise)) from error
    except (LocalEntryNotFoundError, httpx.HTTPError, ConnectionError) as error:
        raise InfrastructureFault(_unavailable(name, hub, "cannot be reached", otherwise)) from error


def _unavailable(name: str, hub: Hub, why: str, otherwise: str) -> str:
    return f"the files of {name} ({hub.repository}) cannot be downloaded: the hub {why}. {otherwise}"
