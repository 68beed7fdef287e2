"""The check of what a configuration names of other packages, before any work is done with it."""

from __future__ import annotations

from harness1.config.env import Env
from harness1.config.policy import AUTO, FORMATS, ChatPolicy
from harness1.config.reward import Reward
from harness1.errors import ConfigError
from harness1.plain import meant
from harness1.plugins import load_plugin, plugin_names


def refuse_unknown_plugins(env: Env, reward: Reward, policy: ChatPolicy) -> None:
    """Import the tools, the reward terms and the chat format that settings name of other packages.

    Raises:
        ConfigError: a tool is named twice, or there is no such chat format.
        UsageError: no installed package has one, several have it, or it cannot be imported.
    """
    if len({*env.plugins}) < len(env.plugins):
        raise ConfigError(f"env.plugins names a tool twice: {', '.join(env.plugins)}")
    for tool in env.plugins:
        load_plugin("tools", tool)
    for term in reward.plugins:
        load_plugin("rewards", term)
    if policy.format not in (AUTO, *FORMATS) and policy.format not in plugin_names("formats"):
        names = (AUTO, *FORMATS, *plugin_names("formats"))
        raise ConfigError(
            f"policy.format: there is no chat format {policy.format!r}; choose {', '.join(names)}"
            f"{meant(policy.format, names)}"
        )
