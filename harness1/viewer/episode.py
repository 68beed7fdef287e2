"""The view of an episode, replayed from its record: the exact context of every turn, the prompts as sent, the change of
the working memory, and what led to its documents."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec

from harness1.config import Env
from harness1.env.environment import SearchEnv
from harness1.env.pieces import sentence
from harness1.episodes.rollout import difference_between, replay_env
from harness1.errors import ConfigError, SchemaError, UsageError
from harness1.memory.question import SCANNED_CHARACTERS, head, normalise_name
from harness1.memory.working_memory import WorkingMemory, question_names
from harness1.models.tokenizer import Tokenizer
from harness1.records import TAGS, Delta, Episode, Gold, ModelCall, Note, Observation, RewardRecord, Tag, Turn, UnitId
from harness1.reward.measures import targets
from harness1.rows.calls import calls_of
from harness1.viewer.tables import Tables

LISTED_BRIDGES = 40  # limit of new bridges of a turn that are listed; the others are counted


class StateView(NamedTuple):
    """The compared parts of a memory at one moment."""

    curated: Mapping[UnitId, Tag]
    pool: frozenset[UnitId]
    aliases: Mapping[UnitId, UnitId]
    verdicts: frozenset[str]
    bridges: Mapping[str, int]  # the number of units of each entity that is in at least two, by its key


def _view_state(memory: WorkingMemory) -> StateView:
    """Return a copy that later turns do not change."""
    pool, bridges = memory.pool, {key: len(units) for key, units in memory.evidence.units.items() if len(units) > 1}
    verdicts = frozenset(memory.verification.verdicts)
    return StateView(dict(memory.curated.tags), frozenset(pool.entries), dict(pool.aliases), verdicts, bridges)


def change(before: StateView, now: StateView, memory: WorkingMemory, delta: Delta, tables: Tables) -> dict[str, Any]:
    """Return the non-empty differences between two states, units as numbers. `memory`: in the later state."""
    gone = [unit for unit in before.curated if unit not in now.curated]
    unit, rank = tables.unit, TAGS.index
    names = memory.evidence.names
    new = [key for key in now.bridges if key not in before.bridges]
    new.sort(key=lambda key: (-now.bridges[key], names[key]))
    found: dict[str, Any] = {
        "added": [[unit(each), rank(tag)] for each, tag in now.curated.items() if each not in before.curated],
        "retagged": [
            [unit(each), rank(before.curated[each]), rank(tag)]
            for each, tag in now.curated.items()
            if before.curated.get(each, tag) != tag
        ],
        "removed": [unit(each) for each in gone if each not in delta.evicted],
        "evicted": [unit(each) for each in gone if each in delta.evicted],
        "refused": [unit(each) for each in delta.refused],
        "pooled": [unit(each) for each in memory.pool.entries if each not in before.pool],
        "hidden": [[unit(each), unit(twin)] for each, twin in now.aliases.items() if before.aliases.get(each) != twin],
        "shown": [unit(each) for each in before.aliases if each not in now.aliases],
        "verdicts": [
            [unit(verdict.unit_id), verdict.claim, verdict.label]
            for key, verdict in memory.verification.verdicts.items()
            if key not in before.verdicts
        ],
        "bridges": [[names[key], list(map(unit, memory.evidence.units[key]))] for key in new[:LISTED_BRIDGES]],
        "bridges_total": len(new),
    }
    return {name: rows for name, rows in found.items() if rows}


WORDS, SOURCES, LINKS = 7, 4, 200
"""Most words of a name in a query, documents listed as its source, and links of an episode."""
_AROUND = " ,.;:?!'\"()“”’"


def _names_from(words: list[str], at: int) -> Iterator[tuple[str, int]]:
    """Yield what may be a name from a word on, the longest first; one word alone needs a capital letter or a digit."""
    for size in range(min(WORDS, len(words) - at), 0, -1):
        name = " ".join(words[at : at + size]).strip(_AROUND)
        if name and (size > 1 or name != name.lower() or any(map(str.isdigit, name))):
            yield name, size


Viewed = dict[str, Any]


class EpisodeView:
    """The JSON data of one episode of an environment `env`. `tokenizer`: of its model, if it can be loaded. `titles`:
    of gold units that no search found. `tables`: filled while turns are made. `problem`: why it cannot be replayed
    exactly; then turns are shown from the record only."""

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
        self._wanted = frozenset[UnitId]()
        self._tokenizer = tokenizer
        self._outputs = {f"call/{call.call_id}": call.output_ids for call in calls_of(episode)}
        self._sent: dict[str, int] = {}  # the numbers of segments, each decoded once
        self._memory: WorkingMemory | None = None
        self._titled: dict[str, list[UnitId]] = {}  # the documents of the memory by their titles
        self._read = 0
        try:
            self._twin: SearchEnv | None = replay_env(episode, env)
        except (ConfigError, SchemaError) as error:
            self._twin, self.problem = None, str(error)

    def as_json(self, reward: RewardRecord | None) -> Viewed:
        """Return everything about the episode except for data shared by its run."""
        episode = self.episode
        turns = list(self._turns())
        gold = self._gold()
        deltas = [turn.observation.delta for turn in episode.turns if turn.observation is not None]
        relevant = [unit for delta in deltas for unit in (*delta.auto_populated, *delta.added)]
        relevant += sorted(self._wanted.intersection(episode.pool))
        chain = self._chain(relevant)
        if self._twin is not None:
            self.tables.name_handles(self._twin.state.memory.pool)
        return {
            "query": episode.task.query,
            "turns": turns,
            "gold": gold,
            "chain": chain,
            "delivered": [[self.tables.unit(each.unit_id), TAGS.index(each.tag)] for each in episode.curated],
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
            if self._twin is not None:
                self._see(self._twin.state.memory)
            shown = {
                "index": turn.index,
                "action": msgspec.to_builtins(turn.action),
                "reasoning": turn.reasoning,
                "ignored": msgspec.to_builtins(turn.ignored),
                "parse_error": turn.parse_error,
                "calls": [self._attempt(call) for call in turn.calls],
                "observation": None if turn.observation is None else self._observation(turn.observation),
                "hashes": [turn.memory_hash, turn.context_hash],
                "context": None,
                "tokens": turn.prompt_tokens,
                "prefill": turn.prefill_tokens,
            }
            yield shown if self._twin is None else shown | self._replay(turn, self._twin)

    def _see(self, memory: WorkingMemory) -> None:
        """Take in the documents that a memory has found so far."""
        self._memory, entries = memory, memory.pool.entries
        for unit_id, entry in islice(entries.items(), self._read, None):
            if entry.title:
                self._titled.setdefault(head(entry.title), []).append(unit_id)
        self._read = len(entries)

    def _names_in(self, query: str) -> list[Any]:
        """Return the names in a query: each with the documents that told it, or with None if the question has it."""
        if self._memory is None:
            return []
        asked, curated = {head(name) for name in question_names(self._memory.query)}, self._memory.curated.tags
        question = f" {normalise_name(self._memory.query)} "
        found: list[Any] = []
        words = query[:SCANNED_CHARACTERS].split()
        at = 0
        while at < len(words):
            for name, size in _names_from(words, at):
                if head(name) in asked:
                    found.append([name, None])
                elif f" {normalise_name(name)} " not in question:
                    titled, evidence = self._titled.get(head(name), []), self._memory.evidence
                    holders = [each for each in evidence.units_of(name) if each not in titled] or titled
                    holders = sorted(holders, key=lambda each: each not in curated)[:SOURCES]
                    if not holders:
                        continue
                    found.append([name, [self.tables.unit(each) for each in holders]])
                else:
                    continue
                at += size - 1
                break
            at += 1
        return found

    def _chain(self, relevant: Iterable[UnitId]) -> Viewed:
        """Return the names of the question, and the links between relevant documents, one of which names another."""
        if self._memory is None:
            return {"names": [], "links": []}
        self._see(self._memory)
        shown, links, unit = dict.fromkeys(relevant), [], self.tables.unit
        for source in shown:
            for name in self._memory.evidence.entities_of(source):
                near = (each for each in self._titled.get(head(name), ()) if each in shown and each != source)
                links += [(source, name, target) for target in near]
        linked = [[unit(source), name, unit(target)] for source, name, target in links[:LINKS]]
        return {"names": list(question_names(self._memory.query)), "links": linked}

    def _replay(self, turn: Turn, twin: SearchEnv) -> Viewed:
        """Take a turn again; return the context before it and the memory after it, as far as it can be replayed."""
        shown: Viewed = {}
        if (context := twin.state.context) is not None:
            budget, counts = context.budget, twin.renderer.counts
            shown["context"] = [self.tables.segment(each, counts.piece(each)) for each in context.pieces]
            shown |= {"tokens": budget.used, "prefill": context.fresh, "limit": budget.limit, "dropped": budget.dropped}
        before = _view_state(twin.state.memory)
        if turn.action is not None and turn.observation is not None:
            try:
                again = twin.replay(turn).turn
            except (ValueError, TypeError, LookupError) as error:
                self.problem, self._twin = self.problem or f"turn {turn.index}: it cannot be replayed ({error!r})", None
                return shown
            self.problem = self.problem or difference_between(turn, again, contexts=True)
        memory = twin.state.memory
        if turn.observation is not None:
            now = _view_state(memory)
            shown["change"] = change(before, now, memory, turn.observation.delta, self.tables)
            shown["sizes"] = [{name: len(part) for name, part in each._asdict().items()} for each in (before, now)]
        ranked = memory.curated.in_order()
        return shown | {"curated": [[self.tables.unit(each.unit_id), TAGS.index(each.tag)] for each in ranked]}

    def _attempt(self, call: ModelCall) -> Viewed:
        """Return a call; its prompt as numbers of segments. Raises SchemaError: a segment is missing."""

        def decode(ids: tuple[int, ...]) -> str | None:
            return self._tokenizer.decode(ids) if self._tokenizer is not None and ids else None

        for key in call.prompt:
            if key not in self._sent:
                ids = self._outputs.get(key, self.episode.segments.get(key))
                if ids is None:
                    raise SchemaError(f"episode {self.episode.episode_id} lacks the prompt segment {key!r}")
                self._sent[key] = self.tables.sent_segment(key, decode(ids), len(ids))
        sampling = msgspec.to_builtins(call.sampling)
        sampling.pop("stop_ids", None)
        logprobs = call.output_logprobs
        return {
            "attempt": call.attempt,
            "prompt": [self._sent[key] for key in call.prompt],
            "output": decode(call.output_ids) if call.output_ids else call.text or None,
            "output_tokens": len(call.output_ids),
            "mean_logprob": sum(logprobs) / len(logprobs) if logprobs else None,
            "finish": call.finish_reason,
            "sampling": sampling,
            "versions": [call.policy_version_start, call.policy_version_end],
            "seconds": round(call.t_end - call.t_start, 3),
        }

    def _observation(self, seen: Observation) -> Viewed:
        tables = self.tables
        hits = []
        for hit in seen.hits:
            unit = UnitId(hit.doc_id if self.episode.unit == "document" else hit.chunk_id)
            hits.append([tables.passage(hit, unit), round(hit.score, 4), hit.tokens])
        return {
            "tool": seen.tool,
            "hits": hits,
            "rankings": [
                {
                    "query": ranking.query,
                    "names": self._names_in(ranking.query),
                    "chunks": [tables.chunk(name) for name in ranking.chunk_ids],
                    "before": [tables.chunk(name) for name in ranking.pre_rerank_ids],
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

    def _gold(self) -> Viewed | None:
        try:
            wanted = targets(self.episode.task.task_id, self.gold, self.episode.unit)
        except UsageError:
            return None
        self._wanted = frozenset[UnitId]().union(*wanted.relevant)
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
    try:
        return [note.code, sentence(note)]
    except LookupError:
        return [note.code, " ".join(f"{name}={value}" for name, value in note.data.items())]
