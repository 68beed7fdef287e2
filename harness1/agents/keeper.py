"""Keep one agent: start it apart from the rest of the machine, end all its processes, and say how it ended.

A process of its own that imports the standard library alone: `python -I -S keeper.py DESCRIPTOR`. Standard input has
the `Order`; DESCRIPTOR gets lines of JSON: `errno`, `file` and `why` if the command cannot be started; last `code`,
and whether the disk is `full`, or `refused` if this machine does not permit what was ordered. SIGTERM ends the agent
politely, a second one at once. If whoever started this ends, the agent does too.
"""

import ctypes
import json
import os
import resource
import select
import signal
import stat
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, TypedDict

GRACE_S = 2.0  # between SIGTERM and SIGKILL
LOOK_S, NEAR_S = 1.0, 0.02  # between two looks at an agent, and at one that is being ended
MOST_END_S = 10.0  # that killing what does not end may take
SHARE = 0.02  # of the time, at most, to look at the disk
MOST_BYTES, MOST_FILES = 4 << 30, 100_000  # that an agent may keep on the disk
LIMITS = {"CORE": 0, "FSIZE": 1 << 30, "NOFILE": 4096}  # of each process
MOST_PROCESSES = 512  # and threads of an agent that is a user of its own
SCRATCH = ("/tmp", "/var/tmp", "/dev/shm")  # an agent has its own, of 256 MB of memory each
NEW_MOUNTS, NEW_IPC, NEW_USER, NEW_PIDS = 0x20000, 0x8000000, 0x10000000, 0x20000000
BIND, RECURSIVE, PRIVATE, INERT = 4096, 16384, 1 << 18, 2 | 4  # INERT: no devices, no setuid
DEATH_SIGNAL, DUMPABLE, DROP_BOUND, NO_NEW_PRIVILEGES, SUBREAPER = 1, 4, 24, 38, 36
MOUNT_SETATTR, HERE, WHOLE, READ_ONLY, NO_SETUID = 442, -100, 0x8000, 1, 2
LIBC = ctypes.CDLL(None, use_errno=True)


class Order(TypedDict):
    """What to keep: a command that runs in `folder`, within its `tree` of folders."""

    words: list[str]
    folder: str
    tree: str
    namespaces: bool  # mounts and processes of its own
    uid: int  # a user of its own; 0: the same
    limited: bool
    closed: list[str]  # files and folders that are not there for it, but for what is `needed` in them
    needed: list[str]


def call(name: str, *values: Any) -> None:
    """Call a function of the system; raise OSError if it fails."""
    given = [ctypes.c_ulong(value) if isinstance(value, int) else value for value in values]
    if getattr(LIBC, name)(*given) == -1:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    """Mount `source` at `target`; raise OSError if that is not permitted."""
    call("mount", source.encode(), target.encode(), kind.encode(), flags, options.encode())


def set_mounts(place: str, on: int, off: int, propagation: int = 0) -> None:
    """Switch attributes of all mounts at and below a place; raise OSError if that is not permitted."""
    given = (ctypes.c_uint64 * 4)(on, off, propagation, 0)
    how = ctypes.c_long(MOUNT_SETATTR), ctypes.c_int(HERE), place.encode(), ctypes.c_int(WHOLE)
    if LIBC.syscall(*how, ctypes.byref(given), ctypes.c_size_t(ctypes.sizeof(given))) == -1:
        raise OSError(ctypes.get_errno(), f"mount_setattr: {os.strerror(ctypes.get_errno())}")


def enter(order: Order) -> None:
    """Leave the mounts and processes of this machine; whoever may not do that as itself does it as a user that is the
    same one in a user namespace."""
    uid, gid = os.getuid(), os.getgid()
    call("unshare", NEW_MOUNTS | NEW_IPC | NEW_PIDS | (0 if order["uid"] else NEW_USER))
    if not order["uid"]:
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            Path("/proc/self", name).write_text(text)


def arrange(order: Order) -> None:
    """Make all files read-only but those of the agent, cover what it must not see, and show it its processes alone."""
    set_mounts("/", READ_ONLY | NO_SETUID, 0, PRIVATE)
    tree, uid = Path(order["tree"]).resolve(), order["uid"]
    needed = {Path(each) for each in (*order["needed"], "/etc/resolv.conf")}
    needed |= {path.resolve() for path in needed} | {tree}
    kept = {folder: seen_names(folder) for folder in private_folders(needed, tree)} if uid else {}
    kept |= {Path(each).resolve(): set() for each in [*SCRATCH, "/run", *order["closed"], str(tree.parent)]}
    for path in needed:
        for folder in set(path.parents) & kept.keys():
            kept[folder].add(path.relative_to(folder).parts[0])
    for folder in sorted(kept):
        cover(folder, kept[folder])
    set_mounts(str(tree), 0, READ_ONLY)
    if uid:
        name_user(uid, tree)
    else:
        hide_terminals()
    mount("proc", "/proc", "proc", INERT | 8)
    mount("/proc/sys", "/proc/sys", "", BIND)
    set_mounts("/proc/sys", READ_ONLY, 0)


def private_folders(needed: Iterable[Path], tree: Path) -> set[Path]:
    """Return the folders above what is needed that only their owner may enter."""
    found = set()
    for folder in {folder for path in needed for folder in path.parents} - {tree}:
        with suppress(OSError):
            if not folder.stat().st_mode & stat.S_IXOTH:
                found.add(folder.resolve())
    return found


def seen_names(folder: Path) -> set[str]:
    """Return what is in a folder and not hidden."""
    return {each.name for each in folder.iterdir() if not each.name.startswith(".")}


def cover(place: Path, names: set[str]) -> None:
    """Cover a folder, or a file, but for some names in it."""
    if not place.is_dir():
        if place.exists():
            mount("/dev/null", str(place), "", BIND)
        return
    held = {}
    for name in names:
        with suppress(OSError):
            held[name] = os.open(place / name, os.O_PATH | os.O_NOFOLLOW)
    room = "mode=1777,size=256m" if str(place) in SCRATCH else "mode=755,size=1m"
    mount("tmpfs", str(place), "tmpfs", INERT, f"{room},nr_inodes=20000")
    for name, descriptor in held.items():
        target, mode = place / name, os.fstat(descriptor).st_mode
        if stat.S_ISLNK(mode):
            target.symlink_to(os.readlink("", dir_fd=descriptor))
            continue
        target.mkdir() if stat.S_ISDIR(mode) else target.touch()
        mount(f"/proc/self/fd/{descriptor}", str(target), "", BIND | RECURSIVE)
        os.close(descriptor)


def hide_terminals() -> None:
    """Cover the terminals of the agent's user, which it could read and write; it gets its own where it may."""
    for each in Path("/dev").glob("tty?*"):
        if os.access(each, os.R_OK) or os.access(each, os.W_OK):
            cover(each, set())
    cover(Path("/dev/console"), set())
    try:
        mount("devpts", "/dev/pts", "devpts", 2 | 8, "newinstance,ptmxmode=0666,mode=0620")
    except OSError:
        cover(Path("/dev/pts"), set())


def name_user(uid: int, tree: Path) -> None:
    """Give the agent's user a name in the list of users: many programs ask for it."""
    with suppress(OSError):
        line = f"agent:x:{uid}:{uid}:agent:{tree}/home:/bin/sh\n"
        Path("/run/passwd").write_text(f"{Path('/etc/passwd').read_text().rstrip()}\n{line}")
        mount("/run/passwd", "/etc/passwd", "", BIND)


def become(order: Order, status: int) -> NoReturn:
    """Become the agent's command, within its limits and without any privilege."""
    try:
        os.setsid()
        for sent in (signal.SIGTERM, signal.SIGCHLD, signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(sent, signal.SIG_DFL)
        uid, apart = order["uid"], order["namespaces"] or bool(order["uid"])
        if order["limited"]:
            memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
            most = {**LIMITS, "DATA": memory, **({"NPROC": MOST_PROCESSES} if apart else {})}
            for name, value in most.items():
                kind = getattr(resource, f"RLIMIT_{name}")
                hard = resource.getrlimit(kind)[1]
                value = value if hard == resource.RLIM_INFINITY else min(value, hard)
                resource.setrlimit(kind, (value, value))
        if apart:
            for number in range(64):
                with suppress(OSError):
                    call("prctl", DROP_BOUND, number, 0, 0, 0)
        if uid:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
        if apart:
            call("prctl", NO_NEW_PRIVILEGES, 1, 0, 0, 0)
        os.chdir(order["folder"])
        os.execvp(order["words"][0], order["words"])
    except (OSError, ValueError) as error:
        told = {"errno": getattr(error, "errno", 0), "file": getattr(error, "filename", ""), "why": str(error)}
        os.write(status, json.dumps(told).encode() + b"\n")
    os._exit(127)


class Keeper:
    """The agent's process, and all that it starts."""

    def __init__(self, order: Order, status: int, told: list[int]) -> None:
        self._order, self._told, self._full = order, told, False
        if sys.platform == "linux":
            call("prctl", SUBREAPER, 1, 0, 0, 0)
        self._code: int | None = None
        self._wake, waking = os.pipe()
        for descriptor in (self._wake, waking):
            os.set_blocking(descriptor, False)
        signal.set_wakeup_fd(waking)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._agent = os.fork()
        if not self._agent:
            become(order, status)

    def keep(self) -> dict[str, Any]:
        """Wait for the agent's end, or end it; return how it ended."""
        look = time.monotonic() + LOOK_S
        ends = 0.0
        while not self._reap() and not self._full and len(self._told) < 2:
            if self._told and not ends:
                self._signal(signal.SIGTERM)
                ends = time.monotonic() + GRACE_S
            elif ends and time.monotonic() > ends:
                break
            if self._order["limited"] and time.monotonic() > look:
                began = time.monotonic()
                self._full = fills_disk(self._order["tree"])
                look = time.monotonic() + max(LOOK_S, (time.monotonic() - began) / SHARE)
            select.select([self._wake], [], [], NEAR_S if ends else LOOK_S)
            with suppress(BlockingIOError):
                os.read(self._wake, 4096)
        self._kill()
        return {"code": self._code if self._code is not None else -signal.SIGKILL, "full": self._full}

    def _reap(self) -> bool:
        with suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                if found[0] == self._agent:
                    self._code = os.waitstatus_to_exitcode(found[1])
        return self._code is not None

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError, PermissionError):
            if self._order["namespaces"]:
                os.kill(-1, number)  # all but this process, the first of its namespace
            else:
                os.killpg(self._agent, number)

    def _kill(self) -> None:
        """Kill what the agent started, whatever session it is in: it has become a child of this process. In a namespace
        all end with this process."""
        if self._order["namespaces"]:
            return
        self._signal(signal.SIGKILL)
        if uid := self._order["uid"]:
            if not (killer := os.fork()):
                os.setresuid(uid, uid, uid)
                with suppress(OSError):
                    os.kill(-1, signal.SIGKILL)
                os._exit(0)
            with suppress(ChildProcessError):
                os.waitpid(killer, 0)
        ends = time.monotonic() + MOST_END_S
        while time.monotonic() < ends and (children := children_of(os.getpid())):
            for child in children:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(child, signal.SIGKILL)
            self._reap()
            time.sleep(NEAR_S / 4)
        self._reap()


def children_of(parent: int) -> list[int]:
    """Return the children of a process; none where the system does not list processes as files."""
    found = []
    for each in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if int((each / "stat").read_bytes().rpartition(b")")[2].split()[1]) == parent:
                found.append(int(each.name))
    return found


def fills_disk(tree: str) -> bool:
    """Return whether files and folders take more room than an agent has, or are too deep to be counted."""
    size, count, folders = 0, 0, [tree]
    for folder in folders:
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    found = entry.stat(follow_symlinks=False)
                    size, count = size + found.st_blocks * 512, count + 1
                    if size > MOST_BYTES or count > MOST_FILES:
                        return True
                    if stat.S_ISDIR(found.st_mode):
                        folders.append(entry.path)
        except (FileNotFoundError, PermissionError):
            continue
        except OSError:
            return True
    return False


def follow(keeper: int, told: list[int]) -> int:
    """Wait for the keeper in its namespace, and pass on SIGTERM."""

    def tell(*_: object) -> None:
        with suppress(ProcessLookupError):
            os.kill(keeper, signal.SIGTERM)

    signal.signal(signal.SIGTERM, tell)
    for _ in told:
        tell()
    return os.waitstatus_to_exitcode(os.waitpid(keeper, 0)[1])


def main() -> int:
    """Carry out one order."""
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda *_: told.append(1))
    status = int(sys.argv[1])
    order: Order = json.load(sys.stdin)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.set_inheritable(status, False)
    try:
        if order["limited"] and sys.platform == "linux":
            with suppress(OSError):  # where memory runs short, the system ends agents first
                Path("/proc/self/oom_score_adj").write_text("500")
        if uid := order["uid"]:
            for folder, _, names in os.walk(order["tree"]):
                for path in (folder, *(f"{folder}/{name}" for name in names)):
                    os.chown(path, uid, uid)
        if order["namespaces"]:
            enter(order)
        if sys.platform == "linux":  # not before: a new user forgets it
            call("prctl", DEATH_SIGNAL, signal.SIGTERM, 0, 0, 0)
        if order["namespaces"]:
            if keeper := os.fork():
                return follow(keeper, told)
            call("prctl", DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
            arrange(order)
        if sys.platform == "linux":
            call("prctl", DUMPABLE, 0, 0, 0, 0)
        said = Keeper(order, status, told).keep()
    except OSError as error:
        said = {"refused": f"{error.strerror or error}"}
    os.write(status, json.dumps(said).encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
