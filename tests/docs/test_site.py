"""The documentation as a site: built strictly, whole, without other servers, and usable on a desk and on a phone."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag

import msgspec
import pytest
from playwright.sync_api import Browser, sync_playwright
from selectolax.lexbor import LexborHTMLParser as HTMLParser

import harness1
from harness1.cli.main import Verbs, app
from harness1.config import Config
from harness1.config.settings import notes
from tests.axe import barriers
from tests.core_alone import run_in_core

ROOT = Path(__file__).parents[2]
PAGES = ("index.html", "tutorials/search_your_documents.html", "reference/settings.html", "results.html")
"""One page of each kind: prose, code and pictures, what is generated, wide tables."""
LOADED = (("script", "src"), ("link", "href"), ("img", "src"), ("iframe", "src"))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def test_the_pages_of_the_code_are_made_in_the_core_alone() -> None:
    made = """
import sys
sys.path.insert(0, "docs/site")
from pages_of_code import commands_page, python_page, settings_page
print(commands_page(), settings_page(), python_page(), sep="\\n")
"""
    done = run_in_core(made)
    assert done.returncode == 0, done.stderr
    assert {"## harness1 eval", "### harness1 rl agents", "# Settings", "# Python"} <= {*done.stdout.splitlines()}


def trees(site: Path) -> dict[Path, HTMLParser]:
    return {path: HTMLParser(path.read_text()) for path in site.rglob("*.html") if path.name != "404.html"}


@pytest.mark.docs
def test_every_link_and_anchor_of_the_site_leads_somewhere(site: Path) -> None:
    found = trees(site)
    anchors = {path: {node.attributes["id"] for node in tree.css("[id]")} for path, tree in found.items()}
    dead = []
    for path, tree in found.items():
        for node in tree.css("a[href], link[href], img[src], script[src]"):
            link = node.attributes.get("href") or node.attributes.get("src") or ""
            target, anchor = urldefrag(unquote(link))
            if re.match(r"[a-z]+:", target):
                continue
            file = (path.parent / target).resolve() if target else path
            file = file / "index.html" if file.is_dir() else file
            lost = anchor and file in anchors and anchor not in anchors[file]
            if not file.exists() or (lost and not anchor.startswith("__")):
                dead.append(f"{path.relative_to(site)}: {link}")
    assert dead == []


@pytest.mark.docs
def test_no_page_asks_anything_of_another_server(site: Path) -> None:
    for path, tree in trees(site).items():
        for tag, attribute in LOADED:
            links = [node.attributes.get(attribute) or "" for node in tree.css(tag)]
            assert not [link for link in links if "//" in link], path
    for style in site.rglob("*.css"):
        assert not re.search(r"@import|url\(['\"]?(https?:)?//", style.read_text()), style


@pytest.mark.docs
def test_the_reference_holds_every_command_setting_and_public_name(site: Path) -> None:
    commands, settings, names = ((site / "reference" / f"{page}.html").read_text() for page in PAGES_OF_CODE)
    assert [verb for verb in verbs(app, "harness1") if f'>{verb}<a class="headerlink"' not in commands] == []
    assert [name for name in notes(Config) if f'id="{name}"' not in settings] == []
    assert [name for name in harness1.__all__[1:] if f'.{name}"' not in names] == []
    tree = HTMLParser(settings)
    facts = [" ".join(node.text().split()) for node in tree.css(".facts")]
    assert facts[0] == "an integer, at least 1 · default 40 · as published"
    assert len(facts) == sum(1 for _ in leaves(msgspec.to_builtins(Config())))


PAGES_OF_CODE = ("commands", "settings", "python")


def verbs(group: Verbs, name: str) -> Iterator[str]:
    for each, verb in group.commands.items():
        yield f"{name} {each}"
        if isinstance(verb, Verbs):
            yield from verbs(verb, f"{name} {each}")
        else:
            yield from (f"{name} {each} {below}" for below in verb.more)


def leaves(tree: dict[str, Any]) -> Iterator[Any]:
    for name, value in tree.items():
        yield from leaves(value) if isinstance(value, dict) and name not in ("quotas", "weights") else [value]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.mark.browser
@pytest.mark.parametrize(("width", "scheme"), [(1400, "light"), (420, "dark")])
def test_pages_have_no_barrier_no_error_and_nothing_beyond_the_edge(
    browser: Browser, address: str, width: int, scheme: Any
) -> None:
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    wrong: list[str] = []
    page.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("request", lambda asked: None if asked.url.startswith(address) else wrong.append(asked.url))
    for name in PAGES:
        page.goto(address + name)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), name
        assert barriers(page) == [], name
    page.close()
    assert wrong == []


@pytest.mark.browser
def test_the_search_finds_a_setting_by_a_part_of_its_name(browser: Browser, address: str) -> None:
    page = browser.new_page()
    page.goto(address)
    page.locator("input.md-search__input").click()
    page.keyboard.type("generation_reserve")
    page.locator(".md-search-result__link[href*='settings.html'][href$='#env.generation_reserve']").first.wait_for()
    page.close()
