"""The records that every part of the system exchanges. All are frozen values; an `Episode` is the seam between
acting, training and evaluation (design: "the record is the seam")."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Literal, NamedTuple, NewType, dataclass_transform

import msgspec

from harness1.errors import SchemaError

SCHEMA_VERSION = 1

DocId = NewType("DocId", str)
ChunkId = NewType("ChunkId", str)
UnitId = NewType("UnitId", str)
"""What is pooled and curated: a document id, or a chunk id where the corpus says that chunks are scored."""

Unit = Literal["document", "chunk"]
Tag = Literal["very_high", "high", "fair", "low"]
TAGS: tuple[Tag, ...] = ("very_high", "high", "fair", "low")


@dataclass_transform(frozen_default=True, field_specifiers=(msgspec.field,))
class Record(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The base of every record: immutable, compact in JSON, strict about unknown fields."""


class Gold(Record):
    """The evidence that a task asks for: document ids with TREC grades. Scoring, oracles and reports alone see it."""

    relevant: dict[DocId, int]
    """Grade of every relevant document; grades above 0 count as relevant."""
    answer_docs: tuple[DocId, ...] = ()
    """Documents that hold the final answer; empty means: all relevant ones."""
    facts: tuple[tuple[ChunkId, ...], ...] | None = None
    """Where facts are scored: for each fact, the chunks any one of which states it."""
    answer_facts: tuple[int, ...] = ()
    """Positions in `facts` of those that hold the final answer; empty means: all."""
    answers: tuple[str, ...] = ()


class Task(Record):
    """One query over a corpus. Environments and policies take it without its gold, as `public` returns it."""

    task_id: str
    """Unique within its dataset; runs and gold are joined by it."""
    query: str
    split: str = "test"
    gold: Gold | None = None
    metadata: dict[str, Any] = {}

    def public(self) -> Task:
        """The task as an environment and a policy may see it: no gold, and no metadata, which often holds answers."""
        return Task(task_id=self.task_id, query=self.query, split=self.split)


class Chunk(Record):
    """A stretch of one document as it is indexed; `index` counts chunks within the document from 0."""

    chunk_id: ChunkId
    doc_id: DocId
    index: int
    title: str
    text: str


class Hit(Record):
    """A chunk as an answer from outside the pure core. `rank` counts from 0; `score` is the engine's own."""

    chunk_id: ChunkId
    doc_id: DocId
    index: int
    title: str
    text: str
    score: float
    rank: int
    tokens: int
    """Approximate size of the text in tokens (characters / 4), the same on every machine."""


class Ranking(Record):
    """What one query of a search found, best first; the hits themselves stand once in the observation."""

    query: str
    chunk_ids: tuple[ChunkId, ...]
    pre_rerank_ids: tuple[ChunkId, ...] = ()
    """Where a reranker ordered the hits: what it was given, in the order before."""


class Verdict(Record):
    """A verifier's judgement of one claim against one pooled unit."""

    unit_id: UnitId
    claim: str
    label: Literal["yes", "no", "unclear"]
    sentence: str = ""
    """The sentence of the document on which the verdict rests; empty where there is none."""
    cached: bool = False


class Note(Record):
    """Something to tell the policy, as a value: the renderer alone turns `code` and `data` into prose."""

    code: str
    data: dict[str, Any] = {}


class Delta(Record):
    """What one action changed in the working memory, by unit id."""

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
    """The structured answer to one action. Everything in it that came from outside the pure core (hits, rankings,
    verdicts) is recorded, so that replay needs no index, model or network."""

    tool: str
    hits: tuple[Hit, ...] = ()
    rankings: tuple[Ranking, ...] = ()
    verdicts: tuple[Verdict, ...] = ()
    resolved: dict[str, str] = {}
    """Every handle the policy used, with the id that it stood for."""
    notes: tuple[Note, ...] = ()
    error: Note | None = None
    delta: Delta = Delta()


class ToolCall(Record):
    """An action as the policy emitted it."""

    name: str
    arguments: dict[str, Any] = {}


class Sampling(Record):
    """How the tokens of one model call were drawn."""

    temperature: float = 1.0
    """0: the most likely token."""
    top_p: float = 1.0
    top_k: int = 0
    """0: no bound."""
    max_tokens: int = 2048
    seed: int | None = None
    stop_ids: tuple[int, ...] = ()
    """Tokens that end the output; the one that did is its last token."""
    grammar: str | None = None
    """The digest of the grammar that masked the distribution, where one did."""


class ModelCall(Record):
    """One call of a language model, exactly: `output_ids` and `output_logprobs` are the sampled tokens and the log
    probabilities under the distribution that was sampled from; `prompt` names segments of the episode."""

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


class Turn(Record):
    """One decision and what came of it. `context_hash` names what the policy saw, `memory_hash` the state after."""

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
    """Those of them behind the longest common prefix with the context before: what a prefix cache does not hold."""


class StopReason(StrEnum):
    """Why an episode ended."""

    END_SEARCH = "end_search"
    TURN_LIMIT = "turn_limit"
    CONTEXT_LIMIT = "context_limit"
    FORMAT_LIMIT = "format_limit"
    FAULT = "fault"


class Status(StrEnum):
    """Whose responsibility the end of an episode was, and so how it is scored (design section 4)."""

    COMPLETED = "completed"
    TRUNCATED = "truncated"
    POLICY_ERROR = "policy_error"
    INFRA_ERROR = "infra_error"


STATUS_OF = {
    StopReason.END_SEARCH: Status.COMPLETED,
    StopReason.TURN_LIMIT: Status.COMPLETED,
    StopReason.CONTEXT_LIMIT: Status.TRUNCATED,
    StopReason.FORMAT_LIMIT: Status.POLICY_ERROR,
    StopReason.FAULT: Status.INFRA_ERROR,
}


class Curated(Record):
    """One entry of the delivered set; `rank` counts from 1 in the order of delivery."""

    unit_id: UnitId
    tag: Tag
    rank: int


class RewardTerm(Record):
    """One component of a reward: it contributes `weight * value`."""

    value: float
    weight: float


class RewardRecord(Record):
    """A scored episode: `total` is the override where there is one, else the floored sum of the terms."""

    total: float
    terms: dict[str, RewardTerm] = {}
    override: str | None = None


class EpisodeKey(NamedTuple):
    """What makes an episode the same work; a run is resumed by it."""

    task_id: str
    sample_idx: int
    env_hash: str
    policy_hash: str
    index_hash: str


class Hashes(Record):
    """What an episode was made with (design section 4)."""

    env: str
    policy: str
    index: str
    counter: str = ""
    reward: str = ""


class TokenBlob(Record):
    """Where an episode's token ids (int32) and log probabilities (float32) lie in the side file, in bytes."""

    offset: int
    size: int
    crc32: int
    counts: tuple[int, ...]
    """Lengths: for each model call in order its ids and its log probabilities, then each segment in order."""


class Episode(Record, kw_only=True):
    """A finished search episode: every decision, every answer from outside, and the delivered set.

    It is complete (design section 4): a replay rebuilds every state from it, scoring needs only the gold besides, and
    training rows are made of its tokens. Log probabilities are natural logarithms.
    """

    episode_id: str
    task: Task
    """The public task: gold is joined by `task_id` when scoring."""
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
    """The smallest and the largest policy version of its calls."""
    stage_ms: dict[str, float] = {}
    """Milliseconds spent in the policy and in the environment."""
    error: str | None = None
    """What failed, where the infrastructure did."""
    untrainable: str | None = None
    """Why a policy gradient cannot be made of its model calls, where there are some."""
    segments: dict[str, tuple[int, ...]] = {}
    """Token ids of the prompt segments that its model calls refer to, each once."""
    counts: dict[str, int] = {}
    """Tokens of whatever else the budget was reckoned with, by key, where a model's tokenizer counted."""
    tokens: TokenBlob | None = None
    """Set on disk only, in place of ids, log probabilities and segments."""
    schema_version: int = SCHEMA_VERSION

    @property
    def key(self) -> EpisodeKey:
        return EpisodeKey(self.task.task_id, self.sample_idx, self.hashes.env, self.hashes.policy, self.hashes.index)


class _Versioned(msgspec.Struct):
    schema_version: int = SCHEMA_VERSION


def encode_episode(episode: Episode) -> bytes:
    """One line of JSON, without the newline. Mappings keep their order, which is the order of what they record."""
    return msgspec.json.encode(episode)


def decode_episode(line: bytes) -> Episode:
    """Read one line of `episodes.jsonl`.

    Raises:
        SchemaError: the record is from a newer version of the package, or is no episode.
    """
    try:
        version = msgspec.json.decode(line, type=_Versioned).schema_version
        if version > SCHEMA_VERSION:
            raise SchemaError(f"an episode of schema {version}; this harness1 reads up to {SCHEMA_VERSION}: upgrade it")
        return msgspec.json.decode(line, type=Episode)
    except msgspec.MsgspecError as error:
        raise SchemaError(f"not an episode: {error}") from error
