"""Checks before teachers' episodes are collected, which may take hours."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from itertools import islice

from harness1.config import Config
from harness1.data.leaks import TEST, TaskFilter
from harness1.data.source import Source
from harness1.env.pieces import static_piece
from harness1.errors import UsageError
from harness1.models.fetch import resolve_model
from harness1.models.open import HARMONY, format_at
from harness1.models.tokenizer import Tokenizer
from harness1.plain import utf8_safe
from harness1.policy.registry import check_policy
from harness1.records import Task
from harness1.reward.measures import targets
from harness1.tools.registry import Toolbox

TEACHERS = {"oracle": "oracle-teacher"}
"""Names that mean another policy for `--teacher` than for `--policy`: here, the oracle that shows how to search."""
HOSTED = "openai"
"""The kind of hosted models."""
SAMPLED = 20
"""Number of documents, and of questions, on which a tokenizer is tested."""


def teacher_policy(teacher: str, config: Config = Config()) -> str:
    """Return the policy that a teacher's name means; raise UsageError if there is no such policy."""
    policy = TEACHERS.get(teacher, teacher)
    check_policy(policy, config)
    return policy


def is_hosted(policy: str) -> bool:
    """Return True if a policy is a model that is called with text; it gives its reasoning in an argument."""
    return policy.partition(":")[0] == HOSTED


def check_taught_split(split: str, where: str) -> None:
    """Raise UsageError if the split is the test split; `where` is the dataset or run, for the message."""
    if split == TEST:
        raise UsageError(f"{where}: split {TEST} is for testing and must not be trained on: collect from another")


def teaching_tasks(
    source: Source, split: str, limit: int, config: Config, sieve: TaskFilter | None = None
) -> list[Task]:
    """Return the first `limit` tasks of a split (0 for all), all of which have gold.

    Args:
        sieve: leaves out what must not be learned; None: all may be.

    Raises:
        UsageError: there is no such split, it is the test split, no task is left, or a task has no gold.
    """
    check_taught_split(split, source.name)
    kept, account = (sieve or TaskFilter(config.data)).select(source.name, split, source.tasks(split))
    tasks = kept[: limit or None]
    if not tasks:
        raise UsageError(account.line or f"{source.name} has no tasks in split {split}")
    for task in tasks:
        targets(task.task_id, task.gold, config.index.unit)
    return tasks


def student_place(place: str, source: Source, tasks: Sequence[Task], config: Config) -> str:
    """Return the path of a student's tokenizer, after checking that it can encode the texts of its prompts.

    Raises:
        UsageError: it does not exist, lacks the control tokens of its format, or loses text.
        ConfigError: no format is known for it.
        MissingExtra: the library that reads it is not installed.
    """
    found = tokenizer_place(place)
    check_round_trip(format_at(found, config).tokenizer, sample_texts(source, tasks, config))
    return found


def tokenizer_place(place: str) -> str:
    """Return the absolute path of a tokenizer; `HARMONY`, which has no path, is returned as it is. Raise UsageError if
    there is no such model."""
    return place if place == HARMONY else str(resolve_model(place).resolve())


def sample_texts(source: Source, tasks: Sequence[Task], config: Config) -> Iterable[str]:
    """Yield the static prompt and the first questions and documents."""
    yield static_piece(config.env, Toolbox.of(config.env)).text
    yield from (task.query for task in tasks[:SAMPLED])
    for document in islice(source.documents(), SAMPLED):
        yield f"{document.title}\n{document.text}"


def check_round_trip(tokenizer: Tokenizer, texts: Iterable[str]) -> None:
    """Refuse a tokenizer that changes texts, because a model would learn other words than the teacher's.

    Unicode normalisation (NFC) is allowed: it changes nothing visible, and some good tokenizers do it.

    Raises:
        UsageError: a text changes; the message shows the first.
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
