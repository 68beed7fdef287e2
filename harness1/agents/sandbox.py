"""What keeps the sessions of agents apart: their variables, their users, and what of this machine they see."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path

from harness1.agents.keeper import Order
from harness1.errors import UsageError
from harness1.plugins import is_own, whole_name
from harness1.records import Record

WORK, HOME, TEMPORARY = "work", "home", "tmp"  # the folders of an agent
KEPT = frozenset(
    (
        *("PATH", "LANG", "LANGUAGE", "TZ", "TERM", "PYTHONPATH", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "NODE_PATH"),
        *("SSL_CERT_FILE", "SSL_CERT_DIR", "CURL_CA_BUNDLE", "REQUESTS_CA_BUNDLE", "NODE_EXTRA_CA_CERTS"),
        *("GIT_SSL_CAINFO", "NIX_SSL_CERT_FILE", "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE"),
    )
)
"""The variables that an agent inherits, beside those of the locale: none is a secret, and none leads to a server."""
OF_MODELS = re.compile(r"(OPENAI|ANTHROPIC|CLAUDE_CODE|CODEX|AZURE_OPENAI)_.*|(NO|no)_(PROXY|proxy)")
"""Variables by which clients find their model: an agent gets those of its session alone."""
LOOPBACK = "127.0.0.1,localhost"
PATHS = re.compile(r"/[^\s:;='\"|&<>()]+")
DRAWS = count(secrets.randbelow(1 << 31))  # one for each session: none is the user of another that is still at work
SPARED_USERS = 4096  # at the end of the users that this process may become, where `nobody` is


class Sandbox(Record):
    """What keeps an agent apart from other agents and from this machine."""

    namespaces: bool = False  # it has files and processes of its own
    own_user: bool = False  # a user of its own
    limited: bool = True
    closed: tuple[str, ...] = ()  # with namespaces: files and folders that it does not see, but for what is needed
    needed: tuple[str, ...] = ()

    def order(self, words: Sequence[str], folder: Path) -> Order:
        """Return the order to start a command in the folder `work` of a tree."""
        return {
            "words": list(words),
            "folder": str(folder),
            "tree": str(folder.parent),
            "namespaces": self.namespaces,
            "uid": free_user() if self.own_user else 0,
            "limited": self.limited,
            "closed": list(self.closed),
            "needed": list(self.needed),
        }

    def describe(self) -> str:
        """Return what is kept apart, and what is not, in one line."""
        if not self.limited:
            return "agents run as this user, without sandbox and limits: their command has to keep them apart"
        if self.namespaces:
            what = "a user, files and processes" if self.own_user else "files and processes"
            return f"each agent has {what} of its own; all share the network of this machine"
        if self.own_user:
            why = "namespaces are not permitted here: agents see all command lines, and read what every user may read"
            return f"each agent is a user of its own, but {why}; keep the gold in files that only you can read"
        return (
            "neither namespaces nor other users are permitted here: agents run as this user, read its files, gold and "
            "keys included, and can disturb each other; do not train agents here that you do not trust"
        )


WAYS = (Sandbox(namespaces=True, own_user=True), Sandbox(namespaces=True), Sandbox(own_user=True), Sandbox())
"""The best first: for root, for any user where user namespaces are permitted, for root of a container, for all."""


def is_possible(way: Sandbox) -> bool:
    """Return whether it is worth trying: only root becomes another user, and other systems have no namespaces."""
    is_root = os.getuid() == 0
    return not (way.own_user and not is_root) and not (way.namespaces and sys.platform != "linux")


def free_user() -> int:
    """Return a user that nobody is, among those that this process may become."""
    try:
        lines = Path("/proc/self/uid_map").read_text().splitlines()
    except OSError:
        lines = ["0 0 65536"]
    first, _, size = map(int, lines[-1].split())
    top = min(first + size, 1 << 31) - SPARED_USERS
    return max(first + 1, top - 1 - next(DRAWS) % max(top // 4, 1))


def inherit(variables: Mapping[str, str], named: Iterable[str] = ()) -> dict[str, str]:
    """Return the variables that agents inherit: harmless ones, and those that the user names. Raise UsageError if one
    of these does not exist, or would lead an agent to another model."""
    named = list(named)
    if lost := [name for name in named if name not in variables]:
        raise UsageError(f"--env {lost[0]}: there is no variable of this name")
    if led := [name for name in named if OF_MODELS.fullmatch(name)]:
        raise UsageError(f"--env {led[0]}: an agent finds its model by this; set it in the command: env {led[0]}=... ")
    return {name: text for name, text in variables.items() if name in KEPT or name in named or name.startswith("LC_")}


def variables_of(inherited: Mapping[str, str], tree: Path, address: str, key: str) -> dict[str, str]:
    """Return all variables of an agent: it finds the model at an address by a key, and writes in its own tree."""
    places = {"HOME": f"{tree / HOME}", "TMPDIR": f"{tree / TEMPORARY}", "USER": "agent", "LOGNAME": "agent"}
    model = {"OPENAI_BASE_URL": f"{address}/v1", "ANTHROPIC_BASE_URL": address}
    keys = dict.fromkeys(("OPENAI_API_KEY", "ANTHROPIC_API_KEY"), key)
    return {**places, **inherited, **model, **keys, "NO_PROXY": LOOPBACK, "no_proxy": LOOPBACK}


def needed_paths(command: Sequence[str], variables: Mapping[str, str]) -> set[str]:
    """Return the files and folders that a command names, itself or by the variables it gets, and those beside its
    programs that belong to them: a program in `bin` needs the folder above, an entry of PATH does not."""
    environment = f"{variables['VIRTUAL_ENV']}/bin/python" if variables.get("VIRTUAL_ENV") else ""
    programs = places_in([*command, shutil.which(command[0], path=variables.get("PATH")) or "", environment])
    above = {each.parent.parent for each in programs if each.is_file() and each.parent.name in ("bin", "sbin")}
    return {str(path) for path in programs | above | places_in(variables.values())}


def places_in(texts: Iterable[str]) -> set[Path]:
    """Return the files and folders that texts name, and what they lead to."""
    named = {Path(path) for text in texts for path in PATHS.findall(text)}
    return {each for path in named if path.exists() for each in (path, path.resolve())}


def closed_paths(out: Path, datasets: Iterable[str], evaluation: str, home: Path, needed: Iterable[str]) -> set[str]:
    """Return what agents must not see: the folder of the training, the datasets with their gold, the file of the
    evaluation, and the hidden files of a home, where keys are kept, but for those that are needed as a whole."""
    found = {whole_name(evaluation).rpartition(":")[0]} if is_own(evaluation) else set()
    with suppress(OSError):
        found |= {str(each) for each in home.iterdir() if each.name.startswith(".")}
    found = {str(Path(each).resolve()) for each in found} - set(needed)
    places = (f"/{rest}" for _, slash, rest in (each.partition("/") for each in datasets) if slash)
    return found | {str(Path(each).resolve()) for each in [str(out), *places]}
