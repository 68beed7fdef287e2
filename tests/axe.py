"""A browser, and the accessibility checker axe-core in its pages; it comes with a package: nothing is downloaded."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

GRAVE = ("serious", "critical")


def barriers(page: Any) -> list[str]:
    spec = find_spec("axe_playwright_python")
    assert spec.origin is not None
    # Evaluated rather than added as a tag, which a page's content policy may refuse.
    page.evaluate(Path(spec.origin).with_name("axe.min.js").read_text())
    found = page.evaluate("() => axe.run(document)")["violations"]
    return [
        f"{each['id']} ({each['impact']}): {each['help']}: {each['nodes'][0]['html'][:200]}"
        for each in found
        if each["impact"] in GRAVE
    ]


@contextmanager
def open_browser() -> Iterator[Any]:
    """Yield a browser. While it is open, its thread has an event loop, and no episode can be played in it."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        yield browser
        browser.close()
