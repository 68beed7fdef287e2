"""What other installed packages add, found by the entry points in their metadata when a name is looked up.

A package lists what it adds in groups such as `harness1.tools` (`KINDS`). None of it is imported before it is asked for
by name, so that an installed package changes nothing for those who do not name it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from harness1.errors import UsageError
from harness1.plain import meant

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

KINDS: Mapping[str, str] = MappingProxyType(
    {
        "tools": "tool",
        "rewards": "reward term",
        "policies": "policy",
        "retrievers": "retriever",
        "formats": "chat format",
        "engines": "training engine",
    }
)
"""The word for one plugin of each kind; `harness1.KIND` is its group."""


def plugin_names(kind: str) -> tuple[str, ...]:
    """Return the names of a kind that installed packages add, sorted."""
    return tuple(_entries(kind))


def package_of(kind: str, name: str) -> str | None:
    """Return the packages that add a name, each with its version; None if none does."""
    return " and ".join(map(_package, _entries(kind).get(name, ()))) or None


def installed_plugins() -> dict[str, dict[str, str]]:
    """Return the package of each plugin, by kind and name; kinds without plugins are left out."""
    return packages_of({kind: plugin_names(kind) for kind in KINDS})


def packages_of(named: Mapping[str, Iterable[str]]) -> dict[str, dict[str, str]]:
    """Return the package of each plugin among some names, by kind and name; kinds without plugins are left out."""
    found = {kind: {name: package_of(kind, name) or "" for name in names} for kind, names in named.items()}
    kept = {kind: {name: package for name, package in each.items() if package} for kind, each in found.items()}
    return {kind: each for kind, each in kept.items() if each}


def find_plugin(kind: str, name: str, built_in: Collection[str] = ()) -> Any:
    """Import what a package adds under a name, and return it; None if no package does.

    Args:
        built_in: the names that are taken.

    Raises:
        UsageError: the name is built in, several packages add it, or it cannot be imported.
    """
    entries = _entries(kind).get(name, ())
    if not entries:
        return None
    owners = [*(["harness1"] if name in built_in else []), *map(_package, entries)]
    if len(owners) > 1:
        raise UsageError(f"{' and '.join(owners)} each have the {KINDS[kind]} {name!r}: a name has one owner")
    return _imported(kind, entries[0])


def load_plugin(kind: str, name: str, built_in: Collection[str] = ()) -> Any:
    """Do as `find_plugin`, but refuse a name that no package adds.

    Raises:
        UsageError: as `find_plugin`, or there is no such plugin.
    """
    names = plugin_names(kind)
    if name not in names:
        which = f"; those installed are {', '.join(names)}" if names else ""
        raise UsageError(f"no installed package adds the {KINDS[kind]} {name!r}{which}{meant(name, names)}")
    return find_plugin(kind, name, built_in)


def unfit(kind: str, name: str, why: str) -> UsageError:
    """Return the error for a plugin that is not what its kind demands."""
    return UsageError(f"{_place(kind, _entries(kind)[name][0])} {why}")


def refuse_missing(named: Mapping[str, Mapping[str, str]], maker: str) -> None:
    """Refuse to go on without plugins that something was made with.

    Args:
        named: their packages, as `packages_of` returned them.
        maker: what was made with them.

    Raises:
        UsageError: one is not installed.
    """
    for kind, packages in named.items():
        for name, package in packages.items():
            if kind in KINDS and name not in _entries(kind):
                raise UsageError(f"{maker} needs the {KINDS[kind]} {name!r} of {package}, which is not installed here")


@cache
def _entries(kind: str) -> Mapping[str, tuple[EntryPoint, ...]]:
    """Return the entry points of a kind by name. The metadata of all packages is read for it, once in a process."""
    from importlib.metadata import entry_points  # takes as long to import as this package

    found: dict[str, tuple[EntryPoint, ...]] = {}
    for each in sorted(entry_points(group=f"harness1.{kind}"), key=lambda entry: (entry.name, _package(entry))):
        found[each.name] = (*found.get(each.name, ()), each)
    return found


def _imported(kind: str, entry: EntryPoint) -> Any:
    try:
        return entry.load()
    except Exception as error:  # a module of others may raise anything
        raise UsageError(f"{_place(kind, entry)} cannot be imported: {type(error).__name__}: {error}") from error


def _place(kind: str, entry: EntryPoint) -> str:
    return f"the {KINDS[kind]} {entry.name!r} of {_package(entry)} ({entry.value})"


def _package(entry: EntryPoint) -> str:
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist else "an unnamed package"
