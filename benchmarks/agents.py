"""Test that `harness1 rl agents` teaches an agent that searches, `examples/search_agent.py`, with its own reward.

The start is the model of `agent_start.py`. Each seed trains it by the command on tasks of the split `train`, and is
compared with the start task by task on the split `test`, with 95 % bootstrap intervals of the paired differences.
`first hit` is what choosing the first hit of the bare question earns, and `best of hits` what the right choice among
its hits would.

    python benchmarks/agents.py FOLDER [--seeds N] [--tasks N] [--data world:N] [--port N] [--set A.B=VALUE] [--json]

FOLDER keeps the index, the start, the checkpoints and the rewards of one setting; finished work is not repeated. A
training that was stopped goes on if the port is the same, because the address of the index is a part of its command.
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any
from urllib.request import Request, urlopen

if not __package__:
    # Run as a script: its neighbours are found beside it.
    sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.agent_start import HITS, REWARD, Place, make_start, play
from harness1.agents.evaluation import DELIVERED, AgentSession, open_evaluation, reward_of
from harness1.config import load_config
from harness1.data.indexing import ensure_index
from harness1.data.open import open_source
from harness1.eval.statistics import bootstrap_mean
from harness1.records import Task
from harness1.rl.local_rollouts import open_policy_to_train
from harness1.training.log import read_log

NAMED, SPLIT = "micro", "test"
SETTINGS = (
    *("policy.format=hermes", "env.context_window=1024", "env.generation_reserve=16"),
    *("rl.groups=4", "rl.samples=4", "rl.batches=20", "train.rate=1e-3", "train.watch.tasks=0"),
    *("machine.concurrency=12", "machine.model.threads=1", "machine.episode_deadline_s=120"),
)
RESAMPLES = 2000
Earned = dict[str, dict[str, float]]
"""By task, its reward and the number of documents that the agent delivered."""


def main() -> None:
    """Make the start, train every seed, measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--data", default="world:500")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--tasks", type=int, default=125, help="held-out tasks")
    parser.add_argument("--port", type=int, default=8329, help="of the index")
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    settings = [*SETTINGS, *asked.overrides]
    config = load_config(NAMED, settings)
    index = asked.folder / "index"
    ensure_index(open_source(asked.data), index, config)
    with served(index, asked.port) as address:
        place = Place(asked.folder, asked.data, config, address)
        tasks = place.tasks(SPLIT, asked.tasks)
        before = earned(place, make_start(place), tasks)
        report: dict[str, Any] = {"tasks": len(tasks), "bounds": bounds(place, tasks), "start": means(before)}
        report["seeds"] = []
        for seed in range(1, asked.seeds + 1):
            learned = learn(place, seed, settings)
            after = earned(place, learned, tasks)
            report["seeds"].append({"seed": seed} | means(after) | gain(before, after) | speed(learned))
    print(json.dumps(report) if asked.json else table(report))


@contextmanager
def served(index: Path, port: int) -> Iterator[str]:
    """Serve an index by `harness1 serve retrieve`, and return its address once it answers.

    Raises:
        RuntimeError: the port is taken, or the server ended.
    """
    if answers(port):
        raise RuntimeError(f"port {port} is taken: give another --port")
    words = [sys.executable, "-m", "harness1", "serve", "retrieve", "--index", str(index), "--port", str(port)]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL) as process:
        try:
            while not answers(port):
                if process.poll() is not None:
                    raise RuntimeError("the index is not served")
                time.sleep(0.1)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


def answers(port: int) -> bool:
    """Return True if something listens on a port of this machine."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def learn(place: Place, seed: int, settings: Sequence[str]) -> Path:
    """Train from the start by the command, and return the folder of the checkpoint."""
    out = place.folder / f"learned-{seed}"
    words = ["--command", place.command, "--evaluate", REWARD, "--data", place.data]
    words += ["--upstream", f"hf:{place.folder / 'start'}", "--out", str(out), "--config", NAMED]
    words += [word for setting in (*settings, f"rl.seed={seed}") for word in ("--set", setting)]
    if not (out / "checkpoint.json").is_file():
        command = [sys.executable, "-m", "harness1", "rl", "agents", *words]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return out


def earned(place: Place, model: Path, tasks: Sequence[Task]) -> Earned:
    """Return what the agent earns on each task with a model."""
    kept = place.folder / f"earned-{model.name}.json"
    if kept.is_file():
        known: Earned = json.loads(kept.read_text())
        return known
    policy, reward = open_policy_to_train(f"hf:{model}", place.config), open_evaluation(REWARD)
    found: Earned = {}

    def noting(session: AgentSession) -> float:
        value, delivered = reward_of(reward, session).total, session.folder / DELIVERED
        chosen = delivered.read_text().splitlines() if delivered.is_file() else []
        found[session.task.task_id] = {"reward": value, "documents": len(chosen)}
        return value

    play(place, policy.model, policy.counter, tasks, noting, model.name)
    kept.write_text(json.dumps(found))
    return found


def bounds(place: Place, tasks: Sequence[Task]) -> dict[str, float]:
    """Return the mean reward of fixed choices among the hits of the bare questions."""
    body = json.dumps({"queries": [task.query for task in tasks], "topk": HITS}).encode()
    with urlopen(Request(f"{place.address}/retrieve", body, {"Content-Type": "application/json"})) as answer:
        found = [[hit["id"] for hit in hits] for hits in json.load(answer)["result"]]
    needed = [{name for name, grade in task.gold.relevant.items() if grade} if task.gold else set() for task in tasks]
    right = [len(gold.intersection(hits)) for hits, gold in zip(found, needed, strict=True)]
    return {
        "first hit": fmean(2 * (hits[0] in gold) / (1 + len(gold)) for hits, gold in zip(found, needed, strict=True)),
        "best of hits": fmean(2 * n / (n + len(gold)) for n, gold in zip(right, needed, strict=True)),
    }


def means(found: Earned) -> dict[str, float]:
    """Return means over tasks."""
    return {name: fmean(each[name] for each in found.values()) for name in ("reward", "documents")}


def gain(before: Earned, after: Earned) -> dict[str, Any]:
    """Return the gain in reward, paired by task, with its interval."""
    found = bootstrap_mean([after[task]["reward"] - before[task]["reward"] for task in before], RESAMPLES)
    return {"gain": {"mean": found.mean, "low": found.low, "high": found.high}}


def speed(learned: Path) -> dict[str, float]:
    """Return the number of batches of a training, and its seconds."""
    steps = [each for each in read_log(learned) if "loss" in each]
    return {"batches": len(steps), "seconds": sum(each["seconds"] for each in steps)}


def table(report: Mapping[str, Any]) -> str:
    """Return the report as lines."""
    lines = [f"{report['tasks']} tasks", *(f"{name}: {value:.3f}" for name, value in report["bounds"].items())]
    lines.append("start: reward {reward:.3f}, {documents:.2f} documents".format(**report["start"]))
    for each in report["seeds"]:
        said = "seed {seed}: reward {reward:.3f}, {documents:.2f} documents, {batches} batches in {seconds:.0f} s, "
        gained = "gain {mean:+.3f} ({low:+.3f} to {high:+.3f})".format(**each["gain"])
        lines.append(said.format(**each) + gained)
    return "\n".join(lines)


if __name__ == "__main__":
    main()
