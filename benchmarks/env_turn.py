"""Measure the cost of an environment turn, beside a peer built from the usual parts, on the same hits.

Ours is the whole environment with every mechanism on, a real tokenizer, all hashes, and the turn's line of the
record. Times are CPU milliseconds of one process without model and engine: medians over episodes that share no text,
and within each episode over the turns near the reported one that have the same action.

    python benchmarks/env_turn.py [--vocab o200k_base.tiktoken] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import tiktoken

if not __package__:
    # Run as a script: its neighbours are found beside it.
    sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.peer import Peer
from benchmarks.tokenizer import EncodingCounter, tokenizer
from benchmarks.workload import MODES, Served, Workload, workload
from harness1.config import Env
from harness1.env.environment import SearchEnv
from harness1.records import Episode, Hashes, Status, StopReason, Task, Turn, encode_episode

TURNS = 40
REPORTED = (1, 10, 40)
BESIDE = 2
"""Turns up to this far from a reported turn are measured with it; the first turn is measured alone."""
HASHES = Hashes("", "", "")


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure and print; return what `--json` prints."""
    options = _options(arguments)
    encoding = tokenizer(options.vocab)
    report: dict[str, Any] = {"tokenizer": encoding.name, "episodes": options.episodes, "modes": {}}
    for mode in MODES:
        work = [workload(options.turns, mode, seed) for seed in range(options.episodes)]
        report["modes"][mode] = _compare(work, options.turns, encoding)
    print(json.dumps(report) if options.json else _table(report))
    return report


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="env_turn", description="CPU time of an environment turn, ours and a peer's.")
    parser.add_argument("--episodes", type=int, default=8, help="episodes of each mode; medians are over them")
    parser.add_argument("--turns", type=int, default=TURNS, help="turns of an episode")
    parser.add_argument("--vocab", type=Path, help="an o200k_base.tiktoken file, in place of a tokenizer trained now")
    parser.add_argument("--json", action="store_true", help="print JSON in place of a table")
    return parser.parse_args(arguments)


def _compare(work: Sequence[Workload], turns: int, encoding: tiktoken.Encoding) -> list[dict[str, Any]]:
    """Return a row for each reported turn. Ours and the peer take the episodes in turn, so that noise affects both."""
    ours, peers = [], []
    for episode in work:
        ours.append(asyncio.run(_ours(episode, encoding)))
        peers.append(_peer(episode, encoding))
    rows = []
    for turn in sorted({*(turn for turn in REPORTED if turn < turns), turns}):
        places = _places(turn, work[0])
        own, other, own_tokens, other_tokens = (
            median(run[kind][place] for run in runs for place in places) for kind in (0, 1) for runs in (ours, peers)
        )
        rows.append(
            {
                "turn": turn,
                "action": work[0].moves[turn - 1].action.name,
                "ours_ms": round(own, 3),
                "peer_ms": round(other, 3),
                "ratio": round(other / own, 2),
                "ours_tokens": round(own_tokens),
                "peer_tokens": round(other_tokens),
            }
        )
    return rows


def _places(turn: int, work: Workload) -> list[int]:
    """Return the turns, from 0, measured for a reported turn: it and the turns near it with the same action."""
    if turn == 1:
        return [0]
    names = [move.action.name for move in work.moves]
    near = range(max(1, turn - 1 - BESIDE), min(len(names), turn + BESIDE))
    return [place for place in near if names[place] == names[turn - 1]]


async def _ours(work: Workload, encoding: tiktoken.Encoding) -> tuple[list[float], list[int]]:
    """Return the milliseconds of each turn, and the tokens of the prompt after it."""
    served = Served()
    env = SearchEnv(Env(max_turns=len(work.moves) + 1), served, counter=EncodingCounter(encoding))
    await env.reset(Task("workload", work.query))
    times, tokens = [], []
    for move in work.moves:
        served.found = move.found
        begin = time.process_time()
        step = await env.step([move.action], move.reasoning)
        _line(step.turn)
        times.append((time.process_time() - begin) * 1000)
        assert step.context is not None
        tokens.append(step.context.budget.used)
    return times, tokens


def _line(turn: Turn) -> bytes:
    """Return the turn's share of the episode's line, as a line of its own."""
    task = Task("workload", "")
    status, stop = Status.COMPLETED, StopReason.END_SEARCH
    return encode_episode(
        Episode(episode_id="", task=task, turns=(turn,), stop_reason=stop, status=status, hashes=HASHES)
    )


def _peer(work: Workload, encoding: tiktoken.Encoding) -> tuple[list[float], list[int]]:
    env = Env()
    renderer = SearchEnv(env, Served()).renderer
    static = (renderer.static.text, msgspec.json.encode(renderer.toolbox.specs).decode())
    peer = Peer(work.query, static, env, encoding)
    times, tokens = [], []
    for move in work.moves:
        begin = time.process_time()
        tokens.append(peer.step(move))
        times.append((time.process_time() - begin) * 1000)
    return times, tokens


def _table(report: dict[str, Any]) -> str:
    lines = [f"CPU ms of a turn, medians of {report['episodes']} episodes, tokenizer {report['tokenizer']}"]
    for mode, rows in report["modes"].items():
        lines.append(f"\n{mode:8}{'turn':>5}{'ours':>9}{'peer':>9}{'peer/ours':>11}{'prompt tokens':>22}")
        for row in rows:
            sizes = f"{row['ours_tokens']} / {row['peer_tokens']}"
            measured = f"{row['ours_ms']:9.2f}{row['peer_ms']:9.2f}{row['ratio']:11.1f}{sizes:>22}"
            lines.append(f"{'':8}{row['turn']:5}{measured}  {row['action']}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
