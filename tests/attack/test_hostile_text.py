"""Hostile text in titles, texts, ids, names of files and tools, reasoning and the errors of servers: every verb goes
on, no terminal obeys it, and no page takes it for markup."""

from __future__ import annotations

import json
import random
import re
import unicodedata
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tests.attack.attack import Attack
from tests.cli.commands import Command, Ended
from tests.serving import imitating

ROUNDS = 20
ACTS = (
    "\x1b[666m", "\x1b]0;PWNED\x07", "\x1b[2J", "\x9b666m", "\x90q", "\0", "\b\b\b", "\r", "\x7f", "\x85",
    "\u202e", "\u2066", "\u2028",
    "\u200b", "\ufeff", "\U000e0041", "\x1b]8;;file:///etc/passwd\x1b\\",
)  # fmt: skip
"""What a terminal would obey, or show as something else."""
MARKUP = ("[/x]", "[bold", "[red]", "[link=http://x]", "[/]", "\\[", ":smile:", "[@click=a]", "{task}", "%s")
HTML = (
    *("<img src=x onerror=pwn()>", "</script><script>pwn()</script>", "<!--", "'\"><b id=pwn>"),
    *("]]>", "&lt;", "javascript:pwn()"),
)
WORDS = ("river", "castle", "king", "=1+1", "+cmd", "東京", "é", "\n", "\t", " ")
STYLE = re.compile(r"\x1b\[(?!666|2J)[0-9;?]*[A-Za-z]|\r")
"""What the command line itself writes to a terminal: styles, and movements of a live view."""

BREAKS = re.compile(r"\s|[\0\x1c-\x1e\x85\u2028\ufeff]")
"""What the id of a judged document cannot hold, because a table of judgements is read by lines and columns."""


def acting(text: str) -> set[str]:
    kinds = ("Cc", "Cf", "Cs", "Zl", "Zp")
    return {each for each in text if unicodedata.category(each) in kinds and each not in "\n\t"}


class Draw:
    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def text(self, most: int = 12) -> str:
        parts = ACTS + MARKUP + HTML + WORDS
        return "river " + "".join(self.rng.choice(parts) for _ in range(self.rng.randint(1, most)))

    def name(self) -> str:
        return re.sub(r"[/\0]", "", self.text(4))[:60].strip() or "river"


class Page(HTMLParser):
    """The elements of a page that the planted text could have made."""

    def __init__(self) -> None:
        super().__init__()
        self.planted: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        acts = any(name.startswith("on") for name in given) or given.get("id") == "pwn"
        aimed = any((given.get(name) or "").startswith("javascript:") for name in ("href", "src"))
        if acts or aimed or tag == "img":
            self.planted.append(self.get_starttag_text() or tag)


def check_page(path: Path) -> None:
    html, page = path.read_text(encoding="utf-8"), Page()
    page.feed(html)
    assert page.planted == []
    assert "<script>pwn" not in html
    assert not acting(html), path


def corpus(draw: Draw, folder: Path) -> tuple[Path, Path]:
    """A benchmark in BEIR layout and a folder of texts, both hostile wherever text can be."""
    beir, texts = folder / f"beir {draw.name()}", folder / f"texts {draw.name()}"
    (beir / "qrels").mkdir(parents=True)
    texts.mkdir()
    ids = [f"d{number}{re.sub(BREAKS, '', draw.text(3))}" for number in range(8)]
    documents = [{"_id": doc_id, "title": draw.text(), "text": draw.text(60)} for doc_id in ids]
    queries = [{"_id": f"q{number}", "text": f"river castle {draw.text()}"} for number in range(2)]
    for name, rows in (("corpus", documents), ("queries", queries)):
        (beir / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    gold = "".join(f"{query['_id']}\t{draw.rng.choice(ids)}\t1\n" for query in queries)
    (beir / "qrels" / "test.tsv").write_text(f"query-id\tcorpus-id\tscore\n{gold}")
    for _ in range(4):
        (texts / f"{draw.name()}.md").write_text(f"# {draw.text()}\n\n{draw.text(60)}")
    return beir, texts


class Model:
    """A chat server whose tool names, arguments, reasoning and errors are hostile."""

    def __init__(self, draw: Draw) -> None:
        self.draw = draw

    def __call__(self, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        draw, kind = self.draw, self.draw.rng.random()
        if kind < 0.02:
            return 400, json.dumps({"error": {"message": draw.text()}}).encode()
        name = draw.text(3) if kind < 0.5 else draw.rng.choice(("search_corpus", "grep_corpus", "curate", "verify"))
        arguments: dict[str, Any] = (
            {"query": draw.text(), draw.text(2): draw.text()} if kind < 0.6 else {"query": draw.text()}
        )
        call = {"id": "1", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        message = {"role": "assistant", "content": draw.text(), "reasoning": draw.text(), "tool_calls": [call]}
        return 200, json.dumps({"choices": [{"message": message, "finish_reason": draw.text(1)}]}).encode()


def test_no_verb_obeys_or_trips_over_hostile_text(
    attack: Attack, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = pages = 0
    for turn in range(attack.times(ROUNDS)):
        draw, folder = Draw(attack.random(f"text {turn}")), tmp_path / str(turn)
        folder.mkdir()
        if turn % 2:
            monkeypatch.setenv("FORCE_COLOR", "1")
        else:
            monkeypatch.delenv("FORCE_COLOR", raising=False)
        model = Model(draw)
        with imitating(model) as url:
            for ended in _verbs(command, draw, folder, url):
                shown += len(ended.out + ended.err)
                for text in (ended.out, ended.err):
                    assert not acting(STYLE.sub("", text)), repr(text)
                assert "Traceback" not in ended.err
                assert ended.code in (0, 1, 2, 3)
        for page in folder.rglob("*.html"):
            pages += 1
            check_page(page)
    attack.report("hostile text", rounds=attack.times(ROUNDS), characters_shown=shown, pages=pages)


def _verbs(command: Command, draw: Draw, folder: Path, url: str) -> Iterator[Ended]:
    beir, texts = corpus(draw, folder)
    index, runs = folder / f"index {draw.name()}", folder / f"runs {draw.name()}"
    quick = ("--set", "machine.attempts=1", "--set", "machine.workers=1", "--set", "env.max_turns=5")
    yield command("index", str(texts), "--out", str(index))
    yield command("index", str(beir / "corpus.jsonl"), "--out", str(folder / "other"), "--json")
    yield command("data", "check", str(beir))
    yield command("data", "check", str(beir), "--json")
    policies = ("scripted", f"openai:{draw.name()}@{url}/v1", "openai:gpt@" + url + "/v1")
    for number, policy in enumerate(policies):
        asked = ("search", draw.text().replace("\0", ""), "--index", str(index), "--policy", policy, *quick)
        yield command(*asked, "--out", str(runs / f"search{number}"))
        yield command(*asked, "--out", str(runs / f"json{number}"), "--json")
        evaluated = ("eval", str(beir), "--policy", policy, "--cache", str(folder / "cache"), *quick)
        yield command(*evaluated, "--out", str(runs / f"eval{number}"))
    played = [str(runs / f"eval{number}") for number in range(len(policies))]
    yield command("compare", *played)
    yield command("compare", *played, "--json", "--out", str(folder / "compare.md"))
    for number, run in enumerate(played):
        yield command("replay", run)
        yield command("replay", run, "--json")
        yield command("view", run, "--out", str(folder / f"view{number}.html"))
    yield command("view", *played, str(runs / "search0"), "--out", str(folder / "all.html"))
    yield command("answer", played[0], "--answerer", f"openai:{draw.name()}@{url}/v1", *quick)
    yield command("search", "who?", "--index", url, *quick)
    for verb in (("eval",), ("replay",), ("view",), ("search",), ("config", "show", "--config"), ("data", "check"), ()):
        yield command(*verb, str(folder / draw.name()))
    yield command("config", "show", "--set", f"env.{draw.name()}=1")
    yield command("config", "show", "--set", f"machine.web.hosts=['{draw.name()}']")
