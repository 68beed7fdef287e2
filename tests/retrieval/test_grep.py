import time

import pytest

from harness1.retrieval.grep import grep
from harness1.retrieval.retriever import BadPattern, RetrievalFault

TEXTS = [text.encode() for text in ("Title\nred fox", "Fox\nblue", "green", "red Ärger", "a redfox")]


def test_positions_come_in_order_and_stop_at_the_limit() -> None:
    assert grep(TEXTS, "red", 10, 5.0) == [0, 3, 4]
    assert grep(TEXTS, "red", 2, 5.0) == [0, 3]
    assert grep(TEXTS, "red", 0, 5.0) == []


def test_nothing_is_read_past_the_limit() -> None:
    def texts():
        yield b"hit"
        raise AssertionError("read on after the limit")

    assert grep(texts(), "hit", 1, 5.0) == [0]


def test_patterns_know_case_letters_and_lines() -> None:
    assert grep(TEXTS, "(?i)FOX", 10, 5.0) == [0, 1, 4]
    assert grep(TEXTS, "(?i)ärger", 10, 5.0) == [3]
    assert grep(TEXTS, "^red", 10, 5.0) == [3]
    assert grep(TEXTS, "(?m)^red", 10, 5.0) == [0, 3]
    assert grep(TEXTS, r"^.reen$", 10, 5.0) == [2]


@pytest.mark.parametrize("pattern", ["(", "[", "a**", "(?=look)", r"(a)\1", "x{1001}", "(a{100}){100}", "\ud800"])
def test_what_re2_refuses_is_a_bad_pattern_with_a_reason(pattern: str) -> None:
    answer = grep(TEXTS, pattern, 5, 5.0)
    assert isinstance(answer, BadPattern)
    assert 3 < len(answer.reason) < 200


def test_ten_thousand_alternatives_and_huge_programs_are_refused_quickly() -> None:
    start = time.perf_counter()
    assert isinstance(grep(TEXTS, "|".join(f"word{number}" for number in range(10_000)), 5, 5.0), BadPattern)
    assert isinstance(grep(TEXTS, r"(\pL{1,50}){1,20}", 5, 5.0), BadPattern)
    assert time.perf_counter() - start < 1.0


@pytest.mark.parametrize("pattern", ["(a+)+$", "(a|a)*b", r"([a-z]+)*\d", r"(\w+\s?)*$^", "(.*)*x"])
def test_patterns_that_hang_backtracking_engines_are_linear(pattern: str) -> None:
    start = time.perf_counter()
    assert grep([b"a" * 20_000 + b"!"] * 20, pattern, 5, 30.0) == []
    assert time.perf_counter() - start < 2.0


def test_past_the_deadline_nothing_passes_for_evidence() -> None:
    def slow():
        for _ in range(100):
            time.sleep(0.005)
            yield b"red"

    assert grep(slow(), "red", 1000, 0.02) == RetrievalFault(message="deadline")
