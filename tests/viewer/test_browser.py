"""The page in a browser: from a file, without a network, by keyboard; an error on its console fails every test."""

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from playwright.sync_api import Browser, Page

from harness1.config import Config, Env
from harness1.episodes.rollout import replay_env
from harness1.runs.files import Stage, read_stage
from harness1.runs.journal import read_episodes
from harness1.viewer.pages import write_view
from harness1.viewer.report import ensure_report
from tests.axe import barriers, open_browser
from tests.eval.run_folders import dataset, episode, run_folder
from tests.support import END, Script, curate, search
from tests.viewer import making
from tests.viewer.overlaps import overlaps
from tests.viewer.recordings import save_student, write_recording

pytestmark = pytest.mark.browser

Open = Callable[..., Page]
DESK = {"width": 1280, "height": 900}
PHONE = 390
PARTS = {"": ".list", "#pairs": ".pair-list", "#training": ".chart", "one": ".strip", "both": ".pair"}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`view.html`: two runs of the same tasks and two trainings; `small.html`: two of its tasks are left out."""
    folder = tmp_path_factory.mktemp("viewer")
    tasks = making.some_tasks(4)
    data = making.write_dataset(folder / "data", tasks)
    other = Script(search("Missolonghi town"), curate(add_ids=["D1"], importance={"D1": "high"}), END)
    making.write_run(folder / "first", [making.script(), Script(search("Ada"), "no call"), Script(END)], tasks, data)
    making.write_run(folder / "second", [other], tasks, data)
    trainings = [making.write_training(folder / "slow"), making.write_training(folder / "fast", better=1.0)]
    runs = [folder / "first", folder / "second"]
    write_view([*runs, *trainings], folder / "view.html", workers=1)
    write_view(runs, folder / "small.html", tasks=["task-0", "task-2"], workers=1)
    write_beside(making.write_training(folder / "learning"), folder / "first", folder / "rule")
    write_view([folder / "rule", folder / "second", folder / "learning"], folder / "learning.html", workers=1)
    bare = Script(search("Ada Lovelace"), search("Rain days"), END)
    alone = Config(Env().switch(auto_populate=False))
    making.write_run(folder / "bare", [bare], tasks[:1], data, alone)
    write_view([folder / "bare"], folder / "bare.html", workers=1)
    making.write_spoken_run(folder / "spoken", folder / "student")
    write_view([folder / "spoken"], folder / "spoken.html", workers=1)
    recording = write_recording(folder / "agent", folder / "qwen", save_student(folder / "qwen"))
    write_view([recording], folder / "agent.html", workers=1)
    searched, _ = making.write_searches(folder / "asked", "Who was the poet?", making.QUESTION)
    making.write_answer(folder / "asked", searched)
    write_view([folder / "asked"], folder / "asked.html", workers=1)
    return folder


def write_beside(training: Path, run: Path, copy: Path) -> None:
    """A copy of a run, with the index and the reward of a training, and a metric that the training has, too."""
    shutil.copytree(run, copy)
    stage = read_stage(copy)
    (copy / "metrics.json").write_text('{"reward": {"mean": 1.7, "low": 1.6, "high": 1.8}}')
    msgspec.structs.replace(stage, inputs=stage.inputs | {"reward": "sum"}).write(copy)
    Stage("rl train", {"reward": "sum", "indexes": [stage.inputs["index"]]}, "finished").write(training)


@pytest.fixture(scope="module")
def browser(files: Path) -> Iterator[Browser]:
    """After the files, whose episodes cannot be played while it is open."""
    with open_browser() as found:
        yield found


@pytest.fixture
def opened(browser: Browser, files: Path) -> Iterator[Open]:
    """Opens a file at an address; whatever is logged as an error, thrown or requested fails the test at its end."""
    wrong: list[str] = []
    contexts = []

    def begin(address: str = "", name: str = "view.html", size: dict[str, int] | None = None, **options: str) -> Page:
        context = browser.new_context(viewport=size or DESK, **options)
        context.set_offline(True)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda said: wrong.append(said.text) if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda asked: None if asked.url.startswith("file:") else wrong.append(asked.url))
        page.on("dialog", lambda shown: wrong.append(shown.message))
        page.goto(f"file://{files / name}{address}")
        page.wait_for_selector("#main > :not(.waiting)")
        return page

    yield begin
    for context in contexts:
        context.close()
    assert wrong == []


def test_the_sessions_of_a_proxy_are_read_call_by_call(opened: Open) -> None:
    page = opened(name="agent.html")
    assert page.locator("h1").inner_text() == "2 sessions"
    page.click("text=talk")
    page.wait_for_selector(".session")
    calls = page.locator(".call")
    assert calls.count() == 3
    assert "A poet's daughter." in calls.nth(0).inner_text()
    assert "of the call before" in calls.nth(1).inner_text()
    assert "502: gone" in calls.nth(2).inner_text()
    assert no_sideways(page)
    assert barriers(page) == []


SCORES = re.compile(r"gold|recall|reward|precision|scored", re.IGNORECASE)


def test_a_search_opens_at_its_latest_question_with_what_was_delivered_first(opened: Open, files: Path) -> None:
    latest = list(read_episodes(files / "asked"))[-1]
    page = opened(name="asked.html")
    assert page.locator("h1").inner_text() == making.QUESTION
    first = page.locator(".episode > :nth-child(2)")
    assert first.locator("h3").inner_text() == f"{len(latest.curated)} documents delivered, the best first"
    assert first.locator("code").all_inner_texts() == [place.unit_id for place in latest.curated]
    ada = first.locator('li:has(code:text-is("ada"))')
    assert "She was the daughter of Lord Byron" in ada.inner_text()
    ada.locator("summary").click()
    assert "She was the daughter of Lord Byron" in ada.locator("pre").first.inner_text()
    assert no_sideways(page)
    assert barriers(page) == []
    page.keyboard.press("g")
    page.wait_for_selector(".list")
    assert [row.split("\t")[1] for row in rows(page)] == ["Who was the poet?", making.QUESTION]
    page.keyboard.press("k")
    page.keyboard.press("Enter")
    page.wait_for_selector("h1:has-text('poet')")
    page.click("#nav a")
    page.wait_for_selector(".list")


def test_an_answer_stands_above_what_was_delivered_and_marks_what_is_not_found(opened: Open) -> None:
    page = opened(name="asked.html")
    page.keyboard.press("g")
    page.wait_for_selector(".list")
    page.keyboard.press("k")
    page.keyboard.press("Enter")
    page.wait_for_selector(".answer")
    answer = page.locator(".episode > :nth-child(2)")
    assert answer.locator("h3").inner_text() == "Answer of m"
    said = answer.inner_text()
    for part in (making.HOSTILE[:40], "not found in the passage", "no passage 9", "No passage bears it out"):
        assert part in said
    assert answer.locator("q").first.inner_text() == "Byron died there."
    answer.locator("summary").first.click()
    assert "Byron died there." in answer.locator("pre").first.inner_text()
    assert no_sideways(page)
    assert barriers(page) == []


def test_where_nothing_is_scored_no_word_is_about_scores(opened: Open) -> None:
    for address in ("", "#list"):
        page = opened(address, name="asked.html")
        page.evaluate("for (const each of document.querySelectorAll('details')) each.open = true")
        told = page.locator("[title]").evaluate_all("all => all.map(each => each.title)")
        said = " ".join([page.locator("body").inner_text(), *told])
        assert ("turns" in said, SCORES.findall(said)) == (True, [])


def ids(files: Path, run: str) -> list[str]:
    return [each.episode_id for each in read_episodes(files / run)]


def address_of(files: Path, part: str) -> str:
    first, second = ids(files, "first")[0], ids(files, "second")[0]
    return {"one": f"#0/{first}/5", "both": f"#0/{first},1/{second}"}.get(part, part)


def rows(page: Page) -> list[str]:
    return page.locator(".list tbody tr").all_inner_texts()


def no_sideways(page: Page) -> bool:
    return page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def open_context(page: Page) -> None:
    page.wait_for_selector("section.context")
    page.keyboard.press("c")
    page.wait_for_selector(".pieces .message")
    page.evaluate("document.activeElement.blur()")


def test_the_list_filters_and_sorts(opened: Open) -> None:
    page = opened()
    assert page.locator(".total").inner_text() == "8 of 8 episodes"
    page.select_option("#filter-failure", "format")
    assert page.locator(".total").inner_text() == "1 of 8 episodes"
    page.click("#clear")
    page.select_option("#filter-tool", "verify")
    assert len(rows(page)) == 1
    page.click("#clear")
    page.fill("#filter-low", "0.3")
    page.fill("#filter-high", "0.4")
    assert 0 < len(rows(page)) < 8
    page.click("#clear")
    page.fill("#filter-least", "7")
    assert len(rows(page)) == 1
    page.click("#clear")
    page.keyboard.press("Escape")
    page.keyboard.press("/")
    page.keyboard.type("TASK-2 ada")
    assert len(rows(page)) == 2
    page.click("#clear")
    page.click("#sort-turns")
    page.click("#sort-turns")
    assert page.locator("th.c-turns").get_attribute("aria-sort") == "descending"
    assert page.locator(".list tbody tr").first.locator(".c-turns").inner_text() == "7"


def test_an_episode_is_walked_through_by_keyboard(opened: Open, files: Path) -> None:
    page = opened()
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.wait_for_selector("#turn-title")
    first = ids(files, "first")
    assert page.url.endswith(f"#0/{first[0]}")
    for key, turn in (("j", 2), ("ArrowRight", 3), ("k", 2), ("ArrowLeft", 1), ("k", 1)):
        page.keyboard.press(key)
        page.wait_for_selector(f"#turn-title:has-text('Turn {turn} of')")
    page.keyboard.press("n")
    page.wait_for_url(f"**#0/{first[1]}")
    page.wait_for_selector("text=Action: search_corpus")
    page.keyboard.press("p")
    page.wait_for_url(f"**#0/{first[0]}")
    page.keyboard.press("?")
    assert page.locator("dialog[open] h2").inner_text() == "Keys"
    page.keyboard.press("Escape")
    page.wait_for_selector("dialog[open]", state="detached")
    page.keyboard.press("Escape")
    page.wait_for_selector(".list")
    assert page.evaluate("document.activeElement.textContent") == "task-0"


def test_the_exact_context_is_shown_piece_by_piece_and_can_be_searched(opened: Open, files: Path) -> None:
    played = next(iter(read_episodes(files / "first")))
    twin = replay_env(played, Config().env)
    for turn in played.turns[:2]:
        twin.replay(turn)
    page = opened(f"#0/{played.episode_id}/3")
    open_context(page)
    shown = page.evaluate(
        "[...document.querySelectorAll('.pieces .piece')]"
        ".map(each => (each.querySelector('pre') || each.querySelector('code')).textContent.trim())"
    )
    assert shown == [piece.text.strip() for piece in twin.state.context.pieces]
    assert page.locator(".turn[aria-current=step]").get_attribute("aria-label").startswith("turn 3, curate, ")
    assert page.locator(".role-system").inner_text() == "system"
    assert page.locator(".cache.held").count() > 0
    page.keyboard.press("c")
    page.keyboard.type("missolonghi")
    assert 0 < page.locator(".pieces .piece:visible").count() < len(shown)
    assert page.locator("mark").first.inner_text().lower() == "missolonghi"
    page.locator(".find").fill("")
    page.get_by_role("button", name="Open all").click()
    assert "You are a search agent" in page.locator(".piece-system pre").inner_text()
    hit = opened(f"#0/{played.episode_id}").locator(".hit").first
    assert (hit.locator(".doc-title").inner_text(), "wrote the first program" in hit.text_content()) == (
        "Ada Lovelace",
        True,
    )


def test_a_prompt_is_shown_as_it_was_sent(opened: Open, files: Path) -> None:
    page = opened(f"#0/{ids(files, 'spoken')[0]}/2", name="spoken.html")
    open_context(page)
    assert page.locator(".cache").count() > 0
    page.get_by_label("as sent").check()
    assert page.locator(".role-format").count() > 0
    assert "<|im_start|>user" in "".join(page.locator(".pieces .line").all_inner_texts())
    page.locator(".attempt summary").click()
    assert "<tool_call>" in page.locator(".attempt pre").inner_text()


def test_memory_is_shown_as_a_difference_and_gold_is_marked(opened: Open, files: Path) -> None:
    page = opened(f"#0/{ids(files, 'first')[0]}/4")
    page.locator("section.record summary").click()
    assert "memory hash" in page.locator("section.record dl").inner_text()
    page.keyboard.press("j")
    page.wait_for_selector("#turn-title:has-text('Turn 5 of')")
    assert page.locator("section.record dl:visible").count() == 1  # a section stays open from turn to turn
    change = page.locator("section.change")
    change.wait_for()
    assert "tagged anew (1)" in change.inner_text()
    assert "removed from the curated set (1)" in change.inner_text()
    assert page.locator(".sizes .changed").count() == 1
    assert page.locator(".matrix td.now.tag-0").inner_text().startswith("V")
    assert page.locator(".gold-list li").count() == 3
    assert page.locator(".fate-lost").inner_text().endswith("never seen")
    assert "total" in page.locator(".reward").inner_text()


def test_two_runs_stand_side_by_side(opened: Open, files: Path) -> None:
    first, second = ids(files, "first")[0], ids(files, "second")[0]
    page = opened(f"#0/{first},1/{second}")
    page.wait_for_selector(".pair")
    assert page.locator(".column").count() == 2
    assert page.locator(".column h2").all_inner_texts() == ["Turn 1 of 7", "Turn 1 of 3"]
    for _ in range(4):
        page.keyboard.press("j")
        page.wait_for_timeout(60)
    assert page.locator(".column h2").all_inner_texts() == ["Turn 5 of 7", "Turn 3 of 3"]
    assert "Ended after turn 3" in page.locator(".column").nth(1).inner_text()
    assert no_sideways(page)
    page = opened(f"#0/{first}")
    page.wait_for_selector(".strip")
    page.keyboard.press("o")
    page.wait_for_url(f"**#0/{first},1/{second}")


def test_pairs_show_where_two_runs_differ_and_open_both(opened: Open, files: Path) -> None:
    page = opened("#pairs")
    page.wait_for_selector(".pair-list")
    assert page.locator(".statistics tbody tr").first.inner_text().startswith("curated recall")
    gaps = page.locator(".pair-list td.c-gap").all_inner_texts()
    sizes = [abs(float(gap.replace("−", "-"))) for gap in gaps]
    assert sizes == sorted(sizes, reverse=True)
    assert "of 4 tasks" in page.locator(".total").inner_text()
    page.select_option("#pair-shown", "recall")
    assert page.locator(".pair-list tbody tr").count() == sum(size > 0 for size in sizes)
    page.select_option("#pair-first", "1")
    page.select_option("#pair-second", "0")
    turned = page.locator(".pair-list td.c-gap").all_inner_texts()
    assert turned == [gap.translate(str.maketrans("−+", "+−")) for gap in gaps[: len(turned)]]
    page.locator(".pair-list tbody a").first.click()
    page.wait_for_selector(".column")
    assert page.locator(".only h2").first.inner_text().startswith("Only second delivered")
    page.keyboard.press("Escape")
    page.wait_for_selector(".pair-list")


def test_the_chain_leads_from_the_question_to_documents(opened: Open, files: Path) -> None:
    page = opened(f"#0/{ids(files, 'first')[0]}/2")
    chain = page.locator("section.chain")
    chain.wait_for()
    assert page.locator(".hit:visible").count() == 0  # hits of several queries stand under their query
    page.locator(".by-query > summary").first.focus()
    page.keyboard.press("Enter")
    assert page.locator(".hit:visible").count() > 0
    assert page.locator("img").count() == 0  # texts of documents are never markup
    assert "</script><img src=x" in page.locator(".hits").text_content()
    assert chain.locator(".question").inner_text().endswith("Ada Lovelace")
    assert "named in D1" in chain.locator(".node.now").first.inner_text()
    assert "no search found" in chain.locator(".node.lost").inner_text()
    boxes = chain.locator(".node").evaluate_all(
        "all => all.map(each => { const {left, right, top, bottom} = each.getBoundingClientRect();"
        " return [left, right, top, bottom] })"
    )
    for at, (left, right, top, bottom) in enumerate(boxes):
        for other in boxes[at + 1 :]:
            assert right <= other[0] or other[1] <= left or bottom <= other[2] or other[3] <= top
    chain = opened(f"#0/{ids(files, 'bare')[0]}", name="bare.html").locator("section.chain")
    chain.wait_for()
    assert "1 of 2 searches" in chain.locator(".fold-note").inner_text()
    assert "Weather" not in chain.locator(".found .doc-title").all_inner_texts()
    chain.get_by_label("all searches and documents").check()
    assert {"Ada Lovelace", "Weather"} <= set(chain.locator(".found .doc-title").all_inner_texts())


def test_what_is_left_out_stays_in_the_list_with_its_command(opened: Open, files: Path) -> None:
    page = opened(name="small.html")
    assert "4 are left out" in page.locator(".banner").first.inner_text()
    assert page.locator("tr.left-out").count() == 4
    page.click("#show-left-out")
    assert page.locator(".total").inner_text() == "4 of 8 episodes"
    page.locator("tr.left-out summary").first.click()
    wanted = ids(files, "first")[1]
    assert f"--episodes {wanted}" in page.locator("tr.left-out code").first.inner_text()
    page = opened(f"#0/{wanted}", name="small.html")
    assert "does not hold the episode" in page.locator("main").inner_text()
    page = opened("#9/nothing")
    assert "has the address #9/nothing" in page.locator(".banner").first.inner_text()


def test_trainings_are_curves_that_keys_can_read_with_levels_beside_them(opened: Open) -> None:
    page = opened("#training")
    page.wait_for_selector(".chart svg")
    assert page.locator(".chart").count() == 2
    reward = page.locator(".chart").first
    assert reward.locator(".curve").count() == 2
    assert reward.locator("circle").count() == 6
    reward.locator("svg").focus()
    page.keyboard.press("End")
    assert "step 30: slow" in reward.locator(".reading").inner_text()
    assert "held out 2.1" in reward.locator(".reading").inner_text()
    page.locator(".series-key input").first.uncheck()
    assert page.locator(".chart").first.locator(".curve").count() == 1
    page.locator("#smoothing").fill("0")
    assert page.locator(".raw").count() == 0
    page = opened("#training", name="learning.html")
    page.wait_for_selector(".chart svg")
    reward, loss = (page.locator(".chart").nth(at) for at in range(2))
    assert (reward.locator(".level").count(), loss.locator(".level").count()) == (1, 0), "a run of its index and reward"
    assert "rule 1.7" in reward.locator("svg").text_content()
    assert "rule at 1.7" in reward.locator("svg").get_attribute("aria-label")


def test_dark_and_light_follow_the_system_until_one_is_chosen(opened: Open) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    page = opened(color_scheme="dark")
    dark = page.evaluate(ground)
    assert sum(map(int, dark.removeprefix("rgb(").rstrip(")").split(","))) < 150
    page.keyboard.press("t")
    light = page.evaluate(ground)
    assert light != dark
    page.reload()
    page.wait_for_selector(".list")
    assert page.evaluate(ground) == light


@pytest.mark.parametrize("address", PARTS)
def test_nothing_grave_hinders_people_and_no_text_lies_over_another(opened: Open, files: Path, address: str) -> None:
    page = opened(address_of(files, address))
    page.wait_for_selector(PARTS[address])
    assert barriers(page) == []
    for width in (PHONE, 768, 1024, 1400):
        page.set_viewport_size({"width": width, "height": 900})
        assert overlaps(page) == [], width
        assert no_sideways(page), width


def test_paper_shows_all_turns(opened: Open, files: Path) -> None:
    page = opened(f"#0/{ids(files, 'first')[0]}")
    page.wait_for_selector(".strip")
    page.emulate_media(media="print")
    page.wait_for_selector(".printed")
    assert page.locator(".printed .turn-view").count() == 7
    assert page.locator(".printed .turn-view details:not([open])").count() == 0
    assert page.locator(".page-episode > .episode:not(.printed)").is_hidden()
    assert page.pdf().startswith(b"%PDF")
    page.emulate_media(media="screen")
    page.wait_for_selector(".printed", state="detached")


def test_what_has_the_focus_is_visible(opened: Open, files: Path) -> None:
    page = opened(f"#0/{ids(files, 'first')[0]}/3")
    page.wait_for_selector(".strip")
    page.keyboard.press("Tab")
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"


def test_a_report_needs_no_scrolling_sideways_on_a_phone(browser: Browser, tmp_path: Path) -> None:
    query = {"t1": "Which " + "unbreakably" * 20 + " long name is it?"}
    folder = run_folder(tmp_path / "run", dataset(tmp_path / "data", query), [episode("t1", "ab", turns=2)])
    ensure_report(folder)
    narrow = browser.new_page(viewport={"width": PHONE, "height": 800})
    narrow.goto(f"file://{folder / 'report.html'}")
    assert no_sideways(narrow)
    assert barriers(narrow) == []
