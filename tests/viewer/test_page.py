import re

import pytest

from harness1.viewer.html import SCRIPTS, STYLES, asset, script

SHEETS = ("base.css", "report.css", *STYLES)
SHADES = dict(re.findall(r"--([\w-]+): light-dark\((#\w{6}, #\w{6})\)", "".join(map(asset, SHEETS))))
TEXTS = [
    *((text, ground) for text in ("text", "muted", "accent") for ground in ("bg", "surface", "sunken")),
    *((text, "accent-ground") for text in ("text", "accent")),
    *((text, "surface") for text in ("good", "half", "bad", "gold", "plain", "series-3")),
    *((text, f"{text}-ground") for text in ("good", "half", "bad", "gold", "plain")),
    *(("text", f"{ground}-ground") for ground in ("good", "half", "bad", "gold")),
    *(("half", "bg"), ("bad", "bg"), ("on-accent", "accent"), ("text", "mark")),
    *((f"on-tag-{tag}", f"tag-{tag}") for tag in range(4)),
]
MARKS = [
    *((mark, "sunken") for mark in ("reused", "fresh", "accent")),
    *(
        (mark, "surface")
        for mark in ("plain", "reused", "fresh", "good", "bad", *(f"series-{number}" for number in range(6)))
    ),
]


def luminance(shade: str) -> float:
    """Relative luminance (WCAG 2.2, section 5.2)."""
    parts = [int(shade[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(first: str, second: str) -> float:
    bright, dim = sorted((luminance(first), luminance(second)), reverse=True)
    return (bright + 0.05) / (dim + 0.05)


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
@pytest.mark.parametrize(("pairs", "least"), [(TEXTS, 4.5), (MARKS, 3.0)], ids=["texts", "marks"])
def test_colours_have_the_contrast_of_level_aa(theme: int, pairs: list[tuple[str, str]], least: float) -> None:
    weak = {}
    for upper, lower in pairs:
        found = contrast(SHADES[upper].split(", ")[theme], SHADES[lower].split(", ")[theme])
        if found < least:
            weak[upper, lower] = round(found, 2)
    assert weak == {}


def test_no_colour_stands_outside_the_list_of_pairs() -> None:
    rules = "".join(map(asset, SHEETS))
    loose = re.findall(r"#[0-9a-fA-F]{3,8}\b", re.sub(r"light-dark\([^)]*\)", "", rules))
    assert set(loose) <= {"#ffffff"}


def test_data_never_becomes_markup() -> None:
    for name in SCRIPTS:
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", asset(name)
        ), name


def test_modules_can_be_one_script() -> None:
    """Names are unique, imports come from files that stand before, and nothing ends the tag."""
    names: dict[str, str] = {}
    for place, name in enumerate(SCRIPTS):
        text = asset(name)
        for found in re.findall(r"^(?:export )?(?:async )?(?:function|const|let) ([\w$]+)", text, re.M):
            assert found not in names, f"{found} is in {name} and {names[found]}"
            names[found] = name
        for wanted, source in re.findall(r"^import \{([^}]*)\} from \"\./([\w.]+)\";$", text, re.M):
            assert source in SCRIPTS[:place], f"{name} imports {source}"
            exported = re.findall(r"^export (?:async )?(?:function|const) ([\w$]+)", asset(source), re.M)
            assert {each.strip() for each in wanted.split(",")} <= set(exported), name
        assert len(text.splitlines()) <= 400
    assert "</script" not in script()
    assert not re.search(r"^(import|export)\b", script(), re.M)
