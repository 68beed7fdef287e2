"""The command line with a language model: searched with, recorded, evaluated, and its tokens computed again."""

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM

from harness1.config import Config
from harness1.data.open import open_source
from harness1.records import ModelCall
from harness1.retrieval.build import build_index
from harness1.rows.calls import calls_of
from harness1.runs.files import read_stage
from harness1.runs.journal import EpisodeStore, finish, read_episodes
from harness1.viewer.episode import EpisodeView
from harness1.viewer.run_page import RunSource
from tests.cli.commands import Command, run_in
from tests.support import hearing
from tests.tiny_models import save_tiny_model
from tests.vocabularies import tokenizer, vocabulary

CONFIG = "small"
SETTINGS = (
    *("policy.constrained=true", "policy.format=compact", "env.max_turns=3", "env.generation_reserve=128"),
    *("env.context_window=2176", "machine.device=cpu", "machine.model.cache_tokens=8192"),
)
OPTIONS = ["--config", CONFIG, *(word for setting in SETTINGS for word in ("--set", setting))]


def save_model(folder: Path, seed: int, kind: str = "chatml") -> None:
    """A random model that likes to close what it has opened; of others the strings seldom end."""
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes(vocabulary(kind))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    size = max(tokenizer(kind).control.values()) + 1
    save_tiny_model(folder, seed=seed, vocab_size=size, max_position_embeddings=4096)
    model = AutoModelForCausalLM.from_pretrained(folder)
    closing = [token for text in ("\n", '"', '"}', "}") for token in tokenizer(kind).encode(text)]
    with torch.no_grad():
        for layer in model.model.layers:  # they leave alone what says so
            layer.self_attn.o_proj.weight[0] = 0.0
            layer.mlp.down_proj.weight[0] = 0.0
        model.model.embed_tokens.weight[:, 0] = 8.0
        model.lm_head.weight[closing, 0] = 9.0
    model.save_pretrained(folder)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder with models, an index, and a run of one search."""
    made = tmp_path_factory.mktemp("home")
    save_model(made / "model", 0)
    save_model(made / "retrained", 1)
    save_model(made / "foreign", 0, "qwen")
    build_index(open_source("world:60").documents(), made / "index", Config().index)
    return made


@pytest.fixture(scope="module")
def searched(home: Path) -> Path:
    """The run of a search by the model."""
    run_in(home, *search("run"))
    return home / "run"


def search(out: str, policy: str = "hf:model", *options: str) -> list[str]:
    question = ["search", "Who founded the company?", "--index", "index", "--policy", policy, "--out", out]
    return [*question, "--seed", "1", *OPTIONS, *options]


def evaluation(out: str, *options: str) -> list[str]:
    limits = ["--split", "train", "--limit", "3", "--cache", "cache", "--json", "--set", "env.rendering.order=epoch"]
    return ["eval", "world:60", "--policy", "hf:model", "--out", out, *limits, *OPTIONS, *options]


def test_a_search_by_a_local_model_is_recorded_token_by_token_and_viewed_as_it_was_sent(searched: Path) -> None:
    (episode,) = read_episodes(searched)
    calls = list(calls_of(episode))
    assert (episode.status, episode.untrainable) == ("completed", None)
    assert len(calls) >= len(episode.turns) > 1
    assert all(made.output_ids and len(made.output_ids) == len(made.output_logprobs) for made in calls)
    assert len({made.sampling.grammar for made in calls}) == 1
    assert calls[0].sampling.grammar
    stage = read_stage(searched)
    assert (stage.outputs["policy"], stage.status) == ("hf:model", "finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(searched.parent)
        source = RunSource.open(searched)
        shown = EpisodeView(episode, source.config.env, None, source.tokenizer).as_json(None)
        assert shown["turns"][0]["calls"][0]["output"] == source.tokenizer.decode(calls[0].output_ids)


def test_the_tokens_of_a_run_are_computed_again(harness1: Command, searched: Path) -> None:
    ended = harness1("replay", "run", "--model", "model")
    assert ended.out.startswith("1 episode, "), ended
    assert "sampled tokens: log probabilities differ by at most" in ended.out
    shown = json.loads(harness1("replay", "run", "--model", "model", "--json").out)
    (episode,) = read_episodes(searched)
    assert shown["turns"] == shown["equal"] == len(episode.turns)
    assert shown["logprobs"]["tokens"] == sum(len(made.output_ids) for made in calls_of(episode))
    assert (shown["logprobs"]["worst_ratio"] <= 1, shown["differences"]) == (True, [])


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("retrained", "the recorded log probabilities are not those of retrained"),
        ("foreign", "foreign has another tokenizer than the model that was sampled from"),
    ],
)
def test_another_model_is_found_out(harness1: Command, searched: Path, model: str, says: str) -> None:
    ended = harness1("replay", "run", "--model", model)
    assert (ended.code, ended.out.splitlines()[-1].strip()) == (1, says)
    shown = harness1("replay", "run", "--model", model, "--json")
    report = json.loads(shown.out)
    assert (shown.code, report["differences"], report["turns"]) == (1, [says], report["equal"])


def test_an_output_that_its_grammar_forbids_is_found_out(harness1: Command, searched: Path, home: Path) -> None:
    (episode,) = read_episodes(searched)
    stop = next(calls_of(episode)).sampling.stop_ids

    def forged(call: ModelCall) -> ModelCall:
        return msgspec.structs.replace(call, output_ids=(*stop[:1], *call.output_ids[1:]))

    turns = [msgspec.structs.replace(turn, calls=tuple(forged(made) for made in turn.calls)) for turn in episode.turns]
    (home / "forged").mkdir()
    shutil.copy(searched / "stage.json", home / "forged")
    with EpisodeStore(home / "forged") as store:
        store.append(msgspec.structs.replace(episode, turns=tuple(turns)))
    ended = harness1("replay", "forged", "--model", "model")
    assert (ended.code, "its card was changed" in ended.err) == (2, True)
    finish(read_stage(home / "forged"), home / "forged" / "episodes.jsonl")
    ended = harness1("replay", "forged", "--model", "model")
    assert (ended.code, "the grammar does not allow the token" in ended.out) == (1, True)


def test_a_greedy_run_is_replayed_too_and_one_without_tokens_is_not(harness1: Command, searched: Path) -> None:
    assert harness1(*search("greedy", "hf:model", "--set", "policy.temperature=0")).code == 0
    ended = harness1("replay", "greedy", "--model", "model")
    assert (ended.code, "tokens at temperature 0: at most" in ended.out) == (0, True)
    assert "sampled tokens" not in ended.out
    assert harness1("search", "Who?", "--index", "index", "--out", "plain").code == 0
    ended = harness1("replay", "plain", "--model", "model")
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith("harness1: this run holds no sampled tokens")


def test_a_model_that_gives_no_action_is_said_to(harness1: Command) -> None:
    options = ("--set", "policy.constrained=false", "--set", "policy.format_retries=1")
    ended = harness1(*search("babble", "hf:model", *options))
    again = harness1(*search("babble", "hf:model", *options, "--json"))
    assert (ended.code, again.code) == (1, 1)
    shown = json.loads(again.out)
    assert shown["status"] == "policy_error"
    assert f"The policy gave no valid action in 2 attempts: {shown['parse_error']}\n" in ended.out
    assert ended.out.splitlines()[-1].startswith("Its last output: ")


def test_an_evaluation_counts_calls_and_rows(harness1: Command) -> None:
    whole = json.loads(harness1(*evaluation("epochs")).out)
    assert (whole["tasks"], whole["scored"], whole["failures"]["infra_error"]) == (3, 3, 0)
    assert min(whole[name]["mean"] for name in ("model_calls", "merge_ratio", "output_tokens")) >= 1
    assert whole["merge_ratio"]["mean"] <= 3
    assert harness1("replay", "epochs", "--model", "model").code == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (search("wrong", "hf:no/such/model"), "no model 'no/such/model'"),
        (search("wrong", "hf:model", "--set", "env.context_window=8192"), "more than the 4096 tokens that model reads"),
        (search("wrong", "hf:model", "--set", "policy.format=harmony"), "harmony"),
        (search("wrong", "hf:model", "--set", "machine.device=tpu9"), "does not load on the device 'tpu9'"),
        (["eval", "world:60", "--policy", "hf:", "--out", "wrong", "--cache", "cache"], "names no model"),
        (["replay", "run", "--model", "index"], "index has no tokenizer.json"),
    ],
)
def test_what_is_wrong_with_a_model_is_one_line(
    harness1: Command, home: Path, searched: Path, arguments: list[str], says: str
) -> None:
    ended = harness1(*arguments)
    assert (ended.code, says in ended.err, ended.err.count("\n")) == (2, True, 1), ended.err
    assert not (home / "wrong").exists()


@pytest.mark.service
def test_an_interrupt_ends_a_search_in_the_middle_of_an_output_and_leaves_a_folder_to_go_on_in(
    harness1: Command, home: Path
) -> None:
    # Without a grammar a random model says all of its allowance, four times.
    settings = ("policy.constrained=false", "env.context_window=4096", "env.generation_reserve=2000")
    long = [word for setting in settings for word in ("--set", setting)]
    command = [sys.executable, "-m", "harness1", *search("halted", "hf:model", *long)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, cwd=home, **pipes, text=True, preexec_fn=hearing())
    deadline = time.monotonic() + 60
    while not (home / "halted" / "episodes.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, complaint = process.communicate(timeout=30)
    assert (process.returncode, "Traceback" in complaint) == (130, False)
    assert list(read_episodes(home / "halted")) == []
    assert harness1(*search("halted")).code == 0
    assert len(list(read_episodes(home / "halted"))) == 1
