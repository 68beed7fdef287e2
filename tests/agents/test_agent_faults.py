"""Test that an agent which cannot be started, or which leaves something behind, harms no session but its own."""

from __future__ import annotations

import asyncio
import errno
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from harness1.agents.process import Ended, arguments_of, run_command
from harness1.errors import InfrastructureFault, UsageError
from harness1.records import Status
from tests.agents.test_agent_sessions import CONFIG, Played, tasks_of
from tests.support import run

HAUNTED = """
if manner == "haunted":
    if not os.path.exists(STOP + ".begun"):
        open(STOP + ".begun", "w").close()
        subprocess.Popen([sys.executable, "-c", GHOST, STOP, os.getcwd()], start_new_session=True)
        while not os.path.exists("ghost"):
            time.sleep(0.01)
        sys.exit()
    ask(task["query"])
"""
GHOST = """
import os, sys, time
stop, folder = sys.argv[1:]
ends = time.time() + 20
while time.time() < ends and not os.path.exists(stop):
    try:
        os.makedirs(folder, exist_ok=True)
        open(folder + "/ghost", "w").close()
    except OSError:
        pass
"""
LONG = "long " * 40_000


def ended(words: list[str], folder: Path) -> Ended:
    return run(run_command(words, folder, {}, 10.0, 1000))


def failing(real: Callable[..., object], number: int, times: int) -> Callable[..., object]:
    """Return a function that raises OSError a number of times before it does its work."""
    left = [times]

    def fail(*arguments: object, **named: object) -> object:
        if left[0] and named.get("dir", "") is not None:  # the folder of all sessions is made within none
            left[0] -= 1
            raise OSError(number, os.strerror(number))
        return real(*arguments, **named)

    return fail


def test_what_an_attempt_left_behind_cannot_write_in_the_folder_of_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    played, stop = Played(tmp_path), tmp_path / "stop"
    script = tmp_path / "agent.py"
    begin = f"GHOST, STOP = {GHOST!r}, {str(stop)!r}\n"
    head, task, rest = script.read_text().partition("history = ask")
    script.write_text(begin + head + HAUNTED + task + rest)
    try:
        haunted, good = played.play(tasks_of("haunted", "good"))
    finally:
        stop.touch()
    assert (haunted.status, haunted.error) == (Status.COMPLETED, None)
    assert (good.status, len(good.turns)) == (Status.COMPLETED, 2)


@pytest.mark.parametrize(("odd", "reason"), [("nul\0", "null byte"), (LONG, "Argument list too long")])
def test_a_query_that_is_no_argument_breaks_its_session_alone(odd: str, reason: str, tmp_path: Path) -> None:
    broken, good = Played(tmp_path).play(tasks_of(odd, "good"))
    assert broken.status is Status.INFRA_ERROR
    assert reason in (broken.error or "")
    assert "task.json" in (broken.error or "")
    assert good.status is Status.COMPLETED


@pytest.mark.parametrize("odd", ["nul\0", LONG])
def test_an_agent_can_read_any_query_from_its_folder(odd: str, tmp_path: Path) -> None:
    played = Played(tmp_path, manner="polite")
    (tmp_path / "agent.py").write_text("import json\nassert json.load(open('task.json'))['query'] == " + repr(odd))
    (episode,) = played.play(tasks_of(odd))
    assert "the agent made no call that can be trained on (exit 0): no output" in (episode.error or "")


@pytest.mark.parametrize(
    ("place", "name", "number"),
    [
        (asyncio, "create_subprocess_exec", errno.EAGAIN),
        (asyncio, "create_subprocess_exec", errno.ENOMEM),
        (os, "pipe", errno.EMFILE),
        (tempfile, "mkdtemp", errno.ENOSPC),
        (Path, "write_bytes", errno.ENOSPC),
    ],
)
def test_a_fault_at_the_start_of_an_agent_is_tried_again_and_then_breaks_its_session(
    place: object, name: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    played = Played(tmp_path, config=CONFIG)
    real = getattr(place, name)
    monkeypatch.setattr(place, name, failing(real, number, 2))
    (tried_again,) = played.play(tasks_of("good"))
    assert tried_again.status is Status.COMPLETED
    monkeypatch.setattr(place, name, failing(real, number, 3))
    (broken,) = played.play(tasks_of("good"))
    assert broken.status is Status.INFRA_ERROR
    assert os.strerror(number) in (broken.error or "")


@pytest.mark.parametrize(
    ("mode", "reason"), [(None, "No such file"), (0o600, "Permission denied"), (0o700, "Exec format error")]
)
def test_a_command_that_can_never_be_started_is_a_mistake_of_the_user(
    mode: int | None, reason: str, tmp_path: Path
) -> None:
    command = tmp_path / "agent"
    if mode is not None:
        command.write_text("no program")
        command.chmod(mode)
    with pytest.raises(UsageError, match=f"agent cannot be started: {reason}"):
        ended([str(command)], tmp_path)


def test_a_folder_that_is_gone_is_no_mistake_of_the_command(tmp_path: Path) -> None:
    with pytest.raises(InfrastructureFault, match="could not be started: No such file"):
        ended([sys.executable, "-c", "pass"], tmp_path / "gone")


@pytest.mark.parametrize("word", ["nul\0", LONG, "no-such-command"])
def test_a_start_that_fails_leaves_no_file_open(word: str, tmp_path: Path) -> None:
    async def scene() -> None:
        before = set(Path("/proc/self/fd").iterdir())
        with pytest.raises((UsageError, InfrastructureFault)) as kept:
            await run_command([word if word == "no-such-command" else "true", word], tmp_path, {}, 10.0, 1000)
        await asyncio.sleep(0)
        assert kept.value.__cause__ is not None
        assert set(Path("/proc/self/fd").iterdir()) == before

    run(scene())


def test_nothing_is_left_among_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    Played(tmp_path).play(tasks_of("good", "silent", "nul\0"))
    assert list(temporary.iterdir()) == []


def test_a_session_that_broke_leaves_no_folder_beside_the_next(tmp_path: Path) -> None:
    config = msgspec.structs.replace(CONFIG, machine=msgspec.structs.replace(CONFIG.machine, concurrency=1))
    played = Played(tmp_path, config=config)
    script = tmp_path / "agent.py"
    script.write_text(script.read_text() + "print('folders', len(os.listdir('..')))\n")
    played.play(tasks_of("silent", "nul\0", "good"))
    assert played.seen[0].output == "folders 1\n"


def test_a_command_whose_end_is_cancelled_ends_at_once(tmp_path: Path) -> None:
    stubborn = "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); open(str(os.getpid()), 'w')"

    async def scene() -> None:
        running = asyncio.create_task(
            run_command([sys.executable, "-c", f"{stubborn}; time.sleep(60)"], tmp_path, {}, 60.0, 1000)
        )
        while not (begun := list(tmp_path.iterdir())):
            await asyncio.sleep(0.01)
        for _ in range(2):
            running.cancel()
            await asyncio.sleep(0.2)
        assert running.done()
        await asyncio.sleep(1.0)
        with pytest.raises(ProcessLookupError):
            os.killpg(int(begun[0].name), 0)

    run(scene())


def test_what_a_query_says_in_braces_is_left_as_it_is() -> None:
    values = {"query": "who is {task_id}?", "task_id": "t1"}
    assert arguments_of("ask --id {task_id} {query} {other}", values) == [
        "ask",
        "--id",
        "t1",
        "who is {task_id}?",
        "{other}",
    ]
