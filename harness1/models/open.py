"""Open a language model by its name, such as `hf:PATH` or `openai:MODEL@URL`."""

from __future__ import annotations

from pathlib import Path

from harness1.config import Config
from harness1.errors import ConfigError, UsageError, optional
from harness1.http.client import HttpClient
from harness1.http.model_endpoint import policy_endpoint
from harness1.models.backend import Backend
from harness1.models.checkpoint import format_of
from harness1.models.files.fetch import resolve_model
from harness1.models.formats.chat_format import ChatFormat
from harness1.models.formats.harmony_vocabulary import HarmonyVocabulary
from harness1.models.formats.registry import open_format
from harness1.models.servers.sglang import SglangServer
from harness1.models.servers.token_server import server_root
from harness1.models.servers.vllm import VllmServer
from harness1.models.servers.vllm_engine import open_vllm
from harness1.models.spec import ModelSpec
from harness1.models.tokenizer import open_tokenizer
from harness1.models.transformers.backend import open_transformers
from harness1.models.transformers.causal_model import context_window

HARMONY = "harmony"
"""The value of `machine.model.tokenizer` for the vocabulary of gpt-oss."""


def open_backend(asked: ModelSpec, config: Config, adapter_rank: int = 0) -> tuple[Backend, ChatFormat]:
    """Open a model whose tokens are sampled by their ids, and its format.

    Args:
        adapter_rank: rank of the adapters that will be loaded; 0 for none. vLLM makes room for them when it starts.

    Raises:
        UsageError, ConfigError, MissingExtra: as `open_model`.
    """
    model = config.machine.model
    if asked.url is not None:
        chat = format_at(model.tokenizer or _weights_of(asked), config)
        server = {"vllm": VllmServer, "sglang": SglangServer}[asked.kind]
        endpoint = policy_endpoint(server_root(asked.url), config.machine, HttpClient)
        return server(endpoint, asked.model, weights=asked.model, kept=config.rl.staleness + 2), chat
    folder = resolve_model(asked.model)
    chat = format_at(folder, config)
    _check_window(folder, config)
    dtype = config.policy.dtype
    if asked.kind == "vllm":
        room = {"max_model_len": config.env.context_window, "adapter_rank": adapter_rank}
        room |= {"tensor_parallel_size": model.tensor_parallel, "enable_sleep_mode": model.sleep}
        return open_vllm(folder, dtype=dtype, memory_share=model.memory_share, **room), chat
    device = model.device or preferred_device()
    sizes = {"threads": model.threads, "rows": model.rows}
    sizes |= {"cache_tokens": model.cache_tokens, "prefill_tokens": model.prefill_tokens}
    return open_transformers(folder, device=device, dtype=dtype, **sizes), chat


def format_at(place: str | Path, config: Config) -> ChatFormat:
    """Open the format of a model, by the folder of its tokenizer or `HARMONY`.

    Raises:
        UsageError, ConfigError, MissingExtra: as `open_model`; ConfigError also if the model was trained here for
            another environment.
    """
    if place == HARMONY:
        return open_format(config.policy.format, HarmonyVocabulary())
    folder = resolve_model(str(place))
    return open_format(format_of(folder, config), open_tokenizer(folder))


def _weights_of(asked: ModelSpec) -> Path:
    try:
        return resolve_model(asked.model)
    except UsageError as error:
        raise UsageError(
            f"{error}; if the server has its own name for it: --set machine.model.tokenizer=FOLDER"
        ) from error


def preferred_device() -> str:
    """Return `cuda` where torch finds a GPU, else `cpu`.

    Raises:
        MissingExtra: torch is not installed.
    """
    with optional("train"):
        import torch
    return "cuda" if torch.cuda.is_available() else "cpu"


def _check_window(folder: Path, config: Config) -> None:
    """Refuse a context window that the model does not have, before an episode runs into its end."""
    most = context_window(folder)
    if most is not None and config.env.context_window > most:
        raise ConfigError(
            f"env.context_window={config.env.context_window} is more than the {most} tokens that {folder.name} reads:"
            " --config small fits 8,192"
        )
