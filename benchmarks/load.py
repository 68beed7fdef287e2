"""Measure a server under attack, and its load beside that of another checkout of the project.

    python benchmarks/load.py INDEX [--baseline DIR] [--silent 500] [--inflating 8] [--seconds 20] [--passes 3] [--json]

The attack: clients of which a third sends nothing, a third half a body and a third never reads its answer, and a few
that send megabytes of gzip that inflate to a gigabyte, again and again. Before, during and after it, one honest client
sends a search every 20 ms; the table has its median and its 99th percentile in milliseconds, and the memory of the
server in MB. The load: requests a second of 32 clients that keep their connections, medians over passes that take
turns with the other checkout, and the answers to 500 such clients that are not 200.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from statistics import median, quantiles
from typing import Any
from urllib.parse import urlsplit

ASKED = {"queries": ["Who founded the company?"], "topk": 3, "return_scores": True}
REQUESTS = {"/health": ("GET", b""), "/retrieve": ("POST", json.dumps(ASKED).encode())}
HOST, PAUSE_S, REST_S = "127.0.0.1", 0.02, 5.0
GIGABYTE = 1 << 30
SEARCH = json.dumps({"queries": ["Who founded the company?"], "topk": 10}).encode()
BIG = json.dumps({"queries": ["company american first film born city"], "topk": 5000}).encode()


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure and print; return what `--json` prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("index", type=Path)
    parser.add_argument("--baseline", type=Path, help="another checkout of the project")
    parser.add_argument("--silent", type=int, default=500)
    parser.add_argument("--inflating", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    report = {"attack": attacked(options.index, options.silent, options.inflating, options.seconds)}
    report["load"] = loaded(options.index, options.baseline, options.seconds / 4, options.passes)
    print(json.dumps(report) if options.json else _table(report))
    return report


def attacked(index: Path, silent: int, inflating: int, seconds: float) -> dict[str, dict[str, float]]:
    """Return what an honest client and the server's memory see before, during and after an attack."""
    packed, rows = bomb(), {}
    with serving(index) as (process, port):
        asyncio.run(_ask(port, BIG))  # fills the caches, which are bounded
        honest(port, 2.0)
        rows["before"] = honest(port, seconds / 2) | {"mb": resident(process.pid)}
        attack = multiprocessing.get_context("spawn").Process(target=besiege, args=(port, silent, inflating, packed))
        attack.start()
        time.sleep(2.0)
        rows["during"] = honest(port, seconds) | {"mb": resident(process.pid)}
        attack.kill()
        attack.join()
        time.sleep(REST_S)
        rows["after"] = honest(port, seconds / 2) | {"mb": resident(process.pid)}
    return rows


def loaded(index: Path, baseline: Path | None, seconds: float, passes: int) -> dict[str, Any]:
    """Return requests a second, here and in the other checkout, and errors with many clients."""
    checkouts = {"here": None} | ({"baseline": baseline} if baseline else {})
    rates: dict[str, list[float]] = {name: [] for name in checkouts}
    with ExitStack() as stack:
        servers = {name: stack.enter_context(serving(index, where)) for name, where in checkouts.items()}
        for _ in range(passes):
            for name, (process, port) in servers.items():
                rates[name].append(measure(process.pid, port, "/retrieve", 32, seconds)["requests_s"])
        answered, errors = asyncio.run(_crowd(servers["here"][1], 500, seconds))
    found: dict[str, Any] = {name: round(median(each), 1) for name, each in rates.items()}
    if baseline:
        found["ratio"] = round(found["here"] / found["baseline"], 3)
    return found | {"answers_500": answered, "errors_500": errors}


def honest(port: int, seconds: float) -> dict[str, float]:
    """Return the latency of searches of one client, in milliseconds, and how many failed."""
    spent, failed = asyncio.run(_honest(port, time.monotonic() + seconds))
    cuts = quantiles(spent, n=100)
    shown = {"p50_ms": median(spent), "p99_ms": cuts[98], "most_ms": max(spent)}
    return {name: round(value, 1) for name, value in shown.items()} | {"searches": len(spent), "failed": failed}


async def _honest(port: int, until: float) -> tuple[list[float], int]:
    spent, failed = list[float](), 0
    while time.monotonic() < until:
        began = time.monotonic()
        try:
            async with asyncio.timeout(60.0):
                failed += not (await _ask(port, SEARCH)).startswith(b"HTTP/1.1 200")
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            failed += 1
        spent.append((time.monotonic() - began) * 1000)
        await asyncio.sleep(PAUSE_S)
    return spent, failed


async def _ask(port: int, body: bytes, headers: str = "") -> bytes:
    """Send one request on a connection of its own; return the answer."""
    reader, writer = await asyncio.open_connection(HOST, port)
    try:
        writer.write(request(body, f"Connection: close\r\n{headers}"))
        return await reader.read()
    finally:
        writer.close()


def request(body: bytes, headers: str = "") -> bytes:
    """Return a search as bytes."""
    about = "Host: localhost\r\nContent-Type: application/json\r\n"
    return f"POST /retrieve HTTP/1.1\r\n{about}{headers}Content-Length: {len(body)}\r\n\r\n".encode() + body


def besiege(port: int, silent: int, inflating: int, packed: bytes) -> None:
    """Attack a server until this process is killed."""
    asyncio.run(_besiege(port, silent, inflating, packed))


async def _besiege(port: int, silent: int, inflating: int, packed: bytes) -> None:
    sent = [b"", request(b"x" * 100_000)[:50_000], request(BIG)]
    async with asyncio.TaskGroup() as group:
        for number in range(silent):
            group.create_task(_hold(port, sent[number % len(sent)]))
        for _ in range(inflating):
            group.create_task(_inflate(port, packed))


async def _hold(port: int, sent: bytes) -> None:
    """Keep a connection and never read from it; open another when the server closes it."""
    while True:
        with suppress(OSError):
            _, writer = await asyncio.open_connection(HOST, port, limit=1)
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            writer.write(sent)
            await asyncio.sleep(10.0)
            writer.transport.abort()
        await asyncio.sleep(PAUSE_S)


async def _inflate(port: int, packed: bytes) -> None:
    while True:
        with suppress(OSError):
            await _ask(port, packed, "Content-Encoding: gzip\r\n")
        await asyncio.sleep(PAUSE_S)


def bomb() -> bytes:
    """Return a gigabyte of blanks in about a megabyte of gzip."""
    packer, block = zlib.compressobj(9, wbits=31), b" " * (1 << 20)
    return b"".join([*(packer.compress(block) for _ in range(GIGABYTE // len(block))), packer.flush()])


async def _crowd(port: int, clients: int, seconds: float) -> tuple[int, int]:
    """Return the answers to clients that keep their connections, and those that are not 200."""
    until = time.monotonic() + seconds
    counts = await asyncio.gather(*(_client(port, until) for _ in range(clients)))
    return sum(answered for answered, _ in counts), sum(failed for _, failed in counts)


async def _client(port: int, until: float) -> tuple[int, int]:
    asked, answered, failed = request(REQUESTS["/retrieve"][1]), 0, 0
    reader, writer = await asyncio.open_connection(HOST, port)
    while time.monotonic() < until:
        try:
            writer.write(asked)
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            await reader.readexactly(int(head.partition(b"content-length:")[2].split()[0]))
            answered, failed = answered + 1, failed + (not head.startswith(b"http/1.1 200"))
        except (OSError, asyncio.IncompleteReadError):
            failed += 1
            reader, writer = await asyncio.open_connection(HOST, port)
    writer.close()
    return answered, failed


def resident(pid: int) -> float:
    """Return the resident memory of a process in MB, without the pages of the index, which the system may take back."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return round(int(next(line.split()[1] for line in lines if line.startswith("RssAnon:"))) / 1024, 1)


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
    answered = asyncio.run(_ask_at_once(port, path, clients, began + seconds))
    spent = time.monotonic() - began
    return {"requests_s": answered / spent, "cpu_us": (_cpu_s(pid) - used) / max(answered, 1) * 1e6}


async def _ask_at_once(port: int, path: str, clients: int, until: float) -> int:
    return sum(await asyncio.gather(*(_keep_asking(port, path, until) for _ in range(clients))))


async def _keep_asking(port: int, path: str, until: float) -> int:
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
    attack, load = report["attack"], report["load"]
    columns = list(attack["before"])
    rows = ["| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    rows += [
        f"| {name} | " + " | ".join(f"{row[column]:,}" for column in columns) + " |" for name, row in attack.items()
    ]
    return "\n".join([*rows, "", *(f"{name}: {value:,}" for name, value in load.items())])


if __name__ == "__main__":
    main()
