"""The static prompt says what is enabled, in the numbers of the configuration, and nothing else."""

from __future__ import annotations

import pytest

from harness1.config import Curation, Env, FanOut, Grep, Read, Review, Search, Verification
from tests.support import make_env


def prompt(env: Env | None = None) -> str:
    return make_env(env).renderer.static.text


def test_every_tool_of_the_prompt_is_enabled() -> None:
    off = Env(
        fan_out=FanOut(on=False),
        grep=Grep(on=False),
        read=Read(on=False),
        review=Review(on=False),
        verification=Verification(on=False),
    )
    names = ("fan_out_search", "grep_corpus", "read_document", "review_docs", "Verify")
    assert all(name in prompt() for name in names)
    assert not any(name in prompt(off) for name in names)


def test_settings_that_no_one_sees_leave_the_text_alone() -> None:
    assert prompt(Env(search=Search(hits=3))) == prompt()


@pytest.mark.parametrize(("eviction", "gives_up"), [("rank", True), ("fifo", False), ("refuse", False)])
def test_the_rule_of_a_full_set_is_told(eviction: str, gives_up: bool) -> None:
    text = prompt(Env(curation=Curation(eviction=eviction)))  # type: ignore[arg-type]
    assert ("gives up its least important" in text) == gives_up


def test_the_prompt_is_a_system_message_of_its_own() -> None:
    static = make_env().renderer.static
    assert static.role == "system"
    assert static.key.startswith("static#")
