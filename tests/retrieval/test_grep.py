"""Patterns, what every match of them must contain, and the index of trigrams, against plain scans by RE2."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import numpy as np
import pytest
import re2
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from benchmarks.retrieval import HOSTILE
from harness1.retrieval import grep as module
from harness1.retrieval.files import Files, Strings, write_keys
from harness1.retrieval.grep import (
    BATCH,
    BLOCK_BYTES,
    CHUNK_WORK,
    MOST_WORK,
    PLAIN_SPEED,
    Trigrams,
    grep_segments,
    write_trigrams,
)
from harness1.retrieval.pattern import ANYTHING, All, Query, Some, analyse, fold, trigrams
from harness1.retrieval.protocol import BadPattern, RetrievalFault

LETTERS = "abkKsS.-é\u212a\u017f\n"
TEXTS = st.text(LETTERS, max_size=9) | st.text("ab.()[]{}*,-12:", max_size=20)
LITERALS = [*"abkKsS-é\u212a\u017f", "abk", "sak", r"\.", r"\n", r"\x61", r"\x{6b}", r"\Qa.s\E", r"\Q\E", "É"]
ATOMS = [*LITERALS, ".", "[ab]", "[kS]", "[^a]", "[a-k]", r"[\w-]", "[[:upper:]]", r"\w", r"\pL", "^", "$", r"\b", "()"]
REPEATS = ["*", "+", "?", "*?", "+?", "??", "{0}", "{2}", "{3}", "{0,2}", "{1,}", "{1,2}", "{2,3}?"]


def patterns() -> st.SearchStrategy[str]:
    def grow(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        opens = st.sampled_from(["(", "(?:", "(?i:", "(?-i:", "(?P<name>", "(?i)(", "((?i)", "(?s-i:"])
        return st.one_of(
            st.lists(inner, min_size=1, max_size=4).map("".join),
            st.lists(inner, min_size=2, max_size=3).map("|".join),
            st.builds(lambda head, body, tail: f"{head}{body}){tail}", opens, inner, st.sampled_from(["", *REPEATS])),
            st.builds(str.__add__, st.sampled_from(ATOMS), st.sampled_from(REPEATS)),
        )

    return st.recursive(st.sampled_from(ATOMS), grow, max_leaves=12)


def compiled(pattern: str):
    options = re2.Options()
    options.log_errors = False
    try:
        return re2.compile(pattern, options)
    except re2.error:
        return None


def satisfies(text: str, query: Query) -> bool:
    if isinstance(query, int):
        return query.to_bytes(3, "big") in fold(text)
    return (all if isinstance(query, All) else any)(satisfies(text, each) for each in query.of)


def words(*texts: str) -> Query:
    """Some of the texts, with all their trigrams."""
    return trigrams(texts[0]) if len(texts) == 1 else Some(tuple(map(trigrams, texts)))


@settings(max_examples=250, deadline=None)
@given(patterns() | st.text("ab.|()[]{}*+?^$\\,-12:", max_size=14), st.lists(TEXTS, min_size=5, max_size=20))
def test_every_match_satisfies_what_was_read_off_its_pattern(pattern: str, texts: list[str]) -> None:
    if (regexp := compiled(pattern)) is None:
        return
    analysis = analyse(pattern)
    for text in texts:
        if regexp.search(text):
            assert satisfies(text, analysis.query)
            assert analysis.needle is None or compiled(analysis.needle).search(text)
        elif analysis.needle == pattern:
            assert not compiled(analysis.needle).search(text)


def test_literals_groups_and_alternatives_are_looked_into() -> None:
    kept = {
        "kelvin": ["kelvin"],
        r"\bKelvin\b$": ["kelvin"],
        r"a\.b\x63\x{64}\t": ["a.bcd\t"],
        r"\Qa.b*\Ec+": ["a.b*c"],
        "colou?r": ["color", "colour"],
        "(?:foo|ba[rz])!": ["bar!", "baz!", "foo!"],
        "(abc){2}": ["abcabc"],
        "x{0}abc": ["abc"],
        "a{3,}": ["aaa"],
        "(?P<city>Paris)": ["paris"],
        "Zürich": ["zürich"],
        "abc{": ["abc{"],
        "abc{,2}": ["abc{,2}"],
        "(foo.*|b+ard)x": ["foo", "ard"],
    }
    for pattern, texts in kept.items():
        assert analyse(pattern).query == words(*texts), pattern
    assert analyse("born.{1,50}Paris").query == All((*words("born").of, *words("paris").of))


def test_what_may_be_absent_or_is_not_understood_counts_as_anything() -> None:
    absent = ("(abc)?", "(abc)*", "(abc){0,3}", "abc|", "abc|d", "[abcde][fghij][klmno]", ".*", "a.b.c", r"\d{9}")
    odd = (r"abc\Cdef", r"abc\1", r"abc\07", "(?=abc)", "abc(?i)*", f"{'(' * 60}abc{')' * 60}", "ab\\", r"abc\x{D800}")
    for pattern in (*absent, *odd):
        assert analyse(pattern).query == ANYTHING, pattern
        assert analyse(pattern).needle is None or pattern in absent


def test_case_is_ignored_where_re2_ignores_it() -> None:
    beyond = "".join(map(chr, [*range(0x80, 0xD800), *range(0xE000, 0x110000)]))
    assert set(re2.findall("(?i)[a-z]", beyond)) == {"\u212a", "\u017f"}
    assert fold("K\u212aS\u017fÄ") == "kkssÄ".encode()
    assert analyse("(?i)KELVIN'S").query == analyse("kelvin's").query == analyse("\u212aelvin'\u017f").query
    assert analyse("(?i)Ärger").query == words("rger")
    assert analyse("(?i:Ä)(?i)rger(?-i)Ä").query == words("rgerÄ")
    assert analyse("(?i)[ä]rger").query == words("rger")


def test_the_needle_is_the_longest_literal_and_a_plain_pattern_is_its_own() -> None:
    assert analyse(r"born.{1,50}Helsin(k|g)i").needle == "Helsingi|Helsinki"
    assert analyse("(?i)a.b+(kelvin)").needle == "(?i)kelvin"
    assert analyse("(?i)Mr. Kelvin.").needle == "(?i) Kelvin"
    assert analyse("ab.cd").needle is None
    for pattern in ("Kelvin", "(?i)lord Kelvin, 1892", "Zürich"):
        assert analyse(pattern).needle == pattern
    for pattern in (r"\bKelvin", "^Kelvin", "(?i)Kelvin(?-i)x", "Kelvin+"):
        assert analyse(pattern).needle != pattern


def test_choices_are_counted_before_and_after_the_first_literal() -> None:
    assert analyse("[a-m].{20}x")[1:3] == (21, 0)
    assert analyse("born.{1,50}Paris")[1:3] == (0, 50)
    assert analyse("(born|died)[a-z]{9}(x|yz)")[1:3] == (1, 2 * 10)
    assert analyse(r"(\w?){500}\w{500}").free == 1000
    assert analyse(r"a\C").free >= 1000


def test_long_and_nested_repeats_are_read_at_once() -> None:
    for pattern in ("((a{100}){10}){1}", "(a?){500}a{500}", "(" * 40 + "abcd" + "){2}" * 9 + ")" * 31, "(a|b)" * 190):
        analyse(pattern)
    assert analyse("(((((ab[cd]){3}){3}){3}){3}){3}").query != ANYTHING


ODD = ["", "a", "ab", "abc", "\u212aelvin", "wa\u017fh", "Ärger", "straße", "\u017f", "a\u212a", "中文字", "end\x00"]


def corpus(size: int, seed: int = 5) -> list[str]:
    """Words of few letters, so that many blocks share most trigrams and few share some; odd texts in between."""
    rng = random.Random(seed)
    letters = "aabbccddeeffgghhiijjklmnopqrstuvwxyz  "
    texts = ["".join(rng.choices(letters, k=rng.randint(0, 300))) for _ in range(size)]
    for at, odd in enumerate(ODD):
        texts.insert(at * size // len(ODD), odd)
    return texts


def index(folder: Path, texts: Sequence[str]) -> Trigrams:
    encoded = [text.encode() for text in texts]
    folder.mkdir(exist_ok=True)
    write_trigrams(folder, b"".join(encoded), np.cumsum([0, *map(len, encoded)], dtype=np.int64))
    return Trigrams(Files(folder))


def chunks(found: Trigrams, query: Query) -> set[int]:
    ranges = found.candidates(query)
    assert ranges.shape[1:] == (2,)
    assert ranges.dtype == np.int64
    assert np.all(np.diff(ranges.ravel()) >= 0)
    return {chunk for start, stop in ranges.tolist() for chunk in range(start, stop)}


def with_trigrams(texts: Sequence[str], word: str) -> set[int]:
    """Chunks that hold every trigram of a word, by themselves."""
    parts = {fold(word)[at : at + 3] for at in range(len(fold(word)) - 2)}
    return {at for at, text in enumerate(texts) if all(part in fold(text) for part in parts)}


@pytest.mark.parametrize("size", [0, 5, 100, 3000])
def test_no_chunk_with_the_trigrams_is_left_out_and_few_others_come(tmp_path: Path, size: int) -> None:
    texts = corpus(size)
    found = index(tmp_path, texts)
    rng = random.Random(1)
    for word in [*ODD, *("".join(rng.choices("abcdefghijkl", k=rng.randint(3, 5))) for _ in range(60))]:
        if len(fold(word)) < 3:
            continue
        expected = with_trigrams(texts, word)
        got = chunks(found, trigrams(word))
        assert expected <= got, word
        assert len(got) <= 40 * len(expected) + 200, word


def test_lists_of_every_length_are_read_back(tmp_path: Path) -> None:
    """A word in every 2nd, 3rd, 10th, 200th and 20000th block: one bit for each block, gaps of 1, 2 and 3 bytes."""
    periods = {"qqa": 2, "qqb": 3, "qqc": 10, "qqd": 200, "qqe": 20_000}
    texts = [" ".join(word for word, period in periods.items() if at % period == 0) for at in range(40_001)]
    found = index(tmp_path, [text.ljust(BLOCK_BYTES) for text in texts])
    for word, period in periods.items():
        assert chunks(found, trigrams(word)) == set(range(0, 40_001, period)), word


def test_case_and_the_letters_that_fold_to_ascii_are_ignored(tmp_path: Path) -> None:
    spans = index(tmp_path / "spans", ["xab", "cy" + " " * BLOCK_BYTES, "\xc5", "\u212a", "z" * BLOCK_BYTES])
    assert chunks(spans, trigrams("abc")) == chunks(spans, trigrams("bcy")) == set(), "none spans two chunks"
    texts = ["Kelvin", "\u212aELVIN", "wash", "WA\u017fH", "ÄRGER", "ärger", "kelwin"]
    # Often enough for all lists to be read: a few last blocks are not narrowed down.
    found = index(tmp_path, [text + " " * BLOCK_BYTES for text in texts] * 100)
    expected = {"(?i)kelvin": {0, 1}, "(?i)wash": {2, 3}, "WA\u017fH": {2, 3}, "(?i)ärger": {4, 5}, "ärger": {5}}
    for pattern, numbers in expected.items():
        assert {at % 7 for at in chunks(found, analyse(pattern).query)} == numbers, pattern


class Segment(NamedTuple):
    trigrams: Trigrams
    contents: Strings
    dead: NDArray[np.uint32]


def segment(folder: Path, texts: Iterable[str], dead: Sequence[int] = ()) -> Segment:
    folder.mkdir(parents=True, exist_ok=True)
    write_keys(folder, "contents", texts)
    contents = Strings(Files(folder), "contents")
    write_trigrams(folder, contents.bytes, contents.ends)
    return Segment(Trigrams(Files(folder)), contents, np.array(dead, np.uint32))


def answer(segments: Sequence[Segment], pattern: str, limit: int = 10**9, deadline: float = 60.0, pause: float = 0.0):
    """What grep returns when its caller takes a pause at every turn."""
    steps = grep_segments(segments, pattern, limit, deadline)
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            return stop.value
        time.sleep(pause)


def english(size: int, seed: int = 3) -> list[str]:
    """Chunks of some 900 bytes."""
    rng = random.Random(seed)
    words = [
        "".join(rng.choices("etaoinshrdlucmfwypvbgkqjxz", range(26, 0, -1), k=rng.randint(2, 9))) for _ in range(4000)
    ]
    words[:6] = ["the", "of", "and", "in", "Lincoln", "1865"]
    return [" ".join(rng.choices(words, range(4000, 0, -1), k=140)) for _ in range(size)]


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Segment:
    """12 MB: more than an ordinary pattern may read, of the same text over and over."""
    return segment(tmp_path_factory.mktemp("large"), english(700) * 18)


def test_what_re2_refuses_and_huge_programs_are_bad_patterns_with_a_reason() -> None:
    huge = "|".join(f"w{n}" for n in range(10_000))
    start = time.perf_counter()
    for pattern in ("(", "a**", "(?=look)", r"(a)\1", "x{1001}", "\ud800", huge, r"(\pL{1,50}){1,20}"):
        bad = answer([], pattern)
        assert isinstance(bad, BadPattern), pattern
        assert 3 < len(bad.reason) < 200
    assert time.perf_counter() - start < 1.0


def test_past_the_deadline_nothing_passes_for_evidence(tmp_path: Path) -> None:
    part = segment(tmp_path, ["red"] * 3000)
    for deadline, pause in ((1.0, 1.1), (0.0, 0.0)):
        assert answer([part], "red|d$", 3000, deadline, pause) == RetrievalFault("deadline")
    assert len(answer([part], "red|d$", 3000)) == 3000


def test_deleted_chunks_are_not_found(tmp_path: Path) -> None:
    texts = [f"number {number}" for number in range(1000)]
    part = segment(tmp_path, texts, dead=[0, 3, 500, 999])
    for pattern in ("number", r"\d"):
        assert answer([part], pattern) == [(0, at) for at in range(1000) if at not in (0, 3, 500, 999)]
    assert answer([part], "number", 3) == [(0, 1), (0, 2), (0, 4)]
    assert answer([part._replace(dead=np.arange(1000, dtype=np.uint32))], "number") == []


@settings(max_examples=120, deadline=None)
@given(patterns())
def test_the_answer_is_that_of_a_plain_scan(mixed: tuple[list[str], list[Segment]], pattern: str) -> None:
    texts, parts = mixed
    with mock.patch.object(module, "MOST_WORK", 1 << 60):
        found, first = answer(parts, pattern), answer(parts, pattern, 3)
    if compiled(pattern) is None:
        assert isinstance(found, BadPattern)
        return
    scanned = [at for at, text in enumerate(texts) if compiled(pattern).search(text)]
    assert found == [divmod(position, BATCH) for position in scanned]
    assert first == found[:3]


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], list[Segment]]:
    rng = random.Random(11)
    texts = ["".join(rng.choices(LETTERS, k=rng.choice((0, 2, 5, 9, 200)))) for _ in range(2 * BATCH)]
    folder = tmp_path_factory.mktemp("mixed")
    return texts, [segment(folder / str(at), texts[at * BATCH : (at + 1) * BATCH]) for at in range(2)]


@pytest.mark.parametrize("pattern", HOSTILE, ids=lambda pattern: pattern[:20])
def test_hostile_patterns_are_answered_or_refused_soon(large: Segment, pattern: str) -> None:
    answer([large], pattern, 5)
    begin = time.process_time()
    found = answer([large], pattern, 5)
    assert time.process_time() - begin < 0.25  # some 50 ms on a machine that does nothing else
    if isinstance(found, BadPattern):
        assert 3 < len(found.reason) < 200


def test_a_pattern_is_refused_by_its_work_not_by_the_clock(
    large: Segment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusal = answer([large], r"\b\d{9}\b")
    assert isinstance(refusal, BadPattern)
    costs = CHUNK_WORK + np.diff(large.contents.ends) // PLAIN_SPEED
    read = int(np.searchsorted(np.cumsum(costs), MOST_WORK, side="right"))
    assert f"after {read} chunks with 0 matches" in refusal.reason
    monkeypatch.setattr(time, "monotonic", lambda: 0.0)
    assert answer([large], r"\b\d{9}\b") == refusal
    refusal = answer([large], r"18\d5|\d{7}", 10**9)
    assert isinstance(refusal, BadPattern)
    assert "a word that every match has" in refusal.reason
    assert int(refusal.reason.partition(" chunks with ")[2].partition(" ")[0]) > 5, "matches before it are counted"
    assert len(answer([large], r"18\d5|\d{7}", 5)) == 5
    refusal = answer([segment(tmp_path, (f"x{number}" for number in range(12_000)))], r"\x01")
    assert isinstance(refusal, BadPattern)
    assert "after 119" in refusal.reason, "many short chunks are work too"


def test_a_literal_makes_costly_patterns_cheap(large: Segment, tmp_path: Path) -> None:
    texts = ["born in Lyon, lived long, died in Paris", *english(300), "born" + "." * 60 + "Paris"] * 3
    parts = [large, segment(tmp_path, texts)]
    assert answer(parts, "born.{1,50}Paris") == [(1, at * 302) for at in range(3)]
    assert isinstance(answer(parts, "b[a-z]{3}.{1,50}P[a-z]{4}"), BadPattern)


def test_the_event_loop_gets_its_turn(large: Segment) -> None:
    steps = grep_segments([large], r"\b\d{9}\b", 5, 60.0)
    gaps, last = [], time.perf_counter()
    for _ in steps:
        gaps.append(time.perf_counter() - last)
        last = time.perf_counter()
    assert len(gaps) >= 5
    assert sorted(gaps)[len(gaps) // 2] < 0.02
