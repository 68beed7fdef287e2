"""The configuration of everything, as one frozen value: from TOML plus dotted overrides (design section 2.5).

Every mechanism of the environment is a field with an `on` switch or a choice; turning it off removes it from the
prompt, the tool schemas, the memory, the reward and the metrics together. Defaults are the published constants
(Harness-1, arXiv 2606.02373; `configs/paper.toml` says the same).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, dataclass_transform

import msgspec
from msgspec import Meta

from harness1.errors import ConfigError
from harness1.hashing import digest
from harness1.records import Tag

Count = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
Share = Annotated[float, Meta(ge=0.0, le=1.0)]
Weight = Annotated[float, Meta(ge=0.0)]

OBSERVATION_SHARE = 0.4
"""The most of a prompt that one observation may take."""


@dataclass_transform(frozen_default=True, field_specifiers=(msgspec.field,))
class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The base of every group of settings: immutable, unknown keys refused."""


class Search(Settings):
    """What one search query may return."""

    hits: Positive = 10
    """Hits per query."""
    tokens: Positive = 4096
    """Tokens of shown text per query; hits that do not fit are left for a later search, whole."""


class Rerank(Settings):
    """A cross-encoder reads query and chunk together (which one: `run.reranker`)."""

    on: bool = False
    candidates: Positive = 50
    """How many of the best chunks it reads."""


class Retrieval(Settings):
    """How an index with terms and embeddings ranks. Engines beyond this package read what applies to them."""

    mode: Literal["auto", "bm25", "dense", "hybrid"] = "auto"
    """`auto`: hybrid where the index has embeddings, else BM25."""
    rrf_k: Positive = 60
    bm25_depth: Positive = 25
    """Chunks of the BM25 list that take part in fusion; never fewer than are asked for."""
    dense_depth: Positive = 25
    bm25_weight: Weight = 1.0
    dense_weight: Weight = 1.0
    rerank: Rerank = Rerank()

    def __post_init__(self) -> None:
        if not 0.0 < self.bm25_weight + self.dense_weight < float("inf"):
            raise ConfigError("env.retrieval.bm25_weight and dense_weight must be finite, and not both 0")


class FanOut(Settings):
    on: bool = True
    queries: Positive = 5
    rrf_k: Positive = 60


class Grep(Settings):
    on: bool = True
    hits: Positive = 5


class Read(Settings):
    on: bool = True
    tokens: Positive = 4096


class Review(Settings):
    on: bool = True
    documents: Positive = 5
    tokens: Positive = 4096


class Verification(Settings):
    on: bool = True
    judge: Literal["lexical", "cross_encoder"] = "lexical"
    """By shared words, or by the cross-encoder at `run.reranker`."""
    documents: Positive = 5
    characters: Positive = 6000
    """How much of a document the verifier reads."""
    lines: Positive = 8
    """Verdicts shown in the memory, newest first."""


class Curation(Settings):
    cap: Annotated[int, Meta(ge=1, le=30)] = 30
    tags: bool = True
    """Importance tags; without them every entry is equal."""
    eviction: Literal["rank", "fifo", "refuse"] = "rank"
    """At the cap: evict a strictly less important entry, the oldest entry, or refuse the new one."""


class AutoPopulate(Settings):
    on: bool = True
    documents: Positive = 8
    tag: Tag = "fair"


class Dedup(Settings):
    on: bool = True
    permutations: Annotated[int, Meta(ge=16, le=256)] = 64
    shingle: Positive = 5
    threshold: Share = 0.85
    min_characters: Count = 40


class Compression(Settings):
    on: bool = True
    sentences: Positive = 4


class Evidence(Settings):
    on: bool = True
    entities: Positive = 8
    documents: Positive = 5
    """Documents named beside each bridge entity."""
    characters: Positive = 8000
    """How much of a chunk is searched for entities."""


class History(Settings):
    on: bool = True
    lines: Positive = 12


class PoolView(Settings):
    lines: Positive = 50
    """Newest uncurated entries shown with a snippet."""
    older: Count = 30
    """Older uncurated entries shown by handle alone."""
    snippet: Positive = 120


class BudgetMarker(Settings):
    on: bool = True
    halfway: Share = 0.60
    warning: Share = 0.75
    critical: Share = 0.90


class Rendering(Settings):
    order: Literal["paper", "stable_first", "epoch"] = "paper"
    recent: Positive = 5
    """Turns shown in full."""
    recent_max: Positive = 9
    """`stable_first`: the window grows to this many turns, then is cut back to `recent`."""
    epoch_turns: Positive = 5


class Env(Settings):
    """Everything that decides what a policy can do and see. It is in `env_hash`, whole."""

    max_turns: Positive = 40
    context_window: Annotated[int, Meta(ge=512)] = 32768
    generation_reserve: Positive = 2048
    guidance: Literal["none", "facts", "prescriptive"] = "facts"
    search: Search = Search()
    retrieval: Retrieval = Retrieval()
    fan_out: FanOut = FanOut()
    grep: Grep = Grep()
    read: Read = Read()
    review: Review = Review()
    verification: Verification = Verification()
    curation: Curation = Curation()
    auto_populate: AutoPopulate = AutoPopulate()
    dedup: Dedup = Dedup()
    compression: Compression = Compression()
    evidence: Evidence = Evidence()
    history: History = History()
    pool: PoolView = PoolView()
    budget_marker: BudgetMarker = BudgetMarker()
    rendering: Rendering = Rendering()

    @property
    def prompt_limit(self) -> int:
        """The most tokens that a prompt may have: context window minus generation reserve."""
        return self.context_window - self.generation_reserve

    def observation_limit(self, tokens: int) -> int:
        """An allowance in tokens, kept small enough that a small context window still holds a whole turn."""
        return min(tokens, int(self.prompt_limit * OBSERVATION_SHARE))


class Dense(Settings):
    """Embeddings of the chunks of an index, beside their terms."""

    model: str = ""
    """A name or local folder for sentence-transformers, or `hash:DIMENSIONS` (needs no model); empty: none."""
    search: Literal["exact", "hnsw", "ivf"] = "exact"
    """Exact up to about a million chunks; the approximate graphs and lists of faiss beyond."""
    query_prefix: str = ""
    """Put before a query, where the model was trained so (`query: `)."""
    document_prefix: str = ""
    hnsw_links: Positive = 32
    hnsw_build: Positive = 200
    hnsw_search: Positive = 128
    ivf_lists: Count = 0
    """0: 4 times the square root of the number of vectors."""
    ivf_probes: Positive = 32


class Index(Settings):
    """How a corpus is cut and analysed. It is in `index_hash`."""

    unit: Literal["document", "chunk"] = "document"
    chunk_tokens: Positive = 512
    """Documents longer than this (characters / 4) are cut at sentence borders; shorter ones stay whole."""
    k1: Annotated[float, Meta(ge=0.0)] = 1.2
    b: Share = 0.75
    dense: Dense = Dense()


class Reward(Settings):
    """Weights of the composite terminal reward (paper, Table 5). It is in `reward_hash`."""

    outcome: float = 0.7
    beta: Annotated[float, Meta(gt=0.0)] = 2.0
    trajectory: float = 0.3
    answer_found: float = 1.0
    answer: float = 0.8
    trajectory_answer: float = 0.4
    answer_missed: float = 0.35
    recall_gap: float = 0.0
    diversity: float = 0.15
    diversity_target: Positive = 6
    diversity_shortfall: float = 0.0
    curation: float = 0.0
    curation_target: Share = 0.40
    turn_penalty: float = 0.02
    turn_penalty_from: Count = 20
    empty: float = -0.2
    format_failure: float = -0.5
    floor: float = 0.001


class Web(Settings):
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
    timeout_s: Annotated[float, Meta(gt=0.0)] = 20.0
    """For one request, from connecting to the last byte."""
    concurrency: Positive = 16
    """Requests in flight in one process."""
    offline: bool = False
    """Answer from the cache alone; what is not there is a fault."""

    def public(self) -> Web:
        """The settings without their keys, fit to be shown and written down."""
        return msgspec.structs.replace(self, search_key="", read_key="")

    def __repr__(self) -> str:
        # `public` is a Web too: only the representation of the base class does not come back here.
        return super(Web, self.public()).__repr__()

    def __rich_repr__(self) -> Any:
        return super(Web, self.public()).__rich_repr__()


class Run(Settings):
    """How work is carried out on this machine. It is in no hash."""

    workers: Count = 0
    """Worker processes for policies without a model; 0 means: one for each core."""
    concurrency: Positive = 8
    """Episodes in flight in one process."""
    attempts: Positive = 3
    """Tries of a retriever or verifier before its fault invalidates the episode."""
    backoff_s: Annotated[float, Meta(ge=0.0)] = 0.2
    call_deadline_s: Annotated[float, Meta(gt=0.0)] = 30.0
    episode_deadline_s: Annotated[float, Meta(gt=0.0)] = 600.0
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


class Config(Settings):
    env: Env = Env()
    index: Index = Index()
    reward: Reward = Reward()
    run: Run = Run()

    def __post_init__(self) -> None:
        if self.env.generation_reserve >= self.env.context_window:
            raise ConfigError("env.generation_reserve must be smaller than env.context_window")
        if self.env.rendering.recent_max < self.env.rendering.recent:
            raise ConfigError("env.rendering.recent_max must not be smaller than env.rendering.recent")

    @property
    def reward_hash(self) -> str:
        return digest(self.reward)


def load_config(path: Path | None = None, overrides: list[str] | None = None) -> Config:
    """The defaults, overlaid with a TOML file, overlaid with `a.b=value` settings.

    Raises:
        ConfigError: a key is unknown, a value has the wrong type or is out of range, or the file is not TOML.
    """
    tree: dict[str, Any] = {}
    if path is not None:
        try:
            tree = msgspec.toml.decode(path.read_bytes())
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}") from error
        except msgspec.MsgspecError as error:
            raise ConfigError(f"{path} is not TOML: {error}") from error
    for override in overrides or []:
        _overlay(tree, override)
    try:
        return msgspec.convert(tree, Config)
    except msgspec.ValidationError as error:
        raise ConfigError(f"configuration: {error}") from error


def _overlay(tree: dict[str, Any], override: str) -> None:
    """Put `a.b=value` into the tree; the value is read as TOML, and as a plain string where it is none."""
    path, sign, text = override.partition("=")
    keys = path.strip().split(".")
    if not sign or not all(keys):
        raise ConfigError(f"--set takes a.b=value, not {override!r}")
    for key in keys[:-1]:
        node = tree.setdefault(key, {})
        if not isinstance(node, dict):
            raise ConfigError(f"{override!r}: {key} is a value, not a group of settings")
        tree = node
    try:
        tree[keys[-1]] = msgspec.toml.decode(f"value = {text.strip()}")["value"]
    except msgspec.MsgspecError:
        tree[keys[-1]] = text.strip()
