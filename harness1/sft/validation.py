"""Validation during fine-tuning: loss on held-out rows, turns compared with the teacher's, and episodes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from harness1.config import ChatPolicy, Config
from harness1.engines.engine import Deliver, Engine
from harness1.env.environment import SearchEnv
from harness1.errors import UsageError
from harness1.models.backend import Backend
from harness1.models.transformers_backend import TransformersBackend, open_transformers
from harness1.policy.language_model import LanguageModelPolicy
from harness1.records import Task
from harness1.rows.file import RowFile
from harness1.sft.student import Student
from harness1.tools.registry import Toolbox
from harness1.training.validation import episode_results, evenly_spaced, held_out_turns, means, turn_metrics

if TYPE_CHECKING:
    from harness1.models.adapters import Weights


class HeldOutValidation:
    """Validates a student between steps, on an evenly spaced part of the held-out rows. It samples from a separate
    model that gets copies of the trained weights, as users will sample from them.

    Args:
        sampler: samples the weights that a service trains, in place of a model here.

    Raises:
        UsageError: a dataset or an index is missing, or the model cannot be sampled from.
    """

    def __init__(
        self, student: Student, rows: RowFile, config: Config, device: str, sampler: Backend | None = None
    ) -> None:
        watch = config.train.watch
        self._student, self._config = student, config
        self._rows = evenly_spaced(rows, watch.rows)
        self._turns = held_out_turns(evenly_spaced(rows, watch.turns), watch.turns)
        self._tasks: dict[str, list[Task]] = {}
        self._environments: dict[str, Callable[[], SearchEnv]] = {}
        for run, task in student.held_out_tasks(watch.tasks) if watch.tasks else []:
            self._tasks.setdefault(run.name, []).append(task)
            if run.name not in self._environments:
                self._environments[run.name] = student.environments(run, config)
        self._backend: Backend | None = sampler if self._turns or self._tasks else None
        if sampler is None and (self._turns or self._tasks):
            model = config.machine.model
            self._backend = open_transformers(
                student.folder,
                device=device,
                dtype=config.policy.dtype,
                threads=model.threads,
                rows=model.rows,
                cache_tokens=model.cache_tokens,
                prefill_tokens=model.prefill_tokens,
            )

    def validate(self, engine: Engine) -> dict[str, float]:
        """Return the metrics of the present weights, with the number of held-out episodes that the infrastructure broke
        as `faults`, if there are any; raise InfrastructureFault if the model failed to sample."""
        metrics = self.loss(engine)
        if self._backend is not None:
            metrics |= asyncio.run(self._sampled(self._backend, engine))
        return metrics

    def loss(self, engine: Engine, saved: Path | None = None) -> dict[str, float]:
        """Return the `nll` of the held-out rows, if there are any.

        Args:
            saved: as in `Engine.loss`.
        """
        return {"nll": engine.loss(self._rows, saved)} if self._rows else {}

    async def _sampled(self, backend: Backend, engine: Engine) -> dict[str, float]:
        env, chat = self._student.env, self._student.chat
        await engine.publish(engine.step_count, _delivering(backend))
        metrics = await turn_metrics(backend, chat, Toolbox.of(env), self._turns, env.generation_reserve)
        greedy = ChatPolicy(temperature=0.0, format_retries=0)
        policy = LanguageModelPolicy(backend, chat, env.generation_reserve, greedy)
        episodes: list[dict[str, float]] = []
        for name, tasks in self._tasks.items():
            episodes += await episode_results(policy, self._environments[name], tasks, self._config.machine.concurrency)
        broken = sum(map(len, self._tasks.values())) - len(episodes)
        return metrics | means(episodes) | ({"faults": float(broken)} if broken else {})


def _delivering(backend: Backend) -> Deliver:
    """Return how a backend takes weights; that of a service gets them from its engine."""
    return backend.load_state if isinstance(backend, TransformersBackend) else _kept_away


async def _kept_away(state: Weights, version: int) -> None:
    raise UsageError("the weights of this engine are not sampled by a training service")
