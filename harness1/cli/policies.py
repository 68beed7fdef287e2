"""The names of all policies, for the help of options. Those of other packages take time to find when a verb starts."""

from __future__ import annotations

from typing import Annotated

from typer import Option

from harness1.policy.registry import policy_names

POLICY_NAMES = f"{', '.join(policy_names()[:-1])} or {policy_names()[-1]}"
PolicyName = Annotated[str, Option("--policy", help=f"{POLICY_NAMES}.", metavar="NAME")]
