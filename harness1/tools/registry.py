"""All tools. To add one, write one function and one line here; a plugin names its function in `harness1.tools`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

from harness1.config import Env
from harness1.errors import ConfigError
from harness1.memory.working_memory import WorkingMemory
from harness1.plugins import is_own, load_plugin, short_name, unfit
from harness1.records import Note, Observation, ToolCall
from harness1.tools.discovery import fan_out_search, grep_corpus, search_corpus
from harness1.tools.documents import curate, end_search, prune_chunks, read_document, review_docs, verify
from harness1.tools.tool import (
    PLAIN,
    Steps,
    Tool,
    ToolFunction,
    ToolSpec,
    Traits,
    build_tool,
    knows_memory,
    memory_tool,
    one_line,
    text_tool,
)

TOOLS: Mapping[ToolFunction, str] = MappingProxyType(
    {
        fan_out_search: "fan_out",
        search_corpus: "",
        grep_corpus: "grep",
        read_document: "read",
        review_docs: "review",
        curate: "",
        prune_chunks: "pruning",
        verify: "verification",
        end_search: "",
    }
)
"""Each tool, in the order shown, with the mechanism of `env` that offers it; empty: always offered."""
NAMES = frozenset(function.__name__ for function in TOOLS)


def tools_of(env: Env) -> tuple[ToolFunction, ...]:
    """Return the tools of this package that a configuration offers."""
    chosen = {*env.tools, end_search.__name__} if env.tools else NAMES
    offered = (function for function, group in TOOLS.items() if not group or group in env.mechanisms)
    return tuple(function for function in offered if function.__name__ in chosen)


@dataclass(frozen=True)
class Toolbox:
    """The tools of one configuration, by name, in a fixed order."""

    tools: dict[str, Tool]

    @classmethod
    @lru_cache(maxsize=16)
    def of(cls, env: Env) -> Toolbox:
        """Return the tools of a configuration; schemas take 1 ms, so each once. Raises UsageError: a tool of
        `env.plugins` is not installed, has the name of another, or cannot be imported; ConfigError: `env.tools` leaves
        none."""
        built = [build_tool(function, env) for function in (*tools_of(env), *map(plugin_tool, env.plugins))]
        if len(built) < 2:
            raise ConfigError(f"env.tools: the mechanisms offer none of {', '.join(env.tools)}")
        return cls({tool.spec.name: tool for tool in built})

    @property
    def specs(self) -> tuple[ToolSpec, ...]:
        return tuple(tool.spec for tool in self.tools.values())

    def traits(self, name: str) -> Traits:
        return self.tools[name].traits if name in self.tools else PLAIN

    def run(self, memory: WorkingMemory, env: Env, call: ToolCall) -> Steps:
        """Run a call. For an unknown tool, the observation names those that exist."""
        tool = self.tools.get(call.name)
        if tool is None:
            name = one_line(call.name)
            return Observation(name, error=Note("unknown_tool", {"name": name, "tools": list(self.tools)}))
        return (yield from tool.run(memory, env, call))


def plugin_tool(name: str) -> ToolFunction:
    """Return the function of a tool that another package adds, or that is one's own (`FILE.py:NAME`). Raises
    UsageError: there is none, it has the name of another tool, or it is not a function of its name."""
    function: ToolFunction = load_plugin("tools", name, NAMES)
    if getattr(function, "__name__", "") != short_name(name) or not callable(function):
        raise unfit("tools", name, "must be a function of that name")
    if is_own(name) and function.__name__ in NAMES:
        raise unfit("tools", name, "has the name of a tool of harness1: call it something else")
    return (memory_tool if knows_memory(function) else text_tool)(function)
