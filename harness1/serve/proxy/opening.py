"""Open an upstream as a user names it: a model as for `--policy`, or the address of a chat server."""

from __future__ import annotations

from harness1.config import Config
from harness1.errors import UsageError
from harness1.models.open import open_backend
from harness1.models.spec import ModelSpec
from harness1.serve.proxy.chat_upstream import ChatUpstream
from harness1.serve.proxy.token_upstream import TokenUpstream
from harness1.serve.proxy.upstream import Upstream


def open_upstream(spec: str, config: Config) -> Upstream:
    """Open the upstream of a proxy.

    Args:
        spec: `http://HOST:PORT/v1`, `openai:MODEL@URL`, or a model whose tokens are sampled by id: `hf:PATH`,
            `vllm:PATH`, `vllm:MODEL@URL`, `sglang:MODEL@URL`.

    Raises:
        UsageError: the model does not exist or cannot be loaded.
        ConfigError: the settings do not fit it.
        MissingExtra: a library that runs it is not installed.
    """
    if spec.startswith(("http://", "https://")):
        return ChatUpstream(spec, "", config)
    try:
        asked = ModelSpec.read(spec)
    except UsageError as error:
        raise UsageError(f"{error}; a chat server is given as http://HOST:PORT/v1") from error
    if asked.kind == "openai":
        return ChatUpstream(asked.url or "", asked.model, config)
    model, chat = open_backend(asked, config)
    return TokenUpstream(spec, model, chat, config)
