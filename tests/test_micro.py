"""The micro setting: a window of 384 tokens holds the whole environment, and the start is made from nothing."""

import asyncio
from statistics import fmean

import msgspec
import pytest

from benchmarks.micro import TAUGHT, Start, make, make_model, make_world, measured, play, table
from harness1.config import Validation, load_config
from harness1.env.environment import SearchEnv
from harness1.models.open import format_at
from harness1.records import Status
from harness1.retrieval.open import open_retriever
from harness1.rows import RowFile
from harness1.rows.calls import calls_of, prompt_ids
from harness1.sft.data_card import TRAIN

MICRO = "micro"
SMALL = ("machine.workers=1", "machine.threads=1")
PROMPT, CALL = 384, 16


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Start:
    config = load_config(MICRO, list(SMALL))
    taught = msgspec.structs.replace(TAUGHT, epochs=1, watch=Validation(every=0, rows=64, turns=4))
    folder = tmp_path_factory.mktemp("micro")
    start = Start(folder, config, size=200, samples=1, width=16, layers=1, heads=2, taught=taught)
    make_world(start)
    make_model(start)
    return start


def test_minimal_instructions_describe_nothing_and_count_turns(start: Start) -> None:
    chat = format_at(start.folder / "model", start.config)
    env = SearchEnv(start.config.env, open_retriever(str(start.folder / "index"), start.config), counter=chat)
    context = asyncio.run(env.reset(start.tasks("dev")[0].public()))
    assert context.pieces[0].text == "Curate the documents that answer the question.\n"
    assert context.pieces[-1].text == "Turn 0/5\n"
    assert context.view.budget.turns_left() == 5
    assert [spec.name for spec in context.tools] == ["search_corpus", "curate", "end_search"]
    assert all(not spec.description and "description" not in str(spec.parameters) for spec in context.tools)
    assert "Tools:\nsearch_corpus {query}\ncurate" in chat.tokenizer.decode(chat.declarations(context.tools))


def test_the_window_holds_every_prompt_and_calls_are_short(start: Start) -> None:
    policies = ("silent:oracle-teacher", "silent:random")
    teacher, floor = (
        play(start, each, f"dev-{each[7:]}", start.tasks("dev", 12), student="model") for each in policies
    )
    earned, chance = (fmean(episode.reward.total for episode in each if episode.reward) for each in (teacher, floor))
    assert earned > chance + 0.5
    assert load_config(MICRO).env.prompt_limit == PROMPT
    calls = [(episode, call) for episode in (*teacher, *floor) for call in calls_of(episode)]
    assert max(len(prompt_ids(episode, call)) for episode, call in calls) <= PROMPT
    assert max(len(call.output_ids) for _, call in calls) <= CALL
    assert {episode.status for episode in (*teacher, *floor)} == {Status.COMPLETED}


def test_the_start_is_made_and_measured(start: Start) -> None:
    seconds = make(start)
    assert list(seconds) == ["world", "model", "teacher", "rows", "start"]
    assert len(RowFile(start.folder / "rows" / TRAIN)) > 0.8 * len(start.tasks("train"))
    assert (start.folder / "start" / "checkpoint.json").exists()
    before = (start.folder / "start" / "checkpoint.json").stat().st_mtime_ns
    found = measured(start, 2)
    assert found["silent:random"]["of_range"] == 0.0
    assert found["silent:oracle"]["of_range"] == 1.0
    assert "start at 0" in table({"seconds": seconds, "policies": found})
    make(start)
    assert (start.folder / "start" / "checkpoint.json").stat().st_mtime_ns == before
