"""Test that agents of any manners are played, recorded and scored, and that none of them harms another."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path

import msgspec
import pytest

from harness1.agents.evaluation import AgentSession, Evaluate, delivered_f1, open_evaluation, reward_of
from harness1.agents.judge import Judge
from harness1.agents.process import arguments_of, run_command
from harness1.agents.sandbox import Sandbox, inherit
from harness1.agents.training import Agent, OnPolicyUpstream, agent_rollouts
from harness1.config import Config, Rl, load_config
from harness1.episodes.jobs import EpisodeJob
from harness1.errors import InfrastructureFault, UsageError
from harness1.records import DocId, Episode, Gold, Hashes, RewardRecord, Status, Task
from harness1.rl.groups import EpisodeGroup, training_rows
from harness1.rows.calls import calls_for_rows, read_calls
from harness1.viewer.work import read_sessions
from tests.proxying import Dice, hermes
from tests.support import run

AGENT = """
import json, os, subprocess, sys, time, urllib.error, urllib.request

def ask(text, history=()):
    messages = [*history, {"role": "user", "content": text}]
    tool = {"name": "search_corpus", "parameters": {"type": "object", "properties": {"query": {"type": "string"}}}}
    body = {"model": "m", "messages": messages, "temperature": 0.1, "tools": [{"type": "function", "function": tool}]}
    sent = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
    )
    with urllib.request.urlopen(sent, timeout=20) as answer:
        return [*messages, json.load(answer)["choices"][0]["message"]]

manner = sys.argv[1]
task = json.load(open("task.json"))
assert "gold" not in task and os.listdir() == ["task.json"]
if manner == "silent":
    sys.exit("nothing to say")
history = ask(task["query"])
if manner == "crash":
    raise SystemExit(3)
if manner == "hang":
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    time.sleep(600)
if manner == "flood":
    while True:
        print("x" * 65536)
if manner == "greedy":
    refused = 0
    for _ in range(20):
        try:
            ask(task["query"] + "?")
        except urllib.error.HTTPError as error:
            refused += error.code == 429
    print("refused", refused)
if manner == "telling":
    print(os.environ["OPENAI_BASE_URL"])
if manner == "good":
    ask("And then?", history)
    open("delivered.txt", "w").write("D1\\nD9\\n")
"""
CONFIG = load_config(None, ["machine.concurrency=8", "machine.episode_deadline_s=20"])


class Beside(Judge):
    """A judge in this process."""

    def __init__(self, evaluate: Evaluate) -> None:
        super().__init__("harness1.agents.evaluation:delivered_f1", 1.0)
        self.evaluate = evaluate

    def rate(self, session: AgentSession) -> RewardRecord:
        return reward_of(self.evaluate, session)


class Played:
    """The rollouts of an agent over a model that plays dice."""

    def __init__(self, folder: Path, manner: str = "{query}", config: Config = CONFIG) -> None:
        self.folder, self.config, self.model = folder, config, Dice(hermes())
        script = folder / "agent.py"
        script.write_text(AGENT)
        self.command = f"{sys.executable} {script} {manner}"
        self.seen: list[AgentSession] = []
        self.judge: Judge = Beside(self.evaluate)
        self.sandbox = Sandbox()
        self.variables: Mapping[str, str] = inherit(os.environ)

    def evaluate(self, session: AgentSession) -> Mapping[str, float]:
        self.seen.append(session)
        return {"f1": delivered_f1(session), "calls": 0.5 * len(session.calls)}

    def play(self, tasks: Sequence[Task]) -> list[Episode]:
        async def published(*_: object) -> None:
            raise AssertionError

        async def played() -> list[Episode]:
            episodes: list[Episode] = []
            golds = {task.task_id: task.gold for task in tasks}
            hashes = Hashes("env", "policy", "")
            agent = Agent(self.command, self.judge, golds, hashes, self.variables, self.sandbox)
            upstream = OnPolicyUpstream("hf:dice", self.model, self.model.chat, self.config)
            jobs = [EpisodeJob(task.public(), at) for at, task in enumerate(tasks)]
            record = self.folder / "sessions"
            async with agent_rollouts(agent, upstream, record, self.config, published) as rollouts:
                await rollouts.run(jobs, episodes.append)
            return sorted(episodes, key=lambda each: each.sample_idx)

        return run(played())


def tasks_of(*manners: str) -> list[Task]:
    gold = Gold({DocId("D1"): 1, DocId("D2"): 0})
    return [Task(f"t{at}", manner, "train", gold) for at, manner in enumerate(manners)]


def test_a_session_becomes_an_episode_with_the_tokens_that_the_proxy_recorded(tmp_path: Path) -> None:
    played = Played(tmp_path)
    (episode,) = played.play(tasks_of("good"))
    assert [len(turn.calls) for turn in episode.turns] == [1, 1]
    better = msgspec.structs.replace(episode, reward=msgspec.structs.replace(episode.reward, total=9.0))
    for rows, count in (("turn", 4), ("epoch", 2)):
        made = training_rows([EpisodeGroup(0, (episode, better))], msgspec.convert({"rows": rows}, Rl))
        assert len(made) == count
    assert episode.reward.total == pytest.approx(2 / 3 + 1.0)
    terms = {name: term.value for name, term in episode.reward.terms.items()}
    assert terms == {"f1": pytest.approx(2 / 3), "calls": 1.0}
    recorded = list(read_calls(tmp_path / "sessions"))
    kept = list(calls_for_rows(episode))
    assert [call.prompt_ids for call in kept] == [call.prompt_ids for call in recorded]
    assert [call.output_ids for call in kept] == [call.output_ids for call in recorded]
    assert kept[1].prompt_ids[: len(kept[0].prompt_ids)] == kept[0].prompt_ids
    assert sum(map(len, episode.segments.values())) < sum(len(call.prompt_ids) for call in kept)  # stored once
    (session,) = read_sessions(tmp_path / "sessions")  # what the viewer shows
    assert len(session["calls"]) == 2
    assert not played.seen[0].folder.exists()
    drawn = {(each.temperature, each.top_p, each.top_k) for _, each, _ in played.model.calls}
    assert drawn == {(1.0, 1.0, 0)}, "it samples from the policy itself"
    assert episode.task.gold is None


def test_no_manners_of_an_agent_harm_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness1.agents.training.MOST_CALLS", 6)
    config = msgspec.structs.replace(CONFIG, machine=msgspec.structs.replace(CONFIG.machine, episode_deadline_s=4.0))
    played = Played(tmp_path, config=config)
    good, crash, hang, flood, greedy, last = played.play(tasks_of("good", "crash", "hang", "flood", "greedy", "good"))
    assert [good.status, last.status] == [Status.COMPLETED] * 2
    assert [len(good.turns), len(last.turns)] == [2, 2]
    by_manner = {session.task.query: session for session in played.seen}
    assert by_manner["crash"].exit_code == 3
    assert by_manner["hang"].cut == "deadline"
    assert by_manner["flood"].cut == "output"
    assert len(by_manner["flood"].output) <= 16 << 10
    assert [len(each.turns) for each in (crash, hang, flood)] == [1, 1, 1]
    assert len(greedy.turns) == 6
    assert "refused 15" in by_manner["greedy"].output


def test_a_session_without_a_call_is_tried_again_and_then_broken(tmp_path: Path) -> None:
    (episode,) = Played(tmp_path).play(tasks_of("silent"))
    assert episode.status is Status.INFRA_ERROR
    assert episode.error == "the agent made no call that can be trained on (exit 1): nothing to say (3 attempts)"
    assert episode.reward is None


def test_a_session_that_the_model_failed_is_begun_anew(tmp_path: Path) -> None:
    played = Played(tmp_path)
    generate, failures = played.model.generate, [InfrastructureFault("no memory"), InfrastructureFault("no memory")]

    async def failing(*arguments: object) -> object:
        if failures:
            raise failures.pop()
        return await generate(*arguments)

    played.model.generate = failing
    (episode,) = played.play(tasks_of("good"))
    assert (episode.status, len(episode.turns)) == (Status.COMPLETED, 2)
    failures.extend([InfrastructureFault("no memory")] * 9)
    played.folder = tmp_path / "again"
    (broken,) = played.play(tasks_of("good"))
    assert (broken.status, broken.error) == (Status.INFRA_ERROR, "a call failed: no memory (3 attempts)")


LEAVING = """
if manner == "leaving" and os.fork() == 0:
    os.setsid()
    for number in (0, 1, 2):
        os.close(number)
    time.sleep(1.5)
    open({late!r}, "w").close()
    os._exit(0)
if manner == "slow":
    time.sleep(4)
"""


def test_what_an_agent_started_ends_with_it_whatever_session_it_is_in(tmp_path: Path) -> None:
    late = tmp_path / "late.txt"
    played = Played(tmp_path)
    (tmp_path / "agent.py").write_text(AGENT + LEAVING.format(late=str(late)))
    left, slow = played.play(tasks_of("leaving", "slow"))
    assert (len(left.turns), len(slow.turns)) == (1, 1)
    assert not late.exists()
    assert len(list(read_calls(tmp_path / "sessions"))) == 2


def test_no_call_passes_that_names_an_ended_session_another_or_none(tmp_path: Path) -> None:
    codes = []

    def calls_late(session: AgentSession) -> float:
        foreign, ways = "session-000000-000000-000000", ("authorization", "x-api-key", "x-session-id", "")
        for path, key, way in product(("chat/completions", "messages"), (session.name, foreign, ""), ways):
            named = {way: f"Bearer {key}" if way == "authorization" else key} if way else {}
            url = f"{session.output.strip()}/{path}" + (f"?session={key}" if not way else "")
            body = json.dumps({"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "late"}]})
            sent = urllib.request.Request(url, body.encode(), {"Content-Type": "application/json", **named})
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(sent, timeout=20)
            codes.append(refused.value.code)
        return 1.0

    played = Played(tmp_path)
    played.judge = Beside(calls_late)
    (episode,) = played.play(tasks_of("telling"))
    assert (episode.status, codes) == (Status.COMPLETED, [410] * 24)
    assert len(list(read_calls(tmp_path / "sessions"))) == 1


def test_a_command_that_cannot_be_started_ends_the_training(tmp_path: Path) -> None:
    played = Played(tmp_path)
    played.command = "no-such-agent {query}"
    with pytest.raises(UsageError, match="no-such-agent cannot be started"):
        played.play(tasks_of("good"))


def test_an_evaluation_is_named_by_module_or_by_file(tmp_path: Path) -> None:
    (tmp_path / "judge.py").write_text("def one(session):\n    return 1\n")
    assert open_evaluation("harness1.agents.evaluation:delivered_f1") is delivered_f1
    session = AgentSession(name="s", task=tasks_of("good")[0], folder=tmp_path)
    assert reward_of(open_evaluation(f"{tmp_path}/judge.py:one"), session).total == 1.0
    for wrong in ("judge", "no_such_module:f", ".odd:f", f"{tmp_path}/judge.py:two", f"{tmp_path}/none.py:f"):
        with pytest.raises(UsageError):
            open_evaluation(wrong)
    for odd in (float("nan"), 10**400, {"a": 1e308, "b": 1e308}, {"a": 1e12, "b": 1e12}):
        with pytest.raises(UsageError, match=r"finite|at most 1e\+12"):
            reward_of(lambda _, odd=odd: odd, session)


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


def ended(words: list[str], folder: Path) -> tuple[int, str, str]:
    return run(run_command(words, folder, {}, 10.0, 1000, Sandbox()))


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


@pytest.mark.parametrize(
    ("place", "name", "number"),
    [
        (asyncio, "create_subprocess_exec", errno.EAGAIN),
        (os, "pipe", errno.EMFILE),
        (tempfile, "mkdtemp", errno.ENOSPC),
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
    with pytest.raises(InfrastructureFault, match="could not be started: No such file"):
        ended([sys.executable, "-c", "pass"], tmp_path / "gone")  # a folder that is gone is no mistake of the command


def test_a_start_that_fails_leaves_no_file_open(tmp_path: Path) -> None:
    async def scene() -> None:
        before = set(Path("/proc/self/fd").iterdir())
        for words in (["true", "nul\0"], ["true", LONG], ["no-such-command"]):
            with pytest.raises((UsageError, InfrastructureFault)):
                await run_command(words, tmp_path, {}, 10.0, 1000, Sandbox())
        await asyncio.sleep(0)
        assert set(Path("/proc/self/fd").iterdir()) == before

    run(scene())


def test_no_session_leaves_a_folder_beside_the_next_or_anything_among_temporary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    config = msgspec.structs.replace(CONFIG, machine=msgspec.structs.replace(CONFIG.machine, concurrency=1))
    played = Played(tmp_path, config=config)
    script = tmp_path / "agent.py"
    script.write_text(script.read_text() + "print('folders', len(os.listdir('../..')))\n")
    played.play(tasks_of("silent", "nul\0", "good"))
    assert (played.seen[0].output, list(temporary.iterdir())) == ("folders 1\n", [])


def test_a_command_whose_end_is_cancelled_ends_at_once(tmp_path: Path) -> None:
    stubborn = "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); open(str(os.getpid()), 'w')"

    async def scene() -> None:
        running = asyncio.create_task(
            run_command([sys.executable, "-c", f"{stubborn}; time.sleep(60)"], tmp_path, {}, 60.0, 1000, Sandbox())
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
    words = arguments_of("ask --id {task_id} {query} {other}", values)
    assert words == ["ask", "--id", "t1", "who is {task_id}?", "{other}"]
    for command, message in (("'", "No closing quotation"), (" ", "--command is empty")):
        with pytest.raises(UsageError, match=message):
            arguments_of(command, values)
