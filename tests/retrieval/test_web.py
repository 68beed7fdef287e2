"""The web retriever against a search API and a page reader on this machine, slow, broken and hostile ones included."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.pretty import pretty_repr

from harness1.config import Config, load_config
from harness1.episodes.rollout import rollout
from harness1.errors import ConfigError, CorpusError, MissingExtra, UsageError
from harness1.records import ChunkId, DocId, Episode, Status, Task
from harness1.retrieval.engines.web import WebRetriever, is_public_address, may_read, open_web, page_url, resolve
from harness1.retrieval.protocol import RetrievalFault, SearchRequest, SearchResult, total_order
from tests.retrieval.test_contract import ids as found
from tests.support import Ask, Reply, Script, call, make_env, replying, search

KEYS = ("sk-search-4711", "sk-read-0815")
ADA, BYRON, TOWN = "https://example.org/ada", "https://example.org/byron", "http://en.towns.net/wiki/Missolonghi?page=2"
RESULTS = [
    {"title": "Missolonghi", "link": "HTTP://en.Towns.net:80/wiki/Missolonghi?utm_source=x&page=2#top", "position": 3},
    {"title": "Ada Lovelace", "link": ADA, "snippet": "Ada wrote the first program.", "position": 1},
    {"title": "Lord Byron", "link": BYRON, "snippet": "Byron died in Missolonghi in 1824.", "position": 2},
    {"title": "again", "link": ADA + "#life", "snippet": "The same page.", "position": 4},
    {"title": "no page", "link": "ftp://example.org/file", "snippet": "Not of the web.", "position": 5},
]
PAGES = {
    ADA: "Ada Lovelace wrote the first program. She was the daughter of Lord Byron. " * 4,
    BYRON: f"Title: Lord Byron\n\nURL Source: {BYRON}\n\nMarkdown Content:\nByron was a poet. He died in Missolonghi.",
    TOWN: "Missolonghi is a town in western Greece.",
}

Answer = Callable[[Ask], Reply]


def answering(body: bytes | str = b"", status: int = 200, after: float = 0.0, **headers: str) -> Answer:
    def answer(ask: Ask) -> Reply:
        time.sleep(after)
        return status, headers, body.encode() if isinstance(body, str) else body

    return answer


def listing(*results: Mapping[str, Any]) -> Answer:
    return answering(json.dumps({"organic": results}))


def page(ask: Ask) -> Reply:
    text = PAGES.get(ask.path.removeprefix("/read/"))
    return (404, {}, b"") if text is None else (200, {}, text.encode())


class FakeWeb:
    """A search API at `/search` and a reader at `/read/`; a test may replace either answer."""

    url = ""

    def __init__(self) -> None:
        self.searches: list[dict[str, Any]] = []
        self.reads: list[str] = []
        self.headers: list[Mapping[str, str]] = []
        self.search, self.read = listing(*RESULTS), page

    def __call__(self, ask: Ask) -> Reply:
        self.headers.append(ask.headers)
        if ask.path.startswith("/search"):
            self.searches.append(json.loads(ask.body))
            return self.search(ask)
        self.reads.append(ask.path.removeprefix("/read/"))
        return self.read(ask)

    @property
    def requests(self) -> int:
        return len(self.headers)


@pytest.fixture
def api() -> Iterator[FakeWeb]:
    web = FakeWeb()
    with replying(web) as web.url:
        yield web


def settings(url: str, *more: str) -> Config:
    endpoints = f"search_url={url}/search search_key={KEYS[0]} read_url={url}/read/ read_key={KEYS[1]}"
    overrides = [f"machine.web.{each}" for each in endpoints.split()]
    return load_config(None, [*overrides, "env.grep.on=false", "index.chunk_tokens=20", *more])


async def on_the_web(host: str) -> tuple[str, ...]:
    """A resolver by which every name is of the internet; that of this machine may have no network."""
    return ("93.184.215.14",)


async def never(host: str) -> tuple[str, ...]:
    raise AssertionError(f"{host} is resolved")


def opened(folder: Path, url: str, *more: str) -> WebRetriever:
    return open_web(str(folder / "cache"), settings(url, *more), on_the_web)


def ask(retriever: WebRetriever, query: str = "ada", k: int = 10, *exclude: str) -> SearchResult | RetrievalFault:
    request = SearchRequest(query=query, k=k, exclude=frozenset(map(ChunkId, exclude)))
    return asyncio.run(retriever.search([request]))[0]


def read(retriever: WebRetriever, url: str) -> Any:
    return asyncio.run(retriever.read(DocId(url)))


def test_a_search_finds_each_page_once_in_the_order_of_the_api(api, tmp_path) -> None:
    result = ask(opened(tmp_path, api.url))
    assert found(result) == [f"{ADA}#snippet", f"{BYRON}#snippet", f"{TOWN}#snippet"]
    first, _, third = [hit.chunk for hit in result.hits]
    assert (first.doc_id, first.index, first.title) == (ADA, 0, "Ada Lovelace")
    assert (first.text, third.doc_id, third.text) == ("Ada wrote the first program.", TOWN, "")
    assert set(result.stage_ms) == {"web"}
    assert api.searches == [{"q": "ada", "num": 10}]
    assert api.headers[0]["X-API-KEY"] == KEYS[0]
    links = [f"https://example.org/{n * 37 % 100:02d}" for n in range(100)]
    api.search = listing(*({"link": link} for link in links))
    result = ask(opened(tmp_path, api.url), "many", 100)
    scored = [(hit.chunk.chunk_id, hit.score) for hit in result.hits]
    assert total_order(scored[::-1]) == scored
    assert found(result) == [f"{link}#snippet" for link in links]


def test_seen_pages_never_come_back_and_as_many_more_are_asked_for(api, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("harness1.retrieval.engines.web.RESULTS", 2)
    retriever = opened(tmp_path, api.url)
    assert found(ask(retriever, "ada", 1)) == [f"{ADA}#snippet"]
    assert found(ask(retriever, "ada", 1, f"{ADA}#snippet", f"{ADA}#0")) == [f"{BYRON}#snippet"]
    assert found(ask(retriever, "ada", 9, *(f"{url}#snippet" for url in PAGES))) == []
    many = [f"https://example.org/{n}#snippet" for n in range(300)]
    assert len(found(ask(retriever, "ada", 9, *many))) == 3
    assert [asked["num"] for asked in api.searches] == [2, 4, 6, 100]


def test_only_pages_of_listed_hosts_are_found_and_read(api, tmp_path) -> None:
    retriever = opened(tmp_path, api.url, 'machine.web.hosts=["Towns.net"]')
    assert found(ask(retriever)) == [f"{TOWN}#snippet"]
    assert api.searches == [{"q": "ada (site:towns.net)", "num": 10}]
    assert read(retriever, ADA) == ()
    assert [chunk.doc_id for chunk in read(retriever, TOWN)] == [TOWN]
    assert api.reads == [TOWN]


ODD = """
http://127.0.0.1/ http://[::1]/ http://[::ffff:169.254.169.254]/latest http://169.254.169.254/latest/meta-data
http://2130706433/ http://0x7f.0.0.1/ http://0x7f000001/ http://127.1/ http://１２７.０.０.１/ http://127。0。0。1/
http://localhost:8080/ http://LOCALHOST./ http://admin.localhost/ http://printer.local/ http://metadata.google.internal/
http://intranet/ http://example.org@127.0.0.1/ http://user:word@example.org/ http://127.0.0.1\\.example.org/
http://%31%32%37.0.0.1/ http://example.org/../../admin http://example.org/a/%2E%2e/b http://example.org:99999/
http://router.lan/ http://nas.home.arpa/ http://intranet.corp/ http://kubernetes.default.svc/ http://x.internal/
http://[::1/ http:///etc/passwd file:///etc/passwd javascript:alert(1) example.org
"""


def test_addresses_of_this_machine_and_of_no_web_page_never_reach_the_reader(api, tmp_path) -> None:
    retriever = open_web(str(tmp_path), settings(api.url), never)
    for address in (*ODD.split(), f"http://{'a' * 64}.org/", "http://example.org/\ud800", ""):
        assert read(retriever, address) == (), address
        assert asyncio.run(retriever.get([ChunkId(address), ChunkId(f"{address}#snippet")])) == ()
        url = page_url(address)
        assert url is None or not may_read(url, ["example.org", "1", "0.0.1"]), address
    assert api.requests == 0


def test_a_local_host_is_read_where_it_is_listed_itself(api, tmp_path) -> None:
    api.read = answering("inside")
    for address, host in (("http://127.0.0.1:9/x", "127.0.0.1"), ("http://[::1]/x", "::1"), ("http://wiki/x", "wiki")):
        assert read(opened(tmp_path, api.url), address) == ()
        (chunk,) = read(opened(tmp_path, api.url, f'machine.web.hosts=["{host}"]'), address)
        assert (chunk.doc_id, chunk.text) == (address, "inside")


def test_addresses_of_one_page_are_spelled_alike_and_only_those_of_listed_domains_are_read() -> None:
    alike = {
        " HTTPS://Example.ORG:443#top ": "https://example.org/",
        "http://example.org:8080/A?utm_source=a&q=%20&UTM_x=1&r=b#c": "http://example.org:8080/A?q=%20&r=b",
        "https://de.wikipedia.org/wiki/Köln am Rhein": "https://de.wikipedia.org/wiki/K%C3%B6ln%20am%20Rhein",
        "https://BÜCHER.de./": "https://xn--bcher-kva.de/",
    }
    assert {text: page_url(text) for text in alike} == alike
    hosts = ("wikipedia.org", "en.wikipedia.org", "notwikipedia.org", "wikipedia.org.evil.com")
    assert [host for host in hosts if may_read(f"https://{host}/", ["wikipedia.org"])] == [*hosts[:2]]
    assert may_read("https://anything.com/", [])


@given(st.from_regex(r"https?://[\w.:\[\]@-]{1,30}(/[^\ud800]{0,20})?", fullmatch=True))
def test_a_normalised_address_stays_as_it_is(text) -> None:
    url = page_url(text)
    if url is not None:
        assert page_url(url) == url
        assert url.isascii() and url.isprintable() and not {"#", " "} & set(url)  # noqa: PT018


def test_a_page_is_read_in_chunks(api, tmp_path) -> None:
    chunks = read(opened(tmp_path, api.url), "https://EXAMPLE.org/ada#life")
    assert [chunk.chunk_id for chunk in chunks] == [f"{ADA}#{index}" for index in range(4)]
    assert {(chunk.doc_id, chunk.title) for chunk in chunks} == {(ADA, "")}
    assert " ".join(chunk.text for chunk in chunks) == PAGES[ADA].strip()
    assert api.headers[0]["Authorization"] == f"Bearer {KEYS[1]}"
    assert api.reads == [ADA]


WARNED = "Title: Oops\n\nWarning: Target URL returned error {}: No\n\nMarkdown Content:\nSorry."


@pytest.mark.parametrize("answer", [answering("", 404), answering("", 410), answering(WARNED.format(404))])
def test_a_page_that_does_not_exist_is_an_answer_and_is_remembered(api, tmp_path, answer) -> None:
    api.read = answer
    retriever = opened(tmp_path, api.url)
    assert read(retriever, ADA) == read(retriever, ADA) == ()
    assert api.reads == [ADA]


def test_the_head_of_a_page_gives_its_title_and_tells_of_an_error_of_the_site(api, tmp_path) -> None:
    retriever = opened(tmp_path, api.url)
    (chunk,) = read(retriever, BYRON)
    assert (chunk.chunk_id, chunk.title) == (BYRON, "Lord Byron")
    assert chunk.text == "Byron was a poet. He died in Missolonghi."
    api.read = answering(WARNED.format(503))
    assert read(retriever, ADA) == RetrievalFault("the page reader was answered 503 by the site")
    api.read = answering(b"Title: E\n\nMarkdown Content:\nWarning: Target URL returned error 503 \xe2\x82")
    (chunk,) = read(retriever, ADA)
    assert chunk.text == "Warning: Target URL returned error 503 \ufffd"


def test_a_long_page_is_cut_at_the_border_of_a_character(api, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("harness1.retrieval.engines.web.PAGE_BYTES", 100_001)
    api.read = answering("ä" * 200_000)
    (chunk,) = read(opened(tmp_path, api.url, "index.chunk_tokens=100000"), ADA)
    assert chunk.text == "ä" * 50_000


FAULTS = {
    "answered 401 (is its key right?)": answering("", 401),
    "answered 429 (too many requests)": answering("", 429),
    "answered 500": answering('{"organic": []}', 500),
    "answered 302": answering("", 302, Location="/elsewhere"),
    "failed: RemoteProtocolError": answering('{"organic": []}', **{"Content-Length": "1000"}),
    "gave no answer within 0.15 s": answering(after=0.5),
}


@pytest.mark.parametrize("message", FAULTS)
def test_what_fails_is_a_fault_that_is_not_kept(api, tmp_path, message, monkeypatch) -> None:
    monkeypatch.setattr("harness1.retrieval.engines.web.TIMEOUT_S", 0.15)
    api.search = api.read = FAULTS[message]
    retriever = opened(tmp_path, api.url)
    assert ask(retriever) == RetrievalFault(f"the search API {message}")
    assert read(retriever, ADA) == RetrievalFault(f"the page reader {message}")
    assert api.reads == [ADA], "no redirect is followed"
    api.search, api.read = listing(*RESULTS), page
    assert len(found(ask(retriever))) == 3
    assert len(read(retriever, ADA)) == 4


MALFORMED = (
    *(b"", b"<html>busy</html>", b'{"organic": [', b'{"message": "not enough credits"}', b'{"organic": [{"link": 7}]}'),
    *(b'{"organic": [{"title": "\xff"}]}', b'{"organic": [], "more": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
)


def test_an_answer_of_another_form_is_a_fault_and_never_no_results(api, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("harness1.retrieval.engines.web.PAGE_BYTES", 250_000)
    for body in MALFORMED:
        api.search = answering(body)
        assert ask(opened(tmp_path, api.url)) == RetrievalFault("the search API gave a malformed answer"), body[:50]
    api.search = answering(b'{"organic": [], "more": "' + b"x" * 300_000 + b'"}')
    assert ask(opened(tmp_path, api.url)) == RetrievalFault("the search API gave more than 250000 bytes")


def test_an_api_that_finds_nothing_has_answered_and_a_query_is_asked_as_text(api, tmp_path) -> None:
    api.search = listing()
    retriever = opened(tmp_path, api.url)
    assert found(ask(retriever)) == found(ask(retriever)) == found(ask(retriever, " ")) == []
    assert found(ask(retriever, " ada \ud800\n")) == []
    assert api.searches == [{"q": "ada", "num": 10}, {"q": "ada ?", "num": 10}]


def test_a_failing_request_does_not_fail_the_others(api, tmp_path) -> None:
    api.search = lambda asked: (500, {}, b"") if b"bad" in asked.body else listing(*RESULTS)(asked)
    requests = [SearchRequest(query=query, k=3) for query in ("ada", "bad", "byron")]
    requests.append(SearchRequest(query="ada", k=3, deadline=-1))
    answers = asyncio.run(opened(tmp_path, api.url).search(requests))
    assert [type(answer) for answer in answers] == [SearchResult, RetrievalFault, SearchResult, RetrievalFault]
    assert answers[3] == RetrievalFault("deadline")


def test_a_search_ends_at_its_deadline_and_its_late_answer_is_kept(api, tmp_path) -> None:
    api.search = answering('{"organic": [{"link": "https://example.org/late"}]}', after=0.1)
    retriever = opened(tmp_path, api.url)

    async def twice() -> list[Any]:
        first = await retriever.search([SearchRequest(query="ada", k=3, deadline=0.02)])
        return first + await retriever.search([SearchRequest(query="ada", k=3)])

    first, second = asyncio.run(twice())
    assert first == RetrievalFault("deadline")
    assert found(second) == ["https://example.org/late#snippet"]
    assert len(api.searches) == 1


def test_equal_questions_at_one_time_are_asked_once(api, tmp_path) -> None:
    api.read = answering("page", after=0.05)
    retriever = opened(tmp_path, api.url)

    async def together() -> list[Any]:
        tasks = [asyncio.create_task(retriever.read(DocId(ADA))) for _ in range(20)]
        await asyncio.sleep(0.01)
        tasks[0].cancel()
        return await asyncio.gather(*tasks[1:])

    assert [chunk.text for (chunk,) in asyncio.run(together())] == ["page"] * 19
    assert api.reads == [ADA]


def test_chunks_once_seen_are_got_again_and_a_snippet_as_it_was_first_shown(api, tmp_path) -> None:
    retriever = opened(tmp_path, api.url)
    hits = [hit.chunk for hit in ask(retriever).hits]
    api.search = listing({"link": ADA, "snippet": "another"})
    assert [hit.chunk.text for hit in ask(retriever, "again").hits] == ["another"]
    pages = [*read(retriever, ADA), *read(retriever, TOWN)]
    count = api.requests
    wanted = [pages[2], hits[1], pages[4], hits[0]]
    unseen = ("https://example.org/new", f"{BYRON}#0", f"{ADA}#9", f"{ADA}#", "no", "\ud800")
    ids = [ChunkId(unseen[0]), *(chunk.chunk_id for chunk in wanted), *map(ChunkId, unseen[1:])]
    assert list(asyncio.run(retriever.get(ids))) == wanted
    assert list(asyncio.run(opened(tmp_path, api.url, "machine.web.offline=true").get(ids))) == wanted
    narrow = asyncio.run(opened(tmp_path, api.url, 'machine.web.hosts=["towns.net"]').get(ids))
    assert list(narrow) == [wanted[2]]
    assert api.requests == count


def test_offline_the_cache_answers_byte_for_byte_and_the_rest_is_a_fault(api, tmp_path, monkeypatch) -> None:
    def answers(retriever: WebRetriever) -> list[Any]:
        return [ask(retriever).hits, read(retriever, ADA), read(retriever, "https://example.org/none")]

    before = answers(opened(tmp_path, api.url))
    count = api.requests
    monkeypatch.setitem(sys.modules, "httpx", None)
    with pytest.raises(MissingExtra, match=r"\[serve\]"):
        opened(tmp_path, api.url)
    offline = opened(tmp_path, api.url, "machine.web.offline=true", "machine.web.search_key=", "machine.web.read_key=")
    assert answers(offline) == before
    assert ask(offline, "new") == RetrievalFault("offline, and the cache has no answer to this search")
    assert read(offline, BYRON) == RetrievalFault("offline, and the cache has no answer to this page")
    assert api.requests == count


def test_a_setting_that_decides_an_answer_asks_anew(api, tmp_path, monkeypatch) -> None:
    for changes in ([], ['machine.web.hosts=["example.org"]'], [f"machine.web.search_url={api.url}/search/2"]):
        ask(opened(tmp_path, api.url, *changes))
    assert len(api.searches) == 3
    with monkeypatch.context() as patch:
        patch.setattr("harness1.retrieval.engines.web.PAGE_BYTES", 10)
        assert [chunk.text for chunk in read(opened(tmp_path, api.url), ADA)] == [PAGES[ADA][:10]]
    assert len(read(opened(tmp_path, api.url), ADA)) == 4


@pytest.mark.parametrize("damage", [lambda text: text[: len(text) // 2], lambda text: b"[" * 100_000])
def test_a_torn_file_is_asked_again_online_and_a_fault_offline(api, tmp_path, damage) -> None:
    online, offline = opened(tmp_path, api.url), opened(tmp_path, api.url, "machine.web.offline=true")
    before = read(online, ADA)
    (file,) = (tmp_path / "cache").rglob("*.json")
    file.write_bytes(damage(file.read_bytes()))
    assert isinstance(read(offline, ADA), RetrievalFault)
    assert read(online, ADA) == read(offline, ADA) == before
    assert api.reads == [ADA, ADA]


@pytest.mark.parametrize("step", ["write_bytes", "replace"])
def test_a_full_disk_is_a_fault_and_leaves_no_file(api, tmp_path, monkeypatch, step) -> None:
    def full(self: Path, target: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, step, full)
    retriever = opened(tmp_path, api.url)
    message = "the cache of the web cannot be written: No space left on device"
    assert ask(retriever) == read(retriever, ADA) == RetrievalFault(message)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_keys_are_sent_and_stand_nowhere_else(api, tmp_path) -> None:
    config = settings(api.url)
    retriever = open_web(str(tmp_path / "cache"), config, on_the_web)
    ask(retriever)
    read(retriever, ADA)
    web = config.machine.web
    told = [repr(retriever), repr(config), str(web), pretty_repr(config), repr(web.public())]
    told += [path.read_text() for path in (tmp_path / "cache").rglob("*.json")]
    assert len(told) == 10
    api.search = api.read = answering("".join(KEYS), 403)
    told += [repr(ask(retriever, "new")), repr(read(retriever, BYRON))]
    for key in KEYS:
        assert any(key in value for headers in api.headers for value in headers.values())
        assert not any(key in text for text in told)
    for url in ("nonsense?key=sk-1", "ftp://host?key=sk-1", "http://[sk-1"):
        with pytest.raises(ConfigError, match=r"machine\.web\.search_url") as error:
            opened(tmp_path, "http://h", f"machine.web.search_url={url}")
        assert "sk-1" not in str(error.value)
    alone = opened(tmp_path, "http://127.0.0.1:1", "machine.web.search_url=http://127.0.0.1:1/search?key=sk-1")
    assert ask(alone, "newer") == RetrievalFault("the search API failed: ConnectError")
    assert "env.grep.on=false" in asyncio.run(alone.grep("a", 5, 1.0)).message


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("env.grep.on=true", "env.grep.on=false"),
        ("machine.web.search_url=", "machine.web.search_url"),
        ("machine.web.read_url=", "machine.web.read_url"),
        ("machine.web.search_key='''a\nb'''", "machine.web.search_key"),
        ("machine.web.read_key=schlüssel", "machine.web.read_key"),
        ('machine.web.hosts=["https://wikipedia.org/"]', "machine.web.hosts"),
    ],
)
def test_a_setting_that_is_missing_or_unusable_is_named(tmp_path, change, told) -> None:
    with pytest.raises(ConfigError, match=told):
        opened(tmp_path, "http://127.0.0.1:1", change)


def test_the_folder_of_the_cache_is_named_and_made(tmp_path) -> None:
    config = settings("http://127.0.0.1:1")
    with pytest.raises(UsageError, match="--index web:CACHE_FOLDER"):
        open_web("", config)
    with pytest.raises(CorpusError, match="not a folder"):
        opened(tmp_path, "http://127.0.0.1:1", "machine.web.offline=true")
    open_web(str(tmp_path / "deep" / "cache"), config)
    assert (tmp_path / "deep" / "cache").is_dir()
    (tmp_path / "file").write_text("x")
    with pytest.raises(CorpusError, match="cannot make"):
        open_web(str(tmp_path / "file" / "cache"), config)
    blind = opened(tmp_path, "http://127.0.0.1:1", "machine.web.read_url=", "env.read.on=false")
    assert read(blind, ADA) == RetrievalFault("machine.web.read_url is not set")


def test_the_hash_names_how_the_web_is_asked_and_not_where_or_by_whom(tmp_path) -> None:
    info = opened(tmp_path, "http://127.0.0.1:1").info
    assert (info.unit, info.documents, info.chunks) == ("document", 0, 0)
    same = ("machine.web.search_key=other", "machine.web.offline=true")
    assert opened(tmp_path, "http://127.0.0.1:2", *same).info == info
    others = ('machine.web.hosts=["a.org"]', "index.chunk_tokens=9")
    hashes = {opened(tmp_path, "http://127.0.0.1:1", change).info.index_hash for change in others}
    assert len(hashes | {info.index_hash}) == 3


def test_an_episode_repeats_offline_when_the_web_is_gone(tmp_path) -> None:
    web = FakeWeb()
    policy = Script(search("ada"), call("read_document", doc_id="D1"), call("fan_out_search", queries=["ada", "byron"]))

    def episode(*more: str) -> Episode:
        config = settings(web.url, *more)
        env = make_env(config.env, retriever=open_web(str(tmp_path), config, on_the_web))
        return asyncio.run(rollout(env, policy, Task("task", "Where did the father of Ada Lovelace die?")))

    with replying(web) as web.url:
        online = episode()
        assert web.requests > 0
    offline = episode("machine.web.offline=true")
    assert (online.status, len(online.pool)) == (Status.COMPLETED, 3)
    for name in ("observation", "memory_hash", "context_hash"):
        assert [getattr(turn, name) for turn in offline.turns] == [getattr(turn, name) for turn in online.turns]
    assert (offline.hashes, offline.pool, offline.status) == (online.hashes, online.pool, online.status)


PUBLIC = [("93.184.215.14", "2606:2800:21f:cb07:6820:80da:af6b:8b2c"), ("64:ff9b::5db8:d70e",)]
PRIVATE = """
192.168.1.1 10.1.2.3 ::ffff:10.0.0.1 2002:7f00:1:: 64:ff9b::a9fe:a9fe 64:ff9b:1::1 100.64.0.1 169.254.169.254
fe80::1%eth0 fd00::1 fec0::1 ::127.0.0.1 0.0.0.0 ff02::1 192.0.0.192 2001:0:7f00:1::1 93.184.215.14,127.0.0.1
224.0.0.1,255.255.255.255
""".split()  # noqa: SIM905


def test_a_name_is_public_if_all_its_addresses_are_and_judged_each_time_before_its_page_is_read(api, tmp_path) -> None:
    answers: list[tuple[str, ...]] = []

    async def rebinding(host: str) -> tuple[str, ...]:
        assert host.endswith("example.org")
        if not answers:
            raise OSError("temporary failure in name resolution")
        return answers.pop(0)

    api.read = answering("", 500)
    retriever = open_web(str(tmp_path / "any"), settings(api.url), rebinding)
    for addresses in (*(tuple(each.split(",")) for each in PRIVATE), ("not an address",), ()):
        answers += [addresses, *PUBLIC]
        assert read(retriever, ADA) == (), addresses
        for _ in PUBLIC:
            assert read(retriever, ADA) == RetrievalFault("the page reader answered 500"), "what was judged is not kept"
    assert len(api.reads) == 2 * (len(PRIVATE) + 2)
    assert read(retriever, ADA) == RetrievalFault("the host example.org cannot be resolved now")
    api.read = answering("a page")
    listed = settings(api.url, 'machine.web.hosts=["example.org"]')
    assert read(open_web(str(tmp_path / "own"), listed, never), ADA), "a listed host is the user's"
    answers.append(("127.0.0.1",))
    assert read(open_web(str(tmp_path / "own"), listed, rebinding), "https://localhost.example.org/") == ()


def test_this_machine_is_not_public_to_its_own_resolver() -> None:
    for host in ("localhost", "127.0.0.1"):
        addresses = asyncio.run(resolve(host))
        assert addresses
        assert not any(map(is_public_address, addresses))
    assert asyncio.run(resolve("a" * 64 + ".org")) == ()
