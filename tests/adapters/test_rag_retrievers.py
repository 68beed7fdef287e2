"""The retrievers that docs/integrations.md shows, in the real LangChain and LlamaIndex. Run by `make test-adapters`."""

from __future__ import annotations

import asyncio
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from harness1 import load_config
from harness1.errors import InfrastructureFault
from tests.adapters.peers import harness1, scratch_index
from tests.docs.blocks import ROOT, blocks

QUESTIONS = ("Which river flows past a town?", "Who wrote about a bridge?", "Which river flows past a town?")


class Framework(NamedTuple):
    package: str
    ask: str
    ask_at_once: str
    id: str


LANGCHAIN = Framework("langchain_core", "invoke", "ainvoke", "id")
LLAMAINDEX = Framework("llama_index", "retrieve", "aretrieve", "node_id")


@pytest.fixture(params=[LANGCHAIN, LLAMAINDEX], ids=lambda each: each.package)
def framework(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Framework:
    found: Framework = request.param
    if find_spec(found.package) is None:
        pytest.skip(f"{found.package} is not installed")
    scratch_index(tmp_path).rename(tmp_path / "DIR")
    monkeypatch.chdir(tmp_path)
    return found


def test_queries_are_episodes_also_at_once_and_on_a_running_loop_and_faults_are_raised(framework: Framework) -> None:
    page = blocks(ROOT / "docs" / "integrations.md")
    code = ["\n".join(block.lines) for block in page if block.language == "python"]
    (block,) = [each for each in code if f"from {framework.package}" in each]
    made: dict[str, Any] = {}
    exec(compile(block, "integrations.md", "exec", dont_inherit=True), made)  # without annotations as texts
    retriever = made["retriever"]
    ask, ask_at_once = getattr(retriever, framework.ask), getattr(retriever, framework.ask_at_once)

    async def at_once() -> list[Any]:
        found = await asyncio.gather(*map(ask_at_once, QUESTIONS))
        more = await retriever.abatch(list(QUESTIONS)) if hasattr(retriever, "abatch") else found
        return [*found, *more, ask(QUESTIONS[1])]

    found = [[getattr(each, framework.id) for each in documents] for documents in asyncio.run(at_once())]
    delivered = []
    for question in QUESTIONS:
        said = json.loads(harness1("search", question, "--index", "DIR", "--json"))
        delivered.append([each["id"] for each in said["curated"]])
    assert found == [*delivered, *delivered, delivered[1]]
    assert len(delivered[0]) > 3
    assert delivered[0] != delivered[1]

    late = load_config(None, ["machine.episode_deadline_s=0.0001"])
    with pytest.raises(InfrastructureFault, match="episode"):
        getattr(made["SearchRetriever"](index="DIR", config=late), framework.ask)("a river")
