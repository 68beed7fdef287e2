"""The index of a source: built into a folder or a cache, or changed, with a card that says what it was made from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from harness1.config import Config
from harness1.data.origins import origins_of, origins_of_source, united
from harness1.data.source import Source
from harness1.errors import CorpusError, SchemaError, UsageError
from harness1.plain import digest, utf8_safe
from harness1.records import DocId
from harness1.retrieval.build import add_documents, build_index, delete_documents
from harness1.retrieval.corpus import Document
from harness1.retrieval.files import LOCK, building
from harness1.retrieval.index import OutdatedIndex, build_hash, open_index
from harness1.retrieval.models import Progress
from harness1.retrieval.open import is_engine, open_retriever
from harness1.retrieval.protocol import IndexInfo
from harness1.runs.files import STAGE, Stage, read_stage, writing

LEFT_OUT = "left_out"  # names the number of documents that could not be read, in the card of an index
READING = "reading"  # names what was passed over, and how files were read, in the card of an index
CORPUS = "corpus"  # names the corpus in the card of an index: its path, or the name of a generated one
Told = TypeVar("Told")
Files = Callable[[DocId], Path | None]
"""Returns the whole path of the file that a document was read from, if there is one."""
Read = Callable[[Source], AbstractContextManager[tuple[Iterator[Document], Progress | None]]]
"""Opens the documents of a source, with a callback for the progress of their embeddings, or None."""


@contextmanager
def read_silently(source: Source) -> Iterator[tuple[Iterator[Document], Progress | None]]:
    """Open the documents of a source, and show nothing."""
    yield source.documents(), None


def index_of(
    source: Source,
    index: str | None,
    cache: Path | None,
    config: Config,
    read: Read = read_silently,
    say: Callable[[str], None] = lambda _: None,
) -> str:
    """Return the index that a user names, or the source's own, which is built into `cache` (None:
    `~/.cache/harness1`) unless it is there. Raises UsageError: the named index is scored by another unit than the
    configuration says."""
    if index:
        unit = open_retriever(index, config).info.unit
        if unit != config.index.unit:
            raise UsageError(f"{index} is scored by {unit}: --set index.unit={unit}")
        return index
    name = f"{source.name.replace(':', '-')}-{digest([source.fingerprint, build_hash(config.index)])[:12]}"
    folder = (cache or Path.home() / ".cache" / "harness1") / name
    waits = f"waiting for another process that indexes {source.name}"
    ensure_index(source, folder, config, read=read, on_wait=lambda: say(waits))
    return str(folder)


def ensure_index(
    source: Source,
    out: Path,
    config: Config,
    *,
    force: bool = False,
    whole: bool = False,
    read: Read = read_silently,
    on_wait: Callable[[], None] | None = None,
) -> IndexInfo:
    """Build the index of a source into a folder, unless the folder already holds it. `force`: in any case. `whole`:
    also if documents were left out. `on_wait`: called before waiting for another process that builds there; None: do
    not wait. Raises CorpusError: the folder holds something else, or the source cannot be read; UsageError: it is
    another's."""
    inputs = {"source": source.fingerprint, "build": build_hash(config.index)}
    stage = Stage("index", inputs, origins=origins_of_source(source))
    if not force and (done := _done(stage, out, whole)):
        return done
    # Neither the lock nor a card that is being written makes a folder one that is not empty.
    with writing(out):
        names = {path.name for path in out.iterdir()} if out.exists() else set()
    card = read_stage(out)
    is_ours = card.verb == "index" if card else bool(names & {"CURRENT", "vectors"})
    if any(name != LOCK and not name.startswith(f".{STAGE}.") for name in names) and not is_ours:
        raise CorpusError(f"{out} is not empty and holds no index: choose another folder")
    with building(out, on_wait):
        if not force:
            if done := _done(stage, out, whole):
                return done
            _refuse_loss(source, out, config)
        with _changing(stage, out), read(source) as (documents, progress):
            info = build_index(documents, out, config.index, progress, config.machine, alone=True)
        return _finish(stage, out, info, source.reading.facts(), len(source.problems), _corpus(source))


def add_to_index(source: Source, out: Path, config: Config, read: Read = read_silently) -> IndexInfo:
    """Add the documents of a source to the index in a folder; an equal id replaces its document."""
    open_index(out)  # a folder without an index is refused before anything is written there
    with building(out):
        inputs = {"base": open_index(out).info.index_hash, "added": source.fingerprint}
        stage = Stage("index", inputs, origins=united(origins_of(out), origins_of_source(source)))
        left_out, corpus, before = left_out_of(out), corpus_of(out), reading_of(out)
        with _changing(stage, out), read(source) as (documents, progress):
            info = add_documents(documents, out, progress, config.machine, alone=True)
        return _finish(stage, out, info, _with(before, source.reading.facts()), left_out + len(source.problems), corpus)


def delete_from_index(ids: Sequence[str], out: Path, config: Config) -> IndexInfo:
    """Take documents out of the index in a folder. Raises CorpusError: it is no index, or has none of the documents."""
    open_index(out)
    with building(out):
        inputs = {"base": open_index(out).info.index_hash, "deleted": sorted(ids)}
        stage = Stage("index", inputs, origins=origins_of(out))
        left_out, corpus, reading = left_out_of(out), corpus_of(out), reading_of(out)
        with _changing(stage, out):
            info = delete_documents(map(DocId, ids), out, machine=config.machine, alone=True)
        return _finish(stage, out, info, reading, left_out, corpus)


@contextmanager
def _changing(stage: Stage, out: Path) -> Iterator[None]:
    """Mark the index as under way, lest a killed command leave it finished; a change that fails restores the card."""
    before = read_stage(out)
    with writing(out), ExitStack() as restoring:
        stage.write(out)
        if before:
            restoring.callback(before.write, out)
        yield
        restoring.pop_all()


def _finish(
    stage: Stage, out: Path, info: IndexInfo, reading: dict[str, Any], left_out: int, corpus: str | None
) -> IndexInfo:
    outputs = {**msgspec.to_builtins(info), LEFT_OUT: left_out, **({CORPUS: corpus} if corpus else {})}
    outputs |= {READING: reading} if reading else {}
    stage.write(out, status="finished", hashes={"index": info.index_hash}, outputs=outputs)
    return info


def _done(stage: Stage, out: Path, whole: bool) -> IndexInfo | None:
    """Return the facts about a finished index, if its card is its own; if `whole`, only if no document was left out."""
    if not stage.is_done(out) or (whole and (left_out_of(out) or reading_of(out).get("unread"))):
        return None
    info, card = open_index(out).info, read_stage(out)
    return info if card and card.hashes.get("index") == info.index_hash else None


def left_out_of(out: Path) -> int:
    """Return how many documents were left out of the index in a folder; 0 if its card does not say."""
    return _read_output(out, LEFT_OUT, 0)


def reading_of(out: Path) -> dict[str, Any]:
    """Return what `Reading.facts` told of the files of the index in a folder; nothing if its card does not say."""
    return _read_output(out, READING, dict[str, Any]())


def corpus_of(out: Path) -> str | None:
    """Return the corpus of an index; None if its card does not say."""
    return _read_output(out, CORPUS, "") or None


def _read_output(out: Path, name: str, otherwise: Told) -> Told:
    value = card.outputs.get(name) if (card := read_stage(out)) else None
    return value if isinstance(value, type(otherwise)) else otherwise


def _with(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Return the facts of two readings as those of one; what both say of a name, the later one says."""
    both = {**before, **after}
    for name in before.keys() & after.keys():
        old, new = before[name], after[name]
        both[name] = {**old, **new} if isinstance(new, dict) else [*dict.fromkeys([*old, *new])]
    return both


def copies_of(index: str) -> Mapping[str, list[str]]:
    """Return the names of the further files with the text of a document, by the id of the document."""
    copies = None if is_engine(index) else reading_of(Path(index)).get("copies")
    return copies if isinstance(copies, dict) else {}


def _corpus(source: Source) -> str:
    return utf8_safe(str(source.root)) if source.root else source.name


def _refuse_loss(source: Source, out: Path, config: Config) -> None:
    if (other := corpus_of(out)) not in (None, _corpus(source)):
        raise UsageError(f"{out} is the index of {other}: --force replaces it, --add adds to it")
    try:
        has_embeddings = bool(open_index(out).vectors)
    except OutdatedIndex:
        raise
    except (CorpusError, SchemaError):
        has_embeddings = False  # it is damaged, or there is none
    if has_embeddings and not config.index.dense.model:
        raise UsageError(
            f"{out} has embeddings: --set index.dense.model=NAME builds it with some, --force without, and loses them"
        )


def files_of(index: str) -> Files:
    """Return what finds the file of a document of an index, made from files on this machine."""
    corpus = None if is_engine(index) else corpus_of(Path(index))
    folder = Path(corpus) if corpus else None

    def find(doc_id: DocId) -> Path | None:
        if folder is None or Path(doc_id).is_absolute() or ".." in Path(doc_id).parts:
            return None
        with suppress(OSError, ValueError):  # an id need not be the name of a file: it may be too long for one
            place = folder if folder.is_file() and folder.name == doc_id else folder / doc_id
            return place if place.is_file() else None
        return None

    return find
