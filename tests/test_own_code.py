"""Code of one's own without a package: the examples, in this process and in two workers, and what is refused."""

from __future__ import annotations

import asyncio
import runpy
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

import harness1 as h
from harness1 import api, plugins
from harness1.config import Config, load_config
from harness1.config.training import sum_of
from harness1.env.environment import env_hash
from harness1.episodes.jobs import EpisodeSetup, refuse_session_names
from harness1.errors import ConfigError, InfrastructureFault, UsageError
from harness1.plugins import load_own
from harness1.policy.registry import open_policy, policy_of
from harness1.records import Status
from harness1.retrieval.open import FunctionRetriever, open_retriever
from harness1.retrieval.protocol import SearchRequest, SearchResult
from harness1.reward import call_own, composite
from harness1.reward.measures import Outcome
from harness1.tools.tool import build_tool, text_tool
from tests.cli.commands import Command, command_in_process
from tests.sft.test_fine_tuning import SHORT, save_student
from tests.support import ended_episode, make_env, play, run, search

FEW = (
    *(each for each in SHORT if not each.startswith("machine.device")),
    *("sft.gates.recall=0.0", "sft.gates.near=1.0", "sft.held_out=0.25", "train.epochs=1", "train.batch_rows=4"),
    *("train.lora.rank=2", "train.watch.every=0", "train.watch.rows=1", "train.watch.turns=1", "train.watch.tasks=0"),
)
EXAMPLES = Path(__file__).parent.parent / "examples"
NAMES = ("own_dataset", "own_tool", "own_reward", "own_policy")

MINE = '''
from harness1 import ToolCall, ToolError

def lookup(word: str) -> str:
    """Look a word up."""
    if word == "odd":
        raise ToolError("no odd words")
    if word == "broken":
        raise KeyError(word)
    return f"{word} is a word" if word != "number" else 7

def few(case) -> float:
    return -len(case.curated) / 30

class Looker:
    def act(self, context):
        calls = [ToolCall("search_corpus", {"query": context.view.query}), ToolCall("lookup", {"word": "punched"})]
        return calls[context.turn - 1] if context.turn < 3 else ToolCall("end_search", {"reasoning": "done"})

def stop(context):
    return ToolCall("end_search", {"reasoning": "at once"})

def search(query, k):
    return [{"id": "a", "title": "A", "text": f"about {query}"}, {"id": "b", "text": "more"}][:k]
'''


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    plugins._import_file.cache_clear()
    plugins._first_digest.cache_clear()


@pytest.fixture
def harness1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return command_in_process(monkeypatch, capsys)


@pytest.fixture
def mine(tmp_path: Path) -> str:
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    return str(path)


def example(name: str) -> ModuleType:
    module: ModuleType = plugins._of_file(EXAMPLES / f"{name}.py")[0]
    return module


@pytest.mark.parametrize("name", NAMES)
def test_an_example_fits_on_a_page_and_runs(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = EXAMPLES / f"{name}.py"
    assert len(path.read_text().splitlines()) <= 25
    runpy.run_path(str(path), run_name="__main__")
    assert "recorded in" in capsys.readouterr().out


def test_the_examples_play_together_in_one_process_and_alike_in_two_workers() -> None:
    data, tool = example("own_dataset").DATA, example("own_tool").lookup_price
    policy, brevity = example("own_policy").FirstHits, example("own_reward").brevity
    env = h.Env(tools=[*h.TOOLS, tool], reward=[h.reward.recall, (brevity, 0.2)])
    one = h.evaluate(env, data, policy=policy(), samples=4)
    two = h.evaluate(env, data, policy=policy, samples=4, workers=2)
    assert [each.reward for each in one.episodes] == [each.reward for each in two.episodes]
    assert one.metrics == two.metrics
    terms = one.episodes[0].reward.terms
    assert (terms["recall"].value, terms["brevity"].weight) == (1.0, 0.2)
    assert terms["brevity"].value == -len(one.episodes[0].curated) / 30
    assert "lookup_price" in {spec.name for spec in make_env(env.config.env).toolbox.specs}


def test_names_of_a_file_are_taken_by_the_commands_and_its_hash_is_kept(
    mine: str, tmp_path: Path, harness1: Command
) -> None:
    out = str(tmp_path / "run")
    options = ("--tool", f"{mine}:lookup", "--reward", "recall", "--reward", f"{mine}:few=0.5")
    ended = harness1("eval", "world:60", "--policy", f"{mine}:Looker", *options, "--limit", "2", "--out", out)
    assert ended.code == 0, ended.err
    episode = h.load_run(out).episodes[0]
    assert episode.turns[1].observation.notes[0].data == {"text": "punched is a word"}
    assert set(episode.reward.terms) == {"recall", "few"}
    assert harness1("replay", out).code == 0


def test_a_file_decides_hashes_by_what_it_holds_and_not_by_where_it_lies(tmp_path: Path) -> None:
    def hashes(folder: str, text: str) -> tuple[str, str, str]:
        path = tmp_path / folder / "mine.py"
        path.parent.mkdir()
        path.write_text(text)
        config = load_config(tools=[f"{path}:lookup"], rewards={f"{path}:few": 0.5})
        return env_hash(config.env), config.reward_hash, open_policy(f"{path}:Looker").hash

    here, there, changed = hashes("a", MINE), hashes("b", MINE), hashes("c", f"{MINE}\n# more")
    assert here == there
    assert all(one != other for one, other in zip(here, changed, strict=True))
    assert here[0] != env_hash(Config().env)


def test_a_text_tool_answers_refuses_and_fails(mine: str) -> None:
    env = make_env(load_config(None, ["machine.attempts=1"], tools=[f"{mine}:lookup"]).env)
    steps = play(env, *(h.ToolCall("lookup", {"word": word}) for word in ("a\nb", "odd")))
    assert steps[0].observation.notes[0].data == {"text": "a\nb is a word"}
    assert steps[1].observation.error.data == {"reason": "no odd words"}
    context = env.state.context
    shown = "\n".join(piece.text for piece in context.pieces)
    assert "It returned: a b is a word" in shown
    assert "Not done: no odd words" in shown
    Path(mine).write_text(MINE.replace("no odd words", "no \\ud800 words"))
    (step,) = play(make_env(load_config(tools=[f"{mine}:lookup"]).env), h.ToolCall("lookup", {"word": "odd"}))
    assert msgspec.json.encode(step.observation)


@pytest.mark.parametrize(("word", "why"), [("broken", "KeyError: 'broken'"), ("number", "returned int, not a text")])
def test_a_fault_of_a_tool_breaks_the_episode_and_not_the_run(mine: str, word: str, why: str) -> None:
    def act(context: h.Context) -> h.ToolCall:
        return h.ToolCall("lookup", {"word": word})

    env = h.Env(tools=[*h.TOOLS, f"{mine}:lookup"], settings={"machine.attempts": 1})
    found = h.evaluate(env, example("own_dataset").DATA, policy=api.policy_of(act, f"{mine}:stop"))
    assert {each.status for each in found.episodes} == {Status.INFRA_ERROR}
    assert why in (found.episodes[0].error or "")


@pytest.mark.parametrize("value", [float("nan"), 1e308, 10**400, "0.5", None])
def test_a_reward_that_is_no_finite_number_is_refused_at_its_term(value: Any, tmp_path: Path) -> None:
    path = tmp_path / "odd.py"
    path.write_text(f"from math import inf, nan\n\ndef odd(case):\n    return {value!r}\n")
    config = load_config(rewards={f"{path}:odd": 1.0})
    with pytest.raises(UsageError, match=r"the reward term 'odd' returned .* for task 't': a term is a finite number"):
        composite(Outcome(set_size=1), ended_episode(), config)


def test_numbers_of_numpy_are_numbers(tmp_path: Path) -> None:
    path = tmp_path / "even.py"
    path.write_text("import numpy\n\ndef even(case):\n    return numpy.array(0.25)\n")
    found = composite(Outcome(set_size=1), ended_episode(), load_config(rewards={f"{path}:even": 2.0}))
    assert (found.total, type(found.terms["even"].value)) == (0.5, float)


def test_the_sum_of_terms_has_no_floor_and_no_reward_of_its_own_for_nothing(mine: str) -> None:
    config = load_config(rewards={"recall": 1.0, f"{mine}:few": 3.0})
    assert composite(Outcome(), ended_episode(), config).total == 0.0
    assert sum_of({"recall": 2.0}).weights["outcome"] == 0.0
    assert h.Env(reward=[h.reward.recall, (h.reward.clutter, 0.5)]).config.reward == sum_of(
        {"recall": 1, "clutter": 0.5}
    )


def test_an_environment_offers_the_tools_that_it_is_given() -> None:
    kept = [tool for tool in h.TOOLS if tool.__name__ != "grep_corpus"]
    config = h.Env(tools=kept, settings={"env.max_turns": 4}).config
    assert (config.env.has("grep"), config.env.has("read"), config.env.max_turns) == (False, True, 4)
    with pytest.raises(ConfigError, match="an environment always has the tool search_corpus"):
        h.Env(tools=[])


def test_what_cannot_be_found_by_its_name_is_refused_with_the_reason() -> None:
    def local(case: h.Case) -> float:
        return 0.0

    with pytest.raises(UsageError, match=r"local is not at the top level of a file"):
        h.Env(reward=[local])
    with pytest.raises(UsageError, match=r"<lambda> is not at the top level"):
        h.Env(reward=[lambda case: 0.0])


def test_an_evaluation_runs_where_a_notebook_has_its_event_loop() -> None:
    async def cell() -> int:
        return len(h.evaluate(h.Env(), example("own_dataset").DATA, policy=example("own_policy").FirstHits()).episodes)

    assert run(cell()) == 2


def test_what_was_typed_into_a_session_plays_in_its_process_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    session = ModuleType("__main__")
    exec("def typed(case): return 1.0", vars(session))
    monkeypatch.setitem(sys.modules, "__main__", session)
    env = h.Env(reward=[vars(session)["typed"]])
    assert composite(Outcome(), ended_episode(), env.config).total == 1.0
    with pytest.raises(UsageError, match="typed was typed into this session, where worker processes cannot find it"):
        refuse_session_names(EpisodeSetup(env.config, "index", "scripted"))
    exec("def typed(case): return 2.0", vars(session))
    with pytest.raises(UsageError, match="typed was defined anew since"):
        composite(Outcome(), ended_episode(), env.config)


def test_a_function_finds_documents_that_can_be_read(mine: str) -> None:
    retriever = open_retriever(f"{mine}:search", load_config(None, ["env.grep.on=false"]))
    found = run(retriever.search([SearchRequest("bees", 2)]))[0]
    assert [hit.chunk.text for hit in found.hits] == ["about bees", "more"]
    with pytest.raises(ConfigError, match=r"--set env.grep.on=false"):
        open_retriever(f"{mine}:search")


def test_a_model_is_trained_on_a_teacher_and_plays(tmp_path: Path) -> None:
    save_student(tmp_path / "model")
    settings = {name: msgspec.toml.decode(f"v = {value}")["v"] for name, _, value in (s.partition("=") for s in FEW)}
    env = h.Env(config="sft/small", settings=settings)
    student = h.train(env, "world:60", tmp_path / "model", tmp_path / "student", limit=4)
    assert h.train(env, "world:60", tmp_path / "model", tmp_path / "student", limit=4) == student  # it is there
    assert len(h.load_run(tmp_path / "student.teacher").episodes) == 4
    run = h.evaluate(env, "world:60", policy=f"hf:{student}", limit=1)
    assert len(run.episodes) == 1
    with pytest.raises(UsageError, match="there is no method 'ppo'"):
        h.train(env, "world:60", "model", "out", method="ppo")


WRONG: dict[str, Callable[[Path], object]] = {
    "nowhere.py: no such file": lambda path: load_config(tools=["nowhere.py:lookup"]),
    r"has no 'lookop'; did you mean lookup\?": lambda path: load_config(tools=[f"{path}:lookop"]),
    "bad.py cannot be imported: ZeroDivisionError": lambda path: load_config(tools=[f"{path.with_name('bad.py')}:x"]),
    "env.plugins names a tool twice": lambda path: load_config(
        tools=[f"{path}:lookup", f"{path.with_name('other.py')}:lookup"]
    ),
    "curate has the name of a tool of harness1": lambda path: make_env(
        load_config(tools=[f"{path.with_name('taken.py')}:curate"]).env
    ),
    "the tool search has no docstring": lambda path: make_env(load_config(tools=[f"{path}:search"]).env),
    "is no policy: give a function of a context, or a class with": lambda path: open_policy(f"{path}:MINE"),
    r"returned 3: return ToolCall\(NAME, ARGUMENTS\)": lambda path: run(
        open_policy(f"{path}:few2").open(h.Task("t", "q"), 0).act(None)
    ),
}


@pytest.mark.parametrize("why", WRONG)
def test_a_wrong_name_or_thing_is_refused_in_one_line(why: str, mine: str, tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("1 / 0")
    (tmp_path / "other.py").write_text(MINE)
    (tmp_path / "taken.py").write_text("def curate(word: str) -> str:\n    'Curate.'\n    return word\n")
    Path(mine).write_text(f"{MINE}\nMINE = 3\n\ndef few2(context):\n    return 3\n")
    with pytest.raises(UsageError, match=why):
        WRONG[why](Path(mine))


@pytest.mark.parametrize(
    ("documents", "tasks", "why"),
    [
        ([], [], "the dataset has no documents"),
        ([{"title": "x"}], [], "document 1 is no text"),
        ([{"id": "a", "text": "x"}] * 2, [], "two documents have the same id"),
        (["x"], [{"relevant": ["d1"]}], "task 1 has no question"),
        (["x"], [{"question": "q"}], "task 1 names no relevant document"),
        (["x"], [{"question": "q", "relevant": None, "answers": None}], "task 1 names no relevant document"),
        (["x"], [{"question": "q", "relevant": {"d1": 0}}], "task 1 names no relevant document"),
        (["x"], [{"question": "q", "relevant": "d1", "split": "a/b"}], "task 1 is in a split 'a/b'"),
        (["x"], [{"question": "q", "relevant": "d1", "id": "t2"}, {"question": "r", "relevant": "d1"}], "id 't2'"),
        (["x"], [{"question": "q", "relevant": ["d2"]}], "task 1 names 'd2', which is no document of the dataset"),
    ],
)
def test_a_dataset_of_ones_own_is_checked_as_it_is_made(documents: list[Any], tasks: list[Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        h.Dataset(documents, tasks)


def test_a_dataset_of_values_is_one_folder_however_often_it_is_made() -> None:
    task = {"question": "q?", "relevant": "d1", "answers": "Paris"}
    one, two = (h.Dataset([{"text": "a text", "title": None}], [task]) for _ in range(2))
    assert one.place == two.place
    assert (one.source.tasks("test")[0].gold or h.Gold({})).answers == ("Paris",)
    assert (one.source.tasks("test")[0].gold or h.Gold({})).relevant == {"d1": 1}
    assert h.load(["a text"]).source.splits == ()
    with pytest.raises(UsageError, match="no such file or folder"):
        h.load("./nowhere")


@pytest.mark.parametrize("weight", ["nan", "inf"])
def test_a_weight_that_is_no_finite_number_is_refused(weight: str, harness1: Command) -> None:
    refused = harness1("eval", "world:60", "--reward", f"recall={weight}", "--limit", "1", "--out", "out")
    assert refused.code == 2
    assert not Path("out").exists()
    with pytest.raises(ConfigError, match="finite"):
        h.Env(reward=[(h.reward.recall, float(weight))])
    with pytest.raises(ConfigError, match="float"):
        h.Env(reward=[(h.reward.recall, "0.2")])


def test_a_whole_reward_stands_alone_and_a_term_once(harness1: Command) -> None:
    for given, why in ((["robust", "recall"], "robust is a whole reward"), (["recall", "recall=2"], "recall twice")):
        words = [word for each in given for word in ("--reward", each)]
        refused = harness1("eval", "world:60", *words, "--limit", "1", "--out", "out")
        assert (refused.code, why in refused.err) == (2, True), refused.err
    assert harness1("eval", "world:60", "--reward", "sum", "--limit", "1", "--out", "out").code == 2


def test_a_file_that_was_edited_is_imported_anew_under_its_new_hash(mine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)  # an edit within a second leaves the name of cached code

    def played() -> tuple[float, str]:
        config = load_config(rewards={f"{mine}:few": 1.0})
        found = composite(Outcome(), ended_episode(), config)
        return found.total, config.reward_hash

    Path(mine).write_text(f"{MINE}\ndef few(case):\n    return 1.0\n")
    first = played()
    Path(mine).write_text(f"{MINE}\ndef few(case):\n    return 2.0\n")
    second = played()
    assert (first[0], second[0]) == (1.0, 2.0)
    assert first[1] != second[1]


def test_a_script_that_runs_through_a_link_is_not_imported_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "real_terms.py").write_text("def one(case):\n    return 1.0\n")
    (tmp_path / "linked_terms.py").symlink_to(tmp_path / "real_terms.py")
    monkeypatch.syspath_prepend(tmp_path)
    one = __import__("linked_terms").one
    assert plugins.load_own(plugins.own_name(one)) is one


def test_a_module_that_changed_after_its_import_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "terms_of_mine.py").write_text("def one(case):\n    return 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    terms = __import__("terms_of_mine")
    h.Env(reward=[terms.one])
    (tmp_path / "terms_of_mine.py").write_text("def one(case):\n    return 2.0\n")
    with pytest.raises(UsageError, match="has changed since this process imported it"):
        h.Env(reward=[terms.one])


def test_a_run_is_scored_again_with_a_reward_that_was_edited(mine: str, tmp_path: Path, harness1: Command) -> None:
    words = ("eval", "world:60", "--reward", f"{mine}:few", "--limit", "1", "--out", str(tmp_path / "run"))
    assert harness1(*words).code == 0
    Path(mine).write_text(f"{MINE}\ndef few(case):\n    return 5.0\n")
    refused = harness1("replay", str(tmp_path / "run"))
    assert (refused.code, "few as it was" in refused.err) == (2, True)
    assert harness1(*words, "--rescore").code == 0
    assert h.load_run(tmp_path / "run").episodes[0].reward.total == 5.0


@pytest.mark.parametrize(("kind", "why"), [("reward", "the reward term 'fails' failed for task"), ("policy", "failed")])
def test_what_fails_in_code_of_ones_own_is_named_with_its_place(
    kind: str, why: str, mine: str, tmp_path: Path, harness1: Command
) -> None:
    Path(mine).write_text(f"{MINE}\ndef fails(given):\n    return 1 / 0\n")
    ended = harness1("eval", "world:60", f"--{kind}", f"{mine}:fails", "--limit", "1", "--out", str(tmp_path / "run"))
    assert ended.code == 2
    assert why in ended.err
    assert "ZeroDivisionError: division by zero" in ended.err
    assert "mine.py:" in ended.err


ODD = """
def fails(*given): END
def shout(memory, env, word: str):
    \"\"\"Shout.\"\"\"
    END
def chant(memory, env, word: str):
    \"\"\"Chant.\"\"\"
    END
    yield
def lookup(word: str) -> str:
    \"\"\"Look up.\"\"\"
    END
class Fails:
    def __init__(self): END
"""
ENDS = {"raise SystemExit(0)": "SystemExit: 0", "raise KeyError(7)": "KeyError: 7"}
ENDS |= {"raise GeneratorExit": "GeneratorExit", "import asyncio; raise asyncio.CancelledError": "CancelledError"}


@pytest.mark.parametrize("way", ENDS)
def test_own_code_that_would_end_the_process_has_failed(way: str, tmp_path: Path) -> None:
    odd = tmp_path / "odd.py"
    odd.write_text(ODD.replace("END", way))
    fails, task = load_own(f"{odd}:fails"), h.Task("t", "who?")
    config = load_config(None, ["env.grep.on=false"], tools=[f"{odd}:{name}" for name in ("lookup", "shout", "chant")])
    of_the_user = [
        lambda: call_own("odd", fails, ended_episode()),
        lambda: run(policy_of(fails, f"{odd}:fails").open(task, 0).act(None)),
        lambda: policy_of(load_own(f"{odd}:Fails"), f"{odd}:Fails"),
        lambda: open_retriever(f"{odd}:Fails", config),
    ]
    for does in of_the_user:
        with pytest.raises(UsageError, match=rf"{ENDS[way]}.*odd\.py:"):
            does()
    of_the_episode = [
        lambda: play(make_env(config.env, retriever=open_retriever(f"{odd}:fails", config)), search("x")),
        lambda: play(make_env(config.env), h.ToolCall("lookup", {"word": "x"})),
        *(partial(play, make_env(config.env), h.ToolCall(name, {"word": "x"})) for name in ("shout", "chant")),
    ]
    for does in of_the_episode:
        with pytest.raises(InfrastructureFault, match=ENDS[way]):
            does()


def test_ctrl_c_and_the_end_of_its_task_are_no_failure_of_own_code() -> None:
    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    async def waits(_: object) -> None:
        await asyncio.sleep(60)

    async def ends(given: Any) -> None:
        async with asyncio.timeout(0.01):
            await policy_of(given, "own").open(h.Task("t", "who?"), 0).act(None)

    with pytest.raises(KeyboardInterrupt):
        run(ends(interrupted))
    with pytest.raises(TimeoutError):
        run(ends(waits))


@dataclass
class Room:
    name: str
    beds: int


class Held:
    __slots__ = ("client", "depth", "lock")

    def __init__(self, depth: int) -> None:
        self.depth, self.lock, self.client = depth, threading.Lock(), object()

    def act(self, context: h.Context) -> h.ToolCall:
        return h.ToolCall("end_search", {"reasoning": str(self.depth)})


def test_a_policy_may_hold_what_cannot_be_copied_and_is_known_by_the_rest() -> None:
    assert policy_of(Held(3)).hash == policy_of(Held(3)).hash != policy_of(Held(4)).hash
    assert len(h.evaluate(h.Env(), example("own_dataset").DATA, policy=Held(3)).episodes) == 2
    with pytest.raises(UsageError, match="has a state of its own"):
        h.evaluate(h.Env(), example("own_dataset").DATA, policy=Held(3), workers=2)


def test_a_policy_that_is_defined_in_a_function_plays_in_its_process() -> None:
    def stop(context: h.Context) -> h.ToolCall:
        return h.ToolCall("end_search", {"reasoning": "at once"})

    class Local:
        def act(self, context: h.Context) -> h.ToolCall:
            return stop(context)

    data = example("own_dataset").DATA
    for policy in (lambda context: stop(context), Local, Local().act):
        assert len(h.evaluate(h.Env(), data, policy=policy, limit=1).episodes) == 1
    with pytest.raises(UsageError, match="not at the top level"):
        h.evaluate(h.Env(), data, policy=stop, workers=2)


def test_a_retriever_that_returns_nonsense_is_a_fault_and_a_document_counts_once(tmp_path: Path) -> None:
    def search(query: str, count: int) -> list[dict[str, Any]]:
        rows = [{"id": "a", "text": "1", "title": None}, {"id": "a", "text": "2"}, {"id": "b", "text": "3"}]
        return [*rows, {"id": "c", "text": "4", "score": float("nan")}] if query == "nan" else rows

    retriever = FunctionRetriever(search, "hash")
    (found,) = run(retriever.search([SearchRequest("q", 5)]))
    assert isinstance(found, SearchResult)
    assert [(hit.chunk.chunk_id, hit.chunk.title) for hit in found.hits] == [("a", ""), ("b", "")]
    with pytest.raises(ValueError, match="finite number, not nan"):
        run(retriever.search([SearchRequest("nan", 5)]))


def test_the_schema_of_a_tool_holds_the_classes_of_its_parameters_and_odd_ones_are_refused() -> None:
    def shell(env: str, command: str) -> str:
        """Run a command."""
        return env + command

    def book(room: Room) -> str:
        """Book a room."""
        return room.name

    def odd(words: list[str] = ["a"]) -> str:  # noqa: B006
        """Do something odd."""
        return words[0]

    schema = build_tool(text_tool(book), Config().env).spec.parameters
    assert schema["properties"]["room"] == {"$ref": "#/$defs/Room"}
    assert schema["$defs"]["Room"]["properties"]["beds"]["type"] == "integer"
    with pytest.raises(UsageError, match="calls a parameter 'env'"):
        h.tool(shell)
    with pytest.raises(UsageError, match="the tool odd cannot be described to a policy"):
        build_tool(text_tool(odd), Config().env)
