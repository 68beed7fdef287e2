"""Gates between the stages of a recipe: what a stage made is measured, and a bound decides whether the next one starts.

Every gate gives one number. A gate that counts faults has the bound 0; NaN passes no gate.
"""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import to_builtins

from harness1.data.beir import QRELS
from harness1.data.open import open_source
from harness1.data.source import status_of
from harness1.errors import MALFORMED, SchemaError, UsageError
from harness1.eval.compare import compare
from harness1.eval.run import read_run
from harness1.model_folder import MODEL_FILES, folder_hash
from harness1.models.checkpoint import read_checkpoint
from harness1.models.fetch import resolve_model
from harness1.models.spec import ModelSpec, is_model
from harness1.models.tokenizer import TOKENIZER
from harness1.plain import at_home, digest, file_digest, paths_in, utf8_safe
from harness1.policy.registry import SILENT
from harness1.records import Record
from harness1.retrieval.files import check_index
from harness1.retrieval.index import open_index
from harness1.reward import total_of
from harness1.rl.admission import read_report
from harness1.rows import RowFile
from harness1.runs.files import STAGE, Stage, read_json, read_raw_stage, read_stage, writing
from harness1.runs.folder import METRICS, run_config
from harness1.runs.journal import read_episodes
from harness1.sft.data_card import HELD_OUT, TRAIN, read_card
from harness1.training.log import VALIDATION_PREFIX, read_log

CONTENT: Mapping[str, Sequence[str]] = {
    **dict.fromkeys(
        ("data copy", "data get", "data import", "tasks make"),
        ("corpus.jsonl*", "queries.jsonl*", f"{QRELS}/*", "tasks.jsonl"),
    ),
    "run": ("tasks.csv", "curated*.trec", "pool*.trec"),
    "eval --ablations": ("*/tasks.csv", "*/curated*.trec"),
    "rl check": ("report.json", "policies/*/tasks.csv", "policies/*/curated*.trec"),
    "sft build": ("train.jsonl", "held_out.jsonl", "card.json"),
    **dict.fromkeys(
        ("models convert", "models new", "models-get", "sft train", "rl train"),
        tuple(f"*{ending}" for ending in (*MODEL_FILES, ".jinja", ".gguf")),
    ),
}
"""The files that are the content of a stage's folder, by the verb on its card. Times and pages are not."""


def artifact(place: Path) -> str:
    """Return the hash of what a stage made, a file or the content of a folder, which is equal in every work folder;
    empty if there is none. Of a folder whose card says nothing in `CONTENT`, every file counts, but no card. Raises
    UsageError: it cannot be read."""
    with writing(place):
        if not place.is_dir():
            return file_digest(place)
        card = read_raw_stage(place)
        if card is not None and card.verb == "index":
            return open_index(place).info.index_hash
        patterns = CONTENT.get(card.verb, ()) if card is not None else ()
        files = {file for pattern in patterns for file in place.glob(pattern) if file.is_file() and file.name != STAGE}
        sums = {str(file.relative_to(place)): _wherever(file, place.parent) for file in files}
        sums = sums or {name: sum_ for name, sum_ in _sums_below(place).items() if Path(name).name != STAGE}
        return digest(sums) if sums else ""


def hash_input(named: str, *, follow_links: bool = False) -> str:
    """Return the hash of every file that an input names, as `PATH`, `KIND:PATH`, `PATH:NAME` or `KIND:PATH@URL`, where
    `KIND` may be several, as in `silent:hf`; what is not on this machine counts by its name. `follow_links`: also of
    the files behind links to folders elsewhere. Raises UsageError: a file cannot be read."""
    item = filter(None, [named.rpartition(":")[0]])  # of PATH:NAME
    places = () if named.startswith("world:") else (*paths_in(named), *map(at_home, item))
    place = next(filter(os.path.exists, places), None)
    if place is None:
        return named
    with writing(place):
        return digest(_sums_below(place, follow_links)) if place.is_dir() else file_digest(place)


def _sums_below(place: Path, follow_links: bool = False) -> dict[str, str]:
    """Return the hash of every file below a folder, by its relative path; of a link to a folder that is not entered,
    where it leads. Those that stay within are entered once, those that leave only if asked, but for a dataset's gold.
    """
    root, sums, folders, entered = os.path.realpath(place), dict[str, str](), [""], {_identity(place.stat())}
    links = set[str]()
    while folders or links:  # real folders first, so that it is the same in whatever order they were made
        if not folders:
            links.remove(name := min(links))
            end = os.path.realpath(path := place / name)
            is_within = Path(end).is_relative_to(root)
            identity = _identity(path.stat())
            if identity in entered or not (follow_links or path.name == QRELS or is_within):
                sums[_show_name(name)] = utf8_safe(os.path.relpath(end, root) if is_within else end)
                continue
            entered.add(identity)
            folders.append(name)
        folder = folders.pop()
        for entry in os.scandir(place / folder):
            path, name = place / folder / entry.name, f"{folder}/{entry.name}".removeprefix("/")
            if not path.is_dir():
                sums[_show_name(name)] = file_digest(path) if status_of(path) else ""
                continue
            if entry.is_symlink():
                links.add(name)
                continue
            entered.add(_identity(entry.stat()))
            folders.append(name)
    return sums


def _show_name(name: str) -> str:
    return name if utf8_safe(name) == name else f"{name!r}/"  # as no file is called


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _wherever(file: Path, work: Path) -> str:
    """Return the hash of a file; that of JSON does not depend on where the work folder is, which some cards name."""
    if file.suffix != ".json":
        return file_digest(file)
    return digest(file.read_bytes().replace(os.fsencode(work.resolve()), b"{work}"))


Parse = Callable[[Sequence[str]], tuple[str, Mapping[str, Any]]]
"""Returns a command's verb and the values of its options by their names; UsageError if there is none such."""


@dataclass(frozen=True)
class StageCase:
    """A stage whose command has ended: its verb and the values of `Parse`, and its folder."""

    verb: str
    given: Mapping[str, Any]
    folder: Path

    def option(self, name: str) -> str:
        """Return the value of an option or argument as text, or the empty string."""
        value = self.given.get(name)
        return "" if value is None else str(value)


EPISODES = "episodes"  # the folder of a training's own episodes, in its folder
LOSS_LIKE = ("nll",)  # metrics of which less is better
EXACT = 1e-9  # what the sum of a reward's terms may differ from its total, which is of the same numbers
Said = TypeVar("Said", float, str)


def _read_card_value(folder: Path, kind: type[Said], *names: str) -> Said | None:
    """Return what a card says by a path of names; None if nothing. Raises SchemaError: it is not of that kind."""
    found: Any = to_builtins(_card(folder))
    for name in names:
        found = found.get(name) if isinstance(found, dict) else found
    try:
        said: Said | None = msgspec.convert(found, kind | None)
    except MALFORMED as error:
        raise SchemaError(f"{folder / STAGE} does not say {names[-1]}: {error}") from error
    return said


def _count_documents(case: StageCase) -> float:
    return _read_card_value(case.folder, float, "outputs", "documents") or 0.0


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
    paths = ("missing",), ("failures", "infra_error")
    return sum(_read_card_value(case.folder, float, "gates", *path) or 0.0 for path in paths)


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
    return _recall(case) if policy.removeprefix(SILENT) == "oracle" else None


def _count_wrong_masks(case: StageCase) -> float:
    """Count rows that train nothing or all, and files that are not as the card says."""
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
        found.add(read_card(Path(case.option("dataset"))).tokenizer_hash)
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
    metric = _read_card_value(case.folder, str, "inputs", "train", "watch", "metric")
    if card is None or metric is None or metric not in card.metrics or not looks or looks[0]["step"] != 0:
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
    """Return the least lower end of the 95 % interval of the first run's lead in reward over the others."""
    compared = compare([read_run(Path(run)) for run in case.given.get("runs", ())], "reward", top=0)
    return -max(pair.metrics["reward"].difference.high for pair in compared.others)


def metrics_of(folder: Path) -> dict[str, float]:
    """Return the metrics of a run, or those of a checkpoint; those that are no numbers are left out."""
    if (folder / METRICS).is_file():
        found = {name: each.get("mean") for name, each in read_json(folder / METRICS).items() if isinstance(each, dict)}
        return {name: float(mean) for name, mean in found.items() if isinstance(mean, int | float)}
    card = read_checkpoint(folder)
    return dict(card.metrics) if card else {}


def _recall(case: StageCase) -> float:
    return metrics_of(case.folder).get("curated_recall", math.nan)  # where every episode is broken


def model_of(case: StageCase) -> ModelSpec | None:
    """Return the model that a command names; None if it names none."""
    named = case.option("--model")
    return (ModelSpec.read(named) if is_model(named) else ModelSpec("hf", named, None)) if named else None


def _model(case: StageCase) -> Path | None:
    """Return the folder of the model that training began with; None if only a server has it."""
    spec = model_of(case)
    return None if spec is None or (spec.url and not Path(spec.model).is_dir()) else resolve_model(spec.model)


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
    """Return what the gates of a stage found. `chosen`: its bounds; false leaves one out, true keeps its default."""
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
