"""Unpacks an archive that came over the network: regular files below one folder, within bounds, or nothing."""

from __future__ import annotations

import stat
import zipfile
import zlib
from pathlib import Path, PurePosixPath

from harness1.data.formats.jsonl import INFLATION, LEAST_INFLATED
from harness1.errors import UsageError
from harness1.runs.files import refuse_full_disk

MOST_FILES = 10_000
BLOCK = 1 << 20


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
                    while block := packed.read(BLOCK):
                        file.write(block)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, FileExistsError) as error:
        raise UsageError(f"{archive.name} is damaged: {error}") from error


def _place(archive: Path, entry: zipfile.ZipInfo) -> PurePosixPath:
    """Return the place of an entry below the folder."""
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
