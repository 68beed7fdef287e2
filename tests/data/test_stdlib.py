"""The documentation of Python's standard library as a corpus, under public names."""

import os
import subprocess
import sys

import pytest

from harness1.data.open import stdlib_source
from harness1.data.source import Source
from harness1.errors import UsageError
from harness1.retrieval.corpus import Document


@pytest.fixture(scope="module")
def source() -> Source:
    return stdlib_source()


@pytest.fixture(scope="module")
def documents(source: Source) -> dict[str, Document]:
    return {document.doc_id: document for document in source.documents()}


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


def test_thousands_of_documents_have_public_names_and_the_same_text_in_every_process(
    documents: dict[str, Document],
) -> None:
    assert len(documents) > 2000
    assert list(documents) == sorted(documents)
    for name, document in documents.items():
        assert document.text.startswith(name)
        assert document.title.startswith(name)
        assert not any(part.startswith("_") for part in name.split("."))
        assert " at 0x" not in document.text.partition("\n")[0]


def test_reading_it_prints_nothing_and_opens_no_window() -> None:
    script = "import sys; from harness1.data.open import stdlib_source; stdlib_source(); print(*sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(["", *sys.path])}
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    assert run.stderr == ""
    assert run.stdout.count("\n") == 1
    assert {"tkinter", "turtle", "antigravity", "this", "idlelib"}.isdisjoint(run.stdout.split())


def test_every_demo_task_needs_several_documents_that_are_there(source: Source, documents: dict[str, Document]) -> None:
    tasks = source.tasks("demo")
    assert [task.task_id for task in tasks] == [f"demo-{number}" for number in range(1, 9)]
    for task in tasks:
        assert task.gold is not None
        assert 2 <= len(task.gold.relevant) <= 4
        assert task.gold.relevant.keys() <= documents.keys()
    with pytest.raises(UsageError, match="demo"):
        source.tasks("test")
