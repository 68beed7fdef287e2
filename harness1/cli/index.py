"""harness1 index: make a corpus searchable."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from harness1.cli.bars import read_aloud
from harness1.cli.options import ConfigFile, Force, Json, Overrides, resolve
from harness1.cli.printing import print_json
from harness1.config import Config
from harness1.data.indexing import add_to_index, delete_from_index, ensure_index
from harness1.data.open import open_source
from harness1.data.source import Source
from harness1.errors import UsageError
from harness1.redaction import without_password
from harness1.retrieval.engines.build import build_engine
from harness1.retrieval.protocol import IndexInfo


def index(
    source: Annotated[
        str | None,
        Argument(help="A BEIR or TREC folder, NAME:PATH, a JSONL file, a folder of texts, world:SIZE or stdlib."),
    ] = None,
    out: Annotated[Path | None, Option(help="Folder of the index.", metavar="DIR")] = None,
    engine: Annotated[
        str | None, Option(help="Index into milvus:FILE.db, milvus:URL or chroma:URL.", metavar="SPEC")
    ] = None,
    add: Annotated[
        bool, Option("--add", help="Add to the index; a document with an existing id replaces the old one.")
    ] = False,
    delete: Annotated[
        list[str] | None, Option(help="Remove a document from the index; may be repeated.", metavar="ID")
    ] = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Index a corpus: a BEIR folder (plain or .gz), a JSONL file, a folder of .md .txt .html .pdf, world:SIZE or
    stdlib.

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
        print_json(info)
    else:
        print(f"{where}: {info.documents} documents, {info.chunks} chunks, index {info.index_hash[:12]}")


def _index_folder(
    source: str | None, out: Path, config: Config, add: bool, delete: list[str], force: bool
) -> IndexInfo:
    """Build an index folder, or change the one that is there."""
    if (add or delete) and (force or config.index != Config().index):
        raise UsageError("an index is changed with the settings that it was built with: leave index.* and --force out")
    if delete:
        if source is not None or add:
            raise UsageError("--delete takes ids alone: no source and no --add")
        return delete_from_index(delete, out, config)
    if source is None:
        raise UsageError("say what to index: a folder, a JSONL file, world:SIZE or stdlib")
    if add:
        return add_to_index(open_source(source), out, config, read_aloud)
    return ensure_index(open_source(source), out, config, force=force, read=read_aloud)


def _fill_engine(source: Source, spec: str, config: Config) -> IndexInfo:
    with read_aloud(source) as (documents, _):
        return build_engine(spec, documents, config.index, config.machine)
