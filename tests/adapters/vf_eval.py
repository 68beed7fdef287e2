"""`vf-eval` as a process, and the traces that it leaves."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

TASKS, ROLLOUTS = 3, 2


def traces(
    folder: Path,
    address: str,
    index: str,
    more: str = "",
    tasks: int = TASKS,
    rollouts: int = ROLLOUTS,
    client: str = "",
    model: str = "fake",
    data: str = "world:120",
) -> list[dict[str, Any]]:
    """Run `vf-eval` over a small world; `more` are lines for the harness, and `client` for the client."""
    folder.mkdir()
    (folder / "run.toml").write_text(
        f"""
model = "{model}"
push = false
num_rollouts = {rollouts}
output_dir = "{folder}/out"

[select]
limit = {tasks}

[client]
base_url = "{address}"
api_key_var = "FAKE_KEY"
{client}

[env.taskset]
id = "harness1_verifiers"
data = "{data}"
task.settings = ["reward.recipe=robust"]

[env.agent.harness]
id = "harness1_verifiers"
index = "{index}"
record = "{folder}/episodes"
{more}

[env.agent.runtime]
type = "subprocess"
"""
    )
    ended = subprocess.run(
        [str(Path(sys.executable).parent / "vf-eval"), "@", str(folder / "run.toml"), "--no-rich"],
        capture_output=True,
        text=True,
        check=False,
        env={"FAKE_KEY": "none", "PATH": "/usr/bin:/bin", "HOME": str(folder)},
    )
    found = sorted((folder / "out").rglob("traces.jsonl"))
    assert found, ended.stdout[-2000:] + ended.stderr[-2000:]
    return [trace for line in found[0].read_text().splitlines() for trace in json.loads(line)["traces"]]


def branches(trace: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """The nodes from a root to each leaf of a trace: the sequences that a trainer would get."""
    nodes = trace["nodes"]
    parents = {node.get("parent") for node in nodes}
    return [path(trace, place) for place in range(len(nodes)) if place not in parents]


def path(trace: dict[str, Any], place: int | None) -> list[dict[str, Any]]:
    """The nodes from the root to one node."""
    found = []
    while place is not None:
        found.append(trace["nodes"][place])
        place = found[-1].get("parent")
    return found[::-1]
