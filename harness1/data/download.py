"""Downloads a file over HTTP, and goes on where an earlier try stopped."""

from __future__ import annotations

import http.client
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness1.errors import InfrastructureFault, UsageError
from harness1.runs.files import refuse_full_disk

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
    """Download the bytes of a file that are not there yet."""
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
    """Return whether an answer is the rest of what is here, and not the whole file."""
    return answer.status == http.HTTPStatus.PARTIAL_CONTENT and str(answer.headers.get("Content-Range", "")).startswith(
        f"bytes {here}-"
    )


def _note_version(file: Path, answer: Any) -> None:
    """Keep what tells this version of a file from a later one; without it, a rest could belong to another file."""
    etag = answer.headers.get("ETag", "")
    version = answer.headers.get("Last-Modified", "") if etag.startswith("W/") or not etag else etag
    file.write_text(version) if version else file.unlink(missing_ok=True)
