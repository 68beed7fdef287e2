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
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path

import msgspec

from harness1.data.source import Source
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
    public = [name for name in library.names() if not _private(name)]
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


def _private(name: str) -> bool:
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
        """Yield the objects that a `from ... import` re-exports: those in `__all__`, and all from private modules or
        the same package."""
        parents = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
        origin = ".".join([*parents, node.module or ""]).rstrip(".")
        inside = bool(package) and origin.startswith(f"{package}.")
        private = _private(origin)
        available = self.module(origin).members
        pairs = [(alias.name, alias.asname or alias.name) for alias in node.names]
        if pairs == [("*", "*")]:
            pairs = [(own, own) for own in available]
        for theirs, own in pairs:
            if theirs in available and not own.startswith("_") and (own in exported or inside or private):
                yield own, available[theirs]


def _modules(root: Path) -> Iterator[tuple[str, Path]]:
    """Yield the dotted name and the file of every module under a folder, without skipped packages."""
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
    """Yield statements in order, including those under `if` and `try`, which hold fallbacks and platform variants."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try):
            handlers = [part for handler in getattr(node, "handlers", []) for part in handler.body]
            yield from _statements([*node.body, *handlers, *node.orelse])


def _exported(tree: ast.Module) -> set[str]:
    """Return the names that assignments to `__all__` hold as plain strings."""
    names: set[str] = set()
    for node in _statements(tree.body):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
            parts = (part.value for part in ast.walk(node) if isinstance(part, ast.Constant))
            names.update(part for part in parts if isinstance(part, str))
    return names


def _definitions(body: Iterable[ast.stmt], kind: str) -> Iterator[tuple[str, Entry]]:
    """Yield the classes and functions that a module or class defines; if two have the same name, the documented one
    counts."""
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
    """Return a function or method, without `self` and `cls`, which its caller does not pass."""
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
    """Return a class, function or method of a compiled module."""
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
    """Return the argument list that the compiled module reports; many report none."""
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
