"""Redaction of passwords and keys from addresses and messages."""

from __future__ import annotations

import re
from collections.abc import Sequence

HIDDEN = "***"


def without_password(address: str) -> str:
    """Remove the user name and password of `http://USER:PASSWORD@HOST` from an address."""
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
"""A value after the name of a key; a value after `Bearer` that has a digit; a key in OpenAI's form."""


def without_secrets(text: str, secrets: Sequence[str] = ()) -> str:
    """Replace known secrets, and whatever looks like a key, with `***`."""
    for secret in secrets:
        text = text.replace(secret, HIDDEN)
    return _LOOKS_SECRET.sub(lambda match: (match[1] or "") + HIDDEN, text)
