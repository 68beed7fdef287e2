"""A folder of answers: a model's replies to the questions of a run, their scores, and how they were obtained."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from harness1.config import Config, Machine
from harness1.errors import MALFORMED, UsageError
from harness1.eval.answers.asking import (
    ANSWERS,
    CONDITIONS,
    Answered,
    Answering,
    Condition,
    NamedModel,
    Questions,
    ReplyStore,
    answer_all,
    questions_of,
)
from harness1.eval.answers.prompts import PROMPTS, DocumentReader
from harness1.eval.answers.summary import as_csv, summarised
from harness1.eval.run import Run
from harness1.hashing import digest, file_digest
from harness1.http.model_endpoint import Completer, ModelEndpoint, policy_endpoint, verifier_endpoint
from harness1.models.spec import ModelSpec
from harness1.retrieval.open import open_retriever
from harness1.runs.files import Stage, clear, refuse_foreign, under_way, write_atomically, write_json
from harness1.runs.journal import EPISODES

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

    run: Run
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

    def clear(self) -> None:
        """Remove earlier answers, and nothing else in the folder.

        Raises:
            UsageError: the folder holds something else.
        """
        clear(self.out, VERB, ANSWERS, SUMMARY, TABLE)

    def found(self) -> dict[str, Any] | None:
        """Return the summary of this exact work if it is finished, else None."""
        if not (self.out / SUMMARY).is_file() or not self.stage().is_done(self.out):
            return None
        try:
            return msgspec.json.decode((self.out / SUMMARY).read_bytes(), type=dict[str, Any])
        except MALFORMED:
            return None

    def carry_out(
        self,
        on_start: Callable[[int], None],
        on_answer: Callable[[Answered], None],
        on_torn: Callable[[int], None] = lambda _: None,
    ) -> dict[str, Any]:
        """Ask the open questions, then write and return the summary. The card says `finished` once no answer or verdict
        is missing; the next run requests missing ones again.

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
        """Refuse an index other than the run's: the curated sets and the single search must use the same units."""
        found, searched = self.work.texts.index_hash, self.run.stage.inputs["index"]
        if found != searched:
            raise UsageError(f"{self.run.folder} searched the index {searched[:12]}, but this one is {found[:12]}")

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


@dataclass(frozen=True)
class AnswerRequest:
    """The options of `harness1 answer`.

    Args:
        answerer, judge: models as `openai:MODEL@URL`; with an empty judge, answers are not judged.
        conditions: names from `CONDITIONS`, separated by commas.
        limit: as in `questions_of`.
        single_size, documents, tokens: as in `Answering`.
        answer_tokens: most tokens of an answer or a verdict, including the thoughts before it.
        index: the current location of the run's index, if it was moved.
    """

    answerer: str
    judge: str = ""
    conditions: str = ",".join(CONDITIONS)
    limit: int = 0
    single_size: int = 0
    documents: int = 30
    tokens: int = 24000
    answer_tokens: int = 1024
    index: str | None = None


def open_answers(run: Run, asked: AnswerRequest, out: Path | None, machine: Machine) -> AnswerRun:
    """Open the models and the index that answer the questions of a run.

    The answerer's key, deadline and concurrency are those of `machine.model`, the judge's those of `machine.verifier`.

    Args:
        out: the output folder; None: `answers/MODEL` in the folder of the run.

    Raises:
        UsageError: a model or a condition is invalid, or the run has nothing to ask.
    """
    questions, most = questions_of(run, asked.limit), asked.answer_tokens
    work = Answering(
        questions=questions.asked,
        texts=_reader(asked.index or run.index, run.config, machine),
        answerer=_model(asked.answerer, "--answerer", most, policy_endpoint, machine),
        judge=_model(asked.judge, "--judge", most, verifier_endpoint, machine) if asked.judge else None,
        conditions=_conditions(asked.conditions),
        single_size=asked.single_size,
        documents=asked.documents,
        tokens=asked.tokens,
    )
    out = out or run.folder / "answers" / re.sub(r"[^\w.-]", "-", ModelSpec.read(asked.answerer).model)
    return AnswerRun(run, questions, work, out, machine.model.concurrency)


def _conditions(text: str) -> tuple[Condition, ...]:
    asked = {name.strip() for name in text.split(",")}
    if unknown := asked - set(CONDITIONS):
        raise UsageError(f"--conditions takes some of {', '.join(CONDITIONS)}, not {', '.join(sorted(unknown))!r}")
    return tuple(condition for condition in CONDITIONS if condition in asked)


def _model(
    spec: str, option: str, most_tokens: int, endpoint: Callable[[str, Machine], ModelEndpoint], machine: Machine
) -> NamedModel:
    asked = ModelSpec.read(spec)
    if asked.kind != "openai" or asked.url is None:
        raise UsageError(f"{option} takes openai:MODEL@URL, not {spec!r}")
    return NamedModel(spec, Completer(endpoint(asked.url, machine), asked.model, most_tokens))


def _reader(index: str, recorded: Config, given: Machine) -> DocumentReader:
    """Open the index with the run's settings, and with this machine's web services, whose keys are not recorded."""
    web = given.web if given.web != Machine().web else recorded.machine.web
    config = msgspec.structs.replace(recorded, machine=msgspec.structs.replace(recorded.machine, web=web))
    return DocumentReader(open_retriever(index, config), config.machine)


def _described(model: NamedModel) -> dict[str, Any]:
    """Return a model's name and the settings sent with its messages, if its server accepts them."""
    return {"model": model.name, "settings": {"temperature": 0, "max_tokens": model.completer.most_tokens}}
