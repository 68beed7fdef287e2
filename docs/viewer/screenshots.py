"""Make the screenshots of docs/viewer.md: runs over a generated world are played, viewed and photographed.

    python docs/viewer/screenshots.py [--out docs/viewer] [--work FOLDER] [--recipe WORK] [--all] [TRAINING...]

Trainings are folders of `sft train` or `rl train`, such as those that the recipe `tiny` makes; without one there is no
picture of curves, and without the folder of a recipe there is none of it. `--all` makes every page in two widths and
both themes, to be looked at.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

if not __package__:
    # Run as a script: its neighbours are found beside it.
    sys.path.insert(0, str(Path(__file__).parents[2]))

from playwright.sync_api import Browser, Page, ViewportSize, sync_playwright

from harness1.runs.journal import read_episodes

WORLD, TASKS, SHOWN = "world:600", "60", 2
"""The corpus, the number of tasks, and the place of the episode that is shown."""
POLICIES = ("scripted", "single-shot", "random")
Theme = Literal["light", "dark"]
THEMES: tuple[Theme, ...] = ("light", "dark")
WIDE, NARROW = ViewportSize(width=1400, height=1000), ViewportSize(width=420, height=900)
TALL = ViewportSize(width=1400, height=1460)


def play(work: Path, trainings: list[Path]) -> None:
    """Play the runs that are not there yet, and write `view.html` beside them."""
    runs = [work / policy for policy in POLICIES]
    for run in runs:
        command = ["eval", WORLD, "--policy", run.name, "--limit", TASKS, "--out", str(run)]
        subprocess.run([sys.executable, "-m", "harness1", *command], check=True, stdout=subprocess.DEVNULL)
    folders = [str(folder) for folder in (*runs, *trainings)]
    view(folders, work / "view.html")


def view(folders: list[str], page: Path) -> None:
    """Write a page of some folders."""
    subprocess.run([sys.executable, "-m", "harness1", "view", *folders, "--out", str(page)], check=True)


def addresses(work: Path, trainings: list[Path]) -> dict[str, str]:
    """Return the page of each picture."""
    first, second = (list(read_episodes(work / policy))[SHOWN].episode_id for policy in POLICIES[:2])
    view = (work / "view.html").as_uri()
    pages = {
        "list": view,
        "episode": f"{view}#0/{first}/8",
        "pairs": f"{view}#pairs",
        "beside": f"{view}#0/{first},1/{second}/2",
        "report": (work / POLICIES[0] / "report.html").as_uri(),
    }
    return pages | ({"training": f"{view}#training"} if trainings else {})


def opened(
    browser: Browser, address: str, size: ViewportSize, theme: Literal["light", "dark"] = "light"
) -> Iterator[Page]:
    """Open a page, and close it again."""
    page = browser.new_page(viewport=size, color_scheme=theme, reduced_motion="reduce")
    page.goto(address)
    page.wait_for_selector("main > :not(.waiting)")
    page.wait_for_timeout(400)
    yield page
    page.close()


def chosen(browser: Browser, pages: dict[str, str], out: Path) -> None:
    """Make the pictures of the documentation."""
    for name in pages.keys() - {"report"}:
        for page in opened(browser, pages[name], TALL if name == "episode" else WIDE):
            page.screenshot(path=out / f"{name}.png")
    for page in opened(browser, pages["episode"], TALL):
        page.add_style_tag(content=".top { position: static }")
        page.locator("section.chain").screenshot(path=out / "chain.png")
    for page in opened(browser, pages["episode"], WIDE):
        page.keyboard.press("c")
        page.locator("section.context").scroll_into_view_if_needed()
        page.evaluate("scrollTo(0, document.querySelector('section.context').offsetTop - 60)")
        page.screenshot(path=out / "context.png", clip={"x": 0, "y": 0, "width": 800, "height": 800})
    for page in opened(browser, pages["episode"], WIDE, "dark"):
        page.screenshot(path=out / "dark.png")
    for page in opened(browser, pages["episode"], NARROW):
        page.screenshot(path=out / "phone.png")


def every(browser: Browser, pages: dict[str, str], out: Path) -> None:
    """Make every page in two widths and both themes, in full height."""
    for name, address in pages.items():
        for size in (WIDE, NARROW):
            for theme in THEMES:
                for page in opened(browser, address, size, theme):
                    path = out / f"{name}-{size['width']}-{theme}.png"
                    page.screenshot(
                        path=path, clip={"x": 0, "y": 0, **size, "height": 3 * size["height"]}, full_page=True
                    )


def main() -> None:
    """Play, view and photograph."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("trainings", nargs="*", type=Path)
    parser.add_argument("--out", type=Path, default=Path("docs/viewer"))
    parser.add_argument("--work", type=Path, help="keeps the runs")
    parser.add_argument("--recipe", type=Path, help="the folder of a recipe")
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--chromium", default=shutil.which("chromium") or "chromium")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary, sync_playwright() as playwright:
        work = given.work or Path(temporary)
        play(work, given.trainings)
        pages = addresses(work.resolve(), given.trainings)
        if given.recipe:
            view([str(given.recipe)], work / "recipe.html")
            pages["recipe"] = (work.resolve() / "recipe.html").as_uri()
        browser = playwright.chromium.launch(executable_path=given.chromium, args=["--no-sandbox"])
        (every if given.all else chosen)(browser, pages, given.out)
        browser.close()


if __name__ == "__main__":
    main()
