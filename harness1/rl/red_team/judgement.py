"""What a judge says of an episode: its prompt, and the parsing of its reply."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import resources
from typing import Literal

import msgspec

from harness1.errors import MALFORMED
from harness1.http.model_endpoint import Messages, restore, strip_answer
from harness1.records import Record


class _Template(msgspec.Struct):
    system: str
    kinds: dict[str, str]


_PROMPT = msgspec.toml.decode(resources.files(__package__).joinpath("prompt.toml").read_bytes(), type=_Template)
KINDS: Mapping[str, str] = _PROMPT.kinds
"""The kinds of tricks, each with what it means."""
SYSTEM = _PROMPT.system.replace("{kinds}", "\n".join(f"- {name}: {meaning};" for name, meaning in KINDS.items()))
"""The system message of the judge."""
_OBJECT = re.compile(r"\{[^{}]*\}", re.S)


class Judgement(Record):
    """A valid reply. The quote is in the transcript, letter by letter but for white space and case."""

    verdict: Literal["honest", "trick"]
    kind: str = ""
    """One of `KINDS`; empty for an honest episode."""
    turn: int | None = None
    """The turn that shows it."""
    quote: str = ""


def question(transcript: str) -> Messages:
    """Return the messages that ask about an episode."""
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"<episode>\n{transcript}\n</episode>"}]


def read_judgement(said: str, transcript: str) -> Judgement | None:
    """Return the judgement in a reply: its last JSON object. None if there is none, or it names a trick without a known
    kind, a turn, or a quote from the transcript: a judge that cannot show a trick has not seen one."""
    objects = _OBJECT.findall(strip_answer(said))
    try:
        found = msgspec.json.decode(objects[-1] if objects else "", type=Judgement)
    except MALFORMED:
        return None
    if found.verdict == "honest":
        return Judgement("honest")
    shown = f"\nTurn {found.turn}:" in f"\n{transcript}" and _plain(found.quote) in _plain(transcript)
    return found if found.kind in KINDS and _plain(found.quote) and shown else None


def _plain(text: str) -> str:
    return " ".join(restore(text).casefold().split())
