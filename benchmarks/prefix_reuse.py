"""Measure the cost of each rendering order on a server with a prefix cache, and the number of training rows.

Episodes are recorded over a synthetic world, and the same actions and answers are replayed under every order. A call's
*prefilled* tokens are those after the longest common prefix with the previous prompt and its output, which a prefix
cache holds. A *row* is a chain of turns in which every prompt with its output is a token prefix of the next prompt.

    python benchmarks/prefix_reuse.py [--vocab o200k_base.tiktoken] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any, Literal

import msgspec
import tiktoken

if not __package__:
    # Run as a script: its neighbours are found beside it.
    sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.workload import MESSAGE_TOKENS, EncodingCounter, tokenizer
from harness1.config import Env, Index, Rendering
from harness1.data.world import SyntheticWorld
from harness1.env.environment import SearchEnv
from harness1.env.pieces import Piece
from harness1.env.render import Context
from harness1.env.view import View
from harness1.episodes.rollout import Nowhere
from harness1.memory.working_memory import WorkingMemory
from harness1.records import TAGS, Task, ToolCall, Turn
from harness1.retrieval.build import build_index
from harness1.retrieval.index import open_index
from harness1.retrieval.protocol import Retriever
from harness1.retrieval.retriever import EmbeddedRetriever

WORLD_SIZE = 2000
RESERVE = 2048
LIMITS = (30_720, 8_192)
"""Prompt limits, in tokens."""
ORDERS: tuple[Literal["paper", "stable_first", "epoch"], ...] = ("paper", "stable_first", "epoch")
SCRIPT = (
    *("fan_out_search", "curate", "search_corpus", "read_document", "search_corpus", "verify", "curate"),
    *("fan_out_search", "search_corpus", "curate", "review_docs", "search_corpus", "grep_corpus", "verify"),
    *("search_corpus", "curate", "read_document", "search_corpus"),
)
"""The tools of an episode, in a repeating cycle."""


@dataclass(frozen=True)
class Record:
    """An episode as it is replayed: its query, and its turns with all answers from outside."""

    query: str
    turns: tuple[Turn, ...]


@dataclass(frozen=True)
class Cost:
    """The cost of one episode under one order; `prompts` are the tokens of each call."""

    prompts: tuple[int, ...]
    prefilled: int
    dropped: int
    rows: int
    epochs: int
    shown: tuple[str, ...]
    """The text of every observation."""


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure and print; return what `--json` prints."""
    options = _options(arguments)
    encoding = tokenizer(options.vocab)
    world = SyntheticWorld(options.world)
    tasks = world.tasks["test"][: options.episodes]
    report: dict[str, Any] = {"tokenizer": encoding.name, "episodes": len(tasks), "turns": options.turns, "limits": {}}
    with tempfile.TemporaryDirectory() as folder:
        build_index(world.documents(), Path(folder), Index())
        retriever = EmbeddedRetriever(open_index(Path(folder)))
        for limit in LIMITS:
            config = _config(limit, "paper", options.turns)
            records = [asyncio.run(record(config, retriever, task, options.turns, encoding)) for task in tasks]
            report["limits"][limit] = _compare(records, limit, options.turns, encoding)
    print(json.dumps(report) if options.json else _table(report))
    return report


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="prefix_reuse", description="Prefix reuse of the three rendering orders.")
    parser.add_argument("--episodes", type=int, default=5)
    parser.add_argument("--turns", type=int, default=20, help="turns of an episode")
    parser.add_argument("--world", type=int, default=WORLD_SIZE, help="documents of the synthetic world")
    parser.add_argument("--vocab", type=Path, help="an o200k_base.tiktoken file, in place of a tokenizer trained now")
    parser.add_argument("--json", action="store_true", help="print JSON in place of a table")
    return parser.parse_args(arguments)


def _config(limit: int, order: Literal["paper", "stable_first", "epoch"], turns: int) -> Env:
    window = limit + RESERVE
    rendering = Rendering(order=order)
    return Env(max_turns=turns + 1, context_window=window, generation_reserve=RESERVE, rendering=rendering)


async def record(config: Env, retriever: Retriever, task: Task, turns: int, encoding: tiktoken.Encoding) -> Record:
    """Play the script over a corpus, with arguments drawn from what is visible."""
    env = SearchEnv(config, retriever, counter=EncodingCounter(encoding))
    rng = random.Random(task.task_id)
    context = await env.reset(task.public())
    played: list[Turn] = []
    for turn in range(turns):
        assert context is not None
        action = _action(SCRIPT[turn % len(SCRIPT)], context.view, rng)
        step = await env.step([action], _words(context.view, rng, rng.randint(60, 90)))
        played.append(step.turn)
        context = step.context
    return Record(task.query, tuple(played))


def _action(tool: str, view: View, rng: random.Random) -> ToolCall:
    """Return a call of a tool on the documents that the last turns showed."""
    hits = [hit.document.handle for turn in sorted(view.hits) for hit in view.hits[turn]]
    known = list(dict.fromkeys(hits[-20:] or list(view.documents)))
    match tool:
        case "fan_out_search":
            return ToolCall(tool, {"queries": [_words(view, rng, 6) for _ in range(rng.randint(2, 4))]})
        case "search_corpus":
            return ToolCall(tool, {"query": _words(view, rng, 8)})
        case "grep_corpus":
            return ToolCall(tool, {"pattern": _words(view, rng, 1)})
        case "curate":
            add = rng.sample(known, min(len(known), 4))
            remove = [entry.handle for entry in view.curated[-2:]]
            tags = {handle: rng.choice(TAGS) for handle in add}
            return ToolCall(tool, {"add_ids": add, "remove_ids": remove, "importance": tags})
        case "read_document":
            return ToolCall(tool, {"doc_id": rng.choice(known)})
        case "verify":
            return ToolCall(tool, {"doc_ids": rng.sample(known, min(len(known), 4)), "claim": _words(view, rng, 12)})
        case _:
            return ToolCall(tool, {"doc_ids": rng.sample(known, min(len(known), 3))})


def _words(view: View, rng: random.Random, count: int) -> str:
    """Return words of the question and of some visible documents."""
    documents = list(view.documents.values())
    texts = [view.query, *(document.text for document in rng.sample(documents, min(len(documents), 3)))]
    words = [word.strip(".,;()") for word in " ".join(texts).split()]
    return " ".join(rng.choices([word for word in words if word.isalpha()], k=count))


def replay(record: Record, config: Env, encoding: tiktoken.Encoding) -> Cost:
    """Render a recorded episode under a configuration, and count."""
    chat = Format(encoding)
    env = SearchEnv(config, Nowhere("", "document"), counter=EncodingCounter(encoding))
    context = env.begin(WorkingMemory.empty(record.query, "document"))
    cached: list[int] = []
    prompts, shown, epochs = [], [], set()
    prefilled = dropped = rows = 0
    for turn in record.turns:
        assert context is not None
        prompt = chat.prompt(context)
        assert len(prompt) <= config.prompt_limit
        common = _common_prefix(cached, prompt)
        prefilled += len(prompt) - common
        rows += common < len(cached) or not cached
        dropped += context.budget.dropped
        epochs.add(context.epoch_start)
        prompts.append(len(prompt))
        context = env.replay(turn).context
        last = env.state.turns[-1]
        shown.append("".join(piece.text for piece in (last.head, *last.hits)))
        cached = prompt + chat.output(last.action)
    return Cost(tuple(prompts), prefilled, dropped, rows, len(epochs), tuple(shown))


class Format:
    """A plain chat format: consecutive pieces of one role form a message, which is enclosed in marks.

    The ids of a piece are those of its text alone; marks are ids beyond the vocabulary.
    """

    def __init__(self, encoding: tiktoken.Encoding) -> None:
        self.encoding = encoding
        self._known: dict[str, list[int]] = {}
        names = ("start", "end", "break", "system", "user", "assistant", "tool")
        self._marks = {name: encoding.n_vocab + place for place, name in enumerate(names)}

    def prompt(self, context: Context) -> list[int]:
        """Return the ids of a context up to the beginning of the policy's output."""
        ids = self.encoding.encode_ordinary(msgspec.json.encode(context.tools).decode())
        for role, pieces in _messages(context.pieces):
            ids += [*self._header(role), *(token for piece in pieces for token in self._ids(piece)), self._marks["end"]]
        return ids + self._header("assistant")

    def output(self, action: Piece) -> list[int]:
        """Return the policy's output: its action, and the end of the message."""
        return [*self._ids(action), self._marks["end"]]

    def _header(self, role: str) -> list[int]:
        header = [self._marks["start"], self._marks[role], self._marks["break"]]
        assert len(header) + 1 == MESSAGE_TOKENS
        return header

    def _ids(self, piece: Piece) -> list[int]:
        if piece.key not in self._known:
            self._known[piece.key] = self.encoding.encode_ordinary(piece.text)
        return self._known[piece.key]


def _messages(pieces: Sequence[Piece]) -> Iterator[tuple[str, list[Piece]]]:
    """Yield consecutive pieces of one role; an output of the policy is a separate message."""
    open_message: list[Piece] = []
    for piece in pieces:
        if open_message and (piece.role != open_message[0].role or piece.turn_ref is not None):
            yield open_message[0].role, open_message
            open_message = []
        open_message.append(piece)
    if open_message:
        yield open_message[0].role, open_message


def _common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _compare(
    records: Sequence[Record], limit: int, turns: int, encoding: tiktoken.Encoding
) -> dict[str, dict[str, float]]:
    """Return the mean costs of each order. The observations are the same under all orders."""
    costs = {order: [replay(each, _config(limit, order, turns), encoding) for each in records] for order in ORDERS}
    assert all(
        cost.shown == paper.shown for order in ORDERS for cost, paper in zip(costs[order], costs["paper"], strict=True)
    )
    base = mean(cost.prefilled for cost in costs["paper"])
    return {
        order: {
            "prompt_tokens": round(mean(mean(cost.prompts) for cost in own)),
            "prefilled_tokens": round(mean(cost.prefilled for cost in own)),
            "ratio_to_paper": round(mean(cost.prefilled for cost in own) / base, 3),
            "dropped_per_call": round(mean(cost.dropped for cost in own) / turns, 2),
            "epochs": mean(cost.epochs for cost in own) if order == "epoch" else 0,
            "rows": mean(cost.rows for cost in own),
        }
        for order, own in costs.items()
    }


def _table(report: dict[str, Any]) -> str:
    head = f"Means over {report['episodes']} episodes of {report['turns']} turns, tokenizer {report['tokenizer']}"
    lines = [head]
    for limit, orders in report["limits"].items():
        columns = ("prompt", "prefilled", "to paper", "dropped/call", "epochs", "rows")
        lines.append(f"\nlimit {limit:6}" + "".join(f"{column:>14}" for column in columns))
        for order, row in orders.items():
            lines.append(f"{order:12}" + "".join(f"{value:14g}" for value in row.values()))
    return "\n".join(lines)


if __name__ == "__main__":
    main()
