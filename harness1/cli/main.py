"""The entry point: verbs, and errors in one line. Exit codes: 0 done, 1 the result is negative (a replay that differs),
2 wrong use or a damaged file, 3 infrastructure fault or a server that cannot be reached, 130 Ctrl-C."""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
import threading
import tomllib
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from traceback import walk_tb
from typing import Annotated, Any

import typer
from typer import Argument, Context
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from harness1 import __version__
from harness1.errors import InfrastructureFault, InstallationWarning, Unreachable, UsageError
from harness1.plain import printable, without_secrets

PATIENCE_S = 0.5  # seconds that an interrupted verb may take to end without an answer


@contextmanager
def answer_interrupts() -> Iterator[None]:
    """Print that Ctrl-C was heard, unless the work ends at once. Handlers of the signal stay as they are: the
    interpreter writes its number to a pipe, which a thread reads even while the main thread is in one long call."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    ended = threading.Event()

    def listen() -> None:
        said = False
        while numbers := os.read(reader, 64):  # nothing, once the pipe is closed
            if signal.SIGINT in numbers and not said and not ended.wait(PATIENCE_S):
                from harness1.cli.printing import say

                say("stopping; what is at work is ended first")
                said = True

    thread = threading.Thread(target=listen, daemon=True)
    former = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        signal.set_wakeup_fd(former)
        os.close(writer)
        thread.join()
        os.close(reader)


@contextmanager
def say_warnings() -> Iterator[None]:
    """Print a warning about the installation as a line of this program; others are shown as they were."""
    with warnings.catch_warnings():
        shown = warnings.showwarning

        def show(message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None) -> None:
            if not issubclass(category, InstallationWarning):
                return shown(message, category, filename, lineno, file, line)
            from harness1.cli.printing import say

            return say(str(message))

        warnings.showwarning = show
        yield


Misuse: Any = typer.BadParameter.__base__
"""The error of wrong arguments, which are repeated: they may be names of files."""


class Verb(TyperCommand):
    """A verb, imported when it is run or asked for its help. `more`: verbs that a first argument names instead."""

    def __init__(self, name: str, line: str, target: str, more: Mapping[str, Verb]) -> None:
        super().__init__(name, help=line, rich_markup_mode=None)
        self.target, self.more = target, more

    def get_short_help_str(self, limit: int = 0) -> str:
        """Return the line in full: in a list it is wrapped, not cut."""
        return str(self.help)

    def load(self) -> Any:
        """Import the verb's function, `module:function` below `harness1.cli`, and return its command."""
        module, _, function = self.target.partition(":")
        verb = typer.Typer(add_completion=False, rich_markup_mode=None)
        verb.command(self.name)(getattr(import_module(f"harness1.cli.{module}"), function))
        command: Any = get_command(verb)
        if self.more:  # a shell completes the first argument to the verbs that take over there, too
            first = next(each for each in command.params if each.param_type_name == "argument")
            files, verbs = first.shell_complete, TyperGroup(commands=dict(self.more), rich_markup_mode=None)
            first.shell_complete = lambda ctx, typed: [
                *verbs.shell_complete(typer.Context(verbs), typed),
                *files(ctx, typed),
            ]
        return command

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Parse the arguments as the imported verb does, or the one that the first of them names."""
        if args and args[0] in self.more:
            return self.more[args[0]].make_context(f"{info_name} {args[0]}", args[1:], parent, **extra)
        return self.load().make_context(info_name, args, parent, **extra)


class Verbs(TyperGroup):
    """A group of verbs, from a table like `verbs.toml`. Typer's own group would end an interrupted verb silently."""

    def __init__(self, name: str, line: str, table: Mapping[str, Any], **more: Any) -> None:
        verbs: list[Verb | Verbs] = []
        for verb, entry in table.items():
            below = entry.get("verbs", {})
            if "run" in entry:
                also = {each: Verb(each, inner["help"], inner["run"], {}) for each, inner in below.items()}
                verbs.append(Verb(verb, entry["help"], entry["run"], also))
            else:
                verbs.append(Verbs(verb, entry["help"], below))
        super().__init__(name=name, help=line, commands=verbs, no_args_is_help=True, rich_markup_mode=None, **more)
        self._table = table

    def format_commands(self, ctx: Any, formatter: Any, every: bool = False) -> None:
        """Write the verbs under their headings; with `every`, further ones and those of groups, too."""
        listed: dict[str, list[tuple[str, str]]] = {}
        for name, entry in self._table.items():
            if every or not entry.get("further"):
                rows = listed.setdefault(entry.get("for", "Commands"), [])
                rows.append((name, entry["help"]))
                below = entry.get("verbs", {}) if every else {}
                rows += [(f"{name} {each}", inner["help"]) for each, inner in below.items()]
        for heading, rows in listed.items():
            with formatter.section(heading):
                formatter.write_dl(rows)

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        """Parse the arguments; raise UsageError for one that is not UTF-8, because records are."""
        for word in args:
            try:
                word.encode()
            except UnicodeEncodeError as error:
                raise UsageError(f"the argument {word} is not UTF-8") from error
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run a verb. Report an interrupt with the notes that the verb added to it."""
        try:
            return super().invoke(ctx)
        except Misuse as error:
            error.message = printable(error.message)
            raise
        except KeyboardInterrupt as interrupt:
            sys.exit(_fail("; ".join(["interrupted", *getattr(interrupt, "__notes__", ())]), 130))


def _show_version(asked: bool) -> None:
    if asked:
        from harness1.cli.printing import put

        put(f"harness1 {__version__}")
        raise typer.Exit


def _options() -> Any:
    """Return the options of the program itself: its version, and the completion of a shell."""
    program = typer.Typer(rich_markup_mode=None)

    @program.callback()
    def options(
        version: Annotated[
            bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
        ] = False,
    ) -> None: ...

    return get_command(program).params


app = Verbs(
    "harness1",
    "Find evidence in your own documents over several searches; measure, train and serve what searches.",
    tomllib.loads(Path(__file__).with_name("verbs.toml").read_text()),
    params=_options(),
    epilog="`harness1 help` lists every verb; `harness1 VERB --help` explains one.",
    context_settings={"help_option_names": ["--help", "-h"]},
)


def run() -> None:
    """Run the command line of this process."""
    with _unbreakable("stdout"), _unbreakable("stderr"):
        try:
            try:
                with answer_interrupts(), say_warnings():
                    app()
            finally:
                _flush("stdout")
        except (InfrastructureFault, Unreachable) as error:
            sys.exit(_fail(str(error), 3))
        except UsageError as error:
            sys.exit(_fail(str(error), 2))
        except SystemExit as error:
            # One's own code may end the process wherever it is asked for an attribute: that is its failure.
            modules = [str(frame.f_globals.get("__name__", "")) for frame, _ in walk_tb(error.__traceback__)]
            if modules[-1].partition(".")[0] not in ("harness1", "typer", "click"):
                from harness1.plugins import failure  # not before: no verb may need it

                sys.exit(_fail(f"code of others ended the command: {failure(error)}", 2))
            raise
        except OSError as error:  # of any argument or setting that names a path
            if error.errno != errno.ENAMETOOLONG:
                raise
            sys.exit(_fail(f"{str(error.filename)[:80]}...: {error.strerror}", 2))


def _flush(name: str) -> None:
    """Write out what was printed to a stream; nothing if it is closed."""
    stream = getattr(sys, name)
    if stream is not None:
        stream.flush()


class _Outlet(io.FileIO):
    """A file descriptor that discards what is written to it once its reader is gone, or once writing failed."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            if not isinstance(error, BrokenPipeError):
                raise InfrastructureFault(f"the output cannot be written: {error.strerror}") from error
            return super().write(data)


@contextmanager
def _unbreakable(name: str) -> Iterator[None]:
    """Let neither a closed pipe nor an odd character break a standard stream: where a reader such as `head` went early,
    the verb ends its work, and the rest of its output is lost; what cannot be encoded is escaped."""
    stream = getattr(sys, name)
    try:
        number = stream.fileno()
    except (AttributeError, OSError):  # the process was started without it, or it is no file
        yield
        return
    stream.flush()
    lines = stream.isatty() or name == "stderr"
    outlet = io.BufferedWriter(_Outlet(number, "wb", closefd=False))
    setattr(sys, name, io.TextIOWrapper(outlet, stream.encoding, "backslashreplace", line_buffering=lines))
    try:
        yield
    finally:
        _flush(name)
        setattr(sys, name, stream)


def _fail(message: str, code: int) -> int:
    from harness1.cli.printing import say

    say(without_secrets(message))
    return code


def help_(
    context: Context,
    verb: Annotated[list[str] | None, Argument(help="The verb to explain; default: all.", metavar="VERB...")] = None,
) -> None:
    """List every verb, or explain one: `harness1 help rl train` is `harness1 rl train --help`.

    Example: harness1 help"""
    from harness1.cli.printing import put

    program = context.find_root()
    if verb:
        app.main([*verb, "--help"], prog_name=program.info_name)
    formatter = program.make_formatter()
    app.format_commands(program, formatter, every=True)
    put(formatter.getvalue().strip("\n"))
