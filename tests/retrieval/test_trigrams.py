import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from harness1.retrieval import grep as module
from harness1.retrieval.files import Files
from harness1.retrieval.grep import BLOCK_BYTES, Trigrams, write_trigrams
from harness1.retrieval.pattern import ANYTHING, All, Query, Some, analyse, fold, trigrams

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
    assert ranges is not None
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


def test_queries_are_intersections_and_unions_in_order(tmp_path: Path) -> None:
    words = ["alpha", "gamma", "alpha gamma", "delta", "omega alpha"]
    found = index(tmp_path, [word.ljust(BLOCK_BYTES) for word in words] * 200)
    alpha, gamma, delta = map(trigrams, ("alpha", "gamma", "delta"))
    every = range(0, 1000, 5)
    assert chunks(found, All((*alpha.of, *gamma.of))) == {at + 2 for at in every}
    assert chunks(found, Some((gamma, delta))) == {at + place for at in every for place in (1, 2, 3)}
    assert chunks(found, All((alpha, Some((gamma, delta))))) == {at + 2 for at in every}
    assert chunks(found, trigrams("absent")) == set()
    assert found.candidates(ANYTHING) is None


def test_case_and_the_letters_that_fold_to_ascii_are_ignored(tmp_path: Path) -> None:
    texts = ["Kelvin", "\u212aELVIN", "wash", "WA\u017fH", "ÄRGER", "ärger", "kelwin"]
    # Often enough for all lists to be read: a few last blocks are not narrowed down.
    found = index(tmp_path, [text + " " * BLOCK_BYTES for text in texts] * 100)
    expected = {"(?i)kelvin": {0, 1}, "(?i)wash": {2, 3}, "WA\u017fH": {2, 3}, "(?i)ärger": {4, 5}, "ärger": {5}}
    for pattern, numbers in expected.items():
        assert {at % 7 for at in chunks(found, analyse(pattern).query)} == numbers, pattern


def test_no_trigram_spans_two_chunks(tmp_path: Path) -> None:
    found = index(tmp_path, ["xab", "cy" + " " * BLOCK_BYTES, "\xc5", "\u212a", "z" * BLOCK_BYTES])
    assert chunks(found, trigrams("abc")) == chunks(found, trigrams("bcy")) == set()


def test_a_build_in_stretches_is_the_build_in_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = corpus(500)
    index(tmp_path / "one", texts)
    monkeypatch.setattr(module, "STRETCH", 7)
    index(tmp_path / "other", texts)
    names = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert names == ["trigrams.blocks.npy", "trigrams.lists.npy", "trigrams.starts.npy"]
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "other" / name).read_bytes()


def test_an_empty_segment_is_indexed(tmp_path: Path) -> None:
    assert chunks(index(tmp_path, []), trigrams("abc")) == set()
    assert chunks(index(tmp_path, ["", "", "a"]), trigrams("abc")) == set()


def test_the_index_is_smaller_than_half_of_the_text(tmp_path: Path) -> None:
    rng = random.Random(2)
    words = ["".join(rng.choices("etaoinshrdlu", k=rng.randint(2, 9))) for _ in range(3000)]
    texts = [" ".join(rng.choices(words, weights=range(3000, 0, -1), k=160)) for _ in range(2500)]
    index(tmp_path, texts)
    assert (tmp_path / "trigrams.lists.npy").stat().st_size < 0.5 * sum(map(len, texts))
