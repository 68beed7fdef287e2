"""Fuzz for the parsers of chat formats, to find outputs that make them raise or read a call that nobody wrote.

Outputs are random tokens, random bytes, valid calls, and mutations of these: cut, doubled, swapped, nested, or spliced
with the syntax of every format. The name of the tool and every string of its arguments must occur in the output, apart
from JSON escapes. `lost` counts valid outputs that were not parsed as the one call that they contain.
"""

from __future__ import annotations

import json
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from harness1.config import Env
from harness1.models.chat_format import ChatFormat, Parsed
from harness1.models.tokenizer import split_at_control
from harness1.records import ToolCall
from harness1.tools.registry import Toolbox
from harness1.tools.tool import ToolSpec
from tests.vocabularies import chat_format

KINDS = {"hermes": ("qwen", "chatml"), "compact": ("chatml",), "harmony": ("harmony",)}
"""The tokenizers under which each format is tried, in turn."""
SPECS = Toolbox.of(Env()).specs
NAMES = frozenset(spec.name for spec in SPECS)
DEEP = 10_000
STRANGE_SHARE = 0.002
"""Share of outputs that are huge or deeply nested, which take long."""

WORDS = (
    *("river", "Ada", "D1", "very_high", "汉字", "é", "👩🏽‍🚀", "\n", "\t", '"', "'", "\\", "\\d+", "{", "}"),
    *("[", "]", ",", "<tool_call>", "</tool_call>", "<think>", "</think>", "<|im_end|>", "<|im_start|>", "<|call|>"),
    *("<|end|>", ""),
)
SYNTAX = (
    *(spec.name for spec in SPECS),
    *("{", "}", "[", "]", ":", ",", '"', "'", "\\", "\\u", "\\ud800", "\\u12", "\\/", "\x00", "\n", " ", "```json\n"),
    *("<tool_call>", "</tool_call>", "<think>", "</think>", "<|im_end|>", "<|im_start|>assistant\n", "```"),
    *("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>", "<|x|>"),
    *("analysis", "commentary", "final", " to=", "functions.", "to=functions.", "json", "assistant", "multi_tool_use"),
    *('"name": ', '"arguments": ', '"parameters": ', '"tool_uses": [', '"recipient_name": ', '{"query": "river"}'),
    *("{}", "null", "1e999", "-0", "NaN", "Infinity", "true", "Action: ", "multi_tool_use.parallel", "tool_calls"),
)
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|([\"\\/bfnrt]))")
_ESCAPED = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}


def fuzz(name: str, outputs: int, seed: int = 0) -> dict[str, Any]:
    """Parse a number of outputs; return the counts of what happened, and the first fault if there is one."""
    counts: Counter[str] = Counter(outputs=outputs)
    dice = random.Random(f"{seed}/{name}")
    chats = [chat_format(name, kind) for kind in KINDS[name]]
    begun = time.perf_counter()
    fault = ""
    for number in range(outputs):
        chat = chats[number % len(chats)]
        ids, meant = random_output(chat, dice)
        found = _outcome(chat, ids, meant)
        counts[found] += 1
        if found in ("exceptions", "invented", "lost") and not fault:
            fault = f"{found}: {chat.tokenizer.decode(ids)[:2000]!r}"
    keys = ("outputs", "valid", "errors", "exceptions", "invented", "lost")
    report: dict[str, Any] = {key: counts[key] for key in keys}
    return report | {"seconds": round(time.perf_counter() - begun, 1)} | ({"fault": fault} if fault else {})


def random_output(chat: ChatFormat, dice: random.Random) -> tuple[Sequence[int], ToolCall | None]:
    """Return an output, and the call that it contains if it is still valid."""
    if dice.random() < STRANGE_SHARE:
        return _tokens(chat, dice.choice(STRANGE)(dice)), None
    kind = dice.randrange(10)
    if kind == 0:
        most = dice.choice((2**31, 2000))
        return [dice.randrange(most) for _ in range(dice.randrange(60))], None
    if kind == 1:
        return chat.tokenizer.encode(dice.randbytes(dice.randrange(120)).decode("utf-8", "replace")), None
    if kind == 2:
        return _tokens(chat, "".join(dice.choices(SYNTAX, k=dice.randrange(1, 30)))), None
    meant = random_call(dice)
    ids = chat.format_action(_words(dice) if dice.random() < 0.7 else "", meant)
    if kind == 3:
        return ids, meant
    if kind < 6:
        return _mutated(ids, dice), None
    text = "".join(_mutated(chat.tokenizer.decode(ids), dice))
    for _ in range(dice.randrange(3)):
        at = dice.randrange(len(text) + 1)
        text = text[:at] + dice.choice(SYNTAX) + text[at:]
    return _tokens(chat, text), None


def random_call(dice: random.Random) -> ToolCall:
    """Return a call of one of the tools, with arguments that fit its schema."""
    spec = dice.choice(SPECS)
    required = spec.parameters["required"]
    chosen = {
        name: _value(schema, dice)
        for name, schema in spec.parameters["properties"].items()
        if name in required or dice.random() < 0.6
    }
    return ToolCall(spec.name, chosen)


def invented(chat: ChatFormat, ids: Sequence[int], parsed: Parsed, specs: Sequence[ToolSpec] = SPECS) -> str | None:
    """Return a name or a string of the calls that does not occur in the output; None if all do."""
    if not parsed.actions:
        return None
    texts = [chat.tokenizer.decode(ids)]
    for _ in range(2):  # arguments may be JSON inside a JSON string
        texts.append(_unescaped(texts[-1]))
    for action in parsed.actions:
        if not action.name or (chat.name == "compact" and action.name not in {spec.name for spec in specs}):
            return f"the tool {action.name!r}"
        for leaf in (action.name, *_strings(action.arguments)):
            if not any(leaf in text for text in texts) and not _spelled(leaf, texts):
                return leaf
    return None


def _outcome(chat: ChatFormat, ids: Sequence[int], meant: ToolCall | None) -> str:
    try:
        parsed = chat.parse(ids, SPECS)
        if invented(chat, ids, parsed) is not None:
            return "invented"
    except Exception:  # noqa: BLE001 - the benchmark checks that there is none
        return "exceptions"
    if meant is not None and not _same(chat, parsed.actions, meant):
        return "lost"
    return "valid" if parsed.actions else "errors"


def _same(chat: ChatFormat, actions: Sequence[ToolCall], meant: ToolCall) -> bool:
    """Return True if the one call was read back, as far as the tokenizer keeps characters."""

    def kept(text: str) -> str:
        return chat.tokenizer.decode(chat.tokenizer.encode(text))

    return len(actions) == 1 and kept(json.dumps([actions[0].name, actions[0].arguments], ensure_ascii=False)) == kept(
        json.dumps([meant.name, meant.arguments], ensure_ascii=False)
    )


def _tokens(chat: ChatFormat, text: str) -> list[int]:
    """Tokenize a text in which names of control tokens become those tokens."""
    parts = split_at_control(text, chat.tokenizer.control)
    return [token for part in parts for token in ([part] if isinstance(part, int) else chat.tokenizer.encode(part))]


def _words(dice: random.Random) -> str:
    return " ".join(dice.choices((*WORDS, *SYNTAX[:12]), k=dice.randrange(1, 7)))


def _value(schema: dict[str, Any], dice: random.Random) -> Any:
    match schema["type"]:
        case "array":
            return [_words(dice) for _ in range(dice.randrange(4))]
        case "object":
            return {_words(dice): _words(dice) for _ in range(dice.randrange(3))}
    return _words(dice)


def _mutated(sequence: Sequence[Any], dice: random.Random) -> list[Any]:
    """Apply a few deletions, doublings, swaps and cuts, and, to text, changes of case."""
    items = list(sequence)
    for _ in range(dice.randrange(1, 4)):
        at, other = sorted(dice.randrange(len(items) + 1) for _ in range(2))
        other = min(other, at + 20)
        match dice.randrange(5):
            case 0:
                del items[at:other]
            case 1:
                items[at:at] = items[at:other]
            case 2:
                items[at:other] = reversed(items[at:other])
            case 3:
                items = items[:other] if dice.random() < 0.5 else items
            case _:
                items[at:other] = [each.swapcase() if isinstance(each, str) else each for each in items[at:other]]
    return items


def _strings(value: Any) -> Iterator[str]:
    """Yield all strings in a value, including names of fields."""
    stack = [value]
    while stack:
        each = stack.pop()
        if isinstance(each, str):
            yield each
        elif isinstance(each, dict):
            stack += [*each.keys(), *each.values()]
        elif isinstance(each, list):
            stack += each


def _unescaped(text: str) -> str:
    plain = _ESCAPE.sub(lambda found: chr(int(found[1], 16)) if found[1] else _ESCAPED.get(found[2], found[2]), text)
    return plain.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass") if "\\u" in text else plain


def _spelled(leaf: str, texts: Sequence[str]) -> bool:
    """Return True if a string occurs in a text with each of its characters as itself or as an escape."""
    units = leaf.encode("utf-16-be", "surrogatepass")
    codes = [units[at : at + 2].hex() for at in range(0, len(units), 2)]
    letters = {code: re.escape(chr(int(code, 16))) for code in codes}
    short = {"0008": "b", "000c": "f", "000a": "n", "000d": "r", "0009": "t", "0022": '"', "002f": "/", "005c": r"\\"}
    pattern = "".join(
        rf"(?:{letters[code]}|\\u(?i:{code})" + (rf"|\\{short[code]}" if code in short else "") + ")" for code in codes
    )
    return any(re.search(pattern, _halves(text)) for text in texts)


def _halves(text: str) -> str:
    """Return a text with each character beyond the first plane as a surrogate pair, as escapes write it."""
    units = text.encode("utf-16-be", "surrogatepass")
    return "".join(chr(int.from_bytes(units[at : at + 2], "big")) for at in range(0, len(units), 2))


def _nested(dice: random.Random) -> str:
    brackets = dice.choice(('{"a":', "[", "{", '{"name": "parallel", "arguments": {"tool_uses": ['))
    return f'<tool_call>{{"name": "curate", "arguments": {brackets * DEEP}'


def _closed(dice: random.Random) -> str:
    depth = dice.randrange(1, DEEP)
    return f'curate {{"add_ids": {"[" * depth}"D1"{"]" * depth}}}'


def _many(dice: random.Random) -> str:
    lines = ('curate {"add_ids": [\n', '<tool_call>{"name"', "curate {}\n", "```", "```json ", "<think>", "  ")
    line = dice.choice(lines)
    return line * (30_000 // len(line)) + dice.choice(("", "x", "{}"))


def _number(dice: random.Random) -> str:
    return f'<tool_call>{{"name": "curate", "arguments": {{"add_ids": {"9" * dice.randrange(1, DEEP)}}}}}</tool_call>'


STRANGE: tuple[Callable[[random.Random], str], ...] = (_nested, _closed, _many, _number)
