"""Grammars of valid calls, in the EBNF of `xgrammar`, with strings bounded in words: every output under a grammar ends.

Bounds in characters would be stricter, but then a token's mask takes 230 ms over a vocabulary of 49,152, not 0.2.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness1.errors import InfrastructureFault, UsageError, optional
from harness1.models.backend import Grammar
from harness1.plain import digest
from harness1.tools.tool import ToolSpec, one_line

if TYPE_CHECKING:
    from torch import Tensor


STRING = 24  # most words of a string argument
ITEMS = 8  # most items of a list or a mapping
THOUGHT = 32  # most words of reasoning before a call, on one line
DEPTH = 6  # most levels of lists, mappings and choices within an argument

_BASE = f"""\
thought ::= (said (" " said){{0,{THOUGHT - 1}}} "\\n")?
said ::= [^ \\n{{}}<>]+
string ::= "\\"" word (" " word){{0,{STRING - 1}}} "\\""
word ::= char+
char ::= [^ "\\\\\\x00-\\x1f] | "\\\\" ["\\\\/bfnrt] | "\\\\u00" [01] [0-9a-f]
integer ::= "-"? ("0" | [1-9] [0-9]{{0,14}})
number ::= integer ("." [0-9]{{1,15}})?
boolean ::= "true" | "false"
null ::= "null"
"""
_SCALARS = ("string", "integer", "number", "boolean", "null")  # JSON schema types that are each a rule above
_SHAPES = {"type", "properties", "required", "additionalProperties", "maxProperties", "items", "minItems", "maxItems"}
"""JSON schema keywords that shape the rule of a type."""
_NOTES = {"title", "description", "default", "examples", "deprecated", "format", "$schema", "$comment"}
_SILENT = _NOTES | {"minLength", "maxLength", "$defs", "definitions"}
"""Keywords that change no rule: notes, targets of references, and lengths in characters, since words are bounded."""


def make_grammar(root: str, rules: str) -> Grammar:
    """Return a grammar whose root may use `thought` and the rules of `arguments_rules`."""
    ebnf = f"root ::= {root}\n{_BASE}{rules}"
    return Grammar(ebnf, digest(ebnf))


def literal(text: Any) -> str:
    """Return an expression that matches exactly this text; of any other value, its JSON."""
    return json.dumps(text, ensure_ascii=False)


def arguments_rules(specs: Sequence[ToolSpec]) -> str:
    """Return a rule `args_NAME` for each tool: its arguments as `json.dumps` writes them, in schema order."""
    rules, arguments = _Rules(), dict[str, str]()
    for spec in specs:
        try:
            # Without properties, a schema allows no arguments.
            arguments[f"args_{spec.name}"] = rules.value({"type": "object", "properties": {}, **spec.parameters}, 0)
        except UsageError as error:
            raise UsageError(f"there is no grammar for the tool {one_line(spec.name)}: {error}") from error
    lines = [*arguments.items(), *((name, body) for body, name in rules.names.items())]
    return "".join(f"{name} ::= {body}\n" for name, body in lines)


class _Rules:
    """Grammar rules for JSON schemas. Equal rules share a name, so the text grows no faster than the schemas."""

    def __init__(self) -> None:
        self.names: dict[str, str] = {}

    def _name(self, body: str) -> str:
        return self.names.setdefault(body, f"rule{len(self.names)}")

    def value(self, schema: Any, depth: int) -> str:
        if not isinstance(schema, Mapping) or depth > DEPTH:
            raise UsageError(f"it contains a schema that is not an object or nests more than {DEPTH} levels")
        keys, kind = schema.keys() - _SILENT, schema.get("type")
        if keys - {"type"} == {"const"}:
            return literal(literal(schema["const"]))
        if keys - {"type"} == {"enum"}:
            choices = [literal(literal(each)) for each in schema["enum"]]
        elif keys == {"anyOf"}:
            choices = [self.value(each, depth + 1) for each in schema["anyOf"]]
        elif not keys <= _SHAPES:
            raise UsageError(f"its schema has {', '.join(sorted(keys - _SHAPES))}")
        elif isinstance(kind, list):
            choices = [self.value({**schema, "type": each}, depth + 1) for each in dict.fromkeys(kind)]
        else:
            return self._one(schema, kind or ("object" if "properties" in keys else "string"), depth)
        if not choices:
            raise UsageError("its schema has an empty choice")
        return self._name(" | ".join(choices))

    def _one(self, schema: Mapping[str, Any], kind: Any, depth: int) -> str:
        if kind in _SCALARS:
            return str(kind)
        if kind == "array":
            item = self.value(schema.get("items", {}), depth + 1)
            return self._name(f'"[" {_several(item, schema.get("minItems", 0), schema.get("maxItems", ITEMS))} "]"')
        if kind != "object":
            raise UsageError(f"its schema has the type {json.dumps(kind)}")
        if "properties" in schema:
            return self._name(f'"{{" {self._properties(schema, depth)} "}}"')
        others = schema.get("additionalProperties", True)
        pair = f'string ": " {self.value({} if others is True else others, depth + 1)}' if others is not False else ""
        return self._name(f'"{{" {_several(pair, 0, schema.get("maxProperties", ITEMS) if pair else 0)} "}}"')

    def _properties(self, schema: Mapping[str, Any], depth: int) -> str:
        """Return an expression for the properties; their rules are built from the last to the first."""
        required = schema.get("required", [])
        properties = {**schema["properties"], **{name: {} for name in required if name not in schema["properties"]}}
        later = first = '""'
        for name, each in reversed(properties.items()):
            key = literal(name) + ": "
            taken = f"{self.value(each, depth + 1)} {later}"
            skipped = ("", "") if name in required else (f" | {first}", f" | {later}")
            first = self._name(f"{literal(key)} {taken}{skipped[0]}")
            later = self._name(f"{literal(', ' + key)} {taken}{skipped[1]}")
        return first


def _several(item: str, least: int, most: int) -> str:
    """Match `least` to `most` items, or to `ITEMS` if that is fewer."""
    most = min(most, ITEMS)
    if not 0 <= least <= most:
        raise UsageError(f"its schema has a list of at least {least} items, but at most {most} are supported")
    if not most:
        return '""'
    return f'({item} (", " {item}){{{max(least - 1, 0)},{most - 1}}}){"" if least else "?"}'


COMPILED_BYTES = 64 << 20  # size up to which compiled grammars are cached, rather than compiled for every call
STOP_SETS = 4  # sets of stop tokens whose compilers are cached, least recently used dropped first


class GrammarCompiler:
    """A compiler by `xgrammar` for the tokenizer in a model's folder, whose logits are `vocabulary` wide."""

    def __init__(self, folder: Path, vocabulary: int) -> None:
        with optional("grammar"):
            import xgrammar
        from transformers import AutoTokenizer

        try:
            self._tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            raise UsageError(f"{folder} has no tokenizer that a grammar can be compiled for: {error}") from error
        self._xgrammar, self._vocabulary = xgrammar, vocabulary
        self._compiler = lru_cache(STOP_SETS)(self._new_compiler)

    def start(self, grammar: Grammar, stop_ids: Sequence[int]) -> GrammarState:
        """Return the state at the beginning of an output, which a stop token ends only where the grammar may end."""
        if not stop_ids:
            raise UsageError("an output with a grammar needs a stop token: nothing else can end it")
        try:
            compiled = self._compiler(tuple(stop_ids)).compile_grammar(grammar.ebnf)
        except (RuntimeError, ValueError) as error:
            raise UsageError(f"the grammar {grammar.digest} does not compile: {error}") from error
        return GrammarState(self._xgrammar.GrammarMatcher(compiled), self._vocabulary)

    def _new_compiler(self, stop_ids: tuple[int, ...]) -> Any:
        # Without stop tokens of its own, those that the tokenizer names would be allowed anywhere.
        options: dict[str, Any] = {"vocab_size": self._vocabulary, "stop_token_ids": list(stop_ids)}
        info = self._xgrammar.TokenizerInfo.from_huggingface(self._tokenizer, **options)
        return self._xgrammar.GrammarCompiler(info, max_threads=1, cache_limit_bytes=COMPILED_BYTES)

    def masks(self, grammar: Grammar, stop_ids: Sequence[int], output_ids: Sequence[int]) -> Tensor:
        """Return what was allowed at each token of an output: bool, [tokens, vocabulary]."""
        import torch

        state, masks = self.start(grammar, stop_ids), []
        for token in output_ids:
            masks.append(state.mask())
            state.accept(token)
        return torch.stack(masks)


class GrammarState:
    """The position of an output in its grammar."""

    def __init__(self, matcher: Any, vocabulary: int) -> None:
        import torch

        self._matcher, self._vocabulary = matcher, vocabulary
        self._bits = torch.empty(1, -(-vocabulary // 32), dtype=torch.int32)

    def mask(self) -> Tensor:
        """Return which tokens may come next: bool, [vocabulary]; raise InfrastructureFault if none may."""
        import torch

        self._bits.fill_(-1)
        self._matcher.fill_next_token_bitmask(self._bits)
        mask = (self._bits[0, :, None] >> torch.arange(32, dtype=torch.int32) & 1).bool().flatten()[: self._vocabulary]
        if not mask.any():
            raise InfrastructureFault("the grammar allows none of the tokenizer's tokens")
        return mask

    def accept(self, token: int) -> None:
        if not self._matcher.accept_token(token):
            raise InfrastructureFault(f"the grammar does not allow the token {token} here")
