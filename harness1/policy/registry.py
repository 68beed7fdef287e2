"""Open a policy by its name, as typed after `--policy`: one of the tables below, a model, a plugin's
(`harness1.policies`), or one's own (`FILE.py:NAME`). A policy is imported when it is named."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from harness1.config import Config
from harness1.errors import ConfigError, UsageError
from harness1.models.spec import NAMES as MODELS
from harness1.models.spec import SERVED, ModelSpec, is_model, released_names
from harness1.plain import meant
from harness1.plugins import find_plugin, is_own, plugin_names
from harness1.policy.policy import Policy
from harness1.records import Gold

Golds = Mapping[str, Gold]
"""The gold of each task by its id; only the oracles are given it."""
PluginOpener = Callable[[str, Config], Policy]
"""Opens the policy of another package by the argument after the colon, which may be empty."""

PLAIN: Mapping[str, str] = {
    "scripted": "scripted:ScriptedPolicy",
    "follow-leads": "scripted:FollowLeads",
    "single-shot": "scripted:SingleShotPolicy",
    "random": "scripted:RandomPolicy",
}
"""The policies without an argument, each with its module in `harness1.policy` and its class."""
RULES = ("no-op", "stop-at-once", "curate-everything", "query-repeater", "tool-spammer", "id-inventor")
"""The policies that nothing should lose to, each a function of `scripted.py`."""
ORACLES: Mapping[str, str] = {
    "oracle": "oracle:OraclePolicy",
    "oracle-teacher": "teacher.teacher:OracleTeacher",
    "lead-teacher": "teacher.lead_teacher:LeadTeacher",
}
"""The policies that are given the gold."""
SILENT, MIXED = "silent:", "mixed:"
NAMES = (
    *PLAIN,
    *RULES,
    "scripted:SIZE (1 to 30)",
    *ORACLES,
    "mixed:SHARE",
    "silent:POLICY",
    "replay:RUN",
    "FILE.py:NAME",
    *MODELS,
)


def policy_names() -> tuple[str, ...]:
    """Return the name of every policy: those of this file, those that are released, and those of other packages."""
    return (*NAMES, *released_names(), *plugin_names("policies"))


def needs_gold(spec: str) -> bool:
    """Return True if a policy sees the gold."""
    bare = spec.removeprefix(SILENT)
    return bare in ORACLES or bare.startswith(MIXED)


def check_policy(spec: str, config: Config = Config()) -> None:
    """Refuse a policy that does not exist, before any work is done for it. Models are not loaded.

    Raises:
        UsageError: there is no such policy, or a plugin's does not fit the settings.
    """
    if is_model(spec):
        ModelSpec.read(spec)
    else:
        open_policy(spec, {}, config)


def open_policy(spec: str, golds: Golds | None = None, config: Config = Config()) -> Policy:
    """Open a policy by its name: `scripted`, `single-shot`, `random`, `oracle`, `hf:PATH`, `openai:MODEL@URL`, ...

    `mixed:0.6` is the oracle teacher in six turns of ten and the random policy in the others; `silent:POLICY` is any
    policy without a model, stripped of its reasons.

    A policy of another package, or one's own (`FILE.py:NAME`), is never given the gold.

    Raises:
        UsageError: there is no such policy, its model cannot be loaded, or a plugin has the name of another policy or
            cannot be imported.
        ConfigError: the settings do not fit its model.
    """
    if is_own(spec):
        policy: Policy = _imported("own:open_own_policy")(spec)
        return policy
    kind, colon, argument = spec.partition(":")
    ours = {*PLAIN, *RULES, *ORACLES, *SERVED, *released_names(), "mixed", "silent", "replay"}
    added: PluginOpener | None = find_plugin("policies", kind, ours)
    if added is not None:
        return added(argument, config)
    if is_model(spec):
        return open_model(spec, config)
    found = _with_argument(kind, argument, golds or {}, config) if colon else _without_argument(spec, golds or {})
    if found is None:
        names = policy_names()
        raise UsageError(f"there is no policy {spec!r}; choose one of {', '.join(names)}{meant(spec, names)}")
    return found


def open_model(spec: str, config: Config) -> Policy:
    """Open a language model as a policy.

    Raises:
        UsageError: there is no such model, or it cannot be loaded.
        ConfigError: the settings do not fit it.
        MissingExtra: the package that runs it is not installed.
    """
    from harness1.http.model_endpoint import policy_endpoint
    from harness1.models.open import open_backend
    from harness1.policy.language_model import ChatCompletionsPolicy, LanguageModelPolicy

    asked = ModelSpec.read(spec)
    settings, reserve = config.policy, config.env.generation_reserve
    if asked.kind == "openai":
        if settings.constrained:
            raise ConfigError("policy.constrained needs a model whose tokens are sampled here or by vLLM")
        endpoint = policy_endpoint(asked.url or "", config.machine)
        return ChatCompletionsPolicy(endpoint, asked.model, reserve, settings, spec)
    model, chat = open_backend(asked, config)
    return LanguageModelPolicy(model, chat, reserve, settings, spec)


def _without_argument(name: str, golds: Golds) -> Policy | None:
    policy: Policy | None = None
    if name in PLAIN:
        policy = _imported(PLAIN[name])()
    elif name in RULES:
        policy = _imported("scripted:ReflexPolicy")(name)
    elif name in ORACLES:
        policy = _imported(ORACLES[name])(golds)
    return policy


def _with_argument(kind: str, argument: str, golds: Golds, config: Config) -> Policy | None:
    policy: Policy | None = None
    if kind == "scripted" and argument.isdecimal() and 1 <= int(argument[:3]) <= 30:
        policy = _imported("scripted:ScriptedPolicy")(int(argument))
    elif kind == "replay" and argument:
        policy = _imported("scripted:RecordedPolicy").load(Path(argument))
    elif kind == "silent" and not is_model(argument) and not argument.startswith(SILENT):
        policy = _imported("wrappers:SilentPolicy")(open_policy(argument, golds, config))
    elif kind == "mixed":
        try:
            share = float(argument)
        except ValueError:
            return None
        if 0.0 <= share <= 1.0:
            mixed = open_policy("oracle-teacher", golds), open_policy("random")
            policy = _imported("wrappers:MixedPolicy")(mixed, (share, 1.0 - share))
    return policy


def _imported(name: str) -> Any:
    """Import `MODULE:NAME` of `harness1.policy`."""
    module, _, thing = name.partition(":")
    return getattr(import_module(f"harness1.policy.{module}"), thing)
