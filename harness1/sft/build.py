"""A dataset from runs: the gates that choose episodes, their rows, and a data card."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec

from harness1.config import Data, Gates, Sft
from harness1.config.settings import to_record
from harness1.data.leaks import EvaluationSet, GoldSet, KnownQueries, Leaks, gold_set, open_filter
from harness1.data.origins import origins_of
from harness1.errors import UsageError
from harness1.models.chat_format import ChatFormat
from harness1.plain import digest, file_digest
from harness1.records import Episode, EpisodeKey, Gold, Record, Status
from harness1.reward.measures import measure_outcome
from harness1.rows import TOKEN_BYTES, TrainRow, write_rows
from harness1.rows.calls import calls_of
from harness1.runs.files import STAGE, Stage, read_stage, refuse_foreign, refuse_full_disk, refuse_other, under_way
from harness1.runs.journal import EPISODES, line_starts, read_appended, read_episodes
from harness1.sft.collect import LearnedTask, TeacherRun, check_round_trip, open_runs, sample_texts, tasks_of_runs
from harness1.sft.data_card import (
    CARD,
    HELD_OUT,
    TRAIN,
    DataCard,
    Distribution,
    GateCounts,
    RowCounts,
    RowFacts,
    licence_notes,
    read_card,
    tasks_by_dataset,
    write_card,
)
from harness1.sft.rows import REASONS, Origin, rerender, row_tokens, sft_rows
from harness1.tools.documents import END_SEARCH

VERB = "sft build"
DEFAULTS = Data()
SHOWN = 5  # number of dropped episodes that a report names
Place = tuple[int, int]  # the numbers of a run and of an episode in it, in the order of tasks and samples
OnProgress = Callable[[str, int, int], None]  # called with an activity, the amount done, and the total (0 if unknown)
SEED = 42  # seed that draws the held-out tasks and the episodes that fill a quota


class TeacherEpisode(Record):
    """An episode as the gates see it."""

    place: Place
    episode_id: str
    task_id: str
    dataset: str
    query: str
    status: Status
    format_errors: int
    documents: int  # curated ones; 0 if the episode ended in a policy error
    recall: float
    precision: float
    trajectory_recall: float
    turns: int
    calls: dict[str, int]  # successful turns of each tool, including `end_search`
    actions: str  # digest of all actions
    gold: GoldSet = frozenset()  # relevant documents of the task
    line: int = 0  # of the run's file, from 0
    tokens: int = 0  # of its rows, approximately
    tokenizer: str = ""  # hash of the tokenizer of its calls

    @property
    def task(self) -> LearnedTask:
        return self.dataset, self.task_id


def candidate(episode: Episode, gold: Gold | None, dataset: str, place: Place) -> TeacherEpisode:
    """Return an episode as the gates see it; raise UsageError if the task has no gold, or nothing to find."""
    scored = measure_outcome(episode, gold)
    acted = [turn for turn in episode.turns if turn.action is not None]
    ended = sum(turn.action is not None and turn.action.name == END_SEARCH for turn in acted)
    return TeacherEpisode(
        place=place,
        episode_id=episode.episode_id,
        task_id=episode.task.task_id,
        dataset=dataset,
        query=episode.task.query,
        status=episode.status,
        format_errors=scored.format_errors,
        documents=scored.set_size,
        recall=scored.recall,
        precision=scored.precision,
        trajectory_recall=scored.trajectory_recall,
        turns=len(acted),
        calls=scored.calls | ({END_SEARCH: ended} if ended else {}),
        actions=digest([turn.action for turn in acted]),
        gold=gold_set(gold),
    )


def apply_gates(
    candidates: Sequence[TeacherEpisode],
    gates: Gates,
    leaks: Leaks,
    seed: int,
    excluded: Collection[LearnedTask] = frozenset(),
) -> tuple[tuple[TeacherEpisode, ...], tuple[GateCounts, ...]]:
    """Return the candidates that pass all gates, in the order given, and the counts of each gate. `leaks`: evaluation
    tasks that must not be given away. `seed`: chooses the episodes that fill a quota."""
    single: dict[str, Callable[[TeacherEpisode], str | Literal[False] | None]] = {
        "fault": lambda one: one.status is Status.INFRA_ERROR and "the infrastructure failed",
        "format": lambda one: (
            (one.status is Status.POLICY_ERROR and "it ended in a policy error")
            or (one.format_errors > 0 and f"{one.format_errors} outputs without a readable call")
        ),
        "documents": lambda one: one.documents < 1 and f"{one.documents} curated",
        "recall": lambda one: one.recall < gates.recall and f"curated recall {one.recall:.3f}",
        "precision": lambda one: one.precision < gates.precision and f"curated precision {one.precision:.3f}",
        "tools": lambda one: not one.calls.keys() - {END_SEARCH} and "0 different tools",
        "excluded": lambda one: one.task in excluded and "its task was learned from before",
        "leak": lambda one: (found := leaks.find(one.dataset, one.query, one.gold)) and found.reason,
    }
    among: dict[str, Callable[[Sequence[TeacherEpisode]], dict[Place, str]]] = {
        "duplicate": lambda left: _duplicates(left, gates),
        "quota": lambda left: _over_quota(left, gates.quotas, seed),
    }
    kept, reports = tuple(candidates), []
    for name in (*single, *among):
        if name in single:
            reasons = {each.place: why for each in kept if (why := single[name](each))}
        else:
            reasons = among[name](kept)
        dropped = [each for each in kept if each.place in reasons][:SHOWN]
        told = (f"{each.dataset}/{each.task_id} ({each.episode_id}): {reasons[each.place]}" for each in dropped)
        entered, kept = len(kept), tuple(each for each in kept if each.place not in reasons)
        reports.append(GateCounts(name, entered, len(kept), tuple(told)))
    return kept, tuple(reports)


def check_any_left(kept: Sequence[TeacherEpisode], reports: Sequence[GateCounts]) -> None:
    """Raise a UsageError that says how many episodes each gate dropped, if none passed all."""
    if not kept:
        counts = ", ".join(f"{each.name} dropped {each.entered - each.passed}" for each in reports if each.dropped)
        last = next(each.dropped[0] for each in reversed(reports) if each.dropped)
        left = f"none of {reports[0].entered} episodes is left: {counts}; for example {last}"
        raise UsageError(f"{left}. Collect others, or loosen sft.gates")


def draw_held_out(kept: Iterable[TeacherEpisode], share: float, seed: int) -> frozenset[LearnedTask]:
    """Return the tasks that are never trained on: a share of each dataset, but at least one if it may be, never all."""
    tasks: dict[str, set[str]] = {}
    for each in kept:
        tasks.setdefault(each.dataset, set()).add(each.task_id)
    chosen: set[LearnedTask] = set()
    for dataset, ids in tasks.items():
        wanted = min(max(1, round(share * len(ids))), len(ids) - 1) if share > 0.0 else 0
        chosen.update((dataset, name) for name in sorted(ids, key=lambda name: digest([seed, dataset, name]))[:wanted])
    return frozenset(chosen)


def _duplicates(candidates: Sequence[TeacherEpisode], gates: Gates) -> dict[Place, str]:
    """Keep the best of the episodes with the same question: highest recall, then fewest turns. Samples of one task are
    duplicates only if their actions are equal, or `per_task` better ones are kept."""
    asked = KnownQueries(gates.near)
    tasks, done = Counter[LearnedTask](), set[tuple[LearnedTask, str]]()
    found: dict[Place, str] = {}
    for each in sorted(candidates, key=lambda one: (-one.recall, one.turns, one.place)):
        if (each.task, each.actions) in done:
            found[each.place] = "another sample did the same"
        elif gates.per_task and tasks[each.task] >= gates.per_task:
            found[each.place] = "better samples of its task are kept"
        elif each.task not in tasks and (same := asked.match(each.query)) is not None:
            found[each.place] = f"asks the same as {same}"
        else:
            asked.add("/".join(each.task), each.query)
            tasks[each.task] += 1
            done.add((each.task, each.actions))
    return found


def _over_quota(candidates: Sequence[TeacherEpisode], quotas: dict[str, int], seed: int) -> dict[Place, str]:
    found: dict[Place, str] = {}
    for dataset, quota in quotas.items():
        own = [each for each in candidates if each.dataset == dataset]
        own.sort(key=lambda each: (digest([seed, *each.task, each.episode_id]), each.place))
        found |= {each.place: "beyond the quota of its dataset" for each in own[quota:]}
    return found


@dataclass(frozen=True)
class Build:
    """The inputs of a dataset."""

    runs: Sequence[Path]
    sft: Sft
    data: Data = DEFAULTS
    against: Sequence[str] = ()  # further evaluation sets
    exclude: Sequence[Path] = ()  # folders of earlier work, whose tasks are left out (see `tasks_of_runs`)
    licences: Sequence[str] = ()  # `DATASET=TEXT`, or a text for all datasets
    student: ChatFormat | None = None  # contexts are rendered again in its format; None keeps the recorded tokens
    tokenizer: str = ""  # path of the student's tokenizer
    partial: bool = False  # accept unfinished collections


def build(
    job: Build,
    out: Path,
    *,
    force: bool = False,
    on_torn: Callable[[Path, int], None] = lambda _run, _size: None,
    on_progress: OnProgress = lambda _what, _done, _of: None,
) -> DataCard:
    """Make a dataset folder, or return the card of the same dataset if it exists. Nothing is written before the checks.
    `on_torn`: called with a run and the bytes of its torn last line, now left out. Raise UsageError as `open_runs`,
    or the student's tokenizer loses text, no row is left, the folder holds something else, or the disk is full."""
    sft, runs = job.sft, open_runs(job.runs, rerendered=job.student is not None, partial=job.partial)
    taught = {(run.source.name, run.split) for run in runs}
    sets = open_filter(job.data, [run.source for run in runs], taught, against=job.against).sets
    excluded = tasks_of_runs(job.exclude)
    stage = _stage(job, runs, sets, excluded)
    refuse_foreign(out, VERB)
    before = read_stage(out)
    if before is not None and before.status == "finished" and not force:
        refuse_other(stage, out, "dataset")
        if all((out / name).is_file() for name in (CARD, TRAIN, HELD_OUT)):
            return read_card(out)
    if job.student is not None:
        for run in runs:
            check_round_trip(job.student.tokenizer, sample_texts(run.source, list(run.tasks.values()), run.config))
    found = _collect(job, runs, on_torn, on_progress)
    leaks = Leaks(job.data.near, sets)
    kept, reports = apply_gates(found, sft.gates, leaks, SEED, excluded)
    check_any_left(kept, reports)
    refuse_full_disk(out, TOKEN_BYTES * sum(each.tokens for each in kept))
    held = draw_held_out(kept, sft.held_out, SEED)
    learned, validation = ([each for each in kept if (each.task in held) is part] for part in (False, True))
    with under_way(stage, out):
        train, dropped = _write(job, runs, learned, out / TRAIN, on_progress)
        if not train:
            took = ", ".join(f"{count} {name}" for name, count in dropped.items())
            raise UsageError(f"no row is left of {len(kept)} kept episodes; turns dropped: {took or 'none'}")
        held_out, also = _write(job, runs, validation, out / HELD_OUT, on_progress)
        card = DataCard(
            **_provenance(job, runs, found),
            compared=leaks.compared,
            gates=reports,
            dropped_turns={name: dropped[name] + also[name] for name in REASONS},
            train=RowCounts.of(train),
            held_out=RowCounts.of(held_out),
            held_out_tasks=tasks_by_dataset(held),
            tasks=tasks_by_dataset({each.task for each in kept}),
            turns=Distribution.of([each.turns for each in kept], shares=False),
            curated_recall=Distribution.of([each.recall for each in kept]),
            trajectory_recall=Distribution.of([each.trajectory_recall for each in kept]),
        )
        write_card(card, out)
        outputs = {name: file_digest(out / name) for name in (TRAIN, HELD_OUT)}
        counts = {each.name: [each.entered, each.passed] for each in reports}
        stage.write(out, status="finished", gates=counts, outputs=outputs)
    return read_card(out)


def _stage(job: Build, runs: Sequence[TeacherRun], sets: Sequence[EvaluationSet], past: Iterable[LearnedTask]) -> Stage:
    inputs = {
        "runs": [[file_digest(run.folder / name) for name in (STAGE, EPISODES)] for run in runs],
        "golds": digest([run.gold_by_id for run in runs]),
        "settings": to_record(job.sft, "sft."),
        "evaluation": {each.name: digest(each.tasks) for each in sets},
        "near": job.data.near,
        "excluded": digest(sorted(past)),
        "licences": list(job.licences),
        "student": None if job.student is None else job.student.hash,
    }
    origins = origins_of(*(run.folder for run in runs))
    return Stage(VERB, inputs, hashes={"env": runs[0].stage.hashes["env"]}, origins=origins)


def _collect(
    job: Build, runs: Sequence[TeacherRun], on_torn: Callable[[Path, int], None], on_progress: OnProgress
) -> list[TeacherEpisode]:
    """Return the last episode of each key of each run, in the order of runs, tasks and samples, whatever the order in
    which they ended; raise UsageError if a run is empty, or an episode cannot become rows."""
    latest: dict[tuple[int, int, EpisodeKey], TeacherEpisode] = {}
    for number, run in enumerate(runs):
        line, order = -1, {name: at for at, name in enumerate(run.tasks)}
        for line, episode in enumerate(read_episodes(run.folder, partial(on_torn, run.folder))):
            run.refuse_stray(episode, needs_ids=job.student is None)
            one = candidate(episode, run.tasks[episode.task.task_id].gold, run.source.name, (number, line))
            tokenizer = next((call.tokenizer_hash for call in calls_of(episode)), "")
            one = msgspec.structs.replace(one, line=line, tokens=row_tokens(episode, job.sft), tokenizer=tokenizer)
            latest[number, order[episode.task.task_id], episode.key] = one
            on_progress(f"reading {run.folder}", line + 1, 0)
        if line < 0:
            raise UsageError(f"{run.folder} holds no episodes: collect it first")
    ordered = enumerate(sorted(latest))
    return [msgspec.structs.replace(latest[key], place=(key[0], rank)) for rank, key in ordered]


def _write(
    job: Build, runs: Sequence[TeacherRun], kept: Sequence[TeacherEpisode], path: Path, on_progress: OnProgress
) -> tuple[list[RowFacts], Counter[str]]:
    """Make and write the rows of some episodes, in the order of runs, tasks, samples and turns; return their facts, and
    the turns without a row by reason. Episodes are read again one by one, because they may not all fit into memory."""
    facts, dropped = list[RowFacts](), Counter[str]()

    def rows() -> Iterator[TrainRow]:
        done = 0
        for number, run in enumerate(runs):
            origin = Origin(run.source.name, run.split, run.policy)
            own = [each for each in kept if each.place[0] == number]
            starts = line_starts(run.folder) if own else ()
            for each in own:
                on_progress(f"writing {path}", done, len(kept))
                done += 1
                _, _, episode = next(read_appended(run.folder, starts[each.line], 1))
                if job.student is not None:
                    episode = rerender(episode, run.config.env, job.student)
                made, lost = sft_rows(episode, job.sft, origin, each.gold)
                dropped.update(lost)
                for row in made:
                    facts.append(RowFacts.of(row))
                    yield row

    write_rows(path, rows())
    return facts, dropped


def _provenance(job: Build, runs: Sequence[TeacherRun], found: Sequence[TeacherEpisode]) -> dict[str, Any]:
    # The fields of the data card that describe the origin of the episodes.
    hashes, student = runs[0].stage.hashes, job.student
    recorded = next((each.tokenizer for each in found if each.tokenizer), "")
    chat = runs[0].chat if student is None else {"format": student.name, "tokenizer": job.tokenizer}
    return {
        "runs": tuple(
            run.describe([each.task_id for each in found if each.place[0] == number]) for number, run in enumerate(runs)
        ),
        **chat,
        "tokenizer_hash": recorded if student is None else student.tokenizer.hash,
        "format_hash": hashes["counter"] if student is None else student.hash,
        "rerendered": student is not None,
        "env": runs[0].config.env.plain(),
        "env_hash": hashes["env"],
        "sft": to_record(job.sft, "sft."),
        "licences": licence_notes(job.licences, sorted({run.source.name for run in runs})),
    }
