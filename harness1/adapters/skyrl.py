"""Training by SkyRL (0.4.0, Python 3.12) on our episodes: `python -m harness1.adapters.skyrl --config rl/paper`. SkyRL
owns the loop, the engines and the weights; `HarnessGenerator` plays the episodes (`skyrl/train/generators/base.py`)."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from statistics import fmean
from typing import Any, NamedTuple
from uuid import uuid4

import msgspec

from harness1.config import ChatPolicy, Config, load_config
from harness1.data.indexing import index_of
from harness1.episodes.jobs import EpisodeSetup
from harness1.episodes.rollout import rollout
from harness1.errors import ConfigError, HarnessError, InfrastructureFault, UsageError, optional
from harness1.models.backend import EngineOutput, Grammar, SampledOutput, check_output
from harness1.models.chat_format import ChatFormat
from harness1.models.open import format_at
from harness1.plain import digest
from harness1.policy.language_model import LanguageModelPolicy
from harness1.records import Episode, Sampling, Status
from harness1.reward import score
from harness1.rl.groups import PlacedTask, rewards_of
from harness1.rl.train import TrainingInputs, open_tasks
from harness1.rows.calls import calls_for_rows, calls_to_train
from harness1.training.trainer import BETAS, CLIP, DECAY

TASK = "task"  # the key of `env_extras` under which SkyRL hands the position of a task back


class SkyRLBackend:
    """A `Backend` over SkyRL's `RemoteInferenceClient`, which counts the weights that were loaded, for one trajectory,
    `session`; `model` is the name of an adapter, or None."""

    def __init__(self, client: Any, name: str, model: str | None = None, session: str = "") -> None:
        self._client, self._model, self._session = client, model, session
        self.hash = digest(["skyrl", name])

    @property
    def version(self) -> int:
        return int(self._client.weight_version)

    async def generate(self, ids: Sequence[int], sampling: Sampling, grammar: Grammar | None = None) -> SampledOutput:
        """Do as `Backend.generate`; the version at the end differs if weights were loaded meanwhile. Raise UsageError
        also for any sampling but at temperature 1 and 0: the engines do not give its log probabilities."""
        plain = sampling.temperature in (0.0, 1.0) and (sampling.top_p, sampling.top_k) == (1.0, 0)
        if grammar is not None or not plain:
            raise UsageError("SkyRL's engines sample here at temperature 1 or 0, without top_p, top_k and grammar")
        with optional("serve", "aiohttp"):
            from aiohttp import ClientError, ClientResponseError
        begun = self.version
        drawn = {"temperature": sampling.temperature, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "seed": sampling.seed}
        # Only the given stop tokens end an output.
        ends = {"max_tokens": sampling.max_tokens, "stop_token_ids": list(sampling.stop_ids), "ignore_eos": True}
        asked = {
            "prompt_token_ids": [list(ids)],
            "sampling_params": drawn | ends | {"logprobs": 1},
            "session_ids": [self._session],
            # Cached prefixes are of one version of the weights.
            "cache_salt": str(begun),
        }
        try:
            answer = await self._client.generate(asked, model=self._model)
        except ClientResponseError as error:
            if 400 <= error.status < 500:
                raise UsageError(f"SkyRL's engine refused a call: {error.message}") from error
            raise InfrastructureFault(f"SkyRL's engine failed: {error.status} {error.message}") from error
        except (ClientError, OSError, TimeoutError) as error:
            raise InfrastructureFault(f"SkyRL's engine failed: {error}") from error
        try:
            (ids,), (finish,) = answer["response_ids"], answer["stop_reasons"]
            (logprobs,) = answer["response_logprobs"] or [None]
        except (KeyError, TypeError, ValueError) as error:
            raise InfrastructureFault(f"SkyRL's engine gave no single output: {error}") from error
        # The engines do not say which token stopped an output; only the given ones can.
        stopped_by = ids[-1] if ids and ids[-1] in sampling.stop_ids else None
        output = check_output(EngineOutput(ids, logprobs, finish, stopped_by), sampling, begun)
        return msgspec.structs.replace(output, version_end=self.version)

    async def close(self) -> None:
        """End the trajectory."""
        await self._client.finish_session(self._session)


class TrajectoryId(NamedTuple):
    """The name of an episode (SkyRL's `TrajectoryID`). Episodes of one instance form a group."""

    instance_id: str
    repetition_id: int


COLUMNS = (
    *("prompt_token_ids", "response_ids", "rewards", "loss_masks", "stop_reasons", "rollout_logprobs"),
    *("trajectory_ids", "is_last_step"),
)
"""What SkyRL takes of each model call; the reward is on the last token of the last step."""


def trajectory_of(episode: Episode) -> TrajectoryId:
    """Return the name of an episode; its task is its group if it was not played in groups."""
    instance = episode.task.task_id if episode.group_id is None else episode.group_id
    return TrajectoryId(instance, episode.sample_idx)


def is_fit(episode: Episode, *, validates: bool) -> bool:
    """Return whether an episode can be compared, and trained on unless it is for validation."""
    calls = list(calls_to_train(episode))
    if episode.status is Status.INFRA_ERROR or episode.reward is None or not calls:
        return False
    # With these, recorded probabilities are the model's own.
    drawn = [(each.temperature, each.top_p, each.top_k, each.grammar) for each in (call.sampling for call in calls)]
    plain = all(each == (1.0, 1.0, 0, None) for each in drawn)
    recorded = episode.untrainable is None and all(call.output_logprobs for call in calls)
    return validates or (recorded and plain)


def generator_output(episodes: Sequence[Episode], *, validates: bool = False) -> dict[str, Any]:
    """Return the steps of episodes as SkyRL's `GeneratorOutput`, by column. An instance with an unfit episode stays,
    because mini-batches count prompts: each of its trajectories becomes a placeholder without a trained token. Raises
    ValueError: the trainer would refuse or misread the batch; SchemaError: a segment of a prompt is missing."""
    names = list(map(trajectory_of, episodes))
    groups = [(name, list(each)) for name, each in groupby(episodes, lambda each: trajectory_of(each).instance_id)]
    _demand(len(set(names)) == len(names), "two trajectories have the same name")
    _demand(len({name for name, _ in groups}) == len(groups), "the trajectories of an instance are not adjacent")
    steps: list[tuple[Any, ...]] = []
    sound: list[Episode] = []
    faulty = 0
    for name, group in groups:
        # The trainer would use the reward of a single trajectory as its advantage.
        _demand(validates or len(group) > 1, f"instance {name} has only one trajectory")
        if all(is_fit(each, validates=validates) for each in group):
            steps += [step for episode in group for step in _steps(episode)]
            sound += group
        else:
            steps += [([0], [0], [0.0], [0], "error", [0.0], trajectory_of(each), True) for each in group]
            faulty += 1
    metrics = {"harness1/episodes": float(len(sound)), "harness1/faulty_instances": float(faulty)}
    if sound:
        versions = [version for episode in sound for version in episode.policy_versions]
        metrics |= {
            "harness1/mean_reward": fmean(rewards_of(sound)),
            "harness1/mean_steps": len(steps) / len(sound),
            "harness1/min_version": float(min(versions)),
            "harness1/max_version": float(max(versions)),
        }
    columns = {name: list(column) for name, column in zip(COLUMNS, zip(*steps, strict=True), strict=True)}
    return {**columns, "rollout_metrics": metrics}


def _steps(episode: Episode) -> Iterator[tuple[Any, ...]]:
    calls = list(calls_for_rows(episode))
    name = trajectory_of(episode)
    earned = 0.0 if episode.reward is None else episode.reward.total
    for place, call in enumerate(calls, start=1):
        size, last, logprobs = len(call.output_ids), place == len(calls), list(call.output_logprobs or ())
        _demand(bool(logprobs), f"step {place} of {name} has no log probabilities")
        rewards = [0.0] * (size - 1) + [earned if last else 0.0]
        ids, drawn = list(call.prompt_ids), list(call.output_ids)
        yield ids, drawn, rewards, [1] * size, call.finish_reason, logprobs, name, last


def _demand(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ValueError(otherwise)


class HarnessGenerator:
    """Plays trajectories with `rollout` and scores them; SkyRL compares groups. `tasks` are indexed by
    `env_extras["task"]`, `setups` by `PlacedTask.setup`; `name` and `model` are `SkyRLBackend`'s."""

    def __init__(
        self,
        tasks: Sequence[PlacedTask],
        setups: Sequence[EpisodeSetup],
        chat: ChatFormat,
        client: Any,
        name: str,
        model: str | None = None,
    ) -> None:
        self._tasks, self._setups, self._chat = tasks, setups, chat
        self._client, self._name, self._model = client, name, model
        self._config = setups[0].config
        self._places = asyncio.Semaphore(self._config.machine.concurrency)

    async def generate(self, input_batch: Mapping[str, Any]) -> dict[str, Any]:
        """Play an episode for each entry of `trajectory_ids` and return SkyRL's `GeneratorOutput` with the seconds that
        each took; raise UsageError if the batch names no tasks, or samples as no trainer can correct for."""
        names, extras = input_batch.get("trajectory_ids"), input_batch.get("env_extras")
        if not names or not extras or not all(TASK in each for each in extras):
            raise UsageError("SkyRL gave no trajectory_ids, or env_extras without a task: use TaskDataset")
        asked, told = input_batch.get("sampling_params") or {}, input_batch.get("batch_metadata")
        validates = told is not None and told.training_phase == "eval"
        settings = self._sampling(asked, validates)
        step = 0 if told is None else told.global_step
        try:
            async with asyncio.TaskGroup() as group:
                played = [
                    group.create_task(self._play(name, self._tasks[each[TASK]], settings, step))
                    for name, each in zip(names, extras, strict=True)
                ]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        episodes = [each.result() for each in played]
        output = generator_output(episodes, validates=validates)
        theirs = {TrajectoryId(str(each.instance_id), int(each.repetition_id)): each for each in names}
        spent = {trajectory_of(each): each.stage_ms for each in episodes}
        return output | {
            "trajectory_ids": [theirs[each] for each in output["trajectory_ids"]],
            "trajectory_generation_times": [sum(spent[each].values()) / 1000 for each in output["trajectory_ids"]],
        }

    def _sampling(self, asked: Mapping[str, Any], validates: bool) -> ChatPolicy:
        settings = msgspec.structs.replace(self._config.policy, temperature=float(asked.get("temperature", 1.0)))
        changed = settings.temperature != 1.0 and not validates
        if changed or asked.get("top_p", 1.0) != 1.0 or asked.get("top_k", -1) not in (-1, 0):
            raise UsageError("SkyRL's generator.sampling_params must be temperature=1, top_p=1 and top_k=-1")
        return msgspec.structs.replace(settings, constrained=False)

    async def _play(self, name: Any, placed: PlacedTask, settings: ChatPolicy, step: int) -> Episode:
        instance, sample = str(name.instance_id), int(name.repetition_id)
        config, setup = self._config, self._setups[placed.setup]
        backend = SkyRLBackend(self._client, self._name, self._model, uuid4().hex)
        policy = LanguageModelPolicy(backend, self._chat, config.env.generation_reserve, settings, "skyrl")
        seed = int(digest([config.rl.seed, step, instance, sample])[:8], 16) >> 1
        async with self._places:
            env = setup.environment(setup.open_retriever(), policy)
            try:
                episode = await rollout(env, policy, placed.task, seed=seed, sample_idx=sample, group_id=instance)
            finally:
                await backend.close()
        return score(episode, placed.task.gold, config)


class TaskDataset:
    """Tasks as SkyRL's trainer draws them; a row names its task by its position behind `first`."""

    def __init__(self, tasks: Sequence[PlacedTask], first: int = 0) -> None:
        prompts = [[{"role": "user", "content": placed.task.query}] for placed in tasks]
        self._rows = [
            {"prompt": prompt, "env_class": None, "env_extras": {TASK: first + at}, "uid": str(at)}
            for at, prompt in enumerate(prompts)
        ]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, at: int) -> dict[str, Any]:
        return self._rows[at]

    def collate_fn(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the rows of a batch."""
        return rows


def settings(config: Config) -> list[str]:
    """Return SkyRL's settings for the same training as `rl train`, as `KEY=VALUE`; with `rl.staleness`, generation runs
    ahead there too, on GPUs of its own. Raise ConfigError if SkyRL has no such algorithm, or cannot run so."""
    rl, train, env = config.rl, config.train, config.env
    if rl.algorithm != "cispo" or rl.advantages != "center":
        raise ConfigError("SkyRL is set up here for rl.algorithm=cispo and rl.advantages=center")
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
        "trainer.policy.optimizer_config.adam_betas": f"[{BETAS[0]},{BETAS[1]}]",
        "trainer.policy.optimizer_config.weight_decay": DECAY,
        "trainer.policy.optimizer_config.max_grad_norm": CLIP,
        "trainer.algorithm.advantage_estimator": "grpo",
        "trainer.algorithm.grpo_norm_by_std": "false",
        "trainer.algorithm.policy_loss_type": "cispo",
        "trainer.algorithm.cispo.cispo_anchor": "rollout",
        # Its bounds are distances from 1.
        "trainer.algorithm.cispo.cispo_eps_clip_low": 1.0 - rl.ratio[0],
        "trainer.algorithm.cispo.cispo_eps_clip_high": rl.ratio[1] - 1.0,
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


def experiment(config: Config, inputs: TrainingInputs) -> type:
    """Return the experiment for SkyRL's entry points, with our tasks and generator; UsageError without SkyRL."""
    try:
        from skyrl.backends.skyrl_train.inference_servers.utils import resolve_policy_model_name
        from skyrl.train.entrypoints.main_base import BasePPOExp
    except ModuleNotFoundError as error:
        install = 'pip install "skyrl[fsdp]==0.4.0", with Python 3.12 or later'
        raise UsageError(f"SkyRL is not installed: {install} ({error})") from error
    base: Any = BasePPOExp

    class Experiment(base):  # type: ignore[misc]
        def __init__(self, cfg: Any) -> None:
            find_index = partial(index_of, cache=None, config=config)
            self._choice, self._setups = open_tasks(config, inputs, find_index)
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


def train(config: Config, inputs: TrainingInputs, overrides: Sequence[str]) -> None:
    """Train with SkyRL on a Ray cluster, which it starts; its own settings (`KEY=VALUE`) prevail over `settings`."""
    chosen = experiment(config, inputs)
    import ray
    from skyrl.train.config import SkyRLTrainConfig
    from skyrl.train.utils import validate_cfg
    from skyrl.train.utils.utils import initialize_ray

    cfg = SkyRLTrainConfig.from_cli_overrides([*settings(config), *overrides])
    validate_cfg(cfg)
    initialize_ray(cfg)
    # On a worker, because SkyRL's loop must not run on the head node.
    remote: Any = ray.remote(num_cpus=1)(lambda cfg: chosen(cfg).run())
    ray.get(remote.remote(cfg))


def main(arguments: Sequence[str]) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m harness1.adapters.skyrl", allow_abbrev=False)
    parser.add_argument("--config", metavar="FILE|NAME")
    parser.add_argument("--data", action="append", required=True, metavar="DATASET")
    lists = ("index", "admission", "against", "exclude")
    for name in lists:
        parser.add_argument(f"--{name}", action="append", default=[], help="as of harness1 rl train")
    parser.add_argument("--split", default="train")
    parser.add_argument("--share", default="", choices=("sft", "rl"))
    parser.add_argument("--set", action="append", metavar="A.B=VALUE", dest="overrides")
    parser.add_argument("skyrl", nargs="*", metavar="KEY=VALUE", help="SkyRL's own settings")
    given = parser.parse_args(arguments)
    listed: dict[str, Any] = {name: tuple(getattr(given, name)) for name in ("data", *lists)}
    inputs = TrainingInputs(split=given.split, share=given.share, **listed)
    try:
        train(load_config(given.config, given.overrides), inputs, given.skyrl)
    except HarnessError as error:
        parser.exit(2, f"{error}\n")


if __name__ == "__main__":
    # Workers load classes by the name of their module, which must not be `__main__`.
    importlib.import_module("harness1.adapters.skyrl").main(sys.argv[1:])
