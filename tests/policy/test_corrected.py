"""A student begins an episode and a teacher ends it; only what the teacher wrote is trained."""

from __future__ import annotations

import msgspec
import pytest

from harness1.config import Curation, Env, FanOut, Leads, Rendering, Sft
from harness1.episodes.rollout import rollout
from harness1.errors import UsageError
from harness1.policy.corrected import CorrectedPolicy
from harness1.policy.policy import counter_of
from harness1.policy.registry import check_policy, needs_gold, open_policy, plays_model
from harness1.policy.teacher.lead_teacher import FOLLOWED, LeadTeacher
from harness1.records import DocId, Episode, Gold, Status, Task, ToolCall, Turn
from harness1.sft.rows import Origin, sft_rows
from tests.policy.test_language_model import NONSENSE, Sayer, policy_of
from tests.support import curate, make_env, run, search
from tests.vocabularies import chat_format

TASK = Task("t", "Where did the father of Ada Lovelace die?")
ENV = Env(
    max_turns=6,
    leads=Leads(handles=True),
    curation=Curation(tags=False),
    rendering=Rendering(order="epoch", epoch_turns=6),
)
CHAT = chat_format("compact", "chatml")
SEEDS = range(8)


def corrected(*outputs: ToolCall | str, gold: str = "ada", seed: int = 0, env: Env = ENV) -> Episode:
    student = policy_of(Sayer(CHAT, *outputs), format_retries=0)
    policy = CorrectedPolicy(student, LeadTeacher({"t": Gold({DocId(gold): 1})}))
    return run(rollout(make_env(env, counter=counter_of(policy)), policy, TASK, seed=seed))


def is_students(turn: Turn) -> bool:
    return bool(turn.calls[-1].output_logprobs)


def test_the_student_takes_the_first_turns_and_the_teacher_mends_what_they_did() -> None:
    lengths = set()
    for seed in SEEDS:
        episode = corrected(search("Byron"), *[curate(add_ids=["D1", "D2"])] * 4, seed=seed)
        taken = [is_students(turn) for turn in episode.turns]
        assert taken == sorted(taken, reverse=True)
        assert taken[0]
        lengths.add(sum(taken))
        assert episode.status is Status.COMPLETED
        if not taken[-1]:
            assert [str(entry.unit_id) for entry in episode.curated] == ["ada"]
    assert len(lengths) > 2


def test_the_teacher_takes_over_where_the_student_writes_no_call() -> None:
    episode = corrected(NONSENSE)
    assert not any(map(is_students, episode.turns))
    assert NONSENSE not in str(episode)
    assert (episode.status, [str(entry.unit_id) for entry in episode.curated]) == (Status.COMPLETED, ["ada"])


@pytest.mark.parametrize("kind", ["turn", "epoch"])
def test_only_the_teachers_turns_are_trained(kind: str) -> None:
    for seed in SEEDS:
        episode = corrected(search("Byron"), search("Lovelace"), search("father"), search("die"), seed=seed)
        teachers = [turn for turn in episode.turns if not is_students(turn)]
        made = sft_rows(episode, Sft(rows=kind), Origin("d", "train", "corrected:hf:student"))  # type: ignore[arg-type]
        trained = [token for row in made.rows for token, mask in zip(row.token_ids, row.loss_mask, strict=True) if mask]
        assert trained == [token for turn in teachers for token in turn.calls[-1].output_ids]
        assert [number for row in made.rows for number in row.metadata["turns"]] == [turn.index for turn in teachers]
        every = sft_rows(episode, Sft(rows=kind), Origin("d", "train", "hf:student")).rows  # type: ignore[arg-type]
        assert sum(sum(row.loss_mask) for row in every) > len(trained)


@pytest.mark.parametrize(("gold", "searches"), [("ada", {2}), ("nowhere", {1 + FOLLOWED})])
def test_the_teacher_counts_the_searches_of_the_student(gold: str, searches: set[int]) -> None:
    """As the teacher alone does: the question, a wave of leads, and another one while gold is missing."""
    env = msgspec.structs.replace(ENV, fan_out=FanOut(on=True))
    episodes = [corrected(search("Q"), NONSENSE, gold=gold, seed=seed, env=env) for seed in SEEDS]
    assert {sum(bool(turn.observation.rankings) for turn in episode.turns) for episode in episodes} == searches


def test_a_fork_goes_on_alike() -> None:
    policy = CorrectedPolicy(policy_of(Sayer(CHAT)), LeadTeacher({"t": Gold({DocId("ada"): 1})}))
    session = policy.open(TASK, seed=3)
    env = make_env(ENV, counter=CHAT)
    context = run(env.reset(TASK))
    run(session.act(context))
    assert vars(session.fork()).keys() == vars(session).keys()
    assert session.fork()._last == session._last > 0


def test_it_is_named_by_a_model_whose_tokens_are_known() -> None:
    assert needs_gold("corrected:hf:student")
    assert plays_model("corrected:hf:student")
    check_policy("corrected:hf:student")
    with pytest.raises(UsageError, match="by its ids"):
        open_policy("corrected:openai:m@http://127.0.0.1:1/v1")
    for other in ("corrected:scripted", "corrected:"):
        assert not plays_model(other)
        with pytest.raises(UsageError, match="there is no policy"):
            check_policy(other)
