"""Measure the size of a viewer file, the time to write it, and the time until its list works in headless Chromium.

The list is usable when its rows are made and a filter answers: the time runs from the start of navigation to the first
frame after that. An episode is timed from the key that opens it to the frame with its turns; the network is off.

    python benchmarks/viewer.py RUN... [--max-mb MB] [--repeats N] [--chromium PATH] [--json]
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

if not __package__:
    # Run as a script: its neighbours are found beside it.
    sys.path.insert(0, str(Path(__file__).parent.parent))

from playwright.sync_api import Browser, sync_playwright

from harness1.viewer.page_file import inflated
from harness1.viewer.write import Asked, write_view

LISTED = ".list tbody tr [data-at]"
SHOWN = "#turn-title"
FRAME = "new Promise(done => requestAnimationFrame(() => setTimeout(() => done(performance.now()), 0)))"


def measured(browser: Browser, path: Path) -> dict[str, float]:
    """Open a file once, and return times in seconds.

    Returns:
        `list`: until the list can be used; `filter`: until it is filtered; `loaded`: until the whole file is read;
        `episode`: until the first episode is shown.
    """
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    context.set_offline(True)
    page = context.new_page()
    page.goto(path.resolve().as_uri(), wait_until="commit")
    page.wait_for_selector(LISTED)
    usable = page.evaluate(FRAME) / 1000
    begun = time.perf_counter()
    page.fill("#search", "the")
    page.evaluate(FRAME)
    filtered = time.perf_counter() - begun
    page.fill("#search", "")
    page.wait_for_load_state("load")
    loaded = page.evaluate("performance.timing.loadEventEnd - performance.timing.navigationStart") / 1000
    begun = time.perf_counter()
    page.keyboard.press("Escape")
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.wait_for_selector(SHOWN)
    page.evaluate(FRAME)
    opened = time.perf_counter() - begun
    context.close()
    return {"list": usable, "filter": filtered, "loaded": loaded, "episode": opened}


def measure(runs: list[Path], max_mb: float, repeats: int, chromium: str) -> dict[str, Any]:
    """Write the file of some runs, open it several times, and return medians."""
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        path = Path(folder) / "view.html"
        begun = time.perf_counter()
        done = write_view(Asked(runs, max_bytes=int(max_mb * 1e6)), path)
        took = time.perf_counter() - begun
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        times = [measured(browser, path) for _ in range(repeats)]
        browser.close()
        return {
            "episodes": done.episodes,
            "left_out": done.left_out,
            "turns": turns_of(path),
            "megabytes": round(done.size / 1e6, 2),
            "write_s": round(took, 1),
            **{f"{name}_s": round(median(each[name] for each in times), 3) for name in times[0]},
        }


def turns_of(path: Path) -> int:
    """Return the number of turns of all episodes in a file."""
    total = 0
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            if line.startswith('<script type="text/plain" id="e'):
                data, _, _ = line[line.index(">") + 1 : line.rindex("<")].partition(",")
                total += len(inflated(data)["turns"])
    return total


def main() -> None:
    """Print one line for each number, or one JSON object."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--max-mb", type=float, default=60.0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--chromium", default=shutil.which("chromium") or "chromium")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    found = measure(given.runs, given.max_mb, given.repeats, given.chromium)
    if given.json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        print(f"{name:>10}  {value:,}")


if __name__ == "__main__":
    main()
