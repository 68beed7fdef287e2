"""The released policies answer, from the command line, over documents that nobody trained on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness1.config import load_config
from harness1.env.environment import env_hash
from harness1.models.checkpoint import read_checkpoint
from harness1.models.fetch import find_bundled, get_model
from harness1.models.spec import list_released, policy_config, policy_folder
from harness1.runs.journal import read_episodes
from tests.cli.commands import Command, command_in_process

BASES = {"trained": "smollm2-135m", "quick": "smollm2-135m-10"}
"""The released policies, and the model that each stands beside."""
NOTES = {
    "Maren Holt": "Maren Holt (born 1961) is a Danish architect. She designed the Tidewater Concert Hall, which opened"
    " in 1998, and teaches in Aarhus.",
    "Tidewater Concert Hall": "The Tidewater Concert Hall is a hall in the harbour of Esbjerg. Its acoustics were"
    " planned by the engineer Pieter Vos.",
    "Pieter Vos": "Pieter Vos (1939 - 2011) was a Dutch acoustic engineer. He was born in Delft and played the viola.",
    "Delft": "Delft is a city in the province of South Holland, known for its blue pottery.",
    "Harbour of Esbjerg": "The harbour of Esbjerg was founded in 1868 and ships parts of wind turbines.",
    "Ola Brandt": "Ola Brandt is a Norwegian rower who won two medals at the world championships of 2003.",
    "Velvet ant": "Velvet ants are wasps whose wingless females look like large, hairy ants.",
    "Marimba": "The marimba is a percussion instrument with wooden bars and resonators below them.",
    "Kiruna": "Kiruna is the northernmost city in Sweden. It is being moved because of its iron mine.",
    "Salt marsh": "A salt marsh is a coastal ecosystem that is flooded by the tides and drains again.",
    "Blue pottery": "Blue pottery was made in many towns of the Netherlands after the model of Chinese porcelain.",
    "Lighthouse keeper": "A lighthouse keeper tended the lamp and the lens of a lighthouse until they were automated.",
}
ASKED = {
    "When was the architect Maren Holt born?": {"Maren Holt"},
    "Why is the city of Kiruna being moved?": {"Kiruna"},
    "In which city was the engineer born who planned the acoustics of the Tidewater Concert Hall?": {
        "Tidewater Concert Hall",
        "Pieter Vos",
    },
    "What do the females of velvet ants look like?": {"Velvet ant"},
}


@pytest.fixture
def harness1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Command:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return command_in_process(monkeypatch, capsys)


@pytest.mark.parametrize("name", BASES)
def test_it_is_small_and_has_the_environment_that_it_was_trained_in(name: str) -> None:
    assert list_released() == sorted(BASES), "all are tested here"
    folder = policy_folder(name)
    files = {path.name: path.stat().st_size for path in folder.iterdir()}
    assert {"README.md", "config.toml", "checkpoint.json", "adapter_config.json"} < files.keys()
    assert sum(files.values()) <= 25_000_000
    assert env_hash(load_config(policy_config(name)).env) == read_checkpoint(folder).env_hash
    adapters = json.loads((folder / "adapter_config.json").read_text())
    assert adapters["base_model_name_or_path"] == BASES[name]


@pytest.mark.parametrize("name", BASES)
def test_without_its_model_the_command_says_how_to_get_it(name: str, harness1: Command, tmp_path: Path) -> None:
    (tmp_path / "notes.jsonl").write_text(json.dumps({"id": "a", "text": "Something is here."}))
    assert harness1("index", "notes.jsonl", "--out", "i").code == 0
    refused = harness1("search", "What is here?", "--index", "i", "--policy", name)
    assert refused.code == 2
    assert refused.err.endswith("harness1 models get smollm2-135m\n")


@pytest.mark.service
@pytest.mark.parametrize("name", BASES)
def test_it_finds_what_is_asked_for(name: str, harness1: Command, tmp_path: Path) -> None:
    get_model(find_bundled("smollm2-135m"))
    lines = [json.dumps({"id": title, "title": title, "text": text}) for title, text in NOTES.items()]
    (tmp_path / "notes.jsonl").write_text("\n".join(lines))
    assert harness1("index", "notes.jsonl", "--out", "notes").code == 0
    found, sizes, waves = 0, set(), 0
    for number, (question, gold) in enumerate(ASKED.items()):
        run = f"run-{number}"
        ended = harness1("search", question, "--index", "notes", "--policy", name, "--out", run, "--json")
        assert ended.code == 0, ended.err
        result = json.loads(ended.out)
        assert result["parse_error"] is None
        curated = {row["title"] for row in result["curated"]}
        sizes.add(len(curated))
        found += gold <= curated
        (episode,) = read_episodes(tmp_path / run)
        called = [turn.action.name for turn in episode.turns if turn.action]
        waves += called[:2] == ["search_corpus", "fan_out_search"]
    assert found >= 3
    assert sizes <= {1, 2}, "it delivers few"
    assert waves, "it follows leads"
