"""Gives the README's relative links the addresses that they have in a repository, for pages away from it.

    python docs/site/index_readme.py https://HOST/OWNER/NAME v0.1.0

The release runs it before it builds: an index of packages shows the README alone, where `docs/sft.md` leads nowhere.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"
_LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\[\]]*)\]\((?P<path>[^)#:\s]+)(?P<anchor>#[^)\s]*)?\)")


def with_addresses(markdown: str, repository: str, ref: str) -> str:
    """Return a Markdown text of a repository's root with addresses at a tag or commit for its relative links."""

    def addressed(link: re.Match[str]) -> str:
        kind = "raw" if link["image"] else "blob"
        return f"{link['image']}[{link['text']}]({repository}/{kind}/{ref}/{link['path']}{link['anchor'] or ''})"

    return _LINK.sub(addressed, markdown)


if __name__ == "__main__":
    README.write_text(with_addresses(README.read_text(), *sys.argv[1:]))
