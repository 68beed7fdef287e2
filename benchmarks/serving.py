"""Measure `harness1 serve retrieve` under load: requests per second of many clients, and CPU time for each request.

    python benchmarks/serving.py INDEX [--clients 32] [--seconds 5] [--passes 3] [--json]

The server runs in its own process on loopback. Each client keeps one connection open and sends its next request
when it has the answer to the last one. `cpu_us` is the CPU time that the server's event loop spends on a request, in
microseconds; it varies less than the rate on a machine that does other work. Numbers are medians over the passes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

ASKED = {"queries": ["Who founded the company?"], "topk": 3, "return_scores": True}
REQUESTS = {"/health": ("GET", b""), "/retrieve": ("POST", json.dumps(ASKED).encode())}


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure and print; return what `--json` prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("index", type=Path)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    report: dict[str, Any] = {"clients": options.clients}
    with serving(options.index) as (process, port):
        for path in REQUESTS:
            rows = [measure(process.pid, port, path, options.clients, options.seconds) for _ in range(options.passes)]
            report[path] = {key: round(median(row[key] for row in rows), 1) for key in rows[0]}
    print(json.dumps(report) if options.json else _table(report))
    return report


@contextmanager
def serving(index: Path, checkout: Path | None = None) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Run a server of an index, from the package in a checkout or from the one at hand; yield it and its port."""
    options = ["--index", str(index.resolve()), "--port", "0"]
    command = [sys.executable, "-m", "harness1", "serve", "retrieve", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=checkout) as process:
        try:
            assert process.stdout is not None
            words = process.stdout.readline().split()
            url = next(word for word in words if word.startswith("http://")).rstrip(":")
            yield process, int(urlsplit(url).port or 0)
        finally:
            process.terminate()


def measure(pid: int, port: int, path: str, clients: int, seconds: float) -> dict[str, float]:
    """Load a server with one kind of request for a fixed time."""
    used, began = _cpu_s(pid), time.monotonic()
    answered = asyncio.run(_load(port, path, clients, began + seconds))
    spent = time.monotonic() - began
    return {"requests_s": answered / spent, "cpu_us": (_cpu_s(pid) - used) / max(answered, 1) * 1e6}


async def _load(port: int, path: str, clients: int, until: float) -> int:
    return sum(await asyncio.gather(*(_client(port, path, until) for _ in range(clients))))


async def _client(port: int, path: str, until: float) -> int:
    method, body = REQUESTS[path]
    about = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    asked = f"{about}Content-Length: {len(body)}\r\n\r\n".encode() + body
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answered = 0
    while time.monotonic() < until:
        writer.write(asked)
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        assert head.startswith(b"http/1.1 200"), head
        await reader.readexactly(int(head.partition(b"content-length:")[2].split()[0]))
        answered += 1
    writer.close()
    return answered


def _cpu_s(pid: int) -> float:
    """Return the CPU time of a process so far, in seconds."""
    ran_ns = Path(f"/proc/{pid}/schedstat").read_text().split()[0]
    return int(ran_ns) / 1e9


def _table(report: dict[str, Any]) -> str:
    rows = [f"| {path} | {report[path]['requests_s']:,.0f} | {report[path]['cpu_us']:,.0f} |" for path in REQUESTS]
    return "\n".join(["| | requests a second | CPU microseconds a request |", "|---|---|---|", *rows])


if __name__ == "__main__":
    main()
