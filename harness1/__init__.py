"""A stateful search-agent environment: one structured tool action per turn, memory kept by the harness.

A public name is imported from its module when it is first used, so `import harness1` itself loads nothing else.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harness1.config import Config, Env, load_config
    from harness1.data.open import open_source
    from harness1.env.environment import SearchEnv
    from harness1.episodes.replay import replay_episode
    from harness1.episodes.rollout import rollout
    from harness1.eval.evaluate import Evaluation, evaluate
    from harness1.policy.registry import open_policy
    from harness1.policy.scripted import ScriptedPolicy
    from harness1.records import Episode, Gold, Task
    from harness1.retrieval.index.build import build_index
    from harness1.retrieval.open import open_retriever
    from harness1.reward.composite import score
    from harness1.runs.store import EpisodeStore, read_episodes

__version__ = "0.1.0"
__all__ = [
    "Config",
    "Env",
    "Episode",
    "EpisodeStore",
    "Evaluation",
    "Gold",
    "ScriptedPolicy",
    "SearchEnv",
    "Task",
    "__version__",
    "build_index",
    "evaluate",
    "load_config",
    "open_policy",
    "open_retriever",
    "open_source",
    "read_episodes",
    "replay_episode",
    "rollout",
    "score",
]

_MODULES = {
    "Config": "config",
    "Env": "config",
    "Episode": "records",
    "EpisodeStore": "runs.store",
    "Evaluation": "eval.evaluate",
    "Gold": "records",
    "ScriptedPolicy": "policy.scripted",
    "SearchEnv": "env.environment",
    "Task": "records",
    "build_index": "retrieval.index.build",
    "evaluate": "eval.evaluate",
    "load_config": "config",
    "open_policy": "policy.registry",
    "open_retriever": "retrieval.open",
    "open_source": "data.open",
    "read_episodes": "runs.store",
    "replay_episode": "episodes.replay",
    "rollout": "episodes.rollout",
    "score": "reward.composite",
}


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if not TYPE_CHECKING:  # which would take any name for an attribute that exists

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
