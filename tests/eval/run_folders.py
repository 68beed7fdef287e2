"""Run folders made by hand, over a small dataset on disk: what their episodes deliver is written in the test."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from harness1.config import Config, load_config
from harness1.data.open import open_source
from harness1.eval.evaluate import Evaluation, write_metrics
from harness1.records import STATUS_OF, Curated, Episode, Hashes, Observation, StopReason, Task, ToolCall, Turn, UnitId
from harness1.runs.files import under_way
from harness1.runs.folder import run_stage
from harness1.runs.journal import EpisodeStore

CONFIG = load_config()
GOLD = "ab"
"""The documents that are relevant for every task, each named by a letter."""


def dataset(folder: Path, queries: Mapping[str, str], split: str = "test", gold: str = GOLD) -> Path:
    """A BEIR folder with documents a to z, and these tasks."""
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    corpus = [{"_id": name, "title": name, "text": f"Text {name}."} for name in letters]
    return write_beir(folder, corpus, queries, dict.fromkeys(gold, 1), split)


def write_beir(
    folder: Path, corpus: Sequence[Mapping[str, str]], queries: Mapping[str, str], gold: Mapping[str, int], split: str
) -> Path:
    """A BEIR folder in which every task has the same gold."""
    (folder / "qrels").mkdir(parents=True, exist_ok=True)
    asked = [{"_id": name, "text": text} for name, text in queries.items()]
    for name, rows in (("corpus", corpus), ("queries", asked)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    judged = [f"{task}\t{doc}\t{grade}\n" for task in queries for doc, grade in gold.items()]
    (folder / "qrels" / f"{split}.tsv").write_text("query-id\tcorpus-id\tscore\n" + "".join(judged))
    return folder


def episode(
    task: str,
    delivered: Sequence[str] = "",
    pool: Sequence[str] | None = None,
    stop: StopReason = StopReason.END_SEARCH,
    *,
    sample: int = 0,
    turns: int | Sequence[Turn] = 0,
    **more: Any,
) -> Episode:
    """An episode that delivers documents in their order, after `turns`, or so many searches of 100 tokens."""
    search, seen = ToolCall("search_corpus", {"query": "q"}), Observation("search_corpus")
    if isinstance(turns, int):
        tokens = {"prompt_tokens": 100, "prefill_tokens": 40}
        turns = [Turn(index, action=search, observation=seen, **tokens) for index in range(turns)]
    return Episode(
        episode_id=f"{task}-{sample}",
        task=Task(task, "?"),
        sample_idx=sample,
        turns=tuple(turns),
        stop_reason=stop,
        status=STATUS_OF[stop],
        curated=tuple(Curated(UnitId(unit), "fair", rank) for rank, unit in enumerate(delivered, 1)),
        pool=tuple(UnitId(unit) for unit in (delivered if pool is None else pool)),
        hashes=Hashes("env", "policy", "index"),
        **more,
    )


def run_folder(
    folder: Path,
    data: Path,
    episodes: Iterable[Episode],
    *,
    config: Config = CONFIG,
    policy: str = "by-hand",
    split: str = "test",
    tasks: Iterable[str] | None = None,
    samples: int = 1,
    **inputs: Any,
) -> Path:
    """A finished run folder with all that is made of its episodes; `inputs` are of its card, in place of the usual."""
    known = {task.task_id: task for task in open_source(str(data)).tasks(split)}
    chosen = [known[name] for name in (known if tasks is None else tasks)]
    card = {"dataset": str(data), "split": split, "tasks": [task.task_id for task in chosen], "samples": samples}
    hashes = {name: str(inputs.pop(name, name)) for name in ("env", "policy", "index")}
    card |= {"seed": 0, "reward": config.reward_hash, **hashes, **inputs}
    stage = run_stage(config, policy, card, "an-index", hashes)
    stage = msgspec.structs.replace(stage, outputs={**stage.outputs, "source": str(data)})
    evaluation = Evaluation(str(data), split, chosen, "an-index", policy, config, samples)
    with EpisodeStore(folder) as store, under_way(stage, folder):
        for each in episodes:
            task = known[each.task.task_id].public()
            store.append(msgspec.structs.replace(each, task=task, hashes=Hashes(**hashes)))
    write_metrics(evaluation, stage, folder)
    return folder
