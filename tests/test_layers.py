"""Test that packages are layers: every import, a lazy or typing-only one too, leads to an earlier layer or stays."""

import ast
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "harness1"
MODULES = sorted(PACKAGE.rglob("*.py"))
LAYERS = (
    "records errors plain plugins model_folder words | config | runs | http"
    " | memory | retrieval | data | tools | env | reward | rows | models | policy | episodes | eval | tasks | training"
    " | engines | sft | rl | recipe | viewer | serve | agents | adapters | cli | api | __main__"
)
"""Packages and modules at the top, lower layers first; those of one layer may import each other."""
WITHIN = {
    "retrieval": "* | bm25 grep | cross_encoder | dense | generations | index | build retriever | engines | open",
    "data": "source contents world_facts | pages walk | formats | apart | world tables folder | trec | beir | corpora"
    " | benchmarks | open | leaks origins | datasets indexing dataset_cache",
    "env": "view | pieces | memory_pieces | render verifiers | model_verifiers | environment",
    "models": "* | convert fetch | chat_format formats | adapters block_attention causal_model decoding"
    " | weight_gate | token_server vllm_engine transformers_backend | checkpoint | open",
    "policy": "policy | wrappers scripted language_model | oracles | oracle_teacher | registry",
    "eval": "* | evaluate | compare | ablations | answers | answer_run cited",
    "tasks": "graph | drafts | questions | make",
    "engines": "engine | * | open",
    "rl": "rollouts | rows | * | pivots train | open",
    "recipe": "gates | recipe | run | tuning",
    "memory": "parts sentences | entities dedup | question | ranking | working_memory | confidence",
    "viewer": "html | report | *",
    "agents": "evaluation keeper | judge sandbox | process | training",
    "serve": "llama service | server retrieve view | chat"
    " | openai_dialect anthropic_dialect | responses_dialect | upstreams | proxy",
}
"""The same within a package; `*` stands for every name that is not listed."""

Name = tuple[str, ...]


def rank(order: str, name: str) -> int:
    """Return the layer of a name in `order`, that of `*` where it is not listed, or -1."""
    levels = [level.split() for level in order.split("|")]
    listed = [at for at, level in enumerate(levels) if name in level]
    starred = [at for at, level in enumerate(levels) if level == ["*"]]
    return (listed or starred or [-1])[0]


def name_of(path: Path) -> Name:
    """Return the dotted name of a module, below `harness1`; a package is named without its `__init__`."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" else parts


def module_at(name: Name) -> bool:
    path = PACKAGE.joinpath(*name)
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def imports(path: Path) -> Iterator[Name]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (tuple(each.name.split(".")[1:]) for each in node.names if is_ours(each.name))
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative import"
            if is_ours(node.module or ""):
                module = tuple((node.module or "").split(".")[1:])
                yield from ((*module, each.name) if module_at((*module, each.name)) else module for each in node.names)


def is_ours(module: str) -> bool:
    return module.partition(".")[0] == "harness1"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_import_leads_upward(path: Path) -> None:
    here = name_of(path)
    if not here:
        return
    assert rank(LAYERS, here[0]) > -1, "this package has no layer"
    for there in filter(None, imports(path)):
        assert -1 < rank(LAYERS, there[0]) <= rank(LAYERS, here[0]), there
        if here[0] == there[0] in WITHIN and len(here) > 1 < len(there) and here[1] != there[1]:
            assert rank(WITHIN[here[0]], there[1]) <= rank(WITHIN[here[0]], here[1]), there


def test_no_modules_and_no_packages_import_each_other() -> None:
    """Lazy imports count. A package's `__init__` that passes names on counts as a module of its own."""
    edges = [(name_of(path), there) for path in MODULES if name_of(path) for there in imports(path)]
    modules: dict[Name, set[Name]] = {}
    packages: dict[Name, set[Name]] = {}
    for here, there in edges:
        modules.setdefault(here, set()).add(there)
        if here[0] != (there or here)[0]:
            packages.setdefault(here[:1], set()).add(there[:1])
    for graph in (modules, packages):
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as circle:
            pytest.fail(f"these import each other: {circle.args[1]}")


def test_files_of_verbs_do_not_import_each_other() -> None:
    verbs = set(re.findall(r'"(\w+):\w+"', (PACKAGE / "cli" / "verbs.toml").read_text())) - {"main", "options"}
    assert verbs >= {"evaluate", "rl"}
    for verb in verbs:
        assert not {there[1] for there in imports(PACKAGE / "cli" / f"{verb}.py") if there[0] == "cli"} & verbs, verb


def test_the_picture_in_the_architecture_is_the_list() -> None:
    shown = re.search(r"```text\n(records .*?)```", (ROOT / "ARCHITECTURE.md").read_text(), re.DOTALL)
    assert shown, "ARCHITECTURE.md shows no layers"
    layers = [level.split("  ")[0].split() for level in shown[1].splitlines()]
    assert layers == [level.split() for level in LAYERS.split("|")]
