"""The known origins of policies, by name."""

from __future__ import annotations

from harness1.data.origins import known_origins, united
from harness1.models.spec import SERVED, policy_folder
from harness1.plain import WITH_SERVER


def policy_origins(name: str) -> tuple[str, ...]:
    """Return the known origins of a policy: of a released one, of a model in a folder, such as `hf:FOLDER`, or of what
    another kind is given, such as `replay:RUN`. A served model has none, whatever lies in a folder of its name."""
    if folder := policy_folder(name):
        return known_origins(folder)
    kind, colon, rest = name.partition(":")
    if kind in SERVED:
        return () if SERVED[kind] or WITH_SERVER.fullmatch(rest) else known_origins(rest)
    return united(known_origins(name), policy_origins(rest) if colon else ())
