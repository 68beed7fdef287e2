"""`[machine]`: the execution of work on this machine. It is in no hash."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

import msgspec
from msgspec import Meta

from harness1.config.settings import Count, Positive, Seconds, Settings, Weight
from harness1.plain import HIDDEN, Secret, without_password

MOST_SLOTS = 64  # the most of the configurations that come with the package


class Keyed(Settings):
    """Settings that may hold secrets: keys, and addresses with a password or a key. None is shown or written."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if isinstance(value, str) and (shown := _hide(name, value)) != value:
                msgspec.structs.force_setattr(self, name, Secret("" + value, shown or HIDDEN))

    def public(self) -> Self:
        """Return the settings without secrets, safe to show and store."""
        shown = {name: _hide(name, getattr(self, name)) for name in self.__struct_fields__}
        return msgspec.structs.replace(self, **shown)

    def __repr__(self) -> str:
        # `public` returns the same class, so `repr` of it would recurse: call the base class instead.
        return super(Keyed, self.public()).__repr__()

    def __rich_repr__(self) -> Any:
        return super(Keyed, self.public()).__rich_repr__()


def _hide(name: str, value: Any) -> Any:
    if isinstance(value, Keyed):
        return value.public()
    if isinstance(value, tuple):
        return tuple(_hide(name, each) for each in value)
    if not isinstance(value, str):
        return value
    return "" if name.endswith("key") else without_password("" + value)


class Web(Keyed):
    """Endpoints of the web retriever (`--index web:CACHE`): a search API like Serper's, a page reader like Jina's."""

    search_url: str = ""  # Address of the search API.
    search_key: str = ""  # Key of the search API, sent as `X-API-KEY`.
    read_url: str = ""  # The page's own address is appended to it.
    read_key: str = ""  # Key of the page reader, sent as a bearer token.
    hosts: tuple[str, ...] = ()
    """Hosts, with subdomains, whose pages are found and read (IP addresses: exactly); empty: all public."""
    offline: bool = False  # Answer from the cache only; a miss is a fault.


class ModelServer(Keyed):
    """A server of language models with OpenAI's routes."""

    url: str = ""  # The address up to and including `/v1`.
    key: str = ""  # Key of the server, sent as a bearer token.


class Model(Keyed):
    """Execution of a policy's language model on this machine, or access to its server."""

    cache_tokens: Count = 65536  # Tokens whose keys and values are cached for prompts with a common prefix; 0: none.
    memory_share: Annotated[float, Meta(gt=0.0, le=1.0)] = 0.85  # Share of a GPU's memory for vLLM in this process.
    sleep: bool = False
    """Let vLLM sleep while the trainer steps, where both use the same GPUs: its weights wait in the memory of the
    machine, and its cache is dropped. Off, as moving weights takes time that GPUs of its own need not spend."""
    tokenizer: str = ""  # The tokenizer's location for a model behind a server, if the model's name does not give it.
    foreign: bool = False  # Accept a model that was trained here for another environment or format.
    key: str = ""  # Key for a model behind a server.
    timeout_s: Seconds = 300.0
    """Seconds for one request to a server, or for each part of an answer that is sent as it is written."""


class Fleet(Keyed):
    """Workers on a Ray cluster that play episodes for `rl train`, and the resources of each."""

    workers: Count = 0  # 0: no cluster; episodes are played in the trainer's process.
    gpus: Annotated[float, Meta(ge=0.0)] = 0.0  # GPUs that Ray reserves for each worker; a share is allowed.
    address: str = ""  # The cluster's address ("auto": that of this machine); empty: start Ray here, for this run.


class TrainingService(Settings):
    """A service that trains, named by `--engine tinker:MODEL@URL`; its key is `machine.model.key`."""

    reduction: Literal["sum", "row_mean"] = "sum"
    """How the service adds up the losses of tokens: as Tinker does, or like SkyRL's JAX server (0.3), which takes means
    over the targets of each row and over rows. The latter is undone before rows are sent."""


class Machine(Keyed):
    """Settings of this machine: resources, timeouts, addresses and keys. They are in no hash."""

    workers: Count = 0  # Worker processes for policies without a model; 0: one per core.
    concurrency: Positive = 8  # Episodes in flight in one process, whose calls a model decodes together, up to 64.
    attempts: Positive = 3  # Tries of a retriever or verifier before its fault invalidates the episode.
    call_deadline_s: Seconds = 30.0  # Seconds for one call of a retriever or a verifier; a later answer is a fault.
    episode_deadline_s: Seconds = 600.0
    """Seconds for one episode; a longer one ends as an infrastructure fault. Calls of models count, but for those whose
    server sends its answer as it writes it (llama.cpp, Ollama), each part of which has `model.timeout_s`."""
    embedder: str = ""
    """The folder of an index's embedding model here, or its `openai:MODEL@URL`; empty: as when the index was built."""
    embedder_key: str = ""  # Key of the embedder's server, sent as a bearer token.
    reranker: str = ""
    """A name or local folder of a cross-encoder for sentence-transformers; or the address of a server, as URL or
    `MODEL@URL`, with `/rerank` as vLLM, llama.cpp, TEI and Cohere have it, or vLLM's `/score`."""
    reranker_key: str = ""  # Key of the reranker's server, sent as a bearer token.
    device: str = ""  # For models in this process: cpu, cuda, cuda:1; empty: a GPU if there is one.
    threads: Count = 0  # Threads of models on a CPU; 0: torch's default, or a share of the cores in a worker.
    token_file: str = ""  # A file with the token of the server of an index (`--index http://HOST:PORT`); empty: none.
    data: str = ""  # Folder of the datasets that are named; empty: `harness1/data` in the user's cache folder.
    check_memory: bool = True  # Refuse training that needs more memory than the device has (`harness1 train plan`).
    web: Web = Web()
    model: Model = Model()
    verifier: ModelServer = ModelServer()
    price: tuple[Weight, Weight, Weight] = (0.0, 0.0, 0.0)
    """Dollars per million tokens: of prompts, of what the cache holds of them, and of output. All 0: no cost."""
    service: TrainingService = TrainingService()
    fleet: Fleet = Fleet()

    @property
    def slots(self) -> int:
        """Return the calls that a model in this process decodes together: as many as episodes are in flight, up to
        `MOST_SLOTS`, because each holds the keys and values of a context."""
        return min(self.concurrency, MOST_SLOTS)
