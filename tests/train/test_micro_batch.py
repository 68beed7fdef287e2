"""Rows share passes within a budget, and nothing but the trained tokens has a gradient."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import PreTrainedModel

from harness1.config import Sft, load_config
from harness1.data.world import world_source
from harness1.episodes.rollout import rollout
from harness1.models.causal_model import load_causal_model
from harness1.policy.scripted import ScriptedPolicy
from harness1.policy.wrappers import StudentFormatPolicy
from harness1.rows import TrainRow
from harness1.sft.rows import Origin, sft_rows
from harness1.tools.registry import Toolbox
from harness1.training.algorithm import Algorithm, NegativeLogLikelihood
from harness1.training.trainer import by_token_budget, collate, compute_logprobs, shuffle_steps
from tests.support import chunk, make_env, run
from tests.tiny_models import VOCABULARY, save_tiny_model
from tests.vocabularies import chat_format

LENGTHS = (24, 5, 17, 9, 17)
ENV = load_config(None, ["env.rendering.order=epoch", "env.search.hits=2"]).env
CHAT = chat_format("hermes", "chatml")


def made_rows(lengths: Sequence[int] = LENGTHS, seed: int = 0, **fields: object) -> list[TrainRow]:
    """Random rows, trained in several stretches of very different lengths."""
    random = Random(seed)
    return [
        TrainRow(
            token_ids=tuple(random.randrange(VOCABULARY) for _ in range(length)),
            loss_mask=tuple(int(place >= 3 and place % 7 != 0) for place in range(length)),
            **fields,
        )
        for length in lengths
    ]


def hidden_gradients(model: PreTrainedModel, rows: Sequence[TrainRow], algorithm: Algorithm) -> Tensor:
    """[rows, longest, hidden]: the gradient of the summed loss by what the layers hand to the output head."""
    seen: list[Tensor] = []

    def keep(_: object, given: tuple[Tensor]) -> None:
        given[0].retain_grad()
        seen.append(given[0])

    hook, batch = model.get_output_embeddings().register_forward_pre_hook(keep), collate(rows)
    algorithm.token_losses(compute_logprobs(model, batch), batch).sum().backward()
    hook.remove()
    assert seen[0].grad is not None
    return seen[0].grad


def changed_positions(model: PreTrainedModel, rows: Sequence[TrainRow]) -> Tensor:
    """[rows, longest]: whether the loss has any gradient by what a position hands to the output head."""
    found: Tensor = (hidden_gradients(model, rows, NegativeLogLikelihood()) != 0.0).any(-1)
    return found


def predicting_positions(rows: Sequence[TrainRow]) -> Tensor:
    """[rows, longest]: whether a position predicts a trained token."""
    found = torch.zeros((len(rows), max(len(row.token_ids) for row in rows)), dtype=torch.bool)
    for at, row in enumerate(rows):
        found[at, : len(row.token_ids) - 1] = torch.tensor(row.loss_mask[1:], dtype=torch.bool)
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    return load_causal_model(save_tiny_model(tmp_path_factory.mktemp("model")), "cpu", "float32")


def test_only_what_predicts_a_trained_token_has_a_gradient(model: PreTrainedModel) -> None:
    rows = made_rows()
    expected = predicting_positions(rows)
    assert 0 < expected.sum() < expected.numel() / 2
    assert torch.equal(changed_positions(model, rows), expected)


def test_of_a_real_episode_only_the_teachers_words_have_a_gradient(tmp_path: Path) -> None:
    source = world_source(20, seed=3)
    chunks = [chunk(made.doc_id, made.text, made.title) for made in source.documents()]
    policy = StudentFormatPolicy(ScriptedPolicy(), CHAT)
    episode = run(rollout(make_env(ENV, chunks, counter=CHAT), policy, source.tasks("train")[0]))
    rows, _ = sft_rows(episode, Sft(rows="turn"), Origin("world", "train", "scripted"))
    shape = {"vocab_size": 1600, "hidden_size": 16, "num_hidden_layers": 1, "max_position_embeddings": 8192}
    model = load_causal_model(save_tiny_model(tmp_path, **shape), "cpu", "float32")
    assert torch.equal(changed_positions(model, rows[:2]), predicting_positions(rows[:2]))
    for row, turn in zip(rows, episode.turns, strict=True):
        trained = [token for token, mask in zip(row.token_ids, row.loss_mask, strict=True) if mask]
        said = CHAT.parse(trained, Toolbox.of(ENV).specs)
        assert (said.actions, said.reasoning) == ((turn.action,), turn.reasoning)
        assert trained[-1] in CHAT.stop_ids


def plain_logprobs(model: PreTrainedModel, row: TrainRow) -> Tensor:
    """One row by itself, without padding."""
    ids = torch.tensor(row.token_ids)
    logprobs = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)
    of_tokens: Tensor = logprobs[torch.arange(len(ids) - 1), ids[1:]]
    return of_tokens[torch.tensor(row.loss_mask[1:], dtype=torch.bool)]


def test_log_probabilities_are_those_of_each_row_by_itself(model: PreTrainedModel) -> None:
    rows = made_rows()
    with torch.no_grad():
        found = compute_logprobs(model, collate(rows))
        expected = torch.cat([plain_logprobs(model, row) for row in rows])
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_logits_are_computed_for_each_trained_token_and_nowhere_else(model: PreTrainedModel) -> None:
    rows = [TrainRow((5, 6, 7, 8, 9), (0, 0, 1, 0, 1)), TrainRow((5, 6, 7), (0, 1, 1))]
    shapes: list[torch.Size] = []
    hook = model.get_output_embeddings().register_forward_hook(lambda _, given, out: shapes.append(out.shape))
    with torch.no_grad():
        compute_logprobs(model, collate(rows))
        assert model(input_ids=torch.tensor([[5, 6]])).logits.shape[:2] == (1, 2)
    hook.remove()
    assert [shape[:2] for shape in shapes] == [(1, 4), (1, 2)]


def test_what_a_model_does_to_its_logits_is_kept(tmp_path: Path) -> None:
    """Caps (Gemma 2) and scales (Granite) are applied behind the head."""
    for kind, settings in (("gemma2", {"final_logit_softcapping": 0.5}), ("granite", {"logits_scaling": 4.0})):
        changed = load_causal_model(save_tiny_model(tmp_path / kind, kind, **settings), "cpu", "float32")
        rows = made_rows()
        with torch.no_grad():
            found = compute_logprobs(changed, collate(rows))
            expected = torch.cat([plain_logprobs(changed, row) for row in rows])
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_a_micro_batch_lists_the_trained_tokens_of_its_rows_in_order() -> None:
    rows = [
        TrainRow((5, 6, 7, 8), (0, 1, 0, 1), rollout_logprobs=(0.0, -0.5, 0.0, -2.0), advantages=(0.0, 0.5, 9.0, 2.0)),
        TrainRow((9, 4), (0, 1), rollout_logprobs=(0.0, -1.0)),
    ]
    batch = collate(rows)
    assert batch.ids.tolist() == [[5, 6, 7, 8], [9, 4, 0, 0]]
    assert batch.row.tolist() == [0, 0, 1]
    assert batch.column.tolist() == [0, 2, 0]
    assert batch.targets.tolist() == [6, 8, 4]
    assert batch.weights.tolist() == [0.5, 2.0, 1.0]
    assert batch.rollout_logprobs.tolist() == [-0.5, -2.0, -1.0]
    assert batch.weights.dtype == batch.rollout_logprobs.dtype == torch.float32


@pytest.mark.parametrize("mask", [(0, 0, 0), (1, 0, 1)], ids=["nothing", "the first token"])
def test_what_cannot_be_trained_is_refused(mask: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="trained tokens"):
        collate([TrainRow((1, 2, 3), mask)])


Lengths = st.lists(st.integers(1, 60), min_size=1, max_size=30)


@given(Lengths, st.integers(1, 200), st.randoms(use_true_random=False))
def test_each_row_is_in_one_pass_which_the_budget_holds_whatever_their_order(
    lengths: list[int], budget: int, random: Random
) -> None:
    assert by_token_budget([4, 10, 5, 30, 4], 20) == [[3], [1, 2], [0, 4]]  # filled before the next begins
    groups = by_token_budget(lengths, budget)
    assert sorted(place for group in groups for place in group) == list(range(len(lengths)))
    for group in groups:
        padded = max(lengths[place] for place in group) * len(group)
        assert padded <= budget or len(group) == 1
    other = random.sample(lengths, len(lengths))
    again = [[other[place] for place in group] for group in by_token_budget(other, budget)]
    assert again == [[lengths[place] for place in group] for group in groups]


def test_every_epoch_takes_every_row_once_in_an_order_of_its_own() -> None:
    steps = list(shuffle_steps(10, 4, 3, seed=5))
    assert [len(step) for step in steps] == [4, 4, 2] * 3
    epochs = [[place for step in steps[at : at + 3] for place in step] for at in (0, 3, 6)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(10))] * 3
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert list(shuffle_steps(10, 4, 4, seed=5))[:9] == steps != list(shuffle_steps(10, 4, 3, seed=6))
