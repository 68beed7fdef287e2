"""The errors of the package, each the responsibility of the policy, the user, or the infrastructure.

A policy's mistake becomes an observation and never leaves the environment. A user's mistake ends the command with exit
code 2 and a one-line message. An infrastructure fault is retried, then invalidates the episode.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class HarnessError(Exception):
    """The base class of all errors that this package raises on purpose."""


MALFORMED = (ValueError, RecursionError)
"""What decoders of JSON and TOML raise for bytes that are not UTF-8, not the format or not the type, for numbers of
thousands of digits, and for values nested too deeply."""


class UsageError(HarnessError):
    """A user's request that cannot be carried out: a bad path, option, or file."""


class ConfigError(UsageError):
    """A configuration value that is unknown or out of range."""


class CorpusError(UsageError):
    """A corpus, dataset or index on disk that cannot be read in its declared format."""


class SchemaError(UsageError):
    """A record that was written by a newer version of the package, or that is not a record at all."""


class InstallationWarning(UserWarning):
    """What is worse than it could be as things are installed, such as a plugin that is ignored."""


class MissingExtra(UsageError):
    """An optional dependency that is not installed: the module `package`, which `extra` installs."""

    def __init__(self, package: str, extra: str) -> None:
        checkout = Path(__file__).parent.parent
        wanted = f"-e '{checkout}[{extra}]'" if (checkout / "pyproject.toml").exists() else f"'harness1[{extra}]'"
        super().__init__(f"{package} is not installed; run: pip install {wanted}")
        self.package, self.extra = package, extra

    def __reduce__(self) -> tuple[type[MissingExtra], tuple[str, str]]:
        # Worker processes pickle it, and by default an exception is rebuilt from the arguments of its base class.
        return type(self), (self.package, self.extra)


@contextmanager
def optional(extra: str, package: str | None = None) -> Iterator[None]:
    """Turn a failed import inside this context into a `MissingExtra` for `extra`. `package`: the package that the
    message names, also where its version lacks a name; None: the missing module."""
    try:
        yield
    except ImportError as error:
        if package is None and not isinstance(error, ModuleNotFoundError):
            raise
        raise MissingExtra(package or error.name or extra, extra) from error


class Unreachable(UsageError):
    """A model's server of which nothing can be asked: nobody listens there, or it refuses every request. It ends the
    work, with exit code 3. `status`: of its refusal; None: there was no connection."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


def is_unconnected(error: BaseException) -> bool:
    """Return True if no request ever reached a model's server."""
    return isinstance(error, Unreachable) and error.status is None


class ModelError(UsageError, ValueError):
    """Unusable output of a model: an error of the user while an index is built, and a fault in a search."""


class RewardError(UsageError, ValueError):
    """A reward, or what a term adds to it, that is no number of a reasonable size."""


class ToolError(HarnessError):
    """What a tool of one's own raises for a call that makes no sense: the policy reads the message and goes on. Any
    other exception is a fault of the tool, and invalidates the episode."""

    def __init__(self, message: str) -> None:
        super().__init__(message)


class InfrastructureFault(HarnessError):
    """A retriever, verifier or model that failed after its retries: the episode is invalid and earns no penalty."""


class Refusal(InfrastructureFault):
    """A model server's permanent refusal of one request; the next may succeed. `status`: the HTTP status."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class Overflow(Refusal):
    """A refusal of a prompt that is longer than the model's context."""


class Unreadable(InfrastructureFault):
    """A model's server cannot read what its model wrote: the same request would fail alike, another may succeed."""
