"""The page about a run: made of its files, inert, and the same for the same episodes."""

import re
from pathlib import Path

import msgspec
import pytest
from jinja2 import UndefinedError

from harness1.config import load_config
from harness1.data.open import open_source
from harness1.errors import UsageError
from harness1.eval.statistics import Interval
from harness1.records import StopReason
from harness1.runs.folder import METRICS, PROVENANCE, RESOURCES, TASKS
from harness1.runs.journal import EPISODES
from harness1.viewer.html import environment
from harness1.viewer.report import Histogram, write_report
from tests.eval.run_folders import dataset, episode, run_folder

QUERIES = {f"t{number}": f"Question {number}?" for number in range(1, 5)}
EPISODES_BY_HAND = [
    episode("t1", "ab", turns=2, stage_ms={"policy": 5.0}),
    episode("t2", "ax"),
    episode("t3", "xy", pool="xya"),
    episode("t4", "xy", stop=StopReason.TURN_LIMIT),
]


def page(folder: Path) -> str:
    write_report(folder)
    return (folder / "report.html").read_text()


def text(html: str) -> str:
    """What a reader sees, in one line."""
    without = re.sub(r"<style>.*?</style>", "", html, flags=re.DOTALL)
    return " ".join(re.sub(r"<[^>]*>", " ", without).split())


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return run_folder(tmp_path / "run", dataset(tmp_path / "data", QUERIES), EPISODES_BY_HAND)


def test_the_page_tells_results_ends_and_tasks_and_loads_and_runs_nothing(run: Path) -> None:
    html = page(run)
    assert "default-src 'none'; style-src 'unsafe-inline'\"" in html
    assert not re.search(r"<script|<link|<img|<iframe|url\(|https?:|@import|\son\w+=", html)
    said = text(html)
    assert "by-hand on data/test 4 tasks · 4 episodes, 1 for each · seed 0" in said
    assert "curated_recall 0.375" in said  # 1, 1/2, 0 and 0
    assert "turn_limit 1" in said
    assert "search_corpus 100.0%" in said
    # Of two tasks without recall, the one that saw nothing comes first.
    worst, best = said.index("Worst"), said.index("Best")
    assert worst < said.index("Question 4?") < said.index("Question 3?") < best
    assert best < said.index("Question 1?") < said.index("Question 2?")
    assert 'href="view.html#0/t4-0"' in html


def test_a_query_full_of_markup_is_inert(tmp_path: Path) -> None:
    bad = "<script>alert(1)</script><img src=x onerror=alert(2)>\u202eevil\x07 & \"'</td></table>"
    data = dataset(tmp_path / "data", {"<b>t1</b>": bad})
    made = msgspec.structs.replace(episode("<b>t1</b>", "a"), episode_id='"><script>')
    html = page(run_folder(tmp_path / "run", data, [made], policy="<i>p</i>"))
    assert "<b>t1" not in html
    assert "<i>p" not in html
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in html
    assert "\u202e" not in html
    assert 'href="view.html#0/%22%3E%3Cscript%3E"' in html
    assert html.count("</table>") == html.count("<table")
    assert not re.search(r"<script|<link|<img|<iframe", html)


def test_all_but_clock_and_machine_is_the_same_for_the_same_episodes(tmp_path: Path, run: Path) -> None:
    slower = [msgspec.structs.replace(each, stage_ms={"policy": 9.0}) for each in reversed(EPISODES_BY_HAND)]
    config = load_config(overrides=["machine.workers=7"])
    other = run_folder(tmp_path / "other", tmp_path / "data", slower, config=config)
    interval = {"mean": 2.0, "low": 1.5, "high": 2.5}
    took = {
        "wall_seconds": 90.5,
        "episode_seconds": {"policy": 300.0, "total": 400.0},
        "per_episode": {"seconds": interval, "cost": interval | {"mean": None}},
        "tokens": {"prompt": 1200},
    }
    (other / RESOURCES).write_bytes(msgspec.json.encode(took))
    provenance = {"version": "9", "commit": "c", "started": "now", "hashes": {"data": "d"}, "machine": {"cores": 64}}
    (other / PROVENANCE).write_bytes(msgspec.json.encode(provenance))
    (run / PROVENANCE).write_bytes(msgspec.json.encode({**provenance, "started": "then", "machine": {"cores": 1}}))
    first, second = page(run), page(other)
    assert first == page(run)
    machine = re.compile(r'<section id="machine">.*?</section>', re.DOTALL)
    assert machine.findall(first) != machine.findall(second)
    assert machine.sub("", first) == machine.sub("", second)
    assert "machine.cores 64" in text(second)
    assert "machine.workers" in text(machine.findall(second)[0])
    assert "seconds on the clock 90.5" in text(second)
    assert "seconds of all episodes together policy 300, total 400" in text(second)
    assert "seconds for each episode 2 (1.5 to 2.5) tokens.prompt 1200" in text(second)


def test_without_its_dataset_a_run_is_told_without_its_tasks(run: Path) -> None:
    kept = list(open_source(str(run.parent / "data")).tasks("test"))
    before = page(run)
    (run.parent / "data").rename(run.parent / "moved")
    said = text(page(run))
    assert [each in said for each in ("curated_recall 0.375", "No tasks are shown", "Worst")] == [True, True, False]
    write_report(run, kept)  # who has the tasks needs no dataset
    assert (run / "report.html").read_text() == before
    for name in (TASKS, RESOURCES, PROVENANCE, EPISODES):
        (run / name).unlink(missing_ok=True)
    said = text(page(run))
    assert ("curated_recall 0.375" in said, "Worst" in said) == (True, False)


def test_without_metrics_or_a_card_there_is_no_report(tmp_path: Path, run: Path) -> None:
    (run / METRICS).unlink()
    with pytest.raises(UsageError, match=r"no metrics\.json"):
        write_report(run)
    with pytest.raises(UsageError, match="not a run folder"):
        write_report(tmp_path)


def test_settings_beside_the_defaults_are_told(tmp_path: Path, run: Path) -> None:
    config = load_config(overrides=["env.max_turns=7", "env.dedup.on=false"])
    said = text(page(run_folder(tmp_path / "two", tmp_path / "data", EPISODES_BY_HAND, config=config)))
    assert "env.dedup.on false true env.max_turns 7 40" in said


def test_intervals_and_shares_are_drawn_in_their_place() -> None:
    drawn = component("interval", Interval(0.5, 0.25, 2.0))
    assert 'x1="26.00%" x2="98.00%"' in drawn  # 2 + 96 * 0.25, and no further than the axis
    assert 'cx="50.00%"' in drawn
    assert 'width="25.00%"' in component("share_bar", 0.25)


def test_a_histogram_counts_every_task_in_one_bin() -> None:
    drawn = component("histogram", Histogram("recall", [0.0, 0.05, 0.1, 1.0, 1.0, 1.0], 1.0, 1))
    assert re.findall(r"<title>(.*?)</title>", drawn) == ["0 to 0.1: 2", "0.1 to 0.2: 1", "0.9 to 1: 3"]
    assert 'height="66.0"' in drawn  # the fullest bin has all of the height
    empty = component("histogram", Histogram("turns", [0.0, 0.0], 0.0))
    assert "<title>0 to 0.1: 2</title>" in empty
    assert text(empty).endswith("0 median 0.0 1")


def test_only_templates_are_markup() -> None:
    shown = environment().from_string("<p title=\"{{ it }}\">{{ it }}<i>{{ '&' }}</i></p>").render(it='<b>"\u202e')
    assert shown == '<p title="&lt;b&gt;&#34; ">&lt;b&gt;&#34; <i>&amp;</i></p>'
    with pytest.raises(UndefinedError):
        environment().from_string("{{ it }}").render()


def test_what_templates_trust_comes_from_the_package() -> None:
    names = environment().list_templates()
    trusted = [found for name in names for found in re.findall(r"\{\{([^}]*)\|\s*safe", source(name))]
    assert sorted(trusted) == [" asset(name)", " script"]
    assert not any("autoescape" in source(name) or "Markup" in source(name) for name in names)


def component(name: str, *values: object) -> str:
    """What a macro of the components makes."""
    return str(getattr(environment().get_template("components.html").module, name)(*values))


def source(name: str) -> str:
    loader = environment().loader
    return loader.get_source(environment(), name)[0]
