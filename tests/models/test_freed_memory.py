"""Memory that was freed goes back to the system, at intervals."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from harness1.models import causal_model
from harness1.models.causal_model import MemoryReturns


@pytest.mark.skipif(sys.platform != "linux", reason="other libraries of C keep nothing")
def test_gaps_between_what_lives_go_back_to_the_system_at_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(causal_model.time, "monotonic", lambda: now[0])
    returns = MemoryReturns(30.0)
    held = [bytearray(100_000) for _ in range(2000)]
    for each in held:
        each[::4096] = bytes(len(each[::4096]))  # every page is used
    del held[1::2]
    before = resident()
    for now[0], returned in ((129.0, False), (130.0, True)):
        returns.tick()
        assert (before - resident() > 40e6) == returned


def resident() -> float:
    """Bytes that the process holds."""
    return float(Path("/proc/self/statm").read_text().split()[1]) * 4096
