"""The names of all policies, which take time to find, for the help of options; and what one plays a question in."""

from __future__ import annotations

from typing import Annotated

from typer import Option

from harness1.cli.printing import say
from harness1.config import Config
from harness1.episodes.jobs import EpisodeSetup
from harness1.errors import UsageError
from harness1.policy.registry import fit_window, needs_gold, policy_names

POLICY_NAMES = f"{', '.join(policy_names()[:-1])} or {policy_names()[-1]}"
PolicyName = Annotated[str, Option("--policy", help=f"{POLICY_NAMES}.", metavar="NAME")]


def open_setup(question: str, index: str, policy: str, given: Config) -> EpisodeSetup:
    """Return the setting in which a question is played. Raises UsageError: it is empty, or a setting does not fit."""
    if not question.strip():
        raise UsageError("the question is empty")
    if needs_gold(policy):
        raise UsageError("the oracle needs gold: use it with `harness1 eval`")
    settings = fit_window(policy, given)
    if settings.env != given.env:
        say(f"The server of the model reads {settings.env.context_window} tokens: env.context_window is set to that.")
    if settings.index != Config().index:
        raise UsageError("index settings take effect when an index is made: use them with `harness1 index`")
    return EpisodeSetup(settings, index, policy)
