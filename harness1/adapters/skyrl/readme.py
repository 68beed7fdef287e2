"""The `README.md` of an export, with instructions for SkyRL."""

from __future__ import annotations

from harness1.runs.stage import Stage

_TEXT = """# Episodes for SkyRL

{files} batches of {groups} groups, each one JSON object `batch-NNNNN.json` in the shape of SkyRL's `GeneratorOutput`
for step-wise training: one entry for each model call, with the exact tokens of its prompt and output and the log
probabilities that were recorded when it was sampled. The reward is on the last token of the last step. Groups with
equal rewards and episodes with infrastructure faults are left out; `stage.json` counts both.

Written for SkyRL 0.4.0. Policy: `{policy}`, sampled at temperature 1; tokenizer hash `{tokenizer}`.

## A generator that gives them to the trainer

```python
import json
import sys
from pathlib import Path

import ray
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.entrypoints.main_base import BasePPOExp
from skyrl.train.generators.base import GeneratorInterface, TrajectoryID
from skyrl.train.utils import validate_cfg
from skyrl.train.utils.utils import initialize_ray

BATCHES = sorted(Path("/path/to/this/folder").glob("batch-*.json"))


class Recorded(GeneratorInterface):
    async def generate(self, input_batch):
        output = json.loads(BATCHES[input_batch["batch_metadata"].global_step - 1].read_text())
        output["trajectory_ids"] = [TrajectoryID(**each) for each in output["trajectory_ids"]]
        return output


class Experiment(BasePPOExp):
    def get_generator(self, cfg, tokenizer, inference_engine_client):
        return Recorded()


@ray.remote(num_cpus=1)
def run(cfg):
    Experiment(cfg).run()


if __name__ == "__main__":
    cfg = SkyRLTrainConfig.from_cli_overrides(sys.argv[1:])
    validate_cfg(cfg)
    initialize_ray(cfg)
    ray.get(run.remote(cfg))
```

## Settings of the trainer

| setting | value | reason |
|---|---|---|
| `trainer.policy.model.path` | the weights that sampled | the first step is on policy only then |
| `data.train_data` | `["/path/to/this/folder/prompts.jsonl"]` | a line for each group: it counts the steps |
| `trainer.epochs` | 1 | {files} steps, one for each file |
| `trainer.train_batch_size` | {groups} | groups of a file; the trainer refuses another number |
| `trainer.policy_mini_batch_size` | a divisor of {groups} | groups of an optimizer step |
| `generator.n_samples_per_prompt` | {samples} | episodes of a group |
| `generator.step_wise_trajectories` | true | |
| `trainer.eval_interval` | -1 | there is nothing to generate with |
| `trainer.algorithm.advantage_estimator` | grpo | or rloo, maxrl: no other supports steps |
| `trainer.algorithm.grpo_norm_by_std` | false | as in `rl.advantages = "center"` |
| `trainer.algorithm.policy_loss_type` | cispo | |
| `trainer.algorithm.cispo.cispo_anchor` | rollout | ratios to the recorded log probabilities |
| `trainer.algorithm.cispo.cispo_eps_clip_low`, `_high` | 1.0, 4.0 | ratios are cut to 0 and 5 |
| `trainer.algorithm.off_policy_correction.tis_ratio_type` | null | the anchor corrects already |
| `trainer.algorithm.loss_reduction` | token_mean | |
| `trainer.algorithm.use_kl_loss` | false | as there |

`generator.merge_stepwise_output=true` joins steps whose prompts continue each other, without changing the gradient.

Only the first step is on policy, because the weights change and the recorded episodes do not. Versions of the weights
that sampled a batch are in its `rollout_metrics`.
"""


def readme(files: int, groups: int, samples: int, run: Stage) -> str:
    """Return the text for an export of `files` batches of `groups` groups of `samples` episodes, from a run."""
    policy, tokenizer = run.outputs.get("policy", ""), run.hashes.get("tokenizer", "unknown")
    return _TEXT.format(files=files, groups=groups, samples=samples, policy=policy, tokenizer=tokenizer)
