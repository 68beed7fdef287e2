"""The dashboard: legible at 80 columns without Unicode, a few lines in a pipe, and a terminal left as it was."""

from __future__ import annotations

import io
import re
import time
from collections import defaultdict
from collections.abc import Callable, Mapping

import pytest
from rich.cells import cell_len
from rich.console import Console

from harness1.cli.dashboard import EvaluationBoard, TrainingBoard
from harness1.cli.progress import ECHO, REFRESHES
from harness1.records import DocId, Gold, StopReason
from harness1.training.log import StepListener
from tests.cli.test_progress import GOLD, episode, turn

LONG = "a very long policy: vllm:organisation/model-of-many-billions@http://somewhere.example:8000 on a long dataset"
HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"
STEPS = {
    "reward": 0.51234,
    "loss": 1.5,
    "curated_recall": 0.4,
    "entropy": 2.0,
    "tokens": 1e6,
    "seconds": 100.0,
    "wait_seconds": 60.0,
    "train_seconds": 40.0,
    "groups/waiting": 12.0,
    "groups/filtered": 3.0,
    "groups/stale": 0.0,
    "groups/faulty": 1.0,
    "staleness": 0.5,
    "staleness_max": 2.0,
    "format_failures": 0.25,
    "tool_errors": 0.01,
    "zero_variance": 0.1,
}
GOLDS: Mapping[str, Gold] = defaultdict(lambda: GOLD)
NAMES = ("reward", "loss", "curated_recall", "entropy")


class Clock:
    """Stands still unless it is moved."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def terminal(width: int, encoding: str = "utf-8") -> tuple[Console, io.TextIOWrapper]:
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding, write_through=True)
    return Console(file=file, force_terminal=True, width=width, highlight=False, _environ={"TERM": "xterm"}), file


def pipe() -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    return Console(file=file, width=80, highlight=False), file


def written(file: io.TextIOWrapper) -> str:
    buffer = file.buffer
    assert isinstance(buffer, io.BytesIO)
    return buffer.getvalue().decode(file.encoding)


def evaluating(board: EvaluationBoard) -> None:
    board.queues(lambda: {"init": 0, "ready": 8, "run": 64, "post_wait": 12, "post": 8})
    board.begin(1000, 12345)
    for number in range(40):
        stop = list(StopReason)[number % 5]
        board.episode(episode(f"t{number}", "a", stop, (turn(1, prompt=31000, output=900, error=True),)))


def training(listen: StepListener) -> None:
    listen(0, 100, {})
    listen(0, 100, {"held_out/reward": 0.4, "held_out/curated_recall": 0.3})
    for step in range(1, 12):
        listen(step, 100, STEPS | {"reward": 0.1 * step})


def drawn(board: EvaluationBoard | TrainingBoard, console: Console) -> list[str]:
    with console.capture() as captured:
        console.print(board)
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", captured.get()).splitlines()


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
@pytest.mark.parametrize("kind", ["evaluation", "training"])
def test_no_line_is_wider_than_the_terminal_and_nothing_is_lost(width: int, encoding: str, kind: str) -> None:
    console, _ = terminal(width, encoding)
    clock = Clock()
    board: EvaluationBoard | TrainingBoard
    if kind == "evaluation":
        board = EvaluationBoard(LONG, GOLDS, console, clock, hidden=True)
        clock.now = 30.0
        evaluating(board)
    else:
        board = TrainingBoard(LONG, "batch", NAMES, console, clock, hidden=True)
        training(board.listen)
    lines = drawn(board, console)
    assert {cell_len(line) for line in lines} == {width - ECHO}
    assert len(lines) <= 14
    text = " ".join(" ".join(line.strip("│| ") for line in lines).split())
    words = (
        ("1,040 of 12,345", "31,000 tokens read", "64 run", "8 turn_limit", "40 tool errors")
        if kind == "evaluation"
        else (
            "11 of 100",
            "reward 1.1 (+0.5)",
            "10,000 tokens/s",
            "waiting 12",
            "filtered 3",
            "curated_recall 0.3 (batch 0)",
        )
    )
    for word in words:
        assert word in text, text
    if encoding == "ascii":
        assert text.isascii()


def test_a_row_that_has_nothing_to_say_is_not_there() -> None:
    board = TrainingBoard("sft", "step", ("loss",), None, Clock(), hidden=True)
    board.listen(3, 10, {"loss": 2.0})
    bar, *rows = drawn(board, terminal(80)[0])[1:-1]
    assert "step 3 of 10" in bar
    assert [line.split()[1] for line in rows] == ["values"]


def test_a_pipe_gets_few_lines_and_the_last_one() -> None:
    console, file = pipe()
    clock = Clock()
    with EvaluationBoard("scripted on world", GOLDS, console=console, clock=clock) as board:
        board.begin(0, 1000)
        for number in range(1000):
            clock.now += 0.02
            board.episode(episode(f"t{number}"))
    lines = file.getvalue().splitlines()
    assert 3 <= len(lines) <= 11
    assert all(line.startswith("scripted on world: ") for line in lines)
    assert lines[-1].endswith("1,000 of 1,000 episodes; 3,000 per minute; recall 1.000 (1.000 to 1.000)")
    assert "\x1b" not in file.getvalue()


def test_the_recall_of_a_resumed_run_is_that_of_the_run() -> None:
    console, file = pipe()
    with EvaluationBoard("run", GOLDS, console=console, clock=Clock()) as board:
        board.begin(1, 2)
        board.earlier(episode("t0", "ab"))
        board.episode(episode("t1", "x", StopReason.TURN_LIMIT))
    assert "2 of 2 episodes; recall 0.500" in file.getvalue().splitlines()[-1]


def test_speed_and_time_left_are_of_this_session_alone() -> None:
    console, file = pipe()
    clock = Clock()
    with EvaluationBoard("run", GOLDS, console=console, clock=clock) as board:
        board.begin(100, 110)
        for number in range(5):
            clock.now += 6.0
            board.episode(episode(f"t{number}"))
    assert "run: 105 of 110 episodes; 10 per minute; 0:00:30 left; recall" in file.getvalue().splitlines()[-1]


def test_the_time_that_validations_take_is_in_the_time_left() -> None:
    console, file = pipe()
    clock = Clock()
    with TrainingBoard("sft", "step", ("loss",), console=console, clock=clock) as board:
        board.listen(2, 10, {})
        for step in (3, 4, 5):
            clock.now += 40.0
            board.listen(step, 10, {"loss": 1.0})
            clock.now += 20.0
            board.listen(step, 10, {"held_out/loss": 1.0})
    assert "sft: step 5 of 10; 1 per minute; 0:05:00 left; loss 1" in file.getvalue()


def test_what_is_loaded_and_compiled_once_does_not_spoil_the_time_left() -> None:
    console, file = pipe()
    clock = Clock()
    with EvaluationBoard("run", GOLDS, console=console, clock=clock) as board:
        board.begin(0, 1000)
        for number, seconds in enumerate((20.0, 5.0, *[0.1] * 98)):
            clock.now += seconds
            board.episode(episode(f"t{number}"))
    first, *_, last = file.getvalue().splitlines()
    assert "left" not in first
    assert "100 of 1,000 episodes; 600 per minute; 0:01:30 left" in last


def test_what_is_at_work_within_a_step_is_shown() -> None:
    console, file = pipe()
    clock = Clock()
    with TrainingBoard("sft", "step", ("loss",), console=console, clock=clock) as board:
        board.listen(0, 3, {})
        board.doing("1,000 of 4,000 tokens of step 1")
        clock.now += 11.0
        board.doing("2,000 of 4,000 tokens of step 1")
        assert any("now" in line and "2,000 of 4,000 tokens" in line for line in drawn(board, console))
        board.listen(1, 3, {"loss": 2.0})
    lines = file.getvalue().splitlines()
    assert lines == ["sft: step 0 of 3; 2,000 of 4,000 tokens of step 1", "sft: step 1 of 3; loss 2"]


def test_validations_are_said_in_lines_that_stay() -> None:
    for console, file in (pipe(), terminal(80)):
        with TrainingBoard("rl", "batch", NAMES, console=console, clock=Clock()) as board:
            training(board.listen)
        text = written(file) if isinstance(file, io.TextIOWrapper) else file.getvalue()
        assert "batch 0, held out: reward 0.4, curated_recall 0.3" in text
        assert "rl: batch 11 of 100; reward 1.1, loss 1.5" in text


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, None])
def test_the_cursor_is_there_again_however_the_work_ends(error: type[BaseException] | None) -> None:
    console, file = terminal(80)

    def work() -> None:
        with EvaluationBoard("scripted on world", GOLDS, console=console, clock=Clock()) as board:
            board.begin(0, 10)
            board.episode(episode())
            assert HIDE in written(file)
            if error is not None:
                raise error

    if error is None:
        work()
    else:
        with pytest.raises(error):
            work()
    text = written(file)
    assert text.rfind(SHOW) > text.rfind(HIDE)
    assert "scripted on world: 1 of 10 episodes" in text.rstrip().splitlines()[-1]


@pytest.mark.parametrize("opened", [pipe, lambda: terminal(80)])
def test_what_is_refused_or_hidden_shows_nothing(opened: Callable[[], tuple[Console, io.StringIO]]) -> None:
    console, file = opened()
    with pytest.raises(ValueError, match="refused"), TrainingBoard("sft", "step", NAMES, console=console):
        raise ValueError("refused")
    with TrainingBoard("sft", "step", NAMES, console=console, hidden=True) as board:
        training(board.listen)
    assert (written(file) if isinstance(file, io.TextIOWrapper) else file.getvalue()) == ""


def test_an_episode_costs_next_to_nothing_and_drawings_are_few() -> None:
    gold = Gold({DocId(f"d{number}"): 1 for number in range(10)})
    made = episode("t", "ab" * 15, turns=tuple(turn(index, prompt=30000, output=100) for index in range(40)))
    console, file = terminal(120)
    with EvaluationBoard("scripted on world", {"t": gold}, console=console) as board:
        board.begin(0, 2000)
        began = time.perf_counter()
        for _ in range(2000):
            board.episode(made)
        passed = time.perf_counter() - began
    assert passed / 2000 < 0.002
    assert written(file).count("episodes") <= (passed + 1) * REFRESHES * 2 + 4
