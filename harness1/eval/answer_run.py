"""A folder of answers: a model's replies to the questions of a run, how they were obtained, and their scores, exact
match and token F1 as in SQuAD (Rajpurkar et al. 2016, arXiv 1606.05250)."""

from __future__ import annotations

import asyncio
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec

from harness1.config import Machine
from harness1.errors import UsageError
from harness1.eval import answers, statistics
from harness1.eval.outputs import csv_table
from harness1.eval.run import Run
from harness1.http.model_endpoint import Completer, ModelEndpoint, policy_endpoint, verifier_endpoint
from harness1.models.spec import ModelSpec
from harness1.plain import digest, file_digest
from harness1.retrieval.open import open_retriever
from harness1.runs.files import Stage, clear, find_json, refuse_foreign, under_way, write_atomically, write_json
from harness1.runs.journal import EPISODES

_ARTICLES = re.compile(r"\b(a|an|the)\b")


def normalise(text: str) -> str:
    """Return the text in lower case, without punctuation and English articles, with single spaces. Punctuation is that
    of ASCII, as in SQuAD, and of Unicode (general category P). Composed and decomposed letters are equal (NFC)."""
    lower = unicodedata.normalize("NFC", text).lower()
    kept = "".join(
        letter for letter in lower if letter not in string.punctuation and unicodedata.category(letter)[0] != "P"
    )
    return " ".join(_ARTICLES.sub(" ", kept).split())


def exact_match(answer: str, golds: Sequence[str]) -> float:
    """Return 1.0 if the normalised answer equals any of the right ones, else 0.0. Raises ValueError: there is none."""
    given = normalise(answer)
    return max(float(given == normalise(gold)) for gold in golds)


def token_f1(answer: str, golds: Sequence[str]) -> float:
    """Return the largest F1 of the answer's bag of words against that of any right answer. If either has no words after
    normalisation, F1 is 1.0 if both have none, else 0.0 (SQuAD 2.0). Raises ValueError: there is no right answer."""
    given = Counter(normalise(answer).split())

    def f1(right: Counter[str]) -> float:
        if not given or not right:
            return float(given == right)
        return 2.0 * (given & right).total() / (given.total() + right.total())

    return max(f1(Counter(normalise(gold).split())) for gold in golds)


METRICS: tuple[str, ...] = ("exact_match", "f1", "judge")
SHOWN_FAULTS = 5
Scored = dict[answers.Condition, tuple[list[answers.Answered], dict[str, dict[str, float]]]]
"""Each condition's answers in order, and for each metric the mean over samples of every task that has one."""


def score_answers(answered: Sequence[answers.Answered]) -> Scored:
    """Sort and score answers by condition; a missing answer has no score, one without a valid verdict no `judge`."""
    ordered, found = _sort(answered), Scored()
    for condition in answers.CONDITIONS:
        if rows := [each for each in ordered if each.condition == condition]:
            values = [(each.question.task_id, _scores_of(each)) for each in rows]
            by_metric = {
                metric: statistics.task_means((task, scores[metric]) for task, scores in values if metric in scores)
                for metric in METRICS
            }
            found[condition] = rows, by_metric
    return found


def _sort(answered: Sequence[answers.Answered]) -> list[answers.Answered]:
    # A mean of floats depends on the order of its terms, and an interval on that of the tasks.
    return sorted(answered, key=lambda each: (each.question.task_id, each.question.sample_idx, each.condition))


def _scores_of(each: answers.Answered) -> dict[str, float]:
    if each.answer is None:
        return {}
    text, golds = each.text, each.question.golds
    verdict = None if each.verdict is None else answers.read_verdict(each.verdict.text)
    judged = {} if verdict is None else {"judge": float(verdict)}
    return {"exact_match": exact_match(text, golds), "f1": token_f1(text, golds), **judged}


def summarise_answers(answered: Sequence[answers.Answered], resamples: int, seed: int = 0) -> dict[str, Any]:
    """Return plain data: `conditions`, `pairs`, how many answers and verdicts are `missing`, and the first few
    `faults`. Each condition has its metrics as `{mean, low, high}` (null if undefined) and the counts of `_counts`. A
    pair is `a` minus `b` over the tasks that both have, with the p of a paired randomisation test, and `p_holm`,
    corrected for all pairs of its metric."""
    scored, conditions, pairs = score_answers(answered), dict[str, Any](), list[dict[str, Any]]()
    for condition, (rows, scores) in scored.items():
        means = {name: statistics.bootstrap_mean(list(of.values()), resamples, seed) for name, of in scores.items()}
        conditions[condition] = {name: statistics.finite_or_null(mean) for name, mean in means.items()} | _counts(rows)
    for metric in METRICS:
        found: list[dict[str, Any]] = []
        for earlier, later in combinations(scored, 2):
            both = [scored[side][1][metric] for side in (later, earlier)]
            if common := sorted(both[0].keys() & both[1].keys()):
                a, b = ({task: side[task] for task in common} for side in both)
                difference = statistics.finite_or_null(statistics.paired_difference(a, b, resamples, seed))
                p = statistics.randomisation_test(a, b, resamples, seed)
                pair = {"a": later, "b": earlier, "metric": metric, "tasks": len(common)}
                found.append({**pair, "difference": difference, "p": p})
        corrected = statistics.holm({at: pair["p"] for at, pair in enumerate(found)})
        pairs += [pair | {"p_holm": corrected[at]} for at, pair in enumerate(found)]
    return {
        "missing": sum(each.answer is None for each in answered),
        "missing_verdicts": sum(bool(each.answer and not each.verdict and each.fault) for each in answered),
        "faults": [each.fault for each in _sort(answered) if each.fault][:SHOWN_FAULTS],
        "conditions": conditions,
        "pairs": pairs,
    }


def as_csv(answered: Sequence[answers.Answered], *, secret: bool = False) -> str:
    """Return a line per task and condition: scores, the answers of all samples and, unless secret, the right ones."""
    lines = []
    for condition, (rows, scores) in score_answers(answered).items():
        replies: dict[str, list[str]] = {}
        right = {each.question.task_id: "" if secret else " | ".join(each.question.golds) for each in rows}
        for each in rows:
            if each.answer is not None:
                replies.setdefault(each.question.task_id, []).append(each.text)
        for task_id, texts in replies.items():
            values = (scores[metric].get(task_id, "") for metric in METRICS)
            lines.append((task_id, condition, len(texts), *values, " | ".join(texts), right[task_id]))
    return csv_table(("task_id", "condition", "answers", *METRICS, "answer", "right"), lines)


def _counts(rows: Sequence[answers.Answered]) -> dict[str, Any]:
    # `cut`: by the token limit; `documents`: the mean number in a prompt; `left_out`: for lack of room.
    replies = [each.answer for each in rows if each.answer is not None]

    def add_up(counts: Iterable[int | None]) -> int | None:
        known = [count for count in counts if count is not None]
        return sum(known) if known else None

    return {
        "tasks": len({reply.task_id for reply in replies}),
        "answers": len(replies),
        "missing": len(rows) - len(replies),
        "empty": sum(each.answer is not None and not each.text for each in rows),
        "cut": sum(reply.finish_reason == "length" for reply in replies),
        "unparseable": sum(
            each.verdict is not None and answers.read_verdict(each.verdict.text) is None for each in rows
        ),
        "documents": fmean(len(reply.documents) for reply in replies) if replies else None,
        "left_out": sum(reply.left_out for reply in replies),
        "prompt_tokens": add_up(reply.prompt_tokens for reply in replies),
        "output_tokens": add_up(reply.output_tokens for reply in replies),
    }


VERB = "answer"
SUMMARY = "answers.json"
TABLE = "answers.csv"


@dataclass(frozen=True)
class AnswerRun:
    """The answers to the questions of a run, `places` at a time. `counts`: as `questions_of` counts its tasks."""

    run: Run
    counts: dict[str, int]
    work: answers.Answering
    out: Path
    places: int = 16

    @property
    def _settings(self) -> dict[str, Any]:
        judge = self.work.judge and self.work.judge.described
        return {"answerer": self.work.answerer.described, "judge": judge, "tokens": self.work.tokens}

    def stage(self) -> Stage:
        """Return the card of the work; equal work has an equal card."""
        inputs = {
            "run": digest([self.run.stage.inputs, self.run.stage.hashes]),
            "episodes": file_digest(self.run.folder / EPISODES),
            "questions": digest(self.work.questions),
            "conditions": list(self.work.conditions),
            "prompts": digest(dict(answers.PROMPTS)),
            **self._settings,
        }
        return Stage(VERB, inputs, outputs={"run": str(self.run.folder.resolve())})

    def clear(self) -> None:
        """Remove earlier answers, and nothing else. Raises UsageError: the folder holds something else."""
        clear(self.out, VERB, answers.ANSWERS, SUMMARY, TABLE)

    def load_summary(self) -> dict[str, Any] | None:
        """Return the summary of this exact work if it is finished, else None."""
        return find_json(self.out / SUMMARY) if self.stage().is_done(self.out) else None

    def carry_out(
        self,
        on_start: Callable[[int], None],
        on_answer: Callable[[answers.Answered], None],
        on_torn: Callable[[int], None] = lambda _: None,
    ) -> dict[str, Any]:
        """Ask the open questions, then write and return the summary. The card says `finished` once no answer or verdict
        is missing; the next run requests missing ones again. `on_start`: called with the total number of answers.
        `on_torn`: called with the bytes of a torn last line that was cut off. Raises UsageError: the folder holds
        something else or cannot be written, the index is not the run's, or a server would refuse every request."""
        refuse_foreign(self.out, VERB)
        used, searched = self.work.texts.index_hash, self.run.stage.inputs["index"]
        if used != searched:  # the curated sets and the single search must use the same units
            raise UsageError(f"{self.run.folder} searched the index {searched[:12]}, but this one is {used[:12]}")
        stage = self.stage()
        with under_way(stage, self.out), answers.ReplyStore(self.out) as store:
            on_torn(store.torn)
            on_start(sum(1 for _ in self.work.jobs()))
            answered = asyncio.run(answers.answer_all(self.work, store, self.places, on_answer))
            summary: dict[str, Any] = {
                "run": str(self.run.folder),
                "dataset": self.run.dataset,
                "split": self.run.split,
                "policy": self.run.policy,
                **self._settings,
                "prompts": {name: {"text": text, "hash": digest(text)} for name, text in answers.PROMPTS.items()},
                **self.counts,
                **summarise_answers(answered, statistics.RESAMPLES),
            }
            write_atomically(self.out / TABLE, as_csv(answered, secret=self.run.secret_answers).encode())
            write_json(self.out / SUMMARY, summary)
        missing = {name: summary[name] for name in ("missing", "missing_verdicts")}
        stage.write(self.out, status="interrupted" if any(missing.values()) else "finished", gates=missing)
        return summary


def open_answers(
    run: Run,
    out: Path | None,
    machine: Machine,
    answerer: str,
    judge: str = "",
    conditions: str = ",".join(answers.CONDITIONS),
    answer_tokens: int = 1024,
    index: str | None = None,
    limit: int = 0,
    tokens: int = 24000,
) -> AnswerRun:
    """Open the models (`openai:MODEL@URL`) and the index that answer the questions of a run. `out`: None:
    `answers/MODEL` in the folder of the run. With an empty judge, answers are not judged. `conditions`: names separated
    by commas. `index`: where the run's index is now, if it was moved. Raises UsageError: a model or a condition is
    invalid, or the run has nothing to ask."""
    (questions, counts), named = answers.questions_of(run, limit), {name.strip() for name in conditions.split(",")}
    if unknown := named - set(answers.CONDITIONS):
        raise UsageError(
            f"--conditions takes some of {', '.join(answers.CONDITIONS)}, not {', '.join(sorted(unknown))!r}"
        )
    # The run's settings with this machine's web services, whose keys are not recorded.
    web = machine.web if machine.web != Machine().web else run.config.machine.web
    recorded = msgspec.structs.replace(run.config.machine, web=web)
    config = msgspec.structs.replace(run.config, machine=recorded)
    work = answers.Answering(
        questions=questions,
        texts=answers.DocumentReader(open_retriever(index or run.index, config), recorded),
        answerer=_model(answerer, "--answerer", answer_tokens, policy_endpoint, machine),
        judge=_model(judge, "--judge", answer_tokens, verifier_endpoint, machine) if judge else None,
        conditions=[condition for condition in answers.CONDITIONS if condition in named],
        tokens=tokens,
    )
    out = out or run.folder / "answers" / re.sub(r"[^\w.-]", "-", ModelSpec.read(answerer).model)
    return AnswerRun(run, counts, work, out, machine.concurrency)


def _model(
    spec: str, option: str, most_tokens: int, endpoint: Callable[[str, Machine], ModelEndpoint], machine: Machine
) -> answers.NamedModel:
    asked = ModelSpec.read(spec)
    if asked.kind != "openai" or asked.url is None:
        raise UsageError(f"{option} takes openai:MODEL@URL, not {spec!r}")
    return answers.NamedModel(spec, Completer(endpoint(asked.url, machine), asked.model, most_tokens))
