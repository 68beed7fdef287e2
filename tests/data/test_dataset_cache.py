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
from harness1.data.dataset_cache import GET, BeirSet, DatasetCache
from harness1.data.open import open_source
from harness1.errors import InfrastructureFault, UsageError
from tests.cli.commands import command_in_process
from tests.support import Ask, Reply, replying

FILES = {
    "corpus.jsonl": '{"_id": "d1", "title": "", "text": "the sun is a star"}\n',
    "queries.jsonl": '{"_id": "q1", "text": "what is the sun?"}\n',
    "qrels/test.tsv": "query-id\tcorpus-id\tscore\nq1\td1\t1\n",
}


def write_beir(folder: Path) -> None:
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def zipped(path: Path, padding: str = "x") -> bytes:
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in FILES.items():
            archive.writestr(f"tiny/{file}", text)
        archive.writestr("tiny/padding.txt", padding * 300_000)
    return path.read_bytes()


class Host:
    """A server of one archive. `status` is what it answers instead, and `cuts` the bytes after which it hangs up, one
    for each request."""

    def __init__(self, content: bytes) -> None:
        self.content, self.cuts, self.ranges, self.status = content, list[int](), list[str](), 0

    def reply(self, ask: Ask) -> Reply:
        asked = ask.headers.get("Range", "")
        self.ranges.append(asked)
        if self.status:
            return self.status, {}, b""
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
    assert kept(here.folder) == here.datasets() == ["tiny"]


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
def test_what_was_whole_before_a_kill_is_kept(host: Host, here: DatasetCache) -> None:
    archive = here.folder / ".tiny.partial" / "tiny.zip"
    archive.parent.mkdir(parents=True)
    archive.write_bytes(host.content)
    assert here.get("tiny") == str(here.folder / "tiny")
    assert host.ranges == [f"bytes={len(host.content)}-"]


@pytest.mark.service
def test_an_archive_with_another_checksum_is_refused_and_forgotten(host: Host, here: DatasetCache) -> None:
    host.content = zipped(here.folder.parent / "other.zip", "y")
    with pytest.raises(UsageError, match="is not the archive of tiny: its MD5 is"):
        here.get("tiny")
    assert kept(here.folder) == []


@pytest.mark.service
def test_a_host_without_the_file_is_asked_once_and_the_way_by_hand_is_told(host: Host, here: DatasetCache) -> None:
    host.status = 404
    with pytest.raises(InfrastructureFault) as fault:
        here.get("tiny")
    told = str(fault.value)
    assert f"{dataset_cache.MIRROR}/tiny.zip cannot be downloaded: the server answers 404 Not Found" in told
    assert f"put a BEIR folder at {here.folder / 'tiny'}" in told
    assert len(host.ranges) == 1


def test_a_folder_placed_by_hand_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = DatasetCache(tmp_path)
    for name in ("scifact", "someone/mine", "cqadupstack/gis", "hotpotqa", "anything"):
        write_beir(tmp_path / name)
        assert cache.find(name) == str(tmp_path / name)
    assert cache.get("beir/scifact") == str(tmp_path / "scifact")
    assert cache.place("beir/hotpotqa") == tmp_path / "beir" / "hotpotqa"
    assert cache.datasets() == ["anything", "cqadupstack/gis", "hotpotqa", "scifact", "someone/mine"]
    dataset_cache.Stage(GET, {}).write(tmp_path / "scifact", status="running")
    assert cache.find("scifact") is None


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


def test_a_dataset_of_the_hub_is_put_in_its_place_with_its_revision_and_replaced_by_force(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda self, name: SimpleNamespace(sha=sha))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, local_dir, **__: write_beir(local_dir))
    here, sha = DatasetCache(tmp_path), "first"
    place = Path(here.get("someone/mine"))
    assert place == tmp_path / "someone" / "mine"
    sha = "second"
    for force, revision in ((False, "first"), (True, "second")):
        here.get("someone/mine", force=force)
        assert json.loads((place / "stage.json").read_text())["hashes"]["someone/mine"] == revision
    monkeypatch.delitem(FILES, "corpus.jsonl")
    with pytest.raises(UsageError, match="is not in BEIR layout"):
        here.get("someone/other")
    assert kept(tmp_path) == ["someone"]


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
    for name in ("scifact", "hotpotqa"):
        ended = harness1("eval", name, "--cache", "indexes", "--out", f"run-{name}", "--json", *data)
        assert json.loads(ended.out)["tasks"] == 1, ended.err
    assert "did you mean scifact?" in harness1("eval", "scifacts", *data).err
