"""HTML put together so that nothing from outside can be markup, and small charts as inline SVG."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

import numpy as np

VOID = frozenset({"meta", "circle", "line", "rect", "path"})
"""Elements that have no content."""


class Markup(str):
    """Text that is HTML already. Only this module and constants make it."""

    __slots__ = ()


def element(tag: str, /, *children: str, **attributes: object) -> Markup:
    """One element. Children that are no `Markup` are escaped, attributes always; `class_` stands for `class`, and
    underscores within a name for hyphens. An attribute that is None is left out."""
    given = {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items() if value is not None}
    head = "".join(f' {key}="{escape(plain(str(value)))}"' for key, value in given.items())
    if tag in VOID:
        return Markup(f"<{tag}{head}>" if tag == "meta" else f"<{tag}{head}/>")
    return Markup(f"<{tag}{head}>{joined(children)}</{tag}>")


def joined(children: Iterable[str]) -> Markup:
    """Children one after the other, escaped where they are plain text."""
    return Markup("".join(child if isinstance(child, Markup) else escape(plain(child)) for child in children))


def table(
    heads: Sequence[str], rows: Iterable[Sequence[str]], numbers: Iterable[int] = (), class_: str | None = None
) -> Markup:
    """A table that scrolls where it is wider than the page; `numbers` are the columns set to the right."""
    right = set(numbers)

    def cells(name: str, row: Sequence[str]) -> Markup:
        made = (
            element(name, cell, class_="number" if at in right else None, scope="col" if name == "th" else None)
            for at, cell in enumerate(row)
        )
        return element("tr", *made)

    head, body = element("thead", cells("th", heads)), element("tbody", *(cells("td", row) for row in rows))
    return element("div", element("table", head, body, class_=class_), class_="scroll")


def plain(text: str) -> str:
    """Text from outside as printable characters: control characters, those that turn the direction of writing among
    them, become spaces."""
    return "".join(sign if sign.isprintable() else " " for sign in text)


BINS = 10
HEIGHT = 84
"""Of a histogram, in pixels."""


def interval_plot(mean: float, low: float, high: float) -> Markup:
    """A mean and its interval on the axis from 0 to 1, with ticks at the quarters."""
    places = [_at(share) for share in (0.0, 0.25, 0.5, 0.75, 1.0)]
    ticks = [element("line", x1=place, x2=place, y1=0, y2=18, class_="tick") for place in places]
    marks = [
        element("line", x1=_at(low), x2=_at(high), y1=9, y2=9, class_="whisker"),
        element("circle", cx=_at(mean), cy=9, r=4, class_="dot"),
    ]
    said = f"{mean:.3f}, from {low:.3f} to {high:.3f}"
    return element("svg", *ticks, *marks, class_="interval", role="img", aria_label=said, height=18)


def share_bar(share: float) -> Markup:
    """A share as a filled bar on a full track."""
    track = element("rect", x=0, y=3, width="100%", height=10, class_="track")
    fill = element("rect", x=0, y=3, width=_percent(share), height=10, class_="bar")
    return element("svg", track, fill, class_="share", role="img", aria_label=f"{share:.1%}", height=16)


def histogram(title: str, values: Sequence[float], limits: tuple[float, float], places: int = 0) -> Markup:
    """How many tasks lie where, in ten bins of equal width; the last one holds its upper border.

    Args:
        limits: the lowest and the highest value of the axis.
        places: decimals of the labels.
    """
    low, high = limits if limits[1] > limits[0] else (limits[0], limits[0] + 1.0)
    counts = np.histogram(np.clip(values, low, high), bins=BINS, range=(low, high))[0].tolist()
    peak = max(counts, default=0) or 1
    bars = [_column(at, count, peak, _bin_name(at, low, high)) for at, count in enumerate(counts)]
    base = element("line", x1="0", x2="100%", y1=HEIGHT, y2=HEIGHT, class_="axis")
    said = f"{title}: {len(values)} tasks, most in one bin {peak}"
    drawn = element("svg", *bars, base, role="img", aria_label=said, height=HEIGHT + 1)
    labels = element(
        "div",
        element("span", f"{low:.{places}f}"),
        element("span", f"median {float(np.median(values)):.{places + 1}f}"),
        element("span", f"{high:.{places}f}"),
        class_="labels",
    )
    return element("figure", element("figcaption", title), drawn, labels)


def _column(at: int, count: int, peak: int, name: str) -> Markup:
    """One bin, with its number above it; nothing where it is empty."""
    if not count:
        return Markup("")
    height = (HEIGHT - 18) * count / peak
    width = 100 / BINS
    body = element(
        "rect",
        x=f"{at * width + 0.6:.2f}%",
        y=f"{HEIGHT - height:.1f}",
        width=f"{width - 1.2:.2f}%",
        height=f"{height:.1f}",
        class_="bar",
    )
    label = element("text", str(count), x=f"{(at + 0.5) * width:.2f}%", y=f"{HEIGHT - height - 4:.1f}")
    return element("g", element("title", f"{name}: {count}"), body, label)


def _bin_name(at: int, low: float, high: float) -> str:
    step = (high - low) / BINS
    return f"{low + at * step:g} to {low + (at + 1) * step:g}"


def _at(share: float) -> str:
    """A place on the axis, which leaves room for the dot at both ends."""
    return f"{2 + 96 * min(max(share, 0.0), 1.0):.2f}%"


def _percent(share: float) -> str:
    return f"{100 * min(max(share, 0.0), 1.0):.2f}%"
