"""What a collection of teachers' episodes must have, checked before any hour is spent on it."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from itertools import islice

from harness1.config import Config
from harness1.data.query_overlap import TEST
from harness1.data.source import Source
from harness1.env.render.prompt import static_piece
from harness1.errors import UsageError
from harness1.models.files.fetch import resolve_model
from harness1.models.open import HARMONY, format_at
from harness1.models.tokenizer import Tokenizer
from harness1.plain import utf8_safe
from harness1.policy.registry import check_policy
from harness1.records import Task
from harness1.reward.outcome import targets
from harness1.tools.registry import Toolbox

TEACHERS = {"oracle": "oracle-teacher"}
"""What `--teacher` calls otherwise than `--policy`: the oracle that shows the way, not the one that only gets there."""
HOSTED = "openai"
"""The kind of policies that are hosted models."""
SAMPLED = 20
"""Documents, and questions, that a tokenizer is tried on."""


def teacher_policy(teacher: str) -> str:
    """The policy that a user's word for a teacher stands for.

    Raises:
        UsageError: there is none.
    """
    policy = TEACHERS.get(teacher, teacher)
    check_policy(policy)
    return policy


def is_hosted(policy: str) -> bool:
    """Whether a policy is a model that is reached by text: it gives its reasons where an argument asks for them."""
    return policy.partition(":")[0] == HOSTED


def check_taught_split(split: str, where: str) -> None:
    """
    Args:
        where: what the tasks or their episodes are of, for the message.

    Raises:
        UsageError: the split is the one that is tested on.
    """
    if split == TEST:
        raise UsageError(
            f"{where}: split {TEST} is what models are tested on, so none is trained on it: collect from another"
        )


def teaching_tasks(source: Source, split: str, limit: int, config: Config) -> list[Task]:
    """The tasks that a teacher is to show, all of them with their gold; `limit` 0 means all.

    Raises:
        UsageError: there is no such split, it is the one that is tested on, it is empty, or a task lacks its gold.
    """
    check_taught_split(split, source.name)
    tasks = source.tasks(split)[: limit or None]
    if not tasks:
        raise UsageError(f"{source.name} has no tasks in split {split}")
    for task in tasks:
        targets(task.task_id, task.gold, config.index.unit)
    return tasks


def student_place(place: str, source: Source, tasks: Sequence[Task], config: Config) -> str:
    """Where a student's tokenizer lies, found fit to write everything that its prompts will hold.

    Raises:
        UsageError: there is none, it lacks the control tokens of its format, or a text does not survive it.
        ConfigError: no format is known for it.
        MissingExtra: what reads it is not installed.
    """
    found = tokenizer_place(place)
    check_round_trip(format_at(found, config).tokenizer, sample_texts(source, tasks, config))
    return found


def tokenizer_place(place: str) -> str:
    """Where a tokenizer lies that a user names, by its whole path; `HARMONY` is nowhere, and stays as it is.

    Raises:
        UsageError: there is no such model.
    """
    return place if place == HARMONY else str(resolve_model(place).resolve())


def sample_texts(source: Source, tasks: Sequence[Task], config: Config) -> Iterable[str]:
    """The static prompt, and the first questions and documents."""
    yield static_piece(config.env, Toolbox.of(config.env)).text
    yield from (task.query for task in tasks[:SAMPLED])
    for document in islice(source.documents(), SAMPLED):
        yield f"{document.title}\n{document.text}"


def check_round_trip(tokenizer: Tokenizer, texts: Iterable[str]) -> None:
    """Refuse a tokenizer that loses what it is given: a model would be taught other words than the teacher's.

    Composing characters (Unicode's NFC) loses nothing that can be seen, and some good tokenizers do it.

    Raises:
        UsageError: it names the first text that does not come back.
    """
    for text in texts:
        given = unicodedata.normalize("NFC", utf8_safe(text))
        back = unicodedata.normalize("NFC", tokenizer.decode(tokenizer.encode(text)))
        if given != back:
            at = next((place for place, (a, b) in enumerate(zip(given, back, strict=False)) if a != b), len(back))
            start = max(0, at - 20)
            raise UsageError(
                f"the tokenizer cannot round-trip the text {given[:40]!r}: {given[start : at + 20]!r} comes back as"
                f" {back[start : at + 20]!r}"
            )
