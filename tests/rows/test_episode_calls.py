"""The calls of an episode for training and checking: which, in what order, under which names."""

from __future__ import annotations

import msgspec
import pytest

from harness1.errors import SchemaError
from harness1.records import Episode, Status
from harness1.rl.logprobs import calls_to_replay
from harness1.rows import Merged, prefix_merging
from harness1.rows.calls import calls_for_rows, calls_of, prompt_ids
from tests.policy.test_language_model import NONSENSE, episode_of, sayer
from tests.support import call, search

END = call("end_search")
ORDERS = ("paper", "stable_first", "epoch", "transcript")


def completed(order: str = "paper") -> Episode:
    return episode_of(sayer(search("river"), NONSENSE, NONSENSE, search("war"), search("town"), END), order)


def failed(order: str = "paper", retries: int = 3) -> Episode:
    return episode_of(sayer(search("river"), search("war"), *[NONSENSE] * 9), order, format_retries=retries)


def merged(episode: Episode) -> Merged:
    return prefix_merging(calls_for_rows(episode))


def trained(episode: Episode) -> set[str]:
    return {name.partition("/")[2] for row in merged(episode).rows for name in row.call_ids}


def test_every_sampled_call_is_replayed_with_its_whole_prompt_in_the_order_made() -> None:
    model = sayer(search("river"), NONSENSE, search("war"), END)
    episode = episode_of(model)
    sampled = list(calls_to_replay(episode))
    assert [made.prompt_ids for made in sampled] == model.prompts
    assert [made.sampling for made in sampled] == model.samplings
    recorded = list(calls_of(episode))
    assert [made.output_ids for made in sampled] == [made.output_ids for made in recorded]
    assert [made.output_logprobs for made in sampled] == [made.output_logprobs for made in recorded]
    assert {made.version for made in sampled} == {model.version}


def test_of_a_turn_that_acted_the_attempt_that_acted_is_trained_on() -> None:
    captured = list(calls_for_rows(completed()))
    episode = completed()
    assert [made.call_id for made in captured] == [
        f"{episode.episode_id}/{name}" for name in ("1.0", "2.2", "3.0", "4.0")
    ]
    assert [made.attempt for made in captured] == [0, 2, 0, 0]
    assert {(made.session_id, made.agent_id) for made in captured} == {(episode.episode_id, "")}
    assert {(made.version_start, made.version_end) for made in captured} == {(7, 8)}
    assert [made.prompt_ids for made in captured] == [prompt_ids(episode, turn.calls[-1]) for turn in episode.turns]
    assert all(made.output_logprobs and len(made.output_logprobs) == len(made.output_ids) for made in captured)


def test_failed_attempts_are_trained_on_only_where_they_ended_the_episode() -> None:
    episode = failed()
    assert episode.status is Status.POLICY_ERROR
    names = [made.call_id.partition("/")[2] for made in calls_for_rows(episode)]
    assert names == ["1.0", "2.0", "3.0", "3.1", "3.2", "3.3"]
    broken = msgspec.structs.replace(episode, status=Status.INFRA_ERROR)
    assert list(calls_for_rows(broken)) == []


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("retries", [0, 1, 3])
def test_no_failed_attempt_passes_for_a_retry_of_another(order: str, retries: int) -> None:
    episode = failed(order, retries)
    made = merged(episode)
    attempts = list(calls_for_rows(episode))[3:]  # those after the first have one prompt, and say the same
    assert len({(made.prompt_ids, made.output_ids) for made in attempts}) <= 1
    assert trained(episode) == {"1.0", "2.0", *[f"3.{attempt}" for attempt in range(retries + 1)]}
    assert trained(completed(order)) == {"1.0", "2.2", "3.0", "4.0"}
    for each in (made, merged(completed(order))):
        assert each.superseded == each.quarantine == each.empty == ()


def test_calls_without_tokens_are_no_calls_and_those_without_log_probabilities_are_not_replayed() -> None:
    def changed(**fields: tuple[()]) -> Episode:
        episode, replace = completed(), msgspec.structs.replace
        turns = (replace(turn, calls=tuple(replace(made, **fields) for made in turn.calls)) for turn in episode.turns)
        return replace(episode, turns=tuple(turns))

    bare = changed(output_ids=(), output_logprobs=())
    assert [*calls_to_replay(bare), *calls_for_rows(bare)] == []
    unknown = changed(output_logprobs=())
    assert list(calls_to_replay(unknown)) == []
    assert [made.output_logprobs for made in calls_for_rows(unknown)] == [None] * 4


def test_a_record_without_a_stretch_of_a_prompt_is_refused() -> None:
    episode = completed()
    name = next(iter(episode.segments))
    torn = msgspec.structs.replace(episode, segments={key: ids for key, ids in episode.segments.items() if key != name})
    for calls in (calls_to_replay, calls_for_rows):
        with pytest.raises(SchemaError, match="lacks the prompt segment"):
            list(calls(torn))
