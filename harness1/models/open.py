"""Open a language model by its name, such as `hf:PATH` or `openai:MODEL@URL`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import cast

from harness1.config import Config, Machine
from harness1.env.pieces import Role, piece
from harness1.errors import ConfigError, UsageError, optional
from harness1.http.model_endpoint import (
    Completer,
    Completion,
    Messages,
    ModelEndpoint,
    policy_endpoint,
    verifier_endpoint,
)
from harness1.models.backend import Backend
from harness1.models.causal_model import context_window
from harness1.models.chat_format import ChatFormat, join_spans
from harness1.models.checkpoint import format_of
from harness1.models.fetch import resolve_model
from harness1.models.formats import open_format
from harness1.models.spec import ModelSpec
from harness1.models.token_server import SglangServer, VllmServer
from harness1.models.tokenizer import HarmonyVocabulary, open_tokenizer
from harness1.models.transformers_backend import open_transformers
from harness1.models.vllm_engine import open_vllm
from harness1.records import Sampling

HARMONY = "harmony"  # the value of `machine.model.tokenizer` for the vocabulary of gpt-oss


def open_backend(asked: ModelSpec, config: Config, adapter_rank: int = 0) -> tuple[Backend, ChatFormat]:
    """Open a model sampled by token ids, and its format; raise as `open_model`. `adapter_rank`: as of `open_vllm`."""
    model = config.machine.model
    if asked.url is not None:
        try:
            place = model.tokenizer or resolve_model(asked.model)
        except UsageError as error:
            hint = "if the server has its own name for it: --set machine.model.tokenizer=FOLDER"
            raise UsageError(f"{error}; {hint}") from error
        chat, server = format_at(place, config), {"vllm": VllmServer, "sglang": SglangServer}[asked.kind]
        endpoint = policy_endpoint(asked.url.rstrip("/").removesuffix("/v1"), config.machine)
        return server(endpoint, asked.model, kept=config.rl.staleness + 2), chat
    folder = resolve_model(asked.model)
    chat = format_at(folder, config)
    most = context_window(folder)
    if most is not None and config.env.context_window > most:  # before an episode runs into its end
        wanted = f"env.context_window={config.env.context_window}"
        raise ConfigError(
            f"{wanted} is more than the {most} tokens that {folder.name} reads: --config small fits 8,192"
        )
    dtype = config.policy.dtype
    if asked.kind == "vllm":
        room = {"max_model_len": config.env.context_window, "adapter_rank": adapter_rank}
        return open_vllm(
            folder, dtype=dtype, memory_share=model.memory_share, enable_sleep_mode=model.sleep, **room
        ), chat
    device = config.machine.device or choose_device()
    sizes = {"threads": config.machine.threads, "rows": config.machine.slots, "cache_tokens": model.cache_tokens}
    return open_transformers(folder, device=device, dtype=dtype, **sizes), chat


def format_at(place: str | Path, config: Config) -> ChatFormat:
    """Open the format of a model, by the folder of its tokenizer or `HARMONY`; raise as `open_model`."""
    if place == HARMONY:
        return open_format(config.policy.format, HarmonyVocabulary())
    folder = resolve_model(str(place))
    return open_format(format_of(folder, config), open_tokenizer(folder))


def choose_device() -> str:
    """Return `cuda` where torch finds a GPU, else `cpu`; raise MissingExtra without torch."""
    with optional("train"):
        import torch
    return "cuda" if torch.cuda.is_available() else "cpu"


class BackendCompleter:
    """Completes conversations of texts at temperature 0, with a `Backend`."""

    def __init__(self, backend: Backend, chat: ChatFormat, most_tokens: int) -> None:
        self._backend, self._chat, self.most_tokens = backend, chat, most_tokens

    async def complete(self, messages: Messages) -> Completion:
        """Return the reply to system and user messages; raise as the backend does."""
        groups = [[piece("message", cast(Role, message["role"]), message["content"])] for message in messages]
        prompt = [*join_spans(self._chat.messages(groups, ())), *self._chat.prompt_end().ids]
        sampling = Sampling(temperature=0.0, max_tokens=self.most_tokens, stop_ids=self._chat.stop_ids)
        output = await self._backend.generate(prompt, sampling)
        said = [token for token in output.output_ids if token not in self._chat.stop_ids]
        text = self._chat.tokenizer.decode(said)
        return Completion(text, output.finish_reason, len(prompt), len(output.output_ids))


Completing = Completer | BackendCompleter  # a language model that completes a conversation


def open_completer(
    spec: str, config: Config, most_tokens: int, endpoint: Callable[[str, Machine], ModelEndpoint] = verifier_endpoint
) -> Completing:
    """Open `openai:MODEL@URL` at an endpoint, by default with the key of `machine.verifier`, or a model named as a
    policy is."""
    asked = ModelSpec.read(spec)
    if asked.kind == "openai" and asked.url is not None:
        return Completer(endpoint(asked.url, config.machine), asked.model, most_tokens)
    backend, chat = open_backend(asked, config)
    return BackendCompleter(backend, chat, most_tokens)
