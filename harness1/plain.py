"""Plain data: canonical JSON and its sha256, the only way hashes are made here; what may be stored, and what may be
shown: no passwords, keys, or characters that act on a terminal."""

from __future__ import annotations

import hashlib
import math
import re
import sys
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple, Self
from urllib.parse import unquote, unquote_plus

LARGEST = sys.float_info.max


def canonical(value: Any) -> bytes:
    """Encode plain data or a record as JSON with sorted keys: equal values give equal bytes."""
    import msgspec  # here, because the list of verbs needs none of it

    return msgspec.json.encode(value, order="sorted")


def decode_plain(data: bytes) -> Any:
    """Decode JSON. Raises one of MALFORMED: it is none, or holds a whole number that is too large to reckon with."""
    import msgspec

    left = [found := msgspec.json.decode(data)]
    while left:
        value = left.pop()
        if isinstance(value, dict | list):
            left += value.values() if isinstance(value, dict) else value
        elif isinstance(value, int) and abs(value) > LARGEST:
            raise ValueError(f"a number has {len(str(abs(value)))} digits")
    return found


def digest(value: Any) -> str:
    """Return the sha256 of a value's canonical JSON, as 64 hexadecimal digits."""
    return hashlib.sha256(canonical(value)).hexdigest()


def text_digest(text: str) -> str:
    """Return the first 16 hexadecimal digits of a text's sha256, enough to identify a piece within one episode."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def file_digest(path: Path) -> str:
    """Return the sha256 of a file's bytes, or the empty string if there is no such file."""
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


DEEPEST = 16  # levels of nesting that are kept; no tool has arguments of more than two


def json_safe(value: Any, depth: int = 0) -> Any:
    """Convert a value to plain JSON: safe text, finite numbers, few levels; or else to the name of its type."""
    match value:
        case None | bool():
            return value
        case str():
            return utf8_safe(value)
        case int() if abs(value) < 2**63:
            return value
        case float() if math.isfinite(value):
            return value
        case dict() if depth < DEEPEST:
            return {utf8_safe(str(key)): json_safe(item, depth + 1) for key, item in value.items()}
        case list() | tuple() if depth < DEEPEST:
            return [json_safe(item, depth + 1) for item in value]
        case _:
            return f"<{type(value).__name__}>"


def utf8_safe(text: str) -> str:
    """Replace each lone surrogate, which UTF-8 cannot encode, with a question mark."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def meant(name: str, names: Iterable[str]) -> str:
    """Return the question whether the most similar of some names was meant; an empty string if none is similar."""
    near = get_close_matches(name, list(names), 1)
    return f"; did you mean {near[0]}?" if near else ""


def counted(number: int, noun: str) -> str:
    """Return a number and its noun, in the plural unless there is one."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def unbroken(text: str) -> str:
    """Return a name of others, such as a path or a title, without ends of lines, so that it forges no line of ours."""
    return " ".join(text.splitlines())


HIDDEN = "***"


class Secret(str):
    """A text to use and not to show: printed, it reads `shown`, and msgspec cannot encode it. Concatenation gives
    the text."""

    __slots__ = ("shown",)
    shown: str

    def __new__(cls, text: str, shown: str = HIDDEN) -> Self:
        made = super().__new__(cls, text)
        made.shown = shown
        return made

    def __str__(self) -> str:
        return self.shown

    def __repr__(self) -> str:
        return repr(self.shown)

    def __format__(self, form: str) -> str:
        return format(self.shown, form)

    def __reduce__(self) -> tuple[type[Secret], tuple[str, str]]:
        return Secret, ("" + self, self.shown)


class _Parts(NamedTuple):
    """The parts of an address: `openai:gpt@http://`, `USER:PASSWORD`, `HOST/PATH`, the query and `#FRAGMENT`."""

    scheme: str
    user: str
    place: str
    query: str
    fragment: str


def _parts(address: str) -> _Parts | None:
    """Divide an address; None for what has no `://`. A password that should have been quoted still counts as one."""
    scheme, slashes, rest = address.partition("://")
    if not slashes:
        return None
    authority = re.split(r"[/?#]", rest, maxsplit=1)[0]
    port = authority.rpartition("]")[2].partition(":")[2]
    unquoted = "@" not in authority and port != "" and not port.isdecimal()
    user = (rest if unquoted else authority).rpartition("@")[0]
    rest = rest[len(user) :].removeprefix("@")
    rest, hash_sign, fragment = rest.partition("#")
    place, _, query = rest.partition("?")
    return _Parts(scheme + slashes, user, place, query, hash_sign + fragment)


WITH_SERVER = re.compile(r"(.*)@(https?://.+)", re.I)
"""What a server is asked for, and its address."""


def at_home(named: str) -> Path:
    """Return a path, which may begin with `~` or `~USER`."""
    try:
        return Path(named).expanduser()
    except (RuntimeError, ValueError):  # there is no such user
        return Path(named)


def paths_in(name: str) -> Iterator[Path]:
    """Yield the paths that `PATH` or `KIND:PATH`, of one kind or several, may mean, with and without `@URL`."""
    for end in (name, *(name[colon.end() :] for colon in re.finditer(":(?!//)", name))):
        served = WITH_SERVER.fullmatch(end)
        yield from map(at_home, filter(None, (end, served and served[1])))


def public_address(address: str) -> str:
    """Return an address with `***` in place of user name and password, and of what follows `?`, which may be a key."""
    if (parts := _parts(address)) is None:
        return address
    user, query = f"{HIDDEN}@" * bool(parts.user), f"?{HIDDEN}" * bool(parts.query)
    return f"{parts.scheme}{user}{parts.place}{query}{parts.fragment}"


def without_password(address: str) -> str:
    """Return an address without user name and password, and with `***` in place of what follows `?`."""
    if "://" not in address:
        return re.sub(r"^((?:\w+:)+/*)[^/]*@", r"\1", address)
    return public_address(address).replace(f"://{HIDDEN}@", "://", 1)


def is_redacted(address: str) -> bool:
    """Return whether an address is one that `public_address` has taken something out of."""
    parts = _parts(address)
    return parts is not None and HIDDEN in (parts.user, parts.query)


def secrets_of(address: str) -> tuple[str, ...]:
    """Return the parts of an address that may be secrets, as written and unquoted: password or user, values of the
    query."""
    if (parts := _parts(address)) is None:
        return ()
    name, colon, password = parts.user.partition(":")
    values = [pair.rpartition("=")[2] for pair in parts.query.split("&")]
    found = [word for word in (password if colon else name, *values) if word]
    return tuple(dict.fromkeys([*found, *map(unquote, found), *map(unquote_plus, found)]))


_RUN = r"(?=\w{0,63}\d)(?=\w{0,63}[A-Za-z])\w{20,}"
_AT_HOST = r"@(?!(?:[\w-]{1,63}\.){0,9}example\b)(?:\[|[\w-]{1,63}\.\w)"
"""The random part of a key: digits and letters without a hyphen."""
_ALONE = r"(?: (?<![^\W_]%(it)s) | (?<=\\[nrt]%(it)s) )"
_FORMS = {
    "AGE-SECRET-KEY-1": r"[0-9A-Z]{40,}",
    "AIza": _ALONE % {"it": "AIza"} + r"[\w-]{35}(?![\w-])",  # not any run of base64
    **dict.fromkeys(("AKIA", "ASIA"), r"[0-9A-Z]{16}\b"),
    "-----BEGIN ": r"[A-Z ]{0,40}PRIVATE\ KEY",
    "eyJ": _ALONE % {"it": "eyJ"} + r"[\w-]{10,999}\.eyJ[\w-]{10,999}\.[\w-]{16,}",
    **dict.fromkeys(("gho_", "ghp_", "ghr_", "ghs_", "ghu_", "npm_"), r"[A-Za-z0-9]{36,}"),
    "github_pat_": r"\w{30,}",
    "glpat-": r"[\w-]{20,}",
    **dict.fromkeys(("gsk_", "hf_"), r"[A-Za-z0-9]{30,}"),
    "nvapi-": r"(?=[\w-]{0,63}\d)[\w-]{30,}",
    "PuTTY-User-Key-File-": r"\d",
    "pypi-AgE": r"[\w-]{50,}",
    "r8_": r"(?=\w{0,36}\d)[A-Za-z0-9]{37}\b",
    # After a vowel it may be the end of a word, such as `task-`: there, only what services of models begin with.
    "sk-": rf"""(?:
        (?: (?<![\w-]sk-) | (?<=[^\w-]-sk-) | (?<=\\[nrt]sk-) | (?<=\\u[\da-fA-F]{{4}}sk-) | (?<=%[\da-fA-F]{{2}}sk-) )
        (?=[\w-]{{0,99}}\d)[\w-]{{20,}}
        | (?<![aeiouAEIOU]sk-) (?:[a-z]{{2,8}}\d{{0,2}}-){{0,2}} {_RUN}
        | (?:proj|svcacct|admin|or-v1|ant-[a-z]{{3}}\d\d)- {_RUN}
        | ant-[a-z]{{3}}\d\d-[\w-]{{60,}} | [\w-]{{20,99}}T3BlbkFJ )""",
    **dict.fromkeys(("rk_live_", "rk_test_", "sk_live_", "sk_test_"), r"[A-Za-z0-9]{16,}"),
    **{
        begin: _ALONE % {"it": begin} + rf"(?:[a-z]{{2,8}}-)? {_RUN}"
        for begin in ("jina_", "pplx-", "tml-", "tvly-", "xai-")
    },
    "xox": r"(?:[abceoprs]-\d|d-)[\w%-]{15,}",
}
"""The forms of keys by how they begin: of the hub, of services of models and searches, of clouds, code hosts and
payments; of signed tokens and private keys."""
_IN_ADDRESS = rf"""
    (?: [\w.~%+-]{{0,64}} :(?=[^\s@]{{0,99}}\d)(?=[^\s@]{{0,99}}[A-Za-z]) [\w.~!$&+=%^-]{{8,}} | {_RUN} ) {_AT_HOST}
"""
"""After `://`, a password or a token of letters and digits, but at the hosts of examples and at names without a dot."""
_KEY = "|".join(re.escape(begin) + form for begin, form in _FORMS.items())
_SEARCHES = [
    (begin.encode(), re.compile((re.escape(begin) + form).encode(), re.VERBOSE))
    for begin, form in (*_FORMS.items(), ("://", _IN_ADDRESS))
]
_CONTEXT = 16
"""Bytes before a key that decide whether it is one."""
_ESCAPED = re.compile(rb"\\{1,8}(?:(?:u00|x)([2-7][0-9a-fA-F])|/)|&\#(?:0{0,9}(\d{2,3})|[xX]0{0,9}([2-7][0-9a-fA-F]));")
_LOOKS_SECRET = re.compile(
    rf"""(?ix)
    ( (?<![^\W_]) (?:api[-_ ]?key | authorization | access[-_]?token) ["']? \s*[:=]\s* ["']? (?:bearer\s+ | basic\s+)?
    | [?&]key=
    | \bbearer \s+ (?=[^\s"']*\d) )
    [^\s"'&,;}}]+
    | \b sk- [\w*-]{{4,}} | (?-i:{_KEY})
    """
)
"""A value after the name of a key; a value after `Bearer` that has a digit; a key in OpenAI's form or another."""


def find_key(data: bytes, *, goes_on: bool = False) -> int | None:
    """Return the place of what is a key by its form, or None. `goes_on`: what came before ended with the first
    bytes."""
    found = (form.search(data, _CONTEXT * goes_on) for begin, form in _SEARCHES if begin in data)
    return next((each.start() for each in found if each), None)


def unescaped(data: bytes) -> bytes:
    """Return a text whose visible ASCII characters are written as they are, not as UTF-16 or by their numbers. Lines
    stay."""
    data = data.replace(b"\0", b"")
    if not any(mark in data for mark in (b"\\u00", b"\\x", b"\\/", b"&#")):
        return data

    def character(found: re.Match[bytes]) -> bytes:
        code = int(found[2]) if found[2] else int(found[1] or found[3] or b"2f", 16)
        return bytes([code]) if 0x20 < code < 0x7F else found[0]

    return _ESCAPED.sub(character, data)


_PASSWORD = re.compile(r"""(:/{1,2})[^\s/@"']*:[^\s/@"']*@""")
"""User name and password of an address, which may have lost a slash as a path."""


def without_secrets(text: str, secrets: Sequence[str] = ()) -> str:
    """Replace known secrets, whatever looks like a key, and the passwords of addresses, with `***`."""
    for secret in secrets:
        text = text.replace(secret, HIDDEN)
    return _PASSWORD.sub(rf"\1{HIDDEN}@", _LOOKS_SECRET.sub(lambda match: (match[1] or "") + HIDDEN, text))


_UNUSUAL = re.compile(r"[^ -~\n\t]")
_ACTING = frozenset(("Cc", "Cf", "Cs", "Zl", "Zp"))
"""Unicode's categories of characters that act and are not seen."""


def printable(text: str) -> str:
    """Return a text that a terminal only shows: characters that would act on it become escapes such as \\u001b, which
    mean the same in JSON. Line ends and tabs stay."""
    return _UNUSUAL.sub(lambda found: _escaped(found[0]), text)


def _escaped(character: str) -> str:
    if unicodedata.category(character) not in _ACTING:
        return character
    units = character.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2))
