"""Test that hostile agents reach nothing of an honest one, of the gold or of the trainer, in every sandbox that this
machine permits; all with real processes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest

from harness1.agents.evaluation import AgentSession, delivered_f1
from harness1.agents.judge import Judge
from harness1.agents.process import find_sandbox, remove, run_command
from harness1.agents.sandbox import (
    WAYS,
    Sandbox,
    closed_paths,
    free_user,
    inherit,
    is_possible,
    needed_paths,
    variables_of,
)
from harness1.errors import InfrastructureFault, UsageError
from harness1.records import Status
from harness1.rows.calls import RecordedCall
from tests.agents.test_agent_sessions import AGENT, CONFIG, Played, tasks_of
from tests.support import run, wait_for

SECRET = "planted-4711-secret"
HOSTILE = """
import glob, signal, socket

GOLD, OUT, SCRIPT, HOME, SECRET = {gold!r}, {out!r}, {script!r}, {home!r}, {secret!r}.encode()
KEY = os.environ["OPENAI_API_KEY"]

def content(place):
    with open(place, "rb") as file:
        return file.read(1 << 16)

def write(place, text, mode="w"):
    with open(place, mode) as file:
        return file.write(text)

def shell(words):
    return subprocess.run(["/bin/sh", "-c", words], capture_output=True, timeout=10).stdout.decode()

def others():
    return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if pid not in (1, os.getpid())]

def keys_of_others():
    found = b""
    for place in glob.glob("/proc/*/environ") + glob.glob("/proc/*/task/*/environ"):
        try:
            found += content(place)
        except OSError:
            pass
    named = {{word for word in found.replace(b"=", b"\\0").split(b"\\0") if word.startswith(b"session-")}}
    return named - {{KEY.encode()}}

def folders_of_others():
    mine, found = os.path.realpath(".."), []
    for place in {{os.path.dirname(mine), "/tmp", "/var/tmp", "/dev/shm"}}:
        for base, names, files in os.walk(place):
            if not os.path.realpath(base).startswith(mine) and "delivered.txt" in files + names:
                write(base + "/delivered.txt", "D1")
                found.append(base)
    return found

def sockets_of_services():
    found = []
    for place in glob.glob("/run/**/*.sock", recursive=True) + glob.glob("/run/user/*/bus"):
        with socket.socket(socket.AF_UNIX) as line:
            line.connect(place)
            found.append(place)
    return found

def processes_without_end():
    children = 0
    try:
        while children < 3000:
            if os.fork() == 0:
                time.sleep(1)
                os._exit(0)
            children += 1
    except OSError:
        pass
    for _ in range(children):
        os.wait()
    return children >= 3000

def calls_of_another_session():
    for key in ("session-000000-000000-000000", "", "x", KEY[:-1], KEY + " " + KEY):
        os.environ["OPENAI_API_KEY"] = key
        try:
            ask("stolen")
            return True
        except urllib.error.HTTPError as error:
            assert error.code == 410
        finally:
            os.environ["OPENAI_API_KEY"] = KEY

BELOW = f"umount {{os.path.dirname(GOLD)}}; cat {{GOLD}}"
WITHIN = f"mount -t proc p /proc; mount -o remount,rw /; cat {{GOLD}} /proc/1/root{{GOLD}}"
ATTACKS = {{
    "secrets_in_processes": lambda: any(SECRET in content(p) for p in ENVIRONS if os.access(p, 4)),
    "arguments_of_the_trainer": lambda: any(SECRET in content(place) for place in glob.glob("/proc/[0-9]*/cmdline")),
    "inherited_secrets": lambda: {{"HF_TOKEN", "ANTHROPIC_AUTH_TOKEN", "HTTP_PROXY"}} & os.environ.keys(),
    "gold_itself": lambda: content(GOLD),
    "gold_by_root_of_others": lambda: any(os.path.exists(p + GOLD) and content(p + GOLD) for p in ROOTS),
    "gold_by_folders_of_others": lambda: glob.glob("/proc/*/cwd/" + os.path.basename(GOLD)),
    "gold_below_a_mount": lambda: "D1" in shell(f"{{BELOW}}; unshare -Urm sh -c '{{BELOW}}'"),
    "gold_in_a_new_namespace": lambda: "D1" in shell(f"unshare -Urmpf sh -c '{{WITHIN}}'"),
    "files_of_the_training": lambda: os.listdir(OUT),
    "memory_of_others": lambda: any(open(f"/proc/{{pid}}/mem", "rb").read(1) for pid in [*others(), 1]),
    "names_of_other_sessions": lambda: set(os.listdir("../..")) - {{os.path.basename(os.path.realpath(".."))}},
    "program_of_others": lambda: write(SCRIPT, "\\nraise SystemExit(9)\\n", "a"),
    "program_replaced": lambda: os.rename("task.json", SCRIPT) is None,
    "end_of_others": lambda: sum(os.kill(pid, signal.SIGKILL) is None for pid in others()),
    "end_of_the_trainer": lambda: os.getppid() != 1 and os.kill(os.getppid(), signal.SIGKILL) is None,
    "privileges": lambda: os.setuid(0) is None and os.getresuid() == (0, 0, 0) and content("/proc/1/environ"),
    "pattern_of_cores": lambda: write("/proc/sys/kernel/core_pattern", "|/bin/true"),
    "disks": lambda: [place for place in DISKS if content(place)],
    "terminals_of_the_user": lambda: [p for p in TERMINALS if os.write(os.open(p, os.O_RDWR | os.O_NOCTTY), b"x")],
    "keys_in_the_home": lambda: glob.glob(HOME + "/.ssh/*") + glob.glob(HOME + "/.aws/*"),
    "large_file": lambda: os.truncate(os.open("large", os.O_RDWR | os.O_CREAT), 3 << 30) is None,
    **{{each.__name__: each for each in (keys_of_others, folders_of_others, sockets_of_services)}},
    **{{each.__name__: each for each in (processes_without_end, calls_of_another_session)}},
}}
if manner.startswith("hostile"):
    ask("I am here")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(0.5)
    TERMINALS, DISKS = glob.glob("/dev/pts/[0-9]*"), glob.glob("/dev/[svn][dmv]*") + ["/dev/mem", "/dev/kmsg"]
    ROOTS, ENVIRONS, won = glob.glob("/proc/*/root"), glob.glob("/proc/[0-9]*/environ"), []
    for name, attack in ATTACKS.items():
        try:
            won += [name] if attack() else []
        except (OSError, subprocess.SubprocessError):
            pass
    if os.fork() == 0:  # what stays
        os.setsid()
        if os.fork() == 0:
            os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(300)", "ghost-" + {secret!r}])
        os._exit(0)
    time.sleep(0.3)
    if os.path.exists("delivered.txt"):
        os.unlink("delivered.txt")
    os.symlink({{"hostile 1": GOLD, "hostile 2": "/dev/zero"}}[manner], "delivered.txt")
    os.rename("../work", "../was")
    os.symlink(os.path.dirname(GOLD), "../work")
    print(json.dumps(won))
    sys.stdout.flush()
    os.kill(0, signal.SIGKILL)
if manner == "honest":
    open("delivered.txt", "w").write("D1\\nD9\\n")
    open(os.environ["TMPDIR"] + "/mine", "w").write("mine")
    for _ in range(12):
        time.sleep(0.5)
        assert open("delivered.txt").read() == "D1\\nD9\\n" and open(os.environ["TMPDIR"] + "/mine").read() == "mine"
    ask("And then?", history)
    print("untouched")
"""


@pytest.fixture(params=WAYS[:3], ids=["root", "any-user", "root-of-a-container"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Sandbox:
    """Each sandbox that this machine permits."""
    monkeypatch.setattr("harness1.agents.process.WAYS", (request.param, WAYS[-1]))
    if not is_possible(request.param) or run(find_sandbox()) != request.param:
        pytest.skip("this machine does not permit it")
    found: Sandbox = request.param
    return found


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that every user may enter: in the last way, an agent reads what all users may read."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o711)
        yield Path(folder)


def interpreter_of(way: Sandbox) -> str:
    """Return an interpreter that an agent may run: where there are no namespaces, one that all users may read."""
    if way.namespaces or all(folder.stat().st_mode & 1 for folder in Path(sys.executable).resolve().parents):
        return sys.executable
    return shutil.which("python3", path="/usr/bin") or pytest.skip("there is no interpreter that all users may run")


@pytest.fixture
def trainer(place: Path) -> Iterator[None]:
    """A process whose arguments and variables hold a secret, as a trainer's may."""
    words = [sys.executable, "-c", "import time; time.sleep(600)", SECRET]
    process = subprocess.Popen(words, env={"HF_TOKEN": SECRET}, cwd=place)
    yield
    alive = process.poll() is None
    process.kill()
    process.wait()
    assert alive


@pytest.mark.usefixtures("trainer")
def test_hostile_agents_touch_nothing_of_an_honest_one_and_reach_no_gold(way: Sandbox, place: Path) -> None:
    gold, out, terminal = place / "data" / "qrels.tsv", place / "out", os.openpty()
    for folder in (gold.parent, out):
        folder.mkdir()
    gold.write_text("t0\tD1\t1\n")
    (out / "state").write_text("weights")
    machine = msgspec.structs.replace(CONFIG.machine, episode_deadline_s=60.0)
    played = Played(place, config=msgspec.structs.replace(CONFIG, machine=machine))
    script = place / "agent.py"
    names = {"gold": str(gold), "out": str(out), "script": str(script), "secret": SECRET, "home": str(Path.home())}
    script.write_text(AGENT + HOSTILE.format(**names))
    script.chmod(0o644)
    played.command = f"{interpreter_of(way)} {script} {{query}}"
    played.variables = inherit({**os.environ, "HF_TOKEN": SECRET, "ANTHROPIC_AUTH_TOKEN": SECRET, "HTTP_PROXY": SECRET})
    needed = needed_paths([sys.executable, str(script)], played.variables)
    closed = closed_paths(out, [f"beir:{gold.parent}", "world:9"], "judge:f1", Path.home(), needed)
    played.sandbox = msgspec.structs.replace(way, closed=tuple(closed), needed=tuple(needed))
    episodes = played.play(tasks_of("hostile 1", "honest", "hostile 2"))
    assert [(each.status, each.error) for each in episodes] == [(Status.COMPLETED, None)] * 3
    sessions = {session.task.query: session for session in played.seen}
    honest = sessions["honest"]
    assert (honest.output, honest.cut, honest.exit_code, len(honest.calls)) == ("untouched\n", "", 0, 2)
    rewards = [each.reward.terms["f1"].value for each in episodes if each.reward is not None]
    assert rewards == [0.0, pytest.approx(2 / 3), 0.0]
    known = set() if way.namespaces else {"arguments_of_the_trainer", "gold_itself", "gold_by_root_of_others"}
    if way.namespaces and not way.own_user and os.getuid() == 0:
        known.add("processes_without_end")  # no limit is one for root
    known |= set() if way.namespaces else {"gold_below_a_mount", "gold_in_a_new_namespace", "files_of_the_training"}
    for name in ("hostile 1", "hostile 2"):
        assert set(json.loads(sessions[name].output.splitlines()[-1])) - known == set(), name
    assert script.read_text() == AGENT + HOSTILE.format(**names)
    assert gold.read_text() == "t0\tD1\t1\n"
    assert processes_with(f"ghost-{SECRET}") == []
    for descriptor in terminal:
        os.close(descriptor)


def processes_with(word: str) -> list[str]:
    found = []
    for each in Path("/proc").glob("[0-9]*"):
        try:
            found += [each.name] if word.encode() in (each / "cmdline").read_bytes() else []
        except OSError:
            continue
    return found


TRAINER = """
import asyncio, sys
from pathlib import Path
from harness1.agents.process import run_command
from harness1.agents.sandbox import Sandbox
code = "import os, time; os.fork() or os.setsid(); open(str(os.getpid()), 'w'); time.sleep(300)"
words, apart = [sys.executable, "-c", code, sys.argv[1]], sys.argv[3] == "True"
asyncio.run(run_command(words, Path(sys.argv[2]), {}, 300.0, 1000, Sandbox(namespaces=apart, needed=(sys.prefix,))))
"""


@pytest.mark.parametrize("namespaces", [True, False])
def test_agents_end_with_a_trainer_that_is_killed(namespaces: bool, tmp_path: Path) -> None:
    folder, word = tmp_path / "tree" / "work", f"orphan-{tmp_path}"
    folder.mkdir(parents=True)
    if namespaces and not run(find_sandbox()).namespaces:
        pytest.skip("this machine does not permit it")
    process = subprocess.Popen([sys.executable, "-c", TRAINER, word, str(folder), str(namespaces)])
    try:
        wait_for(lambda: len(list(folder.iterdir())) == 2)
    finally:
        process.kill()
        process.wait()
    wait_for(lambda: processes_with(word) == [])


CLIENT = """
import json, os, pwd, subprocess, sys, tempfile
from pathlib import Path
assert json.loads(Path("task.json").read_text())["query"]
home = Path.home()
(home / ".settings").write_text("kept")
with tempfile.NamedTemporaryFile() as file:
    assert Path(file.name).is_relative_to(os.environ["TMPDIR"])
Path(f"/tmp/{os.getpid()}-scratch").write_text("room")
Path(f"/tmp/{os.getpid()}-scratch").unlink()
assert os.environ["LANG"] == "C.UTF-8" and os.environ["SSL_CERT_FILE"]
done = subprocess.run(["env"], capture_output=True, text=True, check=True)
assert "PATH=" in done.stdout
assert pwd.getpwuid(os.getuid()).pw_name
print("works")
"""


def test_what_programs_need_is_there(way: Sandbox, place: Path) -> None:
    """A home and temporary files that can be written, a name, its tools, the language, and certificates."""
    folder = place / "tree" / "work"
    for name in ("work", "home", "tmp"):
        (place / "tree" / name).mkdir(parents=True)
    (folder / "task.json").write_text('{"query": "q"}')
    script = place / "client.py"
    script.write_text(CLIENT if way.namespaces else CLIENT.replace("assert pwd", "pwd.getpwall() #"))
    inherited = inherit({**os.environ, "LANG": "C.UTF-8", "SSL_CERT_FILE": "/etc/ssl/cert.pem"})
    words = [interpreter_of(way), str(script)]
    sandbox = msgspec.structs.replace(way, needed=tuple(needed_paths(words, inherited)))
    given = variables_of(inherited, folder.parent, "http://127.0.0.1:1", "key")
    assert run(run_command(words, folder, given, 20.0, 1 << 20, sandbox)) == (0, "", "works\n")


def test_an_agent_inherits_no_secret_and_nothing_that_leads_to_another_model(tmp_path: Path) -> None:
    foreign = ("ANTHROPIC_AUTH_TOKEN", "OPENAI_ORG_ID", "CLAUDE_CODE_OAUTH_TOKEN", "CODEX_HOME")
    proxies = ("HTTP_PROXY", "https_proxy", "ALL_PROXY", "NO_PROXY")
    given = dict.fromkeys((*foreign, *proxies, "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "PATH", "LC_ALL", "MINE"), "x")
    assert set(inherit(given)) == {"PATH", "LC_ALL"}
    assert set(inherit(given, ["MINE"])) == {"PATH", "LC_ALL", "MINE"}
    for name in foreign:
        with pytest.raises(UsageError, match="finds its model by this"):
            inherit(given, [name])
    with pytest.raises(UsageError, match="no variable"):
        inherit(given, ["OTHER"])
    found = variables_of(inherit(given, ["https_proxy"]), tmp_path, "http://127.0.0.1:9", "session-1")
    assert found["OPENAI_API_KEY"] == found["ANTHROPIC_API_KEY"] == "session-1"
    assert found["NO_PROXY"] == found["no_proxy"] == "127.0.0.1,localhost"
    assert found["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:9"


def test_a_machine_that_permits_nothing_says_so() -> None:
    assert "do not train agents here that you do not trust" in Sandbox().describe()
    assert "their command has to keep them apart" in Sandbox(limited=False).describe()


JUDGES = """
import os, sys, time
def fails(session): raise RuntimeError("no luck")
def leaves(session): sys.exit(3)
def dies(session): os.abort()
def waits(session): time.sleep(60)
def nothing(session): return None
def numbers(session): return {1: 1.0}
def torn(session): return {"\\udc80": 1.0}
def cries(session): raise RuntimeError("cry \\udc80")
class Mute(Exception):
    def __str__(self): raise ValueError("no words")
def mute(session): raise Mute
def many(session): return {str(number): 1.0 for number in range(10**6)}
def prints(session): print("x" * 10**6); return 1.0
def by_manner(session): return globals()[session.output](session) if session.output else 0.5
"""


def test_a_judge_that_fails_fails_for_its_session_alone(tmp_path: Path) -> None:
    (tmp_path / "judge.py").write_text(JUDGES)
    judge, hasty = (Judge(f"{tmp_path}/judge.py:by_manner", seconds) for seconds in (60.0, 2.0))
    session = AgentSession(name="s", task=tasks_of("good")[0], folder=tmp_path)
    wrong = {"fails": "no luck", "leaves": r"SystemExit: 3 \(.*judge\.py:4", "dies": r"ended \(-6\)"}
    wrong |= {"nothing": "finite", "numbers": "names", "torn": "surrogates", "cries": "cry [?]", "many": "1048576"}
    wrong["mute"] = r"failed for task 't0': Mute \("
    try:
        with pytest.raises(InfrastructureFault, match="more than 2 s"):
            hasty.rate(msgspec.structs.replace(session, output="waits"))
        for name, reason in wrong.items():
            with pytest.raises(InfrastructureFault, match=reason):
                judge.rate(msgspec.structs.replace(session, output=name))
            assert judge.rate(session).total == 0.5
        assert judge.rate(msgspec.structs.replace(session, output="prints")).total == 1.0
    finally:
        hasty.close()
        judge.close()
    with pytest.raises(InfrastructureFault):
        judge.rate(session)


def test_a_judge_that_cannot_be_started_or_asked_or_was_edited_is_a_fault_of_the_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, task = tmp_path / "judge.py", tasks_of("good")[0]
    file.write_text("def one(session): return 1.0\n")
    session = AgentSession(name="s", task=task, folder=tmp_path)
    deep: Any = 1
    for _ in range(900):  # as deep as the proxy decodes
        deep = {"a": deep}
    call = RecordedCall(call_id="c", session_id="s", dialect="openai", request={"messages": deep})
    with closing(Judge(f"{file}:one", 60.0)) as judge:
        with monkeypatch.context() as broken:
            broken.setattr("harness1.data.apart.subprocess.Popen", Mock(side_effect=BlockingIOError(11, "too many")))
            with pytest.raises(InfrastructureFault, match="its process cannot be started: too many"):
                judge.rate(session)
        assert judge.rate(session).total == 1.0
        with pytest.raises(InfrastructureFault, match="nested too deeply"):
            judge.rate(msgspec.structs.replace(session, calls=(call,)))
        assert judge.rate(session).total == 1.0
        file.write_text("def one(session): return 2.0\n")
        with pytest.raises(InfrastructureFault, match=r"judge\.py:one was edited since the training began"):
            judge.rate(session)
        file.write_text("def one(session): return 1.0\n")
        assert judge.rate(session).total == 1.0


def test_a_session_whose_judge_fails_is_counted_and_the_others_go_on(tmp_path: Path) -> None:
    played = Played(tmp_path)
    (tmp_path / "judge.py").write_text("def even(session): return 1 / (session.task.task_id == 't1')\n")
    played.judge = Judge(f"{tmp_path}/judge.py:even", 20.0)
    broken, good = played.play(tasks_of("good", "good"))
    assert broken.status is Status.INFRA_ERROR
    assert "evaluation: " in (broken.error or "")
    assert "ZeroDivisionError" in (broken.error or "")
    assert (good.status, good.reward and good.reward.total) == (Status.COMPLETED, 1.0)


def test_what_an_agent_left_is_read_within_bounds(tmp_path: Path) -> None:
    work, other = tmp_path / "work", tmp_path / "other"
    for folder in (work, other):
        folder.mkdir()
    (other / "gold").write_text("D1")
    session = AgentSession(name="s", task=tasks_of("good")[0], folder=work)
    delivered = work / "delivered.txt"
    delivered.write_text("D1\n")
    assert delivered_f1(session) == 1.0
    delivered.unlink()
    os.link(other / "gold", delivered)
    assert delivered_f1(session) == 0.0
    for target in (other / "gold", Path("/dev/zero"), delivered, Path("/proc/self/environ"), Path("../other/gold")):
        delivered.unlink(missing_ok=True)
        delivered.symlink_to(target)
        assert session.read("delivered.txt") == ""
    delivered.unlink()
    os.mkfifo(delivered)
    assert session.read("delivered.txt") == ""
    delivered.unlink()
    with delivered.open("wb") as file:
        file.truncate(3 << 30)
    began = time.monotonic()
    assert delivered_f1(session) == 0.0
    assert time.monotonic() - began < 1.0
    for name in ("../other/gold", "/etc/passwd", "a/../../other/gold", "nul\0", "x" * 5000, ""):
        assert session.read(name) == ""


def test_any_tree_that_an_agent_left_is_removed(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    code = "import os\nfor n in range(1500):\n os.mkdir('d'); os.chdir('d')\nopen('f','w').close()"
    subprocess.run([sys.executable, "-c", code], cwd=tree, check=True)
    for at in range(20):  # names that an earlier version gave to what it moved
        (tree / f".removed-{at}" / "kept").mkdir(parents=True)
    (tree / "locked").mkdir()
    (tree / "locked" / "f").touch()
    (tree / "locked").chmod(0)
    (tree / "link").symlink_to(tmp_path.parent)
    remove(tree)
    assert not tree.exists()
    assert tmp_path.exists()


@pytest.mark.parametrize(("name", "value"), [("MOST_BYTES", 1 << 20), ("MOST_FILES", 50)])
def test_an_agent_that_fills_the_disk_is_ended(name: str, value: int, tmp_path: Path) -> None:
    """The keeper is a program of its own: its copy has another bound."""
    from harness1.agents import keeper

    changed = tmp_path / "keeper.py"
    kept = Path(str(keeper.__file__)).read_text()
    changed.write_text(kept.replace("if __name__ ==", f"{name} = {value}\nif __name__ =="))
    folder = tmp_path / "tree" / "work"
    folder.mkdir(parents=True)
    fill = "for n in range(100): open(str(n), 'w').write('x' * 40000)\nimport time; time.sleep(30)"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keeper, "__file__", str(changed))
        found = run(run_command([sys.executable, "-c", fill], folder, {}, 20.0, 1000, Sandbox()))
    assert found[1] == "disk"


CLOSED = """
import os
from harness1.agents.process import keep_plain, sessions_folder
os.getuid() or os.setuid(65534)
with sessions_folder() as within:
    work = within / "agent" / "work"
    work.mkdir(parents=True)
    for closed in (work.parent, within):
        closed.chmod(0)
        keep_plain(work)
        assert work.is_dir()
    assert within.stat().st_mode & 0o777 == 0o711
assert not within.exists()
"""


def test_an_agent_that_closes_the_folders_above_its_own_ends_no_training() -> None:
    subprocess.run([sys.executable, "-c", CLOSED], check=True)


def test_an_entry_of_path_opens_no_folder_above_it(tmp_path: Path) -> None:
    tools, own = tmp_path / ".cargo" / "bin", tmp_path / ".local" / "bin" / "agent"
    for folder in (tools, own.parent):
        folder.mkdir(parents=True)
    own.touch(0o755)
    variables = {"PATH": f"{tools}:{own.parent}:/usr/bin"}
    needed = needed_paths(["sh", "-c", "true"], variables)
    assert {str(tools), str(own.parent)} <= needed
    assert not {str(tools.parent), str(own.parent.parent)} & needed
    needed = needed_paths(["agent"], variables)
    assert str(own.parent.parent) in needed
    closed = closed_paths(tmp_path / "out", [], "judge:f1", tmp_path, needed)
    assert closed == {str(tools.parent), str(tmp_path / "out")}


def test_no_two_sessions_are_one_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("secrets.randbelow", lambda _: 0)
    assert len({free_user() for _ in range(100)}) == 100
