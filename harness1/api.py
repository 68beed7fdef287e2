"""The Python face: a dataset, an environment with tools and a reward of one's own, evaluation and training.

What the commands do with names, these do with objects too. Progress is shown as the commands show it.
"""

from __future__ import annotations

import asyncio
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from harness1.cli.options import cache_of, place_of
from harness1.cli.playing import evaluate_aloud
from harness1.cli.printing import say
from harness1.cli.progress import read_aloud
from harness1.cli.rl import train_aloud
from harness1.cli.sft import fine_tune_aloud
from harness1.cli.training import refuse_oversized_rl
from harness1.config import Config, load_config
from harness1.data import beir
from harness1.data.indexing import index_of
from harness1.data.open import open_source
from harness1.data.source import Source
from harness1.episodes.jobs import EpisodeSetup
from harness1.errors import ConfigError, UsageError
from harness1.eval.cited import TOKENS, Answer, open_answerer
from harness1.eval.cited import ask as answer_question
from harness1.eval.evaluate import Evaluation
from harness1.eval.outputs import RecordedRun, load_run
from harness1.models.fetch import resolve_model
from harness1.models.open import choose_device
from harness1.plain import digest
from harness1.plugins import own_name
from harness1.policy.registry import check_policy, policy_of, state_of
from harness1.records import DocId, Gold, Task
from harness1.retrieval.corpus import Document
from harness1.reward import COMPONENTS, Case, Component
from harness1.rl.rollouts import open_policy_to_train, reserve_devices
from harness1.rl.train import TrainingInputs, open_task_training
from harness1.sft.build import Build, build
from harness1.sft.collect import is_hosted, student_place, teacher_policy, teaching_tasks
from harness1.tools.registry import TOOLS as SWITCHED
from harness1.tools.registry import tools_of
from harness1.tools.tool import ToolFunction
from harness1.training.process_group import ALONE

TOOLS: tuple[ToolFunction, ...] = tools_of(Config().env)
"""The tools that an environment offers unless it is told otherwise."""
Made = TypeVar("Made")
Term = Component | Callable[[Case], float] | str
"""A term of a reward: one of `harness1.reward`, a function of a `Case`, or the name of either."""


class Dataset:
    """A corpus, and perhaps tasks over it: questions with the documents that answer them.

    `Dataset(documents, tasks)` takes values, and keeps them as a BEIR folder in the user's cache, by their hash.

    Args:
        documents: texts; mappings with a `text`, and perhaps an `id` and a `title`; or `Document`s. Without an id, the
            first is `d1`.
        tasks: mappings with a `question` and the ids of its `relevant` documents (or a mapping of ids to grades), and
            perhaps an `id`, `answers` and a `split` (`test`, unless it says so); or `Task`s.
        place: a dataset on disk, in place of both: what `harness1 eval` takes.

    Raises:
        UsageError: a document has no text, a task no question, or it names a document that is not there.
    """

    def __init__(self, documents: Iterable[Any] = (), tasks: Iterable[Any] = (), *, place: str = "") -> None:
        self.place = place or _keep([*map(_document, range(1, sys.maxsize), documents)], [*tasks])

    @property
    def source(self) -> Source:
        """The dataset as the package reads it: `documents()`, `splits`, `tasks(split)`."""
        return open_source(self.place)

    def __repr__(self) -> str:
        return f"Dataset({self.place!r})"


def load(data: str | Path | Iterable[Any]) -> Dataset:
    """Return a dataset by its name in `harness1 data list`, its folder or file, or `world:SIZE`; a list is taken as
    documents.

    Raises:
        UsageError: there is no such dataset.
        InfrastructureFault: it has a name, and cannot be fetched.
    """
    if not isinstance(data, str | Path):
        return Dataset(data)
    place = place_of(str(data), Config())
    open_source(place)
    return Dataset(place=place)


class Env:
    """An environment to play in: its tools, its reward, and every other setting, as one value (`config`).

    Args:
        tools: the tools that are offered, functions of `harness1.TOOLS` and functions of one's own (see `tool`); None:
            those of the settings.
        reward: the terms whose sum is the reward, each alone or with its weight, such as
            `[harness1.reward.recall, (brevity, 0.2)]`; or the name of a recipe; None: that of the settings.
        config: a configuration file, or the name of one that comes with the package, such as `small`.
        settings: single settings by their dotted names, such as `{"env.max_turns": 4}`.

    Raises:
        ConfigError: a setting is wrong, or a tool is missing without which there is no search.
        UsageError: a function of one's own cannot be found by its name.
    """

    def __init__(
        self,
        *,
        tools: Sequence[ToolFunction | Callable[..., str] | str] | None = None,
        reward: Sequence[Term | tuple[Term, float]] | str | None = None,
        config: str | Path | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        values = dict(settings or {})
        if isinstance(reward, str):
            values["reward.recipe"] = reward
            reward = None
        given = None if tools is None else [each if isinstance(each, str) else _tool_name(each) for each in tools]
        values |= _switches(given) if given is not None else {}
        ours = {function.__name__ for function in SWITCHED}
        overrides = [f"{name}={msgspec.json.encode(value).decode()}" for name, value in values.items()]
        more = [name for name in given or () if name not in ours]
        self.config = load_config(config, overrides, tools=more, rewards=dict(map(_weight_of, reward or ())))

    def __repr__(self) -> str:
        return f"Env({self.config.hash[:12]})"


def evaluate(
    env: Env,
    data: Dataset | str,
    policy: Any = "scripted",
    *,
    split: str = "",
    limit: int = 0,
    samples: int = 1,
    seed: int = 0,
    workers: int | None = None,
    out: str | Path | None = None,
) -> RecordedRun:
    """Play a policy on the tasks of a dataset, and return the run: its `metrics`, with 95 % intervals, its `episodes`,
    and its `folder`, which every command takes.

    Args:
        policy: a name as after `--policy`; or a function of a context, or a class or object with a method `act` of it,
            which returns a `ToolCall`.
        split: default test, else dev.
        limit: only the first tasks; 0: all.
        samples: episodes for each task, played with seeds from `seed` on.
        workers: processes that play, each with names instead of objects, so that what is defined in a function or typed
            into a session plays in one process alone; None: `machine.workers` of the environment if it is set, or one.
            A script that asks for several does so under `if __name__ == "__main__":`, for they import it.
        out: the run folder, where the same call resumes; None: a new temporary one.

    Raises:
        UsageError: as the command `eval`; or the policy cannot travel to other processes.
        InfrastructureFault: a worker process died.
    """
    dataset = data if isinstance(data, Dataset) else load(data)
    source = dataset.source
    split = split or ("dev" if "test" not in source.splits and "dev" in source.splits else "test")
    workers = (env.config.machine.workers or 1) if workers is None else workers
    machine = msgspec.structs.replace(env.config.machine, workers=workers)
    config = msgspec.structs.replace(env.config, machine=machine)
    played = None if isinstance(policy, str) else policy_of(policy)
    if played is None:
        check_policy(name := policy, config)
    elif workers > 1:
        name, played = _name_for_workers(policy), None
    else:
        name = played.name
    index = index_of(source, None, None, config, read_aloud, say)
    tasks = source.tasks(split)[: limit or None]
    folder = Path(out or tempfile.mkdtemp(prefix="harness1-"))
    asked = Evaluation(dataset.place, split, tasks, index, name, config, samples, seed, own=played)
    _outside_loop(partial(evaluate_aloud, asked, folder, False))
    return load_run(folder)


def ask(
    question: str,
    index: str | Path,
    answerer: str = "",
    *,
    env: Env | None = None,
    policy: str = "scripted",
    follow: Answer | None = None,
    tokens: int = TOKENS,
    out: str | Path | None = None,
) -> Answer:
    """Search an index for a question, and return a model's answer: its `text`, its `sentences` with their citations,
    which are checked, and the `passages` cited; `sufficient` if a citation holds. Printed, it shows all of these.

    Args:
        index: a folder, or what `harness1 search --index` takes.
        answerer: `openai:MODEL@URL` or a model of this machine, such as `hf:MODEL`; empty: none, and the best sentences
            of the passages are the answer.
        follow: an earlier answer, whose passages are known.
        tokens: most of the passages for the model (characters / 4); more may be better where prompts are read fast.
        out: the run folder; None: a new temporary one.

    Raises:
        UsageError: as the command `ask`.
        InfrastructureFault: the index or the model's server failed.
    """
    config = (env or Env()).config
    model = open_answerer(answerer, config, tokens)
    folder, setup = Path(out or tempfile.mkdtemp(prefix="harness1-")), EpisodeSetup(config, str(index), policy)
    return _outside_loop(lambda: answer_question(question, setup, model, folder, follow))[0]


def train(
    env: Env,
    data: Dataset | str,
    model: str | Path,
    out: str | Path,
    *,
    method: Literal["sft", "cispo"] = "sft",
    teacher: str = "oracle",
    split: str = "",
    limit: int = 0,
    samples: int = 1,
    seed: int = 0,
) -> Path:
    """Train a model, and return the folder of the checkpoint, which plays as `hf:FOLDER`. The same call resumes.

    Args:
        model: a model's folder or name, such as `smollm2-135m`.
        method: `sft` imitates the good episodes of a teacher, kept in `OUT.teacher`, their rows in `OUT.rows`; `cispo`
            learns from the model's own episodes and the reward. Settings are `train`, `sft` and `rl` of the
            environment's configuration.
        teacher: for `sft`, a policy; `oracle` sees the gold.
        split: default train, else dev, else the only one.
        limit: for `sft`, only the first tasks; 0: all.
        samples: for `sft`, episodes of the teacher for each task, with seeds from `seed` on.

    Raises:
        UsageError: as the commands `sft collect`, `sft build`, `sft train` and `rl train`.
        MissingExtra: torch is not installed.
    """
    dataset = data if isinstance(data, Dataset) else load(data)
    if method not in ("sft", "cispo"):
        raise UsageError(f"there is no method {method!r}: choose sft or cispo")
    split = split or dataset.source.training_split()
    if method == "cispo":
        return _learn(env.config, dataset, str(model), split, Path(out))
    config, source, out, base = env.config, dataset.source, Path(out), resolve_model(str(model))
    policy = teacher_policy(teacher, config)
    tasks = teaching_tasks(source, split, limit, config)
    student = student_place(str(base), source, tasks, config)
    index = index_of(source, None, None, config, read_aloud, say)
    lessons = Evaluation(
        *(dataset.place, split, tasks, index, policy, config, samples, seed), is_hosted(policy), student
    )
    taught, rows = out.with_name(f"{out.name}.teacher"), out.with_name(f"{out.name}.rows")
    _outside_loop(partial(evaluate_aloud, lessons, taught, False))
    build(Build([taught], config.sft, config.data), rows)
    from harness1.sft.train import FineTuning

    work = FineTuning(rows, base, out, config, device=config.machine.device or choose_device())
    if not work.is_done():
        _outside_loop(partial(fine_tune_aloud, work, ALONE))
    return out


def _learn(config: Config, dataset: Dataset, model: str, split: str, out: Path) -> Path:
    spec = model if ":" in model else f"hf:{model}"
    refuse_oversized_rl(config, spec, 1)
    policy = open_policy_to_train(spec, config)
    learn = TrainingInputs((dataset.place,), spec, split)
    find_index = partial(index_of, cache=None, config=config, read=read_aloud, say=say)
    work, players = open_task_training(config, learn, out, policy, find_index)
    if not work.is_done(policy.hash):
        work = replace(work, undisturbed=reserve_devices(policy.model, config, work.device, 1))
        _outside_loop(partial(train_aloud, work, players, policy, ALONE))
    return out


def _outside_loop(work: Callable[[], Made]) -> Made:
    """Do work that runs an event loop of its own: in a thread where this one has a loop already, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return work()
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(work).result()


def _switches(names: Sequence[str]) -> dict[str, bool]:
    for function, group in SWITCHED.items():
        if not group and function.__name__ not in names:
            raise ConfigError(f"an environment always has the tool {function.__name__}: add it to tools")
    return {f"env.{group}.on": function.__name__ in names for function, group in SWITCHED.items() if group}


def _tool_name(tool: Callable[..., Any]) -> str:
    return tool.__name__ if tool in SWITCHED else own_name(tool)


def _weight_of(given: Term | tuple[Term, float]) -> tuple[str, float]:
    term, weight = given if isinstance(given, tuple) else (given, 1.0)
    if isinstance(term, str):
        return term, weight
    return term.name if isinstance(term, Component) and term in COMPONENTS else own_name(term), weight


def _name_for_workers(policy: Any) -> str:
    if state_of(policy):
        raise UsageError(
            f"{policy!r:.80} has a state of its own, which does not travel to worker processes: pass its class, or"
            " workers=1"
        )
    return own_name(policy if hasattr(policy, "__qualname__") else type(policy))


def _document(number: int, given: Any) -> Document:
    if isinstance(given, Document):
        return given
    if isinstance(given, str):
        given = {"text": given}
    if not isinstance(given, Mapping) or not isinstance(given.get("text"), str):
        raise UsageError(f"document {number} is no text, and no mapping with a text: {given!r:.80}")
    doc_id = next((given[key] for key in ("id", "_id", "doc_id") if key in given), f"d{number}")
    return Document(DocId(str(doc_id)), str(given.get("title") or ""), given["text"])


def _task(number: int, given: Any, known: frozenset[str]) -> Task:
    if isinstance(given, Task):
        made = given
    else:
        question = given.get("question", given.get("query")) if isinstance(given, Mapping) else None
        if not isinstance(question, str) or not question.strip():
            raise UsageError(f"task {number} has no question: {given!r:.80}")
        relevant, answers = (_several(given.get(name)) for name in ("relevant", "answers"))
        grades = relevant if isinstance(relevant, Mapping) else dict.fromkeys(relevant, 1)
        gold = Gold({DocId(str(doc_id)): grade for doc_id, grade in grades.items()}, answers=tuple(answers))
        made = Task(str(given.get("id", f"t{number}")), question, str(given.get("split", "test")), gold)
    if not re.fullmatch(r"\w[\w-]*", made.split):
        raise UsageError(f"task {number} is in a split {made.split!r}: give a word, such as train or test")
    if made.gold is None or not any(grade > 0 for grade in made.gold.relevant.values()):
        raise UsageError(f"task {number} names no relevant document: it cannot be scored")
    if unknown := [each for each in made.gold.relevant if each not in known]:
        raise UsageError(f"task {number} names {unknown[0]!r}, which is no document of the dataset")
    return made


def _several(given: Any) -> Any:
    return (given,) if isinstance(given, str) else given or ()


def _keep(documents: list[Document], tasks: list[Any]) -> str:
    known = frozenset(str(document.doc_id) for document in documents)
    if not documents or len(known) < len(documents):
        raise UsageError("the dataset has no documents" if not documents else "two documents have the same id")
    made = [_task(number, given, known) for number, given in enumerate(tasks, 1)]
    if repeated := [name for name, count in Counter(task.task_id for task in made).items() if count > 1]:
        raise UsageError(f"two tasks have the id {repeated[0]!r}")
    place = cache_of(Config()).folder.parent / "own" / digest([documents, made])[:16]
    if not place.is_dir():
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=place.parent, ignore_cleanup_errors=True) as half:
            beir.write(Path(half), documents, made)
            with suppress(OSError):  # another process was quicker
                Path(half).rename(place)
    return str(place)
