"""Measure the cost of an environment turn, beside a peer built from the usual parts, on the same hits.

Ours is the whole environment in the default configuration without ranking by evidence, with a real tokenizer, all
hashes, and the turn's line of the record. Times are CPU milliseconds of one process without model and engine: medians
over episodes that share no text, and within each episode over the turns near the reported one that have the same
action.

    python benchmarks/env_turn.py [--text $DATA/2wikimultihopqa] [--evidence] [--ids] [--vocab o200k_base.tiktoken]

With `--text`, hits are passages of a corpus in place of made-up text. `--evidence` also measures the environment with
evidence ranking, leads, and a curated set that follows them; `--ids` also with the token ids of each prompt, joined and
named as for a model of the harmony format; both together, with both. Each stands beside the plain turn and the peer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import _lru_cache_wrapper
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import msgspec
import tiktoken

if not __package__:
    # Run as a script: its neighbours are found beside it.
    sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.peer import Peer
from benchmarks.workload import (
    MODES,
    EncodingCounter,
    EncodingTokenizer,
    Mode,
    Served,
    Workload,
    passages,
    tokenizer,
    workload,
)
from harness1.config import Env, load_config
from harness1.data.open import open_source
from harness1.env.environment import SearchEnv
from harness1.env.render import Context
from harness1.models.chat_format import join_spans
from harness1.models.formats import Harmony
from harness1.records import Episode, Hashes, Status, StopReason, Task, Turn, encode_episode

TURNS = 40
REPORTED = (1, 10, 40)
BESIDE = 2
"""Turns up to this far from a reported turn are measured with it; the first turn is measured alone."""
WARM = 3
"""Turns of another episode before each measured one, so that its first turn does not pay for a cold process."""
HASHES = Hashes("", "", "")
PLAIN = ("env.evidence.rank=false", "env.leads.on=false", "env.auto_populate.by=first", "env.read.by=order")


class Way(NamedTuple):
    """A way of taking a turn: with the mechanisms of ranking by evidence, with the token ids of the prompt."""

    evidence: bool = False
    ids: bool = False

    @property
    def name(self) -> str:
        return "_".join(name for name in self._fields if getattr(self, name)) or "ours"


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure and print; return what `--json` prints."""
    options = _options(arguments)
    encoding = tokenizer(options.vocab)
    flags = [(False, True) if asked else (False,) for asked in (options.evidence, options.ids)]
    ways = [Way(evidence, ids) for evidence in flags[0] for ids in flags[1]]
    report: dict[str, Any] = {"tokenizer": encoding.name, "episodes": options.episodes, "modes": {}}
    for mode in MODES:
        report["modes"][mode] = _compare(_work(options, mode), ways, options.turns, encoding)
    print(json.dumps(report) if options.json else _table(report, ways))
    return report


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="env_turn", description="CPU time of an environment turn, ours and a peer's.")
    parser.add_argument("--episodes", type=int, default=8, help="episodes of each mode; medians are over them")
    parser.add_argument("--turns", type=int, default=TURNS, help="turns of an episode")
    parser.add_argument("--text", help="a corpus whose passages are found, in place of made-up text")
    parser.add_argument("--evidence", action="store_true", help="also with evidence ranking and leads")
    parser.add_argument("--ids", action="store_true", help="also with the token ids of each prompt")
    parser.add_argument("--vocab", type=Path, help="an o200k_base.tiktoken file, in place of a tokenizer trained now")
    parser.add_argument("--json", action="store_true", help="print JSON in place of a table")
    return parser.parse_args(arguments)


def _work(options: argparse.Namespace, mode: Mode) -> list[Workload]:
    if options.text:
        return passages(open_source(options.text), options.turns, mode, options.episodes)
    return [workload(options.turns, mode, seed) for seed in range(options.episodes)]


def _compare(
    work: Sequence[Workload], ways: Sequence[Way], turns: int, encoding: tiktoken.Encoding
) -> list[dict[str, Any]]:
    """Return a row for each reported turn. All take each episode in turn, so that noise affects all."""
    ours: dict[Way, list[tuple[list[float], list[int]]]] = {way: [] for way in ways}
    peers = []
    for number, episode in enumerate(work):
        for way in ways:
            _forget()
            asyncio.run(_ours(replace(work[number - 1], moves=work[number - 1].moves[:WARM]), way, encoding))
            ours[way].append(asyncio.run(_ours(episode, way, encoding)))
        peers.append(_peer(episode, encoding))
    rows = []
    for turn in sorted({*(turn for turn in REPORTED if turn < turns), turns}):
        places = _places(turn, work[0])
        other, other_tokens = (median(run[kind][place] for run in peers for place in places) for kind in (0, 1))
        own = {way: median(run[0][place] for run in ours[way] for place in places) for way in ways}
        plain = own[Way()]
        row = {
            "turn": turn,
            "action": work[0].moves[turn - 1].action.name,
            "ours_ms": round(plain, 3),
            "peer_ms": round(other, 3),
            "ratio": round(other / plain, 2),
            "ours_tokens": round(median(run[1][place] for run in ours[Way()] for place in places)),
            "peer_tokens": round(other_tokens),
        }
        for way in ways[1:]:
            row[f"{way.name}_ms"] = round(own[way], 3)
            row[f"{way.name}_ratio"] = round(own[way] / plain, 2)
            row[f"{way.name}_peer_ratio"] = round(other / own[way], 2)
        rows.append(row)
    return rows


def _forget() -> None:
    """Empty the caches of the memory's functions, which know the texts of an episode once it was played another way."""
    for name, module in list(sys.modules.items()):
        if name.startswith("harness1."):
            for value in vars(module).values():
                if isinstance(value, _lru_cache_wrapper):
                    value.cache_clear()


def _places(turn: int, work: Workload) -> list[int]:
    """Return the turns, from 0, measured for a reported turn: it and the turns near it with the same action."""
    if turn == 1:
        return [0]
    names = [move.action.name for move in work.moves]
    near = range(max(1, turn - 1 - BESIDE), min(len(names), turn + BESIDE))
    return [place for place in near if names[place] == names[turn - 1]]


async def _ours(work: Workload, way: Way, encoding: tiktoken.Encoding) -> tuple[list[float], list[int]]:
    """Return the milliseconds of each turn, and the tokens of the prompt after it."""
    served = Served()
    chat = Harmony(EncodingTokenizer(encoding, Harmony.control)) if way.ids else None
    overrides = [f"env.max_turns={len(work.moves) + 1}", *(() if way.evidence else PLAIN)]
    env = SearchEnv(load_config(None, overrides).env, served, counter=chat or EncodingCounter(encoding))
    await env.reset(Task("workload", work.query))
    times, tokens = [], []
    for move in work.moves:
        served.found = move.found
        begin = time.process_time()
        step = await env.step([move.action], move.reasoning)
        _line(step.turn)
        assert step.context is not None
        if chat is not None:
            _prompt(chat, step.context)
        times.append((time.process_time() - begin) * 1000)
        tokens.append(step.context.budget.used)
    return times, tokens


def _prompt(chat: Harmony, context: Context) -> tuple[list[int], dict[str, tuple[int, ...]]]:
    """Return the ids of a prompt, and by name those of its segments, as a policy hands them to model and record."""
    spans = [*chat.segments(context), chat.prompt_end()]
    return join_spans(spans), {span.key: span.ids for span in spans}


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


def _table(report: dict[str, Any], ways: Sequence[Way]) -> str:
    lines = [f"CPU ms of a turn, medians of {report['episodes']} episodes, tokenizer {report['tokenizer']}"]
    more = "".join(f"{f'+{way.name}':>20}" for way in ways[1:])
    for mode, rows in report["modes"].items():
        lines.append(f"\n{mode:8}{'turn':>5}{'ours':>9}{'peer':>9}{'peer/ours':>11}{'prompt tokens':>22}{more}")
        for row in rows:
            sizes = f"{row['ours_tokens']} / {row['peer_tokens']}"
            measured = f"{row['ours_ms']:9.2f}{row['peer_ms']:9.2f}{row['ratio']:11.1f}{sizes:>22}"
            for way in ways[1:]:
                ratios = (row[f"{way.name}_{kind}"] for kind in ("ms", "ratio", "peer_ratio"))
                measured += "{:8.2f} x{:.2f} /{:4.1f}".format(*ratios)
            lines.append(f"{'':8}{row['turn']:5}{measured}  {row['action']}")
    if more:
        lines.append("\n+: ms, times ours, and how many times as much the peer takes")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
