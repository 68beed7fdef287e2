"""Writes messages as models do, at random: calls in every dialect, quotes of calls, and both of them damaged."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from harness1.config import Env
from harness1.models.dialects import read_calls
from harness1.records import ToolCall
from harness1.tools.registry import Toolbox

SPECS = Toolbox.of(Env()).specs
SCHEMAS = {spec.name: spec.parameters["properties"] for spec in SPECS}
WORDS = (
    *("river", "Ada Lovelace", "1843", "D1", "D12.3", "Zürich", "川", "👩🏽", "(?i)kelvin.{0,20}", "a, b; c", "[x]"),
    *("true", "7"),
)
HARD = (
    *('say "so"', "a\\d+", "{", "}}", "]", "</tool_call>", "<tool_call>", "\n", "\t", "it's", "```", "\u2028"),
    "<|im_end|>",
)
PROSE = ("I look for it.", "To find it, I search.", "Next: the river.", "First\n\nthen second.", "It's {unclear}.")
ELEMENT = ("<function={name}>\n{values}</function>", "<parameter={key}>\n{value}\n</parameter>\n")
DIALECTS = {
    "hermes": ("", "<tool_call>\n{named}\n</tool_call>", "", "\n", ""),
    "tools": ("<tools>\n", "{named}", "", "\n", "\n</tools>"),
    "bare": ("", "{named}", "", "\n", ""),
    "list": ("[", "{named}", "", ", ", "]"),
    "fenced": ("```json\n", "{named}", "", "\n", "\n```"),
    "doubled": ("", "{{{named}}}", "", "\n", ""),
    "llama": ("<|python_tag|>", "{named}", "", "; ", "<|eom_id|>"),
    "mistral": ("", "[TOOL_CALLS]{name}[ARGS]{args}", "", "", "</s>"),
    "mistral 3": ("[TOOL_CALLS] [", "{named}", "", ", ", "]"),
    "kimi": ("<|tool_calls_section_begin|>", "<|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>{args}"
             "<|tool_call_end|>", "", "", "<|tool_calls_section_end|>"),
    "deepseek": ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{args}<｜tool▁call▁end｜>", "",
                 "\n", "<｜tool▁calls▁end｜>"),
    "harmony": ("", "<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{args}<|call|>", "",
                "<|start|>assistant", ""),
    "compact": ("", "{name} {args}", "", "\n", ""),
    "element": ("<tool_call>\n", *ELEMENT, "\n</tool_call>\n<tool_call>\n", "\n</tool_call>"),
    "untagged": ("", *ELEMENT, "\n", "\n</tool_call>"),
    "invoked": ("<minimax:tool_call>\n", '<invoke name="{name}">\n{values}</invoke>',
                '<parameter name="{key}">{value}</parameter>\n', "\n", "\n</minimax:tool_call>"),
    "keyed": ("", "<tool_call>{name}\n{values}</tool_call>",
              "<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n", "\n", ""),
    "python": ("[", "{name}({values})", "{key}={python}, ", ", ", "]"),
}  # fmt: skip
"""By name: what begins the calls, a call, an argument where each is written by itself, and what stands between and
behind calls. Only the texts of others may hold anything: an argument by itself has no unambiguous spelling of some."""

QUOTES: tuple[Callable[[str], str], ...] = (
    lambda text: f"<think>One could write {text}",
    lambda text: f"{text}\nis what the document says.",
    lambda text: f"It says: “{text}” and more.",
    lambda text: json.dumps({"text": text}),
    lambda text: f'The manual shows "{text.replace(chr(10), " ")}".',
    lambda text: f"```\nThe manual:\n{text}\n```",
    lambda text: "".join(f"> {line}\n" for line in text.splitlines()),
    lambda text: f"{text}\n</think>\nIt is unclear.",
)


def text_of(dice: random.Random, words: Sequence[str]) -> str:
    return " ".join(dice.choice(words) for _ in range(dice.randrange(1, 5))).strip()


def call_of(dice: random.Random, words: Sequence[str]) -> ToolCall:
    """A call of a tool with arguments that fit its schema."""
    name = dice.choice(list(SCHEMAS))
    arguments: dict[str, object] = {}
    for key, schema in SCHEMAS[name].items():
        texts = [text_of(dice, words) for _ in range(dice.randrange(1, 4))]
        kinds = {"string": texts[0], "array": texts, "object": dict.fromkeys(texts, "high")}
        if dice.random() < 0.8:
            arguments[key] = kinds[schema["type"]]
    return ToolCall(name, arguments)


def dumped(dice: random.Random, value: object) -> str:
    return json.dumps(value, ensure_ascii=dice.random() < 0.2, indent=dice.choice((None, None, 1)))


def write(dice: random.Random, template: str, argument: str, call: ToolCall) -> str:
    """Return a call as a dialect writes it; JSON may be encoded twice and more, as models do."""
    arguments: object = call.arguments
    for _ in range(dice.choice((0, 0, 0, 1, 2))):
        arguments = dumped(dice, arguments)
    pair = {"name": call.name, dice.choice(("arguments", "parameters")): arguments}
    values = ""
    for key, value in call.arguments.items():
        is_text = isinstance(value, str)
        raw = value if is_text else json.dumps(value, ensure_ascii=False)
        values += argument.format(key=key, value=raw, python=repr(value) if is_text else raw)
    return template.format(
        name=call.name,
        args=dumped(dice, call.arguments),
        named=dumped(dice, {"type": "function", **pair} if dice.random() < 0.2 else pair),
        values=values.removesuffix(", "),
    )


def written(dice: random.Random) -> tuple[str, tuple[ToolCall, ...], str]:
    """Calls as one message of one dialect, them, and the dialect."""
    dialect = dice.choice(list(DIALECTS))
    begin, template, argument, between, end = DIALECTS[dialect]
    words = WORDS if argument else WORDS + HARD
    calls = tuple(call_of(dice, words) for _ in range(dice.choice((1, 1, 1, 2, 3))))
    return f"{begin}{between.join(write(dice, template, argument, call) for call in calls)}{end}", calls, dialect


def mutated(sequence: Sequence[Any], dice: random.Random) -> list[Any]:
    """A few stretches deleted, doubled, turned round or, in a text, in the other case, and the end cut off."""
    items = list(sequence)
    for _ in range(dice.randrange(1, 4)):
        at, end = sorted(dice.randrange(len(items) + 1) for _ in range(2))
        stretch = items[at : min(end, at + 20)]
        other = [each.swapcase() if isinstance(each, str) else each for each in stretch]
        items[at : at + len(stretch)] = dice.choice(([], stretch * 2, stretch[::-1], other))
    return items[: dice.choice((len(items), len(items), dice.randrange(len(items) + 1)))]


_ESCAPE = re.compile(r"\\(?:[\"\\/bfnrt]|u[0-9a-fA-F]{4})")


def leaves(calls: Sequence[ToolCall]) -> list[str]:
    """The names of calls and all strings in their arguments."""
    found, stack = list[str](), [value for call in calls for value in (call.name, call.arguments)]
    while stack:
        each = stack.pop()
        if isinstance(each, str):
            found.append(each)
        elif isinstance(each, dict | list):
            stack += [*each, *each.values()] if isinstance(each, dict) else each
    return found


def unescaped(text: str, times: int) -> list[str]:
    """A text, and it with its escapes read once, twice and so on: arguments may be JSON inside a JSON string."""
    texts = [text]
    for _ in range(times):
        texts.append(_ESCAPE.sub(lambda found: json.loads(f'"{found[0]}"'), texts[-1]))
    return texts


def invented(text: str, calls: Sequence[ToolCall]) -> list[str]:
    """The names and strings of calls that do not occur in a message, apart from escapes."""
    texts = unescaped(text.replace("｜DSML｜", ""), 3)
    shown = [joined(each) for each in (*texts, texts[0].replace("\\'", "'"))]
    return [leaf for leaf in leaves(calls) if not any(joined(leaf) in text for text in shown)]


def joined(text: str) -> str:
    """A text with pairs of surrogates, which escapes write, as characters; others are replaced."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def draw(count: int, seed: int) -> Counter[str]:
    """Read messages drawn at random, and count them by kind; raise AssertionError at the first that is misread."""
    dice, counts = random.Random(f"{seed}/dialects"), Counter[str]()
    for number in range(count):
        text, calls, dialect = written(dice)
        kind = dice.choice(("whole", "quoted", "damaged", "damaged"))
        if kind == "quoted":
            thoughts = dialect in ("kimi", "deepseek")  # which often leave out the end of a thought
            shown = dice.choice(QUOTES[thoughts:])(text)
            assert read_calls(shown, SPECS).calls == (), (number, dialect, shown)
        else:
            thought = dice.choice(("", "", "<think>So.</think>\n", "So.\n</think>\n\n"))
            shown = thought + dice.choice(("", *(f"{words}\n" for words in PROSE))) + text
            shown += dice.choice(("", "\n", "<|im_end|>", " \n\n"))
            if kind == "whole":
                assert read_calls(shown, SPECS).calls == calls, (number, dialect, shown)
            else:
                shown = "".join(mutated(shown, dice))
                found = read_calls(shown, SPECS, cut=dice.random() < 0.3).calls
                assert invented(shown, found) == [], (number, dialect, shown)
                kind = "damaged, with a call" if found else "damaged, without a call"
        counts[kind] += 1
    return counts
