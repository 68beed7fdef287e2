"""Writes messages as models do, at random: calls in every dialect, quotes of calls, and both of them damaged."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Callable, Sequence

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


def named(dice: random.Random, call: ToolCall) -> str:
    arguments: object = call.arguments
    for _ in range(dice.choice((0, 0, 0, 1, 2))):
        arguments = dumped(dice, arguments)
    pair = {"name": call.name, dice.choice(("arguments", "parameters")): arguments}
    return dumped(dice, {"type": "function", **pair} if dice.random() < 0.2 else pair)


def raw(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def element(dice: random.Random, call: ToolCall) -> str:
    values = "".join(f"<parameter={key}>\n{raw(value)}\n</parameter>\n" for key, value in call.arguments.items())
    return f"<function={call.name}>\n{values}</function>"


def invoked(dice: random.Random, call: ToolCall) -> str:
    values = "".join(f'<parameter name="{key}">{raw(value)}</parameter>\n' for key, value in call.arguments.items())
    return f'<invoke name="{call.name}">\n{values}</invoke>'


def keyed(dice: random.Random, call: ToolCall) -> str:
    pairs = (
        f"<arg_key>{key}</arg_key>\n<arg_value>{raw(value)}</arg_value>\n" for key, value in call.arguments.items()
    )
    return f"<tool_call>{call.name}\n{''.join(pairs)}</tool_call>"


def pythonic(dice: random.Random, call: ToolCall) -> str:
    values = (
        f"{key}={raw(value) if not isinstance(value, str) else repr(value)}" for key, value in call.arguments.items()
    )
    return f"{call.name}({', '.join(values)})"


Write = Callable[[random.Random, ToolCall], str]
ARGS = lambda dice, call: dumped(dice, call.arguments)  # noqa: E731
DIALECTS: dict[str, tuple[str, Write, str, str, bool]] = {
    "hermes": ("", lambda dice, call: f"<tool_call>\n{named(dice, call)}\n</tool_call>", "\n", "", True),
    "tools": ("<tools>\n", named, "\n", "\n</tools>", True),
    "bare": ("", named, "\n", "", True),
    "list": ("[", named, ", ", "]", True),
    "fenced": ("```json\n", named, "\n", "\n```", True),
    "doubled": ("", lambda dice, call: f"{{{named(dice, call)}}}", "\n", "", True),
    "llama": ("<|python_tag|>", named, "; ", "<|eom_id|>", True),
    "mistral": ("", lambda dice, call: f"[TOOL_CALLS]{call.name}[ARGS]{ARGS(dice, call)}", "", "</s>", True),
    "mistral 3": ("[TOOL_CALLS] [", named, ", ", "]", True),
    "kimi": (
        "<|tool_calls_section_begin|>",
        lambda dice, call: (
            f"<|tool_call_begin|>functions.{call.name}:0<|tool_call_argument_begin|>{ARGS(dice, call)}<|tool_call_end|>"
        ),
        "",
        "<|tool_calls_section_end|>",
        True,
    ),
    "deepseek": (
        "<｜tool▁calls▁begin｜>",
        lambda dice, call: f"<｜tool▁call▁begin｜>{call.name}<｜tool▁sep｜>{ARGS(dice, call)}<｜tool▁call▁end｜>",
        "\n",
        "<｜tool▁calls▁end｜>",
        True,
    ),
    "harmony": (
        "",
        lambda dice, call: (
            f"<|channel|>commentary to=functions.{call.name} <|constrain|>json<|message|>{ARGS(dice, call)}<|call|>"
        ),
        "<|start|>assistant",
        "",
        True,
    ),
    "compact": ("", lambda dice, call: f"{call.name} {ARGS(dice, call)}", "\n", "", True),
    "element": ("<tool_call>\n", element, "\n</tool_call>\n<tool_call>\n", "\n</tool_call>", False),
    "untagged": ("", element, "\n", "\n</tool_call>", False),
    "invoked": ("<minimax:tool_call>\n", invoked, "\n", "\n</minimax:tool_call>", False),
    "keyed": ("", keyed, "\n", "", False),
    "python": ("[", pythonic, ", ", "]", False),
}
"""By name: what begins the calls, how one is written, what stands between and behind them, and whether their texts may
hold anything: in others, some texts have no unambiguous spelling."""

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


def written(dice: random.Random) -> tuple[str, tuple[ToolCall, ...], str]:
    """Calls as one message of one dialect, them, and the dialect."""
    dialect = dice.choice(list(DIALECTS))
    begin, write, between, end, anything = DIALECTS[dialect]
    words = WORDS + HARD if anything else WORDS
    calls = tuple(call_of(dice, words) for _ in range(dice.choice((1, 1, 1, 2, 3))))
    return f"{begin}{between.join(write(dice, call) for call in calls)}{end}", calls, dialect


def damaged(dice: random.Random, text: str) -> str:
    for _ in range(dice.randrange(1, 4)):
        at, end = sorted(dice.randrange(len(text) + 1) for _ in range(2))
        stretch = text[at : min(end, at + 20)]
        other = dice.choice(("", stretch * 2, stretch[::-1], stretch.swapcase(), text[:at][-9:]))
        text = f"{text[:at]}{other}{text[at + len(stretch) :]}"
    return text[: dice.choice((len(text), len(text), dice.randrange(len(text) + 1)))]


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
                shown = damaged(dice, shown)
                found = read_calls(shown, SPECS, cut=dice.random() < 0.3).calls
                assert invented(shown, found) == [], (number, dialect, shown)
                kind = "damaged, with a call" if found else "damaged, without a call"
        counts[kind] += 1
    return counts
