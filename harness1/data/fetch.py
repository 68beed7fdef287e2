"""Unpacks an archive that came over the network: regular files below one folder, within bounds, or nothing."""

from __future__ import annotations

import http.client
import stat
import time
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any

from harness1.data.benchmarks import Benchmark, Hub
from harness1.data.jsonl import INFLATION, LEAST_INFLATED
from harness1.data.tables import find_files
from harness1.errors import InfrastructureFault, MissingExtra, UsageError
from harness1.runs.files import refuse_full_disk
from harness1.runs.stage import Stage, read_stage, refuse_foreign, under_way

MOST_FILES = 10_000
UNPACKED_BLOCK = 1 << 20


def unpack(archive: Path, into: Path) -> None:
    """Unpack the files of a zip archive into a folder; hidden files and what a Mac adds are left out.

    Raises:
        UsageError: the archive is torn or encrypted, a name leads out of the folder, an entry is not a regular file, or
            there are more than `MOST_FILES` files or more bytes than `jsonl.INFLATION` times the archive.
    """
    try:
        with zipfile.ZipFile(archive) as opened:
            wanted = [(each, _place(archive, each)) for each in opened.infolist() if not each.is_dir()]
            wanted = [(each, place) for each, place in wanted if not _is_clutter(place)]
            _refuse_bomb(archive, [each for each, _ in wanted])
            refuse_full_disk(into, sum(each.file_size for each, _ in wanted))
            for each, place in wanted:
                (into / place).parent.mkdir(parents=True, exist_ok=True)
                with opened.open(each) as packed, (into / place).open("xb") as file:
                    while block := packed.read(UNPACKED_BLOCK):
                        file.write(block)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, FileExistsError) as error:
        raise UsageError(f"{archive.name} is damaged: {error}") from error


def _place(archive: Path, entry: zipfile.ZipInfo) -> PurePosixPath:
    place = PurePosixPath(entry.filename)
    if place.is_absolute() or ".." in place.parts or any(mark in entry.filename for mark in "\\:\0"):
        raise UsageError(f"{archive.name} is not unpacked: the name {entry.filename!r} leads out of the folder")
    if stat.S_IFMT(entry.external_attr >> 16) not in (0, stat.S_IFREG) or entry.flag_bits & 1:
        raise UsageError(f"{archive.name} is not unpacked: {entry.filename!r} is a link or encrypted")
    return place


def _is_clutter(place: PurePosixPath) -> bool:
    return any(part.startswith((".", "__MACOSX")) for part in place.parts)


def _refuse_bomb(archive: Path, entries: list[zipfile.ZipInfo]) -> None:
    most = max(INFLATION * archive.stat().st_size, LEAST_INFLATED)
    if len(entries) > MOST_FILES or (size := sum(entry.file_size for entry in entries)) > most:
        what = f"{len(entries):,} files" if len(entries) > MOST_FILES else f"{size / 1e6:,.0f} MB"
        raise UsageError(f"{archive.name} is not unpacked: it would unpack to {what}, more than is allowed")


TIMEOUT_S = 30.0
"""Time without a byte after which a connection counts as lost."""
BLOCK = 1 << 18
Count = Callable[[int, int], None]
"""Called with the bytes that are there and their total, 0 if unknown."""


class _Cut(Exception):
    """A connection that was lost, which another try may mend."""


def download(url: str, into: Path, *, attempts: int, backoff_s: float, on_bytes: Count = lambda done, of: None) -> None:
    """Download a file. What a lost connection or a killed process left is completed, if the server still has the same
    file.

    Args:
        into: the file; beside it lies its version, by which the server is asked for the rest.
        attempts: the tries before giving up; between them the wait doubles, from `backoff_s` seconds.

    Raises:
        InfrastructureFault: the server cannot be reached, does not have the file, or loses every connection.
        UsageError: the address is not one of HTTP, or the disk is full.
    """
    if not url.startswith(("http://", "https://")):
        raise UsageError(f"{url} is not an address of HTTP")
    for attempt in range(1, attempts + 1):
        try:
            _rest(url, into, on_bytes)
            return
        except _Cut as cut:
            if attempt == attempts:
                raise InfrastructureFault(f"{cut} ({attempts} attempts)") from cut
            time.sleep(backoff_s * 2.0 ** (attempt - 1))


def _rest(url: str, into: Path, on_bytes: Count) -> None:
    version = into.with_name(f"{into.name}.version")
    here = into.stat().st_size if into.is_file() and version.is_file() else 0
    headers = {"Range": f"bytes={here}-", "If-Range": version.read_text()} if here else {}
    with _answer(urllib.request.Request(url, headers=headers), into) as answer:
        at = here if _continues(answer, here) else 0
        length = answer.headers.get("Content-Length")
        total = at + int(length) if length and length.isdecimal() else 0
        refuse_full_disk(into, total - at)
        _note_version(version, answer)
        with into.open("ab" if at else "wb") as file:
            while block := _read(answer):
                file.write(block)
                at += len(block)
                on_bytes(at, total)
    if at < total:
        raise _Cut(f"the connection was lost after {at / 1e6:,.1f} of {total / 1e6:,.1f} MB")


def _answer(request: urllib.request.Request, into: Path) -> Any:
    try:
        return urllib.request.urlopen(request, timeout=TIMEOUT_S)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            into.unlink(missing_ok=True)
            raise _Cut("the server has another file now") from error
        if error.code in (408, 429) or error.code >= 500:
            raise _Cut(f"the server answers {error.code} {error.reason}") from error
        raise InfrastructureFault(f"the server answers {error.code} {error.reason}") from error
    except urllib.error.URLError as error:
        raise _Cut(f"no connection: {error.reason}") from error
    except (OSError, http.client.HTTPException) as error:
        raise _Cut(f"no connection: {error or type(error).__name__}") from error


def _read(answer: Any) -> bytes:
    try:
        return bytes(answer.read(BLOCK))
    except (OSError, http.client.HTTPException) as error:
        raise _Cut(f"the connection was lost: {error or type(error).__name__}") from error


def _continues(answer: Any, here: int) -> bool:
    return answer.status == http.HTTPStatus.PARTIAL_CONTENT and str(answer.headers.get("Content-Range", "")).startswith(
        f"bytes {here}-"
    )


def _note_version(file: Path, answer: Any) -> None:
    etag = answer.headers.get("ETag", "")
    version = answer.headers.get("Last-Modified", "") if etag.startswith("W/") or not etag else etag
    file.write_text(version) if version else file.unlink(missing_ok=True)


VERB = "data get"
LAYOUT = ("corpus.jsonl*", "queries.jsonl*", "qrels/*.tsv*")
"""The files of a dataset in BEIR layout."""
Revisions = Mapping[str, str]
"""The revision of each repository."""
_ANY: Revisions = MappingProxyType({})


def get_benchmark(benchmark: Benchmark, out: Path, *, force: bool = False) -> None:
    """Download the files of the hub, unchanged, into a folder that `NAME:FOLDER` opens, if that is not done yet.

    An interrupted download is resumed.

    Raises:
        MissingExtra: the hub's client, which comes with `datasets`, is not installed.
        InfrastructureFault: the hub cannot be reached.
        UsageError: the hub does not hand the files out, or the folder holds something else.
    """
    get_from_hub(benchmark.name, benchmark.hub, out, by_hand(benchmark), force=force)


def by_hand(benchmark: Benchmark) -> str:
    """Say how the files of a benchmark are placed without the hub."""
    return f"Fetch them by other means ({benchmark.origin}), then: harness1 data import {benchmark.name} PATH"


def get_from_hub(
    name: str, hubs: Sequence[Hub], out: Path, otherwise: str, *, revisions: Revisions = _ANY, force: bool = False
) -> Revisions:
    """Download files of the hub into a folder, if that is not done yet; return the revisions that they are of.

    Args:
        hubs: the files; each repository is downloaded as it is now, unless `revisions` names it.
        otherwise: what to do where they cannot be downloaded, for the message.

    Raises:
        The same as `get_benchmark`.
    """
    try:
        from huggingface_hub import HfApi, snapshot_download
    except ImportError as error:
        raise MissingExtra("datasets", "data") from error
    stage = Stage(VERB, {"benchmark": name, "hub": [[hub.repository, *hub.patterns] for hub in hubs]})
    if stage.is_done(out) and not force:
        done = read_stage(out)
        return done.hashes if done else {}
    refuse_foreign(out, VERB)
    taken: dict[str, str] = {}
    for hub in hubs:
        with _told(name, hub, otherwise):
            # Offline, a download into an existing folder does nothing, so the hub is asked before the folder exists.
            found = str(HfApi().dataset_info(hub.repository).sha)
        revision = taken[hub.repository] = revisions.get(hub.repository, found)
        patterns, folder = list(hub.patterns), out / hub.folder
        with under_way(stage, out), _told(name, hub, otherwise):
            snapshot_download(
                hub.repository, repo_type="dataset", revision=revision, allow_patterns=patterns, local_dir=folder
            )
        if not find_files(folder, *patterns):
            raise UsageError(_unavailable(name, hub, "does not have them any more", otherwise))
    stage.write(out, status="finished", hashes=taken)
    return taken


@contextmanager
def _told(name: str, hub: Hub, otherwise: str) -> Iterator[None]:
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
