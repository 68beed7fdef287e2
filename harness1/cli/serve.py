"""harness1 serve: an index for other processes, other machines and other trainers; a model for other agents."""

from __future__ import annotations

from importlib.util import find_spec
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated

from typer import Option

from harness1.cli.options import ConfigFile, Overrides, resolve
from harness1.cli.printing import say, say_torn
from harness1.errors import MissingExtra
from harness1.redaction import without_password
from harness1.retrieval.open import open_retriever

Port = Annotated[int, Option("--port", help="0 lets the system choose one.", min=0, max=65535)]
Host = Annotated[str, Option("--host", help="The address to listen on.")]


def retrieve(
    index: Annotated[str, Option(help="An index folder, or the URI of an engine.", metavar="SPEC")],
    port: Port,
    host: Host = "127.0.0.1",
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Answer searches: Search-R1's POST /retrieve, and /search, /grep, /read, /get, /info and /health. Ends on SIGTERM.

    Example: harness1 serve retrieve --index wiki.index --port 8000
    """
    _require_extra()
    from harness1.serve.retrieve import RetrievalService
    from harness1.serve.server import serve

    settings = resolve(config, overrides)
    retriever = open_retriever(index, settings)
    _warn(host, "can search and read this index")

    def ready(bound: int) -> None:
        info = retriever.info
        print(
            f"{without_password(index)} at {_address(host, bound)}: {info.documents} documents,"
            f" index {info.index_hash[:12]}",
            flush=True,
        )

    service = RetrievalService(retriever, settings)
    serve(service.app, service.limits, host, port, ready)


def proxy(
    upstream: Annotated[
        str, Option(help="A model as for --policy (hf:PATH, ...), or a chat server's http://.../v1.", metavar="SPEC")
    ],
    record: Annotated[Path, Option(help="The run folder that records the calls.", metavar="RUN")],
    port: Port = 0,
    host: Host = "127.0.0.1",
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Answer POST /v1/chat/completions (OpenAI) and /v1/messages (Anthropic), recording every call. Ends on SIGTERM.

    An agent names its session by the header x-session-id, or by its API key: a key like episode-17 is stored as it is,
    any other only as a digest. A tool_choice that requires a call is only advice, unless policy.constrained is set.

    Example: harness1 serve proxy --upstream hf:models/qwen --record runs/agent --port 8001
    """
    _require_extra()
    from harness1.serve.proxy.opening import open_upstream
    from harness1.serve.proxy.record import recording
    from harness1.serve.proxy.service import ProxyService, proxy_limits
    from harness1.serve.server import serve

    settings = resolve(config, overrides)
    model = open_upstream(upstream, settings)
    _warn(host, "can use this model and write to this record")

    def ready(bound: int) -> None:
        where = _address(host, bound)
        print(f"{without_password(upstream)} at {where} (OpenAI: {where}/v1), recorded in {record}", flush=True)

    with recording(record, model.inputs) as recorder:
        say_torn(record, recorder.torn)
        service = ProxyService(model, recorder, proxy_limits(settings))
        serve(service.app, service.limits, host, port, ready)


def _require_extra() -> None:
    for package in ("starlette", "uvicorn", "httptools", "uvloop"):
        if find_spec(package) is None:
            raise MissingExtra(package, "serve")


def _warn(host: str, what: str) -> None:
    if not _is_loopback(host):
        say(f"whoever reaches {host} {what}: nobody is asked who they are")


def _address(host: str, port: int) -> str:
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False
