"""Opens a corpus by its name, whatever its layout: `open_source` finds the reader."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib import resources
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec

from harness1.data import beir, corpora, folder, tables, trec
from harness1.data.source import DuplicateId, Fault, Reading, Source, refuse
from harness1.errors import CorpusError, UsageError
from harness1.plain import counted
from harness1.records import DocId, Gold, Task
from harness1.retrieval.corpus import Document

MOST_LEFT_OUT = 10_000  # documents that may be left out; a corpus with more is not what it was taken for
_KINDS_OF_OBJECTS: dict[str, Callable[[object], bool]] = {
    "module": inspect.ismodule,
    "class": inspect.isclass,
    "function": lambda value: inspect.isroutine(value) or isinstance(value, staticmethod | classmethod),
    "property": inspect.isdatadescriptor,
}
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def from_anywhere(spec: str) -> str:
    """Return a name of the corpus that does not depend on the current directory: paths become absolute."""
    if is_generated(spec):
        return spec
    benchmark, path = benchmark_and_path(spec)
    return f"{benchmark}:{Path(path).resolve()}" if benchmark else str(Path(path).resolve())


def is_generated(spec: str) -> bool:
    """Return whether a corpus is made here, and is in no file."""
    return spec == "stdlib" or spec.startswith("world:")


def open_source(
    spec: str,
    fault: Fault = refuse,
    *,
    leave_out: bool | None = None,
    follow_links: bool = False,
    everything: bool = False,
) -> Source:
    """Open a dataset: its documents, and its tasks by split.

    Args:
        spec: a BEIR or TREC folder, a JSONL file (.jsonl, .jsonl.gz), a folder of files or one file of any kind
            (`harness1.data.formats`), `NAME:PATH` for a benchmark in its official files, `world:SIZE` for a synthetic
            world of that many documents (see `world_source` for `world:SIZE:SEED:people`), or `stdlib` for Python's
            own documentation.
        fault: is called with each broken line while documents and tasks are read; the default raises.
        leave_out: what becomes of documents that cannot be read, in folders and JSONL files. True: they are left out
            and listed in the source's `problems`, unless they repeat an id; False: they are refused. None: files of a
            folder of texts are left out, and broken lines go to `fault`. Tasks and benchmarks always go to `fault`.
        follow_links: read links that lead out of a folder of files.
        everything: pass over no hidden, ignored or built files of such a folder.

    Raises:
        UsageError: nothing of that name exists, or its kind cannot be read.
        CorpusError: it exists and is broken; for faults within documents, raised while they are read.
    """
    source = _open(spec, fault, leave_out, follow_links, everything)

    def documents() -> Iterator[Document]:
        source.problems.clear()
        empty = True
        for document in chain(source.documents(), [None]):
            if source.problems and leave_out is False:
                raise CorpusError(source.problems[0])
            if source.reading.unread and leave_out is False:
                raise CorpusError(f"{source.label}: {source.reading.lines()[0]}")
            if document:
                empty = False
                yield document
        if empty:
            raise CorpusError(
                "; ".join([f"{source.label} holds no documents", *source.problems[:10], *source.reading.lines()[:10]])
            )

    return replace(source, documents=documents)


def _open(spec: str, fault: Fault, leave_out: bool | None, follow_links: bool, everything: bool) -> Source:
    if spec.startswith("world:"):
        size, _, rest = spec.removeprefix("world:").partition(":")
        seed, _, about = rest.partition(":")
        if not re.fullmatch(r"\d{1,9}:\d{1,18}:(people)?", f"{size}:{seed or 0}:{about}", re.ASCII):
            raise UsageError(f"{spec}: a synthetic world is world:SIZE[:SEED[:people]] with SIZE documents")
        from harness1.data.world import world_source

        return world_source(int(size), int(seed or 0), about)
    if spec == "stdlib":
        return stdlib_source()
    benchmark, place = benchmark_and_path(spec)
    path = Path(place)
    if not path.exists():
        raise UsageError(f"{place}: no such file or folder (nor is it world:SIZE, stdlib or BENCHMARK:PATH)")
    if not benchmark:
        return _of_files(path, fault, leave_out, follow_links, everything)
    if beir.is_beir(path) and beir.splits(path):
        raise UsageError(f"{path} is a BEIR folder, not the official files of {benchmark}: give the path alone")
    from harness1.data.benchmarks import READERS

    return READERS[benchmark](path, fault)


def _of_files(path: Path, fault: Fault, leave_out: bool | None, follow_links: bool, everything: bool) -> Source:
    root, problems = path.resolve(), list[str]()
    common: dict[str, Any] = {"problems": problems, "root": root, "label": str(path)}

    def note(error: CorpusError) -> None:
        if isinstance(error, DuplicateId):
            raise error  # which of the two is meant, nobody can say
        if len(problems) == MOST_LEFT_OUT:
            raise CorpusError(f"{path}: more than {MOST_LEFT_OUT:,} documents cannot be read: {error}") from error
        problems.append(str(error))

    on_line = note if leave_out else fault
    if trec.is_trec(path):
        tasks = partial(trec.read_tasks, path, fault=fault)
        return Source(root.name, "trec", partial(trec.read_corpus, path, on_line), trec.splits(path), tasks, **common)
    if corpus := tables.find_file(path, beir.CORPUS):
        tasks, read = partial(beir.read_tasks, path, fault=fault), partial(tables.read_documents, corpus, on_line)
        common["has_documents"] = corpus.stat().st_size > 0  # else they are elsewhere
        return Source(root.name, "beir", read, beir.splits(path), tasks, **common)
    splits, further, others = corpora.find_questions(path, follow_links=follow_links)
    if splits:
        source = corpora.open_questions(path, splits, further, fault)
        if others:
            found = counted(len(others), "other file")
            source.reading.notices.append(f"{found} not read, because Parquet files hold questions with passages")
        return source
    if path.name.endswith((".jsonl", ".jsonl.gz")):
        return Source(root.name, "jsonl", partial(tables.read_documents, path, on_line), **common)
    if not path.is_dir() and not path.is_file():
        raise UsageError(f"{path}: neither a folder nor a regular file")
    reading = Reading()
    read = partial(folder.read, path, note, reading, follow_links=follow_links, everything=everything)
    edition = folder.edition(everything=everything) + (folder.state(path) if follow_links else "")
    return Source(root.name, "folder", read, edition=edition, reading=reading, **common)


def benchmark_and_path(spec: str) -> tuple[str, str]:
    """Return the name of the benchmark in a spec, "" for none, and the place on disk."""
    name, colon, path = spec.partition(":")
    if not colon:
        return "", spec
    from harness1.data.benchmarks import READERS

    return (name, path) if name in READERS else ("", spec)


def stdlib_source() -> Source:
    """Open the docstrings of Python's standard library: a document for each public module, class, function and
    method that has one. The split `demo` holds questions that need several of them."""
    stdlib = msgspec.toml.decode(resources.files(__package__).joinpath("stdlib.toml").read_bytes())
    documents = _stdlib_documents(stdlib["modules"])
    tasks = list[Task]()
    for number, each in enumerate(stdlib["demo"], start=1):
        if documents.keys() >= {*each["evidence"]}:  # not every Python has all of it
            gold = Gold(dict.fromkeys(each["evidence"], 1))
            tasks.append(Task(f"demo-{number}", each["query"], "demo", gold, {"hops": len(gold.relevant)}))
    # The documents are those of the running Python; the number counts changes in how they are read.
    return Source(
        *("stdlib", "stdlib", lambda: iter(documents.values()), ("demo",), lambda split: list(tasks)),
        edition=f"2 {sys.version}",
        label="the standard library",
    )


def _stdlib_documents(modules: Sequence[str]) -> dict[DocId, Document]:
    """Return the documents by id, which is the dotted name; an object with several names is under the shortest."""
    objects: dict[str, object] = {}
    for module in modules:
        with suppress(ImportError):  # Python may be built without it
            objects[module] = importlib.import_module(module)
            public = getattr(objects[module], "__all__", vars(objects[module]))
            own = {f"{module}.{name}": getattr(objects[module], name, None) for name in public}
            objects |= {name: value for name, value in own.items() if not inspect.ismodule(value)}
            for name, value in own.items():
                if inspect.isclass(value):
                    objects |= {f"{name}.{part}": member for part, member in vars(value).items()}
    documents: dict[DocId, Document] = {}
    seen: set[int] = set()
    for name, value in sorted(objects.items(), key=lambda item: (len(item[0]), item[0])):
        kind = next((kind for kind, is_kind in _KINDS_OF_OBJECTS.items() if is_kind(value)), None)
        if kind and isinstance(value.__doc__, str) and id(value) not in seen and "._" not in name:
            seen.add(id(value))
            text = f"{name}{_signature(value)}\n\n{inspect.cleandoc(value.__doc__)}"
            documents[DocId(name)] = Document(DocId(name), f"{name} ({kind})", text)
    return dict(sorted(documents.items()))


def _signature(value: object) -> str:
    try:
        return _ADDRESS.sub("", str(inspect.signature(value)))  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return ""
