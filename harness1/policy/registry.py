"""Open a policy by its name, as typed after `--policy`: one of the tables below, a model, a plugin's
(`harness1.policies`), or one's own (`FILE.py:NAME`). Teachers and models are imported when they are named."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from harness1.config import Config
from harness1.env.render import Context
from harness1.errors import ConfigError, HarnessError, UsageError
from harness1.models.spec import NAMES as MODELS
from harness1.models.spec import SERVED, ModelSpec, is_model, list_released
from harness1.plain import digest, meant
from harness1.plugins import (
    failure,
    find_plugin,
    identity,
    is_interrupt,
    is_own,
    load_own,
    name_here,
    open_added,
    plugin_names,
)
from harness1.policy.policy import Decision, Policy, Session
from harness1.policy.scripted import POLICIES, RecordedPolicy, ScriptedPolicy
from harness1.policy.wrappers import MixedPolicy, SilentPolicy
from harness1.records import Gold, Task, ToolCall

if TYPE_CHECKING:
    from harness1.models.served import ServedModel

Golds = Mapping[str, Gold]  # the gold of each task by its id; only the oracles are given it
PluginOpener = Callable[[str, Config], Policy]  # opens another package's, by the argument after the colon, if any

ORACLES = {  # the policies that are given the gold, each by its module and class
    "oracle": ("oracles", "OraclePolicy"),
    "oracle-teacher": ("oracle_teacher", "OracleTeacher"),
    "lead-teacher": ("oracles", "LeadTeacher"),
}
SILENT, MIXED = "silent:", "mixed:"
NAMES = (*POLICIES, "scripted:SIZE (1 to 30)", *ORACLES, "mixed:SHARE", "silent:POLICY", "replay:RUN")
NAMES += ("FILE.py:NAME", *MODELS)


def policy_names() -> tuple[str, ...]:
    """Return the name of every policy: those of this file, those that are released, and those of other packages."""
    return tuple(dict.fromkeys((*NAMES, *list_released(), *plugin_names("policies"))))


def needs_gold(spec: str) -> bool:
    """Return True if a policy sees the gold."""
    bare = spec.removeprefix(SILENT)
    return bare in ORACLES or bare.startswith(MIXED)


def check_policy(spec: str, config: Config = Config()) -> None:
    """Refuse a policy that does not exist, before any work is done for it; no model is loaded. Raises UsageError."""
    if is_model(spec):
        ModelSpec.read(spec)
    else:
        open_policy(spec, {}, config)


def open_policy(spec: str, golds: Golds | None = None, config: Config = Config()) -> Policy:
    """Open a policy by its name: `scripted`, `single-shot`, `random`, `oracle`, `hf:PATH`, `openai:MODEL@URL`, ...

    `mixed:0.6` is the oracle teacher in six turns of ten and the random policy in the others; `silent:POLICY` is any
    policy without a model, stripped of its reasons. A policy of another package, or one's own, is never given the gold.

    Raises:
        UsageError: there is no such policy, its model cannot be loaded, or a plugin cannot be imported.
        ConfigError: the settings do not fit its model.
    """
    if is_own(spec):
        return policy_of(load_own(spec), spec)
    kind, colon, argument = spec.partition(":")
    ours = {*POLICIES, *ORACLES, *SERVED, *list_released(), "mixed", "silent", "replay"}
    added: PluginOpener | None = find_plugin("policies", kind, ours)
    if added is not None:
        policy: Policy = open_added("policies", kind, added, argument, config)
        return policy
    if is_model(spec):
        return open_model(spec, config)
    if colon:
        found = _with_argument(kind, argument, golds or {}, config)
    elif spec in ORACLES:
        found = _open_oracle(spec, golds or {})
    else:
        found = POLICIES[spec]() if spec in POLICIES else None
    if found is None:
        names = policy_names()
        raise UsageError(f"there is no policy {spec!r}; choose one of {', '.join(names)}{meant(spec, names)}")
    return found


def open_model(spec: str, config: Config) -> Policy:
    """Open a language model as a policy. Raises UsageError: there is none; ConfigError; MissingExtra."""
    from harness1.http.model_endpoint import policy_endpoint
    from harness1.models.open import open_backend
    from harness1.policy.language_model import ChatCompletionsPolicy, LanguageModelPolicy

    asked = ModelSpec.read(spec)
    settings, reserve = config.policy, config.env.generation_reserve
    if asked.kind == "openai":
        served, window = served_model(asked, config), config.env.context_window
        if served.window is not None and window > served.window:
            raise ConfigError(
                f"env.context_window={window} is more than the {served.window} tokens that the server of {asked.model}"
                f" reads: --set env.context_window={served.window}, or start the server with more ({served.enlarging})"
            )
        endpoint = policy_endpoint(asked.url or "", config.machine)
        return ChatCompletionsPolicy(endpoint, asked.model, reserve, settings, spec, served)
    model, chat = open_backend(asked, config)
    return LanguageModelPolicy(model, chat, reserve, settings, spec)


def served_model(asked: ModelSpec, config: Config) -> ServedModel:
    """Return what the server of a model says of it; raise as `ModelEndpoint`."""
    from harness1.http.model_endpoint import policy_endpoint
    from harness1.models.served import describe_served

    url = (asked.url or "").rstrip("/")
    endpoint, root = (policy_endpoint(each, config.machine) for each in (url, url.removesuffix("/v1")))
    return describe_served(endpoint, root, asked.model)


def fit_window(spec: str, config: Config) -> Config:
    """Return a configuration whose context is no longer than what the server of a policy's model reads, if it says."""
    if not is_model(spec) or (asked := ModelSpec.read(spec)).kind != "openai":
        return config
    most, env = served_model(asked, config).window, config.env
    if most is None or env.context_window <= most:
        return config
    room = {"context_window": most, "generation_reserve": min(env.generation_reserve, most // 4)}
    return msgspec.structs.replace(config, env=msgspec.structs.replace(env, **room))


def _with_argument(kind: str, argument: str, golds: Golds, config: Config) -> Policy | None:
    policy: Policy | None = None
    if kind == "scripted" and argument.isdecimal() and 1 <= int(argument[:3]) <= 30:
        policy = ScriptedPolicy(int(argument))
    elif kind == "replay" and argument:
        policy = RecordedPolicy.load(Path(argument))
    elif kind == "silent" and not is_model(argument) and not argument.startswith(SILENT):
        policy = SilentPolicy(open_policy(argument, golds, config))
    elif kind == "mixed":
        try:
            share = float(argument)
        except ValueError:
            return None
        if 0.0 <= share <= 1.0:
            policy = MixedPolicy(_open_oracle("oracle-teacher", golds), open_policy("random"), share)
    return policy


def _open_oracle(name: str, golds: Golds) -> Policy:
    module, kind = ORACLES[name]
    policy: Policy = getattr(import_module(f"harness1.policy.{module}"), kind)(golds)
    return policy


def policy_of(thing: Any, name: str = "") -> Policy:
    """Return a function, a class or an object of one's own as a policy: a function of a `Context`, or a class, made
    without arguments, or an object with a method `act` of a `Context`. Either returns a `ToolCall`, or a `Decision`.
    What has the methods of `Policy` is taken as it is. An object is copied for each episode; one that cannot be copied
    plays them all. Without a `name` it is called as it is found here. Raises UsageError: it decides nothing."""
    make = thing if inspect.isclass(thing) else None
    example = open_added("policies", name or name_here(make), make) if make else thing
    if hasattr(example, "open") and hasattr(example, "hash") and hasattr(example, "name"):
        policy: Policy = example
        return policy
    if not callable(getattr(example, "act", None)) and not inspect.isroutine(example):
        raise UsageError(f"{thing!r} is no policy: give a function of a context, or a class with a method act")
    name = name or name_here(thing if inspect.isroutine(thing) else make or type(thing))
    state = {key: _hash_value(value) for key, value in sorted(state_of(thing).items())}
    return OwnPolicy(name, digest(["own policy", identity(name), state]), make or (lambda: _copy(thing)))


def state_of(thing: Any) -> dict[str, Any]:
    """Return what an object holds beyond what its class gives it, so that the name of its class does not make it."""
    if inspect.isclass(thing) or inspect.isroutine(thing):
        return {}
    slots = [name for each in type(thing).__mro__ for name in getattr(each, "__slots__", ())]
    return {**getattr(thing, "__dict__", {}), **{name: getattr(thing, name) for name in slots if hasattr(thing, name)}}


def _hash_value(value: Any) -> str:
    # All of it if it can be written as JSON, or else its type.
    try:
        return digest(value)
    except (TypeError, ValueError, RecursionError):
        return type(value).__qualname__


def _copy(thing: Any) -> Any:
    try:
        return copy.deepcopy(thing)
    except (TypeError, copy.Error, pickle.PicklingError):
        return thing


class OwnPolicy:
    """A policy of one's own: each episode has a player made by `make`."""

    def __init__(self, name: str, hash_: str, make: Callable[[], Any]) -> None:
        self.name, self.hash, self._make = name, hash_, make

    def open(self, task: Task, seed: int) -> Session:
        return OwnSession(open_added("policies", self.name, self._make), self.name)


class OwnSession:
    """One episode of a policy of one's own."""

    def __init__(self, player: Any, name: str) -> None:
        self._player, self._name = player, name

    async def act(self, context: Context) -> Decision:
        """Ask the player; raise UsageError if it fails, or returns something else than an action."""
        try:
            given = self._player.act(context) if hasattr(self._player, "act") else self._player(context)
            if inspect.isawaitable(given):
                given = await given
        except BaseException as error:  # code of others may raise anything
            if isinstance(error, HarnessError) or is_interrupt(error):
                raise
            raise UsageError(f"the policy {self._name} failed: {failure(error)}") from error
        if isinstance(given, ToolCall):
            return Decision((given,))
        if isinstance(given, Decision):
            return given
        raise UsageError(f"the policy {self._name} returned {given!r:.100}: return ToolCall(NAME, ARGUMENTS)")

    def fork(self) -> OwnSession:
        return OwnSession(_copy(self._player), self._name)
