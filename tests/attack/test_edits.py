"""Recorded runs that were edited: every edit of an episode, of its tokens or of the card is found, and nothing of it is
a traceback."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness1.config import Config, load_config
from harness1.data.open import open_source
from harness1.env.environment import SearchEnv
from harness1.env.pieces import counter_of
from harness1.episodes.rollout import replay_episode, rollout
from harness1.errors import HarnessError
from harness1.eval.evaluate import Evaluation, evaluate
from harness1.policy.scripted import ScriptedPolicy
from harness1.policy.wrappers import StudentFormatPolicy
from harness1.retrieval.build import build_index
from harness1.retrieval.open import open_retriever
from harness1.runs.files import STAGE
from harness1.runs.folder import METRICS, run_config, run_stage
from harness1.runs.journal import EPISODES, TOKENS, EpisodeStore, finish, read_episodes
from harness1.viewer.report import ensure_report
from tests.attack.attack import Attack
from tests.cli.commands import Command
from tests.support import run
from tests.vocabularies import chat_format

SOURCE = open_source("world:100")
CONFIG = load_config(None, ["machine.workers=1", "env.max_turns=5"])
TASKS = SOURCE.tasks("train")[:3]
FILES = (EPISODES, TOKENS, STAGE)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A run of a script, one whose actions are tokens, and another of the script from which lines are taken."""
    home = tmp_path_factory.mktemp("edits")
    build_index(SOURCE.documents(), home / "index", Config().index)
    for name, tasks in (("script", TASKS), ("others", SOURCE.tasks("train")[3:5])):
        evaluate(Evaluation("world:100", "train", tasks, str(home / "index"), "scripted", CONFIG), home / name)
        ensure_report(home / name)
    return [home / "script", spoken(home / "spoken", home / "index"), home / "others"]


def spoken(folder: Path, index: Path) -> Path:
    policy = StudentFormatPolicy(ScriptedPolicy(), chat_format("hermes", "chatml"))
    config = load_config(None, ["env.rendering.order=epoch", "env.max_turns=3"])
    env = SearchEnv(config.env, open_retriever(str(index), config), counter=counter_of(policy))
    names = {"env": env.hash, "policy": policy.hash, "index": env.retriever.info.index_hash}
    stage = run_stage(config, "scripted", names, str(index), names | {"counter": env.counter.hash})
    stage.write(folder)
    with EpisodeStore(folder) as store:
        for task in TASKS[:2]:
            store.append(run(rollout(env, policy, task.public())))
    finish(stage, folder / EPISODES)
    return folder


def replayed(folder: Path) -> str | None:
    try:
        config, _ = run_config(folder)
        for episode in read_episodes(folder):
            if found := replay_episode(episode, config.env).difference:
                return found
    except HarnessError as error:
        return str(error)
    return None


def edited_bytes(data: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(len(data))
    end = at + chance.randrange(1, 50)
    flipped, other = bytes([data[at] ^ 1 << chance.randrange(8)]), bytes([chance.randrange(256)])
    taken = data[at + chance.choice((1, 10, 1000)) :]
    return data[:at] + chance.choice(
        (flipped + data[at + 1 :], other + data[at:], taken, b"", data[at:end] + data[at:])
    )


def edited_lines(data: bytes, chance: random.Random, foreign: bytes) -> bytes:
    lines = data.splitlines(keepends=True)
    at, other = chance.randrange(len(lines)), [chance.choice(foreign.splitlines(keepends=True))]
    match chance.randrange(3):
        case 0:
            lines.insert(chance.randrange(len(lines) + 1), lines[at])
        case 1:
            lines[at], lines[at - 1] = lines[at - 1], lines[at]
        case _:
            lines[at : at + 1] = chance.choice(([], other, [*other, lines[at]]))
    return b"".join(lines)


def edited_fields(data: bytes, chance: random.Random) -> bytes:
    lines = data.splitlines() if data.count(b"\n{") else [data]
    at = chance.randrange(len(lines))
    tree = json.loads(lines[at])
    within: Any = tree
    while True:
        inner = [value for value in (within.values() if isinstance(within, dict) else within) if value]
        deeper = [value for value in inner if isinstance(value, dict | list)]
        if not deeper or chance.random() < 0.25:
            break
        within = chance.choice(deeper)
    _change(within, chance)
    lines[at] = json.dumps(tree, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
    return b"\n".join(lines) + b"\n"


def _change(within: Any, chance: random.Random) -> None:
    keys = list(within) if isinstance(within, dict) else list(range(len(within)))
    key = chance.choice(keys)
    match chance.randrange(4):
        case 0:
            within[key] = _other(within[key], chance)
        case 1:
            del within[key]
        case 2 if len(keys) > 1:
            other = chance.choice([each for each in keys if each != key])
            within[key], within[other] = within[other], within[key]
        case _ if isinstance(within, dict):
            items = list(within.items())
            chance.shuffle(items)
            within.clear()
            within.update(items)
        case _:
            within.insert(0, within[key])


def _other(value: Any, chance: random.Random) -> Any:
    match value:
        case bool() | None:
            return chance.choice((True, False, None, 1))
        case int() | float():
            return chance.choice((value + 1, -value, value / 3, 0, 2**70))
        case str():
            return chance.choice((value + "x", value[1:], value[::-1], "", "\u202e"))
    return chance.choice((None, [], {}, "x", json.loads("[" * 40 + "1" + "]" * 40)))


def edited(name: str, data: bytes, chance: random.Random, foreign: bytes) -> bytes:
    kind = chance.choice({TOKENS: ("bytes",), EPISODES: ("bytes", "fields", "lines")}.get(name, ("bytes", "fields")))
    if kind == "lines":
        return edited_lines(data, chance, foreign)
    return edited_fields(data, chance) if kind == "fields" else edited_bytes(data, chance)


def says_the_same(name: str, before: bytes, after: bytes) -> bool:
    """Whether an edit changed nothing that is read: spaces in the card, the bytes after the last tokens."""
    if name == TOKENS:
        return after.startswith(before)
    if name == EPISODES:
        return before == after
    try:
        return bool(msgspec.json.decode(before) == msgspec.json.decode(after))
    except (ValueError, RecursionError):
        return False


def test_every_edit_of_a_run_is_found(attack: Attack, runs: list[Path], tmp_path: Path) -> None:
    script, said, others = runs
    assert [replayed(folder) for folder in runs] == [None] * 3
    foreign = (others / EPISODES).read_bytes()
    found = harmless = 0
    for number in range(attack.times(1_000)):
        chance = attack.random(f"edit {number}")
        source = chance.choice((script, said))
        name = chance.choice([name for name in FILES if (source / name).stat().st_size])
        before = (source / name).read_bytes()
        after = edited(name, before, chance, foreign)
        folder = tmp_path / "run"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for each in FILES:
            (folder / each).write_bytes(after if each == name else (source / each).read_bytes())
        told = replayed(folder)
        if told is None:
            assert says_the_same(name, before, after), (number, name)
            harmless += 1
        found += told is not None
    attack.report("edited runs", edits=found + harmless, found=found, harmless=harmless, accepted=0)


HOSTILE = (
    *(b"", b"\0", b"[]", b"{}", b"nan", b"\xff\xfe{}", b'{"verb":"run","inputs":{"\xff":1}}', b"9" * 10_000),
    *(b"[" * 100_000, b'{"a":' * 100_000, b"[" * 900 + b"]" * 900),
    b'{"verb":"run","inputs":' + b'{"a":' * 900 + b"1" + b"}" * 901,
)
"""Contents that are no JSON, or that no Python function can walk."""


def commands(folder: Path, other: Path) -> list[list[str]]:
    run, out, index = str(folder), folder.parent / "out", str(other.parent / "index")
    tasks = ["--split", "train", "--limit", str(len(TASKS)), "--index", index]
    settings = ["--set", "machine.workers=1", "--set", "env.max_turns=5"]
    return [
        ["replay", run],
        ["replay", run, "--live", "--json"],
        ["view", run, "--out", f"{out}.html", "--workers", "1"],
        ["compare", run, run],
        ["compare", str(other), run],
        ["answer", run, "--answerer", "openai:m@http://127.0.0.1:9/v1", "--limit", "1"],
        ["sft", "build", run, "--out", f"{out}-rows"],
        ["rl", "export", run, "--out", f"{out}-export"],
        ["eval", "world:100", "--policy", f"replay:{run}", "--out", f"{out}-again", *tasks, *settings],
        ["eval", "world:100", "--policy", "scripted", "--out", run, *tasks, *settings],
        ["eval", "world:100", "--policy", "scripted", "--out", run, "--rescore", *tasks, *settings],
    ]


def test_no_file_of_a_run_is_a_traceback(attack: Attack, runs: list[Path], tmp_path: Path, command: Command) -> None:
    script, _, others = runs
    refused = fine = 0
    foreign = (others / EPISODES).read_bytes()
    names = sorted(path.name for path in script.iterdir() if path.suffix in (".json", ".jsonl", ".csv", ".toml"))
    for number in range(attack.times(400)):
        chance = attack.random(f"file {number}")
        folder, name = tmp_path / str(number) / "run", chance.choice((STAGE, EPISODES, METRICS, *names))
        shutil.copytree(script, folder)
        before = (script / name).read_bytes()
        whole = chance.random() < 0.4 or name.endswith((".csv", ".toml"))
        after = chance.choice(HOSTILE) if whole else edited(name, before, chance, foreign)
        (folder / name).write_bytes(after)
        ended = command(*chance.choice(commands(folder, script)))
        assert ended.code in (0, 1, 2, 3), (number, name, ended.err)
        if ended.code == 2:
            assert ended.err.strip(), (number, name)
        refused += ended.code != 0
        fine += ended.code == 0
        shutil.rmtree(folder.parent)
    attack.report("files of runs", commands=refused + fine, refused=refused, carried_out=fine, tracebacks=0)
