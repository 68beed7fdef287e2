"""The parts of a report that say how a run came out, as a whole and on its worst and best tasks."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from harness1.viewer.report.files import RunFiles
from harness1.viewer.report.markup import Markup, element, histogram, interval_plot, joined, share_bar, table

NOTHING = Markup("")

SHARES = (
    "curated_recall",
    "answer_recall",
    "trajectory_recall",
    "selection_loss",
    "curated_precision",
    "curated_f1",
    "nDCG@10",
    "AP",
    "RR",
)
"""Headline metrics between 0 and 1, which are drawn."""

AMOUNTS = ("set_size", "turns", "prompt_tokens", "prefill_tokens", "output_tokens", "reward")
"""Headline metrics of other sizes."""

_SHARE = re.compile(r"recall|precision|_f[12]|@\d|^AP$|^RR$|selection_loss|reward|merge_ratio")
"""What is written with three decimals."""


def section(heading: str, *children: str, name: str | None = None) -> Markup:
    """A part of the page under its heading."""
    return element("section", element("h2", heading), *children, id=name)


def amount(name: str, value: float) -> str:
    """A value of a metric as it is read best."""
    if _SHARE.search(name):
        return f"{value:.3f}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.1f}"


def headline(files: RunFiles) -> Markup:
    """The metrics that a run is judged by, with their intervals."""
    shares = [(name, found) for name in SHARES if (found := interval(files.metrics, name))]
    amounts = [(name, found) for name in AMOUNTS if (found := interval(files.metrics, name))]
    if not shares and not amounts:
        return section("Results", element("p", "No task was scored."))
    rows = [(element("span", name), *_numbers(name, found), interval_plot(*found)) for name, found in shares]
    drawn = table(("metric", "mean", "95 % interval", _axis()), rows, (1, 2), class_="plots")
    plain = [(name, *_numbers(name, found)) for name, found in amounts]
    others = table(("metric", "mean", "95 % interval"), plain, (1, 2))
    said = f"Means over {files.metrics.get('scored', 0):,} scored tasks; intervals by the bootstrap over tasks."
    return section("Results", element("p", said, class_="note"), drawn, others)


def metrics_in_full(files: RunFiles) -> Markup:
    """Every metric, folded away."""
    found = [(name, value) for name in files.metrics if (value := interval(files.metrics, name))]
    rows = [(name, *_numbers(name, value)) for name, value in found]
    return section(
        "All metrics",
        element(
            "details",
            element("summary", f"{len(rows)} metrics with their intervals"),
            table(("metric", "mean", "95 % interval"), rows, (1, 2)),
        ),
    )


def distributions(files: RunFiles) -> Markup:
    """How tasks are spread over recall, set size and turns."""
    rows = files.per_task.values()
    charts = []
    for name, places in (("curated_recall", 1), ("trajectory_recall", 1), ("set_size", 0), ("turns", 0)):
        values = [row[name] for row in rows if name in row]
        if values:
            top = 1.0 if places else float(max(values))
            charts.append(histogram(name, values, (0.0, top), places))
    return section("Tasks by value", element("div", *charts, class_="charts")) if charts else NOTHING


def tool_mix(files: RunFiles) -> Markup:
    """The share of each tool in the calls that succeeded."""
    mix = files.metrics.get("tool_mix") or {}
    ranked = sorted(mix.items(), key=lambda item: (-item[1], item[0]))
    rows = [(element("code", name), f"{share:.1%}", share_bar(share)) for name, share in ranked]
    return section("Tools", table(("tool", "calls", ""), rows, (1,), class_="plots")) if rows else NOTHING


def failures(files: RunFiles) -> Markup:
    """How episodes ended, and what did not end well."""
    metrics = files.metrics
    total = max(metrics.get("episodes", 0), 1)
    stops = metrics.get("stop_reasons") or {}
    rows = [(element("code", name), f"{count:,}", share_bar(count / total)) for name, count in stops.items() if count]
    ended = {name: count for name, count in (metrics.get("failures") or {}).items() if count}
    if metrics.get("missing"):
        ended["tasks without an episode"] = metrics["missing"]
    said = ", ".join(f"{count:,} {name}" for name, count in ended.items())
    return section(
        "How episodes ended",
        table(("stop reason", "episodes", ""), rows, (1,), class_="plots") if rows else NOTHING,
        element("p", f"Failures: {said}." if said else "No failure.", class_="warning" if said else "note"),
    )


def spread(files: RunFiles) -> Markup:
    """Where a run has repeats: how much of the spread lies between tasks, and how much between repeats of one."""
    found: Mapping[str, Any] = files.metrics.get("spread") or {}
    names = [name for name in (*SHARES, *AMOUNTS) if name in found]
    rows = [
        (name, _deviation(name, each.get("between")), _deviation(name, each.get("within")), str(each["repeats"]))
        for name, each in ((name, found[name]) for name in names)
    ]
    if not rows:
        return NOTHING
    said = "Standard deviations between tasks, and between the repeats of one task."
    heads = ("metric", "tasks", "repeats", "n")
    return section("Spread", element("p", said, class_="note"), table(heads, rows, (1, 2, 3)))


def interval(metrics: Mapping[str, Any], name: str) -> tuple[float, float, float] | None:
    """Mean and interval of a metric; None where it has none, as when no task was scored."""
    found = metrics.get(name)
    if not isinstance(found, dict) or not found.keys() >= {"mean", "low", "high"} or found["mean"] is None:
        return None
    return found["mean"], found["low"], found["high"]


def _numbers(name: str, found: tuple[float, float, float]) -> tuple[str, str]:
    mean, low, high = (amount(name, value) for value in found)
    return mean, f"{low} to {high}"


def _deviation(name: str, value: float | None) -> str:
    return "–" if value is None else amount(name, value)


def _axis() -> Markup:
    return element("span", *(element("span", label) for label in ("0", "0.5", "1")), class_="scale")


def facts(rows: list[tuple[str, str]]) -> Markup:
    """Names and their values."""
    return element("dl", joined(joined((element("dt", name), element("dd", value))) for name, value in rows))


SHOWN = 8
"""Tasks in each of both lists."""
VIEW = "view.html"
COLUMNS = ("curated_recall", "trajectory_recall", "set_size", "turns")
HEADS = ("recall", "seen", "set", "turns")


def tasks(files: RunFiles) -> Markup:
    """The worst by curated recall, then by what was seen; and the best."""
    scored = {task: row for task, row in files.per_task.items() if "curated_recall" in row}
    if not scored:
        return NOTHING

    def key(task: str) -> tuple[float, float]:
        return scored[task]["curated_recall"], scored[task].get("trajectory_recall", 0.0)

    ranked = sorted(sorted(scored), key=key)
    shown = min(SHOWN, (len(ranked) + 1) // 2)
    worst, rest = ranked[:shown], ranked[shown:]
    best = sorted(rest, key=key, reverse=True)[:SHOWN]
    made = ("Links lead into ", element("code", VIEW), ", which ", element("code", f"harness1 view . --out {VIEW}"))
    return section(
        "Tasks",
        element("p", *made, " makes in this folder.", class_="note"),
        element("h3", "Worst"),
        _list(files, worst),
        *((element("h3", "Best"), _list(files, best)) if best else ()),
    )


def _list(files: RunFiles, chosen: Sequence[str]) -> Markup:
    rows = []
    for task in chosen:
        row = files.per_task[task]
        values = [amount(name, row[name]) if name in row else "–" for name in COLUMNS]
        rows.append((_name(files, task), *values))
    return table(("task", *HEADS), rows, range(1, 1 + len(HEADS)), class_="tasks")


def _name(files: RunFiles, task: str) -> Markup:
    """Query, id and the episodes of a task."""
    links = [
        joined((" ", element("a", episode, href=f"{VIEW}#0/{quote(episode, safe='')}")))
        for episode in files.episodes.get(task, ())
    ]
    return joined(
        (
            element("div", files.queries.get(task, ""), class_="query"),
            element("div", element("b", task), *links, class_="ids"),
        )
    )
