"""The held-out watch of supervised fine-tuning: loss on held-out rows, turns beside the teacher's, and episodes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from statistics import fmean

from harness1.config import ChatPolicy, Config
from harness1.policy.language_model import LanguageModelPolicy
from harness1.policy.transformers_backend import TransformersBackend, open_transformers
from harness1.rl.row_file import RowFile
from harness1.rl.rows import TrainRow
from harness1.sft.student import Student
from harness1.tools.registry import Toolbox
from harness1.train.lora import merged_state
from harness1.train.trainer import Trainer
from harness1.train.watch import episode_metrics, held_out_turns, turn_metrics


class HeldOutWatch:
    """Looks at a student between steps. It samples by a model of its own, to which the trained weights are copied: the
    one that a user will sample by.

    Args:
        rows: the held-out rows; those that are looked at are spread evenly over them.
        device: where to sample.

    Raises:
        UsageError: what is to be watched is not there, or the model cannot be sampled from here.
    """

    def __init__(self, student: Student, rows: RowFile, config: Config, device: str, leads: bool = True) -> None:
        watch = config.train.watch
        self._student, self._config, self._leads = student, config, leads
        self._rows = spread(rows, watch.rows)
        self._turns = held_out_turns(spread(rows, watch.turns), watch.turns)
        self._tasks = student.held_out_tasks(watch.tasks) if watch.tasks else []
        self._backend: TransformersBackend | None = None
        if leads and (self._turns or self._tasks):
            model = config.run.model
            self._backend = open_transformers(
                student.folder,
                device=device,
                dtype=config.policy.dtype,
                threads=model.threads,
                rows=model.rows,
                cache_tokens=model.cache_tokens,
            )

    def look(self, trainer: Trainer) -> dict[str, float]:
        """The metrics of the present weights; of processes that train together, all take part and the first knows all.

        Raises:
            InfrastructureFault: the model failed to sample.
        """
        found = {"nll": trainer.loss(self._rows)} if self._rows else {}
        if self._backend is not None:
            found |= asyncio.run(self._sampled(self._backend, trainer))
        return found

    async def _sampled(self, backend: TransformersBackend, trainer: Trainer) -> dict[str, float]:
        env, chat = self._student.env, self._student.chat
        await backend.load_state(merged_state(trainer.model), trainer.step_count)
        found = await turn_metrics(backend, chat, Toolbox.of(env), self._turns, env.generation_reserve)
        greedy = ChatPolicy(temperature=0.0, format_retries=0)
        policy = LanguageModelPolicy(backend, chat, env.generation_reserve, greedy)
        by_run: dict[str, list[dict[str, float]]] = {}
        for run in {run.name: run for run, _ in self._tasks}.values():
            tasks = [task for owner, task in self._tasks if owner.name == run.name]
            metrics = await episode_metrics(
                policy,
                lambda run=run: self._student.environment(run, self._config),  # type: ignore[misc]
                tasks,
                self._config.run.concurrency,
            )
            by_run[run.name] = [metrics] * len(tasks) if metrics else []
        episodes = [metrics for group in by_run.values() for metrics in group]
        return found | ({name: fmean(each[name] for each in episodes) for name in episodes[0]} if episodes else {})


def spread(rows: Sequence[TrainRow], limit: int) -> list[TrainRow]:
    """At most so many rows, evenly over all."""
    count = min(limit, len(rows))
    return [rows[at * len(rows) // count] for at in range(count)]
