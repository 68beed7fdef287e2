"""Memory that was freed goes back to the system, at intervals."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from harness1.models import causal_model
from harness1.models.causal_model import MemoryReturns, return_memory


def test_it_is_returned_when_the_interval_is_over_and_not_before(monkeypatch: pytest.MonkeyPatch) -> None:
    now, returned = [100.0], []
    monkeypatch.setattr(causal_model.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(causal_model, "return_memory", lambda: returned.append(now[0]))
    returns = MemoryReturns(30.0)
    for now[0] in (100.0, 129.0, 130.0, 131.0, 159.0, 161.0):
        returns.tick()
    assert returned == [130.0, 161.0]


@pytest.mark.skipif(sys.platform != "linux", reason="other libraries of C keep nothing")
def test_gaps_between_what_lives_go_back_to_the_system() -> None:
    held = [bytearray(100_000) for _ in range(2000)]
    for each in held:
        each[::4096] = bytes(len(each[::4096]))  # every page is used
    del held[1::2]
    before = resident()
    return_memory()
    assert before - resident() > 40e6


def resident() -> float:
    """Bytes that the process holds."""
    return float(Path("/proc/self/statm").read_text().split()[1]) * 4096
