"""Nothing hides a change from a recipe, no spelling hides a command from a gate, no package breaks a look-up."""

from __future__ import annotations

import os
import random
import shlex
import sys
import warnings
from collections.abc import Callable
from functools import partial
from itertools import permutations
from pathlib import Path

import pytest

from harness1 import plugins
from harness1.cli.recipe import check_commands, parse_command
from harness1.errors import ConfigError, InstallationWarning
from harness1.plugins import KINDS, plugin_names
from harness1.recipe.gates import StageCase, artifact, hash_input, judge_stage
from harness1.recipe.recipe import recipe_of
from harness1.runs.files import Stage
from tests.attack.attack import Attack

NAMES = (
    *(
        "config.json",
        "tokenizer.json",
        "tasks.csv",
        "tasks.jsonl",
        "train.jsonl",
        "corpus.jsonl.gz",
        "pool.trec",
        "x.gguf",
    ),
    *("qrels/test.tsv", "policies/a/tasks.csv", "a/curated.trec", "stage.json", ".hidden", ".git/index", "CURRENT"),
    *(
        "adapter_config.json",
        "checkpoint.json",
        "chat_template.jinja",
        "state/state.pt",
        "log.jsonl",
        "README.md",
        "a.md",
    ),
    *("\udcfe", "\udcff.md", "'\\udcfe'", "a\nb", " ", "-rf", "{out}", "ä.md", "a\u0308.md", "__pycache__/a.pyc"),
)
VERBS = ("index", "run", "data copy", "sft train", "rl check", "none of ours")


def put(place: Path, name: str, text: str) -> Path:
    path = place / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def edits(place: Path, chosen: random.Random) -> dict[str, Callable[[], object]]:
    """One change of each kind to a folder that holds files."""
    files = [each for each in place.rglob("*") if each.is_file()]
    one, free = chosen.choice(files), place / f"new-{chosen.randrange(10**9)}"
    times = one.stat().st_atime_ns, one.stat().st_mtime_ns
    text = one.read_text()
    other = text[:-1] + ("?" if text.endswith("!") else "!")
    return {
        "edit": lambda: one.write_text(f"{text}!"),
        "edit within a clock tick": lambda: (one.write_text(other), os.utime(one, ns=times)),
        "rename": lambda: one.rename(one.with_name(free.name)),
        "delete": one.unlink,
        "add": lambda: free.write_text(""),
        "add a pipe": lambda: os.mkfifo(free),
        "add a link": lambda: free.symlink_to(one),
        "add a broken link": lambda: free.symlink_to(free),
        "add a link to all": lambda: free.symlink_to("/"),
    }


def test_every_change_of_an_input_is_seen_whatever_lies_beside_it(attack: Attack, tmp_path: Path) -> None:
    chosen = attack.random("inputs")
    tried = 0
    for at in range(attack.times(60)):
        place = tmp_path / str(at)
        for name in chosen.sample(NAMES, chosen.randint(1, 12)):
            put(place, name, f"{name!r} {at}")
        if chosen.random() < 0.5:
            Stage(chosen.choice(VERBS), {}, "finished", hashes={"index": "0"}).write(place)
        for kind in edits(place, chosen):
            before = hash_input(str(place))
            edits(place, chosen)[kind]()
            assert hash_input(str(place)) != before, (kind, sorted(place.rglob("*")))
            put(place, "a.md", kind)
            tried += 1
    attack.report("changes of inputs", tried=tried)


def test_equal_folders_have_one_hash_in_whatever_order_they_were_made(tmp_path: Path) -> None:
    makes = [lambda place: put(place, "a/f", ""), *(partial(link, name=name) for name in ("b", "0", "z"))]
    for at, order in enumerate(permutations(makes)):
        (tmp_path / str(at)).mkdir()
        for make in order:
            make(tmp_path / str(at))
    assert len({hash_input(str(each)) for each in tmp_path.iterdir()}) == 1


def link(place: Path, name: str) -> None:
    (place / name).symlink_to("a")


BEHAVIOUR = ("tokenizer_config.json", "chat_template.jinja", "generation_config.json", "special_tokens_map.json")


@pytest.mark.parametrize(
    "name", [*BEHAVIOUR, "checkpoint.json", "vocab.txt", "tokenizer.model", "a.safetensors", "a.bin"]
)
def test_what_decides_a_models_behaviour_is_part_of_it(tmp_path: Path, name: str) -> None:
    for verb in ("models new", "models convert", "models-get", "sft train", "rl train", "models merge"):
        place = tmp_path / verb
        put(place, "config.json", "")
        put(place, "model.safetensors", "")
        if verb != "models merge":  # which leaves no card
            Stage(verb, {}, "finished").write(place)
        before = artifact(place)
        put(place, name, "x")
        added = artifact(place)
        put(place, name, "y")
        assert len({before, added, artifact(place)}) == 3


def spellings(options: dict[str, str], others: list[list[str]], chosen: random.Random) -> list[str]:
    """The same options and arguments in some order, each in one of the ways in which it can be written."""
    parts = [*others]
    for name, value in options.items():
        parts.append([f"{name}={value}"] if chosen.random() < 0.5 else [name, value])
        if chosen.random() < 0.3:  # the last one counts
            parts[-1] = [f"{name}=other", *parts[-1]]
    chosen.shuffle(parts)
    return [word for part in parts for word in part]


def test_no_spelling_of_a_command_hides_it_from_a_gate(attack: Attack, tmp_path: Path) -> None:
    (tmp_path / "metrics.json").write_text('{"curated_recall": {"mean": 0.5}}')
    chosen = attack.random("commands")
    for _ in range(attack.times(400)):
        policy = chosen.choice(["oracle", "silent:oracle"])
        out = chosen.choice(["--policy=scripted", "--policy", "oracle", "-", "x y"])
        others = [["world:60"], chosen.choice([["--view"], ["--no-view"], ["--json"], ["--seed", "-1"], []])]
        words = ["eval", *spellings({"--policy": policy, "--out": out}, others, chosen)]
        case = StageCase(*parse_command(words), tmp_path)
        assert (case.verb, case.option("--policy"), case.option("--out")) == ("eval", policy, out)
        assert [each.gate for each in judge_stage(case, {"faults": False, "terms": False})] == ["oracle"], words


NO_COMMANDS = (
    *("", "-h", "--version", "--help", "sft", "EVAL x", "eval", "eval x --help", "eval x -h", "eval x y", "eval --"),
    *("eval x --policy", "eval x --view=1", "eval x --pol oracle", "eval x --policy\u00a0oracle", "eval x --samples 0"),
    *("eval x --set", "eval x --faults=never", "compare", "index check", "rl train --out o", "eval \\", "eval 'x"),
    *("eval x --config=none-such", "eval x --set env.none=1", "sft train a b --model m --out o", "harness1 eval x"),
    *("eval x\0", "help -h"),
)


@pytest.mark.parametrize("run", NO_COMMANDS)
def test_what_is_no_command_is_refused_before_anything_begins(tmp_path: Path, run: str) -> None:
    with pytest.raises(ConfigError):
        check_commands(recipe_of({"title": "t", "stages": {"a": {"run": run}}}, "t"), tmp_path)


ENTRIES = (
    *(
        "scripted = a:b",
        "hf = a:b",
        " = a:b",
        "good = a",
        "a:b = c:d",
        "x.py:f = a:b",
        "= ",
        "no sense",
        "\udcff = a:b",
    ),
    *("[", "[harness1.policies", "\0", "name = :::", "\x1b[2J = a:b", "q" * 9000 + " = a:b", "[[]]", "a = b = c", "["),
)


def test_no_package_breaks_the_look_up_of_another(
    attack: Attack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen, paths = attack.random("plugins"), [*sys.path]
    try:
        for at in range(attack.times(60)):
            place = tmp_path / str(at)
            put(place, "good-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: good\nVersion: 1.0\n")
            put(place, "good-1.0.dist-info/entry_points.txt", "[harness1.policies]\ndice = a:b\n")
            lines = "\n".join(chosen.choices(ENTRIES, k=chosen.randint(1, 5)))
            broken = f"[harness1.{chosen.choice([*KINDS])}]\n{lines}".encode("utf-8", "surrogateescape")
            put(place, "bad-1.0.dist-info/METADATA", chosen.choice(["", "Name: bad\n", "Name: a\x1b[2J\nVersion: \n"]))
            (place / "bad-1.0.dist-info" / "entry_points.txt").write_bytes(broken)
            monkeypatch.setattr(sys, "path", [str(place), *paths])
            plugins._added.cache_clear()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", InstallationWarning)
                assert "dice" in plugin_names("policies"), broken
                assert parse_command(shlex.split("eval world:60"))[0] == "eval"
    finally:
        plugins._added.cache_clear()
