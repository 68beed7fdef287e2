"""Options that name a policy. Their help names every policy that is there, also those of other packages."""

from __future__ import annotations

from typing import Annotated

from typer import Option

from harness1.policy.registry import policy_names

POLICIES = f"{', '.join(policy_names()[:-1])} or {policy_names()[-1]}"
"""All names, for the help of an option."""
PolicyName = Annotated[str, Option("--policy", help=f"{POLICIES}.", metavar="NAME")]
