"""The student of a dataset: its format, environment and validation tasks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from harness1.config import Config, Env, recorded_without
from harness1.data.open import open_source
from harness1.env.environment import SearchEnv
from harness1.env.model_verifiers import open_verifier
from harness1.errors import SchemaError, UsageError
from harness1.models.causal_model import context_window
from harness1.models.chat_format import ChatFormat
from harness1.models.formats import open_format
from harness1.models.tokenizer import open_tokenizer
from harness1.records import Task
from harness1.retrieval.open import open_retriever
from harness1.rows.file import RowFile
from harness1.sft.data_card import CollectionRun, DataCard


@dataclass(frozen=True)
class Student:
    """A model and the dataset that it will learn from."""

    folder: Path
    card: DataCard
    chat: ChatFormat
    env: Env

    @classmethod
    def of(cls, folder: Path, card: DataCard) -> Student:
        """Return the student of a model's folder.

        Raises:
            UsageError: the model's tokenizer differs from that of the rows, or lacks control tokens of their format.
            SchemaError: this version cannot read the card's environment.
        """
        chat = open_format(card.format, open_tokenizer(folder))
        if chat.hash != card.format_hash:
            raise UsageError(
                f"the rows were made with the tokenizer of {card.tokenizer} in the format {card.format}, but {folder} "
                "has another: build them again with --rerender --tokenizer"
            )
        try:
            return cls(folder, card, chat, msgspec.convert(recorded_without(card.env), Env))
        except msgspec.ValidationError as error:
            raise SchemaError(f"the data card's environment cannot be read: {error}") from error

    def check_length(self, rows: RowFile) -> None:
        """Refuse rows that are longer than the model's context window, with a UsageError."""
        window = context_window(self.folder)
        longest = int(rows.lengths.max(initial=0))
        if window is not None and longest > window:
            raise UsageError(
                f"a row has {longest} tokens, but {self.folder.name} reads {window}: build with sft.max_tokens={window}"
            )

    def held_out_tasks(self, limit: int) -> list[tuple[CollectionRun, Task]]:
        """Return held-out tasks of each dataset in turn, with a run that has the index to search; raise UsageError if a
        dataset is missing."""
        found: list[list[tuple[CollectionRun, Task]]] = []
        for run in {run.name: run for run in self.card.runs}.values():
            wanted = set(self.card.held_out_tasks.get(run.name, ()))
            tasks = [task for task in open_source(run.dataset).tasks(run.split) if task.task_id in wanted]
            found.append([(run, task) for task in tasks])
        longest = max(map(len, found), default=0)
        return [tasks[at] for at in range(longest) for tasks in found if at < len(tasks)][:limit]

    def environments(self, run: CollectionRun, config: Config) -> Callable[[], SearchEnv]:
        """Return a factory of environments like the teacher's, over the index of one of its runs; raise UsageError if
        the index is missing."""
        retriever = open_retriever(run.index, msgspec.structs.replace(config, env=self.env))
        verifier = open_verifier(self.env, config.machine)
        return lambda: SearchEnv(self.env, retriever, verifier, self.chat, config.machine)
