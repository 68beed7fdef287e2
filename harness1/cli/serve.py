"""harness1 serve: an index for other processes, other machines and other trainers."""

from __future__ import annotations

import asyncio
import sys
from ipaddress import ip_address
from typing import Annotated

import typer

from harness1.cli.options import ConfigFile, Overrides, resolve
from harness1.retrieval.engines import open_retriever
from harness1.retrieval.http_client import without_password
from harness1.serve.server import serve

app = typer.Typer(help="Serve over HTTP.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Serve over HTTP."""


@app.command()
def retrieve(
    index: Annotated[str, typer.Option("--index", help="An index folder, or the URI of an engine.", metavar="SPEC")],
    port: Annotated[int, typer.Option("--port", help="0 lets the system choose one.", min=0, max=65535)],
    host: Annotated[str, typer.Option("--host", help="The address to listen on.")] = "127.0.0.1",
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Answer searches: Search-R1's POST /retrieve, and /search, /grep, /read, /get, /info and /health. Ends on SIGTERM.

    Example: harness1 serve retrieve --index wiki.index --port 8000
    """
    settings = resolve(config, overrides)
    retriever = open_retriever(index, settings)
    if not _is_loopback(host):
        print(
            f"harness1: whoever reaches {host} can search and read this index: nobody is asked who they are",
            file=sys.stderr,
        )

    def ready(bound: int) -> None:
        info = retriever.info
        where = f"http://{f'[{host}]' if ':' in host else host}:{bound}"
        print(
            f"{without_password(index)} at {where}: {info.documents} documents, index {info.index_hash[:12]}",
            flush=True,
        )

    asyncio.run(serve(retriever, settings, host, port, ready))


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
