"""The training client of verifiers against a generate endpoint: what a trainer gets is what was sampled. Run by
`make test-adapters`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("verifiers", reason="verifiers is not installed")

from harness1.config import load_config
from harness1.episodes.rollout import replay_env
from harness1.models.calls import messages_of, tools_of, without_limits
from harness1.records import Episode
from harness1.runs.journal import read_episodes
from tests.adapters.peers import THOUGHT, Sampled, branches, generate_server, path, scratch_index, traces
from tests.vocabularies import tokenizer, vocabulary

SEARCHES, TURNS, EPOCH_TURNS = 3, 5, 3
SETTINGS = ["env.rendering.order=epoch", f"env.rendering.epoch_turns={EPOCH_TURNS}", "policy.format_retries=0"]
FLOAT_DECIMALS = 4
"""Decimals to which verifiers writes log probabilities into a file; those of the endpoint have no more."""


class Trained(NamedTuple):
    """Traces of a run by the training client, what its endpoint sampled, and the episodes that were recorded."""

    traces: list[dict[str, Any]]
    calls: list[Sampled]
    episodes: dict[str, Episode]


def save_qwen_tokenizer(folder: Path) -> Path:
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes(vocabulary("qwen"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return scratch_index(tmp_path_factory.mktemp("verifiers"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_qwen_tokenizer(tmp_path_factory.mktemp("model") / "qwen")


@pytest.fixture(scope="module", params=["all", ""])
def retention(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, index: Path, model: Path, retention: str) -> Trained:
    folder = tmp_path_factory.mktemp("trained") / "vf"
    client = f'type = "train"\nrenderer_model_name = "{model}"\nrenderer.name = "qwen3"\n'
    client += f'renderer.thinking_retention = "{retention}"' if retention else ""
    with generate_server(SEARCHES) as (server, address):
        found = traces(folder, address, str(index), f"settings = {json.dumps(SETTINGS)}", client=client)
    return Trained(found, server.calls, {each.episode_id: each for each in read_episodes(folder / "episodes")})


def sampled(trace: dict[str, Any]) -> list[int]:
    return [place for place, node in enumerate(trace["nodes"]) if node.get("sampled")]


def joined(nodes: list[dict[str, Any]], field: str) -> list[Any]:
    return [value for node in nodes for value in node[field]]


def test_tokens_masks_and_log_probabilities_are_those_that_were_sampled(trained: Trained) -> None:
    calls = {(*call.prompt, *call.output): call for call in trained.calls}
    for trace in trained.traces:
        assert trace["ok"]
        assert len(sampled(trace)) == TURNS
        for place in sampled(trace):
            nodes = path(trace, place)
            call = calls[tuple(joined(nodes, "token_ids"))]
            assert nodes[-1]["token_ids"][-len(call.output) :] == call.output
            trained_on = len(call.output) * [True]
            assert nodes[-1]["mask"] == [False] * (len(nodes[-1]["token_ids"]) - len(trained_on)) + trained_on
            assert nodes[-1]["logprobs"] == [round(each, FLOAT_DECIMALS) for each in call.logprobs]
        assert not any(any(node["mask"]) or node["logprobs"] for node in trace["nodes"] if not node.get("sampled"))


def test_prompts_are_what_the_renderer_makes_of_our_messages(trained: Trained, model: Path) -> None:
    # The renderers of verifiers, which it brings with it.
    base, configs = (pytest.importorskip(f"renderers.{name}") for name in ("base", "configs"))
    create_renderer = pytest.importorskip("renderers").create_renderer
    renderer = create_renderer(base.load_tokenizer(str(model)), configs.Qwen3RendererConfig())
    env, spoken = load_config(None, SETTINGS).env, tokenizer("qwen")
    for trace in trained.traces:
        episode = trained.episodes[trace["info"]["harness1"]["episode_id"]]
        twin = replay_env(episode, env)
        for turn, place in zip(episode.turns, sampled(trace), strict=True):
            context = twin.state.context
            nodes = path(trace, place)
            messages = [node["message"] for node in nodes[:-1]]
            assert told(messages) == told(messages_of(context.pieces, {}))
            prompt = joined(nodes, "token_ids")[: -sum(nodes[-1]["mask"])]
            tools = without_limits(tools_of(context.tools))
            expected = renderer.render_ids(messages, tools=tools, add_generation_prompt=True)
            assert spoken.decode(prompt).replace("".join(THOUGHT), "") == spoken.decode(expected)
            if not any(node.get("sampled") for node in nodes[:-1]):
                assert prompt == expected
            twin.replay(turn)


def told(messages: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(each["role"], each["content"]) for each in messages if each["role"] != "assistant"]


def test_an_epoch_is_one_sequence_where_the_renderer_keeps_thoughts(trained: Trained, retention: str) -> None:
    for trace in trained.traces:
        found = [sum(bool(node.get("sampled")) for node in nodes) for nodes in branches(trace)]
        if retention == "all":
            assert found == [EPOCH_TURNS, TURNS - EPOCH_TURNS]
        else:
            assert found == [1] * TURNS
