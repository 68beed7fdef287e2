"""Agents as their makers publish them, unmodified, behind the proxy: `make test-agents` installs them and runs this.

A scripted model plays each of them: it writes a file by the agent's own tool for commands, reads it, and ends.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from harness1.config import Config, Env
from harness1.models.backend import Grammar, SampledOutput
from harness1.records import Sampling, ToolCall
from harness1.rows import per_request, prefix_merging
from harness1.rows.calls import RecordedCall, read_calls, read_records, recording
from harness1.serve.proxy import ProxyService
from harness1.serve.server import answering
from harness1.serve.service import ServiceLimits
from tests.proxying import hermes, upstream_of
from tests.serving import HOST, in_thread

WINDOW, PATIENCE_S = 65_536, 240.0
TASK = "Write the word hello into the file hello.txt, and read it."
STEPS = ("printf hello > hello.txt", "head -c 5 hello.txt")
TOOLS: Mapping[str, Any] = {
    "exec_command": lambda step: {"cmd": step},
    "shell_command": lambda step: {"command": step},
    "shell": lambda step: {"command": ["bash", "-c", step]},
    "run_shell_command": lambda step: {"command": step, "is_background": False, "description": "A step"},
    "Bash": lambda step: {"command": step, "description": "A step"},
    "bash": lambda step: {"command": step},
}
"""How each agent's tool for commands is called."""


class Scripted:
    """A backend that takes the steps in their order, if a tool for commands is declared, and then has done."""

    version = 0
    hash = "scripted"

    def __init__(self) -> None:
        self.chat = hermes()

    async def generate(self, ids: Sequence[int], sampling: Sampling, grammar: Grammar | None = None) -> SampledOutput:
        prompt = self.chat.tokenizer.decode(ids)
        name = next((each for each in TOOLS if f'"name": "{each}"' in prompt), None)
        step = next((each for each in STEPS if each not in prompt), None)
        said = [*self.chat.text("Done."), self.chat.stop_ids[0]]
        if name and step and TASK in prompt:
            said = [*self.chat.format_action("I take a step.", ToolCall(name, TOOLS[name](step)))]
        said = said[: sampling.max_tokens]
        ended = said[-1] == self.chat.stop_ids[0]
        return SampledOutput(tuple(said), (-0.5,) * len(said), "stop" if ended else "length")


class Agent(NamedTuple):
    """An agent of npm: its program, its arguments, variables, and files of its home by their paths."""

    program: str
    arguments: tuple[str, ...]
    variables: Mapping[str, str] = {}
    files: Mapping[str, str] = {}
    dialect: str = "openai"


PROVIDER = '{name="harness1", base_url="URL/v1", env_key="OPENAI_API_KEY", wire_api="responses"}'
CODEX = ("--dangerously-bypass-approvals-and-sandbox", "-m", "policy", "-c", "model_provider=harness1")
CODEX += ("-c", f"model_providers.harness1={PROVIDER}")
PI: dict[str, Any] = {"baseUrl": "URL/v1", "api": "openai-completions", "apiKey": "OPENAI_API_KEY"}
PI["models"] = [{"id": "policy", "contextWindow": WINDOW, "maxTokens": 4096}]
AGENTS = {
    "codex": Agent(
        "codex", ("exec", "--skip-git-repo-check", *CODEX, TASK), {"CODEX_HOME": "HOME"}, dialect="responses"
    ),
    "claude": Agent(
        "claude",
        ("-p", TASK, "--model", "policy", "--allowedTools", "Bash"),
        {"ANTHROPIC_DEFAULT_HAIKU_MODEL": "policy", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"},
        dialect="anthropic",
    ),
    "qwen": Agent("qwen", ("-p", TASK, "-y", "--auth-type", "openai", "-m", "policy")),
    "pi": Agent(
        "pi",
        ("-p", TASK, "--provider", "harness1", "--model", "policy"),
        files={".pi/agent/models.json": json.dumps({"providers": {"harness1": PI}})},
    ),
}


@contextmanager
def noted(run: Path) -> Any:
    """Serve the proxy; yield its address, and the types of its answers to posts as they come."""
    upstream = upstream_of(Scripted(), hermes(), Config(env=Env(context_window=WINDOW, generation_reserve=4096)))
    limits, kinds = ServiceLimits(deadline_s=60.0), list[str]()
    with recording(run, upstream.inputs) as recorder:
        service = ProxyService(upstream, recorder.append, limits)

        async def app(scope: Any, receive: Any, send: Any) -> None:
            async def noting(message: Any) -> None:
                if message["type"] == "http.response.start" and scope["method"] == "POST":
                    kinds.append(dict(message["headers"]).get(b"content-type", b"").decode())
                await send(message)

            await service.app(scope, receive, noting)

        with in_thread(lambda: answering(app, limits, HOST, 0)) as url:
            yield url, kinds


def play(agent: Agent, url: str, folder: Path) -> subprocess.CompletedProcess[str]:
    home, work = folder / "home", folder / "work"
    for path in (home, work):
        path.mkdir()
    for name, text in agent.files.items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(text.replace("URL", url))
    given = {"PATH": os.environ["PATH"], "HOME": str(home), "OPENAI_BASE_URL": f"{url}/v1", "ANTHROPIC_BASE_URL": url}
    given |= {"OPENAI_API_KEY": "session-1", "ANTHROPIC_API_KEY": "session-1", "TERM": "dumb"}
    given |= {name: value.replace("HOME", str(home)) for name, value in agent.variables.items()}
    command = [agent.program, *(word.replace("URL", url) for word in agent.arguments)]
    return subprocess.run(
        command,
        cwd=work,
        env=given,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_plays_its_task_and_every_call_is_a_row(tmp_path: Path, name: str) -> None:
    agent = AGENTS[name]
    if shutil.which(agent.program) is None:
        pytest.skip(f"{agent.program} is not installed: `make test-agents` does it, where npm is")
    with noted(tmp_path / "run") as (url, kinds):
        done = play(agent, url, tmp_path)
    records = list(read_records(tmp_path / "run"))
    shown = done.stdout[-3000:] + done.stderr[-3000:] + "".join(map(told, records))
    assert done.returncode == 0, shown
    assert (tmp_path / "work" / "hello.txt").read_text() == "hello", shown
    assert "Done." in done.stdout, shown
    assert {(call.status, call.dialect, call.session_id) for call in records} == {(200, agent.dialect, "session-1")}
    assert set(kinds) == {"text/event-stream"}
    calls = list(read_calls(tmp_path / "run"))
    assert len(calls) == len(records), "a call that cannot be trained on"
    assert len(per_request(calls)) == len(calls)
    merged = prefix_merging(calls)
    assert (merged.counts["trained"], len(merged.rows)) == (len(calls), 1), (
        "a prompt does not continue what was sampled"
    )


def told(call: RecordedCall) -> str:
    return f"\n{call.status} {call.error} {len(call.prompt_ids)} {call.finish_reason} {call.actions} {call.unmet}"
