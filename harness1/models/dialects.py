"""Calls in the text of a message, for servers that return no `tool_calls`: the shapes in which models write them.

Position decides what a call is, because a model also quotes documents, and a document may hold a call. Calls are the
end of a message: behind them stand only blanks, closing tags, fences and control tokens. A call without a tag or a
control token of its own begins a line, and calls a tool that is offered. Nothing is read that follows an open quote,
that stands in a fence with other text, or that is a part of another object; and what comes before the last `</think>`
is a thought. (Spellings of control tokens in documents are broken up before a model sees them: `calls.py`.)
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from harness1.errors import MALFORMED
from harness1.models.calls import LONGEST, MOST_CALLS, clean_name, find_object, read_object, unwrap_calls
from harness1.records import ToolCall
from harness1.tools.tool import ToolSpec

SCANNED = 2 * LONGEST
"""Most characters that are scanned for the ends of objects, which bounds the time of a text full of beginnings."""


class Reading(NamedTuple):
    """What a message says: its thought, the words before its calls, and the calls."""

    thought: str
    words: str
    calls: tuple[ToolCall, ...]


class _Text:
    """A message as it is read: its text, the schemas of the offered tools, and how much may still be scanned."""

    def __init__(self, text: str, specs: Sequence[ToolSpec], cut: bool) -> None:
        self.text, self.cut, self.left = text, cut, SCANNED
        self.schemas = {spec.name: spec.parameters for spec in specs}

    def find_object(self, at: int) -> str | None:
        """Return the object that begins here, if it ends, while something is left to scan."""
        if self.left < 0:
            return None
        body = find_object(self.text, at) if self.text.startswith("{", at) else ""
        self.left -= len(self.text) - at if body is None else len(body)
        return body or None

    def search(self, pattern: re.Pattern[str], at: int) -> re.Match[str] | None:
        """Return the next match, while something is left to scan."""
        found = pattern.search(self.text, at) if self.left >= 0 else None
        self.left -= (found.end() if found else len(self.text)) - at
        return found

    def value(self, at: int, closer: re.Pattern[str]) -> tuple[str | None, int]:
        """Return a value from here to its closing tag, or else to that of its call, and where it ends."""
        found = self.search(closer, at)
        if found is None:
            return None, at
        if found[0]:
            return self.text[at : found.start()], found.end()
        end = _FUNCTION_END.search(self.text, at, found.start())
        stop = end.start() if end else found.start()
        return self.text[at:stop], stop

    def values(self, at: int, key: re.Pattern[str], closer: re.Pattern[str]) -> tuple[dict[str, str], int] | None:
        """Return the values under keys from here on, and where they end; None if one does not end, or for too many."""
        found: dict[str, str] = {}
        while begin := key.match(self.text, at):
            value, at = self.value(begin.end(), closer)
            if value is None or len(found) >= MOST_CALLS:
                return None
            found[begin[1]] = value
        return found, at


Found = tuple[list[ToolCall], int] | None  # the calls of one body and the position after it; None if none begins here

_NAME = r"[A-Za-z_][\w.-]{0,79}"
_SPACE = r"(?:\w{1,20}:)?"
_CALL_TAGS = r"tool_calls?|tools|function_calls?|TOOLCALL"
_CONTROL = r"<[|｜](?=[^<>\s|｜])[^<>|｜\n]{1,40}[|｜]>"
_BRACKETS = r"\[/?(?:TOOL_CALLS|tool_calls?)\]|functools(?=\[)|<\|tool_call>|<tool_call\|>"
_SKIP = re.compile(
    rf"[\s,;]+|```[\w-]*|</?{_SPACE}(?:{_CALL_TAGS}|tool|function|invoke|parameter|param|arg_value)\s*>"
    rf"|{_CONTROL}|{_BRACKETS}|</s>|<end_of_turn>|[\[\]]"
)
"""What stands before, between and behind calls."""
_MARK = re.compile(rf"<{_SPACE}(?:{_CALL_TAGS})>|<[|｜](?:tool|python|START_ACTION)[^<>|｜\n]*[|｜]>|{_BRACKETS}")
"""What says that a call follows."""
_ELEMENT = rf"<{_SPACE}(?:function|invoke)(?:=|\s+name=)"
_START = re.compile(
    rf"(?m){_MARK.pattern}|{_CONTROL}|{_ELEMENT}|\bto=functions\.|(?<=assistant)commentary to=functions\."
    rf"|^```|^[\[{{]|^{_NAME}\s*[({{]"
)
"""Where calls may begin."""
_EXAMPLE = re.compile(rf"{_MARK.pattern}|{_ELEMENT}")
"""What is an example where it stands in a fence: models fence bare JSON alone."""
_HEADER = re.compile(
    r"(?:assistant\s*)?(?:<\|channel\|>\s*)?(?:commentary|analysis|comment|final)?\s*"
    rf"to=(?:functions\.(?={_NAME})|(?!assistant\b)(?={_NAME}[^{{]{{0,80}}<\|message))"
)
_THOUGHT = re.compile(r"</think(?:ing)?>|\[/THINK\]|◁/think▷")
_THINK = re.compile(r"<think(?:ing)?>|\[THINK\]|◁think▷")
_SECTION = re.compile(r"<\|tool_calls?_(?:section_)?begin\|>|<｜tool▁calls?▁begin｜>")
"""Kimi and DeepSeek leave out the end of a thought before these."""
_UNFINISHED = re.compile(rf"\{{|{_ELEMENT}|{_NAME}<arg_key>|<[^<>]*\Z")
_FENCE = re.compile(r"(?m)^[ \t]*```[ \t]*(\S?)")
_CHANNEL = re.compile(rf"<\|start\|>\s*assistant|<\|channel\|>\s*\w+|{_CONTROL}")
_QUOTES = tuple("\"'`“‘«\\")
_LINE = 2_000  # characters of a line before a call in which an open quote is looked for


def read_calls(text: str, specs: Sequence[ToolSpec], cut: bool = False) -> Reading:
    """Return what a message of a model says, of which the last `LONGEST` characters are read, with the calls at its end
    in any of the `DIALECTS`. `cut`: it was cut off at a limit: of several calls, one that is not whole is left out."""
    text = _GEMMA.sub(lambda found: json.dumps(found[1]), _DSML.sub(r"\1", text[-LONGEST:]))
    ends = list(_THOUGHT.finditer(text))
    body = text[ends[-1].end() :] if ends else text
    thought = text[: ends[-1].start()] if ends else ""
    if not ends and (opening := _THINK.match(text.lstrip())):
        section = _SECTION.search(text)
        thought, body = (text[: section.start()], text[section.start() :]) if section else (text, "")
        thought = thought.lstrip()[opening.end() :]
    thought = _THINK.sub("", thought, count=1).strip()
    body = body.strip()
    begin, calls = _last_calls(_Text(body, specs, cut))
    words = _CHANNEL.sub(" ", body[:begin]).strip()
    if _HEADER.match(body, begin):  # of gpt-oss, perhaps without its control tokens
        for end in ("commentary", "analysis", "assistant"):
            words = words.removesuffix(end).strip()
    return Reading(thought, words, tuple(calls))


_DSML = re.compile(r"(</?)[|｜‖]{1,2}DSML[|｜‖]{1,2}")
_GEMMA = re.compile(r'<\|"\|>(.*?)<\|"\|>', re.DOTALL)


def read_message(text: str, thought: str, specs: Sequence[ToolSpec], cut: bool = False) -> Reading:
    """Return what a message says whose server parted thought and text; a server may have taken calls for thought."""
    reading = read_calls(text, specs, cut)
    return reading if text.strip() or not thought else read_calls(f"<think>{thought}", specs, cut)


def text_of(content: Any) -> str:
    """Return the text of a message's content, which some servers divide into parts."""
    parts = content if isinstance(content, list) else [{"text": content}]
    texts = [part.get("text") for part in parts if isinstance(part, dict)]
    return "\n".join(text for text in texts if isinstance(text, str))


def _last_calls(source: _Text) -> tuple[int, list[ToolCall]]:
    """Return where the calls at the end begin, and them; the length and none if there are none."""
    text = source.text
    fences = [(fence.start(), bool(fence[1])) for fence in _FENCE.finditer(text)]
    passed = at = 0
    is_open = False
    while start := _START.search(text, at):
        while passed < len(fences) and fences[passed][0] < start.start():
            is_open = not is_open or fences[passed][1]  # within a fence, one with a name of a language is a text
            passed += 1
        if is_open or _is_quoted(text, start):
            at = start.start() + 1
            continue
        calls, end = _read_run(source, start.start())
        if end == len(text) and calls:
            return start.start(), calls
        at = max(end, start.start() + 1)
    return len(text), []


def _is_quoted(text: str, start: re.Match[str]) -> bool:
    """Return whether a quote is open on the line where something starts, or the line itself is quoted."""
    begin = max(text.rfind("\n", 0, start.start()) + 1, start.start() - _LINE)
    line = text[begin : start.start()]
    if line.lstrip().startswith(">") or line.endswith(_QUOTES) or line.isspace():  # as documents are indented
        return True
    if start[0].startswith(("<|", "<｜")):
        return False
    return any(line.count(quote) % 2 for quote in '"`') or line.count("“") > line.count("”")


def _read_run(source: _Text, begin: int) -> tuple[list[ToolCall], int]:
    """Return the calls from here on, and where something else follows them: at the end of the text, nothing does."""
    text, at, depth, marked, fenced = source.text, begin, 0, False, source.text.startswith("```", begin)
    calls: list[ToolCall] = []
    while at < len(text) and not (fenced and _EXAMPLE.match(text, at)):
        skipped = None if _HEADER.match(text, at) else _SKIP.match(text, at)
        if skipped:
            depth += {"[": 1, "]": -1}.get(skipped[0], 0)
            if depth < 0:
                break
            marked, at = marked or bool(_MARK.match(text, at)), skipped.end()
            continue
        found = next(filter(None, (read(source, at, marked) for read in DIALECTS.values())), None)
        if found is None or not found[0]:
            unfinished = source.cut and calls and _UNFINISHED.match(text, at) and source.find_object(at) is None
            return calls, len(text) if unfinished else at
        calls, at = calls + found[0], found[1]
    return calls[:MOST_CALLS], at


def _read_json(source: _Text, at: int, marked: bool) -> Found:
    """`{"name": ..., "arguments" | "parameters": ...}`, also with doubled braces, single quotes, or without its last
    brace; OpenAI's own shape, and lists in it."""
    text = source.text
    if not text.startswith("{", at):
        return None
    doubled = text.startswith("{{", at)
    body = source.find_object(at + doubled)
    end = at + doubled + len(body or "")
    if body is None:
        closer = None if source.cut else source.search(_CLOSER, at)
        if closer is None:
            return None
        bare = text[at : closer.start()].rstrip()
        body, end = f"{bare}}}", at + len(bare)
        if find_object(body) != body:
            return None
    if doubled and (extra := _BRACE.match(text, end)):
        end = extra.end()
    found = _read_loosely(body) or read_object(_UNDOUBLED.sub(lambda pair: pair[1] or pair[0][0], body))
    return _calls_in(found or {}, source, marked), end


_CLOSER = re.compile(rf"</|{_CONTROL}|```|\Z")
_BRACE = re.compile(r"\s*\}")
_UNDOUBLED = re.compile(r'("[^"\\]*(?:\\.[^"\\]*)*"?)|\{\{|\}\}', re.DOTALL)
_PYTHON = re.compile(
    r"""("[^"\\]*(?:\\.[^"\\]*)*"?)|'([^'\\]*(?:\\.[^'\\]*)*)'?|\b(True|False|None)\b"""
    r"""|\b([A-Za-z_]\w*+)\s*+(?:=(?!=)|:(?=\s*["'\[{\dtfn-]))""",
    re.DOTALL,
)
_LITERALS = {"True": "true", "False": "false", "None": "null"}


def _as_json(text: str) -> str:
    """Return literals of Python as JSON; names before `=` or `:` become keys."""

    def spell(found: re.Match[str]) -> str:
        if found[2] is not None:
            return json.dumps(found[2].replace("\\'", "'"), ensure_ascii=False)
        return found[1] or _LITERALS.get(found[3] or "") or f'"{found[4]}": '

    return _PYTHON.sub(spell, text)


def _read_loosely(body: str) -> dict[str, Any] | None:
    found = read_object(body)
    return read_object(_as_json(body)) if found is None else found


NAMES = ("name", "tool_name", "recipient_name", "function", "tool")
ARGUMENTS = ("arguments", "parameters", "input", "args")
WITHIN = ("tool_calls", "tool_call", "function", "tool")
"""Keys under which an object has its name, its arguments, and whole calls."""


def _calls_in(found: Mapping[str, Any], source: _Text, marked: bool, depth: int = 0) -> list[ToolCall]:
    """Return the calls that an object expresses; a declaration of a tool, which has a schema, expresses none."""
    for key in WITHIN if depth < 2 else ():
        inner: Any = found.get(key)
        listed: list[Any] = inner if isinstance(inner, list) else [inner]
        if listed and all(isinstance(each, dict) for each in listed):
            deeper = [_calls_in(each, source, marked, depth + 1) for each in listed[:MOST_CALLS]]
            return [call for calls in deeper for call in calls] if all(deeper) else []
    name = next((found[key] for key in NAMES if isinstance(found.get(key), str)), "")
    given = [found[key] for key in ARGUMENTS if key in found]
    if not given and not (marked and name in source.schemas):
        return []
    arguments = decode_arguments(given[0] if given else {})
    if arguments is None or ("properties" in arguments and arguments.get("type") == "object"):
        return []
    return _calls_of(name, arguments, source, marked)


def _calls_of(name: str, arguments: dict[str, Any], source: _Text, marked: bool) -> list[ToolCall]:
    name = clean_name(name)
    if name not in source.schemas:
        name = re.sub(r":\d+$", "", name)
    calls = unwrap_calls(name, arguments)
    if not marked and not all(call.name in source.schemas for call in calls):
        return []
    return fit_calls(calls, source.schemas)


_NAMED = re.compile(
    rf"(?:call:|function<｜tool▁sep｜>)?(?:functions\.)?({_NAME}?)(?::\d+)?\s*"
    r"((?:<｜tool▁sep｜>|<\|tool_call_argument_begin\|>|(?:\[CALL_ID\][\w-]{1,64})?\[ARGS\]|:|```(?:json)?|\()?\s*)"
    rf"(?=\{{|{_CONTROL}|\Z)"
)
_PAREN = re.compile(r"\s*\)")


def _read_named(source: _Text, at: int, marked: bool) -> Found:
    """`NAME[ARGS]{...}` of Mistral, `functions.NAME:0<|tool_call_argument_begin|>{...}` of Kimi; of DeepSeek
    `NAME<｜tool▁sep｜>{...}`, with a fence in its third version; `call:NAME{...}` of Gemma; `NAME {...}` of others."""
    head = _NAMED.match(source.text, at)
    if head is None or (not marked and head[1] not in source.schemas):
        return None
    body = source.find_object(head.end())
    if body is None:
        empty = head[2].startswith("<") and not source.text.startswith("{", head.end())
        return (_calls_of(head[1], {}, source, marked), head.end()) if empty else None
    arguments, end = _read_loosely(body), head.end() + len(body)
    if "(" in head[2] and (closer := _PAREN.match(source.text, end)):
        end = closer.end()
    return None if arguments is None else (_calls_of(head[1], arguments, source, marked), end)


_FUNCTION = re.compile(rf"{_ELEMENT}[\"']?({_NAME})[\"']?\s*>\s*")
_PARAMETER = re.compile(
    rf"\s*<{_SPACE}(?:parameter|param)(?:=|\s+name=)[\"']?([^<>\"'=\s]{{1,80}})[\"']?[^<>]{{0,80}}>"
)
_VALUE_END = re.compile(
    rf"</{_SPACE}(?:parameter|param)\s*>|(?={_ELEMENT}|<{_SPACE}(?:parameter|param)(?:=|\s+name=))|\Z"
)
_FUNCTION_END = re.compile(rf"\s*</{_SPACE}(?:function|invoke|{_CALL_TAGS})\s*>")


def _read_element(source: _Text, at: int, marked: bool) -> Found:
    """`<function=NAME><parameter=KEY>VALUE</parameter></function>` of Qwen3-Coder, also without closing tags;
    `<invoke name="NAME"><parameter name="KEY">` of MiniMax, Kimi and DeepSeek 3.2; `<function=NAME>{...}` of Llama."""
    text = source.text
    head = _FUNCTION.match(text, at)
    if head is None:
        return None
    end = head.end()
    if text.startswith("{", end):
        body = source.find_object(end)
        found = read_object(body) if body else None
        return None if found is None else (_calls_of(head[1], found, source, True), end + len(body or ""))
    if (read := source.values(end, _PARAMETER, _VALUE_END)) is None:
        return None
    values, end = read
    if (source.cut or not values) and not _FUNCTION_END.match(text, end):
        return None
    arguments = {name: value.removeprefix("\n").removesuffix("\n") for name, value in values.items()}
    return _calls_of(head[1], arguments, source, True), end


_KEYED = re.compile(rf"({_NAME})\s*(?=<arg_key>|</tool_call>)")
_KEY = re.compile(r"\s*<arg_key>\s*([^<>]{1,80}?)\s*</arg_key>\s*<arg_value>")
_KEY_END = re.compile(r"</arg_value>|(?=<arg_key>)|\Z")


def _read_keyed(source: _Text, at: int, marked: bool) -> Found:
    """`<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>` of GLM."""
    head = _KEYED.match(source.text, at) if marked else None
    read = source.values(head.end(), _KEY, _KEY_END) if head else None
    if head is None or read is None or not _FUNCTION_END.match(source.text, read[1]):
        return None
    return _calls_of(head[1], read[0], source, True), read[1]


_TO = re.compile(
    rf"{_HEADER.pattern}({_NAME})(?:\s|<\|channel\|>|<\|constrain\|>|commentary|analysis|json|code)*(?:<\|message\|>)?\s*"
)


def _read_harmony(source: _Text, at: int, marked: bool) -> Found:
    """`<|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>` of gpt-oss,
    also without its control tokens, which servers leave out."""
    head = _TO.match(source.text, at)
    body = source.find_object(head.end()) if head else None
    arguments = read_object(body) if body else None
    if head is None or body is None or arguments is None:
        return None
    return _calls_of(head[1], arguments, source, True), head.end() + len(body)


_CALLED = re.compile(rf"({_NAME}?)(?:\.call)?\(")
_PARENS = re.compile(r"""'[^'\\]*(?:\\.[^'\\]*)*'?|"[^"\\]*(?:\\.[^"\\]*)*"?|[()]""", re.DOTALL)


def _read_python(source: _Text, at: int, marked: bool) -> Found:
    """`[NAME(KEY="VALUE")]` of Llama 3.2 and 4, and of LFM2; `NAME.call(KEY="VALUE")` of Llama 3.1."""
    text = source.text
    head = _CALLED.match(text, at)
    if head is None or source.left < 0 or (not marked and head[1] not in source.schemas):
        return None
    depth = 1
    for token in _PARENS.finditer(text, head.end()):
        depth += {"(": 1, ")": -1}.get(token[0], 0)
        if not depth:
            source.left -= token.end() - at
            body = "{" + _as_json(text[head.end() : token.start()]) + "}"
            arguments = read_object(body) if find_object(body) == body else None
            return None if arguments is None else (_calls_of(head[1], arguments, source, marked), token.end())
    source.left -= len(text) - at
    return None


DIALECTS: Mapping[str, Callable[[_Text, int, bool], Found]] = {
    "json": _read_json,
    "harmony": _read_harmony,
    "element": _read_element,
    "keyed": _read_keyed,
    "named": _read_named,
    "python": _read_python,
}
"""Readers of one body by the name of its dialect, in the order in which they are tried."""


def decode_arguments(given: Any) -> dict[str, Any] | None:
    """Return arguments that a model wrote: an object, its JSON, or the JSON of its JSON; nothing counts as none. None
    if they are no object."""
    for _ in range(3):
        if not isinstance(given, str):
            break
        if not given.strip():
            return {}
        if (found := read_object(given)) is not None and not given.lstrip().startswith('"'):
            return found
        given = _decode(given)
    return {} if given is None else given if isinstance(given, dict) else None


def fit_calls(calls: Sequence[ToolCall], schemas: Mapping[str, Mapping[str, Any]]) -> list[ToolCall]:
    """Return calls with their arguments fitted to the schemas of their tools, by name."""
    return [ToolCall(call.name, fit_arguments(call.arguments, schemas.get(call.name, {}))) for call in calls]


def fit_arguments(arguments: Mapping[str, Any], parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of a model with the texts decoded that the JSON schema of the tool (`parameters`) wants as
    something else: the JSON (or Python) of an array, an object, a number or a truth value; a bare text where an array
    of texts is wanted is its only element."""
    properties = parameters.get("properties")
    known = properties if isinstance(properties, dict) else {}
    return {
        name: _fit(value, known[name], parameters) if isinstance(value, str) and name in known else value
        for name, value in arguments.items()
    }


def _fit(value: str, schema: Any, root: Mapping[str, Any]) -> Any:
    types = _types(schema, root)
    if not types or "string" in types:
        return value
    found = _decode(value)
    for name, kind in _KINDS.items():
        if name in types and isinstance(found, kind) and not (isinstance(found, bool) and name != "boolean"):
            return found
    if "array" in types:
        items = _types(schema.get("items"), root) if isinstance(schema, dict) else set()
        return [value] * bool(value.strip()) if not items or "string" in items else value
    if not value.strip() and "object" in types:
        return {}
    return None if "null" in types and value.strip() in ("", "null", "None") else value


_KINDS: Mapping[str, Any] = {"array": list, "object": dict, "boolean": bool, "integer": int, "number": (int, float)}


def _types(schema: Any, root: Mapping[str, Any], depth: int = 0) -> set[str]:
    """Return the names of the types that a schema admits; none if it does not say."""
    if not isinstance(schema, dict) or depth > 4:
        return set()
    named = schema.get("type")
    types = {named} if isinstance(named, str) else {each for each in named or () if isinstance(each, str)}
    if isinstance(reference := schema.get("$ref"), str):
        definitions = root.get("$defs")
        meant = definitions.get(reference.rpartition("/")[2]) if isinstance(definitions, dict) else None
        types |= _types(meant, root, depth + 1)
    for each in (*(schema.get("anyOf") or ()), *(schema.get("oneOf") or ())):
        types |= _types(each, root, depth + 1)
    return types | ({"string"} if "enum" in schema and not types else set())


def _decode(text: str) -> Any:
    """Return the value of a JSON or of a Python literal; an undecodable text itself."""
    for each in (text, _as_json(text)) if len(text) <= LONGEST else ():
        try:
            return json.loads(each, strict=False, parse_constant=str)
        except MALFORMED:
            continue
    return text
