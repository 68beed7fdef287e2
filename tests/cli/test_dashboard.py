"""The dashboard: legible at 80 columns without Unicode, a few lines in a pipe, and a terminal left as it was."""

import io
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext

import pytest
from rich.cells import cell_len
from rich.console import Console

from harness1.cli.dashboard import EvaluationBoard, describe_recall
from harness1.cli.progress import ECHO, Pacing
from harness1.cli.training import TrainingBoard
from harness1.records import DocId, Gold, ModelCall, Note, Observation, StopReason, ToolCall, Turn
from harness1.training.log import StepListener
from tests.eval.run_folders import episode

LONG = "a very long policy: vllm:organisation/model-of-many-billions@http://somewhere.example:8000 on a long dataset"
HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"
STEPS = {"reward": 0.51234, "loss": 1.5, "curated_recall": 0.4, "entropy": 2.0, "tokens": 1e6, "seconds": 100.0}
STEPS |= {"wait_seconds": 60.0, "train_seconds": 40.0, "staleness": 0.5, "staleness_max": 2.0, "format_failures": 0.25}
STEPS |= {"groups/waiting": 12.0, "groups/filtered": 3.0, "groups/stale": 0.0, "groups/faulty": 1.0}
STEPS |= {"tool_errors": 0.01, "zero_variance": 0.1}
GOLD = Gold({DocId("a"): 1, DocId("b"): 1})
GOLDS: Mapping[str, Gold] = defaultdict(lambda: GOLD)
NAMES = ("reward", "loss", "curated_recall", "entropy")


class Clock:
    """Stands still unless it is moved."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def screen(width: int = 0, encoding: str = "utf-8") -> tuple[Console, Callable[[], str]]:
    """A terminal of a width, or a pipe, and what reads all that was written to it."""
    buffer = io.BytesIO()
    file = io.TextIOWrapper(buffer, encoding=encoding, write_through=True)
    shown = {"force_terminal": bool(width), "width": width or 80, "_environ": {"TERM": "xterm"}}
    return Console(file=file, highlight=False, **shown), lambda: buffer.getvalue().decode(encoding)


def turn(index: int, *, error: bool = False, action: bool = True, prompt: int = 0, output: int = 0) -> Turn:
    seen = Observation("search_corpus", error=Note("empty_query") if error else None)
    made = {"action": ToolCall("search_corpus"), "observation": seen} if action else {"parse_error": "there is no call"}
    calls = (ModelCall("c", output_ids=(1,) * output),) if output else ()
    return Turn(index, calls=calls, prompt_tokens=prompt, **made)


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
    console, _ = screen(width, encoding)
    clock = Clock()
    board: EvaluationBoard | TrainingBoard
    if kind == "evaluation":
        board = EvaluationBoard(LONG, GOLDS, console, clock, hidden=True)
        clock.now = 30.0
        board.queues(lambda: {"init": 0, "ready": 8, "run": 64, "post_wait": 12, "post": 8})
        board.begin(1000, 12345)
        for number in range(40):
            turns = [turn(1, prompt=31000, output=900, error=True)]
            board.episode(episode(f"t{number}", "a", stop=list(StopReason)[number % 5], turns=turns))
        words = ["1,040 of 12,345", "31,000 tokens read", "64 run", "8 turn_limit", "40 tool errors"]
    else:
        board = TrainingBoard(LONG, "batch", NAMES, console, clock, hidden=True)
        training(board.listen)
        words = ["11 of 100", "reward 1.1 (+0.5)", "10,000 tokens/s", "waiting 12", "filtered 3"]
        words += ["curated_recall 0.3 (batch 0)"]
    lines = drawn(board, console)
    assert {cell_len(line) for line in lines} == {width - ECHO}
    assert len(lines) <= 14
    text = " ".join(" ".join(line.strip("│| ") for line in lines).split())
    assert [word for word in words if word not in text] == [], text
    assert text.isascii() or encoding != "ascii"


def test_a_row_that_has_nothing_to_say_is_not_there() -> None:
    board = TrainingBoard("sft", "step", ("loss",), None, Clock(), hidden=True)
    board.listen(0, 10, {})
    assert not any(text for _, text in board.view()[0])
    board.listen(3, 10, {"loss": 2.0})
    bar, *rows = drawn(board, screen(80)[0])[1:-1]
    assert "step 3 of 10" in bar
    assert [line.strip("│ ").split() for line in rows] == [["values", "loss", "2"]], "a trend needs more steps"


def test_episodes_are_counted_with_what_failed_in_them() -> None:
    board = EvaluationBoard("run", {**dict.fromkeys("abcd", GOLD), "e": None}, None, Clock(), hidden=True)
    assert dict(board.view()[0])["failures"] == "none"
    good = [turn(1, prompt=100, output=5), turn(2, error=True, prompt=300, output=7)]
    board.earlier(episode("a", "ab", turns=good))
    board.earlier(episode("b", "a", stop=StopReason.TURN_LIMIT, turns=[turn(1)]))
    board.earlier(episode("c", "ab", stop=StopReason.FORMAT_LIMIT, turns=[turn(1, action=False)]))
    board.earlier(episode("d", "ab", stop=StopReason.FAULT))
    board.earlier(episode("e"))
    shown = dict(board.view()[0])
    # 1, 0.5, and 0 for the policy's error; neither what the infrastructure broke, nor what has no gold.
    assert shown["recall"] == "0.500 (0.000 to 1.000), curated, over 3 tasks"
    assert shown["an episode"] == "0.8 turns, 100 tokens read, 3 written"
    assert shown["ended by"] == "2 end_search, 1 turn_limit, 1 format_limit, 1 fault"
    assert {*shown["failures"].split(", ")} == {"1 policy_error", "1 infra_error", "1 format errors", "1 tool errors"}


@pytest.mark.parametrize(
    ("recalls", "told"),
    [([], ""), ([[0.5]], "0.500 (0.500 to 0.500)"), ([[0.5, 0.1], [0.5], [0.4]], "0.400 (0.287 to 0.513)")],
)
def test_a_mean_is_of_tasks_with_its_normal_interval(recalls: list[list[float]], told: str) -> None:
    assert describe_recall(recalls) == told


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
        for at in range(done):
            board.earlier(episode(f"early{at}", "x"))
        for at, each in enumerate(seconds):
            clock.now += each
            board.episode(episode(f"t{at}", "ab"))
    assert "\x1b" not in written()
    return written().splitlines()


def test_a_pipe_gets_few_lines_and_the_last_one() -> None:
    lines = lines_of(0, 1000, [0.02] * 1000)
    assert 3 <= len(lines) <= 11
    assert lines[-1] == "run: 1,000 of 1,000 episodes; 3,000 per minute; recall 1.000 (1.000 to 1.000)"


def test_recall_is_that_of_the_run_and_speed_that_of_this_session() -> None:
    assert "run: 10 of 15 episodes; 10 per minute; 0:00:30 left; recall 0.500" in lines_of(5, 15, [6.0] * 5)[-1]


def test_what_is_loaded_and_compiled_once_does_not_spoil_the_time_left() -> None:
    first, *_, last = lines_of(0, 1000, (20.0, 5.0, *[0.1] * 98))
    assert "left" not in first
    assert "100 of 1,000 episodes; 600 per minute; 0:01:30 left" in last


def test_what_is_at_work_within_a_step_is_shown() -> None:
    console, written = screen()
    clock = Clock()
    with TrainingBoard("sft", "step", ("loss",), console=console, clock=clock) as board:
        board.listen(0, 3, {})
        board.doing("1,000 of 4,000 tokens of step 1")
        clock.now += 11.0
        board.doing("2,000 of 4,000 tokens of step 1")
        assert any("now" in line and "2,000 of 4,000 tokens" in line for line in drawn(board, console))
        board.listen(1, 3, {"loss": 2.0})
    said = ["sft: step 0 of 3; 2,000 of 4,000 tokens of step 1", "sft: step 1 of 3; loss 2"]
    assert written().splitlines() == said


@pytest.mark.parametrize("width", [0, 80])
def test_validations_are_said_in_lines_that_stay_and_what_is_refused_or_hidden_shows_nothing(width: int) -> None:
    console, written = screen(width)
    with pytest.raises(ValueError, match="refused"), TrainingBoard("rl", "batch", NAMES, console=console):
        raise ValueError("refused")
    with TrainingBoard("rl", "batch", NAMES, console=console, hidden=True) as board:
        training(board.listen)
    assert written() == ""
    with TrainingBoard("rl", "batch", NAMES, console=console, clock=Clock()) as board:
        training(board.listen)
    assert "batch 0, held out: reward 0.4, curated_recall 0.3" in written()
    assert "rl: batch 11 of 100; reward 1.1, loss 1.5" in written()


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, None])
def test_the_cursor_is_there_again_however_the_work_ends(error: type[BaseException] | None) -> None:
    console, written = screen(80)
    ending = pytest.raises(error) if error else nullcontext()
    with ending, EvaluationBoard("scripted on world", GOLDS, console=console, clock=Clock()) as board:
        board.begin(0, 10)
        board.episode(episode("t", "ab"))
        assert HIDE in written()
        if error is not None:
            raise error
    assert written().rfind(SHOW) > written().rfind(HIDE)
    assert "scripted on world: 1 of 10 episodes" in written().rstrip().splitlines()[-1]
