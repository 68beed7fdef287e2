"""The tutorials as notebooks: made from their pages, and each runs from its first cell to its last."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import nbclient
import nbformat
import pytest

from docs.tutorials.notebooks import exported, notebook_of

ROOT = Path(__file__).parent.parent.parent
PAGES = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
LONGEST_S = 600
"""Seconds that one cell may take on a busy machine."""


def quick(source: str) -> str:
    """A cell of settings, with the small size that the page shows behind a `#` in place of the large one."""
    small = [line.removeprefix("# ") for line in source.splitlines() if line.startswith("# %env")]
    return "\n".join([source, *small])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_notebook_is_what_its_page_makes(page: Path) -> None:
    made = nbformat.writes(notebook_of(page)) + "\n"
    assert page.with_suffix(".ipynb").read_text() == made, "run `make notebooks`"


@pytest.mark.docs
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_notebook_runs_to_its_end(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "benchmarks").symlink_to(ROOT / "benchmarks")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(page.with_suffix(".ipynb"), 4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.source = quick(cell.source).replace("%%bash\n", "%%bash\nset -e\n", 1)
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=LONGEST_S, kernel_name="python3", resources=resources).execute()


@pytest.mark.docs
def test_exports_become_settings_of_the_notebook() -> None:
    assert exported("%%bash\nexport A=1 B=2\n# export A=3") == "%env A=1\n%env B=2\n# %env A=3"
    assert exported("%%bash\nexport A=1\nls") == "%%bash\nexport A=1\nls"
    assert quick("%env A=1\n# %env A=3").splitlines()[-1] == "%env A=3"
