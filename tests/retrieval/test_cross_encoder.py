"""A cross-encoder's score is a probability that does not depend on what else is scored."""

from __future__ import annotations

import random
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from harness1.config import Machine
from harness1.errors import ConfigError, MissingExtra, UsageError
from harness1.records import Chunk
from harness1.retrieval.models import Pair, TransformerScorer, open_cross_encoder, rerank
from harness1.retrieval.protocol import Scored, total_order
from tests.support import chunk

WORDS = "the a of river castle bridge king paris london ada byron wrote built old deep moat fills poet . no".split()  # noqa: SIM905

LONGEST = 64
"""Tokens that the models below can read."""
NLI = {0: "contradiction", 1: "entailment", 2: "neutral"}


def save_pair_model(folder: Path, labels: dict[int, str] | None = None, seed: int = 0, scale: float = 1.0) -> Path:
    """A BERT with random weights, and a vocabulary of a few words; one label unless named otherwise. A larger `scale`
    of the last layer's weights spreads the scores."""
    from transformers import BertConfig, BertForSequenceClassification, BertTokenizer

    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = folder / "vocab.txt"
    vocabulary.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]))
    labels = labels or {0: "LABEL_0"}
    settings = BertConfig(
        vocab_size=len(WORDS) + 5,
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=96,
        max_position_embeddings=LONGEST,
        id2label=labels,
        label2id={name: at for at, name in labels.items()},
        initializer_range=0.2,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = BertForSequenceClassification(settings)
        with torch.no_grad():
            model.classifier.weight *= scale
    model.save_pretrained(folder)
    BertTokenizer(str(vocabulary), model_max_length=LONGEST).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_pair_model(tmp_path_factory.mktemp("relevance"), scale=4.0)


@pytest.fixture(scope="module")
def nli(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_pair_model(tmp_path_factory.mktemp("nli"), NLI, scale=4.0)


def opened(folder: Path) -> TransformerScorer:
    return open_cross_encoder(Machine(reranker=str(folder), device="cpu"))


def some_pairs(count: int = 24) -> list[Pair]:
    rng = random.Random(1)
    return [
        (" ".join(rng.choices(WORDS, k=rng.randint(1, 8))), " ".join(rng.choices(WORDS, k=rng.randint(0, 90))))
        for _ in range(count)
    ]


def outputs(folder: Path, first: str, second: str) -> list[float]:
    """What the model says of a pair, without this package."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    with torch.inference_mode():
        features = tokenizer(first, second, truncation=True, return_tensors="pt")
        logits = AutoModelForSequenceClassification.from_pretrained(folder).eval()(**features).logits[0]
    return (torch.sigmoid(logits) if len(logits) == 1 else torch.softmax(logits, 0)).tolist()


def assert_independent(scorer: TransformerScorer) -> None:
    """Scores are equal in all bits, however the pairs are ordered and divided."""
    pairs = some_pairs()
    whole = scorer.stances(pairs)
    assert (np.vstack([scorer.stances([pair]) for pair in pairs]) == whole).all()
    places = random.Random(2).sample(range(len(pairs)), 13)
    assert (scorer.stances([pairs[at] for at in places]) == whole[places]).all()


def test_a_model_of_relevance_gives_the_sigmoid_of_its_output(folder: Path) -> None:
    pairs = some_pairs(6)
    expected = [outputs(folder, *pair)[0] for pair in pairs]
    scores = opened(folder).score(pairs)
    assert scores.dtype == np.float32
    assert scores.tolist() == pytest.approx(expected, abs=1e-6)
    assert max(expected) - min(expected) > 0.05
    assert not opened(folder).stances(pairs)[:, 1].any()


def test_a_model_of_entailment_reads_the_text_before_the_claim(nli: Path) -> None:
    pairs = some_pairs(6)
    expected = [outputs(nli, text, claim) for claim, text in pairs]
    stances = opened(nli).stances(pairs)
    assert stances == pytest.approx(np.array([[yes, no] for no, yes, _ in expected]), abs=1e-6)
    assert (opened(nli).score(pairs) == stances[:, 0]).all()
    assert np.ptp(stances, axis=0).min() > 0.02


@pytest.mark.parametrize(
    ("labels", "at"),
    [({0: "LABEL_0", 1: "LABEL_1"}, 1), ({0: "Yes", 1: "No"}, 0), ({0: "no", 1: "maybe", 2: "yes"}, 2)],
)
def test_of_several_labels_the_affirmative_one_counts(tmp_path: Path, labels: dict[int, str], at: int) -> None:
    path = save_pair_model(tmp_path, labels)
    pair = ("old castle", "the castle of the king")
    assert opened(path).score([pair]).tolist() == pytest.approx([outputs(path, *pair)[at]], abs=1e-6)


@pytest.mark.parametrize(
    "labels",
    [dict(enumerate(["LABEL_0", "LABEL_1", "LABEL_2"])), dict(enumerate("12345")), {0: "positive", 1: "negative"}],
)
def test_labels_that_say_nothing_of_support_are_refused(tmp_path: Path, labels: dict[int, str]) -> None:
    with pytest.raises(UsageError, match=rf"one has {len(labels)}: .*{labels[1].lower()}"):
        opened(save_pair_model(tmp_path, labels))


@pytest.mark.parametrize(("rows", "step"), [(1, 1), (8, 16), (32, 32)])
def test_a_score_does_not_depend_on_what_else_is_scored(folder: Path, nli: Path, rows: int, step: int) -> None:
    from sentence_transformers import CrossEncoder

    assert_independent(TransformerScorer(CrossEncoder(str(nli), device="cpu"), "", rows, step))
    scorer = TransformerScorer(CrossEncoder(str(folder), device="cpu"), "", rows, step)
    assert_independent(scorer)
    assert scorer.score(some_pairs()) == pytest.approx(opened(folder).score(some_pairs()), abs=1e-5)


def test_text_that_is_empty_or_no_unicode_has_a_score_and_an_output_that_is_no_number_is_an_error(
    folder: Path, tmp_path: Path
) -> None:
    scorer = opened(folder)
    assert scorer.score([]).shape == (0,)
    assert scorer.stances([]).shape == (0, 2)
    assert np.isfinite(scorer.score([("", ""), ("\ud800", "castle\x00\udfff"), ("castle " * 500, "")])).all()

    with pytest.raises(ValueError, match="not numbers"):
        opened(save_pair_model(tmp_path, scale=float("nan"))).score([("castle", "king")])


def test_the_hash_names_the_files_and_not_where_they_lie(folder: Path, tmp_path: Path) -> None:
    copy, other = tmp_path / "copy", save_pair_model(tmp_path / "other", seed=1)
    shutil.copytree(folder, copy)
    assert opened(copy).hash == opened(folder).hash
    assert opened(other).hash != opened(folder).hash
    assert len(opened(folder).hash) == 64
    assert opened(folder) is opened(folder), "the last one stays loaded"


def test_what_cannot_be_opened_is_the_users_mistake(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"machine\.reranker"):
        open_cross_encoder(Machine())
    (tmp_path / "empty").mkdir()
    shutil.copytree(folder, tmp_path / "damaged")
    (tmp_path / "damaged" / "model.safetensors").write_bytes(b"nothing")
    for name in ("absent", "empty", "damaged"):
        with pytest.raises(UsageError, match=name):
            opened(tmp_path / name)
    with pytest.raises(UsageError, match="cuda:77"):
        open_cross_encoder(Machine(reranker=str(folder), device="cuda:77"))
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(MissingExtra, match=r"sentence-transformers.*\[dense\]"):
        opened(tmp_path)


CHUNKS = [chunk(name, f"text {name}", f"Title {name}") for name in "edcba"]


class Scores:
    """Gives probabilities by the last letter of a text, and remembers what it read in each call."""

    hash = "scores"

    def __init__(self, **scores: float) -> None:
        self.scores = scores
        self.calls: list[list[tuple[str, str]]] = []

    def score(self, pairs: Sequence[tuple[str, str]]) -> NDArray[np.float32]:
        self.calls.append(list(pairs))
        return np.array([self.scores[text[-1]] for _, text in pairs], dtype=np.float32)


def order(scorer: Scores, candidates: int, chunks: Sequence[Chunk] = CHUNKS) -> list[str]:
    return names(rerank(["query"], [chunks], scorer, candidates)[0])


def names(ranked: Sequence[Scored]) -> list[str]:
    return [hit.chunk.chunk_id[0] for hit in ranked]


def test_the_best_probability_comes_first_and_equal_ones_go_by_id() -> None:
    assert order(Scores(a=0.2, b=0.9, c=0.2, d=0.5, e=0.1), 9) == ["b", "d", "a", "c", "e"]
    near_the_ends = Scores(e=3e-5, d=1e-5, c=0.99999, b=0.99997, a=0.5)
    assert order(near_the_ends, 5) == ["c", "b", "a", "e", "d"]


def test_several_rankings_are_read_in_one_call_and_equal_pairs_once() -> None:
    scorer = Scores(a=0.5, b=0.9, c=0.2, d=0.6, e=0.1)
    assert rerank([], [], scorer, 5) == []
    assert scorer.calls == []
    rankings = [CHUNKS[:3], [], CHUNKS[:3], CHUNKS[2:0:-1], CHUNKS[3:]]
    found = rerank(["one", "two", "two", "one", "two"], rankings, scorer, 2)
    assert [names(ranked) for ranked in found] == [["d", "e", "c"], [], ["d", "e", "c"], ["d", "c"], ["b", "a"]]
    (pairs,) = scorer.calls
    read = ("one", "e"), ("one", "d"), ("two", "e"), ("two", "d"), ("one", "c"), ("two", "b"), ("two", "a")
    assert pairs == [(query, f"Title {name}\ntext {name}") for query, name in read]


@pytest.mark.parametrize("low", [0.0, 1e-38, 0.4, 1.0])
@pytest.mark.parametrize("candidates", [1, 2, 4, 5])
def test_the_scores_say_the_order(low: float, candidates: int) -> None:
    (ranked,) = rerank(["query"], [CHUNKS], Scores(a=low, b=low, c=0.5, d=low, e=1.0), candidates)
    found = [(hit.chunk.chunk_id, hit.score) for hit in ranked]
    assert np.isfinite([score for _, score in found]).all()
    assert total_order(found[::-1]) == found
    assert len({chunk_id for chunk_id, _ in found}) == 5
