"""Open a policy by its name, as typed after `--policy`. To add one, add a file and a line in a table below; a plugin
names a `PluginOpener` in `harness1.policies`; one's own is `FILE.py:NAME` (`policy/own.py`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from harness1.config import Config
from harness1.errors import ConfigError, UsageError
from harness1.http.model_endpoint import policy_endpoint
from harness1.models.open import NAMES as MODELS
from harness1.models.open import SERVED, ModelSpec, is_model, open_backend
from harness1.models.released import released_names
from harness1.plain import meant
from harness1.plugins import find_plugin, is_own, plugin_names
from harness1.policy.baselines import RULES, RandomPolicy, ReflexPolicy, SingleShotPolicy
from harness1.policy.chat_completions import ChatCompletionsPolicy
from harness1.policy.follow_leads import FollowLeads
from harness1.policy.language_model import LanguageModelPolicy
from harness1.policy.oracle import OraclePolicy
from harness1.policy.own import open_own_policy
from harness1.policy.policy import Policy
from harness1.policy.recorded import RecordedPolicy
from harness1.policy.scripted import ScriptedPolicy
from harness1.policy.teacher.lead_teacher import LeadTeacher
from harness1.policy.teacher.teacher import OracleTeacher
from harness1.policy.wrappers import MixedPolicy, SilentPolicy
from harness1.records import Gold

Golds = Mapping[str, Gold]
"""The gold of each task by its id; only the oracles are given it."""
Opener = Callable[[str, Golds, Config], Policy | None]
"""Opens a policy by the argument after the colon; None if there is no such policy."""
PluginOpener = Callable[[str, Config], Policy]
"""Opens the policy of another package by the argument after the colon, which may be empty."""


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
        return open_own_policy(spec)
    kind, colon, argument = spec.partition(":")
    added: PluginOpener | None = find_plugin("policies", kind, _taken())
    if added is not None:
        return added(argument, config)
    if is_model(spec):
        return open_model(spec, config)
    if spec in PLAIN:
        return PLAIN[spec]()
    if spec in ORACLES:
        return ORACLES[spec](golds or {})
    opener = OPENERS.get(kind + colon)
    policy = opener(argument, golds or {}, config) if opener else None
    if policy is None:
        names = policy_names()
        raise UsageError(f"there is no policy {spec!r}; choose one of {', '.join(names)}{meant(spec, names)}")
    return policy


def open_model(spec: str, config: Config) -> Policy:
    """Open a language model as a policy.

    Raises:
        UsageError: there is no such model, or it cannot be loaded.
        ConfigError: the settings do not fit it.
        MissingExtra: the package that runs it is not installed.
    """
    asked = ModelSpec.read(spec)
    settings, reserve = config.policy, config.env.generation_reserve
    if asked.kind == "openai":
        if settings.constrained:
            raise ConfigError("policy.constrained needs a model whose tokens are sampled here or by vLLM")
        return ChatCompletionsPolicy(
            policy_endpoint(asked.url or "", config.machine), asked.model, reserve, settings, spec
        )
    model, chat = open_backend(asked, config)
    return LanguageModelPolicy(model, chat, reserve, settings, spec)


def _taken() -> frozenset[str]:
    """Return the names that no other package may add."""
    return frozenset({*PLAIN, *ORACLES, *(name.rstrip(":") for name in OPENERS), *SERVED, *released_names()})


def _open_scripted(size: str, golds: Golds, config: Config) -> Policy | None:
    return ScriptedPolicy(int(size)) if size.isdecimal() and 1 <= int(size[:3]) <= 30 else None


def _open_mixed(share: str, golds: Golds, config: Config) -> Policy | None:
    try:
        good = float(share)
    except ValueError:
        return None
    return MixedPolicy((OracleTeacher(golds), RandomPolicy()), (good, 1.0 - good)) if 0.0 <= good <= 1.0 else None


def _open_silent(policy: str, golds: Golds, config: Config) -> Policy | None:
    wraps = not is_model(policy) and not policy.startswith(SILENT)
    return SilentPolicy(open_policy(policy, golds, config)) if wraps else None


PLAIN: Mapping[str, Callable[[], Policy]] = {
    "scripted": ScriptedPolicy,
    "follow-leads": FollowLeads,
    "single-shot": SingleShotPolicy,
    "random": RandomPolicy,
    **{rule: partial(ReflexPolicy, rule) for rule in RULES},
}
ORACLES: Mapping[str, Callable[[Golds], Policy]] = {
    "oracle": OraclePolicy,
    "oracle-teacher": OracleTeacher,
    "lead-teacher": LeadTeacher,
}
SILENT, MIXED = "silent:", "mixed:"
OPENERS: Mapping[str, Opener] = {
    "scripted:": _open_scripted,
    MIXED: _open_mixed,
    SILENT: _open_silent,
    "replay:": lambda folder, golds, config: RecordedPolicy.load(Path(folder)) if folder else None,
}
"""Opens each policy with an argument, by the name before the colon."""
NAMES = (
    *PLAIN,
    "scripted:SIZE (1 to 30)",
    *ORACLES,
    "mixed:SHARE",
    "silent:POLICY",
    "replay:RUN",
    "FILE.py:NAME",
    *MODELS,
)
