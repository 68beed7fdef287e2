"""The index of a source: built into a folder or a cache, or changed, with a card that says what it was made from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import msgspec

from harness1.config import Config
from harness1.data.source import Source
from harness1.errors import CorpusError, UsageError
from harness1.hashing import digest
from harness1.records import DocId
from harness1.retrieval.corpus import Document
from harness1.retrieval.dense.vectors import Progress
from harness1.retrieval.index.build import add_documents, build_index, delete_documents
from harness1.retrieval.index.index import build_hash, open_index
from harness1.retrieval.open import open_retriever
from harness1.retrieval.protocol import IndexInfo
from harness1.runs.files import writing
from harness1.runs.stage import STAGE, Stage, read_stage

Reading = AbstractContextManager[tuple[Iterator[Document], Progress | None]]
Read = Callable[[Source], Reading]
"""Opens the documents of a source, with a callback for the progress of their embeddings, or None."""


@contextmanager
def read_silently(source: Source) -> Iterator[tuple[Iterator[Document], Progress | None]]:
    """Open the documents of a source, and show nothing."""
    yield source.documents(), None


def index_of(source: Source, index: str | None, cache: Path | None, config: Config, read: Read = read_silently) -> str:
    """Return the index that a user names, or the source's own, which is built into the cache unless it is there.

    Args:
        cache: the folder that holds indexes; None: `~/.cache/harness1`.

    Raises:
        UsageError: the named index is scored by another unit than the configuration says.
    """
    if index:
        unit = open_retriever(index, config).info.unit
        if unit != config.index.unit:
            raise UsageError(f"{index} is scored by {unit}: --set index.unit={unit}")
        return index
    name = f"{source.name.replace(':', '-')}-{digest([source.fingerprint, build_hash(config.index)])[:12]}"
    folder = (cache or Path.home() / ".cache" / "harness1") / name
    ensure_index(source, folder, config, read=read)
    return str(folder)


def ensure_index(
    source: Source, out: Path, config: Config, *, force: bool = False, read: Read = read_silently
) -> IndexInfo:
    """Build the index of a source into a folder, unless the folder already holds it.

    The source's own fingerprint (paths, sizes and times of its files) decides whether it is unchanged.

    Raises:
        CorpusError: the folder holds something else, or the source cannot be read.
        UsageError: the folder cannot be written, or another process builds there.
    """
    stage = Stage("index", {"source": source.fingerprint, "build": build_hash(config.index)})
    if not force and stage.is_done(out):
        return open_index(out).info
    if out.exists() and any(out.iterdir()) and not _is_ours(out):
        raise CorpusError(f"{out} is not empty and holds no index: choose another folder")
    with _changing(stage, out), read(source) as (documents, progress):
        info = build_index(documents, out, config.index, progress, config.machine)
    return _finished(stage, out, info)


def add_to_index(source: Source, out: Path, config: Config, read: Read = read_silently) -> IndexInfo:
    """Add the documents of a source to the index in a folder; an equal id replaces its document.

    Raises:
        CorpusError: the folder holds no index, or the source cannot be read.
    """
    stage = Stage("index", {"base": open_index(out).info.index_hash, "added": source.fingerprint})
    with _changing(stage, out), read(source) as (documents, progress):
        info = add_documents(documents, out, progress, config.machine)
    return _finished(stage, out, info)


def delete_from_index(ids: Sequence[str], out: Path, config: Config) -> IndexInfo:
    """Take documents out of the index in a folder.

    Raises:
        CorpusError: the folder holds no index, or none of the documents.
    """
    stage = Stage("index", {"base": open_index(out).info.index_hash, "deleted": sorted(ids)})
    with _changing(stage, out):
        info = delete_documents(map(DocId, ids), out, machine=config.machine)
    return _finished(stage, out, info)


@contextmanager
def _changing(stage: Stage, out: Path) -> Iterator[None]:
    """Mark the index as under way, so that a killed command leaves no card that calls it finished. A change that fails
    leaves the index as it was, and restores the earlier card."""
    before = read_stage(out)
    changed = False
    with writing(out):
        stage.write(out)
        try:
            yield
            changed = True
        finally:
            if before and not changed:
                before.write(out)


def _finished(stage: Stage, out: Path, info: IndexInfo) -> IndexInfo:
    stage.write(out, status="finished", hashes={"index": info.index_hash}, outputs=msgspec.to_builtins(info))
    return info


def _is_ours(folder: Path) -> bool:
    return any((folder / name).exists() for name in (STAGE, "CURRENT", "vectors"))
