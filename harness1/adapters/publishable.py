"""Which folders come from a benchmark whose questions and answers must not be published."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from harness1.data.benchmarks import BENCHMARKS
from harness1.episodes.single import ASKED
from harness1.errors import MALFORMED, SchemaError, UsageError
from harness1.eval.known_gold import places_of
from harness1.records import Task
from harness1.runs.journal import read_lines
from harness1.runs.stage import Stage, read_stage
from harness1.runs.store import EPISODES
from harness1.sft.data_card import CARD, read_card

SECRET = frozenset(name for name, each in BENCHMARKS.items() if each.secret_answers)
DATA_CARD = "data_card.json"
"""The copy of a data card that a checkpoint keeps."""
GENERATED = ("world:", "stdlib")


def origins_of(folder: Path, stage: Stage | None) -> tuple[str, ...]:
    """Return the datasets that a run, rows or a policy were made from, as their cards name them."""
    cards = [name for name in (CARD, DATA_CARD) if (folder / name).is_file()]
    places = [run.dataset for name in cards for run in read_card(folder, name).runs]
    return tuple(dict.fromkeys([*places, *filter(None, places_of(stage) if stage is not None else ())]))


def refuse_secret(folder: Path, origins: Sequence[str]) -> None:
    """Refuse a folder that is, or was made from, a dataset whose answers are secret.

    Raises:
        UsageError: it is such a dataset, or one of its datasets is gone, so that nobody can say.
    """
    for place in (str(folder), *origins):
        for name in _names(place):
            if name in SECRET:
                raise UsageError(f"{folder} comes from {name}, whose questions and answers must not be published")
        if not place.startswith(GENERATED) and not _path(place).exists():
            raise UsageError(
                f"{folder} was made from {place}, which is gone: whether that may be published cannot be checked"
            )


def refuse_asked(folder: Path, origins: Sequence[str]) -> None:
    """Refuse a run whose questions are not all tasks of a dataset: whoever asked them knows where they come from.

    Raises:
        UsageError: its card names no dataset, or it holds a question that somebody asked.
        SchemaError: a line of its record is damaged.
    """
    if not origins:
        raise UsageError(
            f"the card of {folder} names no dataset: whether its questions may be published cannot be checked; give"
            " --own-questions if they are yours to publish"
        )
    for number, line in read_lines(folder / EPISODES) if (folder / EPISODES).is_file() else ():
        try:
            task = msgspec.json.decode(line, type=_Line).task
        except MALFORMED as error:
            raise SchemaError(f"{folder / EPISODES}:{number}: {error}") from error
        if task.split == ASKED:
            raise UsageError(
                f"{folder} holds a question that is no task of its dataset ({task.task_id}): whether it may be"
                " published cannot be checked; give --own-questions if it is yours to publish"
            )


class _Line(msgspec.Struct):
    """What is read of an episode."""

    task: Task


def _names(place: str) -> Iterator[object]:
    """Yield the names by which a dataset may say that it is a benchmark: those of its folder and of its card."""
    path = _path(place)
    yield from (place.partition(":")[0], path.name)
    stage = read_stage(path) if path.is_dir() else None
    if stage is not None:
        yield from (stage.inputs.get(key) for key in ("benchmark", "dataset", "source") if _is_name(stage, key))


def _is_name(stage: Stage, key: str) -> bool:
    return isinstance(stage.inputs.get(key), str)


def _path(place: str) -> Path:
    name, colon, path = place.partition(":")
    return Path(path if colon and name in BENCHMARKS else place)
