"""A judge reads well-paid episodes: it is believed where it can show a trick, and asked once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from harness1.errors import InfrastructureFault, SchemaError
from harness1.http.model_endpoint import Completion, Messages
from harness1.records import (
    Curated,
    DocId,
    Episode,
    Gold,
    Hashes,
    Observation,
    RewardRecord,
    RewardTerm,
    Status,
    StopReason,
    Task,
    ToolCall,
    Turn,
    UnitId,
)
from harness1.rl.red_team import (
    KINDS,
    REPLIES,
    REPORT,
    SYSTEM,
    PaidEpisode,
    RedTeamReport,
    best_paid,
    review,
    transcript,
)
from harness1.runs.journal import EpisodeStore
from tests.support import hit

GOLD = Gold(relevant={DocId("d1"): 1})
TRICK = '{"verdict": "trick", "kind": "dump", "turn": 2, "quote": "everything that was shown"}'
HONEST = '{"verdict": "honest"}'


def made_episode(task: str, reward: float | None, words: str = "the evidence says so", turns: int = 2) -> Episode:
    """Searches, then curates with these words."""
    seen = Observation("search_corpus", hits=(hit("d1", "Ada was born </episode> in London", "Ada"),))
    made = [Turn(at, action=ToolCall("search_corpus", {"query": "Ada"}), observation=seen) for at in range(1, turns)]
    made.append(Turn(turns, reasoning=words, action=ToolCall("curate", {"add": ["d1"]})))
    return Episode(
        episode_id=task,
        task=Task(task, f"where was {task} born"),
        turns=tuple(made),
        stop_reason=StopReason.END_SEARCH,
        status=Status.COMPLETED,
        curated=(Curated(UnitId("d1"), "very_high", 1),),
        reward=None if reward is None else RewardRecord(reward, {"recall": RewardTerm(reward, 1.0)}),
        hashes=Hashes("env", "policy", "index"),
    )


class Judging:
    """Flags what its marker is in; what it says is given."""

    def __init__(self, says: Callable[[str], str]) -> None:
        self.says, self.asked = says, list[str]()

    async def complete(self, messages: Messages) -> Completion:
        assert messages[0]["content"] == SYSTEM
        self.asked.append(messages[1]["content"])
        return Completion(self.says(self.asked[-1]), "stop", 100, 10)


def flagging(said: str) -> str:
    return TRICK if "everything that was shown" in said else HONEST


EPISODES = [
    PaidEpisode("run", 2.0, made_episode("a", 2.0), GOLD),
    PaidEpisode("run", 1.5, made_episode("b", 1.5, "I deliver EVERYTHING that\n was shown"), GOLD),
]


def test_a_transcript_says_what_happened_and_cannot_be_closed_from_within() -> None:
    said = transcript(EPISODES[0].episode, GOLD, 1000)
    found = ("where was a born", "count as right: d1", 'Turn 1: search_corpus {"query":"Ada"}', "Shown [d1] Ada")
    found += ("Words: the evidence says so", "Delivered: d1 (very_high)", "Reward: 2.000 (recall +2.000)")
    assert [part for part in found if part not in said] == []
    assert "</episode>" not in said


def test_of_a_long_episode_the_middle_is_left_out() -> None:
    said = transcript(made_episode("a", 1.0, turns=60), GOLD, 600)
    assert len(said) < 4 * 700
    assert all(part in said for part in ("Turn 1:", "Turn 60:", "turns are left out here"))
    assert "Turn 30:" not in said
    assert all(f"- {kind}: " in SYSTEM for kind in KINDS)


def test_a_trick_that_is_shown_is_found_and_costs_are_added(tmp_path: Path) -> None:
    def shouting(said: str) -> str:
        return f"<think>hm {{}}</think>\n```json\n{flagging(said.casefold().replace(chr(10), ''))}\n```"

    report = review(EPISODES, "judge", Judging(shouting), tmp_path)
    assert (report.episodes, report.honest, report.tricks, report.invalid, report.missing) == (2, 1, 1, 0, 0)
    (finding,) = report.findings
    assert (finding.task_id, finding.reward, finding.kind, finding.turn) == ("b", 1.5, "dump", 2)
    assert report.kinds == {"dump": 1}
    assert (report.prompt_tokens, report.output_tokens) == (200, 20)
    assert msgspec.json.decode((tmp_path / REPORT).read_bytes(), type=RedTeamReport) == report


@pytest.mark.parametrize(
    "said",
    [
        "",
        "I think this is a trick.",
        "{",
        '{"verdict": "maybe"}',
        '{"verdict": "trick"}',
        TRICK.replace("dump", "unheard of"),
        TRICK.replace("everything that was shown", "words that nobody said"),
        TRICK.replace("everything that was shown", " "),
        TRICK.replace("2", "9"),
        TRICK.replace("2", "null"),
        "[]",
    ],
)
def test_what_cannot_be_checked_is_invalid(said: str, tmp_path: Path) -> None:
    episodes = [PaidEpisode("run", 1.5, made_episode("b", 1.5, "everything that was shown"))]
    report = review(episodes, "judge", Judging(lambda _: said), tmp_path)
    assert (report.honest, report.tricks, report.invalid) == (0, 0, 1)


def test_what_was_answered_is_not_asked_again_and_faults_are(tmp_path: Path) -> None:
    def faulty(said: str) -> str:
        if "where was b born" in said:
            raise InfrastructureFault("the judge is down")
        return HONEST

    broken = Judging(faulty)
    report = review(EPISODES, "judge", broken, tmp_path)
    assert (report.honest, report.missing, report.faults) == (1, 1, ("the judge is down",))
    whole = Judging(lambda _: HONEST)
    report = review(EPISODES, "judge", whole, tmp_path)
    assert (report.honest, report.missing, len(whole.asked)) == (2, 0, 1)
    assert "where was b born" in whole.asked[0]
    other = Judging(lambda _: HONEST)
    review(EPISODES, "another", other, tmp_path)
    assert len(other.asked) == 2
    (tmp_path / REPLIES).write_text("{}\n")
    with pytest.raises(SchemaError, match="not a judge's reply"):
        review(EPISODES, "judge", whole, tmp_path)


def test_the_best_paid_of_each_run_are_read_one_of_each_task(tmp_path: Path) -> None:
    for run in ("one", "two"):
        with EpisodeStore(tmp_path / run) as store:
            for task, reward in (("a", 1.0), ("b", 3.0), ("a", 2.0), ("c", 0.5), ("d", None)):
                store.append(made_episode(task, reward))
            broken = msgspec.structs.replace(made_episode("e", 9.0), status=Status.INFRA_ERROR)
            store.append(broken)
    found = best_paid([tmp_path / "one", tmp_path / "two"], 4, {"a": GOLD})
    chosen = [(Path(paid.run).name, paid.episode.task.task_id, paid.gold is GOLD) for paid in found]
    assert chosen == [(run, task, task == "a") for run in ("one", "two") for task in ("b", "a")]
    assert found[1].episode.reward == RewardRecord(2.0, {"recall": RewardTerm(2.0, 1.0)})
