"""Datasets by name: found in the cache, fetched whole or not at all, refused if they are not as they should be."""

import hashlib
import json
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest

from harness1.cli.options import cache_home, evaluation_places, names_dataset
from harness1.config import load_config
from harness1.data import dataset_cache
from harness1.data.dataset_cache import GET, BeirSet, DatasetCache, unpack
from harness1.data.open import open_source
from harness1.errors import InfrastructureFault, UsageError
from tests.cli.commands import command_in_process
from tests.support import Ask, Reply, replying

FILES = {
    "corpus.jsonl": '{"_id": "d1", "title": "", "text": "the sun is a star"}\n',
    "queries.jsonl": '{"_id": "q1", "text": "what is the sun?"}\n',
    "qrels/test.tsv": "query-id\tcorpus-id\tscore\nq1\td1\t1\n",
}
PADDING = 300_000


def write_beir(folder: Path) -> None:
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def zipped(path: Path, name: str = "tiny", extra: dict[str, str] | None = None) -> bytes:
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in {**{f"{name}/{file}": text for file, text in FILES.items()}, **(extra or {})}.items():
            archive.writestr(file, text)
        archive.writestr(f"{name}/padding.txt", "x" * PADDING)
    return path.read_bytes()


class Host:
    """A server of one archive. `failures` are the statuses that it answers first, and `cuts` the bytes after which it
    hangs up, one for each request."""

    def __init__(self, content: bytes) -> None:
        self.content, self.cuts, self.ranges, self.failures = content, list[int](), list[str](), list[int]()

    def reply(self, ask: Ask) -> Reply:
        asked = ask.headers.get("Range", "")
        self.ranges.append(asked)
        if self.failures:
            return self.failures.pop(0), {}, b""
        start = int(asked.removeprefix("bytes=").rstrip("-")) if asked else 0
        rest = self.content[start:]
        if not rest:
            return 416, {}, b""
        told = {"Content-Range": f"bytes {start}-{len(self.content) - 1}/{len(self.content)}"} if asked else {}
        sent = rest[: self.cuts.pop(0)] if self.cuts else rest
        return 206 if asked else 200, {"Content-Length": str(len(rest)), **told}, sent


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1000)
    made = Host(zipped(tmp_path / "made.zip"))
    known = BeirSet("tiny", "a set of a test", "1 question", hashlib.md5(made.content).hexdigest())
    monkeypatch.setitem(dataset_cache.BEIR_SETS, "tiny", known)
    with replying(made.reply) as url:
        monkeypatch.setattr(dataset_cache, "MIRROR", url)
        yield made


@pytest.fixture
def here(host: Host, tmp_path: Path) -> DatasetCache:
    return DatasetCache(tmp_path / "data")


def kept(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.endswith(".lock"))


@pytest.mark.service
def test_a_named_dataset_is_fetched_once_and_opened(host: Host, here: DatasetCache) -> None:
    shown: list[tuple[str, int, int]] = []
    seen = DatasetCache(here.folder, progress=lambda *each: shown.append(each))
    for _ in range(2):
        place = seen.get("tiny")
    assert place == str(here.folder / "tiny")
    assert [task.task_id for task in open_source(place).tasks("test")] == ["q1"]
    assert len(host.ranges) == 1
    assert shown[-1] == ("fetching tiny", len(host.content), len(host.content))
    assert kept(here.folder) == ["sums.json", "tiny"]
    assert here.datasets() == ["tiny"]


@pytest.mark.service
def test_a_lost_connection_goes_on_where_it_stopped_also_in_a_later_command(host: Host, here: DatasetCache) -> None:
    host.cuts = [100_000, 50_000, 0, 0, 0, 0, 0, 0]
    with pytest.raises(InfrastructureFault, match=r"cannot be downloaded: no connection: .*\. Try again"):
        here.get("tiny")
    assert host.ranges[:4] == ["", "bytes=100000-", "bytes=150000-", "bytes=150000-"]
    assert here.find("tiny") is None
    here.get("tiny")
    assert host.ranges[-1] == "bytes=150000-"


@pytest.mark.service
@pytest.mark.parametrize("there", [b"x" * 5, b"x" * 1_000_000, None])
def test_what_was_whole_before_a_kill_is_kept_and_the_rest_of_another_version_begins_anew(
    host: Host, here: DatasetCache, there: bytes | None
) -> None:
    """A longer file than the server's has no rest: its answer is 416."""
    archive, content = here.folder / ".tiny.partial" / "tiny.zip", host.content if there is None else there
    archive.parent.mkdir(parents=True)
    archive.write_bytes(content)
    assert here.get("tiny") == str(here.folder / "tiny")
    assert host.ranges == [f"bytes={len(content)}-", ""][: 1 if there is None else 2]


@pytest.mark.service
def test_a_server_that_fails_for_a_while_is_asked_again(host: Host, here: DatasetCache) -> None:
    host.failures = [503, 500]
    here.get("tiny")
    assert len(host.ranges) == 3
    host.failures = [503] * 9
    with pytest.raises(InfrastructureFault, match="the server answers 503 Service Unavailable"):
        here.get("tiny", force=True)
    assert len(host.ranges) == 3 + 5


@pytest.mark.service
def test_an_archive_with_another_checksum_is_refused_and_forgotten(host: Host, here: DatasetCache) -> None:
    host.content = zipped(here.folder.parent / "other.zip", extra={"tiny/more.txt": "more"})
    with pytest.raises(UsageError, match="is not the archive of tiny: its MD5 is"):
        here.get("tiny")
    assert kept(here.folder) == []


@pytest.mark.service
def test_a_host_without_the_file_is_asked_once_and_the_way_by_hand_is_told(host: Host, here: DatasetCache) -> None:
    host.failures = [404]
    with pytest.raises(InfrastructureFault) as fault:
        here.get("tiny")
    told = str(fault.value)
    assert f"{dataset_cache.MIRROR}/tiny.zip cannot be downloaded: the server answers 404 Not Found" in told
    assert f"put a BEIR folder at {here.folder / 'tiny'}" in told
    assert "harness1 data import tiny FILE" in told
    assert len(host.ranges) == 1


def test_without_a_network_one_line_says_what_was_tried_and_a_folder_placed_by_hand_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    monkeypatch.setattr(dataset_cache, "MIRROR", "http://127.0.0.1:9")
    offline = DatasetCache(tmp_path)
    with pytest.raises(InfrastructureFault, match=r"127\.0\.0\.1:9/scifact\.zip cannot be downloaded: no connection"):
        offline.get("scifact")
    for name in ("scifact", "someone/mine", "cqadupstack/gis", "hotpotqa", "anything"):
        write_beir(tmp_path / name)
        assert offline.get(name) == str(tmp_path / name) if name != "anything" else offline.find(name)
    assert offline.get("beir/scifact") == str(tmp_path / "scifact")
    assert offline.place("beir/hotpotqa") == tmp_path / "beir" / "hotpotqa"
    assert offline.datasets() == ["anything", "cqadupstack/gis", "hotpotqa", "scifact", "someone/mine"]
    dataset_cache.Stage(GET, {}).write(tmp_path / "scifact", status="running")
    assert offline.find("scifact") is None


def test_an_archive_fetched_elsewhere_is_checked_and_placed(here: DatasetCache, host: Host, tmp_path: Path) -> None:
    assert here.place_archive("tiny", tmp_path / "made.zip") == str(here.folder / "tiny")
    assert (tmp_path / "made.zip").exists()
    (tmp_path / "made.zip").write_bytes(b"other")
    with pytest.raises(UsageError, match="MD5"):
        here.place_archive("tiny", tmp_path / "made.zip")
    assert here.find("tiny")


@pytest.mark.parametrize(
    ("name", "told"),
    [
        *((name, "there is no dataset") for name in ("../scifact", "/etc", "a/b/c", "a b", "")),
        ("a..b/c", "the hub refuses"),
        ("scifatc", r"there is no dataset 'scifatc'; did you mean scifact\?; `harness1 data list`"),
        ("cqadupstack", "cqadupstack holds several datasets; name one: cqadupstack/android"),
    ],
)
def test_what_is_no_name_is_refused_before_anyone_is_asked(
    name: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("httpx.Client.send", lambda *_, **__: pytest.fail("the hub was asked"))
    with pytest.raises(UsageError, match=told):
        DatasetCache(tmp_path / "data").get(name)


@pytest.mark.parametrize("name", ["../out.txt", "/out.txt", "tiny/../../out.txt", "a\\..\\out.txt", "C:out.txt"])
def test_no_name_in_an_archive_leads_out_of_the_folder(tmp_path: Path, name: str) -> None:
    zipped(tmp_path / "bad.zip", extra={name: "x"})
    with pytest.raises(UsageError, match="leads out of the folder"):
        unpack(tmp_path / "bad.zip", tmp_path / "into")
    assert not (tmp_path / "into").exists()


def test_links_and_bombs_are_not_unpacked(tmp_path: Path) -> None:
    link = zipfile.ZipInfo("tiny/link")
    link.external_attr = 0o120777 << 16
    with zipfile.ZipFile(tmp_path / "link.zip", "w") as archive:
        archive.writestr(link, "/etc/passwd")
    with pytest.raises(UsageError, match="is a link"):
        unpack(tmp_path / "link.zip", tmp_path / "into")
    with zipfile.ZipFile(tmp_path / "bomb.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("corpus.jsonl", bytes(70 << 20))
    with pytest.raises(UsageError, match="would unpack to 73 MB"):
        unpack(tmp_path / "bomb.zip", tmp_path / "into")
    (tmp_path / "torn.zip").write_bytes(zipped(tmp_path / "whole.zip")[:1000])
    with pytest.raises(UsageError, match="is damaged"):
        unpack(tmp_path / "torn.zip", tmp_path / "into")


def test_a_dataset_of_the_hub_is_verified_when_it_is_fetched_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def snapshot(repository: str, *, local_dir: Path, revision: str, **_: object) -> None:
        asked.append(revision)
        write_beir(local_dir)
        (local_dir / "corpus.jsonl").write_text(corpus)

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda self, name: SimpleNamespace(sha=sha))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    here, sha, corpus = DatasetCache(tmp_path), "first", FILES["corpus.jsonl"]
    place = Path(here.get("someone/mine"))
    assert place == tmp_path / "someone" / "mine"
    place.rename(tmp_path / "away")
    sha, corpus = "second", corpus.replace("sun", "moon")
    with pytest.raises(UsageError, match="another checksum than when they were first fetched"):
        here.get("someone/mine")
    assert asked == ["first", "first"]
    assert here.find("someone/mine") is None
    here.get("someone/mine", force=True)
    assert asked[-1] == "second"
    assert json.loads((tmp_path / "sums.json").read_text())["someone/mine"]["someone/mine"] == "second"


def test_what_exists_is_a_path_and_not_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert names_dataset("scifact")
    assert names_dataset("someone/mine")
    (tmp_path / "scifact").mkdir()
    (tmp_path / "someone").mkdir()
    for path in ("scifact", "someone/mine", "stdlib", "world:60", "hotpotqa:x", "./fiqa", "a.jsonl", "/a", "a/b/c"):
        assert not names_dataset(path)


def test_evaluation_sets_may_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    named = tmp_path / "cache" / "scifact"
    write_beir(named)
    (tmp_path / "official").mkdir()
    config = load_config(None, [f"machine.data={tmp_path / 'cache'}"])
    assert evaluation_places(["scifact", "scifact:test"], config) == (str(named), f"{named}:test")
    places = ("world:60", "world:60:test", "hotpotqa:official", "official", "official:test")
    assert evaluation_places(places, config) == places
    assert evaluation_places(None, config) == ()


def test_the_cache_is_where_the_system_keeps_caches() -> None:
    home = Path.home()
    assert cache_home({}, "linux") == home / ".cache" / "harness1"
    assert cache_home({"XDG_CACHE_HOME": "/big"}, "linux") == Path("/big/harness1")
    assert cache_home({"XDG_CACHE_HOME": "relative"}, "linux") == home / ".cache" / "harness1"
    assert cache_home({}, "darwin") == home / "Library" / "Caches" / "harness1"


def test_verbs_take_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    harness1 = command_in_process(monkeypatch, capsys)
    for name in ("scifact", "hotpotqa"):
        write_beir(tmp_path / "cache" / name)
    (tmp_path / "cache/hotpotqa/qrels/test.tsv").rename(tmp_path / "cache/hotpotqa/qrels/dev.tsv")
    data = ("--set", f"machine.data={tmp_path / 'cache'}")
    assert harness1("data", "check", "scifact", *data).code == 0
    assert json.loads(harness1("data", "list", "--json", *data).out)["cached"] == ["hotpotqa", "scifact"]
    assert "hotpotqa, scifact." in harness1("data", "list", *data).out
    assert harness1("index", "scifact", "--out", "index", *data).code == 0
    for name in ("scifact", "hotpotqa"):
        ended = harness1("eval", name, "--cache", "indexes", "--out", f"run-{name}", "--json", *data)
        assert json.loads(ended.out)["tasks"] == 1, ended.err
    assert "did you mean scifact?" in harness1("eval", "scifacts", *data).err
