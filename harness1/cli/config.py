"""harness1 config: the configurations that come with the package, a resolved one, and its hashes."""

from __future__ import annotations

from typing import Any

from harness1.cli.options import ConfigFile, Json, Overrides, resolve
from harness1.cli.printing import print_json, print_result, put
from harness1.config import Config, opening, shipped
from harness1.config.settings import notes
from harness1.env.environment import SearchEnv
from harness1.episodes.rollout import Nowhere
from harness1.hashing import digest
from harness1.plugins import KINDS, installed_plugins
from harness1.runs.folder import shown_config, toml_lines


def list_shipped(as_json: Json = False) -> None:
    """List the configurations that come with the package: names for --config, and what each is for.

    Example: harness1 config list
    """
    rows = [{"name": name, "what": opening(file), "file": str(file)} for name, file in shipped().items()]
    print_result({"configurations": rows}, as_json, _list)


def _list(found: dict[str, Any]) -> None:
    for row in found["configurations"]:
        put(f"{row['name']}: {row['what']}")


def show(config: ConfigFile = None, overrides: Overrides = None, as_json: Json = False) -> None:
    """Print every setting as TOML with what it decides, the hashes computed from the settings, and what other installed
    packages add.

    Example: harness1 config show --set env.max_turns=4
    """
    resolved = resolve(config, overrides)
    hashes = config_hashes(resolved)
    tree = shown_config(resolved)
    plugins = installed_plugins()
    if as_json:
        print_json({"config": tree, "hashes": hashes, "plugins": plugins})
        return
    put("\n".join(toml_lines(tree, notes(Config))))
    put("\n".join(f"# {name} = {value}" for name, value in hashes.items()))
    for kind, packages in plugins.items():
        put("\n".join(f"# installed {KINDS[kind]}: {name}, of {package}" for name, package in packages.items()))


def config_hashes(config: Config) -> dict[str, str]:
    """Return the hashes that depend only on a configuration; `index_hash` needs a corpus too."""
    env = SearchEnv(config.env, Nowhere("", config.index.unit))
    return {"env_hash": env.hash, "reward_hash": config.reward_hash, "index_settings": digest(config.index.hashed())}
