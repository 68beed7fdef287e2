"""Sessions have bounded names, and what was said in them is known again by its sampled tokens."""

import pytest

from harness1.serve.chat import Called, ChatMessage, ChatReply, Memory, extend_past
from harness1.serve.proxy import LONGEST_NAME, clean_name, session_of

START = ""
USER = ChatMessage("user", "Hello")


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_a_header_goes_before_the_query_and_the_query_before_the_key() -> None:
    both = {"x-session-id": "one", "x-harness-session": "two", **bearer("four")}
    assert session_of(both, {"session": "three"}) == "one"
    assert session_of({"x-harness-session": "two", **bearer("four")}, {"session": "three"}) == "two"
    assert session_of(bearer("four"), {"session": "three"}) == "three"
    assert session_of(bearer("four"), {}) == "four"
    assert session_of({"x-api-key": "five"}, {}) == "five"
    assert session_of({"x-session-id": " "}, {}) is None


def test_a_placeholder_names_nobody_and_a_plain_name_is_kept() -> None:
    for key in (*"EMPTY none sk-no-key-required xxx ... your-api-key not-needed sk-test dummy -".split(), " "):  # noqa: SIM905
        assert session_of(bearer(key), {}) is session_of({"x-api-key": key}, {}) is None
    for key in "episode-17 run_3.task-12 Task7 GRPO-step-120 a 42 nonesuch testing keynote".split():  # noqa: SIM905
        assert session_of(bearer(key), {}) == key


@pytest.mark.parametrize(
    "key",
    [
        *("AIzaSyD-9tSrke72PouQMnMX-a7eZSW0jkFMBWY", "gsk_REALgroqKEY0123456789", "hf_abcdefREALTOKEN"),
        *("hf_abcdefghijklmnopqrstuvwxyz", "xai-REAL0123456789", "0123456789abcdef0123456789abcdef"),
        *("550e8400-e29b-41d4-a716-446655440000", "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.dBjftJeZ4CVP"),
        *("sk-abcd1234", "sk-proj-abcdef123456", "episode-17\n", "one-two-three-four-five-six-seven-eight-nine"),
        "task/7#2",
    ],
)
def test_a_key_that_may_be_real_is_told_by_its_digest_alone(key: str) -> None:
    found = str(session_of({"x-api-key": key + "x"}, {}))
    assert found.startswith("key-")
    assert key not in found
    assert found == session_of(bearer(key + "x"), {}) != session_of({"x-api-key": key + "y"}, {})


def test_names_are_plain_and_short_and_stay_different() -> None:
    assert clean_name("run-1/task:2@a.b") == "run-1/task:2@a.b"
    odd = [clean_name(name) for name in ("a b", "a\nb", "a" * 200, "a" * 201, "é", "\udce9")]
    assert len(set(odd)) == 6
    assert all(len(name) <= LONGEST_NAME and name.isascii() and name.isprintable() and " " not in name for name in odd)


def said(text: str, *calls: Called) -> ChatReply:
    return ChatReply(call_id="1", text=text, calls=calls)


def test_a_call_is_known_by_its_id_in_any_session_until_somebody_edits_it() -> None:
    memory = Memory()
    call = Called("call_1_0", "look", '{"a": 1, "b": 2}')
    memory.remember("s", START, said("I look.", call), [5, 6])
    rewritten = Called("call_1_0", "look", '{"b":2,"a":1}')
    assert memory.recall("s", START, ChatMessage("assistant", "I look.", (call,))) == (5, 6)
    assert memory.recall("t", extend_past(START, USER), ChatMessage("assistant", "", (rewritten,))) == (5, 6)
    for other in (
        ChatMessage("assistant", "I lie.", (call,)),
        ChatMessage("assistant", "", (Called("call_1_0", "look", '{"a": 2, "b": 2}'),)),
        ChatMessage("assistant", "", (Called("call_1_0", "peek", call.arguments),)),
        ChatMessage("assistant", "", (Called("call_2_0", "look", call.arguments),)),
        ChatMessage("assistant", "", (call, call)),
    ):
        assert memory.recall("s", START, other) is None
    assert memory.owner([USER, ChatMessage("assistant", "", (call,))]) == "s"
    assert memory.owner([USER, ChatMessage("assistant", "", (Called("x", "look"),))]) is None


def test_words_are_known_by_their_place_then_anywhere_in_their_session() -> None:
    memory, later = Memory(), extend_past(START, USER)
    memory.remember("s", START, said("Yes."), [1])
    memory.remember("s", later, said("Yes.\n"), [2])
    message = ChatMessage("assistant", "Yes.")
    assert memory.recall("s", START, message) == (1,)
    assert memory.recall("s", later, message) == (2,)
    assert memory.recall("s", extend_past(later, USER), message) == (2,)
    assert memory.recall("t", START, message) is None
    assert memory.recall("s", START, ChatMessage("assistant", "Yes!")) is None


def test_the_past_is_what_was_said_and_not_how_a_client_wrote_it() -> None:
    call = Called("c", "look", '{"a": 1}')
    written = ChatMessage("assistant", " Yes.\n", (Called("c", "look", '{"a":1}'),))
    assert extend_past(START, ChatMessage("assistant", "Yes.", (call,))) == extend_past(START, written)
    assert extend_past(START, USER) != extend_past(START, ChatMessage("tool", "Hello")) != START


def test_the_memory_forgets_what_was_used_longest_ago() -> None:
    def has(memory: Memory, session: str, text: str) -> bool:
        return memory.recall(session, START, ChatMessage("assistant", text)) is not None

    few = Memory(outputs=4)
    for session, text in (("s", "a"), ("t", "a"), ("s", "a"), ("t", "b")):
        few.remember(session, START, said(text), [1])
    assert [has(few, "s", "a"), has(few, "t", "a"), has(few, "t", "b")] == [True, False, True]
    small = Memory(ids=10)
    small.remember("s", START, said("", Called("x", "look")), [1] * 6)
    small.remember("t", START, said("", Called("y", "look")), [1] * 6)
    assert small.owner([ChatMessage("assistant", "", (Called("x", "look"),))]) is None
    assert small.owner([ChatMessage("assistant", "", (Called("y", "look"),))]) == "t"
    small.remember("t", START, said("", Called("y", "look")), [1] * 6)
    assert small.recall("t", START, ChatMessage("assistant", "", (Called("y", "look"),))) == (1,) * 6
