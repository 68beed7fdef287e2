"""The view of an episode, replayed from its record, with the exact context of every turn."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from types import MappingProxyType
from typing import Any

import msgspec

from harness1.config import Env
from harness1.env.environment import SearchEnv
from harness1.env.pieces import sentence
from harness1.env.render import Context
from harness1.episodes.rollout import difference_between, replay_env
from harness1.errors import ConfigError, SchemaError, UsageError
from harness1.models.tokenizer import Tokenizer
from harness1.records import Episode, Gold, Hit, Note, Observation, RewardRecord, Turn, UnitId
from harness1.reward.measures import Targets, targets
from harness1.viewer.evidence_chain import EvidenceChain
from harness1.viewer.memory_change import StateView, change, tag_number
from harness1.viewer.sent_prompt import SentPrompts
from harness1.viewer.tables import Tables

Viewed = dict[str, Any]


class EpisodeView:
    """The JSON data of one episode.

    Args:
        env: the configuration of the recorded environment.
        gold: the gold of its task, if known.
        tokenizer: the tokenizer of its model, if it can be loaded.
        titles: of gold units, by id, for those that no search found.

    Attributes:
        tables: filled while turns are made.
        problem: the reason in one line why it cannot be replayed exactly; then turns are shown from the record only.
    """

    def __init__(
        self,
        episode: Episode,
        env: Env,
        gold: Gold | None = None,
        tokenizer: Tokenizer | None = None,
        titles: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.episode, self.gold, self._titles = episode, gold, titles
        self.tables = Tables()
        self.problem: str | None = None
        self._prompts = SentPrompts(episode, self.tables, tokenizer)
        self._chain = EvidenceChain()
        try:
            self._twin: SearchEnv | None = replay_env(episode, env)
        except (ConfigError, SchemaError) as error:
            self._twin, self.problem = None, str(error)

    def as_json(self, reward: RewardRecord | None) -> Viewed:
        """Return everything about the episode except for data shared by its run."""
        episode = self.episode
        turns = list(self._turns())
        gold = self._gold()
        chain = self._chain.as_json(self._relevant(), self.tables)
        if self._twin is not None:
            self.tables.name_handles(self._twin.state.memory.pool)
        return {
            "query": episode.task.query,
            "turns": turns,
            "gold": gold,
            "chain": chain,
            "delivered": [[self.tables.unit(each.unit_id), tag_number(each.tag)] for each in episode.curated],
            "hidden": [[self.tables.unit(name), self.tables.unit(twin)] for name, twin in episode.aliases.items()],
            "pool": [self.tables.unit(each) for each in episode.pool],
            "reward": msgspec.to_builtins(reward),
            "hashes": msgspec.to_builtins(episode.hashes),
            "stage_ms": episode.stage_ms,
            "seed": episode.seed,
            "versions": list(episode.policy_versions),
            "error": episode.error,
            "untrainable": episode.untrainable if any(turn.calls for turn in episode.turns) else None,
            "problem": self.problem,
            **self.tables.as_json(),
        }

    def _turns(self) -> Iterator[Viewed]:
        for turn in self.episode.turns:
            context = self._twin.state.context if self._twin is not None else None
            before = StateView.at(self._twin.state.memory) if self._twin is not None else None
            if self._twin is not None:
                self._chain.see(self._twin.state.memory)
            shown = self._recorded(turn) | self._context(turn, context)
            if self._twin is not None and before is not None and self._replayed(turn, self._twin):
                shown |= self._memory(turn, before, self._twin)
            yield shown

    def _replayed(self, turn: Turn, twin: SearchEnv) -> bool:
        """Replay a turn; return True if its memory can be shown."""
        if turn.action is None or turn.observation is None:
            return True
        try:
            again = twin.replay(turn).turn
        except (ValueError, TypeError, LookupError) as error:
            self.problem, self._twin = self.problem or f"turn {turn.index}: it cannot be replayed ({error!r})", None
            return False
        self.problem = self.problem or difference_between(turn, again, contexts=True)
        return True

    def _recorded(self, turn: Turn) -> Viewed:
        return {
            "index": turn.index,
            "action": msgspec.to_builtins(turn.action),
            "reasoning": turn.reasoning,
            "ignored": msgspec.to_builtins(turn.ignored),
            "parse_error": turn.parse_error,
            "calls": [self._prompts.attempt(call) for call in turn.calls],
            "observation": None if turn.observation is None else self._observation(turn.observation),
            "hashes": [turn.memory_hash, turn.context_hash],
        }

    def _context(self, turn: Turn, context: Context | None) -> Viewed:
        if context is None or self._twin is None:
            return {"context": None, "tokens": turn.prompt_tokens, "prefill": turn.prefill_tokens}
        counts = self._twin.renderer.counts
        return {
            "context": [self.tables.segment(each, counts.piece(each)) for each in context.pieces],
            "tokens": context.budget.used,
            "prefill": context.fresh,
            "limit": context.budget.limit,
            "dropped": context.budget.dropped,
        }

    def _memory(self, turn: Turn, before: StateView, twin: SearchEnv) -> Viewed:
        memory = twin.state.memory
        if turn.observation is None:
            return {"curated": self._curated(twin)}
        now = StateView.at(memory)
        return {
            "change": change(before, now, memory, turn.observation.delta, self.tables),
            "sizes": [before.sizes, now.sizes],
            "curated": self._curated(twin),
        }

    def _relevant(self) -> Iterator[UnitId]:
        """Yield what was ever curated, then the gold that was seen."""
        for turn in self.episode.turns:
            if turn.observation is not None:
                yield from turn.observation.delta.auto_populated
                yield from turn.observation.delta.added
        seen = set(self.episode.pool)
        yield from (unit for unit in sorted(self._wanted) if unit in seen)

    @cached_property
    def _wanted(self) -> frozenset[UnitId]:
        try:
            return frozenset[UnitId]().union(*self._targets.relevant)
        except UsageError:
            return frozenset()

    @property
    def _targets(self) -> Targets:
        return targets(self.episode.task.task_id, self.gold, self.episode.unit)

    def _curated(self, twin: SearchEnv) -> list[list[int]]:
        ranked = twin.state.memory.curated.ranked()
        return [[self.tables.unit(each.unit_id), tag_number(each.tag)] for each in ranked]

    def _observation(self, seen: Observation) -> Viewed:
        tables = self.tables
        hits = []
        for hit in seen.hits:
            unit = self._unit_of(hit)
            hits.append([tables.passage(hit, unit), round(hit.score, 4), hit.tokens])
        return {
            "tool": seen.tool,
            "hits": hits,
            "rankings": [
                {
                    "query": ranking.query,
                    "names": self._chain.names_in(ranking.query, tables),
                    "chunks": [tables.known_chunk(name) for name in ranking.chunk_ids],
                    "before": [tables.known_chunk(name) for name in ranking.pre_rerank_ids],
                }
                for ranking in seen.rankings
            ],
            "verdicts": [
                [tables.unit(each.unit_id), each.claim, each.label, each.sentence, each.cached]
                for each in seen.verdicts
            ],
            "resolved": seen.resolved,
            "notes": [_words(note) for note in seen.notes],
            "error": None if seen.error is None else _words(seen.error),
            "auto": [tables.unit(each) for each in seen.delta.auto_populated],
        }

    def _unit_of(self, hit: Hit) -> UnitId:
        return UnitId(hit.doc_id if self.episode.unit == "document" else hit.chunk_id)

    def _gold(self) -> Viewed | None:
        """Return the targets, each as the units that satisfy it, or None if the gold is unknown."""
        try:
            wanted = self._targets
        except UsageError:
            return None
        for each in sorted(self._wanted):
            self.tables.name_unit(each, self._titles.get(each, ""))
        answers = set(wanted.answer)
        return {
            "targets": [
                {"units": [self.tables.unit(each) for each in sorted(target)], "answer": target in answers}
                for target in wanted.relevant
            ],
            "answers": list(self.gold.answers) if self.gold is not None else [],
        }


def _words(note: Note) -> list[str]:
    """Return the code of a note and its sentence, or its data if this version does not know the code."""
    try:
        return [note.code, sentence(note)]
    except LookupError:
        return [note.code, " ".join(f"{name}={value}" for name, value in note.data.items())]
