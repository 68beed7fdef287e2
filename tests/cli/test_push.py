"""Folders are sent to a hub by its real client: private, without what is no part of them, and never if secret."""

import gzip
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness1.adapters.hub import _refuse_keys
from harness1.config import Config
from harness1.data import tables
from harness1.episodes.single import open_run, question_task
from harness1.errors import UsageError
from harness1.records import Episode
from harness1.runs.files import Stage
from harness1.runs.journal import finish, read_episodes
from harness1.sft.data_card import write_card
from tests.adapters.fake_hub import FakeHub, fake_hub
from tests.cli.commands import Command, run_in
from tests.data.benchmarks import official
from tests.sft.test_data_card import CARD_OF_THREE

TOKEN = "hf_ofNobodyAtAll"
TRAINED = Path("harness1/policies/trained").resolve()


@pytest.fixture(autouse=True)
def _token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with fake_hub() as made:
        yield made


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run, a dataset and a policy."""
    folder = tmp_path_factory.mktemp("push")
    run_in(folder, "eval", "world:60", "--limit", "2", "--out", "run", "--cache", "cache")
    run_in(folder, "data", "copy", "world:60", "--out", "world")
    shutil.copytree(TRAINED, folder / "policy")
    return folder


@pytest.fixture
def harness1(harness1: Command, made: Path, home: Path) -> Command:
    """The command in a copy of that folder."""
    shutil.copytree(made, home, dirs_exist_ok=True)
    return harness1


@pytest.fixture
def run(harness1: Command) -> Path:
    return Path("run")


def sent(harness1: Command, hub: FakeHub, folder: Path, *more: str) -> dict[str, Any]:
    ended = harness1("push", str(folder), "--to", "me/it", "--endpoint", hub.address, "--json", *more)
    assert ended.code == 0, ended.err
    found: dict[str, Any] = json.loads(ended.out)
    return found


def refused(harness1: Command, folder: Path, *more: str, to: str = "me/it") -> str:
    ended = harness1("push", str(folder), "--to", to, *more)
    assert ended.code == 2, ended.out
    return ended.err


def record(out: str, dataset: str, *episodes: Episode) -> Path:
    with open_run(Path(out), Config(), "driven", "index", {}, dataset=dataset) as keep:
        for episode in episodes:
            keep(episode)
    return Path(out)


def test_a_run_arrives_whole_and_private_without_what_is_no_part_of_it(
    harness1: Command, hub: FakeHub, run: Path
) -> None:
    foreign = {".stage.json.123", ".mine.json", "notes.txt", "id_rsa"}
    for name in foreign:
        (run / name).write_text("x")
    Path("elsewhere.json").write_text("{}")
    (run / "link.json").symlink_to(Path("elsewhere.json").resolve())
    dry = harness1("push", "run", "--to", "me/it", "--endpoint", hub.address, "--dry-run")
    assert all(told in dry.out for told in ("  episodes.jsonl\n", "stays  notes.txt", "for me/it, private; not sent"))
    assert (dry.code, hub.tokens) == (0, set())
    found = sent(harness1, hub, run)
    files = hub.files["datasets/me/it"]
    assert {"episodes.jsonl", "stage.json", "metrics.json", "view.html", "curated.trec"} <= files.keys()
    assert files == {name: (run / name).read_bytes() for name in found["files"]}
    assert {*foreign, "link.json"} <= set(found["left"]) - files.keys()
    assert (hub.private, hub.tokens) == ({"datasets/me/it": True}, {f"Bearer {TOKEN}"})
    assert (found["url"], found["commit"]) == (f"{hub.address}/datasets/me/it", "c0ffee")


def test_only_public_makes_or_feeds_a_public_repository(harness1: Command, hub: FakeHub, run: Path) -> None:
    sent(harness1, hub, run, "--public")
    assert hub.private == {"datasets/me/it": False}
    hub.files.clear()
    assert "me/it is public on the hub: give --public" in refused(harness1, run, "--endpoint", hub.address)
    assert not hub.files
    sent(harness1, hub, run, "--public")


def test_what_comes_from_a_benchmark_with_secret_answers_is_refused(harness1: Command) -> None:
    official.BROWSECOMP_PLUS.make(Path("bcp"))
    played = ("--split", "all", "--cache", "cache", "--limit", "1")
    assert harness1("eval", "browsecomp_plus:bcp", "--out", "direct", *played).code == 0
    assert harness1("data", "import", "browsecomp_plus", "bcp", "--out", "imported").code == 0
    assert harness1("data", "copy", "browsecomp_plus:bcp", "--out", "copied").code == 0
    assert harness1("data", "copy", "copied", "--out", "again").code == 0
    assert harness1("eval", "imported", "--out", "indirect", *played).code == 0
    shutil.rmtree("imported")
    for folder in ("direct", "copied", "again", "indirect"):
        for more in ((), ("--own-questions",)):
            told = refused(harness1, Path(folder), *more)
            assert f"{folder} comes from browsecomp_plus, whose questions and answers must not be published" in told


def test_what_no_card_tells_the_origin_of_goes_only_where_the_sender_says_that_it_is_theirs(
    harness1: Command, hub: FakeHub, run: Path
) -> None:
    Path("world").rename("mine")
    Path("mine/stage.json").unlink()
    assert harness1("data", "copy", "mine", "--out", "copied").code == 0
    assert harness1("data", "copy", "copied", "--out", "again").code == 0
    for folder in ("mine", "copied", "again"):
        assert f"no card says where mine comes from: whether {folder} may be published" in refused(
            harness1, Path(folder)
        )
        sent(harness1, hub, Path(folder), "--own-questions")
    Path("mine").rename("BrowseComp-Plus")
    assert "comes from browsecomp_plus, whose" in refused(harness1, Path("BrowseComp-Plus"), "--own-questions")


def test_cards_of_earlier_versions_tell_no_origin_but_of_what_is_made_by_the_package(
    harness1: Command, hub: FakeHub
) -> None:
    def without_origins(folder: Path) -> Path:
        card = json.loads((folder / "stage.json").read_text())
        assert card.pop("origins")
        (folder / "stage.json").write_text(json.dumps(card))
        return folder

    def recorded(out: str, dataset: str) -> Path:
        path = record(out, dataset, *list(read_episodes(Path("run")))[:1])
        old = msgspec.structs.replace(msgspec.json.decode((path / "stage.json").read_bytes(), type=Stage), origins=())
        finish(old, path / "episodes.jsonl")
        return path

    Path("world").rename("copied")
    assert "no card says where copied comes from" in refused(harness1, without_origins(Path("copied")))
    assert harness1("data", "copy", "world:60", "--out", "copied", "--force").code == 0
    for folder in (Path("copied"), recorded("generated", "world:60")):
        sent(harness1, hub, folder)
    # What lies at the path of its dataset now need not be what lay there then, unless that is secret.
    old = recorded("old", "copied")
    assert "no card says where old comes from" in refused(harness1, old)
    official.BROWSECOMP_PLUS.make(Path("bcp"))
    shutil.rmtree("copied")
    assert harness1("data", "import", "browsecomp_plus", "bcp", "--out", "copied").code == 0
    assert "browsecomp_plus, whose" in refused(harness1, old, "--own-questions")


def test_recorded_episodes_go_by_the_dataset_of_their_tasks(harness1: Command, hub: FakeHub, run: Path) -> None:
    episodes = list(read_episodes(run))
    sent(harness1, hub, record("open", "world:60", *episodes))
    Path("browsecomp_plus").mkdir()
    assert "browsecomp_plus, whose" in refused(harness1, record("secret", "browsecomp_plus", *episodes))
    assert "browsecomp_plus, whose" in refused(harness1, Path("secret"), "--own-questions")
    assert "no card says where questions comes from" in refused(harness1, record("unknown", "", *episodes))
    asking = msgspec.structs.replace(episodes[0], task=question_task("Who?"))
    told = refused(harness1, record("mixed", "world:60", *episodes, asking))
    assert f"no task of its dataset ({asking.task.task_id})" in told
    for run in ("mixed", "unknown"):
        sent(harness1, hub, Path(run), "--own-questions")
    with pytest.raises(UsageError, match="it differs in dataset"):
        record("secret", "world:60", *episodes)


def test_rows_and_policies_go_unless_their_data_card_names_what_is_secret(harness1: Command, hub: FakeHub) -> None:
    def made_from(dataset: str) -> None:
        runs = tuple(msgspec.structs.replace(each, dataset=dataset) for each in CARD_OF_THREE.runs)
        write_card(msgspec.structs.replace(CARD_OF_THREE, runs=runs), Path("rows"))
        shutil.copy("rows/card.json", "policy/data_card.json")

    Stage("sft build", {}).write(Path("rows"), status="finished")
    Path("rows/train.jsonl").write_text("{}\n")
    made_from("world:60")
    for folder in ("rows", "policy"):
        sent(harness1, hub, Path(folder))
    assert hub.files["datasets/me/it"].keys() == {"train.jsonl", "card.json", "README.md", "stage.json"}
    made_from("/gone")
    assert "no card says where gone, rows comes from" in refused(harness1, Path("rows"))
    made_from("browsecomp_plus:/gone")
    for folder in ("rows", "policy"):
        assert "browsecomp_plus, whose" in refused(harness1, Path(folder))


def test_unfinished_and_foreign_folders_are_refused(harness1: Command, run: Path) -> None:
    card = json.loads((run / "stage.json").read_text())
    (run / "stage.json").write_text(json.dumps(card | {"status": "interrupted"}))
    assert "run is not finished" in refused(harness1, run)
    (run / "stage.json").write_text(json.dumps(card | {"origins": ["hotpotqa"]}))
    assert "changed after the run had ended" in refused(harness1, run)
    Path("other").mkdir()
    assert "other is no run, no dataset" in refused(harness1, Path("other"))
    assert "no such folder" in refused(harness1, Path("absent"))
    assert "OWNER/NAME" in refused(harness1, run, to="alone")
    Path("policy/README.md").unlink()
    assert "has no README.md" in refused(harness1, Path("policy"))
    card = json.loads(Path("policy/checkpoint.json").read_text())
    Path("policy/checkpoint.json").write_text(json.dumps(card | {"remote": "tinker://x"}))
    assert "training service" in refused(harness1, Path("policy"))


def test_keys_are_never_sent(harness1: Command, hub: FakeHub, run: Path) -> None:
    def refused_with(folder: str, name: str, content: bytes) -> str:
        path = Path(folder, name)
        before = path.read_bytes() if path.is_file() else None
        path.write_bytes(content)
        told = refused(harness1, Path(folder), "--endpoint", hub.address)
        path.unlink() if before is None else path.write_bytes(before)
        assert str(path.parent) in told
        return told

    for name in ("metrics.json", "README.md"):
        assert "looks like a key" in refused_with("run", name, b'{"api_key": "abcdef123"}')
    key = b"sk-proj-" + b"a1B2" * 8
    header = b'{"__metadata__": {"by": "' + key + b'"}}'
    for folder, name, content in (
        ("run", "tasks.csv", b"task\n" + key),
        ("run", "view.html", b"<p>\\n" + key),
        ("world", "corpus.jsonl", b"x" * (tables.LINE_BYTES - 5) + b" " + key),
        ("world", "queries.jsonl.gz", gzip.compress(b"a\n" + key)),
        ("world", "qrels/test.tsv", key.decode().encode("utf-16")),
        ("world", "qrels/hf_" + "a1" * 20 + ".tsv", b""),
        ("world", "LICENSE", b"-----BEGIN OPENSSH PRIVATE KEY-----"),
        ("policy", "tokenizer_config.json", b"{" + key + b"}"),
        ("policy", "adapter_model.safetensors", len(header).to_bytes(8, "little") + header),
        ("policy", "config.toml", b'[machine.model]\nkey = "abcdefgh12"'),
        ("run", "README.md", b"OPENAI_API_KEY=abcdefgh, from https://user:hunter2@host/x"),
        ("world", "README.md", b'{"api_\\u006bey": "abcdef123"}'),
        ("world", "LICENSE", b"PuTTY-User-Key-File-3: ssh-ed25519"),
        ("world", "corpus.jsonl", b"keysk-" + b"0a1b2c3d" * 4),
        ("world", "corpus.jsonl", b"https://b0b:hunter2pass@db.corp.com/x"),
        ("world", "corpus.jsonl", b'{"url": "postgres:\\/\\/:hunter2pass@10.0.0.1"}'),
        ("world", "corpus.jsonl", b"https://" + b"a1B2" * 5 + b"@host.org"),
    ):
        assert "holds what looks like a key" in refused_with(folder, name, content)
    assert "corpus.jsonl:70001 holds" in refused_with("world", "corpus.jsonl", b"a line of 17 bytes\n" * 70_000 + key)
    assert "holds the hub's token" in refused_with("world", "corpus.jsonl", b"x" * tables.LINE_BYTES + TOKEN.encode())
    escaped = TOKEN.replace("_", "\\u005f").encode()
    assert "holds the hub's token" in refused_with("world", "corpus.jsonl", escaped)
    assert not hub.files


@pytest.mark.parametrize(
    "text",
    [
        'primary_key = "doc_001a"',
        'sort_key: "query01"',
        'pad_token = "pad_3f_end"',
        '{"eos_token": "im_end2_x"}',
        "Format per token: qwen2.5-tokenizer",
        '{"policy":"vllm:Q@http://localhost:8000","b":"c@d"}',
        "git clone https://somebody@host/x and https://host/a@b1c2d3e4f5a6b7c8d9",
    ],
)
def test_what_only_resembles_a_key_is_sent(tmp_path: Path, text: str) -> None:
    path = tmp_path / "README.md"
    path.write_text(text)
    _refuse_keys(path, strict=True)


@pytest.mark.parametrize(
    "text",
    [
        *("task-1234567890123456789", f"risk-{'0a1b' * 8}", f"desk-{'a1B2' * 8}", "norsk-2024-valg-og-norge"),
        *("https://user@host.org", "https://medium.com/@someone1234567890123456", "https://john.smith.1987@mail.org"),
        *("https://user:password@host.org", "https://user:passw0rd@api.example.com", "mongodb://root:rootpass12@mongo"),
        "Authorization: Basic abc, api_key=abcdef, sk-learn",
        *("xoxo-love-and-kisses-for-2024", "html-5a6b7c8d9e0f5a6b7c8d9e0f", "sk\\u002dlearn", f"pk_live_{'a1B2' * 8}"),
    ],
)
def test_words_and_addresses_in_documents_are_no_keys(tmp_path: Path, text: str) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text(f"{'x' * 1_048_575} {text} y")
    _refuse_keys(path, strict=False)
    path.write_text(f"{' ' * (1_048_576 - 4096 - 2)}{text}{' ' * 9999}")
    _refuse_keys(path, strict=False)


def test_only_what_is_known_to_be_needed_is_sent(harness1: Command, hub: FakeHub, run: Path) -> None:
    beside = ("keys.json", "notes.txt", "gold.csv", "index.html", "qrels/notes.txt", "optimizer.safetensors", "x.toml")
    for folder in ("run", "world", "policy"):
        for name in beside:
            Path(folder, name).parent.mkdir(exist_ok=True)
            Path(folder, name).write_text("x")
        assert set(beside) <= set(sent(harness1, hub, Path(folder))["left"])
    assert not {name for files in hub.files.values() for name in files} & set(beside)
    assert {"corpus.jsonl", "queries.jsonl", "qrels/test.tsv"} <= hub.files["datasets/me/it"].keys()
    assert {"adapter_model.safetensors", "checkpoint.json", "README.md"} <= hub.files["models/me/it"].keys()


def test_a_hub_that_refuses_or_is_gone_is_told_in_one_line(harness1: Command, hub: FakeHub, run: Path) -> None:
    hub.failing = 403
    told = refused(harness1, run, "--endpoint", hub.address)
    assert "the hub does not take me/it" in told
    assert "you sent Bearer ***" in told
    hub.failing = 500
    for address in (hub.address, "http://127.0.0.1:9"):
        ended = harness1("push", "run", "--to", "me/it", "--endpoint", address)
        assert (ended.code, ended.err.count("\n")) == (3, 1), ended.err
