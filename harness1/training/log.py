"""What is measured of a policy in training, and the log of it: lines of JSON, TensorBoard, Weights & Biases."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import msgspec

from harness1.episodes.jobs import EpisodeJob, OnEpisode
from harness1.errors import MALFORMED, SchemaError, optional
from harness1.plain import decode_plain, text_digest
from harness1.records import Episode, Gold, Status, StopReason, Task
from harness1.reward import by_term
from harness1.reward.measures import measure_outcome
from harness1.runs.files import clear, write_atomically
from harness1.runs.journal import Journal, hold

LOG = "log.jsonl"
VALIDATION_PREFIX = "held_out/"  # of the names of validation metrics, in a log and for a `StepListener`
StepListener = Callable[[int, int, Mapping[str, float]], None]  # step, steps, values; first the last completed step


class Trackers(NamedTuple):
    """Where else a training run is logged; empty for nowhere."""

    tensorboard: bool = False
    wandb: str = ""  # a project of Weights & Biases


NO_TRACKERS = Trackers()


class TrainLog(ExitStack):
    """Appends to `log.jsonl`, which one process at a time holds; without a folder, it writes nothing. A resumed run
    repeats the steps after `after` (-1 for a run that begins), so their old lines are removed. Raise UsageError if
    another process is writing to the folder, or this one cannot; MissingExtra if a tracker is not installed."""

    def __init__(self, folder: Path | None, after: int = -1, trackers: Trackers = NO_TRACKERS) -> None:
        super().__init__()
        self._logs: list[Callable[[Mapping[str, float], int], object]] = []
        if folder is None:
            return
        with Journal(folder, LOG):
            if trackers.tensorboard:
                with optional("logs", "tensorboard"):
                    from torch.utils.tensorboard import SummaryWriter
                events: Any = SummaryWriter(folder / "tensorboard", purge_step=after + 1)
                self._logs.append(lambda values, step: [events.add_scalar(*each, step) for each in values.items()])
                self.callback(events.close)
            if trackers.wandb:
                with optional("logs"):
                    import wandb
                name = text_digest(str(folder.resolve()))  # a resumed folder continues its run
                project = wandb.init(project=trackers.wandb, dir=folder, id=name, resume="allow")
                self._logs.append(lambda values, step: project.log(dict(values), step=step))
                self.callback(project.finish)
            kept = [line for line, values in _read(folder / LOG) if values["step"] <= after]
            write_atomically(folder / LOG, b"".join(line + b"\n" for line in kept))
            file = self.enter_context(Journal(folder, LOG))
            self._logs.insert(0, lambda values, step: file.write(msgspec.json.encode({"step": step, **values})))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for log in self._logs:
            log(values, step)


def clear_training(folder: Path, verb: str) -> None:
    """Remove an earlier training; UsageError if the folder holds something else, or another process writes to it."""
    with hold(folder, LOG):
        clear(folder, verb, "*")


def validation_values(values: Mapping[str, float]) -> dict[str, float]:
    """Return the validation metrics among some values, without their prefix."""
    begin = len(VALIDATION_PREFIX)
    return {name[begin:]: value for name, value in values.items() if name.startswith(VALIDATION_PREFIX)}


def read_log(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of a run, oldest first, without a torn last one; SchemaError if one is no object with a step."""
    return [values for _, values in _read(folder / LOG)]


def _read(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    lines = path.read_bytes().split(b"\n")[:-1] if path.is_file() else []
    for number, line in enumerate(lines, start=1):
        try:
            values = msgspec.convert(decode_plain(line), dict[str, Any])
        except MALFORMED as error:
            raise SchemaError(f"{path}:{number}: not a line of a training's log: {error}") from error
        if not isinstance(values.get("step"), int):
            raise SchemaError(f"{path}:{number}: not a line of a training's log: it has no step")
        yield line, values


GoldOf = Callable[[Episode], Gold | None]
Play = Callable[[Sequence[EpisodeJob], OnEpisode], Awaitable[None]]


def gold_among(tasks: Iterable[Task]) -> GoldOf:
    """Return what finds the gold of an episode among tasks, of which those of several datasets may have one id."""
    golds = {(task.task_id, task.query): task.gold for task in tasks}
    return lambda episode: golds[episode.task.task_id, episode.task.query]


async def measure_held_out(play: Play, jobs: Sequence[EpisodeJob]) -> dict[str, float]:
    """Play held-out tasks, those that a fault broke once more, and return their `episode_metrics`, with the number of
    those that broke again as `faults`, if any; empty if there are no tasks."""
    if not jobs:
        return {}
    first: list[Episode] = []
    await play(jobs, first.append)
    episodes = [each for each in first if each.status is not Status.INFRA_ERROR]
    whole = {(each.task.task_id, each.task.query) for each in episodes}
    if again := [job for job in jobs if (job.task.task_id, job.task.query) not in whole]:
        await play(again, episodes.append)
    episodes.sort(key=lambda each: each.task.task_id)
    faults = sum(each.status is Status.INFRA_ERROR for each in episodes)
    metrics = episode_metrics(episodes, gold_among(job.task for job in jobs))
    return metrics | ({"faults": float(faults)} if faults else {})


def episode_metrics(episodes: Sequence[Episode], gold_of: GoldOf) -> dict[str, float]:
    """Return means over the episodes that the infrastructure did not break; empty if there are none: `reward`, under
    `term/` the contribution of each of its terms, `curated_recall`, `precision`, `set_size`, `turns`, `tool_errors` and
    `format_failures` (shares of turns and of episodes), `ended` (share of episodes that the policy ended itself),
    `output_tokens` of an episode, and under `tool/` the shares of the tools in all turns."""
    whole = [each for each in episodes if each.status is not Status.INFRA_ERROR]
    if not whole:
        return {}
    turns = [turn for each in whole for turn in each.turns if turn.action is not None]
    tools = Counter(turn.action.name for turn in turns if turn.action is not None)
    errors = sum(turn.observation is not None and turn.observation.error is not None for turn in turns)
    terms: defaultdict[str, float] = defaultdict(float)
    for each in whole:
        for name, value in by_term(each.reward).items() if each.reward else ():
            terms[name] += value
    results = [measure_outcome(each, gold) for each in whole if (gold := gold_of(each)) is not None]
    measures = {"curated_recall": "recall", "precision": "precision", "set_size": "set_size"} if results else {}
    outputs = [sum(len(call.output_ids) for turn in each.turns for call in turn.calls) for each in whole]
    return {
        "reward": fmean(each.reward.total if each.reward else 0.0 for each in whole),
        **{f"term/{name}": value / len(whole) for name, value in sorted(terms.items())},
        **{name: fmean(getattr(each, field) for each in results) for name, field in measures.items()},
        "turns": len(turns) / len(whole),
        "tool_errors": errors / max(1, len(turns)),
        "format_failures": fmean(each.status is Status.POLICY_ERROR for each in whole),
        "ended": fmean(each.stop_reason is StopReason.END_SEARCH for each in whole),
        "output_tokens": fmean(outputs),
        **{f"tool/{name}": count / len(turns) for name, count in sorted(tools.items())},
    }
