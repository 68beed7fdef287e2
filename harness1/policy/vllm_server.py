"""A vLLM server by completions of token ids.

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --logprobs-mode processed_logprobs

The option gives log probabilities of the distribution that is sampled from; the variable opens the paths by which
weights are loaded (vLLM 0.31: docs, "Async Reinforcement Learning"). Whoever reaches such a server can change its
weights: let it listen on a private address.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from harness1.errors import InfrastructureFault, UsageError
from harness1.policy.backend import Grammar
from harness1.policy.sampled import Sampled
from harness1.policy.token_server import TokenServer
from harness1.records import Sampling

COLDEST = 0.01
"""vLLM samples at this temperature whatever lower one above 0 it is asked for."""


class _Logprobs(msgspec.Struct):
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] | None = None


class _Choice(msgspec.Struct):
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None


class _Completion(msgspec.Struct):
    choices: list[_Choice]


class VllmServer(TokenServer):
    """A vLLM server. A grammar masks what it samples from and the log probabilities alike."""

    raw_advice = "start vLLM with --logprobs-mode processed_logprobs"

    def _check(self, sampling: Sampling) -> None:
        check_temperature(sampling)

    async def _sample(self, prompt_ids: Sequence[int], sampling: Sampling, grammar: Grammar | None) -> Sampled:
        body: dict[str, Any] = self._body(prompt_ids, sampling.temperature) | {
            "max_tokens": sampling.max_tokens,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "seed": sampling.seed,
            "stop_token_ids": sampling.stop_ids,
            "logprobs": 0,
            "return_token_ids": True,
        }
        if grammar is not None:
            body["structured_outputs"] = {"grammar": grammar.ebnf}
        choice = await self._ask(body)
        if choice.prompt_token_ids != list(prompt_ids):
            raise InfrastructureFault(f"{self._endpoint.url} gave no prompt ids, or others than it was sent")
        logprobs = choice.logprobs.token_logprobs if choice.logprobs else None
        return Sampled(choice.token_ids, logprobs, choice.finish_reason, choice.stop_reason)

    async def _best_logprob(self, prompt_ids: Sequence[int], temperature: float) -> float:
        choice = await self._ask(self._body(prompt_ids, temperature) | {"max_tokens": 1, "logprobs": 1})
        top = choice.logprobs.top_logprobs if choice.logprobs else None
        if not top or not top[0]:
            raise InfrastructureFault(f"{self._endpoint.url} gave no log probabilities")
        return max(top[0].values())

    async def _load(self, folder: Path, version: int) -> None:
        """Calls of other clients end first, too; the cache of prefixes goes with the old weights. A pause that was not
        answered may have begun, and is ended all the same."""
        reload = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        try:
            try:
                await self._endpoint.post("/pause?mode=wait", {}, msgspec.Raw)
                await self._endpoint.post("/collective_rpc", reload, msgspec.Raw)
            finally:
                await self._endpoint.post("/resume", {}, msgspec.Raw)
        except UsageError as error:
            raise UsageError(f"{error}; to load weights, start vLLM with VLLM_SERVER_DEV_MODE=1") from error

    def _body(self, prompt_ids: Sequence[int], temperature: float) -> dict[str, Any]:
        """What every request says. The penalties are named because a model's own defaults would hold otherwise;
        `ignore_eos`, because only the stop tokens that are asked for shall end an output."""
        return {
            "model": self.model,
            "prompt": tuple(prompt_ids),
            "temperature": temperature,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "ignore_eos": True,
        }

    async def _ask(self, body: dict[str, Any]) -> _Choice:
        choices = (await self._endpoint.post("/v1/completions", body, _Completion)).choices
        if len(choices) != 1:
            raise InfrastructureFault(f"{self._endpoint.url} gave {len(choices)} outputs where one was asked for")
        return choices[0]


def check_temperature(sampling: Sampling) -> None:
    """Refuse a temperature that vLLM would replace.

    Raises:
        UsageError: it lies between 0 and 0.01.
    """
    if 0.0 < sampling.temperature < COLDEST:
        raise UsageError(f"vLLM does not sample at temperature {sampling.temperature}: 0, or at least {COLDEST}")
