"""harness1 index: make a corpus searchable."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from harness1.cli.options import ConfigFile, Force, Json, Overrides, resolve
from harness1.config import Config
from harness1.data.source import Source, open_source
from harness1.errors import CorpusError
from harness1.retrieval.corpus import Document
from harness1.retrieval.index import build_hash, build_index, open_index
from harness1.retrieval.retriever import IndexInfo
from harness1.stage import Stage


def index(
    source: Annotated[
        str, typer.Argument(help="A BEIR folder, a JSONL file, a folder of texts, world:SIZE or stdlib.")
    ],
    out: Annotated[Path, typer.Option("--out", help="Folder of the index.", metavar="DIR")],
    config: ConfigFile = None,
    overrides: Overrides = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Index a corpus: a BEIR folder (plain or .gz), a JSONL file, a folder of .md .txt .html .pdf, world:SIZE, stdlib.

    Example: harness1 index ~/notes --out notes.index
    """
    info = ensure_index(open_source(source), out, resolve(config, overrides), force=force)
    if as_json:
        print(msgspec.json.encode(info).decode())
    else:
        print(f"{out}: {info.documents} documents, {info.chunks} chunks, index {info.index_hash[:12]}")


def ensure_index(source: Source, out: Path, config: Config, *, force: bool = False) -> IndexInfo:
    """Build the index of a source into a folder, unless the folder already holds it.

    The source's own fingerprint (paths, sizes and times of its files) decides whether it is unchanged.
    """
    stage = Stage("index", {"source": source.fingerprint, "build": build_hash(config.index)})
    if not force and stage.is_done(out):
        return open_index(out).info
    if out.exists() and any(out.iterdir()) and not _is_ours(out):
        raise CorpusError(f"{out} is not empty and holds no index: choose another folder")
    stage.write(out)
    info = build_index(_shown(source), out, config.index)
    for problem in source.problems:
        print(f"harness1: left out: {problem}", file=sys.stderr)
    stage.write(out, status="finished", hashes={"index": info.index_hash}, outputs=msgspec.to_builtins(info))
    return info


def _is_ours(folder: Path) -> bool:
    return (folder / "stage.json").is_file() or (folder / "CURRENT").is_file()


def _shown(source: Source) -> Iterator[Document]:
    """The documents of a source, counted on the terminal as they pass."""
    columns = (SpinnerColumn(), TextColumn("indexing {task.description}"), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task(source.name, total=None)
        for document in source.documents():
            yield document
            progress.advance(bar)
