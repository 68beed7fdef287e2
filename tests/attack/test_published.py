"""What must not be published, on its way to the hub through copies, runs, tasks, moves and hostile cards: whatever lies
between, it is refused, in one line."""

from __future__ import annotations

import gzip
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest

from harness1.adapters.hub import pack
from harness1.config import Config
from harness1.data.benchmarks import BENCHMARKS
from harness1.data.datasets import copy_dataset, import_benchmark
from harness1.data.indexing import ensure_index
from harness1.data.open import open_source
from harness1.data.origins import known_origins, origins_of
from harness1.episodes.single import open_run
from harness1.errors import CorpusError, HarnessError, UsageError
from harness1.http.model_endpoint import Completion, Messages
from harness1.models.checkpoint import CHECKPOINT, Checkpoint
from harness1.models.fetch import BUNDLED
from harness1.models.spec import policy_folder, policy_origins
from harness1.plain import find_key
from harness1.records import Episode, Hashes, Status, StopReason, Task
from harness1.runs.files import read_json, write_json
from harness1.tasks.make import write_tasks
from harness1.tasks.questions import QuestionWriter
from harness1.training import new_model
from harness1.training.new_model import NewModel, make_model
from tests.attack.attack import Attack
from tests.data.benchmarks import official

CHAINS, KEYS = 60, 400
SECRET_WORDS = "must not be published"
Step = Callable[[Path, Path], Path]


def copied(source: Path, out: Path) -> Path:
    copy_dataset(str(source), out)
    return out


def copied_without_a_card(source: Path, out: Path) -> Path:
    shutil.copytree(source, out)
    (out / "stage.json").unlink(missing_ok=True)
    return out


def moved(source: Path, out: Path) -> Path:
    return source.rename(out)


def linked(source: Path, out: Path) -> Path:
    out.symlink_to(source.resolve())
    return out


def nested(source: Path, out: Path) -> Path:
    """A copy within a dataset that anybody may have."""
    copy_dataset("world:60", out)
    return copied(source, out / "inside")


def corpus_alone(source: Path, out: Path) -> Path:
    """The one file of the documents, and the questions beside it by hand."""
    copy_dataset(str(source / "corpus.jsonl"), out)
    shutil.copy(source / "queries.jsonl", out)
    return out


def named_like_another(source: Path, out: Path) -> Path:
    """In a folder whose name is a dataset's."""
    return copied(source, out.with_name(f"{'stdlib' if len(out.name) % 2 else 'hotpotqa'}:{out.name}"))


def named_like_a_world(source: Path, out: Path) -> Path:
    out.mkdir()
    return copied(source, out / "world:60")


STEPS: tuple[Step, ...] = (
    *(copied, copied_without_a_card, moved, linked, nested, corpus_alone),
    *(named_like_another, named_like_a_world),
)


def played(source: Path, out: Path) -> Path:
    with open_run(out, Config(), "driven", "index", {}, dataset=str(source)) as keep:
        keep(EPISODE)
    return out


def made(source: Path, out: Path) -> Path:
    ensure_index(open_source(str(source)), out.with_name(f"{out.name}.index"), Config())
    write_tasks(open_source(str(source)), str(out.with_name(f"{out.name}.index")), out, Config(), count=2, seed=0)
    return out


def trained(source: Path, out: Path) -> Path:
    out.mkdir()
    (out / "README.md").write_text("a policy")
    origins = origins_of(source)
    write_json(out / CHECKPOINT, Checkpoint(format="", counter="", env={}, env_hash="", base="", origins=origins))
    return out


ENDS: tuple[Step, ...] = (copied, played, made, trained, lambda source, out: source)


TASK = Task("query", "Who?", "test")
HASHES = Hashes(env="", policy="", index="")
EPISODE = Episode(episode_id="e", task=TASK, stop_reason=StopReason.END_SEARCH, status=Status.COMPLETED, hashes=HASHES)


def refusal(folder: Path, *, own: bool = False) -> str:
    """Why a folder is not sent; empty if it would be."""
    try:
        pack(folder, own_questions=own)
    except HarnessError as error:
        return str(error)
    return ""


def test_a_fetched_model_is_of_known_origin(tmp_path: Path) -> None:
    for model in BUNDLED:
        model.stage.write(tmp_path / model.name, status="finished")
        assert origins_of(tmp_path / model.name) == (model.package,)


@pytest.mark.parametrize(
    "origin",
    [
        *("browsecomp_plus:/data/x", " browsecomp_plus", "Tevatron/browsecomp-plus/"),
        *("Org/my-browsecomp_plus", "Org/BrowseCompPlus", "\uff42rowsecomp\uff3fplus"),
    ],
)
def test_no_spelling_of_an_origin_publishes_a_secret_benchmark(tmp_path: Path, origin: str) -> None:
    copy_dataset("world:60", tmp_path / "mine")
    card = json.loads((tmp_path / "mine/stage.json").read_text())
    (tmp_path / "mine/stage.json").write_text(json.dumps(card | {"origins": [origin]}))
    assert SECRET_WORDS in refusal(tmp_path / "mine", own=True)


def test_no_chain_of_verbs_publishes_a_secret_benchmark(tmp_path: Path, attack: Attack) -> None:
    rng, counts = attack.random("chains"), {"chains": 0, "secret": 0, "unknown": 0, "open": 0}
    official.BROWSECOMP_PLUS.make(tmp_path / "official")
    import_benchmark(BENCHMARKS["browsecomp_plus"], tmp_path / "official", tmp_path / "secret")
    copy_dataset("world:60", tmp_path / "open")
    for number in range(attack.times(CHAINS)):
        home = tmp_path / str(number)
        home.mkdir()
        root = rng.choice(("secret", "open"))
        place = copied(tmp_path / root, home / "first")
        steps = rng.choices(STEPS, k=rng.randint(0, 3))
        for at, step in enumerate(steps):
            place = step(place, home / str(at))
        end = rng.choice(ENDS)
        try:
            folder = end(place, home / "end")
        except CorpusError:  # two documents of the benchmark give no task
            continue
        said, insisted = refusal(folder), refusal(folder, own=True)
        assert "\n" not in said + insisted
        told = f"{root}: {[step.__name__ for step in steps]}, {folder}: {said!r}, {insisted!r}"
        lost = copied_without_a_card in steps
        assert bool(said) is (root == "secret" or lost), told
        # Who takes the cards away and says that all is theirs is believed.
        assert bool(insisted) is (root == "secret" and not lost), told
        assert lost or (SECRET_WORDS in said) is (root == "secret"), told
        counts["chains"] += 1
        counts["unknown" if lost else root] += 1
    attack.report("published", **counts)


HOSTILE = (
    "",
    "[]",
    "null",
    "{",
    '{"verb": 1}',
    '{"verb": "run", "inputs": {"dataset": "/a\\u0000b"}}',
    '{"verb": "run", "inputs": {"dataset": "' + "/" + "x" * 5000 + '"}}',
    '{"verb": "run", "inputs": {"dataset": "/' + "x/" * 3000 + '"}}',
    '{"verb": "run", "inputs": {"dataset": {"world:60": 1}}}',
    '{"verb": "run", "inputs": {}, "outputs": {"datasets": ["world:60", "HERE"]}}',
    '{"verb": "run", "inputs": {}, "outputs": {"datasets": ["world:60", "/proc/self/fd/0"]}}',
    '{"verb": "run", "inputs": {}, "outputs": {"datasets": []}}',
    '{"verb": "run", "inputs": {}, "outputs": {"datasets": "world:60"}}',
    '{"verb": "data copy", "inputs": {"source": "world:60"}}',
    '{"verb": "data get", "inputs": {"dataset": "Tevatron/BrowseComp-Plus-corpus"}, "status": "finished"}',
    '{"verb": "data get", "inputs": {"dataset": null}}',
    '{"verb": "data copy", "inputs": {}, "origins": "world:60"}',
    '{"verb": "data copy", "inputs": {}, "origins": [], "status": "finished"}',
    '{"verb": "data copy", "inputs": {}, "origins": ["unknown:"], "status": "finished"}',
    '{"verb": "data copy", "inputs": {}, "origins": ["browsecomp_plus"], "status": "finished"}',
    '{"verb": "data copy", "inputs": {}, "origins": [["world:60"]], "status": "finished"}',
    '{"origins": ["world:60"]}',
    "[" * 100_000,
    "9" * 5_000,
)


@pytest.mark.parametrize("card", HOSTILE, ids=range(len(HOSTILE)))
def test_no_hostile_card_sends_a_dataset_or_ends_in_a_traceback(tmp_path: Path, card: str) -> None:
    folder = copied(Path("world:60"), tmp_path / "data")
    (folder / "stage.json").write_text(card.replace("HERE", str(folder)))
    assert refusal(folder)
    (folder / "stage.json").unlink()
    (folder / "card.json").write_text(card.replace("HERE", str(folder)))
    assert refusal(folder) or "world:60" in card


@pytest.mark.parametrize(
    ("policy", "origins"),
    [
        ("hf:a@b/student", ("world-60-0",)),
        ("vllm:a@b/student", ("world-60-0",)),
        ("replay:a@b/student", ("world-60-0",)),
        ("vllm:a@b/student@http://h/v1", ()),
        ("vllm:a@b/adapters@http://h/v1", ("world-60-0",)),
        ("sglang:a@b/adapters@http://h/v1", ("world-60-0",)),
        ("openai:a@b/adapters@http://h/v1", ()),
        ("added:a@b/student@http://h/v1", ("world-60-0",)),
        ("openai:student@http://h/v1", ()),
        (f"openai:{'a' * 300}@http://h/v1", ()),
        (f"added:{'a' * 300}", ()),
        ("verifiers:~nobody-of-this-name/model", ()),
        ("added:a\0b", ()),
        ("quick", tuple(read_json(policy_folder("quick") / CHECKPOINT)["origins"])),
    ],
)
def test_the_known_origins_of_policies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str, origins: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a@b").mkdir()
    for place in ("student", "quick", "a@b/student", "a@b/adapters"):
        copied(Path("world:60"), tmp_path / place)
    (tmp_path / "a@b/adapters/adapter_config.json").write_text("{}")
    assert policy_origins(policy) == origins
    assert known_origins("a@b/student", "shelf:a.db") == ("world-60-0",)


class Mute:
    async def complete(self, messages: Messages) -> Completion:
        return Completion("")


def test_tasks_name_the_origins_of_their_writer_and_their_index(tmp_path: Path) -> None:
    source = open_source(str(copied(Path("world:60"), tmp_path / "data")))
    student, index = copied(Path("stdlib"), tmp_path / "student"), str(tmp_path / "index")
    ensure_index(open_source("world:60:1"), tmp_path / "index", Config())
    writer = QuestionWriter(f"hf:{student}", Mute())
    write_tasks(source, index, tmp_path / "out", Config(), count=2, seed=0, writer=writer)
    assert origins_of(tmp_path / "out") == ("stdlib", "world-60-0", "world-60-1")


def test_what_was_made_with_an_index_of_unknown_origin_is_refused_unless_it_is_ones_own(tmp_path: Path) -> None:
    source = open_source(str(copied(Path("world:60"), tmp_path / "data")))
    found = open_source(str(copied_without_a_card(tmp_path / "data", tmp_path / "found")))
    index = str(tmp_path / "index")
    ensure_index(found, tmp_path / "index", Config())
    write_tasks(source, index, tmp_path / "tasks", Config(), count=2, seed=0)
    with open_run(tmp_path / "run", Config(), "driven", index, {}, dataset=source.label) as keep:
        keep(EPISODE)
    for place in (tmp_path / "tasks", tmp_path / "run"):
        assert "no card says where found comes from" in refusal(place)
        assert not refusal(place, own=True)


def test_a_new_model_names_the_origins_of_all_that_its_vocabulary_heard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(new_model, "collect_texts", Mock(side_effect=UsageError("heard enough")))
    ensure_index(open_source("world:60:1"), tmp_path / "index", Config())
    teacher = f"silent:replay:{copied(Path('stdlib'), tmp_path / 'run')}"
    work = NewModel("world:60", str(tmp_path / "index"), tmp_path / "out", Config(), teacher)
    with pytest.raises(UsageError, match="heard enough"):
        make_model(work)
    assert origins_of(tmp_path / "out") == ("stdlib", "world-60-0", "world-60-1")


def test_special_files_in_place_of_cards_and_texts_block_nothing(tmp_path: Path) -> None:
    folder = copied(Path("world:60"), tmp_path / "data")
    os.mkfifo(folder / "README.md")
    os.mkfifo(folder / "checkpoint.json")
    assert "README.md" not in pack(folder).files
    (folder / "stage.json").unlink()
    os.mkfifo(folder / "stage.json")
    assert "no card says where data comes from" in refusal(folder)
    (folder / "queries.jsonl").unlink()
    bomb = gzip.compress(b"x" * (80 << 20))
    (folder / "queries.jsonl.gz").write_bytes(bomb)
    assert "inflates" in refusal(folder, own=True)


ALNUM = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
SHAPES = (
    *(("hf_", ALNUM, 34), ("sk-proj-1", ALNUM, 40), ("sk-ant-api03-", ALNUM + "_-", 80), ("ghp_", ALNUM, 36)),
    *(("AKIA", "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567", 16), ("github_pat_", ALNUM, 60), ("AIza", ALNUM, 35)),
    *(("xoxb-", "0123456789", 24), ("glpat-", ALNUM, 20), ("nvapi-", ALNUM + "_-", 64), ("xai-", ALNUM, 80)),
    *(("sk_live_", ALNUM, 24), ("rk_live_", ALNUM, 24), ("r8_1", ALNUM, 36), ("gsk_", ALNUM, 52)),
    ("tvly-dev-1", ALNUM, 32),
)
SPELLINGS: tuple[Callable[[str], bytes], ...] = (
    str.encode,
    lambda key: key.encode("utf-16"),
    lambda key: key.encode("utf-16-be"),
    lambda key: json.dumps(f"a\n{key}\tb").encode(),
    lambda key: "".join(f"\\u{ord(each):04x}" for each in key).encode(),
    lambda key: key.replace("-", "\\\\u002D").replace("_", "&#95;").encode(),
    lambda key: f"MY_{key}".encode(),
    lambda key: f"'{key}'".encode(),
    lambda key: f"https://x/?token={key}&a=b".encode(),
    lambda key: f"\ufeff{key}".encode(),
    lambda key: f"Ünïcode {key}".encode("latin-1"),
)


def test_no_key_of_a_known_form_is_sent_in_any_file(tmp_path: Path, attack: Attack) -> None:
    rng, folder = attack.random("keys"), copied(Path("world:60"), tmp_path / "data")
    names = ("corpus.jsonl", "queries.jsonl", "queries.jsonl.gz", "qrels/test.tsv", "README.md", "LICENSE", "NOTICE")
    for _ in range(attack.times(KEYS)):
        begin, alphabet, size = rng.choice(SHAPES)
        planted = rng.choice(SPELLINGS)(begin + "".join(rng.choices(alphabet, k=size)))
        path = folder / rng.choice(names)
        before = path.read_bytes() if path.exists() else None
        content = (b"text of a document\n" * rng.randint(0, 300))[: rng.randint(0, 6000)] + b" " + planted + b" more"
        path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
        with pytest.raises(UsageError, match="holds what looks like a key"):
            pack(folder)
        path.unlink() if before is None else path.write_bytes(before)
    (folder / "queries.jsonl.gz").write_bytes(gzip.compress(gzip.compress(b"anything")))
    with pytest.raises(UsageError, match="holds a packed file"):
        pack(folder)


def test_packed_text_of_a_page_is_no_key_by_chance() -> None:
    assert find_key(b"Z9D9Ua" + (chance := b"AIza" + b"F8Qs" * 9)) is None
    assert find_key(b" " + chance) is None
    assert find_key(b"key:" + chance[:39] + b'"') == 4


@pytest.mark.parametrize("named", ["~/student", "../student"])
def test_the_origins_of_a_base_are_those_of_its_adapters(
    named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name, origins in (("student", ("browsecomp_plus",)), ("adapters", ("world:60",))):
        (tmp_path / name).mkdir()
        (tmp_path / name / "README.md").write_text("a policy")
        card = Checkpoint(format="", counter="", env={}, env_hash="", base="", origins=origins)
        write_json(tmp_path / name / CHECKPOINT, card)
    write_json(tmp_path / "adapters" / "adapter_config.json", {"base_model_name_or_path": named})
    with pytest.raises(UsageError, match="comes from browsecomp_plus"):
        pack(tmp_path / "adapters", own_questions=True)


def test_folders_without_end_and_names_that_are_not_utf_8_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = copied(Path("world:60"), tmp_path / "data")
    (folder / "qrels" / os.fsdecode(b"\xff.tsv")).write_text("q\td\t1\n")
    monkeypatch.chdir(folder)
    for _ in range(1200):
        Path("d").mkdir()
        os.chdir("d")
    parcel = pack(folder)
    for _ in range(1200):  # which no function of the standard library removes
        os.chdir("..")
        Path("d").rmdir()
    assert "qrels/test.tsv" in parcel.files
    assert "qrels/?.tsv" in parcel.left
    json.dumps(parcel.files + parcel.left).encode()
