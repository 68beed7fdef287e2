"""Every error has an owner: the policy, the user, or the infrastructure.

A policy's mistake becomes an observation and never leaves the environment. A user's mistake ends the command with
exit code 2 and one clear line. An infrastructure fault is retried, then invalidates the episode.
"""

from __future__ import annotations


class HarnessError(Exception):
    """The root of all errors that this package raises on purpose."""


class UsageError(HarnessError):
    """The user asked for something that cannot be done: a bad path, option, or file."""


class ConfigError(UsageError):
    """A configuration value is unknown or out of range."""


class CorpusError(UsageError):
    """A corpus, dataset or index on disk cannot be read as what it claims to be."""


class SchemaError(UsageError):
    """A record was written by a newer version of the package, or is not a record at all."""


class MissingExtra(UsageError):
    """An optional dependency is not installed.

    Args:
        package: the module that could not be imported.
        extra: the name of the extra that installs it.
    """

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"{package} is not installed; run: pip install 'harness1[{extra}]'")
        self.package, self.extra = package, extra

    def __reduce__(self) -> tuple[type[MissingExtra], tuple[str, str]]:
        # It comes from worker processes, and exceptions are copied by the arguments that their base class was given.
        return type(self), (self.package, self.extra)


class ModelError(UsageError, ValueError):
    """A model gives what cannot be used. While an index is built that is the user's to mend; in a search it is a fault
    like every other `ValueError` of an engine."""


class InfrastructureFault(HarnessError):
    """A retriever, verifier or model failed after its retries: the episode is invalid, never punished."""


class Refusal(InfrastructureFault):
    """The server of a model refuses one request for good: too long, filtered, or with a name that it does not know.
    It may take the next one.

    Args:
        status: the one of HTTP that it answered with.
    """

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status
