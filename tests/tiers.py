"""Runs the tiers of tests beyond `make test`; one that cannot run is skipped by name, with what would install it."""

from __future__ import annotations

import shutil
import subprocess
import sys

TIERS = {
    "service": "pip install 'harness1[test]'",
    "attack": "pip install 'harness1[test]'",
    "ray": "pip install 'harness1[test]'",
    "docs": "pip install 'harness1[test]'",
    "browser": "apt-get install chromium && pip install 'harness1[test]'",
}
"""Marker of each tier, and the command that installs what it needs."""
NO_TESTS = 5
"""Pytest's exit code when it collected nothing."""


def pytest(*arguments: str, quiet: bool = False) -> int:
    output = subprocess.DEVNULL if quiet else None
    return subprocess.run([sys.executable, "-m", "pytest", *arguments], stdout=output, check=False).returncode


def main() -> int:
    failed = 0
    for tier, needs in TIERS.items():
        missing = tier == "browser" and shutil.which("chromium") is None
        if missing or pytest("-m", tier, "--collect-only", quiet=True) == NO_TESTS:
            print(f"skipped tier {tier}; it is installed by: {needs}")
        else:
            failed |= pytest("-m", tier, "-rs")
    return failed


if __name__ == "__main__":
    sys.exit(main())
