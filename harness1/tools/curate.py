"""curate: edit the set of documents that will be delivered."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from harness1.config import Env
from harness1.memory.curated import DEFAULT_TAG
from harness1.memory.working_memory import WorkingMemory
from harness1.records import TAGS, Delta, Note, Observation, Tag, UnitId
from harness1.tools.handles import named, resolve_all, unknown_handles
from harness1.tools.read_document import Handle
from harness1.tools.tool import Needs, Traits

Importance = Annotated[
    dict[str, str],
    Meta(description="Tag for each handle, also of curated documents: very_high, high, fair or low.", max_length=256),
    Needs(lambda env: env.curation.tags),
]


@Traits(curates=True)
def curate(
    memory: WorkingMemory,
    env: Env,
    add_ids: Annotated[list[Handle], Meta(description="Handles to add, best first.", max_length=256)] = [],  # noqa: B006
    remove_ids: Annotated[list[Handle], Meta(description="Handles to remove.", max_length=256)] = [],  # noqa: B006
    importance: Importance = {},  # noqa: B006
) -> Observation:
    """Add documents to the curated set and remove them; removals come first. The set in its final state is your
    result."""
    added, unknown = resolve_all(memory, add_ids)
    removed, missing = resolve_all(memory, remove_ids)
    tagged, untaggable = resolve_all(memory, importance)
    tags, notes = valid_tags(tagged, importance)
    held = memory.curated.tags
    additions = {unit_id: tags.get(unit_id, held.get(unit_id, DEFAULT_TAG)) for unit_id in added.values()}
    for unit_id, tag in tags.items():
        if unit_id in held:
            additions.setdefault(unit_id, tag)
    absent = [reference for reference, unit_id in removed.items() if unit_id not in held]
    change = memory.curated.edit(additions, list(dict.fromkeys(removed.values())), env.curation)
    strange = list(dict.fromkeys([*unknown, *missing, *untaggable]))
    notes += [unknown_handles(strange)] if strange else []
    notes += [Note("not_curated", named(absent))] if absent else []
    if not additions and not removed:
        return Observation("curate", error=notes[0] if notes else Note("nothing_to_curate"))
    delta = Delta(
        added=change.added,
        retagged=change.retagged,
        removed=tuple(change.removed),
        evicted=tuple(change.evicted),
        refused=tuple(change.refused),
    )
    return Observation("curate", resolved={**tagged, **removed, **added}, notes=tuple(notes), delta=delta)


def valid_tags(tagged: dict[str, UnitId], importance: dict[str, str]) -> tuple[dict[UnitId, Tag], list[Note]]:
    """Return the valid tags by unit; unknown tags count as the default and are reported."""
    tags: dict[UnitId, Tag] = {}
    invalid: list[str] = []
    for reference, unit_id in tagged.items():
        word = importance[reference]
        if word not in TAGS:
            invalid.append(word[:20])
        tags[unit_id] = next((tag for tag in TAGS if tag == word), DEFAULT_TAG)
    return tags, [Note("invalid_tags", {"tags": invalid[:5]})] if invalid else []
