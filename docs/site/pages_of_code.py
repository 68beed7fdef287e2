"""The pages that are written in the code: the commands, the settings and the public names."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from html import escape
from types import ModuleType
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec

import harness1
from harness1.cli.main import Verb, Verbs, app
from harness1.config import Config, configurations
from harness1.config.settings import Settings, notes


def commands_page() -> str:
    """Return the help of every verb, in the order of the list of verbs."""
    lines = ["# Commands", "", "`harness1 VERB --help` prints the same in a terminal.", ""]
    return "\n".join([*lines, *_group(app, "harness1")])


def _group(group: Verbs, name: str) -> Iterator[str]:
    for each, verb in group.commands.items():
        full = f"{name} {each}"
        if isinstance(verb, Verbs):
            yield from [f"## {full}", "", verb.help or "", ""]
            yield from (line.replace("## ", "### ", 1) for line in _group(verb, full))
        else:
            yield from _verb(verb, full)
            for below in verb.more.values():
                yield from (line.replace("## ", "### ", 1) for line in _verb(below, f"{full} {below.name}"))


def _verb(verb: Verb, name: str) -> Iterator[str]:
    """Yield a verb's usage, help, and what it takes, as `--help` says it."""
    command = verb.load()
    context = command.context_class(command, info_name=name)
    yield from [f"## {name}", "", f"    {name} {' '.join(command.collect_usage_pieces(context))}", ""]
    for paragraph in (command.help or "").split("\n\n"):
        flat = " ".join(paragraph.split())
        if flat.startswith("Example: "):
            yield from ["Example:", "", *(f"    {each}" for each in flat.removeprefix("Example: ").split("; ")), ""]
        else:
            yield from [_text(flat), ""]
    yield '<dl class="taken">'
    for taken in command.params:
        if record := taken.get_help_record(context):
            yield f"<dt><code>{escape(record[0])}</code></dt><dd>{_marked(record[1])}</dd>"
    yield from ["</dl>", ""]


def settings_page() -> str:
    """Return every setting with its kind, default, and what the source says of it."""
    published = tomllib.loads(configurations()["paper"].read_text())
    lines = [
        "# Settings",
        "",
        "A setting is given in a TOML file (`--config FILE`) or on the command line (`--set env.max_turns=4`); "
        "`harness1 config show` prints all of them as they apply. Sizes are in tokens, and a token of text that is "
        "packed is four characters, unless a setting says otherwise. `env`, `policy`, `index` and `reward` are part of "
        "hashes, so that a run says how it was made; `machine` is in none. Published values are those of Harness-1 "
        "(arXiv 2606.02373), which `--config paper` sets.",
        "",
    ]
    return "\n".join([*lines, *_settings(Config, "", notes(Config), published)])


def _settings(kind: type[Settings], prefix: str, told: dict[str, str], published: dict[str, Any]) -> Iterator[str]:
    """Yield a group's settings first, and then the groups in it."""
    groups = []
    for each in msgspec.structs.fields(kind):
        name = f"{prefix}{each.name}"
        if isinstance(each.type, type) and issubclass(each.type, Settings):
            groups.append((name, each.type, published.get(each.name, {})))
            continue
        default = each.default if each.default is not msgspec.NODEFAULT else each.default_factory()
        facts = [kind_of(each.type), f"default <code>{_value(default)}</code>"]
        if each.name in published:
            same = _value(published[each.name]) == _value(default)
            facts.append("as published" if same else f"published <code>{_value(published[each.name])}</code>")
        yield from [f"#### `{name}` {{: #{name} .setting }}", "", f'<p class="facts">{" · ".join(facts)}</p>', ""]
        yield from [_text(told.get(name, "")), ""]
    for name, below, values in groups:
        yield from [f"{'###' if prefix else '##'} {name} {{: #{name} }}", "", _text(told.get(name, "")), ""]
        yield from _settings(below, f"{name}.", told, values)


def kind_of(type_: Any) -> str:
    """Return what values a setting takes, in words."""
    if get_origin(type_) is Annotated:
        bare, meta = get_args(type_)
        bounds = [("at least", meta.ge), ("more than", meta.gt), ("at most", meta.le), ("less than", meta.lt)]
        return ", ".join([kind_of(bare), *(f"{word} {value:g}" for word, value in bounds if value is not None)])
    if get_origin(type_) is Literal:
        return " or ".join(f"<code>{escape(value)}</code>" for value in get_args(type_))
    if get_origin(type_) is tuple:
        first, *others = get_args(type_)
        of = f"any of {kind_of(first)}" if others == [...] else "; ".join(map(kind_of, (first, *others)))
        return "a list of texts" if (first, others) == (str, [...]) else f"a list: {of}"
    if get_origin(type_) is dict:
        return f"a table: a name and {kind_of(get_args(type_)[1]).replace(', ', ' of ')}"
    return {bool: "true or false", int: "an integer", float: "a number", str: "a text"}[type_]


def _value(value: Any) -> str:
    return escape(msgspec.json.encode(value).decode())


def _text(text: str) -> str:
    """Return plain text as Markdown that shows it: outside code, what could be a tag or emphasis is escaped."""
    parts = text.split("`")
    outside = [part.replace("<", "&lt;").replace("*", "\\*").replace("_", "\\_") for part in parts]
    return "`".join(part if number % 2 else outside[number] for number, part in enumerate(parts))


def _marked(text: str) -> str:
    """Return plain text with code between backticks as HTML."""
    parts = escape(text).split("`")
    return "".join(f"<code>{part}</code>" if number % 2 else part for number, part in enumerate(parts))


def python_page() -> str:
    """Return the page that mkdocstrings fills with the public names and the errors."""
    lines = [
        "# Python",
        "",
        "Every name below is imported from `harness1`, for example `from harness1 import SearchEnv`.",
    ]
    lines += ["What is in no `Raises` list raises nothing of this package.", "", "## Names", ""]
    for name in harness1.__all__:
        if name != "__version__":
            lines += [f"::: {_place(name)}", *_options(name), ""]
    lines += ["## Errors", "", "::: harness1.errors", "    options:", "      show_root_heading: false"]
    return "\n".join([*lines, "      filters: ['!^_', '!^optional', '!^MALFORMED']", ""])


def _place(name: str) -> str:
    """Return where a public name is defined. A module is its own place, and a plain value knows none: it is in the
    package's own interface."""
    value = getattr(harness1, name)
    if isinstance(value, ModuleType):
        return value.__name__
    return f"{getattr(value, '__module__', 'harness1.api')}.{name}"


def _options(name: str) -> list[str]:
    """Return options of a name: the members of settings are not shown, because they have a page of their own."""
    value = getattr(harness1, name)
    return ["    options:", "      members: false"] if isinstance(value, type) and issubclass(value, Settings) else []
