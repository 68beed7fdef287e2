"""What becomes of each parameter of a request: it is honoured, put in the record alone, or refused with the reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, Literal, NamedTuple

import msgspec

from harness1.serve.service import Refused

MOST, LONGEST = 50, 1000
"""Parameters of a call that are recorded, and bytes of each: of a longer one the beginning."""

TOO_LONG = "prompt is too long"
"""The words by which agents know that they must shorten a conversation, as Anthropic says them."""
AS_TRAINED = "the model thinks and writes as it was trained to"
STOPS_ALONE = "an output ends with the model's own stop token"


class Field(NamedTuple):
    """A parameter; `neutral` are the values with which it asks for nothing."""

    does: Literal["honoured", "recorded", "refused"]
    why: str = ""
    neutral: tuple[Any, ...] = ()


Fields = Mapping[str, Field]
"""The parameters of a provider by name. One that it does not name is recorded, and changes nothing."""


def honoured(*names: str) -> dict[str, Field]:
    """Return parameters that are done as asked."""
    return dict.fromkeys(names, Field("honoured"))


def recorded(why: str, *neutral: Any) -> Field:
    """Return a parameter that no model here follows, with the reason."""
    return Field("recorded", why, neutral)


def refused(why: str, *neutral: Any) -> Field:
    """Return a parameter whose other values are refused, with the reason."""
    return Field("refused", why, neutral)


def refuse_fields(body: Mapping[str, Any], fields: Fields) -> None:
    """Raise Refused if a parameter asks for what is refused."""
    asked = [f"{name}: {fields[name].why}" for name in changing(body, fields) if fields[name].does == "refused"]
    if asked:
        raise Refused(400, f"{'; '.join(asked)}: leave it out")


def changing(body: Mapping[str, Any], fields: Fields) -> list[str]:
    """Return the names of parameters with which a provider would answer otherwise than is done here."""
    return [
        name
        for name, field in fields.items()
        if field.does != "honoured" and name in body and body[name] not in field.neutral
    ]


def unmet_by(body: Mapping[str, Any], fields: Fields, tools: Sequence[str] = ()) -> dict[str, Any]:
    """Return what a body asks for that nobody here does, by name, for the record; `tools` are those not offered."""
    done = {name for name, field in fields.items() if field.does == "honoured" or body.get(name) in field.neutral}
    asked = islice(((name, value) for name, value in body.items() if name not in done), MOST)
    found = {name[:LONGEST]: _shorten(value) for name, value in asked}
    return found | ({"tools": _shorten(tools)} if tools else {})


def _shorten(value: Any) -> Any:
    text = msgspec.json.encode(value)
    return value if len(text) <= LONGEST else f"{text[:LONGEST].decode(errors='replace')}..."
