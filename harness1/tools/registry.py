"""All tools, and those that a configuration enables. To add a tool, write one function and one line here; a plugin
names its function in `harness1.tools`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from harness1.config import Env
from harness1.memory.working_memory import WorkingMemory
from harness1.plugins import load_plugin, unfit
from harness1.records import Note, Observation, ToolCall
from harness1.tools.curate import curate
from harness1.tools.end_search import end_search
from harness1.tools.fan_out_search import fan_out_search
from harness1.tools.grep_corpus import grep_corpus
from harness1.tools.prune_chunks import prune_chunks
from harness1.tools.read_document import read_document
from harness1.tools.review_docs import review_docs
from harness1.tools.search_corpus import search_corpus
from harness1.tools.tool import PLAIN, Steps, Tool, ToolFunction, ToolSpec, Traits, build_tool, short_name
from harness1.tools.verify import verify

TOOLS: tuple[tuple[ToolFunction, Callable[[Env], bool]], ...] = (
    (fan_out_search, lambda env: env.fan_out.on),
    (search_corpus, lambda env: True),
    (grep_corpus, lambda env: env.grep.on),
    (read_document, lambda env: env.read.on),
    (review_docs, lambda env: env.review.on),
    (curate, lambda env: True),
    (prune_chunks, lambda env: env.pruning.on),
    (verify, lambda env: env.verification.on),
    (end_search, lambda env: True),
)
"""Each tool with its condition."""
NAMES = frozenset(function.__name__ for function, _ in TOOLS)


@dataclass(frozen=True)
class Toolbox:
    """The tools of one configuration, by name, in a fixed order."""

    tools: dict[str, Tool]

    @classmethod
    @lru_cache(maxsize=16)
    def of(cls, env: Env) -> Toolbox:
        """Return the tools of a configuration. Deriving their schemas takes 1 ms, so it is done once for each.

        Raises:
            UsageError: a tool of `env.plugins` is not installed, has the name of another, or cannot be imported.
        """
        functions = [function for function, enabled in TOOLS if enabled(env)]
        built = [build_tool(function, env) for function in (*functions, *map(plugin_tool, env.plugins))]
        return cls({tool.spec.name: tool for tool in built})

    @property
    def specs(self) -> tuple[ToolSpec, ...]:
        return tuple(tool.spec for tool in self.tools.values())

    def traits(self, name: str) -> Traits:
        """Return the traits of a tool, or the defaults for an unknown name."""
        return self.tools[name].traits if name in self.tools else PLAIN

    def run(self, memory: WorkingMemory, env: Env, call: ToolCall) -> Steps:
        """Run a call. For an unknown tool, the observation names those that exist."""
        tool = self.tools.get(call.name)
        if tool is None:
            name = short_name(call.name)
            return Observation(name, error=Note("unknown_tool", {"name": name, "tools": list(self.tools)}))
        return (yield from tool.run(memory, env, call))


def plugin_tool(name: str) -> ToolFunction:
    """Return the function of a tool that another package adds.

    Raises:
        UsageError: there is none, it has the name of another tool, or it is not a function of its name.
    """
    function: ToolFunction = load_plugin("tools", name, NAMES)
    if getattr(function, "__name__", "") != name or not callable(function):
        raise unfit("tools", name, "must be a function of that name")
    return function
