"""A stateful search-agent environment: one structured tool action per turn, memory kept by the harness.

A public name is imported from its module when it is first used, so `import harness1` itself loads nothing else.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harness1 import reward as reward
    from harness1.api import TOOLS as TOOLS
    from harness1.api import Dataset as Dataset
    from harness1.api import Env as Env
    from harness1.api import ask as ask
    from harness1.api import evaluate as evaluate
    from harness1.api import load as load
    from harness1.api import train as train
    from harness1.config import Config as Config
    from harness1.config import load_config as load_config
    from harness1.data.open import open_source as open_source
    from harness1.env.environment import SearchEnv as SearchEnv
    from harness1.env.render import Context as Context
    from harness1.episodes.rollout import replay_episode as replay_episode
    from harness1.episodes.rollout import rollout as rollout
    from harness1.errors import ToolError as ToolError
    from harness1.eval.outputs import load_run as load_run
    from harness1.policy.registry import open_policy as open_policy
    from harness1.policy.scripted import ScriptedPolicy as ScriptedPolicy
    from harness1.records import Episode as Episode
    from harness1.records import Gold as Gold
    from harness1.records import Task as Task
    from harness1.records import ToolCall as ToolCall
    from harness1.retrieval.build import build_index as build_index
    from harness1.retrieval.open import open_retriever as open_retriever
    from harness1.reward import Case as Case
    from harness1.reward import score as score
    from harness1.runs.journal import EpisodeStore as EpisodeStore
    from harness1.runs.journal import read_episodes as read_episodes
    from harness1.tools.tool import tool as tool

__version__ = "0.1.0"
_NAMES = {
    "api": ("Dataset", "Env", "ask", "evaluate", "load", "train"),
    "config": ("Config", "load_config"),
    "data.open": ("open_source",),
    "env.environment": ("SearchEnv",),
    "env.render": ("Context",),
    "episodes.rollout": ("replay_episode", "rollout"),
    "errors": ("ToolError",),
    "eval.outputs": ("load_run",),
    "policy.registry": ("open_policy",),
    "policy.scripted": ("ScriptedPolicy",),
    "records": ("Episode", "Gold", "Task", "ToolCall"),
    "retrieval.build": ("build_index",),
    "retrieval.open": ("open_retriever",),
    "reward": ("Case", "score"),
    "runs.journal": ("EpisodeStore", "read_episodes"),
    "tools.tool": ("tool",),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}


def __dir__() -> list[str]:
    return sorted({*globals(), "TOOLS", "reward", *_MODULES})


if not TYPE_CHECKING:  # which would hide the imports above, and take any name for an attribute that exists
    __all__ = ["__version__", "TOOLS", "reward", *sorted(_MODULES)]

    def __getattr__(name: str) -> Any:
        if name == "TOOLS":
            return import_module("harness1.api").TOOLS
        if name == "reward":  # the package, whose terms are named as `harness1.reward.recall`
            return import_module("harness1.reward")
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
