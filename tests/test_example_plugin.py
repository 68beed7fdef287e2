"""The package in examples/plugin, built and installed without a network into a folder, at the command line."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.service
ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "plugin"
PLAYED = ("--policy", "shortest:4", "--set", 'env.plugins=["count_words"]', "--set", "reward.weights.brevity=0.2")


def installed(source: Path, target: Path) -> Path:
    """Build a copy of a package, so that the checkout stays clean, and install it into a folder."""
    copy = shutil.copytree(source, target.with_name(f"{target.name}-source"))
    command = ["install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--target", str(target)]
    subprocess.run([sys.executable, "-m", "pip", *command, str(copy)], check=True)
    return target


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return installed(EXAMPLE, tmp_path_factory.mktemp("packages") / "example")


def harness1(work: Path, packages: tuple[Path, ...], *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder, with the checkout and some folders of packages, and a cache of its own."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, *packages))), "HOME": str(work)}
    command = [sys.executable, "-m", "harness1", *arguments]
    return subprocess.run(command, cwd=work, env=env, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def played(example: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run that needs the tool and the term of the example."""
    work = tmp_path_factory.mktemp("played")
    done = harness1(work, (example,), "eval", "world:300", "--limit", "2", *PLAYED, "--out", "run")
    assert done.returncode == 0, done.stderr
    return work


def test_an_episode_is_played_with_its_tool_its_term_and_its_policy(played: Path) -> None:
    episodes = [json.loads(line) for line in (played / "run" / "episodes.jsonl").read_text().splitlines()]
    assert len(episodes) == 2
    for episode in episodes:
        assert [turn["action"]["name"] for turn in episode["turns"]][1] == "count_words"
        (said,) = [note for note in episode["turns"][1]["observation"]["notes"] if note["code"] == "said"]
        counts = {handle: int(words) for handle, words in re.findall(r"(D\d+) (\d+)", said["data"]["text"])}
        assert len(counts) > len(episode["curated"]) == 4
        assert episode["reward"]["terms"]["brevity"] == {"value": 1 - 4 / 30, "weight": 0.2}


def test_it_replays_where_it_is_installed_and_names_its_package_where_it_is_not(played: Path, example: Path) -> None:
    assert "8 of 8 turns equal" in harness1(played, (example,), "replay", "run").stdout
    assert harness1(played, (example,), "replay", "run", "--live").returncode == 0
    without = harness1(played, (), "replay", "run")
    assert without.returncode == 2
    assert "needs the tool 'count_words' of harness1-example 0.1.0, which is not installed" in without.stderr


def test_it_is_shown_and_changes_no_hash(played: Path, example: Path) -> None:
    shown = harness1(played, (example,), "config", "show", "--json")
    before = harness1(played, (), "config", "show", "--json")
    mine, plain = json.loads(shown.stdout), json.loads(before.stdout)
    owner = "harness1-example 0.1.0"
    assert mine.pop("plugins")["policies"] == {"shortest": owner}
    assert plain.pop("plugins") == {}
    assert mine == plain
    text = harness1(played, (example,), "config", "show").stdout
    assert f"# installed tool: count_words, of {owner}" in text
