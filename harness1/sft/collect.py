"""Checks before teachers' episodes are collected, which may take hours."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice, zip_longest
from pathlib import Path
from typing import TypeVar

import msgspec

from harness1.config import Config
from harness1.config.settings import differences
from harness1.data.leaks import TEST, Selection, TaskFilter
from harness1.data.source import Source
from harness1.env.pieces import ApproximateCounter, static_piece
from harness1.errors import SchemaError, UsageError
from harness1.eval.run import Run
from harness1.models.fetch import resolve_model
from harness1.models.open import HARMONY, format_at
from harness1.models.tokenizer import Tokenizer
from harness1.plain import utf8_safe
from harness1.policy.registry import check_policy
from harness1.records import Episode, Gold, Status, Task
from harness1.reward.measures import targets
from harness1.runs.files import STAGE, read_stage
from harness1.runs.folder import refuse_lost_settings
from harness1.sft.data_card import CARD, CollectionRun, read_card
from harness1.sft.rows import has_token_ids
from harness1.tools.registry import Toolbox

Item = TypeVar("Item")
TEACHERS = {"oracle": "oracle-teacher"}  # what `--teacher` means by a name of `--policy`: the oracle that searches
SAMPLED = 20  # documents, and questions, on which a tokenizer is tested


def teacher_policy(teacher: str, config: Config = Config()) -> str:
    """Return the policy that a teacher's name means; raise UsageError if there is no such policy."""
    policy = TEACHERS.get(teacher, teacher)
    check_policy(policy, config)
    return policy


def is_hosted(policy: str) -> bool:
    """Return True if a policy is a model that is called with text; it gives its reasoning in an argument."""
    return policy.partition(":")[0] == "openai"


def check_taught_split(split: str, where: str) -> None:
    """Raise UsageError if the split is the test split; `where` is the dataset or run, for the message."""
    if split == TEST:
        raise UsageError(f"{where}: split {TEST} is for testing and must not be trained on: collect from another")


def take_in_turn(each: Sequence[Sequence[Item]], limit: int) -> list[Item]:
    """Return the first `limit` items of several datasets, one from each in turn."""
    return [item for items in zip_longest(*each) for item in items if item is not None][:limit]


def teaching_tasks(
    source: Source, split: str, limit: int, config: Config, sieve: TaskFilter | None = None
) -> list[Task]:
    """Return the first `limit` tasks of a split (0 for all) that the sieve leaves; raise UsageError if there is no such
    split, it is the test split, no task is left, or a task has no gold."""
    check_taught_split(split, source.name)
    kept, account = (sieve or TaskFilter(config.data)).select(source.name, split, source.tasks(split))
    tasks = kept[: limit or None]
    if not tasks:
        raise UsageError(account.line or f"{source.name} has no tasks in split {split}")
    for task in tasks:
        targets(task.task_id, task.gold, config.index.unit)
    return tasks


def student_place(place: str, source: Source, tasks: Sequence[Task], config: Config) -> str:
    """Return the path of a student's tokenizer; UsageError if it is not there, lacks control tokens or loses text."""
    found = tokenizer_place(place)
    check_round_trip(format_at(found, config).tokenizer, sample_texts(source, tasks, config))
    return found


def tokenizer_place(place: str) -> str:
    """Return the absolute path of a tokenizer; `HARMONY`, which has no path, as it is. UsageError if there is none."""
    return place if place == HARMONY else str(resolve_model(place).resolve())


def sample_texts(source: Source, tasks: Sequence[Task], config: Config) -> Iterable[str]:
    """Yield the static prompt and the first questions and documents."""
    yield static_piece(config.env, Toolbox.of(config.env)).text
    yield from (task.query for task in tasks[:SAMPLED])
    for document in islice(source.documents(), SAMPLED):
        yield f"{document.title}\n{document.text}"


def check_round_trip(tokenizer: Tokenizer, texts: Iterable[str]) -> None:
    """Refuse a tokenizer that changes texts, because a model would learn other words than the teacher's, by a
    UsageError that shows the first. Unicode normalisation (NFC) is allowed: good tokenizers do it."""
    for text in texts:
        given = unicodedata.normalize("NFC", utf8_safe(text))
        back = unicodedata.normalize("NFC", tokenizer.decode(tokenizer.encode(text)))
        if given != back:
            at = next((place for place, (a, b) in enumerate(zip(given, back, strict=False)) if a != b), len(back))
            one, other = (text[max(0, at - 20) : at + 20] for text in (given, back))
            why = f"the tokenizer cannot round-trip the text {given[:40]!r}"
            raise UsageError(f"{why}: {one!r} comes back as {other!r}")


_HASHES = {"env", "policy", "index", "counter"}
_OPTIONS = "--format and --tokenizer"
_NO_IDS = f"holds no token ids of a student: collect it again with {_OPTIONS}, or build with --rerender, {_OPTIONS}"


@dataclass
class TeacherRun(Run):
    """A run that a dataset is made of; `tasks` are all of its split."""

    @cached_property
    def source(self) -> Source:
        return self.sources[0]

    @property
    def gold_by_id(self) -> dict[str, Gold | None]:
        return {name: task.gold for name, task in self.tasks.items()}

    @property
    def dataset(self) -> str:
        return str(self.source.root or self.stage.inputs["dataset"])

    @property
    def chat(self) -> dict[str, str]:
        """Format and tokenizer of its episodes; each is "" if the run has none."""
        return {name: str(self.stage.outputs.get(name, "")) for name in ("format", "tokenizer")}

    def refuse_stray(self, episode: Episode, *, needs_ids: bool) -> None:
        """Raise UsageError if an episode has another configuration or question, or lacks token ids."""
        hashes, asked = self.stage.hashes, episode.task
        if (episode.hashes.env, episode.hashes.counter) != (hashes["env"], hashes["counter"]):
            raise UsageError(f"{self.folder}: episode {episode.episode_id} was collected under another configuration")
        task = self.tasks.get(asked.task_id)
        if task is None or task.query != asked.query:
            lacking = f"no task {asked.task_id!r} in split {self.split} that asks {asked.query!r}"
            why = "it is not the dataset that the episodes were collected over"
            raise UsageError(f"{self.folder}: {self.dataset} has {lacking}: {why}")
        if needs_ids and episode.status in (Status.COMPLETED, Status.TRUNCATED) and not has_token_ids(episode):
            raise UsageError(f"{self.folder} (episode {episode.episode_id}) {_NO_IDS}")

    def describe(self, met: Sequence[str]) -> CollectionRun:
        """Return the run's entry in a data card, given the task of each of its episodes."""
        found, samples = Counter(met), self.stage.inputs.get("samples", 1)
        return CollectionRun(
            folder=str(self.folder.resolve()),
            dataset=self.dataset,
            name=self.source.name,
            split=self.split,
            share=str(self.stage.outputs.get("share", "")),
            teacher=self.policy,
            index=self.index,
            hashes=self.stage.hashes,
            episodes=len(met),
            missing=sum(found[task] < samples for task in self.stage.inputs.get("tasks", ())),
            config=msgspec.to_builtins(self.config),
        )


def open_runs(folders: Sequence[Path], *, rerendered: bool, partial: bool = False) -> list[TeacherRun]:
    """Open runs of one environment, and of one student unless contexts will be rendered again. Raise UsageError if
    there are none, one is over the test split or (unless `partial`) unfinished, or their prompts differ."""
    if not folders:
        raise UsageError("name at least one run folder, as `harness1 sft collect` writes them")
    runs = [_open_run(folder, partial=partial) for folder in folders]
    first, places = runs[0], dict[str, str]()
    for run in runs:
        hashes, names = run.stage.hashes, ("env",) if rerendered else ("env", "counter")
        if any(first.stage.hashes[name] != hashes[name] for name in names):
            one, another = ({"env": msgspec.to_builtins(each.config.env)} | each.chat for each in (first, run))
            what = "; ".join(f"{name}: {a} != {b}" for name, a, b in differences(one, another))
            why = f"{run.folder} was collected under another configuration than {first.folder}"
            raise UsageError(f"{why}: {what or 'different versions of prompts or tokenizers'}. Build a dataset of each")
        if places.setdefault(run.source.name, run.dataset) != run.dataset:  # rows and tasks are identified by the name
            other = f"{run.folder} is over another dataset named {run.source.name}"
            raise UsageError(f"{other}: rename one, or build two datasets")
        if not rerendered and ApproximateCounter.of_hash(hashes["counter"]):
            raise UsageError(f"{run.folder} {_NO_IDS}")
    return runs


def _open_run(folder: Path, *, partial: bool) -> TeacherRun:
    run = TeacherRun.open(folder)
    refuse_lost_settings(folder)  # its states are rebuilt by replay
    stage = run.stage
    if not {"dataset", "split"} <= stage.inputs.keys():
        raise UsageError(f"{folder} is not a collection over a dataset's tasks: make one with `harness1 sft collect`")
    if not stage.hashes.keys() >= _HASHES:
        raise SchemaError(f"{folder / STAGE} lacks hashes of the run: it was edited")
    if run.policy.startswith("corrected:"):
        raise UsageError(f"{folder} was collected by `corrected:`, which went: its student's turns would be taught")
    check_taught_split(run.split, str(folder))
    if stage.status != "finished" and not partial:
        raise UsageError(f"{folder} is not finished: run `harness1 sft collect` again, or use it with --partial")
    run = replace(run, given=run.source.tasks(run.split))
    if "tasks" in stage.inputs:
        run.refuse_other_gold("collect it again with --force")
    return run


LearnedTask = tuple[str, str]  # the name of a dataset, and the id of a task in it


def tasks_of_runs(folders: Iterable[str | Path]) -> frozenset[LearnedTask]:
    """Return the tasks of earlier work: those of runs, of the rows of datasets of `sft build` and of checkpoints of
    `sft train`, all that trainings of `rl train` could draw or validated on or played, and those that profiles of `rl
    pivots` chose. UsageError if a folder is none of these, or lists none; SchemaError if damaged."""
    return frozenset(task for folder in folders for task in _tasks_of(Path(folder)))


def _tasks_of(folder: Path) -> Iterable[LearnedTask]:
    for name in (CARD, f"data_{CARD}"):
        if (folder / name).is_file():
            if not (listed := read_card(folder, name).tasks):
                raise UsageError(f"--exclude {folder}: {name} lists no tasks, as those of earlier versions: build anew")
            return [(dataset, task) for dataset, tasks in listed.items() for task in tasks]
    stage = read_stage(folder)
    try:
        if stage is not None and "selections" in stage.outputs:
            chosen = msgspec.convert(stage.outputs["selections"], list[Selection])
            return [(each.dataset, task) for each in chosen for task in (*each.learned, *each.held_out)]
        if stage is not None and stage.verb == "run":
            if "tasks" not in stage.inputs and "datasets" not in stage.outputs:
                raise KeyError("datasets")
            return Run(folder, stage).task_names
    except (KeyError, TypeError, msgspec.ValidationError) as error:
        raise SchemaError(f"{folder / STAGE} does not say which tasks it was made of: {error!r}") from error
    known = "give a run, a dataset of `harness1 sft build`, a checkpoint or a profile"
    raise UsageError(f"--exclude {folder}: no card there says which tasks it was made of; {known}")
