"""A line about work: a bar on a terminal, a few lines in a pipe, and a terminal left as it was."""

import io
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext

import pytest
from rich.console import Console

from harness1.cli.playing import EvaluationBoard
from harness1.cli.progress import Pacing
from harness1.cli.training import TrainingBoard
from harness1.records import DocId, Gold, StopReason
from tests.eval.run_folders import episode

HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"
GOLD = Gold({DocId("a"): 1, DocId("b"): 1})
GOLDS: Mapping[str, Gold] = defaultdict(lambda: GOLD)


class Clock:
    """Stands still unless it is moved."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def screen(width: int = 0) -> tuple[Console, Callable[[], str]]:
    """A terminal of a width, or a pipe, and what reads all that was written to it."""
    file = io.StringIO()
    shown = {"force_terminal": bool(width), "width": width or 80, "_environ": {"TERM": "xterm"}}
    return Console(file=file, highlight=False, **shown), file.getvalue


def test_episodes_are_counted_with_their_recall_and_what_failed() -> None:
    board = EvaluationBoard("run", {**dict.fromkeys("abcd", GOLD), "e": None}, clock=Clock(), hidden=True)
    board.begin(0, 5)
    assert board.parts() == ("", "")
    for each in (
        episode("a", "ab"),
        episode("b", "a", stop=StopReason.CONTEXT_LIMIT),
        episode("c", "ab", stop=StopReason.FORMAT_LIMIT),
        episode("d", "ab", stop=StopReason.FAULT),
        episode("e"),
    ):
        board.episode(each)
    # 1, 0.5, and 0 for the policy's error; neither what the infrastructure broke, nor what has no gold.
    assert board.parts() == ("recall 0.500", "1 truncated, 1 policy_error, 1 infra_error")


def test_lines_come_each_ten_seconds_or_tenth_of_the_work_and_not_twice_a_second() -> None:
    pacing = Pacing(0.0)
    times = [(0.5, 0.5), (1.0, 0.05), (2.0, 0.1), (2.5, 0.9), (3.0, 0.15), (11.9, 0.19), (12.0, 0.19), (13.0, 0.3)]
    assert [pacing.due(now, share) for now, share in times] == [False, False, True, False, False, False, True, True]


def lines_of(done: int, total: int, seconds: Iterable[float]) -> list[str]:
    """What a pipe gets of an evaluation whose episodes take so long."""
    console, written = screen()
    clock = Clock()
    with EvaluationBoard("run", GOLDS, console=console, clock=clock) as board:
        board.begin(done, total)
        for at, each in enumerate(seconds):
            clock.now += each
            board.episode(episode(f"t{at}", "ab"))
    assert "\x1b" not in written()
    return written().splitlines()


def test_a_pipe_gets_few_lines_with_the_speed_of_this_session_and_the_last_one() -> None:
    lines = lines_of(0, 1000, [0.02] * 1000)
    assert 3 <= len(lines) <= 11
    assert lines[-1] == "run: 1,000 of 1,000 episodes; 3,000 per minute; recall 1.000"
    assert "run: 10 of 15 episodes; 10 per minute; 0:00:30 left; recall 1.000" in lines_of(5, 15, [6.0] * 5)[-1]


def training(board: TrainingBoard) -> None:
    board.listen(0, 100, {})
    board.listen(0, 100, {"held_out/reward": 0.4, "held_out/recall": 0.3})
    for step in range(1, 12):
        board.listen(step, 100, {"reward": 0.1 * step, "loss": 1.5, "tokens": 1e6})


def test_what_is_at_work_within_a_step_is_shown() -> None:
    console, written = screen()
    clock = Clock()
    with TrainingBoard("sft", "step", ("loss",), console=console, clock=clock) as board:
        board.listen(0, 3, {})
        board.doing("1,000 of 4,000 tokens of step 1")
        clock.now += 11.0
        board.doing("2,000 of 4,000 tokens of step 1")
        board.listen(1, 3, {"loss": 2.0})
    said = ["sft: step 0 of 3; 2,000 of 4,000 tokens of step 1", "sft: step 1 of 3; loss 2"]
    assert written().splitlines() == said


@pytest.mark.parametrize("width", [0, 80])
def test_validations_are_said_in_lines_that_stay_and_what_is_refused_or_hidden_shows_nothing(width: int) -> None:
    console, written = screen(width)
    names = ("reward", "loss", "recall")
    with pytest.raises(ValueError, match="refused"), TrainingBoard("rl", "batch", names, console=console):
        raise ValueError("refused")
    with TrainingBoard("rl", "batch", names, console=console, hidden=True) as board:
        training(board)
    assert written() == ""
    with TrainingBoard("rl", "batch", names, console=console, clock=Clock()) as board:
        training(board)
    assert "batch 0, held out: reward 0.4, recall 0.3" in written()
    assert "rl: batch 11 of 100; reward 1.1, loss 1.5" in written()


@pytest.mark.parametrize("error", [KeyboardInterrupt, None])
def test_the_cursor_is_there_again_however_the_work_ends(error: type[BaseException] | None) -> None:
    console, written = screen(80)
    with (
        pytest.raises(error) if error else nullcontext(),
        EvaluationBoard("scripted on [/x]", GOLDS, console=console, clock=Clock()) as board,
    ):
        board.begin(0, 10)
        board.episode(episode("t", "ab"))
        assert HIDE in written()
        if error is not None:
            raise error
    assert written().rfind(SHOW) > written().rfind(HIDE)
    assert "scripted on [/x]: 1 of 10 episodes" in written().rstrip().splitlines()[-1]
