"""harness1 help: every verb, or one of them."""

from __future__ import annotations

from typing import Annotated

from typer import Argument, Context

from harness1.cli.printing import put


def help_(
    context: Context,
    verb: Annotated[
        list[str] | None, Argument(help="The verb to explain; without one, all are listed.", metavar="VERB...")
    ] = None,
) -> None:
    """List every verb, or explain one: `harness1 help rl train` is `harness1 rl train --help`.

    Example: harness1 help
    """
    # Imported here, because the program imports this module.
    from harness1.cli.main import app

    program = context.find_root()
    if verb:
        app.main([*verb, "--help"], prog_name=program.info_name)
    formatter = program.make_formatter()
    app.format_commands(program, formatter, every=True)
    put(formatter.getvalue().strip("\n"))
