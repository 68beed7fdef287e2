"""The MCP server under the protocol's own conformance tests; `make test-mcp-conformance` installs them.

Only the scenarios that ask for what the server has: the others need a server of examples, with tools named
`test_image_content` and the like, or prompts, resources, completions, tasks and questions to the client.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(shutil.which("conformance") is None, reason="`conformance` is not installed")

SCENARIOS = {
    "2025-11-25": (
        "server-initialize",
        "server-session-lifecycle",
        "ping",
        "tools-list",
        "server-sse-multiple-streams",
        "dns-rebinding-protection",
    ),
    "2026-07-28": (
        "server-stateless",
        "tools-list",
        "server-sse-multiple-streams",
        "sep-2164-resource-not-found",
        "dns-rebinding-protection",
        "caching",
        "http-header-validation",
    ),
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
    harness1 = (sys.executable, "-m", "harness1")
    index = str(tmp_path_factory.mktemp("served") / "index")
    subprocess.run([*harness1, "index", "world:120", "--out", index], check=True, capture_output=True)
    words = [*harness1, "serve", "mcp", "--index", index, "--http", "--port", "0"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        found = re.search(r"http://\S+/mcp", process.stdout.readline())
        try:
            assert found is not None
            yield found.group()
        finally:
            process.terminate()


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
