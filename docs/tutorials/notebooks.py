"""Write a notebook beside each tutorial, from its page: the page is the only source, and outputs are not kept.

    python docs/tutorials/notebooks.py [--check]

Python blocks become cells, bash blocks become `%%bash` cells, and a block that only exports variables sets them for all
later cells. `--check` writes nothing and exits with 1 if a notebook differs from its page.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import jupytext
import nbformat

TUTORIALS = Path(__file__).parent
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}
HEADER = "---\njupyter:\n  kernelspec:\n    display_name: Python 3\n    language: python\n    name: python3\n---\n\n"
"""Without it the language of most blocks, bash, would be that of the kernel."""
EXPORT = re.compile(r"# export |export ")


def notebook_of(page: Path) -> Any:
    """Return the notebook of a page: the same cells with the same ids, whenever it is made."""
    made = jupytext.reads(HEADER + page.read_text(), fmt="md")
    for number, cell in enumerate(made.cells):
        cell.id = f"cell-{number}"
        cell.metadata = {}
        if cell.cell_type == "code":
            cell.source = exported(cell.source)
            cell.outputs, cell.execution_count = [], None
    made.metadata = {"kernelspec": KERNEL, "language_info": {"name": "python"}}
    return made


def exported(source: str) -> str:
    """Return a cell with `%env` lines in place of a bash cell's exports, which would end with its shell."""
    lines = source.removeprefix("%%bash\n").splitlines()
    if not source.startswith("%%bash") or not all(EXPORT.match(line) for line in lines):
        return source
    return "\n".join(
        f"{'# ' if line.startswith('#') else ''}%env {setting}"
        for line in lines
        for setting in line.removeprefix("# ").removeprefix("export ").split()
    )


def main(check: bool) -> int:
    """Write the notebooks, or name those that differ."""
    stale = 0
    for page in sorted(TUTORIALS.glob("*.md")):
        path, text = page.with_suffix(".ipynb"), nbformat.writes(notebook_of(page)) + "\n"
        if check:
            differs = not path.exists() or path.read_text() != text
            stale |= differs
            print(f"{path.name}: {'differs from its page: make notebooks' if differs else 'agrees'}")
        else:
            path.write_text(text)
    return int(stale)


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
