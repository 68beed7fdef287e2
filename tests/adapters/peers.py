"""Peers of the adapters: the command as a process, servers that answer by a script, and `vf-eval` with its traces."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tests.support import Ask, Reply, command_process, replying


def harness1(*words: str) -> str:
    ended = subprocess.run([sys.executable, "-m", "harness1", *words], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def scratch_index(folder: Path) -> Path:
    harness1("index", "world:120", "--out", str(folder / "index"))
    return folder / "index"


@contextmanager
def serving_openenv(index: str, *more: str) -> Iterator[str]:
    words = ["openenv", "--data", "world:120", "--index", index, "--port", "0", *more]
    with command_process(*words) as (process, line):
        yield line.removeprefix("OpenEnv at ").partition(",")[0]
        process.terminate()
        assert process.wait(20) == 0


TURN = re.compile(r"turn (\d+) of \d+\.")


def shown_in(messages: list[dict[str, Any]]) -> str:
    return "\n".join(str(message.get("content")) for message in messages)


def next_call(shown: str, searches: int = 1) -> tuple[str, dict[str, Any]]:
    """Return the call that follows a context: the question is searched, then the same without its first words, and the
    first two documents are delivered."""
    done = max(map(int, TURN.findall(shown)), default=0)
    question = shown.partition("Question: ")[2].partition("\n")[0]
    if done < searches:
        return "search_corpus", {"query": " ".join(question.split()[done:])[:200]}
    if done == searches:
        return "curate", {"add_ids": ["D1", "D2"]}
    return "end_search", {"reasoning": "done"}


def _completion(searches: int, path: str, asked: dict[str, Any]) -> dict[str, Any]:
    name, arguments = next_call(shown_in(asked["messages"]), searches)
    call = {"id": "c", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls"}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    head = {"id": "x", "object": "chat.completion", "created": 0, "model": "fake"}
    return {**head, "choices": [choice], "usage": usage}


@contextmanager
def answering_json(answer: Callable[[str, dict[str, Any]], dict[str, Any]]) -> Iterator[str]:
    def reply(asked: Ask) -> Reply:
        posted = asked.method == "POST"
        told = json.dumps(answer(asked.path, json.loads(asked.body)) if posted else {}).encode()
        return 200 if posted else 404, {"Content-Type": "application/json"}, told

    with replying(reply) as url:
        yield f"{url}/v1"


@contextmanager
def chat_server(searches: int = 1) -> Iterator[str]:
    with answering_json(partial(_completion, searches)) as address:
        yield address


THOUGHT = "<think>", "\nNext.\n", "</think>", "\n\n"


@dataclass(frozen=True)
class Sampled:
    prompt: list[int]
    output: list[int]
    logprobs: list[float]


@dataclass
class GenerateServer:
    """The script and its calls. Its ids are those of single characters: of the same text, a tokenizer makes others."""

    searches: int = 1
    calls: list[Sampled] = field(default_factory=list)

    def answer(self, path: str, asked: dict[str, Any]) -> dict[str, Any]:
        assert path == "/inference/v1/generate"
        assert asked["sampling_params"]["logprobs"] == 1
        found = self._sample(asked["token_ids"])
        self.calls.append(found)
        content = [
            {"token": f"token_id:{token}", "logprob": logprob}
            for token, logprob in zip(found.output, found.logprobs, strict=True)
        ]
        choice = {"token_ids": found.output, "finish_reason": "stop", "logprobs": {"content": content}}
        return {"request_id": str(len(self.calls)), "choices": [choice]}

    def _sample(self, prompt: list[int]) -> Sampled:
        from tests.vocabularies import tokenizer  # not every peer's environment has tokenizers

        spoken = tokenizer("qwen")
        name, arguments = next_call(spoken.decode(prompt), self.searches)
        call = json.dumps({"name": name, "arguments": arguments})
        written = *THOUGHT, "<tool_call>", f"\n{call}\n", "</tool_call>", "<|im_end|>"
        output = [token for part in written for token in self._ids(part)]
        return Sampled(prompt, output, [-(len(prompt) + place) / 1e4 for place in range(len(output))])

    def _ids(self, part: str) -> list[int]:
        from tests.vocabularies import tokenizer

        spoken = tokenizer("qwen")
        if part in spoken.control:
            return [spoken.control[part]]
        return [token for character in part for token in spoken.encode(character)]


@contextmanager
def generate_server(searches: int = 1) -> Iterator[tuple[GenerateServer, str]]:
    server = GenerateServer(searches)
    with answering_json(server.answer) as address:
        yield server, address


TASKS, ROLLOUTS = 3, 2


def traces(
    folder: Path,
    address: str,
    index: str,
    more: str = "",
    tasks: int = TASKS,
    rollouts: int = ROLLOUTS,
    client: str = "",
    model: str = "fake",
    data: str = "world:120",
) -> list[dict[str, Any]]:
    """Run `vf-eval` over a small world; `more` are lines for the harness, and `client` for the client."""
    folder.mkdir()
    (folder / "run.toml").write_text(
        f"""
model = "{model}"
push = false
num_rollouts = {rollouts}
output_dir = "{folder}/out"

[select]
limit = {tasks}

[client]
base_url = "{address}"
api_key_var = "FAKE_KEY"
{client}

[env.taskset]
id = "harness1_verifiers"
data = "{data}"
task.settings = ["reward.recipe=robust"]

[env.agent.harness]
id = "harness1_verifiers"
index = "{index}"
record = "{folder}/episodes"
{more}

[env.agent.runtime]
type = "subprocess"
"""
    )
    ended = subprocess.run(
        [str(Path(sys.executable).parent / "vf-eval"), "@", str(folder / "run.toml"), "--no-rich"],
        capture_output=True,
        text=True,
        check=False,
        env={"FAKE_KEY": "none", "PATH": "/usr/bin:/bin", "HOME": str(folder)},
    )
    found = sorted((folder / "out").rglob("traces.jsonl"))
    assert found, ended.stdout[-2000:] + ended.stderr[-2000:]
    return [trace for line in found[0].read_text().splitlines() for trace in json.loads(line)["traces"]]


def branches(trace: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """The nodes from a root to each leaf of a trace: the sequences that a trainer would get."""
    nodes = trace["nodes"]
    parents = {node.get("parent") for node in nodes}
    return [path(trace, place) for place in range(len(nodes)) if place not in parents]


def path(trace: dict[str, Any], place: int | None) -> list[dict[str, Any]]:
    found = []
    while place is not None:
        found.append(trace["nodes"][place])
        place = found[-1].get("parent")
    return found[::-1]
