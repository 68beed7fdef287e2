"""Read well-paid episodes for tricks, with a language model as the judge, in a review that can be continued."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from harness1.errors import MALFORMED, InfrastructureFault
from harness1.http.model_endpoint import Messages, defuse, restore, strip_answer
from harness1.models.open import Completing
from harness1.plain import digest
from harness1.records import Episode, Gold, Record, Status, Turn
from harness1.retrieval.corpus import approximate_tokens
from harness1.reward import by_term
from harness1.runs.files import write_json
from harness1.runs.journal import Journal, read_episodes, read_line_records

REPLIES, REPORT = "judge.jsonl", "judge.json"
SHOWN = 200  # most characters of the text of a hit
OWN = 1000  # most characters of the agent's words in a turn, and of the arguments of its call
SHOWN_FAULTS = 5
MOST_TOKENS = 2048  # of a reply, including the thoughts before it
TOKENS, AT_ONCE = 6000, 16  # the limit of a transcript, and of requests at a time

_PROMPT: Any = msgspec.toml.decode(resources.files(__package__).joinpath("red_team.toml").read_bytes())
KINDS: Mapping[str, str] = _PROMPT["kinds"]  # the kinds of tricks, each with what it means
SYSTEM: str = _PROMPT["system"].replace("{kinds}", "\n".join(f"- {name}: {what};" for name, what in KINDS.items()))
_OBJECT = re.compile(r"\{[^{}]*\}", re.S)


class Judgement(Record):
    """A valid reply. The quote is in the transcript, letter by letter but for white space and case."""

    verdict: Literal["honest", "trick"]
    kind: str = ""  # one of `KINDS`; empty for an honest episode
    turn: int | None = None  # the one that shows it
    quote: str = ""


def read_judgement(said: str, transcript: str) -> Judgement | None:
    """Return the judgement in a reply: its last JSON object. None if there is none, or it names a trick without a known
    kind, a turn, or a quote from the transcript: a judge that cannot show a trick has not seen one."""
    objects = _OBJECT.findall(strip_answer(said))
    try:
        found = msgspec.json.decode(objects[-1] if objects else "", type=Judgement)
    except MALFORMED:
        return None
    if found.verdict == "honest":
        return Judgement("honest")
    shown = f"\nTurn {found.turn}:" in f"\n{transcript}" and _plain(found.quote) in _plain(transcript)
    return found if found.kind in KINDS and _plain(found.quote) and shown else None


def _plain(text: str) -> str:
    return " ".join(restore(text).casefold().split())


class Finding(Record):
    """A trick that a judge has shown."""

    run: str
    task_id: str
    sample_idx: int
    reward: float
    kind: str
    turn: int | None
    quote: str


class RedTeamReport(Record, kw_only=True):
    """The content of `judge.json`. Episodes are honest, tricks, invalid (a reply that says nothing that can be checked)
    or missing (no reply: the same command asks again). Tokens are those of all replies."""

    judge: str
    prompt: str  # the hash of the judge's system message
    episodes: int
    honest: int
    tricks: int
    invalid: int
    missing: int
    kinds: dict[str, int]  # the number of tricks of each kind
    prompt_tokens: int
    output_tokens: int
    findings: tuple[Finding, ...] = ()
    faults: tuple[str, ...] = ()  # the first reasons why replies are missing


def transcript(episode: Episode, gold: Gold | None, tokens: int) -> str:
    """Return an episode in words: question, gold, turns, delivery and reward. If it would be longer than `tokens`
    (characters / 4), turns in the middle are left out, and it says how many."""
    head = f"Question: {episode.task.query}"
    delivered = ", ".join(f"{entry.unit_id} ({entry.tag})" for entry in episode.curated) or "nothing"
    end = f"End: {episode.stop_reason} after {len(episode.turns)} turns\nDelivered: {delivered}"
    if episode.reward is not None:
        terms = ", ".join(f"{name} {value:+.3f}" for name, value in by_term(episode.reward).items())
        end += f"\nReward: {episode.reward.total:.3f} ({terms})"
    if gold is not None:
        right = [name for name, grade in gold.relevant.items() if grade > 0]
        head += f"\nDocuments that count as right: {', '.join(right) or 'not known'}"
    turns = ["\n".join(_turn(turn)) for turn in episode.turns]
    room, kept = tokens - approximate_tokens(head) - approximate_tokens(end), list[int]()
    # First, last, second, and so on; at least one.
    for at in sorted(range(len(turns)), key=lambda at: (min(at, len(turns) - 1 - at), at)):
        room -= approximate_tokens(turns[at])
        if kept and room < 0:
            break
        kept.append(at)
    parts, before = [head], -1
    for at in sorted(kept):
        if at > before + 1:
            parts.append(f"({at - before - 1} turns are left out here)")
        parts.append(turns[at])
        before = at
    return defuse("\n\n".join([*parts, end]))


def _turn(turn: Turn) -> Iterator[str]:
    call, seen = turn.action, turn.observation
    arguments = msgspec.json.encode(call.arguments).decode() if call else ""
    yield f"Turn {turn.index}: {call.name} {arguments[:OWN]}" if call else f"Turn {turn.index}: no valid call"
    if turn.reasoning:
        yield f"  Words: {turn.reasoning[:OWN]}"
    if seen is None:
        return
    if seen.error is not None:
        yield f"  Refused: {seen.error.code}"
    for hit in seen.hits:
        yield f"  Shown [{hit.doc_id}] {hit.title}: {' '.join(hit.text.split())[:SHOWN]}"
    for unit, tag in (seen.delta.added | seen.delta.retagged).items():
        yield f"  Delivers {unit}, tagged {tag}"
    for unit in seen.delta.removed:
        yield f"  Takes back {unit}"


class PaidEpisode(NamedTuple):
    """An episode to judge, with the folder of its run, and its reward."""

    run: str
    reward: float
    episode: Episode
    gold: Gold | None = None

    def order(self) -> tuple[float, str, int]:
        return -self.reward, self.episode.task.task_id, self.episode.sample_idx


class Reply(Record):
    """The reply to one prompt, by the hash of its messages, of one judge."""

    judge: str
    prompt: str
    text: str
    finish_reason: str = ""
    prompt_tokens: int | None = None
    output_tokens: int | None = None


def best_paid(runs: Sequence[Path], count: int, golds: Mapping[str, Gold]) -> list[PaidEpisode]:
    """Return about `count` episodes with the highest rewards, as many of each run, and one of each task in a run; raise
    UsageError if a folder holds no episodes; SchemaError if a run is damaged."""
    found: list[PaidEpisode] = []
    for run in runs:
        best: dict[str, PaidEpisode] = {}
        for episode in read_episodes(run):
            if episode.reward is not None and episode.status is not Status.INFRA_ERROR:
                task_id = episode.task.task_id
                paid = PaidEpisode(str(run), episode.reward.total, episode, golds.get(task_id))
                best[task_id] = min(best.get(task_id, paid), paid, key=PaidEpisode.order)
        found += sorted(best.values(), key=PaidEpisode.order)[: -(-count // len(runs))]
    return found


def review(
    episodes: Sequence[PaidEpisode],
    name: str,
    judge: Completing,
    out: Path,
    on_reply: Callable[[], None] = lambda: None,
) -> RedTeamReport:
    """Have a model judge what is not in the folder yet, and write and return the report; raise UsageError if the judge
    would refuse every request, or the folder cannot be written; SchemaError if the stored replies are damaged."""
    texts = [transcript(each.episode, each.gold, TOKENS) for each in episodes]
    places = asyncio.Semaphore(AT_ONCE)

    async def ask(text: str) -> Reply | InfrastructureFault:
        said = f"<episode>\n{text}\n</episode>"
        messages: Messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": said}]
        if (reply := kept.get((name, digest(messages)))) is None:
            try:
                async with places:
                    completion = await judge.complete(messages)
            except InfrastructureFault as fault:
                return fault
            reply = Reply(name, digest(messages), **msgspec.structs.asdict(completion))
            journal.write(msgspec.json.encode(reply))
        on_reply()
        return reply

    async def ask_all() -> list[Reply | InfrastructureFault]:
        return await asyncio.gather(*map(ask, texts))

    with Journal(out, REPLIES) as journal:
        stored = read_line_records(out / REPLIES, Reply, "a judge's reply")
        kept = {(reply.judge, reply.prompt): reply for reply in stored}
        replies = asyncio.run(ask_all())
    report = _make_report(name, list(zip(episodes, texts, replies, strict=True)))
    write_json(out / REPORT, report)
    return report


def _make_report(name: str, asked: Sequence[tuple[PaidEpisode, str, Reply | InfrastructureFault]]) -> RedTeamReport:
    given = [(paid, text, reply) for paid, text, reply in asked if isinstance(reply, Reply)]
    said = [(paid, read_judgement(reply.text, text)) for paid, text, reply in given]
    findings: list[Finding] = []
    for paid, one in said:
        if one is not None and one.verdict == "trick":
            played = paid.run, paid.episode.task.task_id, paid.episode.sample_idx, paid.reward
            findings.append(Finding(*played, one.kind, one.turn, one.quote))
    invalid = sum(one is None for _, one in said)
    faults = dict.fromkeys(str(reply) for _, _, reply in asked if not isinstance(reply, Reply))
    return RedTeamReport(
        judge=name,
        prompt=digest(SYSTEM),
        episodes=len(asked),
        honest=len(given) - invalid - len(findings),
        tricks=len(findings),
        invalid=invalid,
        missing=len(asked) - len(given),
        kinds=dict(Counter(finding.kind for finding in findings)),
        prompt_tokens=sum(reply.prompt_tokens or 0 for _, _, reply in given),
        output_tokens=sum(reply.output_tokens or 0 for _, _, reply in given),
        findings=tuple(findings),
        faults=tuple(faults)[:SHOWN_FAULTS],
    )
