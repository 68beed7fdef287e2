"""The documentation of the running Python's standard library as a corpus: real text on every machine, without a
download.

Sources are parsed and never run. Only modules that are written in C are imported, from a fixed list, because their
docstrings are nowhere else.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
import sysconfig
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import resources
from pathlib import Path

import msgspec

from harness1.data import beir, folder, jsonl, trec
from harness1.data.source import DuplicateId, Fault, Source, refuse
from harness1.errors import CorpusError, UsageError
from harness1.records import DocId, Gold, Record, Task
from harness1.retrieval.corpus import Document

SKIPPED = frozenset({"antigravity", "this", "test", "tests", "idlelib", "lib2to3", "turtledemo", "tkinter", "turtle",
                     "distutils", "pydoc_data", "site-packages", "dist-packages"})  # fmt: skip
COMPILED = frozenset({
    "array", "binascii", "cmath", "fcntl", "grp", "math", "mmap", "pyexpat", "resource", "select", "termios",
    "unicodedata", "zlib", "_bisect", "_blake2", "_bz2", "_csv", "_datetime", "_decimal", "_hashlib", "_heapq", "_json",
    "_lzma", "_multiprocessing", "_pickle", "_queue", "_random", "_socket", "_sqlite3", "_ssl", "_statistics",
    "_struct", *sys.builtin_module_names,
}) - {"xxsubtype", "_tkinter"}  # fmt: skip
INTERNAL = frozenset({"posix", "nt"})
"""Modules whose contents are public under another name, `os`."""
Function = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Entry:
    """A documented object. `signature` is its argument list in parentheses, or ""."""

    kind: str
    signature: str
    doc: str
    members: dict[str, Entry] = field(default_factory=dict)


def stdlib_source() -> Source:
    """Open the standard library's docstrings: one document for each public module, class, function and method with one.

    A document's id is its dotted name; an object that is public under several names appears under the shortest. The
    one split, `demo`, holds questions that need several documents; one whose evidence the running version of Python
    does not have is left out. `problems` names the sources that could not be parsed.
    """
    library = ModuleLibrary(Path(sysconfig.get_path("stdlib")))
    documents = read_documents(library)
    tasks = [task for task in DEMO if task.gold and task.gold.relevant.keys() <= documents.keys()]

    # The documents are those of the running Python; the number counts changes in how they are read.
    edition = f"1 {sys.version}"
    return Source(
        *("stdlib", "stdlib", lambda: iter(documents.values()), ("demo",), lambda split: list(tasks), library.problems),
        edition=edition,
        label="the standard library",
    )


def read_documents(library: ModuleLibrary) -> dict[DocId, Document]:
    """Return all documents by id, sorted by id. Of several objects with the same own name, arguments and docstring, one
    is kept."""
    kept: dict[tuple[str, str, str], tuple[str, str]] = {}
    public = [name for name in library.names() if not _is_private(name)]
    for name, entry in (found for module in public for found in flatten(module, library.module(module))):
        key = (name.rpartition(".")[2], entry.signature, entry.doc)
        if key not in kept or (len(name), name) < (len(kept[key][0]), kept[key][0]):
            kept[key] = (name, entry.kind)
    documents = {}
    for (_, signature, doc), (name, kind) in sorted(kept.items(), key=lambda item: item[1]):
        text = f"{name}{signature}\n\n{doc}"
        documents[DocId(name)] = Document(doc_id=DocId(name), title=f"{name} ({kind})", text=text)
    return documents


def flatten(name: str, entry: Entry) -> Iterator[tuple[str, Entry]]:
    """Yield an object and everything public in it that has a docstring, by dotted name."""
    if entry.doc:
        yield name, entry
    for own, member in entry.members.items():
        if not own.startswith("_"):
            yield from flatten(f"{name}.{own}", member)


def _is_private(name: str) -> bool:
    return name in INTERNAL or any(part.startswith("_") for part in name.split("."))


class ModuleLibrary:
    """The modules under one folder of sources, with the compiled ones; each is read once, on demand."""

    def __init__(self, root: Path) -> None:
        self.problems: list[str] = []
        self._paths = dict(_modules(root))
        if "posixpath" in self._paths:
            self._paths["os.path"] = self._paths["posixpath"]
        self._read: dict[str, Entry] = {}

    def names(self) -> list[str]:
        """Return every module that can be read, sorted; private ones too."""
        return sorted(self._paths.keys() | COMPILED)

    def module(self, name: str) -> Entry:
        """Return what a module defines and re-exports; an empty entry for an unknown one."""
        if name not in self._read:
            self._read[name] = Entry("module", "", "")  # what a circular import sees
            if name in self._paths:
                self._read[name] = self._parse(name)
            elif name in COMPILED:
                self._read[name] = _inspect_module(name)
        return self._read[name]

    def _parse(self, name: str) -> Entry:
        path = self._paths[name]
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tree = ast.parse(path.read_bytes())
        except (OSError, SyntaxError, ValueError) as error:
            self.problems.append(f"{name}: {error}")
            return Entry("module", "", "")
        members = dict(_definitions(tree.body, "function"))
        exported = _exported(tree)
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        for node in _statements(tree.body):
            if isinstance(node, ast.ImportFrom):
                for own, entry in self._imported(node, package, exported):
                    if own not in members or not members[own].doc:
                        members[own] = entry
        return Entry("module", "", ast.get_docstring(tree) or "", members)

    def _imported(self, node: ast.ImportFrom, package: str, exported: set[str]) -> Iterator[tuple[str, Entry]]:
        parents = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
        origin = ".".join([*parents, node.module or ""]).rstrip(".")
        inside = bool(package) and origin.startswith(f"{package}.")
        private = _is_private(origin)
        available = self.module(origin).members
        pairs = [(alias.name, alias.asname or alias.name) for alias in node.names]
        if pairs == [("*", "*")]:
            pairs = [(own, own) for own in available]
        for theirs, own in pairs:
            if theirs in available and not own.startswith("_") and (own in exported or inside or private):
                yield own, available[theirs]


def _modules(root: Path) -> Iterator[tuple[str, Path]]:
    for path in sorted(root.iterdir()) if root.is_dir() else []:
        name = path.stem
        if name in SKIPPED or not name.isidentifier():
            continue
        if path.suffix == ".py":
            yield name, path
        elif (path / "__init__.py").is_file():
            yield name, path / "__init__.py"
            yield from ((f"{name}.{own}", file) for own, file in _modules(path) if own not in ("__init__", "__main__"))


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try):
            handlers = [part for handler in getattr(node, "handlers", []) for part in handler.body]
            yield from _statements([*node.body, *handlers, *node.orelse])


def _exported(tree: ast.Module) -> set[str]:
    names: set[str] = set()
    for node in _statements(tree.body):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
            parts = (part.value for part in ast.walk(node) if isinstance(part, ast.Constant))
            names.update(part for part in parts if isinstance(part, str))
    return names


def _definitions(body: Iterable[ast.stmt], kind: str) -> Iterator[tuple[str, Entry]]:
    found: dict[str, Entry] = {}
    for node in _statements(body):
        if isinstance(node, ast.ClassDef):
            members = dict(_definitions(node.body, "method"))
            init = members.get("__init__", Entry("", "", ""))
            entry = Entry("class", init.signature, ast.get_docstring(node) or "", members)
        elif isinstance(node, Function):
            entry = _function(node, kind)
        else:
            continue
        if node.name not in found or entry.doc:
            found[node.name] = entry
    yield from found.items()


def _function(node: ast.FunctionDef | ast.AsyncFunctionDef, kind: str) -> Entry:
    marks = {ast.unparse(mark).rpartition(".")[2] for mark in node.decorator_list}
    doc = ast.get_docstring(node) or ""
    if marks & {"property", "cached_property", "setter", "getter"}:
        return Entry("property", "", doc)
    arguments = node.args
    if kind == "method" and "staticmethod" not in marks:
        first = arguments.posonlyargs or arguments.args
        del first[:1]
    return Entry(kind, f"({ast.unparse(arguments)})", doc)


def _inspect_module(name: str) -> Entry:
    try:
        module = importlib.import_module(name)
    except ImportError:  # not built for this platform
        return Entry("module", "", "")
    members = {own: _inspect(value) for own, value in sorted(vars(module).items()) if callable(value)}
    return Entry("module", "", inspect.cleandoc(module.__doc__ or ""), members)


def _inspect(value: object) -> Entry:
    doc = inspect.cleandoc(value.__doc__) if isinstance(value.__doc__, str) else ""
    if inspect.isclass(value):
        members = {own: _inspect(member) for own, member in sorted(vars(value).items()) if not own.startswith("_")}
        return Entry("class", _signature(value), doc, {own: e for own, e in members.items() if e.kind != "constant"})
    if inspect.isgetsetdescriptor(value) or inspect.ismemberdescriptor(value):
        return Entry("property", "", doc)
    if not callable(value) and not isinstance(value, staticmethod | classmethod):
        return Entry("constant", "", "")
    return Entry("method" if inspect.ismethoddescriptor(value) else "function", _signature(value), doc)


def _signature(value: object) -> str:
    text = str(getattr(value, "__text_signature__", None) or "")
    for receiver in ("$self, /", "$self", "$module, /", "$module", "$type, /", "$type"):
        text = text.replace(f"({receiver}, ", "(").replace(f"({receiver})", "()")
    return " ".join(text.split())


class _Question(Record):
    query: str
    evidence: tuple[DocId, ...]


def _demo() -> Iterator[Task]:
    text = resources.files(__package__).joinpath("stdlib.toml").read_bytes()
    for number, each in enumerate(msgspec.toml.decode(text, type=dict[str, list[_Question]])["demo"], start=1):
        gold = Gold(relevant=dict.fromkeys(each.evidence, 1))
        yield Task(f"demo-{number}", each.query, "demo", gold, {"hops": len(each.evidence)})


DEMO = tuple(_demo())


MOST_LEFT_OUT = 10_000
"""Documents that may be left out; a corpus with more is not what it was taken for."""
_KINDS = "nor is it world:SIZE, stdlib or BENCHMARK:PATH"


def from_anywhere(spec: str) -> str:
    """Return a name of the corpus that does not depend on the current directory: paths become absolute."""
    if spec == "stdlib" or spec.startswith("world:"):
        return spec
    name, path = _of_benchmark(spec)
    return f"{name}:{Path(path).resolve()}" if name else str(Path(path).resolve())


def open_source(
    spec: str, fault: Fault = refuse, *, leave_out: bool | None = None, follow_links: bool = False
) -> Source:
    """Open a dataset: its documents, and its tasks by split.

    Args:
        spec: a BEIR or TREC folder, a JSONL file (.jsonl, .jsonl.gz), a folder of texts (.md .rst .txt .html .htm
            .pdf), `NAME:PATH` for a benchmark in its official files, `world:SIZE` for a synthetic world of that many
            documents (see `world_source` for `world:SIZE:SEED:people`), or `stdlib` for Python's own documentation.
        fault: is called with each broken line while documents and tasks are read; the default raises.
        leave_out: what becomes of documents that cannot be read, in folders and JSONL files. True: they are left out
            and listed in the source's `problems`, unless they repeat an id; False: they are refused. None: files of a
            folder of texts are left out, and broken lines go to `fault`. Tasks and benchmarks always go to `fault`.
        follow_links: read links that lead out of a folder of texts.

    Raises:
        UsageError: nothing of that name exists, or its kind cannot be read.
        CorpusError: it exists and is broken; for faults within documents, raised while they are read.
    """
    source = _opened(spec, fault, leave_out, follow_links)
    return _whole(source) if leave_out is False else source


def _opened(spec: str, fault: Fault, leave_out: bool | None, follow_links: bool) -> Source:
    if spec.startswith("world:"):
        return _world(spec)
    if spec == "stdlib":
        return stdlib_source()
    name, place = _of_benchmark(spec)
    path = Path(place)
    if not path.exists():
        rest = place.partition(":")[2]
        hint = f"give the path alone: {rest}" if rest and Path(rest).exists() else _KINDS
        raise UsageError(f"{place}: no such file or folder ({hint})")
    if name:
        from harness1.data.benchmarks import BENCHMARKS

        if beir.is_beir(path) and beir.splits(path):
            raise UsageError(f"{path} is a BEIR folder, not the official files of {name}: give the path alone")
        return BENCHMARKS[name].open(path, fault)
    return _of_files(path, fault, leave_out, follow_links)


def _whole(source: Source) -> Source:
    def refuse_problems() -> None:
        if source.problems:
            raise CorpusError(source.problems[0])

    def documents() -> Iterator[Document]:
        for document in source.documents():
            refuse_problems()
            yield document
        refuse_problems()

    return replace(source, documents=documents)


def _of_files(path: Path, fault: Fault, leave_out: bool | None, follow_links: bool) -> Source:
    problems: list[str] = []
    noted = partial(_note, path, problems)
    on_line = noted if leave_out else fault
    if trec.is_trec(path):
        tasks = partial(trec.read_tasks, path, fault=fault)
        read = partial(trec.read_corpus, path, on_line)
        return _checked(path, "trec", read, trec.splits(path), tasks, problems=problems)
    if beir.is_beir(path):
        tasks = partial(beir.read_tasks, path, fault=fault)
        read = partial(beir.read_corpus, path, on_line)
        found = _checked(path, "beir", read, beir.splits(path), tasks, problems=problems)
        return replace(found, has_documents=not beir.is_empty(path))
    if path.is_dir():
        read = partial(folder.read, path, noted, follow_links=follow_links)
        source = _checked(path, "folder", read, problems=problems)
        return replace(source, edition=folder.state(path)) if follow_links else source
    if path.name.endswith((".jsonl", ".jsonl.gz")):
        return _checked(path, "jsonl", partial(jsonl.read, path, on_line), problems=problems)
    raise UsageError(
        f"{path}: not a corpus; give a BEIR or TREC folder, a .jsonl or .jsonl.gz file, or a folder of texts"
    )


def _note(path: Path, problems: list[str], error: CorpusError) -> None:
    if isinstance(error, DuplicateId):
        raise error  # which of the two is meant, nobody can say
    if len(problems) == MOST_LEFT_OUT:
        raise CorpusError(f"{path}: more than {MOST_LEFT_OUT:,} documents cannot be read; the last: {error}") from error
    problems.append(str(error))


def _of_benchmark(spec: str) -> tuple[str, str]:
    name, colon, path = spec.partition(":")
    if not colon:
        return "", spec
    from harness1.data.benchmarks import BENCHMARKS

    return (name, path) if name in BENCHMARKS else ("", spec)


def _world(spec: str) -> Source:
    from harness1.data.world import world_source

    size, _, rest = spec.removeprefix("world:").partition(":")
    seed, _, about = rest.partition(":")
    if not all(each.isascii() and each.isdigit() for each in (size, seed or "0")) or about not in ("", "people"):
        raise UsageError(
            f"{spec}: a synthetic world is world:SIZE, SIZE being its number of documents, world:SIZE:SEED or"
            " world:SIZE:SEED:people"
        )
    return world_source(int(size), int(seed or 0), about)


def _checked(
    path: Path,
    kind: str,
    read: Callable[[], Iterator[Document]],
    splits: tuple[str, ...] = (),
    read_tasks: Callable[[str], list[Task]] = lambda split: [],
    *,
    problems: list[str],
) -> Source:
    def documents() -> Iterator[Document]:
        problems.clear()
        empty = True
        for document in read():
            empty = False
            yield document
        if empty:
            raise CorpusError("; ".join([f"{path} holds no documents", *problems[:10]]))

    root = path.resolve()
    return Source(root.name, kind, documents, splits, read_tasks, problems, root, label=str(path))
