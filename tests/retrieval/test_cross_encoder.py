"""A cross-encoder's score is a probability that does not depend on what else is scored."""

from __future__ import annotations

import random
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from harness1.config import Machine
from harness1.errors import ConfigError, MissingExtra, UsageError
from harness1.retrieval.cross_encoder import Pair, StanceScorer, TransformerScorer, open_cross_encoder

WORDS = "the a of river castle bridge king paris london ada byron wrote built old deep moat fills poet . no".split()  # noqa: SIM905
LONGEST = 64
"""Tokens that the models below can read."""
NLI = {0: "contradiction", 1: "entailment", 2: "neutral"}


def save_pair_model(folder: Path, labels: dict[int, str] | None = None, seed: int = 0, scale: float = 1.0) -> Path:
    """A BERT with random weights, and a vocabulary of a few words; one label unless named otherwise.

    Args:
        scale: of the last layer's weights; larger spreads the scores.
    """
    import torch
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


def opened(folder: Path) -> StanceScorer:
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


def is_independent(scorer: StanceScorer) -> bool:
    """Whether scores are equal in all bits, however the pairs are ordered and divided."""
    pairs = some_pairs()
    whole = scorer.stances(pairs)
    alone = np.vstack([scorer.stances([pair]) for pair in pairs])
    places = random.Random(2).sample(range(len(pairs)), 13)
    return bool((alone == whole).all() and (scorer.stances([pairs[at] for at in places]) == whole[places]).all())


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


def test_a_score_does_not_depend_on_what_else_is_scored(folder: Path, nli: Path) -> None:
    assert is_independent(opened(folder))
    assert is_independent(opened(nli))


@pytest.mark.parametrize(("rows", "step"), [(8, 16), (4, 32), (32, 32)])
def test_nor_does_it_in_passes_of_a_fixed_shape(folder: Path, rows: int, step: int) -> None:
    from sentence_transformers import CrossEncoder

    scorer = TransformerScorer(CrossEncoder(str(folder), device="cpu"), "", rows, step)
    assert is_independent(scorer)
    assert scorer.score(some_pairs()) == pytest.approx(opened(folder).score(some_pairs()), abs=1e-5)


def test_text_that_is_empty_or_no_unicode_has_a_score(folder: Path) -> None:
    scorer = opened(folder)
    assert scorer.score([]).shape == (0,)
    assert scorer.stances([]).shape == (0, 2)
    assert np.isfinite(scorer.score([("", ""), ("\ud800", "castle\x00\udfff"), ("castle " * 500, "")])).all()


def test_an_output_that_is_no_number_is_an_error(tmp_path: Path) -> None:
    path = save_pair_model(tmp_path, scale=float("nan"))
    with pytest.raises(ValueError, match="not numbers"):
        opened(path).score([("castle", "king")])


def test_the_hash_names_the_files_and_not_where_they_lie(folder: Path, tmp_path: Path) -> None:
    copy, other = tmp_path / "copy", save_pair_model(tmp_path / "other", seed=1)
    shutil.copytree(folder, copy)
    assert opened(copy).hash == opened(folder).hash
    assert opened(other).hash != opened(folder).hash
    assert len(opened(folder).hash) == 64


def test_the_last_one_stays_loaded(folder: Path) -> None:
    assert opened(folder) is opened(folder)


def test_what_cannot_be_opened_is_the_users_mistake(folder: Path, tmp_path: Path) -> None:
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


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(MissingExtra, match=r"sentence-transformers.*\[dense\]"):
        opened(tmp_path)
