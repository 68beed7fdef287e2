"""Take the pictures of the tutorials: their commands are run in a new folder, but for the training.

python docs/tutorials/pictures.py WORK      # the folder of the recipe tiny; needs chromium, and harness1 on the path
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import nbclient
import nbformat
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


PLAYED = ("search_your_documents", "benchmark_and_compare")
"""The tutorials that are run for their pictures."""


def prepare(work: Path, folder: Path) -> None:
    """Make the pages that are pictured: those of the tutorials, and those of a recipe."""
    for name in PLAYED:
        notebook = nbformat.read(PICTURES / f"{name}.ipynb", 4)
        resources = {"metadata": {"path": str(folder)}}
        nbclient.NotebookClient(notebook, timeout=None, kernel_name="python3", resources=resources).execute()
    (folder / "tiny").mkdir()
    shutil.copy(work / "view.html", folder / "tiny")
    command = ["harness1", "view", str(work), "--out", str(folder / "tiny" / "recipe.html")]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


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
    with tempfile.TemporaryDirectory() as made:
        prepare(Path(sys.argv[1]), Path(made))
        main(Path(made))
