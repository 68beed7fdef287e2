"""SkyRL's trainer asks for trajectories and gets real episodes, as its own checks demand them.

The contract of SkyRL 0.4.0 (`skyrl/train/generators/base.py`, `validate_generator_output`, `RemoteInferenceClient`) is
restated here. Where SkyRL itself is installed, its own check reads the same outputs.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from aiohttp import ClientConnectionError, ClientResponseError
from msgspec.structs import replace

from harness1.adapters.skyrl import (
    HarnessGenerator,
    SkyRLBackend,
    TaskDataset,
    TrajectoryId,
    experiment,
    generator_output,
    is_fit,
    settings,
)
from harness1.config import Config, load_config
from harness1.data.indexing import index_of
from harness1.errors import ConfigError, InfrastructureFault, UsageError
from harness1.models.backend import Grammar
from harness1.models.chat_format import ChatFormat
from harness1.records import Episode, Sampling, Status, ToolCall
from harness1.rl.train import TaskChoice, TrainingInputs, open_tasks
from harness1.rows.calls import calls_of, calls_to_train, prompt_ids
from tests.rl.test_training_rows import made_episode, siblings
from tests.support import call, run, search
from tests.vocabularies import chat_format

WORLD = "world:60"
STOP = 5
PLAIN = Sampling(max_tokens=8, stop_ids=(STOP,), seed=3)


class TrajectoryID(NamedTuple):
    """As SkyRL's own, which is no record of ours."""

    instance_id: str
    repetition_id: int

    def to_string(self) -> str:
        return f"{self.instance_id}_{self.repetition_id}"


class Engines:
    """SkyRL's client: it searches in the first turn of a trajectory, or not, by its number, and ends in the next."""

    def __init__(self, chat: ChatFormat, broken: Sequence[int] = ()) -> None:
        self.chat, self.weight_version, self.broken = chat, 3, set(broken)
        self.asked: list[dict[str, Any]] = []
        self.models: list[str | None] = []
        self.sessions: list[str] = []
        self.finished: list[str] = []

    async def generate(self, input_batch: dict[str, Any], model: str | None = None) -> dict[str, Any]:
        self.asked.append(input_batch)
        self.models.append(model)
        (session,), (prompt,) = input_batch["session_ids"], input_batch["prompt_token_ids"]
        assert all(isinstance(token, int) for token in prompt)
        first = session not in self.sessions
        if first:
            self.sessions.append(session)
        number = self.sessions.index(session)
        if number in self.broken:
            raise ClientConnectionError("gone")
        action: ToolCall = search("founder of the company") if first and number % 2 else call("end_search")
        ids = list(self.chat.format_action("Because.", action))
        logprobs = [-(at + 1) / 9 for at in range(len(ids))]
        return {"responses": [""], "response_ids": [ids], "stop_reasons": ["stop"], "response_logprobs": [logprobs]}

    async def finish_session(self, session_id: str) -> None:
        self.finished.append(session_id)


class Place(NamedTuple):
    config: Config
    choice: TaskChoice
    setups: list[Any]
    chat: ChatFormat

    def generator(self, engines: Engines, model: str | None = None) -> HarnessGenerator:
        tasks = [*self.choice.tasks, *self.choice.held_out]
        return HarnessGenerator(tasks, self.setups, self.chat, engines, "model", model)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    config = load_config("rl/small", ["rl.samples=2", "env.context_window=8192"])
    find_index = partial(index_of, cache=tmp_path_factory.mktemp("cache"), config=config)
    return Place(config, *open_tasks(config, TrainingInputs((WORLD,)), find_index), chat_format("hermes", "chatml"))


def asked_for(rows: Sequence[dict[str, Any]], samples: int, phase: str = "train", **sampling: Any) -> dict[str, Any]:
    """The input that SkyRL's `prepare_generator_input` makes of rows of a dataset."""
    each = [(row, repetition) for row in rows for repetition in range(samples)]
    return {
        "prompts": [row["prompt"] for row, _ in each],
        "env_classes": ["harness1" for _ in each],
        "env_extras": [dict(row["env_extras"]) for row, _ in each],
        "sampling_params": {"temperature": 1.0, "top_p": 1.0, "top_k": -1, **sampling},
        "trajectory_ids": [TrajectoryID(row["uid"], repetition) for row, repetition in each],
        "batch_metadata": SimpleNamespace(global_step=4, training_phase=phase),
    }


def check_as_skyrl_does(output: dict[str, Any], prompts: int) -> None:
    """What `validate_generator_output(…, step_wise=True)` of SkyRL 0.4.0 demands."""
    rows = len(output["response_ids"])
    columns = "prompt_token_ids response_ids loss_masks rewards rollout_logprobs stop_reasons trajectory_ids"
    for name in (*columns.split(), "is_last_step", "trajectory_generation_times"):
        assert isinstance(output[name], list), name
        assert len(output[name]) == rows, name
    for at in range(rows):
        tokens = len(output["response_ids"][at])
        assert tokens == len(output["loss_masks"][at]) == len(output["rewards"][at])
        assert tokens == len(output["rollout_logprobs"][at])
        assert isinstance(output["rewards"][at], list)
        assert isinstance(output["response_ids"][at], list)
    assert output["is_last_step"][-1] is True
    names = [each.to_string() for each in output["trajectory_ids"]]
    assert len([name for name, other in pairwise([*names, ""]) if name != other]) == len(set(names)) == prompts
    assert output["is_last_step"] == [name != other for name, other in pairwise([*names, ""])]
    if importlib.util.find_spec("skyrl") is not None:
        theirs = importlib.import_module("skyrl.train.utils.trainer_utils")
        theirs.validate_generator_output(prompts, output, step_wise=True)


def test_the_trainer_gets_what_it_asked_for_in_its_order(place: Place) -> None:
    engines = Engines(place.chat)
    rows = [TaskDataset(place.choice.tasks)[at] for at in (2, 0, 1)]
    output = run(place.generator(engines, "adapter").generate(asked_for(rows, 2)))
    check_as_skyrl_does(output, 6)
    ends = [name for name, last in zip(output["trajectory_ids"], output["is_last_step"], strict=True) if last]
    assert ends == [TrajectoryID(uid, sample) for uid in "201" for sample in (0, 1)]
    assert all(set(mask) == {1} for mask in output["loss_masks"])
    assert output["rollout_metrics"]["harness1/max_version"] == 3.0
    assert output["rollout_metrics"]["harness1/mean_steps"] == 1.5
    earned = [sum(each) for each, last in zip(output["rewards"], output["is_last_step"], strict=True) if last]
    assert len(set(earned)) > 1
    assert all(seconds > 0.0 for seconds in output["trajectory_generation_times"])
    assert set(engines.models) == {"adapter"}
    sent = sorted(each["prompt_token_ids"][0] for each in engines.asked)
    assert sorted(output["prompt_token_ids"]) == sent
    for ids, logprobs in zip(output["response_ids"], output["rollout_logprobs"], strict=True):
        assert logprobs == [-(at + 1) / 9 for at in range(len(ids))]
    sampled = engines.asked[0]["sampling_params"]
    assert (sampled["temperature"], sampled["ignore_eos"], sampled["logprobs"]) == (1.0, True, 1)
    assert sampled["stop_token_ids"] == list(place.chat.stop_ids)
    assert {each["cache_salt"] for each in engines.asked} == {"3"}
    assert sorted(engines.finished) == sorted(engines.sessions)
    assert len(set(engines.sessions)) == 6


def test_an_instance_with_a_fault_is_kept_as_placeholders_which_train_nothing(place: Place) -> None:
    engines = Engines(place.chat, broken=[1])
    rows = [TaskDataset(place.choice.tasks)[at] for at in range(2)]
    output = run(place.generator(engines).generate(asked_for(rows, 2)))
    check_as_skyrl_does(output, 4)
    faulty = [at for at, reason in enumerate(output["stop_reasons"]) if reason == "error"]
    assert len({output["trajectory_ids"][at].instance_id for at in faulty}) == 1
    assert len(faulty) == 2
    for at in faulty:
        columns = ("prompt_token_ids", "response_ids", "rewards", "loss_masks", "rollout_logprobs")
        assert [output[name][at] for name in columns] == [[0], [0], [0.0], [0], [0.0]]
        assert output["is_last_step"][at] is True
    assert output["rollout_metrics"]["harness1/faulty_instances"] == 1.0
    assert output["rollout_metrics"]["harness1/episodes"] == 2.0
    assert sorted(engines.finished) == sorted(engines.sessions)


def test_a_validation_may_play_each_task_once_and_greedily_but_a_training_may_not(place: Place) -> None:
    held_out = TaskDataset(place.choice.held_out, first=len(place.choice.tasks))
    asked = asked_for([held_out[0], held_out[1]], 1, "eval", temperature=0.0)
    engines = Engines(place.chat)
    check_as_skyrl_does(run(place.generator(engines).generate(asked)), 2)
    assert {each["sampling_params"]["temperature"] for each in engines.asked} == {0.0}
    for wrong in ({"temperature": 0.7}, {"top_p": 0.9}, {"top_k": 5}):
        with pytest.raises(UsageError, match="temperature=1"):
            run(place.generator(engines).generate(asked_for([held_out[0]], 2, **wrong)))
    with pytest.raises(ValueError, match="only one trajectory"):
        run(place.generator(engines).generate(asked_for([held_out[0]], 1)))


def played(group_id: str, sample: int, reward: float | None = 0.0, **changes: Any) -> Episode:
    return replace(made_episode(f"{group_id}/{sample}", 2, reward), group_id=group_id, sample_idx=sample, **changes)


def pair(group_id: str, *rewards: float) -> list[Episode]:
    return [played(group_id, at, reward) for at, reward in enumerate(rewards)]


def test_every_trained_call_is_a_step_with_its_exact_tokens() -> None:
    episodes = [replace(each, sample_idx=at) for at, each in enumerate(siblings("paper").episodes)]
    output = generator_output(episodes)
    calls = [(episode, call) for episode in episodes for call in calls_to_train(episode)]
    assert len(calls) < sum(len(list(calls_of(episode))) for episode in episodes)
    assert output["prompt_token_ids"] == [list(prompt_ids(*each)) for each in calls]
    assert output["response_ids"] == [list(call.output_ids) for _, call in calls]
    assert output["rollout_logprobs"] == [list(call.output_logprobs) for _, call in calls]
    assert output["loss_masks"] == [[1] * len(call.output_ids) for _, call in calls]
    assert output["stop_reasons"] == [call.finish_reason for _, call in calls]


def test_the_reward_stands_on_the_last_token_of_the_last_step() -> None:
    output = generator_output(pair("g", 1.5, -0.5))
    nothing = [0.0] * 4
    assert output["rewards"] == [nothing, [0.0, 0.0, 0.0, 1.5], nothing, [0.0, 0.0, 0.0, -0.5]]
    assert output["is_last_step"] == [False, True, False, True]
    assert output["trajectory_ids"] == [TrajectoryId("g", sample) for sample in (0, 0, 1, 1)]
    assert output["rollout_metrics"]["harness1/mean_reward"] == 0.5
    assert output["rollout_metrics"]["harness1/mean_steps"] == 2.0


@pytest.mark.parametrize(
    ("batch", "says"),
    [
        ([*pair("a", 1.0, 0.0), played("g", 0, 1.0)], "instance g has only one trajectory"),
        ([*pair("a", 1.0), *pair("b", 1.0, 0.0), played("a", 1)], "of an instance are not adjacent"),
        ([*pair("a", 1.0), *pair("a", 1.0)], "two trajectories have the same name"),
        ([replace(each, segments={"start": (), "answer": ()}) for each in pair("a", 1.0, 0.0)], "has no prompt"),
    ],
)
def test_what_the_trainer_would_refuse_or_mistake_is_no_batch(batch: list[Episode], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        generator_output(batch)


def test_faults_alone_are_a_batch_and_a_step_without_log_probabilities_is_no_part_of_one() -> None:
    with pytest.raises(ValueError, match="has no log probabilities"):
        generator_output([with_call(played("a", 0, 1.0), output_logprobs=())], validates=True)
    output = generator_output([played("b", at, None, status=Status.INFRA_ERROR) for at in (0, 1)])
    assert output["rollout_metrics"] == {"harness1/episodes": 0.0, "harness1/faulty_instances": 1.0}


def with_call(episode: Episode, **changes: Any) -> Episode:
    *turns, last = episode.turns
    return replace(episode, turns=(*turns, replace(last, calls=(replace(last.calls[0], **changes),))))


@pytest.mark.parametrize(
    ("episode", "trains", "compares"),
    [
        (played("g", 0, 1.0), True, True),
        (played("g", 0, -0.5, status=Status.POLICY_ERROR), True, True),
        (played("g", 0, None, status=Status.INFRA_ERROR), False, False),
        (played("g", 0, None), False, False),
        (played("g", 0, 9.0, turns=()), False, False),
        (played("g", 0, 9.0, untrainable="its outputs have no log probabilities"), False, True),
        (with_call(played("g", 0, 9.0), output_logprobs=()), False, True),
        (with_call(played("g", 0, 9.0), sampling=Sampling(temperature=0.7)), False, True),
        (with_call(played("g", 0, 9.0), sampling=Sampling(grammar="some")), False, True),
    ],
)
def test_an_episode_is_trained_on_only_as_the_policy_sampled_it(episode: Episode, trains: bool, compares: bool) -> None:
    assert (is_fit(episode, validates=False), is_fit(episode, validates=True)) == (trains, compares)


def test_held_out_tasks_are_not_those_that_are_trained_on(place: Place) -> None:
    tasks, held_out, _ = place.choice
    generator = place.generator(Engines(place.chat))
    everything = [*tasks, *held_out]
    rows = [*TaskDataset(tasks).collate_fn([TaskDataset(tasks)[0]]), TaskDataset(held_out, len(tasks))[0]]
    queries = [everything[row["env_extras"]["task"]].task.query for row in rows]
    assert queries == [row["prompt"][0]["content"] for row in rows]
    assert queries[1] not in {placed.task.query for placed in tasks}
    assert len(TaskDataset(held_out)) == len(held_out)
    with pytest.raises(UsageError, match="TaskDataset"):
        run(generator.generate({**asked_for(rows, 2), "env_extras": [{}] * 4}))


def error_of(status: int) -> ClientResponseError:
    request: Any = None
    return ClientResponseError(request, (), status=status, message="no")


class Answering:
    """A client that gives one answer, and new weights while it does."""

    def __init__(self, answer: Any) -> None:
        self.answer, self.weight_version = answer, 1

    async def generate(self, input_batch: Any, model: str | None = None) -> Any:
        self.weight_version += 1
        if isinstance(self.answer, Exception):
            raise self.answer
        found = {"response_ids": [[4, STOP]], "stop_reasons": ["stop"], "response_logprobs": [[-1.0, -0.5]]}
        return found | self.answer

    async def finish_session(self, session_id: str) -> None:
        raise AssertionError


def sampled(answer: Any, sampling: Sampling = PLAIN) -> Any:
    return run(SkyRLBackend(Answering(answer), "model").generate((1, 2), sampling))


@pytest.mark.parametrize(
    "answer",
    [
        *({"response_logprobs": each} for each in (None, [[-1.0]], [[-1.0, math.nan]])),
        {"response_ids": [[]], "response_logprobs": [[]]},
        *({"response_ids": [[4, 6]]}, {"response_ids": [[4, STOP]] * 2}, {"stop_reasons": ["abort"]}),
        *(ClientConnectionError("gone"), TimeoutError(), error_of(503)),
    ],
)
def test_an_output_names_its_weights_and_what_the_engines_fail_to_give_is_a_fault(answer: Any) -> None:
    output = sampled({})
    assert (output.output_ids, output.output_logprobs, output.finish_reason) == ((4, STOP), (-1.0, -0.5), "stop")
    assert (output.version_start, output.version_end) == (1, 2)
    with pytest.raises(InfrastructureFault):
        sampled(answer)


def test_what_the_engines_refuse_or_cannot_sample_goes_to_the_user() -> None:
    with pytest.raises(UsageError, match="refused a call"):
        sampled(error_of(400))
    for sampling in (Sampling(temperature=0.5), Sampling(top_p=0.9), Sampling(top_k=3)):
        with pytest.raises(UsageError, match="temperature 1 or 0"):
            sampled({}, sampling)
    backend = SkyRLBackend(Answering({}), "model")
    with pytest.raises(UsageError, match="grammar"):
        run(backend.generate((1,), PLAIN, Grammar("", "")))


def test_the_settings_of_the_published_recipe_are_those_of_our_own_training() -> None:
    found = dict(each.split("=", 1) for each in settings(load_config("rl/paper")))
    prefix = "trainer.algorithm."
    assert (found[f"{prefix}cispo.cispo_eps_clip_low"], found[f"{prefix}cispo.cispo_eps_clip_high"]) == ("1.0", "4.0")
    assert found[f"{prefix}cispo.cispo_anchor"] == "rollout"
    assert found[f"{prefix}off_policy_correction.tis_ratio_type"] == "null"
    assert (found["trainer.train_batch_size"], found["trainer.policy_mini_batch_size"]) == ("128", "32")
    assert (found["generator.n_samples_per_prompt"], found["generator.batched"]) == ("8", "false")
    assert found["generator.step_wise_trajectories"] == "true"
    assert found["generator.merge_stepwise_output"] == "false"
    assert int(found["generator.max_input_length"]) + 2048 == 32768
    merged = settings(load_config("rl/paper", ["rl.rows=epoch", "env.rendering.order=epoch"]))
    assert "generator.merge_stepwise_output=true" in merged


def test_generation_runs_ahead_of_training_as_far_as_ours_does() -> None:
    """By the conditions of `FullyAsyncRayPPOTrainer` (0.4.0), restated."""
    found = dict(each.split("=", 1) for each in settings(load_config("rl/paper", ["rl.staleness=2", "rl.substeps=1"])))
    step, ahead = int(found["trainer.policy_mini_batch_size"]), int(found["trainer.fully_async.max_staleness_steps"])
    assert found["trainer.fully_async.enabled"] == "true"
    assert (step, ahead) == (int(found["trainer.train_batch_size"]), 2)
    assert step <= int(found["trainer.fully_async.num_parallel_generation_workers"]) <= step * (ahead + 1)
    assert (found["generator.batched"], found["trainer.placement.colocate_all"]) == ("false", "false")
    assert found["trainer.algorithm.policy_loss_type"] == "cispo"
    assert found["trainer.algorithm.cispo.cispo_anchor"] == "rollout"
    assert not any("fully_async" in each for each in settings(load_config("rl/paper")))
    for other, why in (
        ("rl.staleness=2", r"rl\.substeps=1"),
        ("rl.algorithm=reinforce", "set up"),
        ("rl.advantages=group_std", "set up"),
    ):
        with pytest.raises(ConfigError, match=why):
            settings(load_config("rl/paper", [other]))


@pytest.mark.skipif(importlib.util.find_spec("skyrl") is not None, reason="SkyRL is installed")
def test_without_skyrl_the_error_says_how_to_install_it() -> None:
    with pytest.raises(UsageError, match=r"pip install .skyrl.*Python 3\.12"):
        experiment(Config(), TrainingInputs())


def test_with_skyrl_its_own_checks_take_the_settings() -> None:
    theirs = pytest.importorskip("skyrl.train.config")
    config = load_config("rl/paper")
    cfg = theirs.SkyRLTrainConfig.from_cli_overrides([*settings(config), "trainer.logger=console"])
    importlib.import_module("skyrl.train.utils").validate_cfg(cfg)
    assert cfg.trainer.algorithm.off_policy_correction.tis_ratio_type is None
    assert cfg.generator.inference_engine.engine_init_kwargs["max_model_len"] == 32768
    assert list(cfg.trainer.policy.optimizer_config.adam_betas) == [0.9, 0.95]
    assert issubclass(
        experiment(config, TrainingInputs()), importlib.import_module("skyrl.train.entrypoints.main_base").BasePPOExp
    )
