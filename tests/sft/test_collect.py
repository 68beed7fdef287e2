"""Collecting: a teacher acts in the context of its student, and what cannot work is said before any work."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer
from typer.testing import CliRunner

from harness1.cli.sft import collect
from harness1.config import Config, load_config
from harness1.data import beir
from harness1.data.leaks import Selection
from harness1.data.open import open_source
from harness1.data.source import Source
from harness1.episodes.rollout import replay_env, replay_episode
from harness1.errors import SchemaError, UsageError
from harness1.models.formats import open_format
from harness1.models.tokenizer import open_tokenizer
from harness1.records import Episode, Status
from harness1.retrieval.build import build_index
from harness1.rows.calls import prompt_ids
from harness1.runs.files import Stage, read_stage
from harness1.runs.folder import run_config
from harness1.runs.journal import EpisodeStore, read_episodes
from harness1.sft.collect import check_round_trip, student_place, tasks_of_runs, teacher_policy, teaching_tasks
from tests.models.test_chat_messages import check
from tests.policy.test_chat_completions import answer
from tests.serving import imitating
from tests.support import END, call
from tests.vocabularies import chat_format, tokenizer, vocabulary

WORLD = "world:60"
SOURCE = open_source(WORLD)
ONE = ("--set", "machine.workers=1")


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("collect") / "index"
    build_index(SOURCE.documents(), folder, Config().index)
    return str(folder)


def saved(folder: Path, kind: str = "chatml", **changes: object) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(json.loads(vocabulary(kind)) | changes))
    return str(folder)


def collected(*options: str) -> str:
    app = typer.Typer()
    app.command()(collect)
    done = CliRunner().invoke(app, [*options, *ONE, "--json"], standalone_mode=False)
    if done.exception is not None:
        raise done.exception
    return done.stdout


def run_of(out: Path, index: str, *options: str) -> list[Episode]:
    collected("--teacher", "scripted", "--data", WORLD, "--index", index, "--out", str(out), *options)
    return list(read_episodes(out))


def test_prompts_are_what_the_student_would_be_given(index: str, tmp_path: Path) -> None:
    student = saved(tmp_path / "student")
    episodes = run_of(tmp_path / "run", index, "--limit", "3", "--format", "compact", "--tokenizer", student)
    config, _ = run_config(tmp_path / "run")
    chat = chat_format("compact", "chatml")
    assert len(episodes) == 3
    for episode in episodes:
        assert episode.hashes.counter == chat.hash
        twin = replay_env(episode, config.env, chat)
        for turn in episode.turns:
            context = twin.state.context
            assert turn.action is not None
            assert turn.context_hash == context.hash
            prompt = [*chat.segments(context), chat.prompt_end()]
            (said,) = turn.calls
            assert prompt_ids(episode, said) == tuple(token for _, ids in prompt for token in ids)
            assert len(prompt_ids(episode, said)) <= config.env.prompt_limit
            assert said.output_ids == chat.format_action(turn.reasoning, turn.action)
            twin.replay(turn)


def test_the_card_names_tokenizer_and_dataset(index: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    student = saved(tmp_path / "student")
    monkeypatch.chdir(tmp_path)
    run_of(tmp_path / "run", index, "--limit", "1", "--format", "compact", "--tokenizer", "student")
    stage = read_stage(tmp_path / "run")
    assert (stage.verb, stage.status, stage.outputs["policy"]) == ("run", "finished", "scripted")
    assert (stage.outputs["format"], stage.outputs["tokenizer"]) == ("compact", student)
    assert (stage.inputs["dataset"], stage.outputs["source"]) == (WORLD, WORLD)
    chat = chat_format("compact", "chatml")
    assert (stage.hashes["counter"], stage.hashes["tokenizer"]) == (chat.hash, chat.tokenizer.hash)
    beir.write(tmp_path / "set", SOURCE.documents(), SOURCE.tasks("train")[:1])
    collected("--teacher", "scripted", "--data", "set", "--index", index, "--out", "bare")
    stage = read_stage(tmp_path / "bare")
    assert (stage.inputs["dataset"], stage.outputs["source"]) == ("set", str(tmp_path / "set"))
    assert stage.hashes["counter"] == "characters/4"  # without a student, it counted approximately
    assert not stage.outputs.keys() & {"tokenizer", "format"}


def test_a_collection_is_resumed_and_then_left_alone(index: str, tmp_path: Path) -> None:
    options = ("--limit", "2", "--samples", "2", "--tokenizer", saved(tmp_path / "student"))
    out = tmp_path / "run"
    whole = run_of(out, index, *options)
    assert sorted(episode.sample_idx for episode in whole) == [0, 0, 1, 1]
    (out / "metrics.json").unlink()
    for name in ("episodes.jsonl", "tokens.bin"):
        (out / name).unlink()
    with EpisodeStore(out) as store:
        store.append(whole[0])
    assert sorted(episode.key for episode in run_of(out, index, *options)) == sorted(each.key for each in whole)
    written = (out / "episodes.jsonl").stat().st_mtime_ns
    assert (len(run_of(out, index, *options)), (out / "episodes.jsonl").stat().st_mtime_ns) == (4, written)
    with pytest.raises(UsageError, match="another run"):
        run_of(out, index, "--limit", "2", "--samples", "2")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--split", "test"], "is for testing"),
        (["--split", "dev", "--data", "world:19"], "20"),
        (["--split", "validation"], "no split 'validation'"),
        (["--teacher", "teacher"], "no policy 'teacher'"),
        (["--teacher", "openai:gpt"], "names no model"),
        (["--format", "compact"], "give its --tokenizer"),
        (["--tokenizer", "nowhere"], "nowhere"),
        (["--tokenizer", "empty"], "no tokenizer.json"),
        (["--tokenizer", "other", "--format", "compact"], "<|im_start|>"),
        (["--tokenizer", "lossy"], "cannot round-trip"),
    ],
)
def test_what_cannot_work_is_said_before_any_index_is_built(
    options: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    saved(tmp_path / "other", "harmony")
    saved(tmp_path / "lossy", normalizer={"type": "Lowercase"})
    given = ["--data", WORLD, "--teacher", "scripted", "--out", "run", "--cache", "cache", *options]
    with pytest.raises(UsageError) as refused:
        collected(*given)
    assert says in str(refused.value)
    assert not (tmp_path / "cache").exists()
    assert not (tmp_path / "run").exists()


def test_tasks_without_gold_and_splits_without_tasks_are_refused() -> None:
    def holding(count: int) -> Source:
        bare = [msgspec.structs.replace(task, gold=None) for task in SOURCE.tasks("train")[:count]]
        return Source("bare", "jsonl", SOURCE.documents, ("train",), lambda _: bare)

    with pytest.raises(UsageError, match="has no gold"):
        teaching_tasks(holding(1), "train", 0, Config())
    with pytest.raises(UsageError, match="bare has no tasks in split train"):
        teaching_tasks(holding(0), "train", 0, Config())
    assert (teacher_policy("oracle"), teacher_policy("random")) == ("oracle-teacher", "random")


def test_a_tokenizer_may_compose_characters_and_nothing_else(tmp_path: Path) -> None:
    check_round_trip(tokenizer("qwen"), ["Bjo\u0308rk said <|im_end|> at 3\u00a0% \ud800", ""])
    half = saved(tmp_path, normalizer={"type": "Replace", "pattern": {"String": "7"}, "content": "1"})
    with pytest.raises(UsageError, match="'born in 1957': 'born in 1957' comes back as 'born in 1951'"):
        check_round_trip(open_tokenizer(Path(half)), ["born in 1852", "born in 1957", "born in 1971"])


def test_a_tokenizer_is_tried_on_the_texts_of_the_corpus(tmp_path: Path) -> None:
    tasks, config = SOURCE.tasks("train"), load_config(None, ["policy.format=compact"])
    assert student_place(saved(tmp_path / "good"), SOURCE, tasks, config) == str(tmp_path / "good")
    title = next(SOURCE.documents()).title
    bad = saved(tmp_path / "bad", normalizer={"type": "Replace", "pattern": {"String": title}, "content": "x"})
    with pytest.raises(UsageError, match=f"cannot round-trip .*{title}"):
        student_place(bad, SOURCE, tasks, config)


REASONS = ("Who founded it is not known yet.", "D1 looks right.", "It is found.")


def teacher(asked: list[dict[str, Any]]) -> Callable[[str, str, bytes], tuple[int, bytes]]:
    """A server that gives its reasons where it is asked to, and checks that it gets back what it said."""
    given = ({"query": "company founder"}, {"add_ids": ["D1"], "importance": {"D1": "high"}}, {})
    names = ("search_corpus", "curate", "end_search")

    def said(turn: int) -> dict[str, Any]:
        return answer(call(names[turn], reasoning=REASONS[turn], **given[turn]))

    def reply(method: str, path: str, body: bytes) -> tuple[int, bytes]:
        asked.append(json.loads(body))
        messages: Sequence[dict[str, Any]] = asked[-1]["messages"]
        check(messages)
        earlier = [message for message in messages if message["role"] == "assistant"]
        for turn, message in enumerate(earlier):
            before = said(turn)["choices"][0]["message"]["tool_calls"][0]["function"]
            assert message["tool_calls"][0]["function"] == before
        return 200, json.dumps(said(len(earlier))).encode()

    return reply


@pytest.mark.service
def test_a_hosted_teacher_is_asked_for_reasons_and_speaks_the_format_of_its_student(index: str, tmp_path: Path) -> None:
    asked: list[dict[str, Any]] = []
    student, out = saved(tmp_path / "student"), tmp_path / "run"
    with imitating(teacher(asked)) as url:
        spec = f"openai:big@{url}/v1"
        options = ("--teacher", spec, "--limit", "1", "--tokenizer", student, "--format", "compact")
        (episode,) = run_of(out, index, *options)
    declared = {tool["function"]["name"]: tool["function"]["parameters"] for tool in asked[0]["tools"]}
    assert all("reasoning" in parameters["required"] for parameters in declared.values())
    assert "importance" in declared["curate"]["required"]
    assert (episode.status, tuple(turn.reasoning for turn in episode.turns)) == (Status.COMPLETED, REASONS)
    actions = [turn.action for turn in episode.turns]
    assert actions[0] == call("search_corpus", query="company founder")
    assert actions[2] == call(END.name, reasoning=REASONS[2])
    chat = open_format("compact", tokenizer("chatml"))
    for turn in episode.turns:
        (spoken,) = turn.calls
        assert turn.action is not None
        assert spoken.output_ids == chat.format_action(turn.reasoning, turn.action)
    assert replay_episode(episode, run_config(out)[0].env).difference is None


NAME = open_source(WORLD).name
CHOSEN = Selection(dataset="scifact", split="train", tasks=9, held_out=("3",), learned=("1", "2"))


def card(folder: Path, verb: str = "run", **outputs: object) -> Path:
    Stage(verb, {}, outputs=outputs).write(folder)
    return folder


def test_tasks_are_those_that_runs_trainings_and_profiles_name_together(tmp_path: Path) -> None:
    one, two = (
        card(tmp_path / verb, verb, selections=[msgspec.to_builtins(CHOSEN)]) for verb in ("rl train", "rl pivots")
    )
    assert tasks_of_runs([one]) == tasks_of_runs([two]) == {("scifact", task) for task in ("1", "2", "3")}
    more = msgspec.structs.replace(CHOSEN, dataset="fm2", learned=("9",), held_out=())
    other = card(tmp_path / "other", "rl train", selections=[msgspec.to_builtins(more)])
    assert tasks_of_runs([one, str(other)]) == tasks_of_runs([one]) | {("fm2", "9")}
    assert tasks_of_runs([]) == frozenset()
    Stage("run", {"dataset": WORLD, "split": "train", "tasks": ["train-1"]}).write(tmp_path / "run")
    assert tasks_of_runs([tmp_path / "run"]) == {(NAME, "train-1")}


def test_a_folder_that_does_not_say_what_it_was_made_of_is_refused(tmp_path: Path) -> None:
    for folder in (tmp_path / "nothing", card(tmp_path / "other", "rl train")):
        with pytest.raises(UsageError, match="no card there says"):
            tasks_of_runs([folder])
    broken = ({"selections": [{"dataset": 1}]}, {"selections": "all"})
    for folder in (*(card(tmp_path / str(at), "rl train", **each) for at, each in enumerate(broken)), card(tmp_path)):
        with pytest.raises(SchemaError, match="which tasks it was made of"):
            tasks_of_runs([folder])
