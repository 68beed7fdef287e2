"""Gates between the stages of a recipe: what a stage made is measured, and a bound decides whether the next one starts.

Every gate gives one number. A gate that counts faults has the bound 0; NaN passes no gate.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness1.data.open import open_source
from harness1.errors import SchemaError, UsageError
from harness1.eval.compare import compare
from harness1.eval.run import read_run
from harness1.model_folder import folder_hash
from harness1.models.checkpoint import read_checkpoint
from harness1.models.fetch import resolve_model
from harness1.models.tokenizer import TOKENIZER
from harness1.plain import digest, file_digest
from harness1.records import Record
from harness1.retrieval.files import check_index
from harness1.reward import total_of
from harness1.rl.admission import read_report
from harness1.rows import RowFile
from harness1.runs.files import STAGE, Stage, read_json, read_raw_stage, read_stage
from harness1.runs.folder import METRICS, run_config
from harness1.runs.journal import read_episodes
from harness1.sft.data_card import HELD_OUT, TRAIN, read_card
from harness1.training.log import VALIDATION_PREFIX, read_log

CONTENT = (
    *("corpus.jsonl*", "queries.jsonl*", "qrels/*", "tasks.jsonl"),
    *("tasks.csv", "curated*.trec", "pool*.trec", "*/tasks.csv", "*/curated*.trec"),
    *("policies/*/tasks.csv", "policies/*/curated*.trec"),
    *("train.jsonl", "held_out.jsonl"),
    *("*.safetensors", "*.gguf", "tokenizer.json", "config.json", "adapter_config.json"),
)
"""The files that are content: datasets, results of runs, rows, models. Times, paths and pages are not."""


def artifact(place: Path) -> str:
    """Return the hash of a file, or of the content of a folder, which is equal in every folder; empty if there is none.
    Of a folder that holds none of the files in `CONTENT`, every file counts, but no card. Raises UsageError: the place
    cannot be read."""
    try:
        if not place.is_dir():
            return file_digest(place)
        if (card := read_raw_stage(place)) is not None and "index" in card.hashes and card.verb == "index":
            return card.hashes["index"]
        files = sorted({file for pattern in CONTENT for file in place.glob(pattern) if file.is_file()})
        files = files or sorted(file for file in place.rglob("*") if file.is_file() and file.name != STAGE)
        return digest({str(file.relative_to(place)): file_digest(file) for file in files}) if files else ""
    except OSError as error:
        raise UsageError(f"{error.filename or place}: {error.strerror}") from error


GROUPS = ("data", "models", "rl", "sft", "tasks", "train", "serve", "config")
"""First words of verbs that have a second one."""


@dataclass(frozen=True)
class StageCase:
    """A stage whose command has ended."""

    words: tuple[str, ...]
    folder: Path

    @property
    def verb(self) -> str:
        return " ".join(self.words[: 2 if self.words[0] in GROUPS else 1])

    def option(self, name: str) -> str:
        """Return the last value of an option, or the empty string."""
        places = [at for at, word in enumerate(self.words[:-1]) if word == name]
        return self.words[places[-1] + 1] if places else ""


EPISODES = "episodes"
"""The folder of a training's own episodes, in its folder."""
LOSS_LIKE = ("nll",)
"""Metrics of which less is better."""
EXACT = 1e-9
"""Difference that the sum of a reward's terms may have from its total, which is computed from the same numbers."""


def _count_documents(case: StageCase) -> float:
    return float(_card(case.folder).outputs.get("documents", 0))


def _count_training_tasks(case: StageCase) -> float:
    source = open_source(str(case.folder))
    return float(len(source.tasks("train"))) if "train" in source.splits else 0.0


def _count_shared_gold(case: StageCase) -> float:
    source, splits = open_source(str(case.folder)), defaultdict[frozenset[str], set[str]](set)
    for split in source.splits:
        for task in source.tasks(split):
            if task.gold is not None:
                splits[frozenset(task.gold.relevant)].add(split)
    return sum(len(each) > 1 for each in splits.values())


def _count_faults(case: StageCase) -> float:
    gates = _card(case.folder).gates
    return float(gates.get("missing", 0) + gates.get("failures", {}).get("infra_error", 0))


def _count_wrong_rewards(case: StageCase) -> float:
    own = case.folder / EPISODES
    run = own if own.is_dir() else case.folder
    settings = run_config(run)[0].reward
    wrong = 0
    for reward in filter(None, (episode.reward for episode in read_episodes(run))):
        expected = total_of(reward.terms, reward.override, settings)
        wrong += not abs(reward.total - expected) <= EXACT  # also NaN
    return wrong


def _share_valid_actions(case: StageCase) -> float | None:
    turns = [turn for episode in read_episodes(case.folder) for turn in episode.turns]
    valid = (t.action is not None and t.observation is not None and t.observation.error is None for t in turns)
    return sum(valid) / len(turns) if turns else None


def _oracle_recall(case: StageCase) -> float | None:
    policy = case.option("--policy") or case.option("--teacher")
    return _recall(case) if policy.rpartition(":")[2] == "oracle" else None


def _count_wrong_masks(case: StageCase) -> float:
    """Count rows that train nothing or everything, and files that were changed or whose masks do not add up to the
    card's trained tokens."""
    card, stage, wrong = read_card(case.folder), _card(case.folder), 0
    for name, counts in ((TRAIN, card.train), (HELD_OUT, card.held_out)):
        file = RowFile(case.folder / name)
        wrong += sum(not 0 < trained < length for trained, length in zip(file.trained, file.lengths, strict=True))
        wrong += int(file.trained.sum()) != counts.trained_tokens
        wrong += file_digest(case.folder / name) != stage.outputs.get(name)
    return float(wrong)


def _count_foreign_tokenizers(case: StageCase) -> float | None:
    if not (model := _model(case)):
        return None
    expected = file_digest(model / TOKENIZER)
    found = {file_digest(case.folder / TOKENIZER)}
    if case.verb == "sft train":
        rows = next((word for word in case.words[2:] if not word.startswith("-")), "")
        found.add(read_card(Path(rows)).tokenizer_hash)
    return float(len(found - {expected}))


def _share_admitted(case: StageCase) -> float:
    report = read_report(case.folder)
    return len(report.list_admitted()) / len(report.tasks) if report.tasks else 0.0


def _count_not_finite(case: StageCase) -> float:
    lines = read_log(case.folder)
    values = [_number(value) for line in lines for value in line.values()]
    return float(len(values) - sum(map(math.isfinite, values)) + (not lines))


def _count_foreign_origins(case: StageCase) -> float:
    """Return 1 if a checkpoint has no card, or was made from another model than the one that the command names."""
    card, model = read_checkpoint(case.folder), _model(case)
    return float(card is None or (model is not None and card.base != folder_hash(model)))


def _gain(case: StageCase) -> float | None:
    """Return the gain of the checkpoint over the start in the held-out metric; None if it was not measured at both."""
    card = read_checkpoint(case.folder)
    looks = [line for line in read_log(case.folder) if any(name.startswith(VALIDATION_PREFIX) for name in line)]
    metric = str(_card(case.folder).inputs.get("train", {}).get("watch", {}).get("metric", ""))
    if card is None or metric not in card.metrics or not looks or looks[0]["step"] != 0:
        return None
    began = looks[0].get(f"{VALIDATION_PREFIX}{metric}")
    if not isinstance(began, int | float):
        return None
    change = card.metrics[metric] - began
    return -change if metric in LOSS_LIKE else change


def _start_k3(case: StageCase) -> float | None:
    return next((_number(line["gate/mean_k3"]) for line in read_log(case.folder) if "gate/mean_k3" in line), None)


def _share_zero_variance(case: StageCase) -> float | None:
    """Return the mean share of groups without a signal: dropped or trained, their rewards were all equal."""
    lines = [line for line in read_log(case.folder) if "zero_variance" in line]
    if not lines:
        return None
    last = lines[-1]
    dropped, kept = (_number(last.get(f"groups/{name}", 0.0)) for name in ("filtered", "trained"))
    within = sum(_number(line["zero_variance"]) for line in lines) / len(lines)
    return (dropped + within * kept) / (dropped + kept) if dropped + kept else 1.0


def _least_lead(case: StageCase) -> float:
    """Return the least lead in reward that the first run of a comparison has over any other: of each mean paired
    difference, the lower end of its 95 % interval."""
    words = list(zip(case.words, case.words[1:], strict=False))
    runs = [Path(word) for before, word in words if not before.startswith("--") and not word.startswith("--")]
    compared = compare(list(map(read_run, runs)), "reward", top=0)
    return -max(pair.metrics["reward"].difference.high for pair in compared.others)


def metrics_of(folder: Path) -> dict[str, float]:
    """Return the metrics of a run, or those of a checkpoint; those that have no value are left out."""
    if (folder / METRICS).is_file():
        found = {name: each.get("mean") for name, each in read_json(folder / METRICS).items() if isinstance(each, dict)}
        return {name: float(mean) for name, mean in found.items() if mean is not None}
    card = read_checkpoint(folder)
    return dict(card.metrics) if card else {}


def _recall(case: StageCase) -> float:
    return metrics_of(case.folder).get("curated_recall", math.nan)  # where every episode is broken


def _model(case: StageCase) -> Path | None:
    spec = case.option("--model").removeprefix("hf:")
    return resolve_model(spec) if spec and "@" not in spec else None


def _card(folder: Path) -> Stage:
    card = read_stage(folder)
    if card is None:
        raise SchemaError(f"{folder} has no card: its stage did not finish")
    return card


def _number(value: Any) -> float:
    """Return a logged number; NaN and infinities are written as null."""
    return float(value) if isinstance(value, int | float) else math.nan


TRAINED = ("sft train", "rl train")
PLAYED = ("eval", "sft collect")
DATASETS = ("tasks make", "data copy")
INDEX, DATA, ROWS = "index check {out}", "data check {out}", "sft build RUN --out {out} --force"
COMPARED = "compare RUN RUN --metric reward --out {out}"


class GateRuling(Record):
    """What a gate found."""

    gate: str
    value: float | None
    """None: not finite, which JSON has no word for."""
    bound: float
    passed: bool
    says: str
    look: str = ""
    """The command to look closer with; empty where the gate has passed."""


@dataclass(frozen=True)
class Guard:
    """One check of what a stage made."""

    measure: Callable[[StageCase], float | None]
    """Returns the value, or None where the gate does not apply."""
    says: str
    verbs: tuple[str, ...]
    """The verbs whose stages it guards."""
    bound: float | None = None
    """None: it guards only stages that name it."""
    at_least: bool = False
    """The bound is the smallest value that passes, not the largest."""
    look: str = "view {out}"
    """The command to look closer, with `{out}` for the stage's folder."""


GATES: Mapping[str, Guard] = {
    "documents": Guard(_count_documents, "documents in the index", ("index",), 1, at_least=True, look=INDEX),
    "damaged": Guard(
        lambda case: len(check_index(case.folder).damaged), "damaged stretches of the index", ("index",), 0, look=INDEX
    ),
    "tasks": Guard(_count_training_tasks, "tasks to train on", DATASETS, 1, at_least=True, look=DATA),
    "shared_gold": Guard(_count_shared_gold, "gold sets in more than one split", DATASETS, 0, look=DATA),
    "faults": Guard(_count_faults, "episodes broken by the infrastructure", PLAYED, 0),
    "terms": Guard(_count_wrong_rewards, "rewards that are not the sum of their terms", (*PLAYED, "rl train"), 0),
    "valid": Guard(_share_valid_actions, "share of valid actions", ("sft collect",), 0.5, at_least=True),
    "recall": Guard(_recall, "mean curated recall", ("sft collect",), 0.3, at_least=True),
    "oracle": Guard(_oracle_recall, "mean curated recall of the oracle", ("eval",), 0.95, at_least=True),
    "rows": Guard(
        lambda case: len(RowFile(case.folder / TRAIN)), "rows to train on", ("sft build",), 1, at_least=True, look=ROWS
    ),
    "masks": Guard(_count_wrong_masks, "rows and files whose mask is wrong", ("sft build",), 0, look=ROWS),
    "tokenizer": Guard(_count_foreign_tokenizers, "tokenizers other than the model's", TRAINED, 0),
    "admitted": Guard(_share_admitted, "share of tasks worth training on", ("rl check",), 0.02, at_least=True),
    "finite": Guard(_count_not_finite, "numbers in the training log that are not finite", TRAINED, 0),
    "origin": Guard(_count_foreign_origins, "checkpoints made from another model", TRAINED, 0),
    "progress": Guard(_gain, "gain in the held-out metric since the start", TRAINED, 0.0, at_least=True),
    "start": Guard(_start_k3, "mean k3 between sampler and trainer at the start", ("rl train",), 5e-3),
    "better": Guard(_least_lead, "least lead in reward, lower end of 95 %", ("compare",), at_least=True, look=COMPARED),
    "signal": Guard(_share_zero_variance, "share of groups whose rewards are all equal", ("rl train",), 0.9),
}
"""Every gate, by the name that recipes call it."""


def judge_stage(case: StageCase, chosen: Mapping[str, float | bool]) -> list[GateRuling]:
    """Return what the gates of a finished stage found, in order. `chosen`: the stage's own bounds; false leaves a gate
    out, true keeps its default."""
    found = []
    for name, gate in GATES.items():
        asked = chosen.get(name, True)
        bound = gate.bound if asked is True else float(asked)
        if asked is False or bound is None or (case.verb not in gate.verbs and name not in chosen):
            continue
        look = "harness1 " + gate.look.replace("{out}", str(case.folder))
        try:
            value = gate.measure(case)
        except UsageError as error:  # what the stage wrote cannot be read
            found.append(GateRuling(name, None, bound, False, f"{gate.says} ({error})", look))
            continue
        if value is not None:
            passed = value >= bound if gate.at_least else value <= bound
            shown = float(value) if math.isfinite(value) else None
            found.append(GateRuling(name, shown, bound, passed, gate.says, "" if passed else look))
    return found
