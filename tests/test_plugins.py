"""Plugins: found by the entry points of installed packages, imported when they are named, refused where names clash."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from harness1 import plugins
from harness1.config import Config, load_config
from harness1.config import training as policy_settings
from harness1.engines.open import open_service
from harness1.env.environment import env_hash
from harness1.episodes import jobs
from harness1.errors import ConfigError, InstallationWarning, MissingExtra, UsageError, optional
from harness1.models.formats import FORMATS, open_format
from harness1.plugins import find_plugin, installed_plugins, load_plugin, plugin_names
from harness1.policy.registry import check_policy, open_policy, policy_names
from harness1.records import Note, RewardTerm
from harness1.retrieval.open import is_engine, open_retriever
from harness1.reward import available_tools, composite
from harness1.reward.measures import Outcome
from harness1.runs.folder import run_config, run_stage
from harness1.runs.journal import read_episodes
from harness1.tools.registry import NAMES, Toolbox
from tests.cli.commands import command_in_process
from tests.support import call, ended_episode, make_env, play, search
from tests.vocabularies import tokenizer

Install = Callable[..., None]
EXAMPLE = Path("examples/plugin").resolve()

TOOL = """
from harness1.config import Env
from harness1.memory.working_memory import WorkingMemory
from harness1.records import Note, Observation


def shout(memory: WorkingMemory, env: Env, word: str) -> Observation:
    '''Say a word aloud.'''
    return Observation("shout", notes=(Note("said", {"text": f"{word.upper()} {{0}}!"}),))
"""
TERM = """
from harness1.reward import component


@component("pool")
def pool(case):
    return 0.5


@component("noise", process=True)
def noise(case):
    return 1.0
"""
OTHERS = """
from msgspec.structs import replace

from harness1.models.formats import Compact
from harness1.policy.scripted import RandomPolicy
from tests.support import WordRetriever


class Terse(Compact):
    name = "terse"


def open_dice(argument, config):
    policy = RandomPolicy()
    policy.name = f"dice {argument} {config.env.max_turns}"
    return policy


def open_shelf(rest, config):
    retriever = WordRetriever([])
    retriever.info = replace(retriever.info, index_hash=rest)
    return retriever


def open_abacus(rest, base, config, processes):
    return rest, base, processes
"""
TOOLS = {"tools": {"shout": "loud:shout"}}
TERMS = {"rewards": {"pool": "terms:pool", "noise": "terms:noise"}}
REST = {
    "policies": {"dice": "others:open_dice"},
    "retrievers": {"shelf": "others:open_shelf"},
    "formats": {"terse": "others:Terse"},
    "engines": {"abacus": "others:open_abacus"},
}


def forget() -> None:
    """Have this process look for packages, tools and policies anew."""
    for cached in (plugins._added, Toolbox.of, jobs._policy):
        cached.cache_clear()


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """A function that installs a package by its metadata and the text of one module; forgotten after the test."""
    before = set(sys.modules)

    def installs(package: str, groups: dict[str, dict[str, str]], module: str = "", text: str = "") -> None:
        place = tmp_path / package
        metadata = place / f"{package.replace('-', '_')}-1.0.dist-info"
        metadata.mkdir(parents=True)
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        lines = [
            "\n".join([f"[harness1.{kind}]", *(f"{name} = {value}" for name, value in names.items())])
            for kind, names in groups.items()
        ]
        (metadata / "entry_points.txt").write_text("\n".join(lines))
        if module:
            (place / f"{module}.py").write_text(text)
        monkeypatch.syspath_prepend(str(place))
        forget()

    yield installs
    forget()
    for name in set(sys.modules) - before:
        if name in ("loud", "terms", "others", "broken"):
            del sys.modules[name]


def outcome_with(config: Config) -> dict[str, float]:
    found = composite(Outcome(set_size=3, precision=0.5, recall=0.5), ended_episode(), config)
    return {name: term.weight * term.value for name, term in found.terms.items()}


def test_what_is_installed_is_neither_imported_nor_part_of_anything(install: Install) -> None:
    before = env_hash(Config().env), Config().reward_hash, Config().hash, Toolbox.of(Config().env).specs
    install("loud-pack", TOOLS | TERMS | REST, "loud", "raise RuntimeError('imported')")
    config = load_config()
    assert (env_hash(config.env), config.reward_hash, config.hash, Toolbox.of(config.env).specs) == before
    assert "loud" not in sys.modules
    assert installed_plugins()["tools"] == {"shout": "loud-pack 1.0"}


def test_settings_without_plugins_have_the_hashes_that_they_had_before_there_were_any() -> None:
    unmarked = Config().env.switch(marks=False)
    assert env_hash(unmarked) == "dcd68ceabc378e01cc4819f72dc4294d95b637d0d4bd7915292ce5742345f756"
    assert Config().reward_hash == "3505516765ea338da6ad400cefb963739edc62846742dacd2b8eebffe51e909a"
    assert "plugins" not in Config().env.plain()


def test_a_tool_that_is_named_is_in_the_schemas_the_hash_the_prompt_and_the_memory(install: Install) -> None:
    install("loud-pack", TOOLS, "loud", TOOL)
    config = load_config(None, ['env.plugins=["shout"]'])
    assert env_hash(config.env) != env_hash(Config().env)
    assert config.hash != Config().hash
    assert available_tools(config.env) == available_tools(Config().env) + 1
    env = make_env(config.env)
    steps = play(env, search("Ada Lovelace"), call("shout", word="where"))
    assert steps[-1].observation.notes[0] == Note("said", {"text": "WHERE {0}!"})
    context = env.state.context
    assert context.tools[-1].description == "Say a word aloud."
    assert "WHERE {0}!" in "\n".join(piece.text for piece in context.pieces)


def test_a_term_counts_with_its_weight_and_within_the_cap_of_the_process(install: Install) -> None:
    install("term-pack", TERMS, "terms", TERM)
    config = load_config(None, ["reward.weights.pool=0.4", "reward.weights.noise=-9", "reward.diversity=0"])
    assert config.reward_hash != Config().reward_hash
    assert hash(config) != hash(Config())
    terms = outcome_with(config)
    assert (terms["pool"], terms["noise"], terms["beyond_process_cap"]) == (0.2, -9.0, 8.5)
    assert "pool" not in outcome_with(Config())


def test_a_policy_a_retriever_a_format_and_an_engine_are_chosen_by_name(install: Install, tmp_path: Path) -> None:
    install("rest-pack", REST, "others", OTHERS)
    config = load_config(None, ["env.max_turns=7", "policy.format=terse"])
    assert open_policy("dice:3", {}, config).name == "dice 3 7"
    assert open_policy("silent:dice", {}, config).name
    assert open_retriever("shelf:top:left", config).info.index_hash == "top:left"
    assert is_engine("shelf:top")
    assert open_format("terse", tokenizer("chatml")).name == "terse"
    assert open_service("abacus:beads", tmp_path, config, 2) == ("beads", tmp_path, 2)


def test_unknown_names_are_answered_with_those_that_are_installed(install: Install, tmp_path: Path) -> None:
    install("rest-pack", TOOLS | REST, "others", OTHERS)
    with pytest.raises(UsageError, match="no installed package adds the tool 'shut'; those installed are shout; did"):
        load_config(None, ['env.plugins=["shut"]'])
    with pytest.raises(UsageError, match=r"the reward term 'pool'; one of your own is FILE\.py:NAME$"):
        load_config(None, ["reward.weights.pool=1"])
    with pytest.raises(ConfigError, match=r"chat format 'ters'; choose auto, .*, terse; did you mean terse\?"):
        load_config(None, ["policy.format=ters"])
    with pytest.raises(ConfigError, match=r"unknown format 'ters': choose .*, terse; did you mean terse\?"):
        open_format("ters", tokenizer("chatml"))
    with pytest.raises(UsageError, match=r"there is no policy 'dise'.* dice; did you mean dice\?"):
        check_policy("dise")
    with pytest.raises(UsageError, match="there is no engine 'abakus'; choose tinker, abacus"):
        open_service("abakus:x", tmp_path, Config())
    with pytest.raises(ConfigError, match="names a tool twice"):
        load_config(None, ['env.plugins=["shout", "shout"]'])


def test_a_plugin_with_a_built_in_name_is_ignored_with_a_warning_and_refused_where_it_is_named(
    install: Install, tmp_path: Path
) -> None:
    taken = {
        "tools": {"curate": "loud:curate"},
        "policies": {"scripted": "loud:x", "hf": "loud:x"},
        "retrievers": {"web": "loud:x"},
        "formats": {"hermes": "loud:x"},
        "engines": {"tinker": "loud:x"},
    }
    install("loud-pack", taken, "loud", "raise SystemExit(0)")
    assert policy_names().count("scripted") == 1
    opened: dict[str, Callable[[], object]] = {
        "policy 'scripted'": lambda: open_policy("scripted"),
        "policy 'hf'": lambda: open_policy("hf:"),
        "retriever 'web'": lambda: open_retriever("web:"),
        "chat format 'hermes'": lambda: open_format("hermes", tokenizer("chatml")),
        "training engine 'tinker'": lambda: open_service("tinker:", tmp_path, Config()),
    }
    for name, opens in opened.items():
        with (
            pytest.warns(InstallationWarning, match=f"^the {name} of loud-pack 1.0 .* is ignored"),
            suppress(UsageError),
        ):
            opens()
    assert "loud" not in sys.modules
    with pytest.raises(UsageError, match=r"the tool 'curate' of loud-pack 1.0 .* cannot be imported: SystemExit: 0"):
        load_config(None, ['env.plugins=["curate"]'])
    with pytest.raises(UsageError, match=r"^harness1 and loud-pack 1\.0 each have the tool 'curate'"):
        load_plugin("tools", "curate", NAMES)


@pytest.mark.parametrize(
    "way", ["raise ValueError('odd')", "raise SystemExit(0)", "return 1 / 0", "raise GeneratorExit"]
)
def test_a_plugin_that_cannot_open_is_one_line(install: Install, tmp_path: Path, way: str) -> None:
    kinds = {kind: {"odd": "loud:opens"} for kind in ("policies", "retrievers", "engines")}
    install("loud-pack", kinds, "loud", f"def opens(*given):\n    {way}")
    opened: list[Callable[[], object]] = [
        lambda: open_policy("odd:x"),
        lambda: open_retriever("odd:x"),
        lambda: open_service("odd:x", tmp_path, Config()),
    ]
    for opens in opened:
        with pytest.raises(UsageError, match=r"'odd' of loud-pack 1\.0 \(loud:opens\) failed: \w+: .*loud\.py:2"):
            opens()


def test_a_plugin_that_is_none_is_one_line(install: Install, tmp_path: Path) -> None:
    install("loud-pack", {"readers": {"none": "loud:nothing"}}, "loud", "nothing = None")
    (own := tmp_path / "mine.py").write_text("nothing = None")
    with pytest.raises(UsageError, match=r"'none' of loud-pack 1\.0 \(loud:nothing\) is None"):
        find_plugin("readers", "none")
    with pytest.raises(UsageError, match=r"mine\.py:nothing is None"):
        find_plugin("readers", f"{own}:nothing")


BROKEN_METADATA: dict[str, bytes] = {
    "no sense": b"[harness1.policies]\nno sense\n",
    "not UTF-8": b"[harness1.policies]\n\xff = a:b\n",
}


@pytest.mark.parametrize("broken", BROKEN_METADATA)
def test_broken_metadata_of_one_package_harm_no_other(install: Install, tmp_path: Path, broken: str) -> None:
    install("loud-pack", TOOLS, "loud", TOOL)
    install("rest-pack", REST, "others", OTHERS)
    (tmp_path / "loud-pack" / "loud_pack-1.0.dist-info" / "entry_points.txt").write_bytes(BROKEN_METADATA[broken])
    with pytest.warns(InstallationWarning, match=r"the plugins of .*loud_pack-1\.0\.dist-info are ignored"):
        assert plugin_names("policies") == ("dice",)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", InstallationWarning)
        assert open_policy("dice:3").name == "dice 3 40"


def test_an_older_copy_of_a_package_does_not_count(install: Install) -> None:
    install("loud-pack", TOOLS, "loud", TOOL)
    assert plugin_names("tools") == ("shout",)
    install("Loud.pack", {})
    assert plugin_names("tools") == ()


def test_the_command_line_names_an_ignored_plugin_in_a_line(
    install: Install, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install("loud-pack", {"policies": {"scripted": "loud:x"}}, "loud", "raise SystemExit(0)")
    asked = ("search", "who?", "--index", "/none", "--policy", "scripted")
    ended = command_in_process(monkeypatch, capsys)(*asked)
    line = "harness1: the policy 'scripted' of loud-pack 1.0 (loud:x) is ignored: harness1 has one of that name\n"
    assert (ended.code, ended.err.count(line)) == (2, 1)


def test_a_name_of_two_packages_is_refused_with_both(install: Install) -> None:
    install("loud-pack", TOOLS, "loud", TOOL)
    install("noisy-pack", TOOLS)
    with pytest.raises(UsageError, match=r"^loud-pack 1\.0 and noisy-pack 1.0 each have the tool 'shout'"):
        load_config(None, ['env.plugins=["shout"]'])


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("import nothing_of_the_kind", "ModuleNotFoundError: No module named 'nothing_of_the_kind'"),
        ("raise KeyError('odd')", "KeyError: 'odd'"),
        ("import sys; sys.exit(0)", "SystemExit: 0"),
        ("class Odd(BaseException): ...\nraise Odd(1)", "Odd: 1"),
        ("import asyncio; raise asyncio.CancelledError", "CancelledError: "),
        ("raise BaseExceptionGroup('a', [GeneratorExit()])", "BaseExceptionGroup: a"),
        ("class Odd(Exception):\n    def __str__(self): raise self\nraise Odd", "Odd$"),
        ("class M(type):\n    __name__ = property(len)\nclass Odd(Exception, metaclass=M): ...\nraise Odd", "Odd$"),
        ("shut = 1", "AttributeError: .*'shout'"),
    ],
)
def test_a_plugin_that_cannot_be_imported_is_named_with_its_package(install: Install, text: str, why: str) -> None:
    install("loud-pack", TOOLS, "loud", text)
    load_config()
    with pytest.raises(
        UsageError, match=rf"the tool 'shout' of loud-pack 1.0 \(loud:shout\) cannot be imported: {why}"
    ):
        load_config(None, ['env.plugins=["shout"]'])


def test_own_code_whose_names_cannot_be_looked_up_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "odd.py").write_text("def __getattr__(name): raise GeneratorExit(name)")
    with pytest.raises(UsageError, match=r"GeneratorExit: shout$"):
        plugins.load_own(f"{tmp_path}/odd.py:shout")


def test_a_plugin_that_is_not_what_its_kind_demands_is_refused(install: Install) -> None:
    groups = {"tools": {"shout": "loud:other"}, "rewards": {"pool": "loud:other"}, "formats": {"terse": "loud:other"}}
    install("loud-pack", groups, "loud", "def other(): ...")
    with pytest.raises(UsageError, match=r"\(loud:other\) must be a function of that name"):
        Toolbox.of(load_config(None, ['env.plugins=["shout"]']).env)
    with pytest.raises(UsageError, match=r"must be a component of that name: @component\('pool'\)"):
        outcome_with(load_config(None, ["reward.weights.pool=1"]))
    with pytest.raises(UsageError, match="must be a subclass of ChatFormat of that name"):
        open_format("terse", tokenizer("chatml"))


def test_a_run_says_which_package_it_needs(install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install("loud-pack", TOOLS, "loud", TOOL)
    config = load_config(None, ['env.plugins=["shout"]'])
    card = run_stage(config, "random", {}, "index", {})
    assert card.outputs["plugins"] == {"tools": {"shout": "loud-pack 1.0"}}
    assert "plugins" not in run_stage(Config(), "random", {}, "index", {}).outputs
    card.write(tmp_path)
    assert run_config(tmp_path)[0].env == config.env
    monkeypatch.setattr(sys, "path", [place for place in sys.path if "loud-pack" not in place])
    plugins._added.cache_clear()
    with pytest.raises(UsageError, match=r"needs the tool 'shout' of loud-pack 1\.0, which is not installed here"):
        run_config(tmp_path)


def test_the_example_plays_and_replays_with_its_tool_its_term_and_its_policy(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(EXAMPLE))
    install(project["name"], {name.removeprefix("harness1."): each for name, each in project["entry-points"].items()})
    command = command_in_process(monkeypatch, capsys)
    asked = ("--policy", "shortest:4", "--set", 'env.plugins=["count_words"]', "--set", "reward.weights.brevity=0.2")
    played = command("eval", "world:60", "--limit", "2", "--set", "machine.workers=1", *asked, "--out", "run")
    assert played.code == 0, played.err
    for episode in read_episodes(Path("run")):
        assert [turn.action.name for turn in episode.turns][1] == "count_words"
        (said,) = [note for note in episode.turns[1].observation.notes if note.code == "said"]
        assert len(re.findall(r"D\d+ \d+", said.data["text"])) > len(episode.curated) == 4
        assert episode.reward.terms["brevity"] == RewardTerm(1 - 4 / 30, 0.2)
    assert command("replay", "run").code == 0
    assert "# installed tool: count_words, of harness1-example 1.0" in command("config", "show").out


def test_the_names_of_the_built_in_formats_are_those_of_the_registry() -> None:
    assert set(policy_settings.FORMATS) == set(FORMATS)


@pytest.mark.parametrize("code", ["import harness1", "import harness1.cli.main as main, sys; main.run()"])
def test_neither_the_import_nor_the_list_of_verbs_looks_at_what_is_installed(code: str) -> None:
    told = "import atexit, sys; atexit.register(lambda: print('harness1.plugins' in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", f"{told}; {code}", "--help"], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "False"


def test_a_package_of_an_older_version_is_a_missing_extra_where_it_is_named() -> None:
    for name, refused in (("inspect_ai", MissingExtra), (None, ImportError)):
        with pytest.raises(refused), optional("inspect", name):
            raise ImportError("cannot import name 'solver'")
