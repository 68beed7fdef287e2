"""Take the pictures of the tutorials from the folder in which their commands were run.

python docs/tutorials/pictures.py FOLDER      # holds bridge.html, both.html, tiny/view.html, tiny/recipe.html
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

PICTURES = Path(__file__).parent
SIZE = {"width": 1400, "height": 900}
SETTLED_MS = 400
"""Milliseconds after which an episode is shown."""
SHOTS = {
    "search_episode": ("bridge.html", "", ""),
    "compare_beside": ("both.html", "#0/", "ojjj"),
    "train_beside": ("tiny/view.html", "#0/", "oj"),
    "train_curves": ("tiny/view.html", "#training", ""),
    "train_recipe": ("tiny/recipe.html", "", ""),
}
"""For each picture: the page, the first link to follow that begins so, if any, and the keys to press then."""


def main(folder: Path) -> None:
    """Open each page in a headless browser and write its picture."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for name, (page, link, keys) in SHOTS.items():
            shown = browser.new_page(viewport=SIZE, color_scheme="light")
            shown.goto(f"file://{(folder / page).resolve()}")
            shown.wait_for_selector("#main > :not(.waiting)")
            if link:
                shown.locator(f"a[href^='{link}']").first.click()
            for key in keys:
                shown.wait_for_timeout(SETTLED_MS)
                shown.keyboard.press(key)
            shown.wait_for_timeout(SETTLED_MS)
            shown.screenshot(path=PICTURES / f"{name}.png")
            shown.close()
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
