"""How work is carried out on this machine: `[machine]` of the configuration. It is in no hash."""

from __future__ import annotations

from typing import Annotated, Any, Self

import msgspec
from msgspec import Meta

from harness1.redaction import without_password
from harness1.settings import Count, Positive, Seconds, Settings, Weight


class Keyed(Settings):
    """Settings with keys, which are secrets."""

    def public(self) -> Self:
        """The settings without their keys and without passwords in addresses, fit to be shown and written down."""
        shown = {name: "" for name in self.__struct_fields__ if name.endswith("key")}
        addresses = [name for name in self.__struct_fields__ if name.endswith("url")]
        shown |= {name: without_password(getattr(self, name)) for name in addresses}
        return msgspec.structs.replace(self, **shown)

    def __repr__(self) -> str:
        # `public` is of the same class: only the representation of the base class does not come back here.
        return super(Keyed, self.public()).__repr__()

    def __rich_repr__(self) -> Any:
        return super(Keyed, self.public()).__rich_repr__()


class Web(Keyed):
    """Endpoints of the web retriever (`--index web:CACHE`): a search API like Serper's, a page reader like Jina's."""

    search_url: str = ""
    search_key: str = ""
    read_url: str = ""
    """The page's own address is appended to it."""
    read_key: str = ""
    hosts: tuple[str, ...] = ()
    """Only pages of these hosts and their subdomains are found and read; none: of all public names.
    IP addresses and local names must be listed exactly."""
    results: Positive = 10
    """Results asked of the search API, beside those that an episode has seen; it shows `env.search.hits` of them."""
    page_bytes: Positive = 2_000_000
    """A longer page is cut there, at the border of a character; a longer answer of the search API is a fault."""
    timeout_s: Seconds = 20.0
    """For one request, from connecting to the last byte."""
    concurrency: Positive = 16
    """Requests in flight in one process."""
    offline: bool = False
    """Answer from the cache alone; what is not there is a fault."""


class ModelServer(Keyed):
    """A server of language models with the routes of OpenAI."""

    url: str = ""
    """Up to and with `/v1`."""
    key: str = ""
    timeout_s: Seconds = 60.0
    concurrency: Positive = 16
    """Requests in flight in one process."""


class Model(Keyed):
    """How a policy's language model is run on this machine, or reached."""

    device: str = ""
    """Of a model in this process: cpu, cuda, cuda:1; empty: a GPU where there is one."""
    threads: Count = 0
    """Of a model on a CPU; 0: what torch prefers."""
    rows: Positive = 16
    """Episodes that are decoded together."""
    cache_tokens: Count = 65536
    """Tokens whose keys and values are kept for prompts that begin alike; 0: none."""
    memory_share: Annotated[float, Meta(gt=0.0, le=1.0)] = 0.85
    """Of a GPU, for vLLM in this process."""
    tokenizer: str = ""
    """Where the tokenizer of a model behind a server lies, if the server's name for the model is no such place."""
    foreign: bool = False
    """Take a model that was trained here for another environment or format than the present one."""
    key: str = ""
    """For a model behind a server."""
    timeout_s: Seconds = 300.0
    """For one request to a server."""
    concurrency: Positive = 64
    """Requests to a server in flight in one process."""


class Price(Settings):
    """What tokens of a model cost, in dollars for a million. All 0: no cost is reckoned."""

    prompt: Weight = 0.0
    """Of a prompt, where the call before did not leave them."""
    cached: Weight = 0.0
    """Of a prompt, where it did."""
    output: Weight = 0.0


class Fleet(Settings):
    """Workers on a Ray cluster that play episodes for `rl train`, and what each of them takes of it."""

    workers: Count = 0
    """0: there is no cluster, and episodes are played in the trainer's process."""
    places: Positive = 8
    """Episodes that a worker plays at a time."""
    cpus: Annotated[float, Meta(ge=0.0)] = 1.0
    gpus: Annotated[float, Meta(ge=0.0)] = 0.0
    attempts: Positive = 3
    """Workers that may be lost while they play an episode until it counts as broken."""
    patience_s: Seconds = 300.0
    """Seconds without any worker after which there is none to hope for."""
    address: str = ""
    """Of the cluster ("auto": the one that this machine is part of); empty: Ray is started here, for this training."""


class Learn(Settings):
    """Where `rl train` finds what it learns from, unless the command line says it."""

    data: tuple[str, ...] = ()
    """Datasets; those with a split `dev` are watched on it, of others some tasks are held out."""
    split: str = "train"
    index: tuple[str, ...] = ()
    """An index for each dataset, instead of one that is built; none: of each its own."""
    admission: tuple[str, ...] = ()
    """Reports of `rl check`, for each dataset one, whose admitted tasks alone are sampled; none: all tasks."""
    model: str = ""
    """hf:PATH, or vllm:MODEL@URL with the same weights here, from which training begins."""
    out: str = ""


class Machine(Settings):
    """How work is carried out on this machine. It is in no hash."""

    workers: Count = 0
    """Worker processes for policies without a model; 0 means: one for each core."""
    concurrency: Positive = 8
    """Episodes in flight in one process."""
    attempts: Positive = 3
    """Tries of a retriever or verifier before its fault invalidates the episode."""
    backoff_s: Annotated[float, Meta(ge=0.0)] = 0.2
    call_deadline_s: Seconds = 30.0
    episode_deadline_s: Seconds = 600.0
    bootstrap: Positive = 2000
    """Resamples behind a confidence interval."""
    embedder: str = ""
    """Where the embedding model of an index lies on this machine; empty: where it lay when the index was built."""
    reranker: str = ""
    """A name or local folder of a cross-encoder for sentence-transformers."""
    device: str = ""
    """Of models for retrieval: cpu, cuda, cuda:1; empty: what torch prefers."""
    threads: Count = 0
    """Of a model for retrieval on a CPU, in each process; 0: the cores, shared among worker processes."""
    batch_ms: Annotated[float, Meta(ge=0.0)] = 2.0
    """How long a search waits for others to share a batch with."""
    batch_size: Positive = 64
    cached_searches: Count = 4096
    """Results kept in memory for equal searches, which sibling episodes ask; fewer where they are long; 0: none."""
    web: Web = Web()
    model: Model = Model()
    verifier: ModelServer = ModelServer()
    price: Price = Price()
    learn: Learn = Learn()
    fleet: Fleet = Fleet()
