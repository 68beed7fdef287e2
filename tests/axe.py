"""The accessibility checker axe-core in an open page; it comes with a Python package, so that nothing is downloaded."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

GRAVE = ("serious", "critical")


def barriers(page: Any) -> list[str]:
    """Return what hinders people in an open page: rule, gravity and the first element of each grave violation."""
    spec = find_spec("axe_playwright_python")
    assert spec is not None
    assert spec.origin is not None
    # Evaluated rather than added as a tag, which a page's content policy may refuse.
    page.evaluate(Path(spec.origin).with_name("axe.min.js").read_text())
    found = page.evaluate("() => axe.run(document)")["violations"]
    return [
        f"{each['id']} ({each['impact']}): {each['help']}: {each['nodes'][0]['html'][:200]}"
        for each in found
        if each["impact"] in GRAVE
    ]
