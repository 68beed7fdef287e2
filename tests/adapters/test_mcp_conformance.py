"""The MCP server under the protocol's own conformance tests; `make test-mcp-conformance` installs them.

Only the scenarios that ask for what the server has: the others need a server of examples, with tools named
`test_image_content` and the like, or prompts, resources, completions, tasks and questions to the client.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.adapters.peers import scratch_index
from tests.support import command_process

pytestmark = pytest.mark.skipif(shutil.which("conformance") is None, reason="`conformance` is not installed")

BOTH = ("tools-list", "server-sse-multiple-streams", "dns-rebinding-protection")
SCENARIOS = {
    "2025-11-25": ("server-initialize", "server-session-lifecycle", "ping", *BOTH),
    "2026-07-28": ("server-stateless", "sep-2164-resource-not-found", "caching", "http-header-validation", *BOTH),
}
NEED_MORE = {
    "server-stateless": {
        "sep-2575-server-rejects-undeclared-capability",
        "sep-2575-missing-capability-http-400",
        "sep-2575-http-server-no-independent-requests-on-stream",
        "sep-2575-server-no-log-without-loglevel",
    },
    "caching": {
        "sep-2549-prompts-list-caching-hints",
        "sep-2549-resources-list-caching-hints",
        "sep-2549-resources-templates-list-caching-hints",
    },
}
"""Checks that ask for a tool of examples, or for prompts and resources."""


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    index = scratch_index(tmp_path_factory.mktemp("served"))
    with command_process("mcp", "--index", str(index), "--http", "--port", "0") as (_, line):
        found = re.search(r"http://\S+/mcp", line)
        yield found.group()


@pytest.mark.parametrize(
    ("revision", "scenario"), [(revision, each) for revision, names in SCENARIOS.items() for each in names]
)
def test_the_protocols_own_checks_pass(address: str, tmp_path: Path, revision: str, scenario: str) -> None:
    asked = ["--url", address, "--scenario", scenario, "--spec-version", revision, "--output-dir", str(tmp_path)]
    ended = subprocess.run(["conformance", "server", *asked], capture_output=True, text=True, check=False)
    (found,) = tmp_path.rglob("checks.json")
    checks = json.loads(found.read_text())
    assert any(check["status"] == "SUCCESS" for check in checks), ended.stdout + ended.stderr
    failed = {check["id"]: check.get("errorMessage") for check in checks if check["status"] == "FAILURE"}
    assert {name: told for name, told in failed.items() if name not in NEED_MORE.get(scenario, ())} == {}
