"""Files may hold anything: a reader yields documents that can be stored, or one of our errors, in bounded time."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections import Counter
from collections.abc import Callable, Iterator
from functools import reduce
from ipaddress import IPv4Address
from pathlib import Path

import msgspec
import pytest
from hypothesis import strategies as st

from harness1.config import load_config
from harness1.data.apart import ReadApart
from harness1.data.contents import Unreadable
from harness1.data.open import open_source
from harness1.errors import UsageError
from harness1.records import DocId
from harness1.retrieval.engines.web import is_public_address, open_web
from harness1.retrieval.protocol import RetrievalFault, SearchRequest, SearchResult
from tests.attack.attack import Attack
from tests.data import hostile, test_formats
from tests.data.benchmarks import official
from tests.retrieval.test_web import FakeWeb, answering, on_the_web, settings
from tests.support import replying

LONGEST = 200_000
"""Bytes of a mutated file: enough to show a quadratic reader, and little enough to try thousands."""

JSONL = b'{"_id": "a", "title": "T", "text": "x y", "_chunks": [{"chunk_id": "a#0", "start": 0, "end": 3}]}\n{"id": 7, "contents": "z\\u00e4"}\n'  # fmt: skip # noqa: E501
QUERIES = b'{"_id": "q", "text": "who?", "metadata": {"answer": "x", "facts": [["a"]], "answer_facts": [0]}}\n'
QRELS = b"query-id\tcorpus-id\tscore\nq\ta\t1\n"
DOCS = b"<DOC>\n<DOCNO>a</DOCNO>\n<TI>T</TI>\n<TEXT>\n<P>x</P> y\n</TEXT>\n</DOC>\n<DOC>\n<DOCNO>b</DOCNO>z\n</DOC>\n"
TOPICS = b"<top>\n<num> Number: q\n<title> who?\n<desc> x\n</top>\n"
HTML = b"<!doctype html><title>T &amp; t</title><style>p {}</style><p class='a'>x<b>y</b><pre>a\nb</pre><!-- c --><table><tr><td>z</table>"  # noqa: E501
MARKDOWN = "# Title #\n\n* an item\n\nümlaut".encode()
TOML = b'[env]\nmax_turns = 4\n[env.dedup]\non = false\n[machine.web]\nhosts = ["a.org"]\n[reward]\nrecipe = "paper"\n'
FOUND = json.dumps({"organic": [{"title": "T", "link": "https://a.org/x#y", "snippet": "x", "position": 1}]}).encode()
PAGE = b"Title: T\n\nURL Source: https://a.org/\nWarning: Target URL returned error 404\n\nMarkdown Content:\nx y. z"

HOSTILE = (
    *(b"\0", b"\xff", b"\xed\xa0\x80", b"\\ud800", b"\xef\xbb\xbf", b"\r", b"\n", b"\t", b'"', b"'", b"\x1f\x8b\x08"),
    *(b"9" * 5000, b"-", b"1e999", b"NaN", b"0x" + b"f" * 5000, b"[" * 5000, b'{"a":' * 2000, b"a." * 2000, b"[[a]]"),
    b"1" + b"0" * 400,
    *(b"&#" + b"9" * 5000, b"<!--" * 500, b"</" * 500, b"<?" * 500, b"<a>" * 500, b"<script>", b"<title>", b"]]>"),
    *(b"<DOC>\n", b"</DOC>\n", b"<top>\n", b"<TEXT>", b"</TEXT>", b"<" + b"a" * 5000, b"# " + b" " * 5000 + b"x"),
    *(b"/Filter /Fl ", b"<<" * 1000, b"4 0 R ", b"stream\n", b"endobj\n", b"/Length 99999999 ", b"/Kids [2 0 R]"),
)
places, sizes = st.integers(0, 1 << 20), st.integers(0, 64)
changes = st.lists(
    st.one_of(
        st.tuples(st.just("flip"), places, st.integers(1, 255)),
        st.tuples(st.just("delete"), places, sizes),
        st.tuples(st.just("repeat"), places, sizes, st.integers(2, 2000)),
        st.tuples(st.just("insert"), places, st.one_of(st.sampled_from(HOSTILE), st.binary(max_size=8))),
        st.tuples(st.just("truncate"), places),
    ),
    min_size=1,
    max_size=6,
)


def changed(data: bytes, change: tuple) -> bytes:
    """The data after one change, at a place that is counted round."""
    at = change[1] % (len(data) + 1)
    before, after = data[:at], data[at:]
    match change[0], *change[2:]:
        case "flip", bits:
            return before + bytes(byte ^ bits for byte in after[:1]) + after[1:]
        case "delete", size:
            return before + after[size:]
        case "repeat", size, times:
            return (before + after[:size] * times + after[size:])[:LONGEST]
        case "insert", fragment:
            return before + fragment + after
    return before


def mutated(data: bytes) -> st.SearchStrategy[bytes]:
    return changes.map(lambda found: reduce(changed, found, data))


def read_all(place: str, *, leave_out: bool | None) -> Iterator[object]:
    source = open_source(place, leave_out=leave_out)
    yield from source.documents()
    for split in source.splits:
        yield from source.tasks(split)


class Trial:
    """Runs readers, counts how they end, and fails if one raises anything but our own errors."""

    def __init__(self) -> None:
        self.ends = Counter[str]()

    def run(self, read: Callable[[], Iterator[object]]) -> None:
        self.ends["inputs"] += 1
        try:
            with hostile.ends():
                for found in read():
                    msgspec.json.encode(found)
                    self.ends["yielded"] += 1
        except (UsageError, Unreadable) as error:
            self.ends["refused" if str(error).strip() else "without a word"] += 1
        assert not self.ends["without a word"]


CORPORA: dict[str, dict[str, bytes]] = {
    "jsonl": {"docs.jsonl": JSONL},
    "jsonl.gz": {"docs.jsonl.gz": gzip.compress(JSONL, mtime=0)},
    "beir": {"corpus.jsonl": JSONL, "queries.jsonl": QUERIES, "qrels/test.tsv": QRELS},
    "trec": {"docs.trec": DOCS, "topics.txt": TOPICS, "qrels.txt": b"q 0 a 1\nq 0 b 0\n"},
    "trec tables": {"docs.trec": DOCS, "topics.tsv": b'q\twho "?"\n', "qrels.txt": b"q 0 a 1\n"},
    "markdown": {"a.md": MARKDOWN},
    "text": {"a.txt": MARKDOWN},
}


@pytest.mark.parametrize("name", CORPORA)
def test_a_mutated_corpus_is_read_or_refused(attack: Attack, tmp_path: Path, name: str) -> None:
    files, trial = CORPORA[name], Trial()
    for file, data in files.items():
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_bytes(data)
    place = str(tmp_path / next(iter(files)) if name.startswith("jsonl") else tmp_path)

    def survives(drawn: tuple[str, bytes, bool | None]) -> None:
        file, data, leave_out = drawn
        try:
            (tmp_path / file).write_bytes(data)
            trial.run(lambda: read_all(place, leave_out=leave_out))
        finally:
            (tmp_path / file).write_bytes(files[file])

    drawn = st.one_of([
        st.tuples(st.just(file), mutated(data), st.sampled_from([None, True, False])) for file, data in files.items()
    ])  # fmt: skip
    attack.try_all(drawn, survives, 2_000)
    attack.report(f"inputs {name}", **trial.ends)


WHOLE = {kind: data for kind, (data, *_) in test_formats.KINDS.items()}
WHOLE |= {".html": HTML, ".pdf": hostile.page(b"BT /F1 12 Tf 2 5 Td (Hello) Tj ET"), ".mbox": b"From a 2020\n" * 5}


@pytest.mark.parametrize("kind", WHOLE)
def test_a_mutated_file_of_any_kind_is_read_or_left_out(attack: Attack, kind: str) -> None:
    trial = Trial()

    def survives(data: bytes) -> None:
        trial.run(lambda: iter(apart.read(kind, data)))

    with ReadApart() as apart:
        attack.try_all(mutated(WHOLE[kind]), survives, 2_000)
    attack.report(f"inputs {kind[1:]}", **trial.ends)


@pytest.mark.parametrize("benchmark", [official.HOTPOTQA, official.FRAMES, official.SEC], ids=lambda each: each.name)
def test_a_mutated_benchmark_is_read_or_refused(attack: Attack, tmp_path: Path, benchmark: official.Official) -> None:
    trial = Trial()
    benchmark.make(tmp_path)
    files = {path: path.read_bytes() for path in sorted(tmp_path.rglob("*")) if path.is_file()}

    def survives(drawn: tuple[Path, bytes]) -> None:
        try:
            drawn[0].write_bytes(drawn[1])
            trial.run(lambda: read_all(f"{benchmark.name}:{tmp_path}", leave_out=None))
        finally:
            drawn[0].write_bytes(files[drawn[0]])

    drawn = st.one_of([st.tuples(st.just(path), mutated(data)) for path, data in files.items()])
    attack.try_all(drawn, survives, 100 if benchmark is official.SEC else 1_000)  # each starts the reader of Parquet
    attack.report(f"inputs {benchmark.name}", **trial.ends)


FILES: dict[str, tuple[bytes, Callable[[Path], Iterator[object]]]] = {
    "configuration": (TOML, lambda path: iter([load_config(path, None)])),
    "overrides": (
        b"env.compression.sentences=5",
        lambda path: iter([load_config(None, [path.read_bytes().decode("utf-8", "surrogateescape")])]),
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_a_mutated_file_is_read_or_refused(attack: Attack, tmp_path: Path, name: str) -> None:
    (data, read), trial, path = FILES[name], Trial(), tmp_path / "file.toml"

    def survives(changed_data: bytes) -> None:
        path.write_bytes(changed_data)
        trial.run(lambda: read(path))

    attack.try_all(mutated(data), survives, 1_000)
    attack.report(f"inputs {name}", **trial.ends)


def test_a_mutated_answer_of_the_web_is_read_or_a_fault(attack: Attack, tmp_path: Path) -> None:
    ends, server = Counter[str](), FakeWeb()

    def survives(drawn: tuple[bytes, bytes]) -> None:
        ends["inputs"] += 2
        server.search, server.read = map(answering, drawn)
        web = open_web(str(tmp_path / str(ends["inputs"])), settings(server.url), on_the_web)

        async def ask() -> None:
            (found,) = await web.search([SearchRequest(query="x", k=3)])
            page = await web.read(DocId("https://a.org/x"))
            assert isinstance(found, SearchResult | RetrievalFault)
            msgspec.json.encode((found, page))
            ends["faults"] += isinstance(found, RetrievalFault) + isinstance(page, RetrievalFault)

        with hostile.ends():
            asyncio.run(ask())

    with replying(server) as server.url:
        attack.try_all(st.tuples(mutated(FOUND), mutated(PAGE)), survives, 500)
    attack.report("inputs web", **ends)


LOCAL = ("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.0.0.0/24",
         "192.168.0.0/16", "198.18.0.0/15", "224.0.0.0/4", "240.0.0.0/4")  # fmt: skip
PREFIXES = ("::ffff:", "::", "64:ff9b::", "64:ff9b:1::", "::ffff:0:", "fe80::", "fd00::", "ff02::")


def test_no_disguise_makes_a_local_address_public(attack: Attack) -> None:
    disguises = ("{}", *(f"{each}{{}}" for each in PREFIXES))

    def is_refused(drawn: tuple[IPv4Address, str]) -> None:
        address, disguise = drawn
        assert not is_public_address(disguise.format(address))
        assert not is_public_address(f"2002:{int(address) >> 16:x}:{int(address) & 0xFFFF:x}::1")

    inside = st.one_of([st.ip_addresses(v=4, network=network) for network in LOCAL])
    attack.try_all(st.tuples(inside, st.sampled_from(disguises)), is_refused, 4_000)
    attack.report("inputs addresses", inputs=attack.times(4_000))
