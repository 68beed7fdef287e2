"""The standard library as a corpus: read from its sources, under public names, without running them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness1.data.open import DEMO, ModuleLibrary, read_documents, stdlib_source
from harness1.data.source import Source
from harness1.errors import UsageError
from harness1.records import DocId
from harness1.retrieval.corpus import Document


@pytest.fixture(scope="module")
def source() -> Source:
    return stdlib_source()


@pytest.fixture(scope="module")
def documents(source: Source) -> dict[str, Document]:
    return {document.doc_id: document for document in source.documents()}


def write(root: Path, files: dict[str, str]) -> ModuleLibrary:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    return ModuleLibrary(root)


def test_the_running_library_has_thousands_of_documents(documents: dict[str, Document]) -> None:
    assert len(documents) > 2000
    for name, document in documents.items():
        assert document.doc_id == name
        assert document.text.startswith(name)
        assert document.title.startswith(name)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("json.dumps", "(obj, *, skipkeys=False"),
        ("math.sqrt", "square root of x"),
        ("collections.deque.append", "right side of the deque"),
        ("decimal.Decimal", "new Decimal object"),
        ("os.unlink", "Remove a file"),
        ("os.path.join", "Join two or more"),
        ("asyncio.run", "Execute the coroutine"),
        ("pathlib.Path.rglob", "Recursively yield"),
        ("json", "JSON"),
    ],
)
def test_a_public_name_leads_to_its_docstring(documents: dict[str, Document], name: str, words: str) -> None:
    assert words in documents[name].text


def test_no_private_test_or_window_module_is_in_it(documents: dict[str, Document]) -> None:
    parts = {part for name in documents for part in name.split(".")}
    assert not any(part.startswith("_") for part in parts)
    tops = {name.split(".")[0] for name in documents}
    assert tops.isdisjoint({"tkinter", "turtle", "idlelib", "antigravity", "this", "lib2to3", "test", "posix"})


def test_reading_it_prints_nothing_and_imports_no_window() -> None:
    script = (
        "import sys; from harness1.data.open import stdlib_source; before = set(sys.modules); stdlib_source();"
        "print(*(set(sys.modules) - before))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(["", *sys.path])}
    run = subprocess.run(
        [sys.executable, "-W", "always", "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    imported = set(run.stdout.split())
    assert run.stderr == ""
    assert run.stdout.count("\n") == 1
    assert "_csv" in imported
    assert imported.isdisjoint({"tkinter", "_tkinter", "turtle", "antigravity", "this", "webbrowser", "idlelib"})


def test_every_demo_task_needs_several_documents_that_are_there(source: Source, documents: dict[str, Document]) -> None:
    tasks = source.tasks("demo")
    assert 5 <= len(tasks) <= 8
    assert tasks[0].task_id == "demo-1"
    for task in tasks:
        assert task.gold is not None
        assert 2 <= len(task.gold.relevant) <= 4
        assert task.gold.relevant.keys() <= documents.keys()
        assert not all(name in task.query for name in task.gold.relevant)
    assert len(tasks) == len(DEMO)


def test_an_unknown_split_is_refused(source: Source) -> None:
    with pytest.raises(UsageError, match="demo"):
        source.tasks("test")


def test_sources_are_parsed_and_never_run(tmp_path: Path) -> None:
    library = write(tmp_path, {"boom.py": '"""About boom."""\nraise SystemExit(1)\ndef f(a, b=2):\n    """F."""\n'})
    documents = read_documents(library)
    assert documents[DocId("boom")].text == "boom\n\nAbout boom."
    assert documents[DocId("boom.f")].title == "boom.f (function)"


def test_methods_lose_their_receiver_and_private_ones_are_left_out(tmp_path: Path) -> None:
    body = (
        'class C:\n    """C."""\n    def __init__(self, size): ...\n'
        '    def m(self, x):\n        """M."""\n    @staticmethod\n    def s(y):\n        """S."""\n'
        '    @property\n    def p(self):\n        """P."""\n    def _hidden(self):\n        """H."""\n'
        "    def bare(self): ...\n"
    )
    texts = {d.text for name, d in read_documents(write(tmp_path, {"mod.py": body})).items() if name.startswith("mod")}
    assert texts == {"mod.C(size)\n\nC.", "mod.C.m(x)\n\nM.", "mod.C.s(y)\n\nS.", "mod.C.p\n\nP."}


def test_reexported_objects_stand_once_under_the_shortest_public_name(tmp_path: Path) -> None:
    files = {
        "pack/__init__.py": "from .inner import *\nfrom ._own import g as h\nfrom other import used, passed\n"
        "__all__ = ['passed']",
        "pack/inner.py": 'def f():\n    """F."""\n',
        "pack/_own.py": 'def g():\n    """G."""\n',
        "other.py": 'def used():\n    """U."""\ndef passed():\n    """P."""\n',
    }
    names = {name for name in read_documents(write(tmp_path, files)) if name.startswith(("pack", "other"))}
    assert names == {"pack.f", "pack.h", "other.used", "pack.passed"}


def test_fallbacks_under_try_are_found_and_circular_imports_end(tmp_path: Path) -> None:
    files = {
        "a.py": "from _b import *\ntry:\n    from _nothing import f\nexcept ImportError:\n"
        "    def f():\n        '''F.'''\n",
        "_b.py": "from a import *\n",
    }
    assert DocId("a.f") in read_documents(write(tmp_path, files))


def test_a_source_that_is_not_python_becomes_a_problem(tmp_path: Path) -> None:
    library = write(tmp_path, {"bad.py": "def (:", "good.py": '"""Good."""'})
    assert DocId("good") in read_documents(library)
    assert [problem.split(":")[0] for problem in library.problems] == ["bad"]
