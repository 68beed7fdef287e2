"""harness1 index: make a corpus searchable."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from harness1.cli.options import ConfigFile, Force, Json, Overrides, resolve
from harness1.config import Config
from harness1.data.open import open_source
from harness1.data.source import Source
from harness1.errors import CorpusError, UsageError
from harness1.records import DocId
from harness1.redaction import without_password
from harness1.retrieval.corpus import Document
from harness1.retrieval.dense.vectors import Progress as Embedded
from harness1.retrieval.engines.build import build_engine
from harness1.retrieval.index.build import add_documents, build_index, delete_documents
from harness1.retrieval.index.index import build_hash, open_index
from harness1.retrieval.protocol import IndexInfo
from harness1.runs.files import writing
from harness1.runs.stage import Stage, read_stage


def index(
    source: Annotated[
        str | None, typer.Argument(help="A BEIR or TREC folder, NAME:PATH, a JSONL file, texts, world:SIZE or stdlib.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Folder of the index.", metavar="DIR")] = None,
    engine: Annotated[
        str | None,
        typer.Option("--engine", help="Index into milvus:FILE.db, milvus:URL or chroma:URL.", metavar="SPEC"),
    ] = None,
    add: Annotated[bool, typer.Option("--add", help="Add to the index; an equal id replaces its document.")] = False,
    delete: Annotated[
        list[str] | None, typer.Option("--delete", help="Take a document out of the index.", metavar="ID")
    ] = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Index a corpus: a BEIR folder (plain or .gz), a JSONL file, a folder of .md .txt .html .pdf, world:SIZE, stdlib.

    Example: harness1 index ~/notes --out notes.index
    """
    settings = resolve(config, overrides)
    if engine is not None:
        if out is not None or add or delete or source is None:
            raise UsageError("--engine takes a source and neither --out, --add nor --delete")
        where, info = without_password(engine), _fill_engine(open_source(source), engine, settings)
    else:
        if out is None:
            raise UsageError("say where the index goes: --out DIR, or --engine SPEC")
        where, info = str(out), _index_folder(source, out, settings, add, delete or [], force)
    if as_json:
        print(msgspec.json.encode(info).decode())
    else:
        print(f"{where}: {info.documents} documents, {info.chunks} chunks, index {info.index_hash[:12]}")


def ensure_index(source: Source, out: Path, config: Config, *, force: bool = False) -> IndexInfo:
    """Build the index of a source into a folder, unless the folder already holds it.

    The source's own fingerprint (paths, sizes and times of its files) decides whether it is unchanged.
    """
    stage = Stage("index", {"source": source.fingerprint, "build": build_hash(config.index)})
    if not force and stage.is_done(out):
        return open_index(out).info
    if out.exists() and any(out.iterdir()) and not _is_ours(out):
        raise CorpusError(f"{out} is not empty and holds no index: choose another folder")
    with _changing(stage, out), _shown(source) as (documents, embedded):
        info = build_index(documents, out, config.index, embedded, config.machine)
    _finish(stage, source, out, info)
    return info


def _index_folder(
    source: str | None, out: Path, config: Config, add: bool, delete: list[str], force: bool
) -> IndexInfo:
    """Build an index folder, or change the one that is there."""
    if (add or delete) and (force or config.index != Config().index):
        raise UsageError("an index is changed with the settings that it was built with: leave index.* and --force out")
    if delete:
        if source is not None or add:
            raise UsageError("--delete takes ids alone: no source and no --add")
        return _deleted(out, delete, config)
    if source is None:
        raise UsageError("say what to index: a folder, a JSONL file, world:SIZE or stdlib")
    if add:
        return _added(open_source(source), out, config)
    return ensure_index(open_source(source), out, config, force=force)


def _added(source: Source, out: Path, config: Config) -> IndexInfo:
    stage = Stage("index", {"base": open_index(out).info.index_hash, "added": source.fingerprint})
    with _changing(stage, out), _shown(source) as (documents, embedded):
        info = add_documents(documents, out, embedded, config.machine)
    _finish(stage, source, out, info)
    return info


def _deleted(out: Path, delete: list[str], config: Config) -> IndexInfo:
    stage = Stage("index", {"base": open_index(out).info.index_hash, "deleted": sorted(delete)})
    with _changing(stage, out):
        info = delete_documents(map(DocId, delete), out, machine=config.machine)
    stage.write(out, status="finished", hashes={"index": info.index_hash}, outputs=msgspec.to_builtins(info))
    return info


@contextmanager
def _changing(stage: Stage, out: Path) -> Iterator[None]:
    """Say that the index is at work, so that a command which is killed leaves no card that calls it finished. One that
    fails has changed nothing, and the earlier card stands again."""
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


def _fill_engine(source: Source, spec: str, config: Config) -> IndexInfo:
    with _shown(source) as (documents, _):
        info = build_engine(spec, documents, config.index, config.machine)
    _say_problems(source)
    return info


def _finish(stage: Stage, source: Source, out: Path, info: IndexInfo) -> None:
    _say_problems(source)
    stage.write(out, status="finished", hashes={"index": info.index_hash}, outputs=msgspec.to_builtins(info))


def _say_problems(source: Source) -> None:
    for problem in source.problems:
        print(f"harness1: left out: {problem}", file=sys.stderr)


def _is_ours(folder: Path) -> bool:
    return any((folder / name).exists() for name in ("stage.json", "CURRENT", "vectors"))


@contextmanager
def _shown(source: Source) -> Iterator[tuple[Iterator[Document], Embedded]]:
    """The documents of a source, and what is told how far their embeddings are; both are shown as they go."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[rate]}"),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        reading = progress.add_task(f"indexing {source.name}", total=None, rate="")
        embedding = progress.add_task("embedding chunks", total=None, visible=False, rate="")

        def embedded(done: int, fresh: int) -> None:
            if not progress.tasks[embedding].visible:
                progress.reset(embedding, visible=True)
            rate = fresh / max(progress.tasks[embedding].elapsed or 0.0, 1e-3)
            progress.update(embedding, completed=done, rate=f"{rate:.0f}/s")

        def counted() -> Iterator[Document]:
            for document in source.documents():
                yield document
                progress.advance(reading)

        yield counted(), embedded
