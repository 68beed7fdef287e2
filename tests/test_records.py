"""Records are frozen, strict and readable for good; gold does not leave through a public task."""

import msgspec
import pytest
from msgspec.structs import replace

from harness1 import records
from harness1.episodes.rollout import rollout
from harness1.errors import SchemaError
from harness1.plain import digest, text_digest
from tests.support import END, Script, curate, make_env, run, search

TASK = records.Task(
    "t", "Where did Byron die?", gold=records.Gold({records.DocId("byron"): 1}), metadata={"answer": "Missolonghi"}
)


def episode() -> records.Episode:
    return run(rollout(make_env(), Script(search("Byron"), curate(add_ids=["D1"]), END), TASK))


@pytest.mark.parametrize(
    "reward",
    [
        b'{"total":1e308}',
        b'{"total":1.0,"terms":{"a":{"value":1e200,"weight":1e200}}}',
        b'{"total":1.0,"terms":{"a":{"value":1e308,"weight":1},"b":{"value":1e308,"weight":1}}}',
        b'{"total":1.0,"terms":{"a":{"value":1e308,"weight":1},"b":{"value":-1e308,"weight":1}}}',
        b'{"total":1%s}' % (b"0" * 400),
        b'{"total":null}',
    ],
)
def test_a_reward_without_a_finite_sum_is_not_read(reward: bytes) -> None:
    line = records.encode_episode(replace(episode(), reward=records.RewardRecord(1.0)))
    least = records.decode_episode(line.replace(b'{"total":1.0}', b'{"total":-1e12}'))
    assert least.reward == records.RewardRecord(-1e12)
    with pytest.raises(SchemaError):
        records.decode_episode(line.replace(b'{"total":1.0}', reward))


def test_an_episode_survives_its_line() -> None:
    made = episode()
    line = records.encode_episode(made)
    assert not any(word in line for word in (b"\n", b"gold", b"metadata"))
    assert records.decode_episode(line) == made
    assert records.encode_episode(records.decode_episode(line)) == line


def test_a_newer_record_is_refused_with_a_clear_error() -> None:
    tree = msgspec.json.decode(records.encode_episode(episode()))
    tree |= {"schema_version": records.SCHEMA_VERSION + 1, "invented_later": True}
    with pytest.raises(SchemaError, match=f"an episode of schema {records.SCHEMA_VERSION + 1}.*upgrade"):
        records.decode_episode(msgspec.json.encode(tree))


@pytest.mark.parametrize("line", [b"", b"{", b"{}", b"[]", b'{"episode_id":"x"}', b'{"schema_version":"x"}', b"\xff"])
def test_what_is_no_episode_is_refused(line: bytes) -> None:
    with pytest.raises(SchemaError, match="not an episode"):
        records.decode_episode(line)


def test_unknown_fields_are_refused() -> None:
    tree = msgspec.json.decode(records.encode_episode(episode())) | {"extra": 1}
    with pytest.raises(SchemaError, match="extra"):
        records.decode_episode(msgspec.json.encode(tree))


def test_records_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        TASK.query = "other"
    assert records.Observation("a").resolved is not records.Observation("b").resolved


def test_every_end_has_an_owner() -> None:
    owners = {stop.value: status.value for stop, status in records.STATUS_OF.items()}
    assert owners == {
        **dict.fromkeys(("end_search", "turn_limit"), "completed"),
        "context_limit": "truncated",
        **dict.fromkeys(("context_overflow", "format_limit"), "policy_error"),
        "fault": "infra_error",
    }


def test_a_key_names_the_work_and_not_the_run() -> None:
    made = episode()
    again = msgspec.structs.replace(made, seed=made.seed, stage_ms={"policy": 9.0}, group_id="g")
    assert again.key == made.key
    for other in (
        msgspec.structs.replace(made, sample_idx=1),
        msgspec.structs.replace(made, hashes=msgspec.structs.replace(made.hashes, env="x")),
        msgspec.structs.replace(made, hashes=msgspec.structs.replace(made.hashes, policy="x")),
        msgspec.structs.replace(made, hashes=msgspec.structs.replace(made.hashes, index="x")),
    ):
        assert other.key != made.key


def test_hashes_do_not_depend_on_the_order_of_keys() -> None:
    assert digest({"a": 1, "b": [1, 2]}) == digest({"b": [1, 2], "a": 1}) != digest({"a": 1, "b": [2, 1]})
    assert digest(records.Hashes("e", "p", "i")) != digest(records.Hashes("e", "p", "j"))
    assert len(text_digest("\ud800")) == 16
    assert digest(records.ToolCall("x", {"b": 1, "a": 2})) == digest(records.ToolCall("x", {"a": 2, "b": 1}))
