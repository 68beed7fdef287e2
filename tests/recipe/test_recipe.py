"""Recipes: what a file may say, which commands it stands for, and how a run of it goes on after whatever ended it."""

from __future__ import annotations

import json
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from harness1.cli.main import Verb, Verbs, app
from harness1.cli.recipe import check_commands, parse_command
from harness1.config import Config, load_config
from harness1.data.open import open_source
from harness1.errors import ConfigError, UsageError
from harness1.eval.evaluate import Evaluation, evaluate
from harness1.recipe.gates import GATES, GateRuling, StageCase, artifact, hash_input, judge_stage, metrics_of
from harness1.recipe.recipe import PLAIN, Recipe, load_recipe, recipe_of, shipped_recipes
from harness1.recipe.run import (
    HASHING,
    JOURNAL,
    RecipeRun,
    RecipeState,
    StageFailed,
    StagePlan,
    StageRecord,
    hold_folder,
    put_in_words,
    read_recipe_state,
    run_verb,
)
from harness1.records import DocId
from harness1.retrieval.build import build_index
from harness1.retrieval.corpus import Document
from harness1.runs.files import Stage, lock, write_json
from tests.cli.commands import command_in_process

CHAIN: dict[str, Any] = {
    "title": "a chain",
    "config": "micro",
    "set": {"machine": {"workers": 1}},
    "values": {"size": 3},
    "inputs": {"notes": ""},
    "stages": {
        "first": {"run": "index {notes} --out {out}", "gates": {"documents": False, "damaged": False}},
        "second": {"run": "eval {first} --limit {size} --out {out}", "set": {"env.max_turns": 4}},
        "third": {"run": "compare {second} {second} --out {out}"},
        "aside": {"run": "data check {notes}"},
    },
}
QUIET = {"faults": False, "terms": False}
EVERY = ["index", "eval", "compare", "data"]


class Commands:
    """Plays `harness1`: writes a folder for each command, and remembers what was run and told."""

    def __init__(self) -> None:
        self.verbs: list[str] = []
        self.processes: list[int] = []
        self.codes: dict[str, int] = {}
        self.before: dict[str, Callable[[], object]] = {}
        self.told: list[tuple[str, str]] = []

    def __call__(self, words: Sequence[str], log: Path, processes: int) -> int:
        self.verbs.append(words[0])
        self.processes.append(processes)
        self.before.get(log.stem, lambda: None)()
        if "--out" in words:
            folder = Path(words[words.index("--out") + 1])
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "made.txt").write_text(" ".join(words[:2]))
        return self.codes.get(log.stem, 0)

    def watch(self, event: str, stage: str, record: StageRecord) -> None:
        self.told.append((event, stage))


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    folder = tmp_path / "notes"
    folder.mkdir()
    (folder / "a.md").write_text("Ada was born in Grimsby.")
    return folder


def recipe(notes: Path, **stages: dict[str, Any]) -> Recipe:
    """The chain over some notes; gates that would need real runs are left out."""
    changed = {**CHAIN["stages"], **stages}
    changed["second"] = {**changed["second"], "gates": QUIET | changed["second"].get("gates", {})}
    return recipe_of({**CHAIN, "inputs": {"notes": str(notes)}, "stages": changed}, "chain")


def work_of(notes: Path, commands: Commands, **stages: dict[str, Any]) -> RecipeRun:
    return RecipeRun(recipe(notes, **stages), notes.parent / "work", commands, commands.watch, parse_command)


def stage_case(folder: Path, *words: str) -> StageCase:
    return StageCase(*parse_command(words), folder)


def test_a_stage_is_a_command_with_its_settings(notes: Path) -> None:
    made = recipe(notes)
    assert made.words("first", Path("w")) == (
        *("index", str(notes), "--out", "w/first"),
        *("--config", "micro", "--set", "machine.workers=1"),
    )
    assert made.words("second", Path("w")) == (
        *("eval", "w/first", "--limit", "3", "--out", "w/second", "--config", "micro"),
        *("--set", "machine.workers=1", "--set", "env.max_turns=4"),
    )
    assert made.words("third", Path("my work")) == (
        *("compare", "my work/second", "my work/second", "--out", "my work/third"),
    )


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"stages": {"a": {"run": "index {b} --out {out}"}}}, r"stage a uses \{b\}"),
        ({"stages": {"a": {"run": "index {a}"}}}, r"stage a uses \{a\}"),
        ({"stages": {"a": {"run": "index 'notes"}}}, "No closing quotation"),
        ({"stages": {"size": {"run": "index x"}}}, "size cannot be the name of a stage"),
        ({"stages": {"a": {"run": "index x", "gates": {"orakel": 1.0}}}}, "a has a gate orakel; there are documents"),
        ({"stages": {"a": {"run": "index x", "sets": {}}}}, "unknown field `sets`"),
        ({"search": {"b.rate": {"low": 1.0, "high": 2.0}}}, "search varies b.rate"),
        ({"search": {"size": {"low": 2.0, "high": 1.0}}}, "low must be below high"),
        ({"search": {"size": {"choices": [1], "low": 1.0, "high": 2.0}}}, "give low and high, or choices"),
        ({"search": {"size": {"low": 0.0, "high": 2.0, "log": True}}}, "log needs low above 0"),
        ({"search": {"size": {"low": 0.0, "high": math.inf}}}, "low and high must be finite"),
        ({"search": {"size": {"low": -1e308, "high": 1e308}}}, "low and high must be finite"),
        ({"search": {"size": {"low": 0.5, "high": 2.0, "whole": True}}}, "whole needs whole numbers"),
        ({"objective": {"stage": "b", "metric": "reward"}}, "the objective names the stage b"),
    ],
)
def test_what_a_recipe_cannot_mean_is_refused(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=f"mine: .*{says}"):
        recipe_of({**CHAIN, **change}, "mine")


@pytest.mark.parametrize(
    "text",
    ["inputs = 5", "values = []", "stages = 'a'", "stages.a = 'x'", "stages.a.set = 5", "stages.a.gates = 3"],
)
def test_a_change_of_a_recipe_that_has_something_else_in_its_place_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "mine.toml").write_text(text)
    for change in ("v=1", "a.x=1", "a.gates.better=1"):
        with pytest.raises(ConfigError, match=r"mine\.toml: "):
            load_recipe(str(tmp_path / "mine.toml"), [change], ["a=b"])


@pytest.mark.parametrize("name", [*shipped_recipes()])
def test_the_recipes_of_the_package_can_be_read_by_name_and_by_path(name: str) -> None:
    by_name, by_path = (load_recipe(each, complete=False) for each in (name, f"recipes/{name}.toml"))
    assert by_name.hash == by_path.hash
    assert by_name.search.keys() <= {each for each in by_name.search if "." in each or each in by_name.values}
    assert by_name.objective is not None


def verbs_of(group: Verbs, name: str = "") -> Iterator[tuple[str, Verb]]:
    for each, verb in group.commands.items():
        if isinstance(verb, Verbs):
            yield from verbs_of(verb, f"{name}{each} ")
        else:
            assert isinstance(verb, Verb)
            yield f"{name}{each}", verb
            yield from ((f"{name}{each} {more}", inner) for more, inner in verb.more.items())


def test_every_gate_names_a_command_to_look_closer_with() -> None:
    verbs = {name for name, _ in verbs_of(app)}
    for gate in GATES.values():
        words = gate.look.split()
        assert words[0] in verbs or " ".join(words[:2]) in verbs
        assert "{out}" in words


def test_a_run_is_better_where_its_lead_over_each_of_the_others_is_beyond_chance(tmp_path: Path) -> None:
    source, config = (
        open_source("world:60:0:people"),
        load_config("micro", ["machine.workers=1", "env.context_window=1024"]),
    )
    build_index(source.documents(), tmp_path / "index", config.index)
    runs = {name: str(tmp_path / name) for name in ("oracle", "single-shot", "no-op")}
    for policy, run in runs.items():
        tasks = source.tasks("train")[:12]
        evaluate(Evaluation("world:60:0:people", "train", tasks, str(tmp_path / "index"), policy, config), Path(run))

    def found(*names: str) -> GateRuling:
        case = stage_case(tmp_path / "x", "compare", *(runs[name] for name in names), "--out", "x")
        return judge_stage(case, {"better": 0.0})[0]

    assert found("oracle", "no-op").passed
    assert found("oracle", "no-op", "oracle").value == 0.0
    behind = found("no-op", "oracle", "single-shot")
    assert (behind.passed, behind.look) == (False, f"harness1 compare RUN RUN --metric reward --out {tmp_path / 'x'}")
    assert judge_stage(stage_case(tmp_path, "compare", *runs.values()), {}) == []


def test_settings_are_given_to_the_verbs_that_take_them() -> None:
    takes = {
        name: {"--config", "--set"} <= {word for each in verb.load().params for word in each.opts}
        for name, verb in verbs_of(app)
    }
    assert {
        name: not name.startswith(PLAIN) for name in takes if not name.startswith(("recipe", "tune", "config"))
    } == {name: found for name, found in takes.items() if not name.startswith(("recipe", "tune", "config"))}


def test_changes_and_inputs_reach_the_commands() -> None:
    made = load_recipe("tiny", ["documents=50", "sft.train.rate=0.5"])
    assert "world:50:0:people" in made.words("world", Path("w"))
    assert "train.rate=0.5" in made.words("sft", Path("w"))
    bounds = load_recipe("tiny", ["rl.gates.progress=false", "oracle.gates.oracle=0.5"]).stages
    assert (bounds["rl"].gates, bounds["oracle"].gates) == ({"progress": False}, {"oracle": 0.5})
    with pytest.raises(ConfigError, match="stage rl has a gate luck"):
        load_recipe("tiny", ["rl.gates.luck=1"])
    for change, says in (("colour=1", "no value and no stage for colour"), ("documents", "NAME=VALUE")):
        with pytest.raises(UsageError, match=says):
            load_recipe("tiny", [change])
    with pytest.raises(UsageError, match=r"there is no recipe tony: give a TOML file, or one of .*tiny"):
        load_recipe("tony")
    with pytest.raises(UsageError, match="--input takes NAME=PLACE, not 'corpus=x'; the inputs of tiny are: none"):
        load_recipe("tiny", inputs=["corpus=x"])


def test_stages_run_in_order_and_nothing_is_done_twice(notes: Path) -> None:
    commands, second = Commands(), {**CHAIN["stages"]["second"], "processes": 4}
    journal = work_of(notes, commands, second=second).run()
    assert commands.verbs == EVERY
    assert commands.processes == [1, 4, 1, 1]
    assert {record.status for record in journal.stages.values()} == {"passed"}
    again = Commands()
    assert work_of(notes, again, second=second).run() == journal
    assert again.verbs == []
    assert again.told == [("had passed", name) for name in CHAIN["stages"]]


def test_a_command_that_fails_stops_there_and_is_run_again_with_other_settings_if_it_made_nothing(notes: Path) -> None:
    commands = Commands()
    commands.codes = {"second": 3, "aside": 2}
    with pytest.raises(StageFailed, match="stage second failed: its command ended with exit code 3"):
        work_of(notes, commands).run()
    assert commands.verbs == ["index", "eval"]
    del commands.codes["second"]
    with pytest.raises(StageFailed, match="stage aside failed"):
        work_of(notes, commands).run()
    commands.codes.clear()
    journal = work_of(notes, commands, aside={"run": "data check {first}"}).run()
    assert {each.status for each in journal.stages.values()} == {"passed"}
    assert commands.verbs == ["index", "eval", *EVERY[1:], "data"]


@pytest.mark.parametrize(("bound", "passes"), [(0.0, False), (2.0, True)])
def test_broken_episodes_are_judged_by_their_gate_and_not_by_the_exit_code(
    notes: Path, bound: float, passes: bool
) -> None:
    commands = Commands()
    commands.codes["second"] = 3
    card = Stage("run", {}, "finished", gates={"missing": 0, "failures": {"infra_error": 2}})

    def write_card() -> None:
        folder = notes.parent / "work" / "second"
        card.write(folder)
        (folder / "metrics.json").write_text('{"reward": {"mean": null}, "turns": {"mean": 2}}')

    commands.before["second"] = write_card
    work = work_of(notes, commands, second={**CHAIN["stages"]["second"], "gates": {"faults": bound}})
    if passes:
        assert work.run().stages["second"].status == "passed"
        assert work.run().stages["second"].metrics == {"turns": 2.0}
        return
    with pytest.raises(StageFailed, match="gate faults: episodes broken by the infrastructure: 2, bound 0"):
        work.run()


@pytest.mark.parametrize("value", ["x", [1], True])
def test_no_edited_number_ends_a_gate_in_a_traceback(tmp_path: Path, value: object) -> None:
    watched = {"train": {"watch": value}}
    Stage("index", watched, gates={"missing": value, "failures": value}, outputs={"documents": value}).write(tmp_path)
    (tmp_path / "metrics.json").write_text(json.dumps({"curated_recall": {"mean": value}}))
    for verb in (["index", "d"], ["sft", "collect", "--data", "d"], ["eval", "d"], ["rl", "train", "--model", "hf:m"]):
        case = StageCase(*parse_command([*verb, "--out", str(tmp_path)]), tmp_path)
        for ruling in judge_stage(case, {"documents": 1.0, "faults": 0.0, "recall": 2.0, "progress": True}):
            assert not ruling.passed
    assert metrics_of(tmp_path).keys() <= {"curated_recall"}


def test_a_gate_that_fails_stops_there_and_names_check_value_bound_and_command(notes: Path) -> None:
    commands = Commands()
    with pytest.raises(StageFailed) as failed:
        work_of(notes, commands, first={"run": "index {notes} --out {out}", "gates": {"damaged": False}}).run()
    assert commands.verbs == ["index"]
    (finding,) = failed.value.record.findings
    assert put_in_words(finding).startswith("gate documents: documents in the index")
    assert "bound 1; look closer: harness1 index check" in put_in_words(finding)
    work_of(notes, commands).run()  # the bound was the mistake
    assert commands.verbs == ["index", *EVERY]


def test_after_an_interrupt_the_stage_at_work_goes_on(notes: Path) -> None:
    commands = Commands()

    def interrupt() -> None:
        raise KeyboardInterrupt

    commands.before["second"] = interrupt
    with pytest.raises(KeyboardInterrupt) as ended:
        work_of(notes, commands).run()
    assert ended.value.__notes__ == ["the same command goes on from here"]
    assert read_recipe_state(notes.parent / "work").stages["second"].status == "running"
    commands.before.clear()
    work_of(notes, commands).run()
    assert commands.verbs == ["index", "eval", *EVERY[1:]]


def test_a_changed_setting_asks_for_the_stage_and_what_uses_it_to_be_done_again(notes: Path) -> None:
    commands = Commands()
    work_of(notes, commands).run()
    other = {"run": "eval {first} --limit 9 --out {out}"}
    with pytest.raises(UsageError, match=r"stage second was run with other settings \(9, .*\): --from second"):
        work_of(notes, commands, second=other).run()
    work_of(notes, commands, second=other).run(start_from="second")
    assert commands.verbs[4:] == ["eval", "compare"]
    with pytest.raises(UsageError, match="there is no stage fourth; there are first, second"):
        work_of(notes, commands).run(start_from="fourth")


@pytest.mark.parametrize(
    ("place", "during", "failed", "ran"),
    [
        ("notes/b.md", "aside", "aside failed: gate unchanged: changes to notes", EVERY),
        ("work/first/made.txt", "second", "second failed: gate unchanged: .*first", EVERY[:2]),
        ("work/first/made.txt", "", "first failed: gate unchanged: .*first", EVERY[:1]),
    ],
)
def test_what_somebody_changed_is_not_used(notes: Path, place: str, during: str, failed: str, ran: list[str]) -> None:
    commands = Commands()
    work = work_of(notes, commands)
    commands.before[during] = lambda: (notes.parent / place).write_text("foreign")
    if not during:
        work.run(until="first")
        commands.before[during]()
    with pytest.raises(StageFailed, match=f"stage {failed}"):
        work.run()
    assert commands.verbs == ran


def test_who_only_looks_whether_a_recipe_is_at_work_does_not_refuse_it(notes: Path) -> None:
    work = work_of(notes, Commands())
    work.run(until="first")
    with ThreadPoolExecutor(1) as others, (work.work / ".lock").open() as looking:
        lock(looking, "")
        others.submit(lambda: (time.sleep(0.15), looking.close()))
        with hold_folder(work.work):
            pass


def test_a_folder_of_something_else_or_at_work_is_refused(notes: Path) -> None:
    with pytest.raises(UsageError, match="notes is not empty and holds no recipe"):
        RecipeRun(recipe(notes), notes, Commands(), Commands().watch, parse_command).run()
    work = work_of(notes, Commands())
    with hold_folder(work.work), pytest.raises(UsageError, match="work is at work in another process"):
        work.run()


def test_the_time_left_is_what_the_recipe_expects_at_the_pace_so_far(notes: Path) -> None:
    expected = {"first": 10.0, "second": 20.0, "third": 5.0, "aside": 0.0}
    stages = {name: {**CHAIN["stages"][name], "takes": seconds} for name, seconds in expected.items()}
    journal = work_of(notes, Commands(), **stages).run(until="first")
    assert journal.plan == {"first": StagePlan("", 10.0)}
    assert journal.time_left(0.0) == 0.0

    def at(first: float, **more: Any) -> RecipeState:
        passed = msgspec.structs.replace(journal.stages["first"], seconds=first)
        plan = {name: StagePlan(takes=seconds) for name, seconds in expected.items()}
        return msgspec.structs.replace(journal, plan=plan, stages={"first": passed, **more})

    assert at(10.0).time_left(0.0) == 25.0
    assert at(30.0).time_left(0.0) == pytest.approx(25.0 * (30.0 + 3.5) / (10.0 + 3.5))  # a slower machine
    running = msgspec.structs.replace(journal.stages["first"], status="running", began=100.0, seconds=3.0)
    assert at(10.0, second=running).time_left(104.0) == 13.0 + 5.0
    assert at(10.0, second=running).time_left(500.0) == 5.0  # it takes longer than expected
    unknown = msgspec.structs.replace(at(10.0), plan=dict.fromkeys(expected, StagePlan()))
    assert unknown.time_left(0.0) is None


def test_the_commands_print_what_is_done_and_what_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    harness1 = command_in_process(monkeypatch, capsys)
    (tmp_path / "empty").mkdir()
    Path("mine.toml").write_text(
        'title = "mine"\n[inputs]\ndocs = "world:60"\n[stages.index]\nrun = "index {docs} --out {out}"\n'
    )
    done = harness1("recipe", "run", "mine.toml", "--out", "work", "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["stages"]["index"]["findings"][0]["value"] == 60.0
    assert "stage 1 of 1, index" in done.err
    assert "view work --serve" in done.err.splitlines()[1]
    shown = harness1("recipe", "status", "work")
    assert "2 of 2" in shown.out
    assert json.loads(harness1("recipe", "status", "work", "--json").out)["left"] == 0
    journal = read_recipe_state(Path("work"))
    planned = msgspec.structs.replace(journal, plan={"index": StagePlan(), "longer": StagePlan("more", 600.0)})
    write_json(Path("work") / JOURNAL, planned)
    under_way = harness1("recipe", "status", "work").out
    assert "to come" in under_way
    assert "left" not in under_way  # nobody works at it
    at_work = msgspec.structs.replace(journal.stages["index"], status="running", began=time.time())
    write_json(Path("work") / JOURNAL, msgspec.structs.replace(planned, stages={**planned.stages, "index": at_work}))
    assert "stopped: the same `recipe run`" in harness1("recipe", "status", "work").out  # nobody runs it
    with hold_folder(Path("work")):
        shown = harness1("recipe", "status", "work").out
        assert "running" in shown
        assert "about 10 min left" in shown
        assert json.loads(harness1("recipe", "status", "work", "--json").out)["at_work"]
    failed = harness1("recipe", "run", "mine.toml", "--out", "bad", "--input", "docs=empty", "--json")
    assert failed.code == 2
    assert json.loads(failed.out)["stages"]["index"]["status"] == "failed"
    assert "bad/logs/index.log" in failed.err
    assert harness1("recipe", "status", "empty").code == 2
    assert "tiny" in harness1("recipe", "list").out
    assert "another version" not in done.err
    write_json(Path("work") / JOURNAL, msgspec.structs.replace(journal, hashing=1))
    assert "work was begun by another version" in harness1("recipe", "run", "mine.toml", "--out", "work").err
    assert "another version" not in harness1("recipe", "run", "mine.toml", "--out", "work").err


@pytest.mark.parametrize(
    ("command", "settings", "said"),
    [
        ("indx {docs} --out {out}", "", "no command 'indx'; did you mean index"),
        ("eval {docs} --limits 3 --out {out}", "", "--limits"),
        ("eval {docs} --limit many --out {out}", "", "'--limit'"),
        ("eval {docs} --out {out}", '"env.max_turn" = 3', "env.max_turn"),
    ],
)
def test_a_stage_that_cannot_run_is_found_before_the_first_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str, settings: str,
    said: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    harness1 = command_in_process(monkeypatch, capsys)
    Path("mine.toml").write_text(
        'title = "mine"\n[inputs]\ndocs = "world:60"\n[stages.index]\nrun = "index {docs} --out {out}"\n'
        f'[stages.wrong]\nrun = "{command}"\nset = {{ {settings} }}\n'
        '[search]\n[objective]\nstage = "wrong"\nmetric = "m"'
    )
    for verb in (["recipe", "run"], ["tune"]):
        refused = harness1(*verb, "mine.toml", "--out", "work")
        assert refused.code == 2
        assert "stage wrong: " in refused.err
        assert said in refused.err
        assert "\n" not in refused.err.strip()
    assert not Path("work").exists()


def test_every_shipped_recipe_can_run() -> None:
    for file in shipped_recipes().values():
        check_commands(load_recipe(str(file), complete=False), Path("work"))


@pytest.mark.skipif(sys.platform != "linux", reason="the system call is Linux's")
def test_a_command_ends_with_the_recipe_that_is_killed(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from harness1.recipe.run import run_verb;"
        " run_verb(['serve', 'retrieve', '--index', sys.argv[1], '--port', '0'], Path(sys.argv[2]), quiet=True)"
    )
    index, log = tmp_path / "index", tmp_path / "log"
    assert run_verb(["index", "world:60", "--out", str(index)], log, quiet=True) == 0
    parent = subprocess.Popen([sys.executable, "-c", code, str(index), str(tmp_path / "serving")])
    children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")
    deadline = time.monotonic() + 60
    while not (pids := children.read_text().split()) and time.monotonic() < deadline:
        time.sleep(0.01)
    child = int(pids[0])
    while b"leash" not in Path(f"/proc/{child}/cmdline").read_bytes() and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.5)  # until it follows its parent, at the latest when it sees that it has another
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    while Path(f"/proc/{child}").exists() and "Z" not in Path(f"/proc/{child}/stat").read_text().split(")")[1]:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("verb", "content", "beside"),
    [
        ("rl train", "model.safetensors", "log.jsonl"),
        ("sft train", "tokenizer_config.json", "README.md"),
        ("rl train", "checkpoint.json", "episodes/stage.json"),
        ("run", "tasks.csv", "resources.json"),
        ("rl check", "policies/oracle/tasks.csv", "policies/oracle/resources.json"),
        ("data copy", "qrels/test.tsv", "README.md"),
        ("sft build", "card.json", "README.md"),
        ("unheard of", "made.txt", "stage.json"),
    ],
)
def test_an_artifact_is_its_content_wherever_it_lies_and_however_long_it_took(
    tmp_path: Path, verb: str, content: str, beside: str
) -> None:
    hashes = []
    for at, (made, told) in enumerate((("a", "1"), ("a", "2"), ("b", "1"))):
        folder = tmp_path / str(at) / "made"
        if verb:
            Stage(verb, {"number": told}).write(folder)
        for name, text in ((content, f"{made} of {folder.parent}"), (beside, told)):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            if name != "stage.json":
                (folder / name).write_text(text if name.endswith(".json") else text.partition(" ")[0])
        hashes.append(artifact(folder))
    assert hashes[0] == hashes[1] != hashes[2]
    assert artifact(tmp_path / "none") == ""


def test_an_index_is_what_its_files_say_and_not_its_card(tmp_path: Path) -> None:
    for name, text in (("one", "Ada was born in Grimsby."), ("two", "Ada was born in Hull.")):
        build_index([Document(DocId("a"), "A", text)], tmp_path / name, Config().index)
        Stage("index", {}, "finished", hashes={"index": "as it was"}).write(tmp_path / name)
    assert artifact(tmp_path / "one") != artifact(tmp_path / "two")


EDITS: dict[str, Callable[[Path], object]] = {
    "an edit": lambda notes: (notes / "a.md").write_text("Ada was born in Hull."),
    "an addition": lambda notes: (notes / "b.md").write_text("Bea was born in Hull."),
    "a deletion": lambda notes: (notes / "a.md").unlink(),
    "an addition below": lambda notes: (notes / "deep").mkdir() or (notes / "deep" / "b.md").write_text("x"),
    "a link that breaks": lambda notes: (notes / "l.md").symlink_to(notes / "none"),
    "a name that is not UTF-8": lambda notes: (notes / "\udcff.md").write_text("x"),
    "a card": lambda notes: (notes / "stage.json").write_text("x"),
}
HIDING = ("config.json", "tasks.csv", "train.jsonl", "corpus.jsonl", "tokenizer.json", "x.safetensors", "qrels/a.tsv")


@pytest.mark.parametrize("edit", EDITS)
def test_no_file_hides_what_changes_beside_it_in_an_input(notes: Path, edit: str) -> None:
    for name in HIDING:
        (notes / name).parent.mkdir(exist_ok=True)
        (notes / name).write_text("")
    Stage("index", {}, "finished", hashes={"index": "as it was"}).write(notes)
    work_of(notes, commands := Commands()).run(until="first")
    EDITS[edit](notes)
    with pytest.raises(UsageError, match=r"begun with other inputs \(notes\)"):
        work_of(notes, commands).run()
    assert commands.verbs == ["index"]


@pytest.mark.parametrize("named", ["{}", "browsecomp_plus:{}", "vllm:{}@http://localhost:8000", "{}:test"])
def test_an_input_that_names_a_place_in_any_way_is_what_lies_there(notes: Path, named: str) -> None:
    before = hash_input(named.format(notes))
    (notes / "a.md").write_text("Ada was born in Hull.")
    assert hash_input(named.format(notes)) != before
    assert hash_input("world:60:0:people") == "world:60:0:people"
    assert hash_input(f"{notes / 'a.md'}:own") == hash_input(str(notes / "a.md"))


def test_links_of_an_input_are_entered_as_its_reader_enters_them(notes: Path, tmp_path: Path) -> None:
    for name in ("qrels", "elsewhere"):
        (tmp_path / name).mkdir()
        (notes / name).symlink_to(tmp_path / name)
    (notes / "round").symlink_to(notes)
    before = [hash_input(str(notes), follow_links=each) for each in (False, True)]
    (tmp_path / "elsewhere" / "b.md").write_text("x")
    after = [hash_input(str(notes), follow_links=each) for each in (False, True)]
    assert [one == other for one, other in zip(before, after, strict=True)] == [True, False]
    (tmp_path / "qrels" / "test.tsv").write_text("x")
    assert hash_input(str(notes)) != before[0]


def test_edited_settings_ask_for_their_stage_again(notes: Path, tmp_path: Path) -> None:
    path = tmp_path / "my.toml"
    path.write_text("")
    second = {"run": f"eval {{first}} --config={path} --out {{out}}", "config": ""}
    work_of(notes, commands := Commands(), second=second).run()
    path.write_text("# edited")
    with pytest.raises(UsageError, match=rf"stage second was run with other settings \({path}\): --from second"):
        work_of(notes, commands, second=second).run()
    work_of(notes, commands, second=second).run("second")
    assert commands.verbs == [*EVERY, "eval", "compare"]


def test_a_link_to_other_settings_asks_for_its_stage_again(notes: Path) -> None:
    link, second = notes.parent / "my.toml", {"config": "", "run": f"eval {{first}} --config {notes}/../my.toml"}
    for name in ("a", "moved", "b"):
        (notes.parent / name).write_text("" if name != "b" else "# other")
        link.unlink(missing_ok=True)
        link.symlink_to(name)
        if name != "b":
            work_of(notes, Commands(), second=second).run()
    with pytest.raises(UsageError, match=r"stage second was run with other settings .*: --from second"):
        work_of(notes, Commands(), second=second).run()


@pytest.mark.parametrize("word", ["--tool={}:shout", "--config={}/../my.toml", "--set=env.plugins=[{}]"])
def test_own_code_is_seen_whatever_its_path_holds_and_wherever_it_is_named(notes: Path, word: str) -> None:
    path = notes.parent / "a, b=c: 'd' [e].py"
    path.write_text('def shout(text: str) -> str:\n    "Shout."\n    return text\n')
    (notes.parent / "my.toml").write_text(f"[env]\nplugins = [{json.dumps(f'{path}:shout')}]\n")
    word = word.format(notes if "my.toml" in word else json.dumps(f"{path}:shout") if "--set" in word else path)
    second = {"run": f"eval {{first}} {shlex.quote(word)} --out {{out}}", "config": ""}
    work_of(notes, Commands(), second=second).run()
    path.write_text(path.read_text() + "# edited")
    with pytest.raises(UsageError, match=r"stage second was run with other settings .*: --from second"):
        work_of(notes, Commands(), second=second).run()


def test_a_folder_of_an_earlier_version_goes_on_and_runs_again_only_what_is_hashed_otherwise(notes: Path) -> None:
    work = work_of(notes, Commands())
    state = work.run()
    work_of(notes, again := Commands()).run()
    assert again.verbs == []
    stages = {**state.stages, "second": replace(state.stages["second"], artifact="by known names")}
    stages["aside"] = replace(stages["aside"], needs={"notes": "by known names"})
    write_json(work.work / JOURNAL, replace(state, hashing=1, inputs={"notes": "by known names"}, stages=stages))
    ended = work_of(notes, again).run()
    assert again.verbs == ["eval", "data"]  # the result of `eval` is what it was
    assert ended.inputs == state.inputs
    assert {each.status for each in ended.stages.values()} == {"passed"}


def test_the_rules_of_hashes_have_a_number_which_folders_keep(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name in ("a.md", "sub/b.md"):
        (tmp_path / name).write_text(name)
    (tmp_path / "link").symlink_to("sub")
    found = (HASHING, hash_input(f"silent:hf:{tmp_path}@http://h/v1")[:8], artifact(tmp_path)[:8])
    # Where a hash changes, so must the number: else a folder that was begun before is refused, or goes on unseen.
    assert found == (3, "bb074cb3", "bb074cb3")


@pytest.mark.parametrize("form", [("--policy=scripted", "--policy", "oracle"), ("--policy=silent:oracle",)])
def test_a_gate_reads_a_command_as_the_program_does(tmp_path: Path, form: tuple[str, ...]) -> None:
    (tmp_path / "metrics.json").write_text('{"curated_recall": {"mean": 0.5}}')
    for words in (("eval", *form, "world:60"), ("eval", "world:60", "--out", "--policy", *form)):
        rulings = judge_stage(stage_case(tmp_path, *words), QUIET)
        assert [(each.gate, each.passed) for each in rulings] == [("oracle", False)], words
    for other in (("--policy", "oracle", "--policy", "scripted"), ("--policy=own.py:oracle",), ("--out=oracle",)):
        assert judge_stage(stage_case(tmp_path, "eval", "world:60", *other), QUIET) == []


@pytest.mark.parametrize("form", ["--model={}", "--model=hf:{}", "--model=vllm:{}@http://localhost:8000"])
def test_a_model_is_held_to_its_origin_however_it_is_named(tmp_path: Path, form: str) -> None:
    for name in ("base", "out"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokenizer.json").write_text(name)
    case = stage_case(tmp_path / "out", "rl", "train", "--data=d", form.format(tmp_path / "base"), "--out=x")
    found = {each.gate: each.passed for each in judge_stage(case, {})}
    assert (found["tokenizer"], found["origin"]) == (False, False)


@pytest.mark.parametrize("asks", ["eval {notes} --help", "--version", "sft"])
def test_a_stage_that_would_only_be_explained_is_refused(notes: Path, asks: str) -> None:
    with pytest.raises(ConfigError, match="stage aside: "):
        check_commands(recipe(notes, aside={"run": asks}), notes.parent / "work")
