"""The origin of a run: the code, the data and the machine that its episodes were made with, and when."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

import harness1
from harness1.errors import MALFORMED
from harness1.runs.files import write_json
from harness1.runs.folder import PROVENANCE

PACKAGE = "harness1"
GIT_S = 10.0
"""Seconds to wait for git."""
SESSION = ("version", "commit", "dirty", "python", "libraries", "machine", "started", "ended")
"""Keys that describe one process that ran episodes, and not the run."""


def begin(out: Path, facts: dict[str, Any], *, runs: bool) -> None:
    """Write `provenance.json` for a process that begins to work in a run folder.

    A process that runs episodes is recorded at the top level, and those before it under `earlier`; one that only makes
    files from episodes leaves the record alone. Without a record, the times are unknown: both are null.

    Args:
        facts: what is known of the run itself, by name.
    """
    before = read_provenance(out)
    if before is not None and not runs:
        return
    earlier = [*before.get("earlier", []), {name: before.get(name) for name in SESSION}] if before else []
    times = {"started": _now() if runs else None, "ended": None}
    write_json(out / PROVENANCE, {**facts, **here(), **times, "earlier": earlier})


def restate(out: Path, facts: dict[str, Any]) -> None:
    """Replace what is recorded of the run itself, if anything is, and nothing about the processes that ran it."""
    found = read_provenance(out)
    if found is not None:
        write_json(out / PROVENANCE, {**found, **facts})


def end(out: Path) -> None:
    """Record when the process that last ran episodes ended, unless that is recorded already."""
    found = read_provenance(out)
    if found is not None and found["started"] is not None and found["ended"] is None:
        write_json(out / PROVENANCE, {**found, "ended": _now()})


def wall_seconds(record: Mapping[str, Any] | None) -> float | None:
    """Return the elapsed seconds of all processes that ran a run's episodes; None if one of them was killed and has no
    end time, or if their times are unknown."""
    processes = [*record.get("earlier", []), record] if record else []
    times = [(each.get("started"), each.get("ended")) for each in processes]
    if not times or not all(started and ended for started, ended in times):
        return None
    spent = (datetime.fromisoformat(ended) - datetime.fromisoformat(started) for started, ended in times)
    return sum(each.total_seconds() for each in spent)


def read_provenance(out: Path) -> dict[str, Any] | None:
    """Return the record of a run folder; None if none can be read."""
    try:
        found = msgspec.json.decode((out / PROVENANCE).read_bytes(), type=dict[str, Any])
    except (FileNotFoundError, *MALFORMED):
        return None
    return found if found.keys() >= {*SESSION} else None


def here() -> dict[str, Any]:
    """Describe the code and the machine of this process: the package's version, its commit and whether its files differ
    from it (null outside of a checkout), the versions of Python and of the installed libraries it can use."""
    commit, dirty = checkout(Path(harness1.__file__).parent)
    version, libraries = installed()
    return {
        "version": version,
        "commit": commit,
        "dirty": dirty,
        "python": platform.python_version(),
        "libraries": libraries,
        "machine": machine(),
    }


def checkout(package: Path) -> tuple[str | None, bool | None]:
    """Return the commit of the checkout that a package's folder is in, and whether the folder differs from it; None for
    each if the package is not part of a checkout, even if it is installed inside a repository."""
    if _git(package, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None, None
    commit, changes = _git(package, "rev-parse", "HEAD"), _git(package, "status", "--porcelain", "--", ".")
    return commit, bool(changes) if changes is not None else None


def installed() -> tuple[str | None, dict[str, str]]:
    """Return the version of the package, and of each installed library that it names; None and no libraries if the
    package runs without being installed."""
    try:
        version, required = metadata.version(PACKAGE), metadata.requires(PACKAGE) or []
    except metadata.PackageNotFoundError:
        return None, {}
    used = [line for line in required if not re.search(r"extra == .(test|bench)\b", line)]
    names = sorted({re.split(r"[^\w.-]", line, maxsplit=1)[0] for line in used} - {PACKAGE})
    libraries = {}
    for name in names:
        with suppress(metadata.PackageNotFoundError):
            libraries[name] = metadata.version(name)
    return version, libraries


def machine() -> dict[str, Any]:
    """Return the operating system, the model and number of processor cores, and the memory in bytes."""
    return {
        "platform": platform.platform(),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    }


def _cpu() -> str:
    with suppress(OSError):
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        if found:
            return found[1]
    return platform.processor() or platform.machine()


def _git(folder: Path, *arguments: str) -> str | None:
    """Return what git prints; None if it fails, or is not installed."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=GIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
