"""Have a judge read the best-paid episodes. Each reply is stored when it arrives, so a stopped review can continue."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from harness1.config import Config
from harness1.errors import MALFORMED, InfrastructureFault, SchemaError
from harness1.hashing import digest
from harness1.models.open import Completing, open_completer
from harness1.records import Episode, Gold, Record, Status
from harness1.rl.red_team.judgement import SYSTEM, Judgement, question, read_judgement
from harness1.rl.red_team.report import Finding, RedTeamReport
from harness1.rl.red_team.transcript import transcript
from harness1.runs.files import write_json
from harness1.runs.journal import Journal, read_episodes, read_lines

REPLIES = "judge.jsonl"
REPORT = "judge.json"
SHOWN_FAULTS = 5
MOST_TOKENS = 2048
"""Most tokens of a reply, including the thoughts before it."""


def open_judge(spec: str, config: Config) -> Completing:
    """Open a judge by its name; raise as `open_completer`."""
    return open_completer(spec, config, MOST_TOKENS)


class PaidEpisode(Record):
    """An episode to judge, and the folder of its run."""

    run: str
    episode: Episode
    gold: Gold | None = None


class Reply(Record):
    """The reply to one prompt of one judge."""

    judge: str
    prompt: str
    """The hash of the messages."""
    text: str
    finish_reason: str = ""
    prompt_tokens: int | None = None
    output_tokens: int | None = None


def best_paid(runs: Sequence[Path], count: int, golds: Mapping[str, Gold]) -> list[PaidEpisode]:
    """Return about `count` episodes with the highest rewards, as many of each run, and one of each task in a run.

    Raises:
        UsageError: a folder holds no episodes.
        SchemaError: a run is damaged.
    """
    found: list[PaidEpisode] = []
    for run in runs:
        best: dict[str, Episode] = {}
        for episode in read_episodes(run):
            held = best.get(episode.task.task_id)
            if _paid(episode) is not None and (held is None or _order(episode) < _order(held)):
                best[episode.task.task_id] = episode
        chosen = sorted(best.values(), key=_order)[: -(-count // len(runs))]
        found += [PaidEpisode(str(run), episode, golds.get(episode.task.task_id)) for episode in chosen]
    return found


@dataclass(frozen=True)
class Review:
    """Episodes, and the model that judges them; `tokens` is the limit of a transcript."""

    episodes: Sequence[PaidEpisode]
    name: str
    judge: Completing
    tokens: int = 6000
    places: int = 16
    """Requests at a time."""

    def carry_out(self, out: Path, on_reply: Callable[[], None] = lambda: None) -> RedTeamReport:
        """Ask what is not in the folder yet, and write and return the report.

        Raises:
            UsageError: the judge would refuse every request, or the folder cannot be written.
            SchemaError: the stored replies are damaged.
        """
        with Journal(out, REPLIES) as journal:
            kept = {(reply.judge, reply.prompt): reply for reply in _read(out / REPLIES)}
            replies = asyncio.run(self._ask(kept, journal, on_reply))
        report = self._report(replies)
        write_json(out / REPORT, report)
        return report

    async def _ask(
        self, kept: Mapping[tuple[str, str], Reply], journal: Journal, on_reply: Callable[[], None]
    ) -> list[Reply | InfrastructureFault]:
        turns = asyncio.Semaphore(self.places)

        async def one(paid: PaidEpisode) -> Reply | InfrastructureFault:
            messages = question(self._transcript(paid))
            if (reply := kept.get((self.name, digest(messages)))) is None:
                try:
                    async with turns:
                        completion = await self.judge.complete(messages)
                except InfrastructureFault as fault:
                    return fault
                reply = Reply(self.name, digest(messages), **msgspec.structs.asdict(completion))
                journal.write(msgspec.json.encode(reply))
            on_reply()
            return reply

        return await asyncio.gather(*map(one, self.episodes))

    def _report(self, replies: Sequence[Reply | InfrastructureFault]) -> RedTeamReport:
        given = [(paid, reply) for paid, reply in zip(self.episodes, replies, strict=True) if isinstance(reply, Reply)]
        judged = [(paid, read_judgement(reply.text, self._transcript(paid))) for paid, reply in given]
        findings = tuple(_finding(paid, said) for paid, said in judged if said is not None and said.verdict == "trick")
        faults = dict.fromkeys(str(reply) for reply in replies if not isinstance(reply, Reply))
        return RedTeamReport(
            judge=self.name,
            prompt=digest(SYSTEM),
            episodes=len(replies),
            honest=sum(said is not None for _, said in judged) - len(findings),
            tricks=len(findings),
            invalid=sum(said is None for _, said in judged),
            missing=len(replies) - len(given),
            kinds=dict(Counter(finding.kind for finding in findings)),
            prompt_tokens=sum(reply.prompt_tokens or 0 for _, reply in given),
            output_tokens=sum(reply.output_tokens or 0 for _, reply in given),
            findings=findings,
            faults=tuple(faults)[:SHOWN_FAULTS],
        )

    def _transcript(self, paid: PaidEpisode) -> str:
        return transcript(paid.episode, paid.gold, self.tokens)


def _finding(paid: PaidEpisode, said: Judgement) -> Finding:
    episode, paid_for = paid.episode, _paid(paid.episode) or 0.0
    named = paid.run, episode.task.task_id, episode.sample_idx
    return Finding(*named, paid_for, said.kind, said.turn, said.quote)


def _paid(episode: Episode) -> float | None:
    return None if episode.reward is None or episode.status is Status.INFRA_ERROR else episode.reward.total


def _order(episode: Episode) -> tuple[float, str, int]:
    return -(_paid(episode) or 0.0), episode.task.task_id, episode.sample_idx


def _read(path: Path) -> Iterator[Reply]:
    for number, line in read_lines(path):
        try:
            yield msgspec.json.decode(line, type=Reply)
        except MALFORMED as error:
            raise SchemaError(f"{path}:{number}: not a judge's reply: {error}") from error
