"""A connection to a service of the Tinker API: hosted, or SkyRL's server.

    harness1 rl train --engine tinker:MODEL          hosted
    harness1 rl train --engine tinker:MODEL@URL      a server of one's own

The client comes from the package `tinker`. Until 0.37 some of its methods return a result and some a future; from 0.38
all return futures, methods named `_async` are deprecated, and a client of its own tells the models. None of the
deprecated methods is used here, and `settled` takes both.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from concurrent.futures import Future
from importlib import import_module
from typing import Any, NamedTuple, TypeVar

from harness1.config import Machine
from harness1.errors import InfrastructureFault, UsageError, optional
from harness1.model_folder import first_line

Result = TypeVar("Result")

ANONYMOUS = "tml-none"
"""The key for a server that asks for none; the client demands the form."""
ADVICE = "SkyRL 0.3 needs tinker==0.24.1, SkyRL 0.4 tinker>=0.25,<0.26, and the hosted service the newest"
_NAME = re.compile(r"tinker:(?P<model>[^@]+)(@(?P<url>https?://[^@]+))?")


class EngineName(NamedTuple):
    """The base model of a service, and the address of a server of one's own."""

    model: str
    url: str | None

    @classmethod
    def read(cls, name: str) -> EngineName:
        """Parse `tinker:MODEL` or `tinker:MODEL@URL`; raise UsageError for anything else."""
        found = _NAME.fullmatch(name)
        if not found:
            raise UsageError(f"{name!r} names no engine: write tinker:MODEL or tinker:MODEL@URL, without a password")
        return cls(found["model"], found["url"])


class Service(NamedTuple):
    """A connected client, the package that it comes from, and the base model to train."""

    sdk: Any
    client: Any
    model: str

    def call(self, work: Callable[[], Any]) -> Any:
        """Return the settled result of a request, in this thread.

        Raises:
            InfrastructureFault: the service refused it, failed, or was not there.
        """
        try:
            return settled(work())
        except (self.sdk.TinkerError, RuntimeError, OSError) as error:
            raise self.fault(error) from error

    async def ask(self, work: Callable[[], Any]) -> Any:
        """Do as `call` within an event loop; cancelling it cancels the request.

        Raises:
            InfrastructureFault: as `call`.
        """
        try:
            answer = work()
            # The client's own futures have one of the standard library within, and will not stay one themselves.
            future = answer.future() if hasattr(answer, "future") else answer
            return await (asyncio.wrap_future(future) if isinstance(future, Future) else future)
        except (self.sdk.TinkerError, RuntimeError, OSError) as error:
            raise self.fault(error) from error

    def fault(self, error: Exception) -> InfrastructureFault:
        return InfrastructureFault(f"the service of {self.model} failed: {type(error).__name__}: {first_line(error)}")


def connect(name: EngineName, machine: Machine, sdk: Any = None) -> Service:
    """Connect to a service, and check that client and server understand each other.

    Args:
        sdk: the package `tinker`; given in tests.

    Raises:
        UsageError: the server is not there, does not speak the client's version, or does not have the model.
        MissingExtra: tinker is not installed.
    """
    if sdk is None:
        with optional("tinker"):
            sdk = import_module("tinker")
    where = name.url or "the hosted service"
    key = machine.model.key or (ANONYMOUS if name.url else None)
    try:
        client = sdk.ServiceClient(base_url=name.url, api_key=key)
        asked = sdk.RestClient(base_url=name.url, api_key=key) if hasattr(sdk, "RestClient") else client
        models = [each.model_name for each in settled(asked.get_server_capabilities()).supported_models]
    except (sdk.TinkerError, RuntimeError, OSError, ValueError, TypeError, AttributeError) as error:
        raise UsageError(
            f"tinker {sdk.__version__} cannot talk to {where}: {first_line(error)}; client and server must match:"
            f" {ADVICE}"
        ) from error
    if name.model not in models:
        raise UsageError(f"{where} does not train {name.model}; it has {', '.join(sorted(filter(None, models)))}")
    return Service(sdk, client, name.model)


def settled(answer: Any) -> Any:
    """Return the result of a future, or what is not a future."""
    return answer.result() if hasattr(answer, "result") else answer
