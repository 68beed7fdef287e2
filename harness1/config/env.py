"""`[env]`: everything that decides what a policy can do and see, all of it in `env_hash`. Every mechanism of the
environment is named in `env.mechanisms` or is a choice; turning it off removes it from the prompt, the tool schemas,
the memory, the reward and the metrics together."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Annotated, Any, Literal, TypeVar, get_args

import msgspec
from msgspec import Meta

from harness1.config.settings import (
    LATER,
    SWITCHES,
    Count,
    Positive,
    Settings,
    present,
    refuse_removed,
    to_hash,
    to_record,
    unite,
    without_later,
    without_removed,
)
from harness1.errors import ConfigError
from harness1.plain import without_password
from harness1.plugins import identity
from harness1.words import AUTO, NONE, languages

OBSERVATION_SHARE = 0.4  # The largest share of a prompt that the texts of one observation may take.
PRUNED_OUTPUT = 4096  # Most tokens of one observation in a transcript that is pruned, as in Context-1.
HITS_SHARE = 0.5  # largest share of a prompt for the hits of one observation with what stands beside them
TITLE_SHARE = 1 / 16  # The largest share of a prompt that one title may take.
LARGEST_CAP = 30  # The most units that a curated set may hold.


class Search(Settings):
    """The limits of one search query."""

    hits: Positive = 10  # Hits per query.
    tokens: Positive = 4096  # Tokens of shown text per query; hits that do not fit are left, uncut, for a later search.


class Rerank(Settings):
    """Reranking by a cross-encoder (`machine.reranker`), which reads query and chunk together."""

    on: bool = False  # Rerank every search. Off by default, because it needs a model.


class Retrieval(Settings):
    """Ranking with an index of terms and embeddings. External engines read the settings that apply to them."""

    mode: Literal["auto", "bm25", "dense", "hybrid"] = "auto"  # `auto`: hybrid if the index has embeddings, else BM25.
    rerank: Rerank = Rerank()


class FanOut(Settings):
    """The tool `fan_out_search`: several queries in one turn, with their results fused."""

    hits: Count = 0  # Hits per query; 0: as many as `search.hits`. Few suffice for names: what bears one is first.


class Read(Settings):
    """The tool `read_document`: the text of one document."""

    tokens: Positive = 4096  # Tokens of text that one call shows.
    by: Literal["order", "evidence"] = "evidence"
    """Of a document longer than `tokens`, show the first parts, or those nearest to the question."""


class Verification(Settings):
    """The tool `verify`: a claim judged against documents."""

    judge: Literal["lexical", "language_model", "cross_encoder"] = "lexical"
    """Shared words, or the language model at `machine.verifier`; `cross_encoder` is in old records alone."""
    model: str = ""  # The judging language model's name on its server.


class Curation(Settings):
    """The curated set, which is what a search delivers."""

    cap: Annotated[int, Meta(ge=1, le=LARGEST_CAP)] = LARGEST_CAP  # Units in the set.
    eviction: Literal["rank", "fifo", "refuse"] = "rank"
    """At the cap: evict a strictly less important entry, the oldest entry, or refuse the new one."""


class AutoPopulate(Settings):
    """Curation by the harness, so that a policy that curates nothing delivers something."""

    documents: Positive = 8  # Units that it curates.
    by: Literal["first", "evidence"] = "evidence"
    """Curate the first units of the first search; or, where units are ranked, the best of all searches so far, anew
    after each search until the policy edits the set."""


class Compression(Settings):
    """Hits are shown as the sentences nearest to the query."""

    sentences: Positive = 4  # Sentences of a hit that are shown.
    characters: Count = 0  # Most characters shown of them, cut between words; 0: all. For policies with small windows.


class Evidence(Settings):
    """The evidence graph, which links entities to units that name them, and the order of the units by their value."""

    shared: tuple[Positive, Positive] = (8, 5)  # Entities shown that documents share, and documents named beside each.
    lines: Positive = LARGEST_CAP  # Documents that the evidence order names, the best first: all that can be delivered.


class Leads(Settings):
    """Names worth a search, found by the evidence order."""

    lines: Annotated[int, Meta(ge=1, le=30)] = 8  # Leads shown, the best first.


class History(Settings):
    """One line for each past action, so that a policy does not repeat itself."""

    lines: Positive = 12  # Newest actions shown.


class PoolView(Settings):
    """What the memory shows of documents that were seen and are not curated."""

    lines: Positive = 50  # Newest uncurated entries, shown with a snippet.
    older: Count = 30  # Older uncurated entries, shown by handle alone.
    snippet: Positive = 120  # Characters of text in a line.


class Pruning(Settings):
    """Limits on the size of a transcript (`rendering.order`), which only grows: the policy has to prune it. Constants
    of Context-1, the baseline that Harness-1 is compared with."""

    limits: tuple[Positive, Positive] = (16384, 24326)
    """Sizes in tokens above which every observation asks the policy to prune or to conclude, and above which only
    pruning, curating and ending the search are allowed."""


class Rendering(Settings):
    """The arrangement of the context."""

    order: Literal["paper", "stable_first", "epoch", "transcript"] = "paper"
    """`paper`: the memory, then the last turns, written anew each turn. `stable_first`: turns, then memory, for a
    prefix cache. `epoch`: a snapshot of the memory, continued for some turns. `transcript`: all turns, no memory."""
    window: tuple[Positive, Positive] = (5, 9)
    """Turns shown in full; of `stable_first`, how many they grow to before they are cut back to the first number."""
    epoch_turns: Positive = 5  # `epoch`: turns that continue one snapshot.
    instructions: Literal["full", "brief", "plain", "minimal"] = "full"
    """The static prompt: all rules; the few that fit a small window; plain words for small models that were not trained
    here, beside little that they could copy in place of a query; or a single line, for a model trained in this
    environment, with tools named but not described. The last two show the turn in place of the budget line."""


ToolName = Literal[
    "fan_out_search", "search_corpus", "grep_corpus", "read_document", "review_docs", "curate", "prune_chunks", "verify"
]
_Offered = Literal["fan_out", "grep", "read", "review", "verification", "pruning"]
_Kept = Literal["tags", "auto_populate", "dedup", "compression", "evidence", "rank", "leads", "history"]
Mechanism = Literal[_Offered, _Kept, "budget_marker", "entity_handles", "lead_handles", "marks"]
OPTIONAL = ("entity_handles", "lead_handles", "pruning")


class Env(Settings):
    """Everything that decides what a policy can do and see. All of it enters `env_hash`. Defaults are the published
    constants (Harness-1, arXiv 2606.02373, the configuration `paper`), except that units are ranked by evidence, with
    what rests on that, and text from outside is marked (`marks`). Sizes are in tokens unless a field says otherwise."""

    max_turns: Positive = 40  # Most turns of an episode; after the last, the curated set is delivered as it stands.
    context_window: Annotated[int, Meta(ge=256)] = 32768  # Tokens of prompt and output together.
    generation_reserve: Positive = 2048  # Tokens of the window kept free for the output.
    guidance: Literal["none", "facts", "prescriptive"] = "facts"
    """What an observation says beyond its results: nothing, facts about them, or facts with advice."""
    mechanisms: tuple[Mechanism, ...] = tuple(name for name in get_args(Mechanism) if name not in OPTIONAL)
    """The mechanisms that are on. The tools `fan_out_search`, `grep_corpus` (engines without regular expressions need
    it off), `read_document`, `review_docs` and `verify`; importance `tags` in the curated set, else all entries are
    equal; `auto_populate`: curation by the harness; `dedup`: near duplicates are not shown twice (by MinHash over
    shingles, and only where titles, numbers, dates and negations are equal); `compression`: hits are shortened;
    `evidence`: a graph of entities, and a list of those that documents share; `rank`, which needs it: the pool in the
    order of its evidence value, which stands on a line of its own; `leads`, which need `rank`; `history` of actions;
    `budget_marker`: a line that says how much of the prompt and of the turns is used; `marks`: text from outside is
    marked, so that no document can imitate the environment (its lines begin with a space, and what looks like a handle
    or a rank in a title is escaped). Off by default: `entity_handles`, by which queries may name entities of the
    question and of hits (E3); `lead_handles`, the same for the question (Q) and the shown leads alone, as short calls
    are easier to learn; `pruning`. Each has a switch of its own too:
    `--set env.grep.on=false`."""
    plugins: tuple[str, ...] = ()
    """Tools of other packages that are on, in the order shown, by the names of their entry points (`harness1.tools`),
    and tools of one's own, as `FILE.py:NAME`. None is on because it is installed."""
    tools: tuple[ToolName, ...] = ()
    """Tools that are offered beside `end_search` and plugins, of those that the mechanisms offer; empty: all. A model
    that was not trained here does better with one: the harness curates (`auto_populate`)."""
    search: Search = Search()
    retrieval: Retrieval = Retrieval()
    fan_out: FanOut = FanOut()
    read: Read = Read()
    verification: Verification = Verification()
    curation: Curation = Curation()
    auto_populate: AutoPopulate = AutoPopulate()
    compression: Compression = Compression()
    evidence: Evidence = Evidence()
    leads: Leads = Leads()
    history: History = History()
    pool: PoolView = PoolView()
    pruning: Pruning = Pruning()
    rendering: Rendering = Rendering()

    def __post_init__(self) -> None:
        ordered = tuple(sorted(set(self.mechanisms), key=get_args(Mechanism).index))
        msgspec.structs.force_setattr(self, "mechanisms", ordered)  # a set, of which order decides nothing
        msgspec.structs.force_setattr(self, "tools", tuple(sorted(set(self.tools))))

    def has(self, name: Mechanism) -> bool:
        return name in self.mechanisms

    def switch(self, **on: bool) -> Env:
        """Return the settings with some mechanisms on or off."""
        switches = dict.fromkeys(self.mechanisms, True) | on
        return msgspec.structs.replace(self, mechanisms=tuple(name for name in switches if switches[name]))

    @property
    def prompt_limit(self) -> int:
        return self.context_window - self.generation_reserve

    def to_hash(self) -> dict[str, Any]:
        """Return the settings that enter hashes: all, except that mechanisms made after the first records count only
        where they are on, so that earlier records keep their hashes. A file of one's own counts by its content."""
        tree = without_later(self.plain(), "env.")
        if self.plugins:
            tree["plugins"] = [identity(name) for name in self.plugins]
        return {group: settings for group, settings in tree.items() if group != "leads" or self.has("leads")}

    def plain(self) -> dict[str, Any]:
        """Return the settings as records have them: with a switch for each mechanism, `plugins` and `tools` if any."""
        tree = to_record(self, "env.") | {"plugins": list(self.plugins), "tools": list(self.tools)}
        del tree["mechanisms"]
        for mechanism, (group, name) in SWITCHES.items():
            tree.setdefault(group, {})[name] = mechanism in self.mechanisms
        return {name: value for name, value in tree.items() if value != []}

    @property
    def ranks(self) -> bool:
        return self.has("evidence") and self.has("rank")

    @property
    def leads_on(self) -> bool:
        return self.has("leads") and self.ranks

    @property
    def leads_have_handles(self) -> bool:
        """True if queries may name the question and the leads by handles."""
        return self.has("lead_handles") and self.leads_on

    @property
    def has_handles(self) -> bool:
        return self.has("entity_handles") or self.leads_have_handles

    @property
    def refills(self) -> bool:
        """True if the curated set follows the evidence until the policy edits it."""
        return self.has("auto_populate") and self.auto_populate.by == "evidence" and self.ranks

    @property
    def hits_limit(self) -> int:
        """Maximum tokens of the hits of one observation as they are shown, at four characters each."""
        return int(self.prompt_limit * HITS_SHARE)

    @property
    def title_limit(self) -> int:
        return int(self.prompt_limit * TITLE_SHARE)

    def observation_limit(self, tokens: int) -> int:
        """Cap an allowance in tokens, so that even a small context window holds a whole turn."""
        most = int(self.prompt_limit * OBSERVATION_SHARE)
        return min(tokens, most, PRUNED_OUTPUT) if self.has("pruning") else min(tokens, most)


def with_mechanisms(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings of an environment with boolean switches of groups in `mechanisms`."""
    found, mechanisms = dict(tree), tree.get("mechanisms", Env().mechanisms)
    if not isinstance(mechanisms, list | tuple) or not all(isinstance(name, str) for name in mechanisms):
        return found  # which is refused where it is read
    on = dict.fromkeys(mechanisms, True)
    for mechanism, (group, name) in SWITCHES.items():
        settings = found.get(group)
        if isinstance(settings, dict) and isinstance(settings.get(name), bool):
            on[mechanism] = settings[name]
            settings = {other: value for other, value in settings.items() if other != name}
            found[group] = settings
        if settings == {} and group not in Env.__struct_fields__:
            del found[group]
    return found | {"mechanisms": [mechanism for mechanism in on if on[mechanism]]}


def read_recorded(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return recorded settings of an environment without removed ones, and with unmentioned mechanisms switched off."""
    complete = deepcopy(dict(tree))
    unite(complete, "env.")
    for path in (path for path in LATER if path.startswith("env.")):
        _, group, name = path.split(".")
        settings = complete.get(group, {})
        if isinstance(settings, dict) and not ("mechanisms" in tree and (group, name) in SWITCHES.values()):
            complete[group] = {name: LATER[path]} | settings  # a group that is none is damaged, which its reader says
    return without_removed(complete, "env.")


def read_env(tree: Mapping[str, Any]) -> Env:
    """Return the recorded settings of an environment as this version has them; raise ConfigError as `refuse_removed`
    does, msgspec.ValidationError if they are none."""
    refuse_removed(tree, "env.")
    return msgspec.convert(with_mechanisms(read_recorded(tree)), Env)


class Dense(Settings):
    """Embeddings of an index's chunks, stored beside their terms."""

    model: str = ""
    """A name or folder for sentence-transformers, `openai:MODEL@URL` for a server with OpenAI's `/v1/embeddings`, or
    `hash:DIMENSIONS` (needs none); empty: none."""
    search: Literal["exact", "hnsw"] = "exact"  # Exact up to a million chunks; beyond, the approximate graphs of faiss.
    prefixes: tuple[str, str] = ("", "")  # Texts before a query and a document, if so trained (`query: `, `passage: `).

    def __post_init__(self) -> None:
        if "://" in self.model and self.model != without_password(self.model):
            raise ConfigError("index.dense.model is recorded: give machine.embedder_key, and no password or ? in it")


class Index(Settings):
    """The chunking and analysis of a corpus. It is in `index_hash`."""

    unit: Literal["document", "chunk"] = "document"  # What is pooled and scored: documents, or chunks that gold names.
    chunk_tokens: Positive = 512  # Longer documents (characters / 4) are cut at sentence boundaries; others stay whole.
    language: str = AUTO
    """The language that words are stemmed in: one of Snowball's, such as `german`, or `none`. `auto` stems each word by
    its script, Latin as English. Words of all scripts are found under each."""
    dense: Dense = Dense()

    def __post_init__(self) -> None:
        if self.language not in (AUTO, NONE) and self.language not in (known := languages()):
            raise ConfigError(f"index.language={self.language}: give one of {', '.join((AUTO, NONE, *known))}")

    def to_hash(self) -> dict[str, Any]:
        return to_hash(self, "index.")


T = TypeVar("T")


def read_index_description(encoded: bytes | str | memoryview, kind: type[T]) -> T:
    """Decode the JSON that describes an index; its `settings` may hold some that were removed since. Raise ConfigError
    as `refuse_removed` does, msgspec.DecodeError or msgspec.ValidationError if it is no such description."""
    tree = msgspec.json.decode(encoded, type=dict[str, Any])
    if isinstance(settings := tree.get("settings"), dict):
        unite(settings, "index.")
        tree["settings"] = present(settings, "index.")
    return msgspec.convert(tree, kind)
