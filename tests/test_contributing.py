"""The examples of CONTRIBUTING.md are code that works."""

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from harness1.config import Config, Env, load_config
from harness1.env.environment import advance
from harness1.eval.evaluate import Evaluation, evaluate
from harness1.records import DocId, Gold, Observation, ToolCall
from harness1.retrieval.build import build_index
from harness1.reward import Case
from harness1.reward.measures import measure_outcome
from harness1.tools.tool import build_tool
from tests.support import ended_episode, make_env, play, search
from tests.vocabularies import tokenizer

TEXT = (Path(__file__).parent.parent / "CONTRIBUTING.md").read_text()


def example(heading: str) -> dict[str, Any]:
    block = re.search(rf"## {heading}\n.*?```python\n(.*?)```", TEXT, re.DOTALL)
    names: dict[str, Any] = {}
    exec(block.group(1), names)
    return names


def test_the_example_tool_runs_and_has_a_schema() -> None:
    tool = build_tool(example("Add a tool")["drop_docs"], Env())
    assert tool.spec.parameters["required"] == ["doc_ids"]
    assert tool.spec.description == "Take documents out of the curated set."
    env = make_env()
    play(env, search("Ada Lovelace"))
    before = list(env.state.memory.curated.tags)
    steps = tool.run(env.state.memory, env.config, ToolCall("drop_docs", {"doc_ids": ["D1", "D99"]}))
    observation = advance(steps)
    assert isinstance(observation, Observation)
    assert observation.notes[0].code == "unknown_handles"
    assert list(env.state.memory.curated.tags) == before[1:]


def test_the_example_reward_component_is_weighed_and_capped() -> None:
    brevity = example("Add a reward component")["brevity"]
    episode = ended_episode()
    case = Case(measure_outcome(episode, Gold({DocId("a"): 1})), episode, Config())
    assert brevity.term(case).value == 1.0


def test_the_example_benchmark_is_evaluated(tmp_path: Path) -> None:
    source = example("Add a benchmark")["capitals_source"]()
    config = load_config(None, ["machine.workers=1"])
    build_index(source.documents(), tmp_path / "index", config.index)
    tasks = source.tasks("test")
    evaluation = Evaluation("capitals", "test", tasks, str(tmp_path / "index"), "single-shot", config)
    metrics = evaluate(evaluation, tmp_path / "run", lambda *_: None, lambda _: None)
    assert metrics["curated_recall"]["mean"] == 1.0


def test_the_example_format_speaks_and_understands() -> None:
    chat = example("Add a chat format")["Bare"](tokenizer("chatml"))
    specs = make_env().toolbox.specs
    said = chat.format_action("Because.", search("Ada Lovelace"))
    assert chat.parse(said, specs).actions == (search("Ada Lovelace"),)
    assert chat.parse(said[2:], specs).error == "there is no call"
    assert "args_search_corpus" in chat.grammar(specs).ebnf
    assert chat.tools(specs) > 10


def test_the_example_of_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    readme = (Path(__file__).parent.parent / "README.md").read_text()
    block = re.search(r"```python\n(.*?)```", readme, re.DOTALL)
    (tmp_path / "example.py").write_text(block.group(1))
    run = runpy.run_path(str(tmp_path / "example.py"), run_name="__main__")["run"]
    assert {each.status for each in run.episodes} == {"completed"}


def test_links_between_the_documents_lead_somewhere() -> None:
    root = Path(__file__).parent.parent
    for document in [*root.glob("*.md"), *root.glob("docs/*.md"), *root.glob("harness1/**/*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"


def test_the_architecture_names_files_that_exist() -> None:
    root = Path(__file__).parent.parent
    places = re.findall(r"`((?:harness1|tests)/[a-z_0-9/]+(?:\.py|/))`", (root / "ARCHITECTURE.md").read_text())
    assert len(places) > 10
    assert [place for place in places if not (root / place).exists()] == []


@pytest.mark.parametrize(
    ("page", "most"), [("README.md", 5), ("ARCHITECTURE.md", 14), ("docs/concepts.md", 8), ("docs/results.md", 16)]
)
def test_pages_for_newcomers_stay_short(page: str, most: int) -> None:
    """In thousands of bytes; what does not fit belongs into the notebook or into a guide."""
    assert (Path(__file__).parent.parent / page).stat().st_size <= most * 1024
