"""What a configuration names of other packages and of files, before any work is done with it."""

from __future__ import annotations

from collections import Counter

import msgspec

from harness1.config.env import Env
from harness1.config.policy import AUTO, FORMATS, ChatPolicy
from harness1.config.reward import Reward
from harness1.errors import ConfigError
from harness1.plain import meant
from harness1.plugins import load_plugin, plugin_names, short_name, whole_name


def with_whole_names(env: Env, reward: Reward) -> tuple[Env, Reward]:
    """Return the settings with the paths of one's own files made absolute, so that they are found from anywhere."""
    env = msgspec.structs.replace(env, plugins=tuple(map(whole_name, env.plugins)))
    weights = {whole_name(name): weight for name, weight in reward.plugins.items()}
    return env, msgspec.structs.replace(reward, plugins=weights)


def refuse_unknown_plugins(env: Env, reward: Reward, policy: ChatPolicy) -> None:
    """Import the tools, the reward terms and the chat format that settings name of other packages or of files.

    Raises:
        ConfigError: two tools or two terms have one name, or there is no such chat format.
        UsageError: no installed package has one, several have it, or it cannot be imported.
    """
    for setting, names, what in (("env", env.plugins, "tool"), ("reward", tuple(reward.plugins), "term")):
        if any(count > 1 for count in Counter(map(short_name, names)).values()):
            raise ConfigError(f"{setting}.plugins names a {what} twice: {', '.join(names)}")
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
