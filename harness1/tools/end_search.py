"""end_search: finish; the curated set is delivered as it stands."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from harness1.config import Env
from harness1.memory.working_memory import WorkingMemory
from harness1.records import Observation

END_SEARCH = "end_search"


def end_search(
    memory: WorkingMemory,
    env: Env,
    reasoning: Annotated[str, Meta(description="Why the curated set is complete, or cannot be completed.")] = "",
) -> Observation:
    """Finish the search. The curated set is delivered as it stands."""
    return Observation(END_SEARCH)
