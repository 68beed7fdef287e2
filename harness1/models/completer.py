"""Opens models that complete a conversation, by one name whether they are served or sampled here."""

from __future__ import annotations

from typing import Protocol

from harness1.config import Config
from harness1.http.completions import Completer, Completion, Messages
from harness1.http.model_endpoint import verifier_endpoint
from harness1.models.backend_completer import BackendCompleter
from harness1.models.open import open_backend
from harness1.models.spec import ModelSpec


class Completing(Protocol):
    """A language model that completes a conversation: a `Completer` or a `BackendCompleter`."""

    async def complete(self, messages: Messages) -> Completion:
        """Return the reply; raise InfrastructureFault if there is none."""
        ...


def open_completer(spec: str, config: Config, most_tokens: int) -> Completing:
    """Open a model by its name: `openai:MODEL@URL`, with key and limits of `machine.verifier`, or a model as a policy
    is named, such as `hf:PATH`.

    Args:
        most_tokens: tokens of a reply, including the thoughts before it.

    Raises:
        UsageError, ConfigError, MissingExtra: as `open_backend`.
    """
    asked = ModelSpec.read(spec)
    if asked.kind == "openai" and asked.url is not None:
        return Completer(verifier_endpoint(asked.url, config.machine), asked.model, most_tokens)
    backend, chat = open_backend(asked, config)
    return BackendCompleter(backend, chat, most_tokens)
