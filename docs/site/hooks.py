"""What mkdocs calls while it builds the site: pages from the files of the root, pages generated from the code, and
links that lead to the same place on the site as on a code host."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File
from pages_of_code import commands_page, python_page, settings_page

ROOT = Path(__file__).parents[2]
BESIDE = {
    "index.md": "README.md",
    "architecture.md": "ARCHITECTURE.md",
    "contributing.md": "CONTRIBUTING.md",
    "report_a_vulnerability.md": "SECURITY.md",
    "changes.md": "CHANGELOG.md",
}
"""The pages that are files of the repository's root."""
GENERATED = {
    "reference/commands.md": commands_page,
    "reference/settings.md": settings_page,
    "reference/python.md": python_page,
}
_LINK = re.compile(r"\[([^\[\]]*)\]\(([^)#:\s]+)(#[^)\s]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are not files of `docs/`."""
    for address, name in BESIDE.items():
        files.append(File.generated(config, address, abs_src_path=str(ROOT / name)))
    for address, page in GENERATED.items():
        files.append(File.generated(config, address, content=page()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Lead each link between files of the repository to the page made of that file; a link to any other file is
    shown as its path."""
    address = page.file.src_uri
    if address in GENERATED:
        return markdown

    def led(found: re.Match[str]) -> str:
        source = posixpath.normpath(posixpath.join(posixpath.dirname(_source(address)), found[2]))
        if files.get_file_from_path(_address(source)) is None and (ROOT / source).exists():
            return f"`{source}`"
        return f"[{found[1]}]({posixpath.relpath(_address(source), posixpath.dirname(address))}{found[3] or ''})"

    return _LINK.sub(led, markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Let a wide table be reached, and so scrolled, by the keyboard."""
    return html.replace("<table>", '<table tabindex="0">')


def on_post_page(output: str, **_: Any) -> str:
    """Name the theme's search dialog for those who hear the page."""
    return output.replace('class="md-search"', 'class="md-search" aria-label="Search"')


def _source(address: str) -> str:
    """Return the path, within the repository, of the file that a page is made of."""
    return BESIDE.get(address, f"docs/{address}")


def _address(source: str) -> str:
    """Return the address of the page that is made of a file of the repository."""
    found = {name: address for address, name in BESIDE.items()}.get(source)
    return found or posixpath.relpath(source, "docs")
