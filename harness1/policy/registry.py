"""Making a policy by what a user typed after `--policy`. Adding one is one file and one line here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from harness1.config import Config
from harness1.errors import ConfigError, UsageError
from harness1.http.model_endpoint import policy_endpoint
from harness1.models.open import NAMES as MODELS
from harness1.models.open import ModelSpec, is_model, open_backend
from harness1.policy.baselines import RULES, RandomPolicy, ReflexPolicy, SingleShotPolicy
from harness1.policy.chat_completions import ChatCompletionsPolicy
from harness1.policy.language_model import LanguageModelPolicy
from harness1.policy.oracle import OraclePolicy
from harness1.policy.policy import Policy
from harness1.policy.recorded import RecordedPolicy
from harness1.policy.scripted import ScriptedPolicy
from harness1.policy.teacher.teacher import OracleTeacher
from harness1.policy.wrappers import MixedPolicy, SilentPolicy
from harness1.records import Gold


def open_model(spec: str, config: Config) -> Policy:
    """A language model as a policy.

    Raises:
        UsageError: there is no such model, or it cannot be loaded.
        ConfigError: the settings do not fit it.
        MissingExtra: what runs it is not installed.
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


PLAIN: dict[str, Callable[[], Policy]] = {
    "scripted": ScriptedPolicy,
    "single-shot": SingleShotPolicy,
    "random": RandomPolicy,
}
"""Policies that need nothing but their name."""

SIGHTED: dict[str, Callable[[Mapping[str, Gold]], Policy]] = {
    "oracle": OraclePolicy,
    "oracle-teacher": OracleTeacher,
}
"""Policies with sight of the gold, by task id."""

NAMES = (*PLAIN, *RULES, "scripted:SIZE (1 to 30)", *SIGHTED, "mixed:SHARE", "silent:POLICY", "replay:RUN", *MODELS)

SILENT, MIXED = "silent:", "mixed:"


def needs_gold(spec: str) -> bool:
    """Whether a policy acts with sight of the gold."""
    bare = spec.removeprefix(SILENT)
    return bare in SIGHTED or bare.startswith(MIXED)


def check_policy(spec: str) -> None:
    """Refuse a policy that does not exist, before any work is done for it. Models are not loaded.

    Raises:
        UsageError: there is no such policy.
    """
    if is_model(spec):
        ModelSpec.read(spec)
    else:
        open_policy(spec)


def open_policy(spec: str, golds: Mapping[str, Gold] | None = None, config: Config = Config()) -> Policy:
    """Open a policy by its name: `scripted`, `single-shot`, `random`, `oracle`, `hf:PATH`, `openai:MODEL@URL`, ...

    `mixed:0.6` is the oracle teacher in six turns of ten and the random policy in the others; `silent:POLICY` is any
    of those without a model, without its reasons.

    Args:
        golds: the gold of each task by its id; only the oracles are given it.

    Raises:
        UsageError: there is no such policy, or its model cannot be loaded.
        ConfigError: the settings do not fit its model.
    """
    kind, _, argument = spec.partition(":")
    if spec.startswith(SILENT) and not is_model(argument) and not argument.startswith(SILENT):
        return SilentPolicy(open_policy(argument, golds, config))
    if spec.startswith(MIXED) and (share := _share(argument)) is not None:
        return MixedPolicy((OracleTeacher(golds or {}), RandomPolicy()), (share, 1.0 - share))
    if kind == "replay" and argument:
        return RecordedPolicy.load(Path(argument))
    if kind == "scripted" and argument.isdecimal() and 1 <= int(argument[:3]) <= 30:
        return ScriptedPolicy(int(argument))
    if spec in SIGHTED:
        return SIGHTED[spec](golds or {})
    if spec in PLAIN:
        return PLAIN[spec]()
    if spec in RULES:
        return ReflexPolicy(spec)
    if is_model(spec):
        return open_model(spec, config)
    raise UsageError(f"there is no policy {spec!r}; choose one of {', '.join(NAMES)}")


def _share(text: str) -> float | None:
    """A number between 0 and 1, or None for what is none."""
    try:
        share = float(text)
    except ValueError:
        return None
    return share if 0.0 <= share <= 1.0 else None
