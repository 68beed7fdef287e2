"""`python -m harness1` is the command `harness1`."""

from __future__ import annotations

from harness1.cli.main import run

if __name__ == "__main__":
    run()
