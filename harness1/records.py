"""The records that every part of the system exchanges, all frozen values."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import Any, Literal, NamedTuple, NewType, dataclass_transform

import msgspec

from harness1.errors import MALFORMED, RewardError, SchemaError
from harness1.plain import json_safe, utf8_safe

SCHEMA_VERSION = 1

DocId = NewType("DocId", str)
ChunkId = NewType("ChunkId", str)
UnitId = NewType("UnitId", str)
"""The id of a unit, which is pooled and curated: a document, or a chunk where the corpus scores chunks."""

Unit = Literal["document", "chunk"]
Tag = Literal["very_high", "high", "fair", "low"]
TAGS: tuple[Tag, ...] = ("very_high", "high", "fair", "low")


@dataclass_transform(frozen_default=True, field_specifiers=(msgspec.field,))
class Record(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The base of every record: immutable, compact in JSON, strict about unknown fields."""


class Gold(Record):
    """The evidence that a task asks for: document ids with TREC grades. Only scoring, oracles and reports see it."""

    relevant: dict[DocId, int]
    """Grade of every relevant document; grades above 0 count as relevant."""
    answer_docs: tuple[DocId, ...] = ()
    """Documents that hold the final answer; empty: all relevant ones."""
    facts: tuple[tuple[ChunkId, ...], ...] | None = None
    """For each fact, the chunks that state it, any one of which is enough; None where documents are scored."""
    answer_facts: tuple[int, ...] = ()
    """Positions in `facts` of those that hold the final answer; empty: all."""
    answers: tuple[str, ...] = ()


class Task(Record):
    """One query over a corpus. Environments and policies get it without its gold, as `public` returns it."""

    task_id: str
    """Unique within its dataset; runs and gold are joined by it."""
    query: str
    split: str = "test"
    gold: Gold | None = None
    metadata: dict[str, Any] = {}

    def public(self) -> Task:
        """Return the task as environments and policies see it: no gold, and no metadata, which often holds answers."""
        return Task(task_id=self.task_id, query=self.query, split=self.split)


class Chunk(Record):
    """A stretch of one document as it is indexed; `index` counts the document's chunks from 0."""

    chunk_id: ChunkId
    doc_id: DocId
    index: int
    title: str
    text: str


class Hit(Record):
    """A chunk returned by a search. `rank` counts from 0; `score` is the engine's own."""

    chunk_id: ChunkId
    doc_id: DocId
    index: int
    title: str
    text: str
    score: float
    rank: int
    tokens: int
    """Approximate size of the text in tokens (characters / 4), equal on every machine."""
    likeness: float | None = None
    """Cosine with the embedding of the question; None where the engine does not compare."""


class Ranking(Record):
    """The chunks found for one query of a search, best first; the hits are stored once, in the observation."""

    query: str
    chunk_ids: tuple[ChunkId, ...]
    pre_rerank_ids: tuple[ChunkId, ...] = ()
    """The input of a reranker in its original order; empty without reranking."""


class Verdict(Record):
    """A verifier's judgement of one claim against one pooled unit."""

    unit_id: UnitId
    claim: str
    label: Literal["yes", "no", "unclear"]
    sentence: str = ""
    """The sentence that the verdict rests on; empty if there is none."""
    cached: bool = False


class Note(Record):
    """A message to the policy, as a value. Only the renderer turns `code` and `data` into prose."""

    code: str
    data: dict[str, Any] = {}


class Delta(Record):
    """The changes that one action made to the working memory, by unit id."""

    new: tuple[UnitId, ...] = ()
    aliases: dict[UnitId, UnitId] = {}
    """Near duplicates found by this action, each with the pooled unit that represents it."""
    added: dict[UnitId, Tag] = {}
    retagged: dict[UnitId, Tag] = {}
    removed: tuple[UnitId, ...] = ()
    evicted: tuple[UnitId, ...] = ()
    refused: tuple[UnitId, ...] = ()
    auto_populated: tuple[UnitId, ...] = ()
    pruned: tuple[UnitId, ...] = ()
    """Units whose hits leave the transcript; they stay pooled."""


class Observation(Record):
    """The structured answer to one action. It records everything that came from outside the pure core (hits, rankings,
    verdicts), so a replay needs no index, model or network."""

    tool: str
    hits: tuple[Hit, ...] = ()
    rankings: tuple[Ranking, ...] = ()
    verdicts: tuple[Verdict, ...] = ()
    resolved: dict[str, str] = {}
    """The id of every handle that the policy used."""
    notes: tuple[Note, ...] = ()
    error: Note | None = None
    delta: Delta = Delta()


class ToolCall(Record):
    """An action as the policy emitted it."""

    name: str
    arguments: dict[str, Any] = {}


def json_safe_call(call: ToolCall) -> ToolCall:
    """Return the call with plain arguments; arguments that are not a mapping are put under the name `arguments`."""
    arguments = call.arguments if isinstance(call.arguments, dict) else {"arguments": call.arguments}
    return ToolCall(utf8_safe(str(call.name)), json_safe(arguments))


class Sampling(Record):
    """The sampling parameters of one model call."""

    temperature: float = 1.0
    """0: greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0: no limit."""
    max_tokens: int = 2048
    seed: int | None = None
    stop_ids: tuple[int, ...] = ()
    """Tokens that end the output; the one that ended it is the output's last token."""
    grammar: str | None = None
    """Digest of the grammar that masked the distribution; None if there was none."""


class ModelCall(Record):
    """One call of a language model: the sampled tokens, their log probabilities, and the prompt as keys of segments."""

    call_id: str
    parent_call_id: str | None = None
    """The call whose output is the last one in the prompt."""
    attempt: int = 0
    prompt: tuple[str, ...] = ()
    output_ids: tuple[int, ...] = ()
    output_logprobs: tuple[float, ...] = ()
    sampling: Sampling = Sampling()
    tokenizer_hash: str = ""
    policy_version_start: int = 0
    policy_version_end: int = 0
    finish_reason: str = ""
    t_start: float = 0.0
    t_end: float = 0.0
    text: str = ""
    """What the model wrote in an attempt that held no action, where its server returns no tokens."""


class Turn(Record):
    """One decision of the policy and its result. `context_hash` covers what it saw; `memory_hash`, the new state."""

    index: int
    calls: tuple[ModelCall, ...] = ()
    reasoning: str = ""
    action: ToolCall | None = None
    parse_error: str | None = None
    ignored: tuple[ToolCall, ...] = ()
    observation: Observation | None = None
    memory_hash: str = ""
    context_hash: str = ""
    prompt_tokens: int = 0
    """Tokens of the context that the policy saw, as its environment counts them."""
    prefill_tokens: int = 0
    """Tokens after the longest prefix shared with the previous context, which a prefix cache does not hold."""


class StopReason(StrEnum):
    """The reason why an episode ended."""

    END_SEARCH = "end_search"
    TURN_LIMIT = "turn_limit"
    CONTEXT_LIMIT = "context_limit"
    """The environment had no room for another prompt: what is curated until then is delivered."""
    CONTEXT_OVERFLOW = "context_overflow"
    """The model's server refused a prompt as longer than the model's context."""
    FORMAT_LIMIT = "format_limit"
    FAULT = "fault"


class Status(StrEnum):
    """The party responsible for the end of an episode, which decides how it is scored."""

    COMPLETED = "completed"
    TRUNCATED = "truncated"
    POLICY_ERROR = "policy_error"
    INFRA_ERROR = "infra_error"


Faults = Literal["exclude", "zero"]
"""How an episode that the infrastructure broke counts in means: not at all, or as one that found nothing."""
STATUS_OF = {
    StopReason.END_SEARCH: Status.COMPLETED,
    StopReason.TURN_LIMIT: Status.COMPLETED,
    StopReason.CONTEXT_LIMIT: Status.TRUNCATED,
    StopReason.CONTEXT_OVERFLOW: Status.POLICY_ERROR,
    StopReason.FORMAT_LIMIT: Status.POLICY_ERROR,
    StopReason.FAULT: Status.INFRA_ERROR,
}


class Curated(Record):
    """One entry of the delivered set; `rank` counts from 1 in the order of delivery."""

    unit_id: UnitId
    tag: Tag
    rank: int


class RewardTerm(Record):
    """One component of a reward, which contributes `weight * value`."""

    value: float
    weight: float


MOST_REWARD = 1e12
"""The largest size of a reward and of what a term adds: no sum of them overflows, nor a square."""


class RewardRecord(Record):
    """The reward of an episode: `total` is the override's value if there is one, else the floored sum of the terms."""

    total: float
    terms: dict[str, RewardTerm] = {}
    override: str | None = None

    def __post_init__(self) -> None:
        parts = {name: term.weight * term.value for name, term in self.terms.items()}
        for name, value in (parts | {"their sum": self.total}).items():
            if not abs(value) <= MOST_REWARD:  # nor is NaN
                raise RewardError(f"the terms of a reward and their sum are at most {MOST_REWARD:g}: {name} is {value}")


class EpisodeKey(NamedTuple):
    """The identity of an episode, by which a run is resumed."""

    task_id: str
    sample_idx: int
    env_hash: str
    policy_hash: str
    index_hash: str


class Hashes(Record):
    """The hashes of everything that an episode was made with."""

    env: str
    policy: str
    index: str
    counter: str = ""
    reward: str = ""


class TokenBlob(Record):
    """Byte range of an episode's token ids (int32) and log probabilities (float32) in the side file."""

    offset: int
    size: int
    crc32: int
    counts: tuple[int, ...]
    """Lengths: the ids and the log probabilities of each model call in order, then each segment in order."""


class Episode(Record, kw_only=True):
    """A finished search episode, complete: a replay rebuilds every state from it, scoring needs only the gold in
    addition, and training rows are made from its tokens. Log probabilities are natural logarithms."""

    episode_id: str
    task: Task
    """The public task; scoring joins the gold by `task_id`."""
    sample_idx: int = 0
    group_id: str | None = None
    seed: int = 0
    turns: tuple[Turn, ...] = ()
    stop_reason: StopReason
    status: Status
    curated: tuple[Curated, ...] = ()
    pool: tuple[UnitId, ...] = ()
    aliases: dict[UnitId, UnitId] = {}
    reward: RewardRecord | None = None
    hashes: Hashes
    unit: Unit = "document"
    policy_versions: tuple[int, int] = (0, 0)
    """The lowest and the highest policy version among its calls."""
    stage_ms: dict[str, float] = {}
    """Milliseconds spent in the policy and in the environment."""
    error: str | None = None
    """The failure of the infrastructure, or the refusal of a prompt that was too long, if there was one."""
    untrainable: str | None = None
    """The reason why its model calls cannot be used for a policy gradient, if there is one."""
    segments: dict[str, tuple[int, ...]] = {}
    """Token ids of the prompt segments that its model calls refer to, each stored once."""
    counts: dict[str, int] = {}
    """Token counts, by key, of everything else in the budget, if a model's tokenizer counted it."""
    tokens: TokenBlob | None = None
    """Set on disk only, in place of ids, log probabilities and segments."""
    schema_version: int = SCHEMA_VERSION
    digest: str = ""
    """Set on disk only: the digest of the line (`runs/line_digests.py`), which is checked when a run is read."""

    @property
    def observations(self) -> Iterator[Observation]:
        return (turn.observation for turn in self.turns if turn.observation is not None)

    @property
    def key(self) -> EpisodeKey:
        return EpisodeKey(self.task.task_id, self.sample_idx, self.hashes.env, self.hashes.policy, self.hashes.index)


class _Versioned(msgspec.Struct):
    schema_version: int = SCHEMA_VERSION


def encode_episode(episode: Episode) -> bytes:
    """Encode an episode as one line of JSON, without the newline. Mappings keep their recorded order."""
    return msgspec.json.encode(episode)


def decode_episode(line: bytes) -> Episode:
    """Read one line of `episodes.jsonl`. Raises SchemaError: it is from a newer version of the package, or no
    episode."""
    try:
        version = msgspec.json.decode(line, type=_Versioned).schema_version
        if version > SCHEMA_VERSION:
            raise SchemaError(f"an episode of schema {version}; this harness1 reads up to {SCHEMA_VERSION}: upgrade it")
        return msgspec.json.decode(line, type=Episode)
    except MALFORMED as error:
        raise SchemaError(f"not an episode: {error}") from error
