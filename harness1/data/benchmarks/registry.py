"""All benchmarks by name."""

from __future__ import annotations

from harness1.data.benchmarks.benchmark import Benchmark
from harness1.data.benchmarks.browsecomp_plus import BROWSECOMP_PLUS
from harness1.data.benchmarks.context1 import PATENTS, SEC, WEB
from harness1.data.benchmarks.frames import FRAMES
from harness1.data.benchmarks.hotpotqa import HOTPOTQA
from harness1.data.benchmarks.longseal import LONGSEAL
from harness1.data.benchmarks.sealqa import SEAL0
from harness1.errors import UsageError

BENCHMARKS = {
    benchmark.name: benchmark for benchmark in (BROWSECOMP_PLUS, WEB, PATENTS, SEC, LONGSEAL, SEAL0, FRAMES, HOTPOTQA)
}


def benchmark_named(name: str) -> Benchmark:
    """Return the benchmark of a name.

    Raises:
        UsageError: there is no such benchmark.
    """
    if name not in BENCHMARKS:
        raise UsageError(f"there is no benchmark {name!r}; there are: {', '.join(BENCHMARKS)}")
    return BENCHMARKS[name]
