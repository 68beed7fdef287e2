"""Measure the cost of a language model as a policy, and check its recorded log probabilities.

The script plays real episodes over a dataset in four settings: one at a time and several at once, with and without
keeping the keys and values of shared prompt prefixes. Tokens and seconds are those of the backend. The table `gate`
computes every recorded log probability again by one plain forward pass. The table `merging` plays the scripted policy,
written in the model's format, under each rendering order.

    python benchmarks/policy.py DATASET --index DIR --model PATH [--table speed gate merging] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if not __package__:
    # Run as a script: its neighbours are found beside it.
    sys.path.insert(0, str(Path(__file__).parent.parent))

from harness1.config import Config, load_config
from harness1.data.open import open_source
from harness1.env.environment import SearchEnv
from harness1.episodes.jobs import EpisodeJob, EpisodeSetup
from harness1.episodes.rollout import rollout
from harness1.episodes.staged import run_staged
from harness1.eval.summary import summarise
from harness1.models.causal_model import load_causal_model
from harness1.models.fetch import resolve_model
from harness1.models.formats import open_format
from harness1.models.tokenizer import open_tokenizer
from harness1.models.transformers_backend import TransformersBackend
from harness1.policy.language_model import LanguageModelPolicy
from harness1.policy.scripted import ScriptedPolicy
from harness1.policy.wrappers import StudentFormatPolicy
from harness1.records import Episode, Task
from harness1.retrieval.open import open_retriever
from harness1.rl.logprobs import compare_calls, grammar_masks
from harness1.rows.calls import captured_calls, sampled_calls
from harness1.rows.merging import prefix_merging
from harness1.tools.registry import Toolbox

SMALL = "small"
ORDERS = ("paper", "stable_first", "epoch")
SETTINGS = {
    "one at a time, nothing kept": (False, 0),
    "one at a time, prefixes kept": (False, 65536),
    "at once, nothing kept": (True, 0),
    "at once, prefixes kept": (True, 65536),
}
"""For each setting, True if episodes run at once, and the number of tokens whose keys and values are kept."""
TEMPERATURES = (0.5, 0.7, 1.0, 1.3)
Row = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure and print; return what `--json` prints."""
    options = _options(arguments)
    tasks = open_source(options.dataset).tasks(options.split)[: options.episodes]
    tables = {"speed": speed_table, "gate": gate_table, "merging": merging_table}
    report: dict[str, Any] = {"model": Path(options.model).name, "episodes": len(tasks), "turns": options.turns}
    for name in options.table:
        report[name] = tables[name](options, tasks)
    if options.json:
        print(json.dumps(report))
    else:
        _print(report)
    return report


def speed_table(options: argparse.Namespace, tasks: Sequence[Task]) -> list[Row]:
    """Return a row for each setting; `decode gain` is over the first row, `prefill` the share of prompt tokens run."""
    rows: list[Row] = []
    for setting, (at_once, kept) in SETTINGS.items():
        config = _config(
            options, f"machine.concurrency={len(tasks) if at_once else 1}", f"machine.model.cache_tokens={kept}"
        )
        began = time.perf_counter()
        episodes, backend = _episodes(options, config, tasks if at_once else tasks[: options.alone])
        stats = backend.stats()
        decoded = stats.decoded_tokens / stats.decode_seconds
        rows.append(
            {
                "setting": setting,
                "seconds": time.perf_counter() - began,
                "prompt_tokens": stats.prefilled_tokens + stats.reused_tokens,
                "prefilled_tokens": stats.prefilled_tokens,
                "prefill_share": stats.prefilled_tokens / (stats.prefilled_tokens + stats.reused_tokens),
                "prefill_tokens_per_s": stats.prefilled_tokens / stats.prefill_seconds,
                "decoded_tokens": stats.decoded_tokens,
                "decode_tokens_per_s": decoded,
                "decode_gain": decoded / rows[0]["decode_tokens_per_s"] if rows else 1.0,
                "statuses": dict(Counter(episode.status for episode in episodes)),
                **_scores(episodes, tasks, config),
            }
        )
        print(f"{setting}: {rows[-1]['seconds']:.0f} s", file=sys.stderr)
    return rows


def gate_table(options: argparse.Namespace, tasks: Sequence[Task]) -> list[Row]:
    """Replay each call by one forward pass, for concurrent episodes with kept prefixes at several temperatures."""
    folder = resolve_model(options.model)
    rows: list[Row] = []
    for temperature in TEMPERATURES:
        config = _config(options, f"machine.concurrency={len(tasks)}", f"policy.temperature={temperature}")
        episodes, _ = _episodes(options, config, tasks)
        model = load_causal_model(folder, "cpu", config.policy.dtype)
        grammar = open_format(config.policy.format, open_tokenizer(folder)).grammar(Toolbox.of(config.env).specs)
        masks = grammar_masks(folder, model.config.vocab_size, [grammar])
        calls = [call for episode in episodes for call in sampled_calls(episode)]
        gate = compare_calls(model, calls, masks)
        rows.append(
            {
                "temperature": temperature,
                "dtype": config.policy.dtype,
                "calls": len(calls),
                "tokens": gate.tokens,
                "max_difference": gate.max_difference,
                "share_of_bound": gate.worst_ratio,
                "mean_k3": gate.mean_k3,
                "passes": gate.passes(config.policy.dtype),
            }
        )
        print(f"temperature {temperature}: {gate.tokens} tokens compared", file=sys.stderr)
    return rows


def merging_table(options: argparse.Namespace, tasks: Sequence[Task]) -> list[Row]:
    """Count calls per training row under each order, for the scripted policy, written in the model's format."""
    chat = open_format("compact", open_tokenizer(resolve_model(options.model)))
    rows: list[Row] = []
    for order in ORDERS:
        config = load_config(None, [f"env.rendering.order={order}"])
        retriever = open_retriever(options.index, config)

        async def run(task: Task, config: Config = config, retriever: Any = retriever) -> Episode:
            env = SearchEnv(config.env, retriever, counter=chat, machine=config.machine)
            return await rollout(env, StudentFormatPolicy(ScriptedPolicy(), chat), task)

        merged = [prefix_merging(captured_calls(asyncio.run(run(task)))) for task in tasks]
        calls = sum(each.counts["trained"] for each in merged)
        made = sum(len(each.rows) for each in merged)
        tokens = sum(len(row.token_ids) for each in merged for row in each.rows)
        rows.append({"order": order, "calls": calls, "rows": made, "ratio": calls / made, "row_tokens": tokens})
    return rows


def _episodes(
    options: argparse.Namespace, config: Config, tasks: Sequence[Task]
) -> tuple[list[Episode], TransformersBackend]:
    setup = EpisodeSetup(config, options.index, f"hf:{options.model}")
    episodes: list[Episode] = []
    jobs = [EpisodeJob(task, seed=at) for at, task in enumerate(tasks)]
    policy = setup.policy_for(jobs)
    asyncio.run(run_staged(setup, jobs, episodes.append))
    assert isinstance(policy, LanguageModelPolicy)
    assert isinstance(policy.model, TransformersBackend)
    return episodes, policy.model


def _config(options: argparse.Namespace, *overrides: str) -> Config:
    chosen = [
        f"env.max_turns={options.turns}",
        f"env.rendering.order={options.order}",
        f"policy.temperature={options.temperature}",
        f"policy.dtype={options.dtype}",
        "policy.constrained=true",
        "machine.model.device=cpu",
        "machine.episode_deadline_s=36000",
    ]
    return load_config(SMALL, [*chosen, *overrides])


def _scores(episodes: Sequence[Episode], tasks: Sequence[Task], config: Config) -> dict[str, float]:
    summary = summarise(episodes, {task.task_id: task for task in tasks}, config)
    names = ("curated_recall", "turns", "failed_attempts", "merge_ratio")
    return {name: summary[name]["mean"] for name in names if name in summary}


def _print(report: dict[str, Any]) -> None:
    print(f"{report['model']}: {report['episodes']} episodes of at most {report['turns']} turns")
    for row in report.get("speed", []):
        print(
            f"{row['setting']:<30} {row['seconds']:7.1f} s  prefill {row['prefilled_tokens']:>7} of"
            f" {row['prompt_tokens']:>7} ({row['prefill_share']:.2f}) at {row['prefill_tokens_per_s']:6.0f}/s  decode"
            f" {row['decoded_tokens']:>6} at {row['decode_tokens_per_s']:6.1f}/s ({row['decode_gain']:.2f}x)"
            f"  merged {row['merge_ratio']:.2f}  {row['statuses']}"
        )
    for row in report.get("gate", []):
        print(
            f"T={row['temperature']:<4} {row['dtype']} {row['calls']:>4} calls {row['tokens']:>6} tokens: max"
            f" {row['max_difference']:.2g} ({row['share_of_bound']:.2f} of the bound), mean k3 {row['mean_k3']:.2g},"
            f" {'passes' if row['passes'] else 'FAILS'}"
        )
    for row in report.get("merging", []):
        print(f"{row['order']:<13} {row['calls']:>5} calls {row['rows']:>5} rows: {row['ratio']:.2f} calls a row")


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset")
    parser.add_argument("--index", required=True)
    parser.add_argument(
        "--model", default="smollm2-135m", help="a folder, or a model that `harness1 models get` fetched"
    )
    parser.add_argument("--split", default="test")
    parser.add_argument("--episodes", type=int, default=8)
    parser.add_argument("--alone", type=int, default=3, help="how many of them run in the settings one at a time")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--order", choices=ORDERS, default="epoch")
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--table", nargs="+", choices=("speed", "gate", "merging"), default=["speed"])
    parser.add_argument("--json", action="store_true")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
