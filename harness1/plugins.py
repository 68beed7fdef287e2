"""What others add, by name: a plugin of an installed package, which lists it in a group such as `harness1.tools`
(`KINDS`), or something of one's own at the top level of a file, as `FILE.py:NAME`, whose hash enters every hash that it
decides. None of it is imported before it is asked for: it changes nothing for those who do not name it."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import marshal
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache, partial
from importlib.machinery import SourceFileLoader
from itertools import chain
from pathlib import Path
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any

from harness1.errors import HarnessError, InstallationWarning, UsageError
from harness1.plain import file_digest, meant, printable

if TYPE_CHECKING:
    from importlib.metadata import Distribution, EntryPoint

KINDS: Mapping[str, str] = {
    "tools": "tool",
    "rewards": "reward term",
    "policies": "policy",
    "retrievers": "retriever",
    "formats": "chat format",
    "engines": "training engine",
    "readers": "reader of files",
}
"""The word for one plugin of each kind; `harness1.KIND` is its group."""
_IN_FILE = re.compile(r"(?s)(?!silent:)(?P<place>.+\.py):(?P<name>[^\W\d]\w*)")
_IN_SESSION = re.compile(r"(?P<place>__main__):(?P<name>[^\W\d]\w*)#(?P<code>[0-9a-f]{16})")
"""What was typed into a notebook has no file; its code is part of its name, so that a new version has a new name."""


_OWN = "harness1_own_"  # how the modules begin that files of one's own are imported as


def plugin_names(kind: str) -> tuple[str, ...]:
    """Return the names of a kind that installed packages add, sorted."""
    return tuple(_entries(kind))


def installed_plugins() -> dict[str, dict[str, str]]:
    """Return the package of each plugin that is installed, by kind and name; kinds without plugins are left out."""
    return packages_of({kind: plugin_names(kind) for kind in KINDS})


def packages_of(named: Mapping[str, Iterable[str]]) -> dict[str, dict[str, str]]:
    """Return the package of each plugin among some names, by kind and name, with its version; of a file its hash."""
    found: dict[str, dict[str, str]] = {}
    for kind, name in ((kind, name) for kind, names in named.items() for name in names):
        entries = () if is_own(name) else _entries(kind).get(name, ())
        if package := _package_of_own(name) if is_own(name) else " and ".join(map(_package, entries)):
            found.setdefault(kind, {})[name] = package
    return found


def find_plugin(kind: str, name: str, built_in: Collection[str] = ()) -> Any:
    """Import and return what a package adds under a name, or what `FILE.py:NAME` names; None if there is nothing. A
    plugin whose name is `built_in` is ignored, with a warning. Raises UsageError: several packages add the name, or it
    cannot be imported or found in its file."""
    entries = () if is_own(name) else _entries(kind).get(name, ())
    if entries and name in built_in:
        _warn(f"{_place(kind, entries[0])} is ignored: harness1 has one of that name")
        return None
    _refuse_several(kind, name, map(_package, entries))
    if not entries and not is_own(name):
        return None
    thing = load_own(name) if is_own(name) else import_added(entries[0].load, _place(kind, entries[0]))
    if thing is None:
        raise unfit(kind, name, "is None")
    return thing


def load_plugin(kind: str, name: str, built_in: Collection[str] = ()) -> Any:
    """Do as `find_plugin`, but raise UsageError also for a name that no package adds, or that is built in."""
    names = plugin_names(kind)
    if name not in names and not is_own(name):
        which = f"; those installed are {', '.join(names)}" if names else ""
        own_file = "; one of your own is FILE.py:NAME"
        raise UsageError(f"no installed package adds the {KINDS[kind]} {name!r}{which}{meant(name, names) or own_file}")
    if name in built_in:
        _refuse_several(kind, name, ["harness1", *map(_package, _entries(kind).get(name, ()))])
    return find_plugin(kind, name)


def open_added(kind: str, name: str, opener: Callable[..., Any], *given: Any) -> Any:
    """Return what the opener of a plugin makes of what it is given; a failure, but one of ours, is a UsageError."""
    try:
        return opener(*given)
    except BaseException as error:  # code of others may raise anything
        if isinstance(error, HarnessError) or is_interrupt(error):
            raise
        raise unfit(kind, name, f"failed: {failure(error)}") from error


def unfit(kind: str, name: str, why: str) -> UsageError:
    """Return the error for a plugin that is not what its kind demands."""
    return UsageError(f"{name if is_own(name) else _place(kind, _entries(kind)[name][0])} {why}")


def is_own(name: str) -> bool:
    """Return whether a name is one's own: `FILE.py:NAME`, or what `own_name` gave to something typed in a session."""
    return bool(_IN_FILE.fullmatch(name) or _IN_SESSION.fullmatch(name))


def short_name(name: str) -> str:
    """Return `NAME` of `FILE.py:NAME`, and other names as they are."""
    found = _IN_FILE.fullmatch(name) or _IN_SESSION.fullmatch(name)
    return found["name"] if found else name


def whole_name(name: str) -> str:
    """Return a name that does not depend on the current folder: the path of `FILE.py:NAME` becomes absolute."""
    found = _IN_FILE.fullmatch(name)
    return f"{Path(found['place']).expanduser().resolve()}:{found['name']}" if found else name


def identity(name: str) -> str:
    """Return what of a name enters hashes: the name in its file and the sha256 of the file's bytes, wherever it lies.
    Names of packages are returned as they are. Raises UsageError: the file cannot be read or imported."""
    if found := _IN_FILE.fullmatch(name):
        return f"{found['name']}@{_of_file(Path(found['place']).expanduser().resolve())[1]}"
    return name


def load_own(name: str) -> Any:
    """Return what `FILE.py:NAME` names. The file is imported once as long as it stays the same; a script that is
    running names things of its own without being run again. Raises UsageError: there is no such file, it cannot be
    imported, or it has no such name."""
    found = _IN_FILE.fullmatch(name)
    if found is None:
        return _of_session(name)
    path = Path(found["place"]).expanduser().resolve()
    module, _ = _of_file(path)
    missing = object()
    thing = import_added(partial(getattr, module, found["name"], missing), str(path))
    if thing is missing:
        raise UsageError(f"{path} has no {found['name']!r}{meant(found['name'], [*vars(module)])}")
    return thing


def own_name(thing: Any) -> str:
    """Return the name under which other processes find a function or class of one's own, as `load_own` takes it. Raises
    UsageError: it has none, because it is defined within a function or a class, or has been replaced."""
    name = getattr(thing, "__qualname__", type(thing).__qualname__)
    module = sys.modules.get(getattr(thing, "__module__", "") or "")
    if "<" in name or "." in name:
        raise UsageError(f"{name} is not at the top level of a file: define it there, so that it can be found by name")
    if module is None or getattr(module, name, None) is not thing:
        raise UsageError(f"{name} cannot be found by its name in {getattr(thing, '__module__', 'its module')}")
    if file := getattr(module, "__file__", None):
        return f"{Path(file).resolve()}:{name}"
    return f"__main__:{name}#{_code_digest(thing)}"


def name_here(thing: Any) -> str:
    """Return the name of `own_name`; of what other processes cannot find, one that holds in this process alone."""
    try:
        return own_name(thing)
    except UsageError:
        name = re.sub(r"\W", "", getattr(thing, "__qualname__", type(thing).__qualname__).rpartition(".")[2])
        return f"__main__:{name}#{_code_digest(thing)}"


def is_interrupt(error: BaseException) -> bool:
    """Return whether an error ends the work, whatever code it comes out of: Ctrl-C, or the end of the task that waits.
    Any other, that of `sys.exit` too, is a failure of that code."""
    import asyncio  # not before: it takes as long to import as this package

    if not isinstance(error, asyncio.CancelledError):
        return isinstance(error, KeyboardInterrupt)
    with suppress(RuntimeError):  # there is no event loop in this thread
        return bool((task := asyncio.current_task()) and task.cancelling())
    return False


@contextmanager
def _as_exception() -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        if isinstance(error, Exception) or is_interrupt(error):
            raise
        raise RuntimeError(failure(error)) from error


async def call_added(function: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """Return what a function of others gives, called in a thread if it is no coroutine function; what would end the
    process or the event loop there, as `sys.exit` does, is raised as RuntimeError."""
    import asyncio

    if inspect.iscoroutinefunction(function):
        with _as_exception():
            return await function(*given, **named)
    return await asyncio.to_thread(_as_exception()(function), *given, **named)


def failure(error: BaseException) -> str:
    """Return what went wrong in code of one's own in one line, with the place."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{_describe(error)} ({frames[-1].filename}:{frames[-1].lineno})"


def _describe(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except KeyboardInterrupt:
        raise
    except BaseException:  # noqa: BLE001 - its text is of others, too, and so may be the name of its type
        return type.__repr__(type(error)).split("'")[1].rpartition(".")[2]


def is_of_session(name: str) -> bool:
    """Return whether a name stands for something that was typed into this process and is in no file."""
    return bool(_IN_SESSION.fullmatch(name))


def refuse_missing(named: Mapping[str, Mapping[str, str]], maker: str) -> None:
    """Raise UsageError if a plugin is not there that `maker` was made with; `named` is as `packages_of` returned it."""
    for kind, packages in named.items():
        for name, package in packages.items():
            if is_own(name):
                if package != _package_of_own(name):
                    raise UsageError(f"{maker} needs {name} as it was ({package}): it has changed, or is not there")
            elif kind in KINDS and name not in _entries(kind):
                raise UsageError(f"{maker} needs the {KINDS[kind]} {name!r} of {package}, which is not installed here")


def _package_of_own(name: str) -> str:
    found = _IN_FILE.fullmatch(name)
    return f"sha256 {file_digest(Path(found['place']))}" if found else "a session"


def _of_file(path: Path) -> tuple[ModuleType, str]:
    """Import a file as it is now, and return it with its sha256. Raises UsageError: there is no such file, or it is a
    module of this process that has been edited since."""
    digest = file_digest(path)
    if not digest:
        raise UsageError(f"{path}: no such file")
    for module in [*sys.modules.values()]:
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and not module.__name__.startswith(_OWN) and _is_at(file, path):
            if digest != _first_digest(path):
                raise UsageError(f"{path} has changed since this process imported it: start the process again")
            return module, digest
    return _import_file(path, digest), digest


@cache
def _is_at(file: str, path: Path) -> bool:
    """Return whether the file of a module is the one at a resolved path, which is asked of all modules each time."""
    found = Path(file)
    return (found.name == path.name or found.is_symlink()) and found.resolve() == path


@cache
def _first_digest(path: Path) -> str:
    return file_digest(path)


class _FromSource(SourceFileLoader):
    """Compiles a file as it is. Cached bytecode is told by its second and its size, so that a quick edit is missed."""

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)


@cache
def _import_file(path: Path, digest: str) -> ModuleType:
    """Import a file. What lies beside it can be imported while it is."""
    name = f"{_OWN}{path.stem}_{digest[:16]}"
    spec = importlib.util.spec_from_file_location(name, path, loader=_FromSource(name, str(path)))
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))
    try:
        import_added(partial(spec.loader.exec_module, module), str(path))
    except UsageError:
        del sys.modules[spec.name]
        raise
    finally:
        with suppress(ValueError):  # what the file did to the path itself is its own affair
            sys.path.remove(str(path.parent))
    return module


def _of_session(name: str) -> Any:
    found = _IN_SESSION.fullmatch(name)
    thing = getattr(sys.modules["__main__"], found["name"], None) if found else None
    if found is None or thing is None:
        raise UsageError(f"{short_name(name)} was typed into another session: put it in a file, FILE.py:NAME")
    if _code_digest(thing) != found["code"]:
        raise UsageError(f"{found['name']} was defined anew since: make what uses it again")
    return thing


def _code_digest(thing: Any) -> str:
    thing = getattr(thing, "__func__", thing)
    functions = [thing] if inspect.isfunction(thing) else filter(inspect.isfunction, vars(thing).values())
    return hashlib.sha256(b"".join(marshal.dumps(each.__code__) for each in functions)).hexdigest()[:16]


def _entries(kind: str) -> Mapping[str, tuple[EntryPoint, ...]]:
    """Return the entry points of a kind by name."""
    return _added().get(f"harness1.{kind}", {})


@cache
def _added() -> Mapping[str, Mapping[str, tuple[EntryPoint, ...]]]:
    """Return the entry points of all kinds, by group and name. All packages are looked through for them, once in a
    process; one whose metadata is broken adds nothing, with a warning."""
    from importlib.metadata import distributions  # takes as long to import as this package

    named: dict[str, list[EntryPoint]] = {}  # by the name of the package, of which the first on the path counts
    seen = set[str]()
    for package in distributions():
        name = _normalised(package)
        if name in seen:
            continue
        seen.add(name)
        try:
            if "harness1." in (package.read_text("entry_points.txt") or ""):
                ours = [each for each in package.entry_points if each.group.startswith("harness1.")]
                named.setdefault(package.name, ours)
        except (ValueError, TypeError, AttributeError, KeyError, OSError) as error:
            place = getattr(package, "_path", "a package")
            _warn(f"the plugins of {place} are ignored: {type(error).__name__}: {error}")
    found: dict[str, dict[str, tuple[EntryPoint, ...]]] = {}
    for each in sorted(chain(*named.values()), key=lambda entry: (entry.name, _package(entry))):
        names = found.setdefault(each.group, {})
        names[each.name] = (*names.get(each.name, ()), each)
    return found


def _warn(line: str) -> None:
    warnings.warn(printable(line), InstallationWarning, stacklevel=3)


def _normalised(package: Distribution) -> str:
    with suppress(ValueError, TypeError, AttributeError, KeyError, OSError):  # broken, or without a name
        # By the name of its folder, as importlib.metadata tells copies apart: no METADATA is parsed.
        return str(getattr(package, "_normalized_name", "") or package.name)
    return str(getattr(package, "_path", "a package"))


def _refuse_several(kind: str, name: str, owners: Iterable[str]) -> None:
    owners = [*owners]
    if len(owners) > 1:
        raise UsageError(f"{' and '.join(owners)} each have the {KINDS[kind]} {name!r}: a name has one owner")


def import_added(load: Callable[[], Any], place: str) -> Any:
    """Return what is loaded from code of others; raise UsageError, which begins with `place`, if that fails."""
    try:
        return load()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a module of others may raise anything, or end the process
        raise UsageError(f"{place} cannot be imported: {_describe(error)}") from error


def _place(kind: str, entry: EntryPoint) -> str:
    return f"the {KINDS[kind]} {entry.name!r} of {_package(entry)} ({entry.value})"


def _package(entry: EntryPoint) -> str:
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist else "an unnamed package"
