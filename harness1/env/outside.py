"""Text from outside, written so that nobody takes it for words of the environment. Each line of the environment begins
with a visible character, each line of a document with a space. A title shares its line with marks of the environment:
what looks like one is escaped in it. Chat servers read spelled control tokens as such, so these are broken up."""

from __future__ import annotations

import re

_MARK = re.compile(r"\\|\[|\]|^\(|\bq\d+(?=#\d)|\balso(?=: \d)")
"""In a title: brackets of handles, reasons before a title, places in rankings, and the number of copies."""
_ENTITY = re.compile(r"\((?=E\d+\))")
_CONTROL = re.compile(
    r"""(?x) (?: < (?= [|｜] [^<>]{1,64} [|｜] >
                   | /? (?: tool_call | tool_calls | tool_response | tools | think | function | parameter
                          | start_of_turn | end_of_turn | im_start | im_end | system | bos | eos | s )
                     \b [^<>]{0,64} > )
           | \[ (?= /? (?: INST | SYS | TOOL_CALLS | TOOL_RESULTS | AVAILABLE_TOOLS | THINK ) \] ) )"""
)
"""The first character of a control token: ChatML, Harmony, Llama, DeepSeek, Kimi, Qwen, Gemma, Mistral."""


def indent(text: str) -> str:
    """Return a text with each line, by any of Unicode's ends of lines, behind a space."""
    return "\n".join(f" {line}" for line in text.splitlines())


def escape_title(title: str) -> str:
    """Return a title with a backslash before each backslash and before whatever looks like a mark beside a title."""
    return _MARK.sub(r"\\\g<0>", title)


def escape_handles(text: str) -> str:
    """Return a text with a backslash before whatever looks like the handle of an entity behind its name."""
    return _ENTITY.sub(r"\\(", text)


def break_controls(text: str) -> str:
    """Return a text with a space inside each spelling of a control token: `< |im_end|>`."""
    return _CONTROL.sub(r"\g<0> ", text)
