"""Training by SkyRL on our episodes: `python -m harness1.adapters.skyrl.training --config rl/paper KEY=VALUE...`

SkyRL (0.4.0, Python 3.12) owns the loop, the engines and the weights; what is asked of it lies in `settings`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

from harness1.adapters.skyrl.generator import TASK, HarnessGenerator
from harness1.config import Config, load_config
from harness1.data.indexing import index_of
from harness1.errors import ConfigError, HarnessError, UsageError
from harness1.models.open import format_at
from harness1.rl.open import open_tasks
from harness1.rl.task_stream import PlacedTask

INSTALL = 'SkyRL is not installed: pip install "skyrl[fsdp]==0.4.0", with Python 3.12 or later'


class TaskDataset:
    """Tasks as SkyRL's trainer draws them; a row names its task by its position behind `first`."""

    def __init__(self, tasks: Sequence[PlacedTask], first: int = 0) -> None:
        self._rows = [
            {
                "prompt": [{"role": "user", "content": placed.task.query}],
                "env_class": None,
                "env_extras": {TASK: first + at},
                "uid": str(at),
            }
            for at, placed in enumerate(tasks)
        ]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, at: int) -> dict[str, Any]:
        return self._rows[at]

    def collate_fn(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the rows of a batch."""
        return rows


def settings(config: Config) -> list[str]:
    """Return SkyRL's settings for the same training as `rl train` with this configuration, as `KEY=VALUE`. With
    `rl.staleness`, generation runs ahead of training there too, on GPUs of its own.

    Raises:
        ConfigError: SkyRL has no such algorithm, or cannot run ahead of several steps per batch.
    """
    rl, train, env = config.rl, config.train, config.env
    if rl.algorithm != "cispo" or rl.advantages != "center" or rl.normaliser != "token_mean":
        raise ConfigError(
            "SkyRL is set up here for rl.algorithm=cispo, rl.advantages=center and rl.normaliser=token_mean"
        )
    if rl.staleness and rl.substeps > 1:
        raise ConfigError("SkyRL runs ahead by whole optimizer steps: set rl.substeps=1 or rl.staleness=0")
    prompt = env.context_window - env.generation_reserve
    found = {
        "generator.step_wise_trajectories": "true",
        "generator.merge_stepwise_output": str(rl.rows == "epoch").lower(),
        "generator.batched": "false",
        "generator.n_samples_per_prompt": rl.samples,
        "generator.max_input_length": prompt,
        "generator.sampling_params.max_generate_length": env.generation_reserve,
        "generator.sampling_params.temperature": 1.0,
        "generator.sampling_params.logprobs": 1,
        "generator.inference_engine.engine_init_kwargs.max_model_len": env.context_window,
        "trainer.max_prompt_length": prompt,
        "trainer.train_batch_size": rl.groups,
        "trainer.policy_mini_batch_size": rl.groups // rl.substeps,
        "trainer.policy.optimizer_config.lr": train.rate,
        "trainer.policy.optimizer_config.adam_betas": f"[{train.beta1},{train.beta2}]",
        "trainer.policy.optimizer_config.weight_decay": train.weight_decay,
        "trainer.policy.optimizer_config.max_grad_norm": train.clip,
        "trainer.algorithm.advantage_estimator": "grpo",
        "trainer.algorithm.grpo_norm_by_std": "false",
        "trainer.algorithm.policy_loss_type": "cispo",
        "trainer.algorithm.cispo.cispo_anchor": "rollout",
        # Its bounds are distances from 1.
        "trainer.algorithm.cispo.cispo_eps_clip_low": 1.0 - rl.ratio_min,
        "trainer.algorithm.cispo.cispo_eps_clip_high": rl.ratio_max - 1.0,
        "trainer.algorithm.off_policy_correction.tis_ratio_type": "null",
        "trainer.algorithm.loss_reduction": "token_mean",
        "trainer.algorithm.use_kl_loss": "false",
    }
    if rl.staleness:
        found |= {
            "trainer.fully_async.enabled": "true",
            "trainer.fully_async.max_staleness_steps": rl.staleness,
            # As many groups at once as its bound admits: a turn waits for engines and not for a place.
            "trainer.fully_async.num_parallel_generation_workers": rl.groups * (rl.staleness + 1),
            "trainer.placement.colocate_all": "false",
        }
    return [f"{name}={value}" for name, value in found.items()]


def experiment(config: Config) -> type:
    """Return the experiment for SkyRL's entry points: a subclass of its `BasePPOExp`. Its trainer is the fully
    asynchronous one where `trainer.fully_async.enabled` is set.

    Raises:
        UsageError: SkyRL is not installed.
    """
    try:
        from skyrl.backends.skyrl_train.inference_servers.utils import resolve_policy_model_name
        from skyrl.train.entrypoints.main_base import BasePPOExp
    except ModuleNotFoundError as error:
        raise UsageError(f"{INSTALL} ({error})") from error
    base: Any = BasePPOExp

    class Experiment(base):  # type: ignore[misc]
        """SkyRL's experiment with our tasks and generator."""

        def __init__(self, cfg: Any) -> None:
            if not config.machine.learn.data:
                raise UsageError("no dataset: --set 'machine.learn.data=[\"DATASET\"]'")
            find_index = partial(index_of, cache=None, config=config)
            self._choice, self._setups = open_tasks(config, config.machine.learn, find_index)
            super().__init__(cfg)

        def get_train_dataset(self) -> TaskDataset:
            return TaskDataset(self._choice.tasks)

        def get_eval_dataset(self) -> TaskDataset | None:
            held_out = self._choice.held_out
            wanted = self.cfg.trainer.eval_interval > 0 and held_out
            return TaskDataset(held_out, first=len(self._choice.tasks)) if wanted else None

        def get_generator(self, cfg: Any, tokenizer: Any, inference_engine_client: Any) -> HarnessGenerator:
            path = cfg.trainer.policy.model.path
            tasks = [*self._choice.tasks, *self._choice.held_out]
            names = path, resolve_policy_model_name(cfg)
            return HarnessGenerator(tasks, self._setups, format_at(path, config), inference_engine_client, *names)

        def get_trainer(self, cfg: Any, **parts: Any) -> Any:
            if not cfg.trainer.fully_async.enabled:
                return super().get_trainer(cfg=cfg, **parts)
            from skyrl.train.fully_async_trainer import FullyAsyncRayPPOTrainer

            return FullyAsyncRayPPOTrainer(cfg=cfg, **parts)

    return Experiment


def train(config: Config, overrides: Sequence[str]) -> None:
    """Train with SkyRL on a Ray cluster, which it starts.

    Args:
        overrides: SkyRL's own settings as `KEY=VALUE`, which prevail over `settings`.
    """
    chosen = experiment(config)
    import ray
    from skyrl.train.config import SkyRLTrainConfig
    from skyrl.train.utils import validate_cfg
    from skyrl.train.utils.utils import initialize_ray

    cfg = SkyRLTrainConfig.from_cli_overrides([*settings(config), *overrides])
    validate_cfg(cfg)
    initialize_ray(cfg)
    # On a worker, because SkyRL's loop must not run on the head node.
    remote: Any = ray.remote(num_cpus=1)(partial(_run, chosen))
    ray.get(remote.remote(cfg))


def _run(chosen: Any, cfg: Any) -> None:
    chosen(cfg).run()


def main(arguments: Sequence[str]) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m harness1.adapters.skyrl.training", allow_abbrev=False)
    parser.add_argument("--config", metavar="FILE|NAME")
    parser.add_argument("--set", action="append", metavar="A.B=VALUE", dest="overrides")
    parser.add_argument("skyrl", nargs="*", metavar="KEY=VALUE", help="SkyRL's own settings")
    given = parser.parse_args(arguments)
    try:
        train(load_config(given.config, given.overrides), given.skyrl)
    except HarnessError as error:
        parser.exit(2, f"{error}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
