"""The oracle teacher finds and curates gold, uses all tools, and never says what it was not shown."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import chain

import pytest

from harness1.config import load_config
from harness1.data.world import world_source
from harness1.env.render import Context
from harness1.episodes.rollout import rollout
from harness1.memory.entities import FUNCTION_WORDS
from harness1.policy.oracle_teacher import LINES, OracleTeacher, content_words, line, parts, subject, topics
from harness1.policy.policy import Decision
from harness1.policy.wrappers import WrappedPolicy
from harness1.records import TAGS, Chunk, ChunkId, DocId, Episode, Gold, StopReason, Task, ToolCall
from harness1.reward.measures import Outcome, measure_outcome
from tests.support import CORPUS, WordRetriever, chunk, make_env, run, text_of

TASK = Task("t", "Where did the father of Ada Lovelace die?")
VAIN = Task("t", "Where did the father of Ada Lovelace hide the Zanzibar Codex?")
HOPS = Gold({DocId("ada"): 1, DocId("byron"): 1, DocId("miss"): 1, DocId("noise"): 0})
Found = list[tuple[Task, Episode, list[tuple[str, Decision]]]]
FILLER = tuple(chunk(f"filler{number}", f"The father of somebody did die in town {number}.") for number in range(30))
OPTIONAL = ("fan_out", "grep", "read", "review", "verification")
ORDERS = ("paper", "stable_first", "epoch")


class Watched(WrappedPolicy):
    """The teacher, and what stood before it whenever it decided."""

    def wrap_decision(self, decision: Decision, context: Context) -> Decision:
        self.seen.append((text_of(context), decision))
        return decision


def episode_of(
    gold: Gold, *settings: str, seed: int = 0, corpus: Sequence[Chunk] = (*CORPUS, *FILLER), task: Task = TASK
) -> Episode:
    env = load_config(None, list(settings)).env
    return run(rollout(make_env(env, corpus), OracleTeacher({"t": gold}), task, seed=seed))


def curated(episode: Episode) -> set[str]:
    assert calls(episode)
    return {str(entry.unit_id) for entry in episode.curated}


def calls(episode: Episode) -> list[ToolCall]:
    """The actions of an episode, none of which was a mistake."""
    assert all(seen.error is None for seen in episode.observations)
    return [turn.action for turn in episode.turns if turn.action is not None]


def written(decision: Decision) -> list[str]:
    """Everything that an action says in words."""
    values = decision.actions[0].arguments.values()
    said = chain.from_iterable(value if isinstance(value, list) else [value] for value in values)
    return [value for value in said if isinstance(value, str)]


def words(text: str) -> set[str]:
    return set(re.findall(r"[^\W_]+", text.removeprefix("(?i)").lower()))


OWN_WORDS = words(" ".join(chain.from_iterable(LINES.values())))
"""What the teacher's lines say whatever the task."""


@pytest.fixture(scope="module")
def world() -> tuple[list[Chunk], list[Task]]:
    """A synthetic world as chunks, with ids that say nothing, and tasks on it."""
    source = world_source(150)
    chunks = [chunk(made.doc_id, made.text, made.title) for made in source.documents()]
    return chunks, source.tasks("train")[:30]


@pytest.fixture(scope="module")
def episodes(world: tuple[list[Chunk], list[Task]]) -> Found:
    chunks, tasks = world
    env, found = make_env(chunks=chunks), []
    for task in tasks:
        assert task.gold is not None
        watched = Watched(OracleTeacher({task.task_id: task.gold}), "watched", "watched")
        watched.seen = []
        found.append((task, run(rollout(env, watched, task)), watched.seen))
    return found


def test_every_word_of_an_action_and_no_secret_of_gold_was_asked_or_shown_before(
    world: tuple[list[Chunk], list[Task]], episodes: Found
) -> None:
    titles = {made.doc_id: made.title for made in world[0]}
    for task, _, turns in episodes:
        secrets = {*task.gold.relevant, *(titles[doc_id] for doc_id in task.gold.relevant), *task.gold.answers}
        shown, seen = words(task.query), task.query.lower()
        for text, decision in turns:
            shown, seen = shown | words(text), seen + text.lower()
            own = OWN_WORDS if decision.actions[0].name == "end_search" else FUNCTION_WORDS
            for said in (decision.reasoning, *written(decision)):
                assert words(said) <= shown | (OWN_WORDS if said == decision.reasoning else own), said
                for secret in secrets:
                    inside = re.search(rf"(?<!\w){re.escape(secret.lower())}(?!\w)", said.lower())
                    assert not inside or secret.lower() in seen, said


def test_lines_are_short_varied_and_never_speak_of_gold_and_all_tools_are_used(episodes: Found) -> None:
    said = [decision.reasoning for _, _, turns in episodes for _, decision in turns]
    assert all(0 < len(reasoning.split()) < 40 and "{" not in reasoning for reasoning in said)
    assert len(set(said)) > len(said) / 4
    assert not OWN_WORDS & {"gold", "oracle", "answer", "relevant"}
    assert "D1, D2 and D3" in line("verify", 0, ["D1", "D2", "D3", "D4"])
    assert "one two three four five six." in line("asked", 2, topic=["one two three four five six seven"]) + "."
    assert "the question" in line("end", 0)
    used = {call.name for _, episode, _ in episodes for call in calls(episode)}
    assert used == {spec.name for spec in make_env().toolbox.specs}


def test_it_curates_all_gold_that_it_saw_marks_it_highest_and_stops(episodes: Found) -> None:
    results: list[Outcome] = []
    for task, episode, _ in episodes:
        assert episode.stop_reason is StopReason.END_SEARCH
        relevant = {str(doc_id) for doc_id, grade in task.gold.relevant.items() if grade > 0}
        for entry in episode.curated:
            assert (entry.tag in ("very_high", "high")) == (entry.unit_id in relevant)
        results.append(measure_outcome(episode, task.gold))
        assert results[-1].recall == results[-1].trajectory_recall
        assert results[-1].turns <= 20
    assert sum(result.recall for result in results) / len(results) > 0.9
    assert any(0 < result.precision < 1 for result in results)


def test_it_follows_the_hops_and_keeps_a_few_near_misses() -> None:
    found = [episode_of(HOPS, seed=seed) for seed in range(6)]
    assert all({"ada", "byron", "miss"} <= curated(episode) for episode in found)
    assert episode_of(HOPS, seed=1).turns == found[1].turns
    assert len({repr(episode.turns) for episode in found}) > 1
    assert 3 < max(len(episode.curated) for episode in found) <= 7


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("tool", [*OPTIONAL, "all"])
def test_every_action_is_valid_whichever_tool_is_missing(tool: str, order: str) -> None:
    off = [f"env.{name}.on=false" for name in (OPTIONAL if tool == "all" else (tool,))]
    for seed in range(2):
        episode = episode_of(HOPS, f"env.rendering.order={order}", *off, seed=seed)
        assert {"ada", "byron", "miss"} <= curated(episode)
        assert episode.stop_reason is StopReason.END_SEARCH
        lost = episode_of(Gold({DocId("nowhere"): 1}), f"env.rendering.order={order}", *off, seed=seed, task=VAIN)
        assert ("grep_corpus" in [call.name for call in calls(lost)]) == (tool not in ("grep", "all"))


@pytest.mark.parametrize(
    "settings",
    [
        *("curation.tags=false", "auto_populate.on=false", "budget_marker.on=false auto_populate.on=false"),
        "compression.on=false evidence.on=false history.on=false dedup.on=false guidance=none",
        *("curation.cap=3 curation.eviction=refuse", "curation.cap=4 curation.eviction=fifo"),
        *("search.hits=1", "context_window=8192"),
    ],
)
def test_it_copes_without_any_mechanism(settings: str) -> None:
    for seed in range(3):
        episode = episode_of(HOPS, *(f"env.{setting}" for setting in settings.split()), seed=seed)
        assert {"ada", "byron", "miss"} <= curated(episode)
        delivered = [entry.unit_id for entry in episode.curated]
        assert "tags" not in settings or set(delivered[:3]) == {"ada", "byron", "miss"}


@pytest.mark.parametrize("turns", [2, 3, 4, 5, 6])
@pytest.mark.parametrize("verifies", ["true", "false"])
def test_it_curates_before_the_turns_run_out(turns: int, verifies: str) -> None:
    gold = Gold({DocId("ada"): 1, DocId("nowhere"): 1})
    episode = episode_of(gold, f"env.max_turns={turns}", f"env.verification.on={verifies}")
    assert "curate" in [call.name for call in calls(episode)]
    assert "ada" in curated(episode)
    assert turns == 2 or episode.stop_reason is StopReason.END_SEARCH
    unseen = ("env.budget_marker.on=false", "env.auto_populate.on=false", "env.max_turns=3")
    assert "ada" in curated(episode_of(gold, *unseen)), "where no budget is shown, what is found is kept at once"


@pytest.mark.parametrize(("instructions", "tokens"), [("minimal", 600), ("full", 1500)])
def test_it_prunes_a_full_transcript_of_all_but_gold(instructions: str, tokens: int) -> None:
    off = [f"env.{name}.on=false" for name in ("evidence", "leads", "auto_populate", "review", "history")]
    order = ("env.rendering.order=transcript", f"env.rendering.instructions={instructions}")
    episode = episode_of(HOPS, *off, *order, "env.pruning.on=true", f"env.pruning.tokens={tokens}")
    gone = {unit for turn in episode.turns if turn.observation for unit in turn.observation.delta.pruned}
    assert gone
    assert not gone & {"ada", "byron", "miss"}
    assert "ada" in curated(episode)


def test_gold_that_cannot_be_found_is_given_up() -> None:
    episode = episode_of(Gold({DocId("nowhere"): 1}))
    assert episode.stop_reason is StopReason.END_SEARCH
    assert len(calls(episode)) <= 14
    assert set() < {entry.tag for entry in episode.curated} <= set(TAGS[2:])


def test_of_a_fact_any_chunk_is_evidence() -> None:
    gold = Gold({}, facts=((ChunkId("ada#0"), ChunkId("x#0")), (ChunkId("byron#0"),)))
    env = make_env(retriever=WordRetriever((*CORPUS, *FILLER), "chunk"))
    episode = run(rollout(env, OracleTeacher({"t": gold}), TASK))
    assert {"ada#0", "byron#0"} <= curated(episode)


def test_a_question_is_taken_apart_into_its_own_words() -> None:
    claimed = "A deficiency of vitamin B6 decreases blood levels of homocysteine."
    assert content_words(claimed) == ["deficiency", "vitamin", "B6", "decreases", "blood", "levels", "homocysteine"]
    assert all(words(part) <= words(claimed) for part in parts(claimed))
    assert parts("of the") == []
    assert topics("Was Lord Byron of Byron House born in 1788?") == ["Lord Byron of Byron House"]
    assert topics("Who was born first, Ada Lovelace or Lord Byron?") == ["Ada Lovelace", "Lord Byron"]
    assert subject("does low birth weight matter") == ("low birth weight",)
