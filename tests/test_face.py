"""The library's face: public names by one import, each documented, and nothing loaded before it is used."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import harness1

ROOT = Path(__file__).parent.parent
VALUES = ("TOOLS", "__version__", "reward")
"""What has no docstring of its own: values and a package."""
NAMES = [name for name in harness1.__all__ if name not in VALUES]
UNITS: dict[str, tuple[str, ...]] = dict.fromkeys(NAMES, ()) | {
    "Case": ("shares",),
    "Context": ("tokens",),
    "Episode": ("natural logarithms",),
    "EpisodeStore": ("bytes", "int32", "float32"),
    "Gold": ("TREC grades",),
    "ScriptedPolicy": ("documents",),
    "SearchEnv": ("tokens", "seconds", "arXiv 2606.02373"),
    "build_index": ("sizes in tokens",),
    "evaluate": ("95 %", "episodes for each task"),
    "load_config": ("arXiv 2606.02373",),
    "load_run": ("units",),
    "open_retriever": ("seconds",),
    "read_episodes": ("bytes",),
    "rollout": ("seconds",),
    "score": ("no unit", "arXiv 2606.02373"),
}
"""For each name the units of its numbers and the source of its formulas, as its docstring writes them."""
SAFE = ("Case", "Context", "Episode", "Gold", "ScriptedPolicy", "Task", "ToolCall", "ToolError")
"""Values: making one raises nothing of ours."""


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    return done.stdout.strip()


def test_importing_the_package_loads_nothing_else() -> None:
    loaded = run("import sys; before = {*sys.modules}; import harness1; print(*sorted({*sys.modules} - before))")
    assert {name for name in loaded.split() if name.partition(".")[0] not in sys.stdlib_module_names} == {"harness1"}


def test_a_name_is_the_same_whichever_module_was_imported_first() -> None:
    """A package of that name would take its place."""
    homes: dict[str, list[str]] = {}
    for name in NAMES:
        homes.setdefault(getattr(harness1, name).__module__, []).append(name)
        assert not (ROOT / "harness1" / name).is_dir()
        assert not (ROOT / "harness1" / f"{name}.py").exists()
    for home, names in homes.items():
        told = " ".join(f"print({name}.__module__, {name}.__name__);" for name in names)
        code = f"import {home}, harness1; from harness1 import {', '.join(names)}; {told}"
        assert run(code).splitlines() == [f"{home} {name}" for name in names]


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'harness1' has no attribute 'Searchenv'"):
        _ = harness1.Searchenv
    assert set(harness1.__all__) <= set(dir(harness1))


def test_type_checkers_see_the_names_that_are_imported() -> None:
    tree = (ROOT / "harness1" / "__init__.py").read_text()
    block = tree[tree.index("if TYPE_CHECKING:") : tree.index("__version__")]
    scope: dict[str, Any] = {}
    exec(inspect.cleandoc(block.partition("\n")[2]), scope)
    names = [*NAMES, "TOOLS", "reward"]
    assert {name: scope[name] for name in names} == {name: getattr(harness1, name) for name in names}
    assert (ROOT / "harness1" / "py.typed").exists()


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_says_what_it_is_what_it_raises_its_units_and_its_source(name: str) -> None:
    value = getattr(harness1, name)
    said = inspect.cleandoc(value.__doc__ or "")
    assert ("Raises:" in said) is (name not in SAFE)
    flat = " ".join(said.split())
    assert [words for words in UNITS[name] if words not in flat] == []
    described = re.findall(r"^    (\w+): ", said.partition("Args:\n")[2].partition("\n\n")[0], re.MULTILINE)
    assert set(described) <= set(inspect.signature(value).parameters)
    assert described or not inspect.isfunction(value) or len(inspect.signature(value).parameters) < 4
