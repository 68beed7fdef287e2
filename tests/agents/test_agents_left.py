"""Test that what an agent, or a judge, leaves behind costs its own session alone."""

from __future__ import annotations

import subprocess
import sys

CLOSED = """
import os
from harness1.agents.process import keep_plain, sessions_folder
os.getuid() or os.setuid(65534)
with sessions_folder() as within:
    work = within / "agent" / "work"
    work.mkdir(parents=True)
    for closed in (work.parent, within):
        closed.chmod(0)
        keep_plain(work)
        assert work.is_dir()
    assert within.stat().st_mode & 0o777 == 0o711
assert not within.exists()
"""


def test_an_agent_that_closes_the_folders_above_its_own_ends_no_training() -> None:
    subprocess.run([sys.executable, "-c", CLOSED], check=True)
