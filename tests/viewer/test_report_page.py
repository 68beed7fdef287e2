"""The report in a browser, on a phone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness1.eval.ablations import COLUMNS
from harness1.viewer.html import environment
from harness1.viewer.report import ensure_report
from tests.axe import barriers, open_browser
from tests.eval.run_folders import dataset, episode, run_folder

pytestmark = pytest.mark.browser

PAGE = """
{% from "components.html" import cells, section, table %}
<style>{{ (asset("base.css") + asset("report.css"))|safe }}</style>
<main>{% call section("Wide") %}{% call(row) table(heads, rows) %}{{ cells(row) }}{% endcall %}{% endcall %}</main>
"""


def changed_edges(narrow: Any, left: int) -> tuple[bool, bool]:
    """Whether the left and the right edge look otherwise than without a background, with a table scrolled so far."""
    box = narrow.locator(".scroll").bounding_box()
    edges = [box | {"width": 4}, box | {"x": box["x"] + box["width"] - 4, "width": 4}]
    found = []
    narrow.locator(".scroll").evaluate("(element, left) => { element.scrollLeft = left }", left)
    for background in ("", "none"):
        narrow.locator(".scroll").evaluate("(element, value) => { element.style.background = value }", background)
        found.append([narrow.screenshot(clip=edge, animations="disabled") for edge in edges])
    narrow.locator(".scroll").evaluate("element => { element.style.background = '' }")
    return found[0][0] != found[1][0], found[0][1] != found[1][1]


def test_a_wide_table_shows_on_which_side_it_goes_on(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    rows = [["-100.0 to -100.0"] * len(COLUMNS)] * 3
    page.write_text(environment().from_string(PAGE).render(heads=COLUMNS, rows=rows))
    with open_browser() as browser:
        narrow = browser.new_page(viewport={"width": 390, "height": 400})
        narrow.goto(f"file://{page}")
        assert [changed_edges(narrow, left) for left in (0, 200, 9999)] == [(False, True), (True, True), (True, False)]
        narrow.set_viewport_size({"width": 2400, "height": 400})
        assert changed_edges(narrow, 0) == (False, False)


def test_a_phone_needs_no_scrolling_sideways(tmp_path: Path) -> None:
    query = {"t1": "Which " + "unbreakably" * 20 + " long name is it?"}
    folder = run_folder(tmp_path / "run", dataset(tmp_path / "data", query), [episode("t1", "ab", turns=2)])
    ensure_report(folder)
    with open_browser() as browser:
        narrow = browser.new_page(viewport={"width": 390, "height": 800})
        narrow.goto(f"file://{folder / 'report.html'}")
        assert narrow.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert barriers(narrow) == []
