"""An episode as text for a judge."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from harness1.http.model_endpoint import defuse
from harness1.records import Episode, Gold, Observation, Turn
from harness1.retrieval.corpus import approximate_tokens
from harness1.reward import by_term

SHOWN = 200
"""Most characters of the text of a hit."""
OWN = 1000
"""Most characters of the agent's words in a turn, and of the arguments of its call."""


def transcript(episode: Episode, gold: Gold | None, tokens: int) -> str:
    """Return an episode in words: question, gold, turns, delivery and reward. If it would be longer than `tokens`
    (characters / 4), turns in the middle are left out, and it says how many."""
    head, end = "\n".join(_head(episode, gold)), "\n".join(_end(episode))
    turns = ["\n".join(_turn(turn)) for turn in episode.turns]
    kept = _from_both_ends(turns, tokens - approximate_tokens(head) - approximate_tokens(end))
    parts, before = [head], -1
    for at in kept:
        if at > before + 1:
            parts.append(f"({at - before - 1} turns are left out here)")
        parts.append(turns[at])
        before = at
    return defuse("\n\n".join([*parts, end]))


def _from_both_ends(turns: Sequence[str], room: int) -> list[int]:
    """Return the turns that fit, in order: first, last, second, and so on; at least one."""
    order = sorted(range(len(turns)), key=lambda at: (min(at, len(turns) - 1 - at), at))
    kept: list[int] = []
    for at in order:
        room -= approximate_tokens(turns[at])
        if kept and room < 0:
            break
        kept.append(at)
    return sorted(kept)


def _head(episode: Episode, gold: Gold | None) -> Iterator[str]:
    yield f"Question: {episode.task.query}"
    if gold is not None:
        right = [name for name, grade in gold.relevant.items() if grade > 0]
        yield f"Documents that count as right: {', '.join(right) or 'not known'}"


def _turn(turn: Turn) -> Iterator[str]:
    call = turn.action
    arguments = msgspec.json.encode(call.arguments).decode() if call else ""
    yield f"Turn {turn.index}: {call.name} {arguments[:OWN]}" if call else f"Turn {turn.index}: no valid call"
    if turn.reasoning:
        yield f"  Words: {turn.reasoning[:OWN]}"
    if turn.observation is not None:
        yield from _seen(turn.observation)


def _seen(seen: Observation) -> Iterator[str]:
    if seen.error is not None:
        yield f"  Refused: {seen.error.code}"
    for hit in seen.hits:
        yield f"  Shown [{hit.doc_id}] {hit.title}: {' '.join(hit.text.split())[:SHOWN]}"
    for unit, tag in (seen.delta.added | seen.delta.retagged).items():
        yield f"  Delivers {unit}, tagged {tag}"
    for unit in seen.delta.removed:
        yield f"  Takes back {unit}"


def _end(episode: Episode) -> Iterator[str]:
    delivered = ", ".join(f"{entry.unit_id} ({entry.tag})" for entry in episode.curated)
    yield f"End: {episode.stop_reason} after {len(episode.turns)} turns"
    yield f"Delivered: {delivered or 'nothing'}"
    if episode.reward is not None:
        terms = ", ".join(f"{name} {value:+.3f}" for name, value in by_term(episode.reward).items())
        yield f"Reward: {episode.reward.total:.3f} ({terms})"
