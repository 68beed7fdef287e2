"""`[policy]`: prompting and sampling of a language model. It is in `policy_hash`."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from harness1.settings import Count, Settings

AUTO = "auto"
FORMATS = ("hermes", "harmony", "compact")
"""The chat formats that are built in."""


class ChatPolicy(Settings):
    """Prompting and sampling of any language model. It is in `policy_hash`."""

    format: str = AUTO
    """`auto`: the format that the model's tokenizer was made for; or `hermes`, `harmony`, `compact`, or a plugin's
    (`harness1.formats`)."""
    temperature: Annotated[float, Meta(ge=0.0)] = 1.0
    """0: greedy."""
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    """Share of the probability that the sampled tokens are drawn from, the likeliest first; 1: all."""
    top_k: Count = 0
    """0: no limit."""
    format_retries: Count = 3
    """Further attempts at a turn whose output holds no call."""
    constrained: bool = False
    """Sample under a grammar that allows only calls of the shown tools."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of a model in this process; `auto` in a file or override: the faster one here. Logits are always float32."""
