"""Policies of one's own, by `FILE.py:NAME` or as an object: whatever decides what to do next."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from typing import Any

from harness1.env.render import Context
from harness1.errors import HarnessError, UsageError
from harness1.hashing import digest
from harness1.plugins import failure, identity, load_own, name_here
from harness1.policy.policy import Decision, Policy, Session
from harness1.records import Task, ToolCall


def open_own_policy(name: str) -> Policy:
    """Open what `FILE.py:NAME` names: a function of a `Context`, or a class, made without arguments, with a method
    `act` of a `Context`. Either returns a `ToolCall`, or a `Decision`. A class with the methods of `Policy` is taken as
    it is.

    Raises:
        UsageError: it is neither, or cannot be found.
    """
    return policy_of(load_own(name), name)


def policy_of(thing: Any, name: str = "") -> Policy:
    """Return a function, a class or an object of one's own as a policy (see `open_own_policy`). An object is copied for
    each episode, so that episodes do not disturb each other; one that cannot be copied, such as one that holds the
    connection of a server, plays them all.

    Args:
        name: what it is called; "": the name under which it is found, in this process at least.

    Raises:
        UsageError: it decides nothing.
    """
    make = thing if inspect.isclass(thing) else None
    example = make() if make else thing
    if hasattr(example, "open") and hasattr(example, "hash") and hasattr(example, "name"):
        policy: Policy = example
        return policy
    if not callable(getattr(example, "act", None)) and not inspect.isroutine(example):
        raise UsageError(f"{thing!r} is no policy: give a function of a context, or a class with a method act")
    name = name or name_here(thing if inspect.isroutine(thing) else make or type(thing))
    state = {key: _known(value) for key, value in sorted(state_of(thing).items())}
    return OwnPolicy(name, digest(["own policy", identity(name), state]), make or (lambda: _copy(thing)))


def state_of(thing: Any) -> dict[str, Any]:
    """Return what an object holds beyond what its class gives it, so that the name of its class does not make it."""
    if inspect.isclass(thing) or inspect.isroutine(thing):
        return {}
    slots = [name for each in type(thing).__mro__ for name in getattr(each, "__slots__", ())]
    return {**getattr(thing, "__dict__", {}), **{name: getattr(thing, name) for name in slots if hasattr(thing, name)}}


def _known(value: Any) -> str:
    """Return what of a value enters the hash of a policy: all of it if it can be written as JSON, or else its type."""
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
        return OwnSession(self._make(), self.name)


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
        except HarnessError:
            raise
        except Exception as error:  # code of others may raise anything
            raise UsageError(f"the policy {self._name} failed: {failure(error)}") from error
        if isinstance(given, ToolCall):
            return Decision((given,))
        if isinstance(given, Decision):
            return given
        raise UsageError(f"the policy {self._name} returned {given!r:.100}: return ToolCall(NAME, ARGUMENTS)")

    def fork(self) -> OwnSession:
        return OwnSession(_copy(self._player), self._name)
