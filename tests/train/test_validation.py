"""What is measured while a policy is fine-tuned: turns beside the teacher's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from harness1.config import Env
from harness1.models.backend import Grammar, SampledOutput
from harness1.records import Sampling, ToolCall
from harness1.rows import TrainRow
from harness1.sft.train import HeldOutTurn, is_valid, pick_turns, turn_metrics
from harness1.tools.registry import Toolbox
from tests.support import END, call, curate, make_env, play, run, search
from tests.vocabularies import chat_format

CHAT = chat_format("hermes", "chatml")
TOOLBOX = Toolbox.of(Env())


def test_every_trained_stretch_is_a_turn_behind_all_that_stands_before_it() -> None:
    row = TrainRow((1, 2, 3, 4, 5, 6, 7), (0, 1, 1, 0, 0, 1, 1))
    assert pick_turns([row, TrainRow((8, 9), (0, 1)), TrainRow((1, 2, 3), (0, 1, 0))], 10) == [
        HeldOutTurn((1,), (2, 3)),
        HeldOutTurn((1, 2, 3, 4, 5), (6, 7)),
        HeldOutTurn((8,), (9,)),
        HeldOutTurn((1,), (2,)),
    ]
    rows = [TrainRow((at, 1), (0, 1)) for at in range(10)]
    assert ([turn.prompt_ids[0] for turn in pick_turns(rows, 4)], pick_turns(rows, 0)) == ([0, 2, 5, 7], [])


@pytest.mark.parametrize(
    ("action", "valid"),
    [
        (search("river"), True),
        (END, True),
        (curate(add_ids=["D1"]), True),
        (call("find", query="river"), False),
        (call("search_corpus"), False),
        (call("search_corpus", query="river", pages=3), False),
        (call("search_corpus", query=7), False),
    ],
)
def test_an_action_is_valid_if_its_tool_takes_its_arguments(action: ToolCall, valid: bool) -> None:
    assert is_valid(action, TOOLBOX) == valid
    (step,) = play(make_env(), action)
    error = step.observation.error if step.observation else None
    assert (error is None or error.code not in ("unknown_tool", "bad_arguments")) == valid


class Sayer:
    """A model that has one output for each prompt."""

    hash, version = "sayer", 0

    def __init__(self, outputs: Mapping[tuple[int, ...], tuple[int, ...]]) -> None:
        self.outputs, self.asked = outputs, list[Sampling]()

    async def generate(self, ids: Sequence[int], sampling: Sampling, grammar: Grammar | None = None) -> SampledOutput:
        self.asked.append(sampling)
        return SampledOutput(self.outputs[tuple(ids)], (), "stop")

    async def load_weights(self, folder: object, version: int) -> None:
        raise NotImplementedError


def said(*actions: ToolCall) -> tuple[int, ...]:
    """An output of several calls, or of none."""
    if not actions:
        return (*CHAT.text("I do not know."), *CHAT.stop_ids)
    spoken = [CHAT.format_action("", action) for action in actions]
    return (*(token for each in spoken[:-1] for token in each if token not in CHAT.stop_ids), *spoken[-1])


def metrics_of(*pairs: tuple[tuple[int, ...], ToolCall]) -> tuple[dict[str, float], Sayer]:
    """Of outputs, each beside the teacher's action."""
    backend = Sayer({(at,): output for at, (output, _) in enumerate(pairs)})
    turns = [HeldOutTurn((at,), CHAT.format_action("So.", meant)) for at, (_, meant) in enumerate(pairs)]
    return run(turn_metrics(backend, CHAT, TOOLBOX, turns, 99)), backend


def test_outputs_are_counted_by_what_an_environment_would_carry_out() -> None:
    found, backend = metrics_of(
        (said(search("river")), search("river")),
        (said(search("king")), search("river")),
        (said(curate(add_ids=["D1"])), search("river")),
        (said(call("search_corpus", pages=3)), search("river")),
        (said(call("find")), search("river")),
        (said(), search("river")),
        (said(END), END),
        (said(END), search("river")),
        (said(END, search("river")), search("river")),  # the search is what an environment takes
    )
    assert found == {"valid": 6 / 9, "tool_agreement": 5 / 9, "action_agreement": 3 / 9}
    assert backend.asked == [Sampling(temperature=0.0, max_tokens=99, stop_ids=CHAT.stop_ids)] * 9
    assert metrics_of()[0] == {}
