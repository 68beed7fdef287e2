"""`[policy]`: how a language model is asked. It is in `policy_hash`."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from harness1.settings import Count, Settings


class ChatPolicy(Settings):
    """How a language model is asked, whichever it is. It is in `policy_hash`."""

    format: Literal["auto", "hermes", "harmony", "compact"] = "auto"
    """`auto`: what the model's tokenizer was made for."""
    temperature: Annotated[float, Meta(ge=0.0)] = 1.0
    """0: the most likely token."""
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    top_k: Count = 0
    """0: no bound."""
    format_retries: Count = 3
    """Further attempts at a turn whose output holds no call."""
    constrained: bool = False
    """Sample under a grammar that admits nothing but calls of the shown tools."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of a model in this process; logits are single precision in both."""
