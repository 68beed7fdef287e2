"""A run folder: the card that says how its episodes were made, what may be written into it, and its origin: the code,
the data and the machine that its episodes were made with."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from importlib import metadata
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from harness1.config import Config
from harness1.config.settings import lost
from harness1.errors import MALFORMED, ConfigError, SchemaError, UsageError
from harness1.plain import digest, public_address
from harness1.plugins import is_own, packages_of, refuse_missing
from harness1.records import Episode
from harness1.runs import files
from harness1.runs.journal import EPISODES, LINES, TOKENS, Lines, continue_lines, hold, latest_episodes

METRICS = "metrics.json"
RESOURCES = "resources.json"
TASKS = "tasks.csv"
CURATED = "curated.trec"
POOL = "pool.trec"
ENCODED_QRELS = "qrels.trec"
SUBMISSION = "browsecomp_plus"
CONFIG = "config.toml"
PROVENANCE = "provenance.json"
REPORT = "report.html"
VIEW = "view.html"

DERIVED = (
    *(METRICS, RESOURCES, TASKS, CURATED, POOL, ENCODED_QRELS, CONFIG, PROVENANCE, REPORT, VIEW),
    *("curated.sample*.trec", "pool.sample*.trec"),
)
SUBMISSIONS = (SUBMISSION, f"{SUBMISSION}.sample*")
"""Patterns of the files, and of the folders, that are made from a run's episodes."""


def run_stage(
    config: Config,
    policy: str,
    inputs: dict[str, Any],
    index: str,
    hashes: dict[str, str],
    chat: Mapping[str, str] = MappingProxyType({}),
) -> files.Stage:
    """Return the card of a run folder. Its configuration is enough to replay it offline, its index to replay it live.
    `index`: as `retrieval.open.absolute_index` returns it; a password in it is not written. `chat`: the chat `format`
    of its policy, if it has one, and the location of its student's `tokenizer`."""
    lines = Lines(digest([inputs, hashes]), 0)
    outputs = {"policy": policy, "config": public_config(config), "index": public_address(index), **chat}
    outputs[LINES] = msgspec.to_builtins(lines)
    first = [spec if is_own(spec) else spec.partition(":")[0] for spec in (policy, index)]
    named = {"policies": first[:1], "retrievers": first[1:], "formats": [chat.get("format", config.policy.format)]}
    if plugins := packages_of({"tools": config.env.plugins, "rewards": config.reward.others, **named}):
        outputs["plugins"] = plugins
    return files.Stage("run", inputs, hashes=hashes, outputs=outputs)


def public_config(config: Config) -> dict[str, Any]:
    """Return every setting without the keys of services and the secrets in addresses."""
    tree: dict[str, Any] = msgspec.to_builtins(msgspec.structs.replace(config, machine=config.machine.public()))
    return tree


def toml_lines(tree: dict[str, Any], notes: Mapping[str, str] | None = None, prefix: str = "") -> list[str]:
    """Return nested settings as lines of TOML: scalars, then a table for each group. `notes`: by dotted name."""
    notes, lines = notes or {}, list[str]()

    def comment(key: str) -> list[str]:
        text = notes.get(prefix + key)
        return textwrap.wrap(text, 100, initial_indent="# ", subsequent_indent="# ") if text else []

    for key, value in tree.items():
        if not isinstance(value, dict):
            # JSON and TOML write scalars, and lists of them, alike.
            lines += [*comment(key), f"{key} = {msgspec.json.encode(value).decode()}"]
    for key, value in tree.items():
        if isinstance(value, dict):
            lines += ["", *comment(key), f"[{prefix}{key}]", *toml_lines(value, notes, f"{prefix}{key}.")]
    return lines


def of_sample(name: str, sample: int) -> str:
    """Return the name of a file or folder for one sample of the tasks; the first sample has the plain name."""
    stem, dot, suffix = name.partition(".")
    return f"{stem}.sample{sample}{dot}{suffix}" if sample else name


def read_run_card(folder: Path, *, scored_again: bool = False) -> files.Stage:
    """Return the card of a run folder. Raises UsageError: it holds no run, or one made with a tool or (unless it is
    `scored_again`) a reward term that is not installed; SchemaError: its card is damaged."""
    stage = files.read_stage(folder)
    if stage is None or stage.verb != "run":
        why = "it has no stage.json of a run" if folder.exists() else "there is no such folder"
        raise UsageError(f"{folder} is not a run folder: {why}")
    try:
        made_with = msgspec.convert(stage.outputs.get("plugins", {}), dict[str, dict[str, str]])
    except MALFORMED as error:
        raise SchemaError(f"{folder / files.STAGE} does not say what the run was made with: {error}") from error
    needed = ("tools",) if scored_again else ("tools", "rewards")
    refuse_missing({kind: made_with[kind] for kind in needed if kind in made_with}, str(folder))
    return stage


def run_config(folder: Path, stage: files.Stage | None = None) -> tuple[Config, str]:
    """Return a run's configuration and index path. `stage`: its card. Raises as `read_run_card`, and SchemaError."""
    stage = stage or read_run_card(folder)
    try:
        return msgspec.convert(stage.outputs["config"], Config), str(stage.outputs["index"])
    except (KeyError, *MALFORMED, ConfigError) as error:
        raise SchemaError(f"{folder / files.STAGE} does not say how the run was made: {error}") from error


def lost_settings(folder: Path) -> str:
    """Return what a run was recorded with and this version has no more, with the reasons; empty if it plays on."""
    stage = files.read_raw_stage(folder)
    config = stage.outputs.get("config") if stage else None
    found = lost(config) if isinstance(config, dict) else ()
    played = tuple(f"{section}." for section in ("env", "index", "policy", "reward"))
    return "; ".join(f"{path}={value} ({why})" for path, value, why in found if path.startswith(played))


def refuse_lost_settings(folder: Path) -> None:
    """Raise UsageError if a run was recorded with settings that this version has no more: it would play another."""
    if found := lost_settings(folder):
        way_out = "replay it, or go on with it, by the version that made it"
        raise UsageError(f"{folder} was recorded with {found}: {way_out}")


def episodes_of(stage: files.Stage, folder: Path) -> list[Episode]:
    """Return the last episode of each task and sample of the run that a card describes, sorted."""
    made_with = tuple(stage.inputs.get(name) for name in ("env", "policy", "index"))
    return [episode for key, episode in sorted(latest_episodes(folder).items()) if key[2:] == made_with]


def clear_run(out: Path) -> None:
    """Remove an earlier run, and nothing else. Raises UsageError: the folder holds something else, or is written to."""
    files.refuse_foreign(out, "run", "no run", EPISODES)
    with hold(out, EPISODES):
        with files.writing(out):
            drop_leftovers(out)
        files.remove(out, *DERIVED, *(f"{folder}/run_*.json" for folder in SUBMISSIONS), keep_card=True)
        for folder in chain.from_iterable(map(out.glob, SUBMISSIONS)):
            with suppress(OSError):  # somebody has put something else there, which stays
                folder.rmdir()
        files.remove(out, EPISODES, TOKENS)


def drop_leftovers(out: Path) -> None:
    """Remove the temporary files of processes that were killed; only while holding the folder's lock."""
    for path in chain.from_iterable(map(out.glob, (".*", *(f"{folder}/.*" for folder in SUBMISSIONS)))):
        name, _, process = path.name.removeprefix(".").rpartition(".")
        if process.isdecimal() and name.endswith((".json", ".jsonl", ".csv", ".trec", ".toml", ".html")):
            path.unlink(missing_ok=True)


def refuse_other_run(stage: files.Stage, out: Path) -> files.Stage:
    """Return the card with which a run goes on in a folder. Raises UsageError: the folder holds something else."""
    files.refuse_foreign(out, "run", "no run", EPISODES)
    refuse_lost_settings(out)
    files.refuse_changed(stage, out, "run")
    return continue_lines(stage, out / EPISODES)


PACKAGE = "harness1"
GIT_S = 10.0  # seconds to wait for git
SESSION = ("version", "commit", "dirty", "python", "libraries", "machine", "started", "ended")
"""Keys that describe one process that ran episodes, and not the run."""


@contextmanager
def keep_provenance(out: Path, facts: dict[str, Any], *, runs: bool) -> Iterator[None]:
    """Keep `provenance.json` while a process works in a run folder, with `facts` of the run itself: the last one that
    runs episodes at the top level, those before it under `earlier`. Without a record both times are null."""

    def now() -> str:
        return datetime.now(UTC).isoformat(timespec="milliseconds")

    before = read_provenance(out)
    if before is None or runs:
        earlier = [*before.get("earlier", []), {name: before.get(name) for name in SESSION}] if before else []
        times = {"started": now() if runs else None, "ended": None}
        files.write_json(out / PROVENANCE, {**facts, **_describe_process(), **times, "earlier": earlier})
    try:
        yield
    finally:
        found = read_provenance(out) if runs else None
        if found is not None and found["ended"] is None:
            files.write_json(out / PROVENANCE, {**found, "ended": now()})


def restate_provenance(out: Path, facts: dict[str, Any]) -> None:
    """Replace what is recorded of the run itself, if anything is, and nothing about the processes that ran it."""
    found = read_provenance(out)
    if found is not None:
        files.write_json(out / PROVENANCE, {**found, **facts})


def wall_seconds(record: Mapping[str, Any] | None) -> float | None:
    """Return the elapsed seconds of all processes that ran a run's episodes; None if a time is unknown."""
    processes = [*record.get("earlier", []), record] if record else []
    times = [(each.get("started"), each.get("ended")) for each in processes]
    if not times or not all(started and ended for started, ended in times):
        return None
    spent = (datetime.fromisoformat(ended) - datetime.fromisoformat(started) for started, ended in times)
    return sum(each.total_seconds() for each in spent)


def read_provenance(out: Path) -> dict[str, Any] | None:
    """Return the record of a run folder; None if none can be read."""
    found = files.find_json(out / PROVENANCE)
    return found if found and found.keys() >= {*SESSION} else None


def _describe_process() -> dict[str, Any]:
    commit, dirty = checkout(Path(__file__).parents[1])
    version, libraries, cpu = None, dict[str, str](), None
    with suppress(metadata.PackageNotFoundError):  # the package may run without being installed
        version = metadata.version(PACKAGE)
        required = metadata.requires(PACKAGE) or []
        used = (line for line in required if not re.search(r"extra == .(test|bench)\b", line))
        for name in sorted({re.split(r"[^\w.-]", line, maxsplit=1)[0] for line in used} - {PACKAGE}):
            with suppress(metadata.PackageNotFoundError):
                libraries[name] = metadata.version(name)
    with suppress(OSError):
        cpu = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return {
        "version": version,
        "commit": commit,
        "dirty": dirty,
        "python": platform.python_version(),
        "libraries": libraries,  # those that the package names and the machine has
        "machine": {
            "platform": platform.platform(),
            "cpu": cpu[1] if cpu else platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),  # bytes
        },
    }


def checkout(package: Path) -> tuple[str | None, bool | None]:
    """Return the commit of a package's checkout, and whether it differs; None for each if it is in none."""
    if _git(package, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None, None
    commit, changes = _git(package, "rev-parse", "HEAD"), _git(package, "status", "--porcelain", "--", ".")
    return commit, bool(changes) if changes is not None else None


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=GIT_S, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
