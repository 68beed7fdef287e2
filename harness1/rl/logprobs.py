"""Compute log probabilities by one plain forward pass, and compare recorded ones with them. Only the definition of the
distribution (`process_logprobs`) is shared with decoding."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from harness1.config import Config
from harness1.errors import UsageError
from harness1.models.backend import Grammar, process_logprobs
from harness1.models.causal_model import Dtype
from harness1.models.grammar import GrammarCompiler
from harness1.records import Episode, Record, Sampling
from harness1.rows.calls import calls_of, prompt_ids

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel


BOUND = 1e-4
"""The bound of a difference in float32 at temperatures of 1 or more; below 1, it is divided by the temperature. Also
that of a token before the first step, where trainer and sampler are float32: only the order of computation differs."""
MEAN_K3_BOUND = 1e-3
HALF_BOUND = 5e-3  # the largest mean k3 of the first batch in half precision: they round at different places (1e-3)
TIES = {"float32": 1e-3, "bfloat16": 0.25}  # logits that differ by less may change places with the order of computation


class SampledCall(Record):
    """One recorded output with its whole prompt."""

    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    output_logprobs: tuple[float, ...]
    sampling: Sampling


MaskOf = Callable[[SampledCall], "Tensor | None"]


def calls_to_replay(episode: Episode) -> Iterator[SampledCall]:
    """Yield every call with log probabilities, failed attempts too; SchemaError if a part of a prompt is lost."""
    for call in calls_of(episode):
        if call.output_logprobs:
            yield SampledCall(prompt_ids(episode, call), call.output_ids, call.output_logprobs, call.sampling)


def next_logits(model: PreTrainedModel, token_ids: Sequence[int], last: int) -> Tensor:
    """Return the logits that predict the last tokens of a sequence: [last, vocabulary], float32."""
    import torch

    ids = torch.tensor([list(token_ids)], device=model.device)
    logits: Tensor = model(input_ids=ids, use_cache=False, logits_to_keep=last + 1).logits
    return logits[0, :-1].float()


def chosen_logprobs(logits: Tensor, ids: Sequence[int], sampling: Sampling, masks: Tensor | None = None) -> Tensor:
    """Return the log probability of each token, [tokens], under `sampling`; differentiable in the logits, [tokens,
    vocabulary]. Masks, bool of the same shape, are False where a grammar forbade a token."""
    import torch

    at = torch.tensor(list(ids), device=logits.device)[:, None]
    return process_logprobs(logits, sampling, masks).gather(-1, at)[:, 0]


class LogprobReport(Record):
    """The comparison of recorded with replayed log probabilities. `worst_ratio` is the greatest difference by its
    bound, 1e-4 / min(temperature, 1). `mean_k3` is the mean of r - 1 - log r with log r = replayed - recorded, which
    estimates the divergence of the two distributions (Schulman, "Approximating KL divergence", 2020). Tokens at
    temperature 0 have no distribution: `greedy_gap` is the greatest distance of their logits from the highest
    (infinite: a recorded value is not 0)."""

    tokens: int = 0
    max_difference: float = 0.0
    worst_ratio: float = 0.0
    mean_k3: float = 0.0
    greedy_tokens: int = 0
    greedy_gap: float = 0.0

    def passes(self, dtype: Dtype) -> bool:
        """Return True if they agree within the precision of the type: each in float32, on the mean in bfloat16."""
        if self.tokens + self.greedy_tokens == 0 or not self.greedy_gap <= TIES[dtype]:
            return False
        return self.worst_ratio <= 1 if dtype == "float32" else self.mean_k3 <= MEAN_K3_BOUND


def compare_calls(model: PreTrainedModel, calls: Iterable[SampledCall], mask_of: MaskOf | None = None) -> LogprobReport:
    """Replay each call by one plain forward pass and compare; raise UsageError if a call has no output, or its output
    does not have one log probability for each id. The model has the weights that sampled the calls, and its own
    attention; `mask_of` gives the tokens that a call's grammar allowed, bool [tokens, vocabulary], None without one."""
    import torch

    greedy = tokens = 0
    k3 = gap = largest = ratio = 0.0
    for call in calls:
        count = len(call.output_ids)
        if not count or count != len(call.output_logprobs):
            found = f"{count} ids and {len(call.output_logprobs)} log probabilities"
            raise UsageError(f"a call with an output of {found} cannot be replayed")
        masks = None if mask_of is None else mask_of(call)
        with torch.no_grad():
            logits = next_logits(model, call.prompt_ids + call.output_ids, count)
        if call.sampling.temperature == 0:
            allowed = logits if masks is None else logits.masked_fill(~masks.to(logits.device), -torch.inf)
            chosen = allowed.gather(-1, torch.tensor(call.output_ids, device=logits.device)[:, None])
            away = math.inf if any(call.output_logprobs) else _largest(allowed.max(-1, keepdim=True).values - chosen)
            greedy, gap = greedy + count, max(gap, away)
            continue
        replayed = chosen_logprobs(logits, call.output_ids, call.sampling, masks).double().cpu()
        differences = replayed - torch.tensor(call.output_logprobs, dtype=torch.float64)
        worst, tokens = _largest(differences.abs()), tokens + count
        k3 += float((differences.exp() - 1 - differences).sum())
        largest, ratio = max(largest, worst), max(ratio, worst * min(call.sampling.temperature, 1.0) / BOUND)
    return LogprobReport(tokens, largest, ratio, k3 / max(tokens, 1), greedy, gap)


def grammar_masks(folder: Path, vocabulary: int, grammars: Sequence[Grammar]) -> MaskOf:
    """Return what rebuilds the masks of a call's grammar, which a record does not hold, for the tokenizer in a folder
    and logits of a width; MissingExtra without xgrammar, UsageError without a tokenizer or, on calling, for another
    grammar."""
    compiler = GrammarCompiler(folder, vocabulary)
    known = {grammar.digest: grammar for grammar in grammars}

    def mask_of(call: SampledCall) -> Tensor | None:
        name = call.sampling.grammar
        if name is None:
            return None
        if name not in known:
            raise UsageError(f"a call was sampled under the grammar {name[:12]}, which is not that of this environment")
        return compiler.masks(known[name], call.sampling.stop_ids, call.output_ids)

    return mask_of


def _largest(values: Tensor) -> float:
    """Return the largest value; NaN counts as infinite, and so fails every bound."""
    return float(values.nan_to_num(nan=math.inf, posinf=math.inf).max())


def check_start(replayed: Sequence[float], recorded: Sequence[float], config: Config) -> dict[str, float]:
    """Compare log probabilities at temperature 1 of the tokens of a first batch, of the trainer and of the sampler;
    return the values to log. With both in float32, every difference must be within `BOUND`; otherwise the mean k3
    within `HALF_BOUND`. Raise UsageError if they differ by more, or there is no token."""
    import torch

    pair = config.policy.dtype, config.train.dtype
    difference = torch.tensor(replayed, dtype=torch.float64) - torch.tensor(recorded, dtype=torch.float64)
    worst, k3 = (_largest(difference.abs()), float((difference.exp() - 1 - difference).mean())) if replayed else (0, 0)
    measure, measured, bound = ("difference", worst, BOUND) if set(pair) == {"float32"} else ("mean k3", k3, HALF_BOUND)
    if not replayed or not measured <= bound:
        raise UsageError(
            f"the rollouts are not from the model in training: log probabilities differ by up to {worst:.2g} (mean k3"
            f" {k3:.2g}) over {len(replayed)} tokens, where a {measure} of {bound:g} is allowed for"
            f" policy.dtype={pair[0]} and train.dtype={pair[1]}"
        )
    return {"gate/max_difference": worst, "gate/mean_k3": k3}
