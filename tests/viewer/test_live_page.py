"""A live page in a browser, while a run is written."""

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from playwright.sync_api import Page

from harness1.recipe.gates import GateRuling
from harness1.recipe.run import JOURNAL, RecipeState, StagePlan, StageRecord, hold_folder
from harness1.records import Episode
from harness1.runs.files import write_json
from harness1.runs.journal import read_episodes
from tests.axe import barriers, open_browser
from tests.viewer.making import write_episodes, write_training, write_whole_run
from tests.viewer.test_live import begin, listening

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Episode]]:
    """A finished run of three tasks, made before a browser's event loop is in the way."""
    whole = write_whole_run(tmp_path_factory.mktemp("live"), 3)
    return whole, list(read_episodes(whole))


@pytest.fixture
def page(whole: tuple[Path, list[Episode]]) -> Iterator[Page]:
    """A page of which whatever is logged as an error, thrown or asked of others fails the test at its end."""
    wrong: list[str] = []
    with open_browser() as browser:
        found = browser.new_page(viewport={"width": 1280, "height": 900})
        found.on("console", lambda said: wrong.append(said.text) if said.type in ("error", "warning") else None)
        found.on("pageerror", lambda error: wrong.append(str(error)))
        found.on("request", lambda asked: None if "://127.0.0.1:" in asked.url else wrong.append(asked.url))
        yield found
    assert [each for each in wrong if "favicon" not in each] == []


@contextmanager
def followed(folder: Path, page: Page) -> Iterator[None]:
    """A folder served and open in a page, which leaves before its server does: it asks for news until then."""
    with listening(folder) as server:
        page.goto(server.address)
        yield
        page.goto("about:blank")


def test_an_episode_appears_while_its_run_is_written(
    tmp_path: Path, whole: tuple[Path, list[Episode]], page: Page
) -> None:
    folder, (one, two, three) = tmp_path / "run", whole[1]
    with followed(folder, page):
        page.wait_for_selector("text=Waiting for")
        begin(folder, whole[0])
        write_episodes(folder, [one])
        page.wait_for_selector(".list [data-at='0']")
        page.fill("#search", "task-")
        write_episodes(folder, [two])
        page.wait_for_selector(".list [data-at='1']")
        assert page.input_value("#search") == "task-"
        assert page.evaluate("document.activeElement.id") == "search"
        assert barriers(page) == []
        page.click(".list [data-at='1']")
        page.wait_for_selector(".turn-view")
        page.keyboard.press("j")
        page.wait_for_selector("#turn-title:has-text('Turn 2')")
        write_episodes(folder, [three])
        page.wait_for_selector("#watch:has-text('3 episodes')")
        assert page.title().endswith("turn 2"), "an open episode stays as it is"
        page.keyboard.press("c")
        page.wait_for_selector('.context :text("Ada Lovelace")', state="attached")
        assert barriers(page) == []


def test_curves_grow(tmp_path: Path, page: Page) -> None:
    training = write_training(tmp_path / "train", steps=3)
    with followed(training, page):
        page.wait_for_selector("text=3 steps")
        with (training / "log.jsonl").open("a") as log:
            log.write('{"step": 4, "reward": 9.0}\n')
        page.wait_for_selector("text=4 steps")


def test_a_recipe_is_followed_from_stage_to_stage(
    tmp_path: Path, whole: tuple[Path, list[Episode]], page: Page
) -> None:
    work = tmp_path / "work"
    with hold_folder(work), followed(work, page):
        page.wait_for_selector("text=Waiting for")
        stages = {"before": StageRecord(words=("eval",), needs={}, status="running", began=time.time() - 100)}
        plan = {"before": StagePlan("what to beat", 400.0), "rl": StagePlan("learning", 400.0)}
        journal = RecipeState(title="a chain", recipe="", inputs={}, stages=stages, plan=plan)
        write_json(work / JOURNAL, journal)
        page.wait_for_selector(".stage-running:has-text('for 2 min')")
        page.wait_for_selector(".progress-line:has-text('about 12 min left')")
        page.wait_for_selector(".stage-to-come:has-text('learning')")
        shutil.copytree(whole[0], work / "before")
        page.wait_for_selector(".stage-links :text('3 episodes')")
        page.click(".command summary")
        passed = GateRuling("recall", 0.6, 0.3, True, "mean curated recall", "")
        done = StageRecord(words=("eval",), needs={}, status="passed", seconds=200.0, findings=(passed,))
        write_json(
            work / JOURNAL,
            msgspec.structs.replace(journal, stages={**journal.stages, "before": done, "rl": stages["before"]}),
        )
        page.wait_for_selector(".stage-passed")
        assert page.locator(".stage-passed .command pre").is_visible(), "what was opened stays open"
        page.click(".gates summary")
        assert "mean curated recall: 0.6, bound 0.3" in page.inner_text(".gates")
        assert barriers(page) == []
        page.click(".stage-links a")
        page.wait_for_selector(".list [data-at='2']")
        page.keyboard.press("Escape")
        page.click("text=Recipe")
        page.wait_for_selector(".stages")
