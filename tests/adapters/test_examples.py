"""Every example runs as it says, in the environment of the package that it is for."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.adapters.peers import chat_server, scratch_index, serving_openenv
from tests.docs.blocks import ROOT, blocks

EXAMPLES = Path("examples").resolve()
TESTS = tuple(
    Path("tests", name).resolve()
    for name in ("adapters/test_examples.py", "agents/test_search_agent.py", "test_own_code.py")
)
LINES = 40
NEEDED = {
    "gym_loop.py": "gymnasium",
    "inspect_eval.py": "inspect_ai",
    "langchain_retriever.py": "langchain_core",
    "llamaindex_retriever.py": "llama_index",
    "mcp_agent.py": "mcp",
    "openenv_client.py": "openenv",
    "search_agent.py": "openai",
    "verifiers_eval.py": "verifiers",
}
"""The package that each example needs."""

CORE = {"search_reward.py", "own_dataset.py", "own_policy.py", "own_reward.py", "own_tool.py"}
"""Examples that need only the core."""


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(scratch_index(tmp_path_factory.mktemp("examples")))


def ended(name: str, *words: str, at: Path, **env: str) -> subprocess.CompletedProcess[str]:
    words = (sys.executable, str(EXAMPLES / name), *words)
    return subprocess.run(words, capture_output=True, text=True, check=False, cwd=at, env=os.environ | env)


def run(name: str, *words: str, at: Path, **env: str) -> str:
    found = ended(name, *words, at=at, **env)
    assert found.returncode == 0, found.stderr
    return found.stdout


def needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(find_spec(package) is None, reason=f"{package} is not installed")


def skip_with_another_mcp() -> None:
    if find_spec("openenv") or find_spec("verifiers"):
        pytest.skip("another version of mcp")


def test_examples_are_short_and_each_is_run() -> None:
    found = {path.name: len(path.read_text().splitlines()) for path in EXAMPLES.glob("*.py")}
    assert max(found.values()) <= LINES
    tests = "".join(path.read_text() for path in TESTS)
    assert all(f'"{name}"' in tests or f'"{name.removesuffix(".py")}"' in tests for name in found)
    assert found.keys() == NEEDED.keys() | CORE


@pytest.mark.parametrize("name", [pytest.param(name, marks=needs(NEEDED[name])) for name in NEEDED])
def test_an_example_without_what_it_needs_says_its_usage_in_a_line(name: str, tmp_path: Path) -> None:
    if name == "mcp_agent.py":
        skip_with_another_mcp()
    words = ["world:120"] if name == "gym_loop.py" else []  # which alone may have none
    found = ended(name, *words, at=tmp_path)
    assert (found.returncode, found.stdout) == (2, "")
    (line,) = found.stderr.splitlines()
    assert line.startswith(f"usage: python examples/{name} ")
    assert not list(tmp_path.iterdir())


@needs("gymnasium")
def test_gymnasium(tmp_path: Path) -> None:
    question, curated, reward = run("gym_loop.py", "world:120", "i", at=tmp_path).splitlines()
    assert question.endswith("?")
    assert curated.startswith("['w")
    assert float(reward)


@pytest.mark.service
@needs("mcp")
def test_mcp(tmp_path: Path, index: str) -> None:
    skip_with_another_mcp()
    said = run("mcp_agent.py", index, "Which river flows past a town?", at=tmp_path)
    assert "The search is over" in said


@needs("openenv")
def test_openenv(tmp_path: Path, index: str) -> None:
    with serving_openenv(index) as address:
        assert len(run("openenv_client.py", address, at=tmp_path).splitlines()) == 3


@needs("inspect_ai")
def test_inspect(tmp_path: Path, index: str) -> None:
    with chat_server() as address:
        words = ("openai-api/local/fake", "world:120", index)
        said = run("inspect_eval.py", *words, at=tmp_path, LOCAL_BASE_URL=address, LOCAL_API_KEY="none")
    assert "reward" in said


@needs("inspect_ai")
def test_inspect_without_an_index_says_what_is_missing(tmp_path: Path) -> None:
    found = ended("inspect_eval.py", "mockllm/model", "world:120", "missing-index", at=tmp_path)
    assert (found.returncode, "Traceback" in found.stderr) == (1, False)
    assert "missing-index" in found.stderr.splitlines()[-1]


@needs("verifiers")
def test_verifiers(tmp_path: Path, index: str) -> None:
    with chat_server() as address:
        run("verifiers_eval.py", "fake", address, "world:120", index, "out", at=tmp_path, OPENAI_API_KEY="none")
    assert list((tmp_path / "out").rglob("traces.jsonl"))


@pytest.mark.parametrize(
    ("package", "name"),
    [
        pytest.param(package, name, marks=needs(package))
        for package, name in (("langchain_core", "langchain_retriever.py"), ("llama_index", "llamaindex_retriever.py"))
    ],
)
def test_retrievers(package: str, name: str, tmp_path: Path, index: str) -> None:
    assert run(name, index, "Which river flows past a town?", at=tmp_path).count("River") > 1
    page = [block for block in blocks(ROOT / "docs" / "integrations.md") if block.language == "python"]
    (code,) = [text for block in page if f"from {package}" in (text := "\n".join(block.lines))]
    (class_,) = [each for each in code.split("\n\n\n") if each.startswith("class ")]
    assert class_ in (EXAMPLES / name).read_text()
