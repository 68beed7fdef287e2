"""Addresses and messages as they may be shown: without passwords, keys and what looks like one."""

from __future__ import annotations

import re
from collections.abc import Sequence

HIDDEN = "***"


def without_password(address: str) -> str:
    """An address as it may be shown: without the user name and password of `http://USER:PASSWORD@HOST`."""
    return re.sub(r"^((?:\w+:)+/*)[^/]*@", r"\1", address)


_LOOKS_SECRET = re.compile(
    r"""(?ix)
    ( \b(?:x-)? (?:api[-_ ]?key | authorization | access[-_]?token) ["']? \s*[:=]\s* ["']? (?:bearer\s+ | basic\s+)?
    | [?&]key=
    | \bbearer \s+ (?=[^\s"']*\d) )
    [^\s"'&,;}]+
    | \b sk- [\w*-]{4,}
    """
)
"""A value behind the name of a key; what follows `Bearer` and has a digit; a key in the form of OpenAI's."""


def without_secrets(text: str, secrets: Sequence[str] = ()) -> str:
    """A text as it may be shown: known secrets, and whatever looks like a key, give way to `***`."""
    for secret in secrets:
        text = text.replace(secret, HIDDEN)
    return _LOOKS_SECRET.sub(lambda found: (found[1] or "") + HIDDEN, text)
