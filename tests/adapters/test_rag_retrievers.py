"""The retrievers that docs/integrations.md shows, in the real LangChain and LlamaIndex. Run by `make test-adapters`."""

from __future__ import annotations

import asyncio
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from harness1 import load_config
from harness1.config import Config
from harness1.errors import InfrastructureFault, UsageError
from tests.adapters.peers import harness1, scratch_index
from tests.docs.blocks import ROOT, blocks

QUESTIONS = ("Which river flows past a town?", "Who wrote about a bridge?", "Which river flows past a town?")


class Framework(NamedTuple):
    """The names by which a framework is asked."""

    package: str
    example: str
    ask: str
    ask_at_once: str
    id: str
    text: str


LANGCHAIN = Framework("langchain_core", "langchain_retriever.py", "invoke", "ainvoke", "id", "page_content")
LLAMAINDEX = Framework("llama_index", "llamaindex_retriever.py", "retrieve", "aretrieve", "node_id", "text")


def block_of(framework: Framework) -> str:
    page = blocks(ROOT / "docs" / "integrations.md")
    code = ["\n".join(block.lines) for block in page if block.language == "python"]
    (found,) = [each for each in code if f"from {framework.package}" in each]
    return found


@pytest.fixture(params=[LANGCHAIN, LLAMAINDEX], ids=lambda each: each.package)
def framework(request: pytest.FixtureRequest) -> Framework:
    found: Framework = request.param
    if find_spec(found.package) is None:
        pytest.skip(f"{found.package} is not installed")
    return found


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rag")
    scratch_index(folder).rename(folder / "DIR")
    return folder


@pytest.fixture
def made(framework: Framework, home: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the block defines, once it has run."""
    monkeypatch.chdir(home)
    names: dict[str, Any] = {}
    # Not with this file's annotations, which are texts.
    exec(compile(block_of(framework), "integrations.md", "exec", dont_inherit=True), names)
    return names


def delivered(question: str, *more: str) -> list[tuple[str, str]]:
    """The ids and titles of an episode that the command plays."""
    found = json.loads(harness1("search", question, "--index", "DIR", "--json", *more))
    return [(each["id"], each["title"]) for each in found["curated"]]


def told(framework: Framework, documents: list[Any]) -> list[tuple[str, str]]:
    return [(getattr(each, framework.id), each.metadata["title"]) for each in documents]


def test_a_query_is_an_episode_whose_documents_come_in_its_order(framework: Framework, made: dict[str, Any]) -> None:
    found = getattr(made["retriever"], framework.ask)(QUESTIONS[0])
    assert len(found) > 3
    assert told(framework, found) == delivered(QUESTIONS[0])
    assert all(getattr(each, framework.text).strip() for each in found)
    scores = [each.score for each in found if hasattr(each, "score")]
    assert scores == sorted(set(scores), reverse=True)


def test_episodes_are_played_at_once_and_on_a_running_loop(framework: Framework, made: dict[str, Any]) -> None:
    ask, retriever = getattr(made["retriever"], framework.ask), made["retriever"]

    async def at_once() -> list[Any]:
        asked = (getattr(retriever, framework.ask_at_once)(question) for question in QUESTIONS)
        return [*await asyncio.gather(*asked), ask(QUESTIONS[1])]

    found = [told(framework, each) for each in asyncio.run(at_once())]
    alone = [told(framework, ask(question)) for question in QUESTIONS]
    assert found == [*alone, alone[1]]
    assert alone[0] != alone[1]


def test_an_invalid_episode_and_an_oracle_are_errors(framework: Framework, made: dict[str, Any]) -> None:
    def asked(policy: str, config: Config) -> None:
        getattr(made["SearchRetriever"](index="DIR", policy=policy, config=config), framework.ask)("a river")

    with pytest.raises(InfrastructureFault, match="episode"):
        asked("scripted", load_config(None, ["machine.episode_deadline_s=0.0001"]))
    with pytest.raises(UsageError):
        asked("oracle", Config())


@pytest.mark.parametrize("framework", [LANGCHAIN, LLAMAINDEX], ids=lambda each: each.package)
def test_the_example_has_the_class_of_the_page(framework: Framework) -> None:
    code, example = block_of(framework), (ROOT / "examples" / framework.example).read_text()
    (class_,) = (each for each in code.split("\n\n\n") if each.startswith("class "))
    assert class_ in example
