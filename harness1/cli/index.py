"""harness1 index: make a corpus searchable."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from typer import Argument, Exit, Option

from harness1.cli.bars import read_aloud
from harness1.cli.datasets import place_of
from harness1.cli.options import ConfigFile, Force, Json, Overrides, resolve
from harness1.cli.printing import print_json, print_result, put
from harness1.config import Config
from harness1.data.indexing import add_to_index, delete_from_index, ensure_index, left_out_of
from harness1.data.open import open_source
from harness1.data.source import Source
from harness1.errors import UsageError
from harness1.plain import counted
from harness1.redaction import without_password
from harness1.retrieval.generations import IndexCheck, check_index
from harness1.retrieval.open import build_engine
from harness1.retrieval.protocol import IndexInfo
from harness1.words import AUTO, NONE

READ = {AUTO: "stemmed by script", NONE: "not stemmed"}
"""How the words of an index were read, where it is not as English."""


def index(
    source: Annotated[
        str | None,
        Argument(
            help="A name (`data list`), a BEIR or TREC folder, NAME:PATH, JSONL, a folder of texts, world:SIZE, stdlib."
        ),
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
    strict: Annotated[
        bool, Option("--strict", help="Refuse a corpus that has a broken document, instead of leaving it out.")
    ] = False,
    follow_links: Annotated[
        bool, Option("--follow-links", help="In a folder of texts, read links that lead out of it.")
    ] = False,
    config: ConfigFile = None,
    overrides: Overrides = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Index a corpus: a BEIR folder (plain or .gz), a JSONL file, a folder of .md .rst .txt .html .pdf, world:SIZE or
    stdlib.

    Example: harness1 index ~/notes --out notes.index; harness1 index check notes.index
    """
    settings, left_out = resolve(config, overrides), 0

    def opened(spec: str) -> Source:
        return open_source(place_of(spec, settings), leave_out=not strict, follow_links=follow_links)

    if engine is not None:
        if out is not None or add or delete or source is None:
            raise UsageError("--engine takes a source and neither --out, --add nor --delete")
        where, info = without_password(engine), _fill_engine(opened(source), engine, settings)
    else:
        if out is None:
            raise UsageError("say where the index goes: --out DIR, or --engine SPEC")
        info = _index_folder(source, opened, out, settings, add, delete or [], force, strict)
        where, left_out = str(out), left_out_of(out)
    if as_json:
        print_json(info)
    else:
        read = f"; {READ.get(info.language, f'stemmed as {info.language}')}" if info.language else ""
        lost = f"; {left_out} left out" if left_out else ""
        size = f"{counted(info.documents, 'document')}, {counted(info.chunks, 'chunk')}"
        put(f"{where}: {size}, index {info.index_hash[:12]}{read}{lost}")


def check(
    folder: Annotated[Path, Argument(help="The index.", metavar="DIR")],
    as_json: Json = False,
) -> None:
    """Read a whole index and compare every file with its checksum: exit code 2 if one differs."""
    found = check_index(folder)
    print_result(found, as_json, _in_words, folder)
    if found.damaged:
        raise Exit(2)


def _in_words(found: IndexCheck, folder: Path) -> None:
    for damage in found.damaged:
        put(f"{damage.file}: {damage.reason}")
    if found.damaged:
        put(f"{folder} is damaged: build it again with harness1 index --force")
    else:
        put(f"{folder}: {found.files} files, {found.bytes / 1e6:,.1f} MB, all as they were written")


def _index_folder(
    source: str | None,
    opened: Callable[[str], Source],
    out: Path,
    config: Config,
    add: bool,
    delete: list[str],
    force: bool,
    strict: bool,
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
        return add_to_index(opened(source), out, config, read_aloud)
    return ensure_index(opened(source), out, config, force=force, whole=strict, read=read_aloud)


def _fill_engine(source: Source, spec: str, config: Config) -> IndexInfo:
    with read_aloud(source) as (documents, _):
        return build_engine(spec, documents, config.index, config.machine)
