"""A folder of answers: a model's replies to the questions of a run, their scores, and how they were obtained."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from harness1.errors import UsageError
from harness1.eval.answers.asking import ANSWERS, Answered, Answering, NamedModel, Questions, ReplyStore, answer_all
from harness1.eval.answers.prompts import PROMPTS
from harness1.eval.answers.summary import as_csv, summarised
from harness1.eval.run_view import RunView
from harness1.hashing import digest, file_digest
from harness1.runs.files import write_atomically, write_json
from harness1.runs.stage import STAGE, Stage, refuse_foreign, under_way
from harness1.runs.store import EPISODES

VERB = "answer"
SUMMARY = "answers.json"
TABLE = "answers.csv"


@dataclass(frozen=True)
class AnswerRun:
    """The answers to the questions of a run.

    Args:
        out: the output folder.
        places: questions in progress at a time.
    """

    run: RunView
    questions: Questions
    work: Answering
    out: Path
    places: int = 16

    def stage(self) -> Stage:
        """Return the card of the work; equal work has an equal card."""
        work = self.work
        inputs = {
            "run": digest([self.run.stage.inputs, self.run.stage.hashes]),
            "episodes": file_digest(self.run.folder / EPISODES),
            "questions": digest(self.questions.asked),
            "answerer": _described(work.answerer),
            "judge": _described(work.judge) if work.judge else None,
            "conditions": list(work.conditions),
            "single_size": work.single_size,
            "documents": work.documents,
            "tokens": work.tokens,
            "prompts": digest(dict(PROMPTS)),
        }
        return Stage(VERB, inputs, outputs={"run": str(self.run.folder.resolve())})

    def found(self) -> dict[str, Any] | None:
        """Return the summary of this exact work if it is finished, else None."""
        if not (self.out / SUMMARY).is_file() or not self.stage().is_done(self.out):
            return None
        summary: dict[str, Any] = msgspec.json.decode((self.out / SUMMARY).read_bytes())
        return summary

    def carry_out(
        self,
        on_start: Callable[[int], None],
        on_answer: Callable[[Answered], None],
        on_torn: Callable[[int], None] = lambda _: None,
    ) -> dict[str, Any]:
        """Ask what is not answered yet, then write and return the summary. The card says `finished` once no answer and
        no verdict is missing; missing ones are requested again by the next run.

        Args:
            on_start: called with the total number of answers.
            on_torn: called with the bytes of a torn last line, left by a crash, that was cut off.

        Raises:
            UsageError: the folder holds something else or cannot be written, the index is not the run's, or a server
                would refuse every request.
        """
        refuse_foreign(self.out, VERB)
        self._refuse_other_index()
        stage = self.stage()
        with under_way(stage, self.out), ReplyStore(self.out) as store:
            on_torn(store.torn)
            on_start(sum(1 for _ in self.work.jobs()))
            answered = asyncio.run(answer_all(self.work, store, self.places, on_answer))
            summary = self._described() | summarised(answered, self.run.config.machine.bootstrap)
            write_atomically(self.out / TABLE, as_csv(answered, secret=self.run.secret_answers).encode())
            write_json(self.out / SUMMARY, summary)
        missing = {name: summary[name] for name in ("missing", "missing_verdicts")}
        stage.write(self.out, status="interrupted" if any(missing.values()) else "finished", gates=missing)
        return summary

    def _refuse_other_index(self) -> None:
        """Refuse another index than the run's, whose units the curated sets and the single search must use."""
        found, searched = self.work.texts.index_hash, self.run.stage.inputs["index"]
        if found != searched:
            raise UsageError(f"{self.run.folder} searched another index ({searched[:12]}) than this one ({found[:12]})")

    def _described(self) -> dict[str, Any]:
        run, work, questions = self.run, self.work, self.questions
        return {
            "run": str(run.folder),
            "dataset": run.dataset,
            "split": run.split,
            "policy": run.policy,
            "answerer": _described(work.answerer),
            "judge": _described(work.judge) if work.judge else None,
            "prompts": {name: {"text": text, "hash": digest(text)} for name, text in PROMPTS.items()},
            "single_size": work.single_size or "as delivered",
            "documents": work.documents,
            "tokens": work.tokens,
            "tasks": questions.tasks,
            "without_answers": questions.without_answers,
            "broken_episodes": questions.broken,
        }


def clear_answers(out: Path) -> None:
    """Remove earlier answers, and nothing else in the folder.

    Raises:
        UsageError: the folder holds something else.
    """
    refuse_foreign(out, VERB)
    for name in (STAGE, ANSWERS, SUMMARY, TABLE):
        (out / name).unlink(missing_ok=True)


def _described(model: NamedModel) -> dict[str, Any]:
    """Return a model's name and the settings sent with its messages, if its server accepts them."""
    return {"model": model.name, "settings": {"temperature": 0, "max_tokens": model.completer.most_tokens}}
