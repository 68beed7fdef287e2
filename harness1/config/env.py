"""`[env]`: everything that decides what a policy can do and see, all of it in `env_hash`.

Every mechanism of the environment is a field with an `on` switch or a choice; turning it off removes it from the
prompt, the tool schemas, the memory, the reward and the metrics together.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from harness1.errors import ConfigError
from harness1.records import Tag
from harness1.settings import Count, Positive, Settings, Share, Weight

OBSERVATION_SHARE = 0.4
"""The largest share of a prompt that the texts of one observation may take."""
HITS_SHARE = 0.5
"""The largest share of a prompt that the hits of one observation may take with all that is shown beside their texts."""
TITLE_SHARE = 1 / 16
"""The largest share of a prompt that one title may take."""
_LATER = (
    ("evidence", "rank", False),
    ("leads", "on", False),
    ("auto_populate", "by", "first"),
    ("read", "by", "order"),
    ("verification", "titles", False),
)
"""Settings that did not exist when environments were first recorded: group, name, and the value that means off."""


class Search(Settings):
    """The limits of one search query."""

    hits: Positive = 10
    """Hits per query."""
    tokens: Positive = 4096
    """Tokens of shown text per query; hits that do not fit are left, uncut, for a later search."""


class Rerank(Settings):
    """Reranking by a cross-encoder (`machine.reranker`), which reads query and chunk together."""

    on: bool = False
    candidates: Positive = 50
    """Number of top chunks that it reads."""


class Retrieval(Settings):
    """Ranking with an index of terms and embeddings. External engines read the settings that apply to them."""

    mode: Literal["auto", "bm25", "dense", "hybrid"] = "auto"
    """`auto`: hybrid where the index has embeddings, else BM25."""
    rrf_k: Positive = 60
    bm25_depth: Positive = 25
    """Chunks of the BM25 list that take part in fusion; never fewer than requested."""
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
    by: Literal["order", "evidence"] = "evidence"
    """Of a document longer than `tokens`, show the first parts, or those nearest to the question."""


class Review(Settings):
    on: bool = True
    documents: Positive = 5
    tokens: Positive = 4096


class Verification(Settings):
    on: bool = True
    judge: Literal["lexical", "fitted", "cross_encoder", "language_model"] = "lexical"
    """Shared words, fitted features, the cross-encoder at `machine.reranker`, or the language model at
    `machine.verifier`."""
    model: str = ""
    """The judging language model's name on its server; or the embedding model of `fitted`, as in `index.dense.model`
    (empty: words alone)."""
    titles: bool = False
    """Put the title of a document on a line before the text that is judged."""
    documents: Positive = 5
    characters: Positive = 6000
    """Characters of a document that the verifier reads."""
    lines: Positive = 8
    """Verdicts shown in the memory, newest first."""


class Curation(Settings):
    cap: Annotated[int, Meta(ge=1, le=30)] = 30
    tags: bool = True
    """Importance tags; without them all entries are equal."""
    eviction: Literal["rank", "fifo", "refuse"] = "rank"
    """At the cap: evict a strictly less important entry, the oldest entry, or refuse the new one."""


class AutoPopulate(Settings):
    on: bool = True
    documents: Positive = 8
    tag: Tag = "fair"
    by: Literal["first", "evidence"] = "evidence"
    """Curate the first units of the first search; or, with `evidence.rank`, the best of all searches so far, anew after
    each search until the policy edits the set."""


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
    """Characters of a chunk that are searched for entities."""
    handles: bool = False
    """Give entities of the question and of shown hits handles (E3), which search queries may contain. Independent of
    `on`, which is about entities that documents share."""
    rank: bool = True
    """Rank the pool by evidence value, and show the order on a line of its own."""

    @property
    def ranks(self) -> bool:
        """True if units are ranked; the value needs the graph."""
        return self.on and self.rank


class Leads(Settings):
    """Names worth a search, found by `evidence.rank`."""

    on: bool = True
    lines: Annotated[int, Meta(ge=1, le=30)] = 8


class History(Settings):
    on: bool = True
    lines: Positive = 12


class PoolView(Settings):
    lines: Positive = 50
    """Newest uncurated entries, shown with a snippet."""
    older: Count = 30
    """Older uncurated entries, shown by handle alone."""
    snippet: Positive = 120


class BudgetMarker(Settings):
    on: bool = True
    halfway: Share = 0.60
    warning: Share = 0.75
    critical: Share = 0.90


class Pruning(Settings):
    """Limits on the size of a transcript (`rendering.order`), which only grows: the policy has to prune it. Constants
    of Context-1, the baseline that Harness-1 is compared with."""

    on: bool = False
    tokens: Positive = 16384
    """Size in tokens above which every observation asks the policy to prune or to conclude."""
    refusal: Positive = 24326
    """Size in tokens above which only pruning, curating and ending the search are allowed."""
    output: Positive = 4096
    """Maximum tokens of one observation."""


class Rendering(Settings):
    order: Literal["paper", "stable_first", "epoch", "transcript"] = "paper"
    recent: Positive = 5
    """Turns shown in full."""
    recent_max: Positive = 9
    """`stable_first`: the window grows to this many turns, then is cut back to `recent`."""
    epoch_turns: Positive = 5
    instructions: Literal["full", "brief", "minimal"] = "full"
    """The static prompt: all rules; the few that fit a small window; or a single line, for a model trained in this
    environment, with tools named but not described and the turn in place of the budget line."""


class Env(Settings):
    """Everything that decides what a policy can do and see. All of it enters `env_hash`.

    Defaults are the published constants (Harness-1, arXiv 2606.02373, as in `configs/paper.toml`), except that units
    are ranked by evidence, with what rests on that. Sizes are in tokens unless a field says otherwise.
    """

    max_turns: Positive = 40
    context_window: Annotated[int, Meta(ge=256)] = 32768
    """Tokens of prompt and output together."""
    generation_reserve: Positive = 2048
    """Tokens of the window kept free for the output."""
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
    leads: Leads = Leads()
    history: History = History()
    pool: PoolView = PoolView()
    budget_marker: BudgetMarker = BudgetMarker()
    pruning: Pruning = Pruning()
    rendering: Rendering = Rendering()

    @property
    def prompt_limit(self) -> int:
        """Maximum tokens of a prompt: context window minus generation reserve."""
        return self.context_window - self.generation_reserve

    def hashed(self) -> dict[str, Any]:
        """Return the settings that enter hashes: all, except that mechanisms made after the first records count only
        where they are on, so that earlier records keep their hashes."""
        tree: dict[str, Any] = msgspec.to_builtins(self)
        for group, name, off in _LATER:
            if tree[group][name] == off:
                del tree[group][name]
        return {group: settings for group, settings in tree.items() if group != "leads" or self.leads.on}

    @property
    def leads_on(self) -> bool:
        """True if leads are shown; they come from the ranking."""
        return self.leads.on and self.evidence.ranks

    @property
    def refills(self) -> bool:
        """True if the curated set follows the evidence until the policy edits it."""
        return self.auto_populate.on and self.auto_populate.by == "evidence" and self.evidence.ranks

    @property
    def hits_limit(self) -> int:
        """Maximum tokens of the hits of one observation as they are shown, at four characters each."""
        return int(self.prompt_limit * HITS_SHARE)

    @property
    def title_limit(self) -> int:
        """Maximum tokens of a title in a small window, at four characters each."""
        return int(self.prompt_limit * TITLE_SHARE)

    def observation_limit(self, tokens: int) -> int:
        """Cap an allowance in tokens, so that even a small context window holds a whole turn."""
        most = int(self.prompt_limit * OBSERVATION_SHARE)
        return min(tokens, most, self.pruning.output) if self.pruning.on else min(tokens, most)


def recorded_without(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return recorded settings of an environment with every mechanism that they do not mention switched off."""
    complete = dict(tree)
    for group, name, off in _LATER:
        settings = complete.get(group, {})
        if isinstance(settings, dict):  # else the card is damaged, which its reader says
            complete[group] = {name: off} | settings
    return complete
