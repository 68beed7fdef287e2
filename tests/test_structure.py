"""What keeps the code readable: short files and functions, public docstrings, no hidden state, few dependencies."""

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.test_layers import imports
from tests.test_layers import name_of as module_of

ROOT = Path(__file__).parent.parent
PACKAGE = sorted((ROOT / "harness1").rglob("*.py"))
SOURCES = PACKAGE + sorted((ROOT / "benchmarks").rglob("*.py"))
FILE_LINES, FUNCTION_LINES, LEAST_LINES, DEPENDENCIES = 500, 60, 40, 12
SMALL = {
    "harness1/__main__.py": "`python -m harness1`",
    "harness1/recipe/__init__.py": "begins processes of `serve model` and of recipes, before the rest is imported",
}
"""Modules of few lines that one other module imports, or none, and why they stand alone."""
HEAVY = (
    *("torch", "transformers", "vllm", "openai", "httpx", "httpx2", "aiohttp", "requests", "tiktoken"),
    *("tokenizers", "datasketch", "typer"),
)
PROTOCOL_METHODS = {
    *("act", "fork", "open"),
    *("search", "grep", "read", "get", "judge"),
    *("piece", "tools", "overhead", "generate", "load_weights", "load_adapter"),
    *("opening", "closing", "declarations", "generation_prompt", "parse", "format_action", "grammar"),
    *("encode", "decode"),
}
FREE_STATEMENTS = 3
BROAD = {("harness1/agents/judge.py", "reply_to"), ("harness1/models/vllm_engine.py", "_failing")}
"""Where any exception is caught: a judge's process says what it could not send, and vLLM raises `Exception` itself over
what its workers raise."""
BROADEST = {("harness1/plugins.py", name) for name in ("import_added", "_describe", "open_added", "_as_exception")} | {
    ("harness1/env/environment.py", "call_engine"),
    ("harness1/policy/registry.py", "act"),
    ("harness1/reward/__init__.py", "call_own"),
    ("harness1/tools/tool.py", "memory_tool"),
}
"""Where all but an interrupt is caught: code of others may raise what is no `Exception`, when it is imported and when
it is called, and must not end the other episodes."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def undocumented(body: list[ast.stmt], in_class: bool = False) -> Iterator[str]:
    """Public functions and classes without a docstring. Methods of a protocol, which documents them once, and methods
    of three statements at most may go without; so may groups of settings, whose fields say what they are."""
    for node in body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            bases = {ast.unparse(base) for base in node.bases}
            if ast.get_docstring(node) is None and not bases & {"Settings", "Keyed"}:
                yield node.name
            yield from (f"{node.name}.{method}" for method in undocumented(node.body, in_class=True))
        elif isinstance(node, Function) and not node.name.startswith("_") and ast.get_docstring(node) is None:
            free = in_class and (node.name in PROTOCOL_METHODS or len(node.body) <= FREE_STATEMENTS)
            yield from [] if free else [node.name]


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_files_and_functions_are_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= FILE_LINES
    for node in ast.walk(tree_of(path)):
        if isinstance(node, Function):
            assert (node.end_lineno or 0) - node.lineno < FUNCTION_LINES, node.name


def test_no_small_module_has_a_single_importer() -> None:
    """What one other module alone imports is written there; the markers of packages, which are one line, may stay."""
    importers: dict[tuple[str, ...], set[Path]] = {}
    for path in PACKAGE:
        for module in imports(path):
            importers.setdefault(module, set()).add(path)
    small = {
        name_of(path)
        for path in PACKAGE
        if 1 < len(path.read_text().splitlines()) < LEAST_LINES and len(importers.get(module_of(path), ())) < 2
    }
    assert small == SMALL.keys()


@pytest.mark.parametrize("path", PACKAGE, ids=name_of)
def test_what_is_public_is_documented(path: Path) -> None:
    tree = tree_of(path)
    assert ast.get_docstring(tree), "the module"
    assert list(undocumented(tree.body)) == []


@pytest.mark.parametrize("path", PACKAGE, ids=name_of)
def test_no_environment_variable_and_no_broad_except(path: Path) -> None:
    tree = tree_of(path)
    exempt = {
        id(each): {"BaseException"} if (name_of(path), node.name) in BROAD else set[str]()
        for node in ast.walk(tree)
        if isinstance(node, Function) and (name_of(path), node.name) in BROAD | BROADEST
        for each in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler):
            caught = node.type
            assert caught is not None, node.lineno
            names = {each.id for each in ast.walk(caught) if isinstance(each, ast.Name)}
            passed_on = isinstance(node.body[-1], ast.Raise) and node.body[-1].exc is None
            broad = names & exempt.get(id(node), {"Exception", "BaseException"})
            assert passed_on or not broad, node.lineno
        if "cli" not in path.parts:
            assert not (isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "putenv")), node.lineno


@pytest.mark.parametrize("path", PACKAGE, ids=name_of)
def test_no_module_keeps_mutable_state(path: Path) -> None:
    """Module values are constants: no `global`, and no lower-case name bound to a literal list, dict or set."""
    tree = tree_of(path)
    assert not any(isinstance(node, ast.Global | ast.Nonlocal) for node in ast.walk(tree))
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.List | ast.Dict | ast.Set):
            names = [each.id for each in node.targets if isinstance(each, ast.Name)]
            assert all(name.isupper() or name.startswith("__") for name in names), names


def test_the_package_is_one() -> None:
    """No module or package beside it at the top level, and none that shadows a common name. verifiers finds a package
    only by a name without dots."""
    tops = {path.name for path in ROOT.iterdir() if path.is_dir() and list(path.glob("*.py"))}
    assert tops <= {"harness1", "harness1_verifiers", "benchmarks", "examples", "tests"}
    assert not list(ROOT.glob("*.py"))
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert settings["tool"]["setuptools"]["packages"]["find"]["include"] == ["harness1*"]
    assert all((folder / "__init__.py").is_file() for folder in {path.parent for path in PACKAGE})


def test_the_core_needs_few_packages() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert len(project["dependencies"]) <= DEPENDENCIES


@pytest.mark.parametrize("module", ["harness1.env.environment", "harness1.episodes.rollout", "harness1.runs.journal"])
def test_importing_the_core_loads_nothing_heavy(module: str) -> None:
    code = f"import sys, {module}; print(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert not set(HEAVY) & set(done.stdout.split())


def test_test_files_have_names_of_their_own() -> None:
    """pytest imports two files of one name as one module."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))
