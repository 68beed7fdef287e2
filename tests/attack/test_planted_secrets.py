"""Secrets planted wherever an address or a key is taken: no output holds one, in any spelling, whatever the verb and
whatever a server answers."""

from __future__ import annotations

import base64
import json
import os
import random
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, quote_plus

import msgspec
import pytest

from harness1.config import load_config
from harness1.retrieval import open as opening
from harness1.rows.calls import recording
from harness1.serve.upstreams import ChatUpstream
from tests.attack.attack import Attack
from tests.cli.commands import Command, Ended
from tests.serving import imitating

ROUNDS = 24
WORLD = "world:60"
ALPHABET = string.ascii_letters + string.digits + "-_.~!$'()*,;"
QUOTED = ALPHABET + "@/?#:&= %+"


class Planted:
    """Secrets of one round, and the search for them."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.secrets: list[str] = []

    def secret(self, alphabet: str = ALPHABET) -> str:
        """Return a new secret; one in an alphabet that addresses do not take as it is comes quoted."""
        made = "".join(self._rng.choices(alphabet, k=self._rng.randint(8, 40))).strip("'")
        self.secrets.append(made)
        return made if alphabet is ALPHABET else quote(made, safe="")

    def any(self) -> str:
        return self.secret(self._rng.choice((ALPHABET, QUOTED)))

    def found_in(self, text: str) -> list[str]:
        return [secret for secret in self.secrets if any(form in text for form in _spellings(secret))]


def _spellings(secret: str) -> set[str]:
    in_json = json.dumps(secret)[1:-1]
    plain = base64.b64encode(secret.encode()).decode().rstrip("=")
    return {secret, quote(secret), quote(secret, safe=""), quote_plus(secret), in_json, plain}


def written(folder: Path) -> Iterator[tuple[Path, str]]:
    for place, _, names in os.walk(folder):
        for name in names:
            path = Path(place) / name
            yield path, f"{path} {path.read_bytes().decode('utf-8', 'replace')}"


def settings(planted: Planted, url: str) -> dict[str, str]:
    host = url.removeprefix("http://")
    return {
        "machine.model.key": planted.secret(),
        "machine.verifier.key": planted.secret(),
        "machine.web.search_key": planted.secret(),
        "machine.web.read_key": planted.secret(),
        "machine.web.search_url": f"http://{planted.any()}@{host}/search?n=1&key={planted.any()}",
        "machine.web.read_url": f"http://user:{planted.any()}@{host}/read/",
        "machine.verifier.url": f"http://user:{planted.any()}@{host}/v1?key={planted.any()}",
        "machine.fleet.address": f"ray://{planted.any()}@{host}",
    }


def config_file(folder: Path, values: dict[str, str]) -> Path:
    lines = [f"{name} = {value if value.startswith('[') else json.dumps(value)}" for name, value in values.items()]
    (folder / "secret.toml").write_text("\n".join(lines))
    return folder / "secret.toml"


def repeating(method: str, path: str, body: bytes) -> tuple[int, bytes]:
    return 500 if len(path) % 2 else 403, json.dumps({"error": f"{method} {path}: {body.decode()[:500]}"}).encode()


def test_no_output_holds_a_planted_secret(
    attack: Attack, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, cache = opening._open, tmp_path / "cache"
    assert command("index", WORLD, "--out", str(tmp_path / "index")).code == 0
    monkeypatch.setattr(opening, "_open", lambda prefix, rest, config: real(*_local(prefix, rest, tmp_path), config))
    planted_in = files = commands = 0
    with imitating(repeating) as url:
        for turn in range(attack.times(ROUNDS)):
            out = tmp_path / f"out{turn}"
            out.mkdir()
            planted = Planted(attack.random(f"secrets {turn}"))
            for number, ended in enumerate(_verbs(command, planted, url, out, cache, turn)):
                commands += 1
                assert planted.found_in(ended.out + ended.err) == [], f"command {number}: {ended}"
            for path, text in written(out / "runs"):
                files += 1
                assert planted.found_in(text) == [], path
            planted_in += len(planted.secrets)
    attack.report("secrets", planted=planted_in, commands=commands, files_searched=files)


def _local(prefix: str | None, rest: str, folder: Path) -> tuple[str | None, str]:
    """Let the address of a server with a good password name the index folder."""
    return (None, str(folder / "index")) if prefix == "https" and "good.host" in rest else (prefix, rest)


def _verbs(command: Command, planted: Planted, url: str, out: Path, cache: Path, turn: int) -> Iterator[Ended]:
    host, runs = url.removeprefix("http://"), out / "runs"
    values = settings(planted, url)
    given: list[Any] = ["--config", config_file(out, values)]
    if turn % 2:
        given = [word for name, value in values.items() for word in ("--set", f"{name}={value}")]
    quick = ("machine.attempts=1", "machine.call_deadline_s=1", "machine.workers=1")
    given = [str(word) for word in given] + [word for each in quick for word in ("--set", each)]
    evaluate = ("eval", WORLD, "--limit", "2", "--cache", str(cache), *given)
    engine = f"https://root:{planted.any()}@good.host:19530#books"
    yield command("config", "show", *given)
    yield command("config", "show", "--json", *given)
    first = command(*evaluate, "--index", engine, "--out", str(runs / "engine"))
    assert first.code == 0, first.err
    yield first
    again = command(*evaluate, "--index", engine.replace("root:", "root:other"), "--out", str(runs / "engine"))
    assert again.code == 0, "another password is the same run"
    yield again
    recorded = command("replay", str(runs / "engine"), "--live")
    assert (recorded.code, "--index" in recorded.err) == (2, True), recorded.err
    yield recorded
    live = command("replay", str(runs / "engine"), "--live", "--index", engine)
    assert live.code == 0, live.err
    yield live
    yield command("view", str(runs / "engine"), "--out", str(runs / "view.html"))
    for number, wrong in enumerate(_refused(planted, host)):
        yield command("search", "who?", "--index", wrong, "--out", str(runs / f"s{number}"), *given)
    yield command("search", "who?", "--index", f"web:{runs / 'pages'}", "--out", str(runs / "web"), *given, *_WEB)
    model = f"openai:gpt@http://user:{planted.any()}@{host}/v1"
    for policy in (
        model,
        model.replace("user:", ""),
        f"openai:gpt@{url}/v1?key={planted.any()}",
        f"openai:gpt@{url}/v1",
    ):
        yield command(*evaluate, "--policy", policy, "--out", str(runs / "policy"))
        yield command("answer", str(runs / "engine"), "--answerer", policy, "--judge", model, *given)
    judge = ("--set", "env.verification.judge=language_model", "--set", "env.verification.model=gpt")
    yield command(*evaluate, *judge, "--out", str(runs / "judged"))
    wrong = planted.secret()
    yield command("config", "show", "--set", f"machine.web.kee={wrong}")
    yield command("config", "show", "--set", f"machine.web.key.x={wrong}", "--set", f"machine.web.hosts={wrong}")
    upstream = ChatUpstream(f"http://user:{planted.any()}@{host}/v1", "", load_config())
    with recording(runs / "proxy", upstream.inputs):
        yield Ended(0, msgspec.json.encode(upstream.inputs).decode(), repr(vars(upstream)))


_WEB = ("--set", "env.grep.on=false")


def _refused(planted: Planted, host: str) -> list[str]:
    return [
        f"http://user:{planted.any()}@{host}",
        f"http://{host}?key={planted.any()}",
        f"http://user:a/{planted.secret()}@{host}",
    ]
