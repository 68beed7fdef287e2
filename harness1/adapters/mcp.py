"""A server of the Model Context Protocol: an agent gets the harness's tools, with a working memory of its own; every
tool takes the name of a search, because the protocol of 2026-07-28 has no sessions."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from copy import deepcopy
from typing import TYPE_CHECKING, Any, cast

import msgspec

from harness1.adapters.driven import Searches, StepReply, read_text
from harness1.config import Config, Env
from harness1.data.indexing import Files
from harness1.env.environment import SearchEnv
from harness1.episodes.rollout import rollout
from harness1.episodes.single import question_task
from harness1.errors import InfrastructureFault, MissingExtra, UsageError
from harness1.eval.cited import Answerer
from harness1.models.dialects import fit_arguments
from harness1.plain import unbroken
from harness1.policy.registry import open_policy
from harness1.records import DocId, Status, ToolCall
from harness1.retrieval.protocol import RetrievalFault, Retriever, SearchRequest
from harness1.tools.registry import Toolbox

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from harness1.serve.service import Access

try:
    from mcp import MCPError, types
    from mcp.server import Server
except ImportError as error:  # also of an older version, which other packages bring
    raise MissingExtra("mcp", "mcp") from error

NAME = "harness1"
SEARCH = "search"
START = "start_search"
ASK = "ask"
INSTRUCTIONS = (
    "Find the documents that answer a question. Begin with start_search; pass the name that it returns as `search` to"
    " all other tools. Search, follow the leads that are offered, curate the documents that matter, and finish with"
    " end_search, which returns the curated set."
)
HITS = 5
BODY_BYTES = 256 << 10
"""Largest request."""
SNIPPET = 2000
"""Characters of a hit of `search`."""

Call = Callable[[str, Mapping[str, Any]], Awaitable[types.CallToolResult]]
Ask = Callable[[object], Awaitable[types.CallToolResult]]
"""Answers a question."""


def search_server(searches: Searches, env: Env, ask: Ask | None = None) -> Server[Any]:
    """Return a server whose tools are those of an environment, each with the name of a search as one more argument;
    with `ask`, also that."""

    async def call(name: str, arguments: Mapping[str, Any]) -> types.CallToolResult:
        if name == START:
            named, answer = await searches.start(arguments.get("question"))
            return _result(answer, named)
        given = fit_arguments(arguments, parameters[name])
        named = name_of(given.pop(SEARCH, ""))
        return _result(await searches.act(named, ToolCall(name, given)), named)

    specs = Toolbox.of(env).specs
    parameters = {spec.name: spec.parameters for spec in specs}
    named = {"type": "string", "description": f"The name that {START} returned."}
    tools = [_tool(START, "Begin a search. Returns its name.", "question")]
    for spec in specs:
        schema = deepcopy(spec.parameters)
        schema["properties"] = {SEARCH: named, **schema.get("properties", {})}
        schema["required"] = [SEARCH, *schema.get("required", ())]
        tools.append(types.Tool(name=spec.name, description=spec.description, input_schema=schema))
    return _server(tools, call, INSTRUCTIONS, ask)


def retrieval_server(
    retriever: Retriever, config: Config, files: Files = lambda _: None, ask: Ask | None = None
) -> Server[Any]:
    """Return a server with `search(query)` and `get_document(docid)`, which answer in JSON as those of BrowseComp-Plus
    do, so that other agents can use an index. A hit of a document that is a file has its path, too."""
    deadline = config.machine.call_deadline_s

    async def call(name: str, arguments: Mapping[str, Any]) -> types.CallToolResult:
        if name == "search":
            query = read_text(arguments.get("query"), "query")
            (found,) = await retriever.search([SearchRequest(query, HITS, deadline=deadline)])
            if isinstance(found, RetrievalFault):
                raise InfrastructureFault(found.message)
            hits = []
            for doc_id, chunk, score in ((hit.chunk.doc_id, hit.chunk, hit.score) for hit in found.hits):
                place = {"path": str(path)} if (path := files(doc_id)) else {}
                snippet = f"{chunk.title}\n{chunk.text}"[:SNIPPET]
                hits.append({"docid": doc_id, **place, "score": score, "snippet": snippet})
            return _json(hits)
        docid = name_of(arguments.get("docid"))
        chunks = await retriever.read(DocId(docid))
        if isinstance(chunks, RetrievalFault):
            raise InfrastructureFault(chunks.message)
        if not chunks:
            raise UsageError(f"there is no document {docid[:100]!r}")
        return _json({"docid": docid, "text": "\n".join([chunks[0].title, *(chunk.text for chunk in chunks)])})

    told = f"Search the corpus. Returns the {HITS} best documents with docid, score and snippet."
    read = _tool("get_document", "Return the full text of a document by its docid.", "docid")
    return _server([_tool("search", told, "query"), read], call, "Search a corpus and read its documents.", ask)


def asking(open_env: Callable[[], SearchEnv], answerer: Answerer, files: Files = lambda _: None) -> Ask:
    """Return what answers a question by a search of the scripted policy and a model."""

    async def ask(question: object) -> types.CallToolResult:
        env, task = open_env(), question_task(read_text(question, "question"))
        episode = await rollout(env, open_policy("scripted"), task)
        if episode.status is Status.INFRA_ERROR:
            raise InfrastructureFault(f"the search is invalid: {episode.error}")
        answer = await answerer.answer_episode(env, episode)
        text = "\n".join([answer.text, "", *(line for line, _ in answer.lines(files))])
        return _text(text, structured=answer.as_json(files))

    return ask


def name_of(given: object) -> str:
    """Return the name that a client gave; "", which nothing has, if it is no text."""
    return given if isinstance(given, str) else ""


def _tool(name: str, description: str, argument: str) -> types.Tool:
    schema = {"type": "object", "properties": {argument: {"type": "string"}}, "required": [argument]}
    return types.Tool(name=name, description=description, input_schema=schema)


def _server(tools: list[types.Tool], call: Call, instructions: str, ask: Ask | None) -> Server[Any]:
    if ask is not None:
        told = "Answer a question from the corpus, every sentence with the passages that it cites, which are checked."
        tools = [*tools, _tool(ASK, told, "question")]
    names = [tool.name for tool in tools]

    async def on_list(_: object, __: object) -> Any:
        return types.ListToolsResult(tools=tools)

    async def on_call(_: object, asked: Any) -> types.CallToolResult:
        if asked.name not in names:
            there = f"there is no tool {asked.name[:40]!r}; there are {', '.join(names)}"
            raise MCPError(types.INVALID_PARAMS, there)
        try:
            if asked.name == ASK and ask is not None:
                return await ask((asked.arguments or {}).get("question"))
            return await call(asked.name, asked.arguments or {})
        except (UsageError, InfrastructureFault) as error:
            return _text(str(error), is_error=True)

    return Server(NAME, instructions=instructions, on_list_tools=on_list, on_call_tool=on_call)


def _result(answer: StepReply, name: str) -> types.CallToolResult:
    told: dict[str, Any] = {SEARCH: name, "over": answer.curated is not None}
    text = answer.text
    if told["over"]:
        told |= {"stop_reason": answer.stop_reason, "convincing": answer.convincing}
        told["curated"] = msgspec.to_builtins(answer.curated)
    else:
        places = (f"{handle}: {unbroken(path)}\n" for handle, path in answer.files.items())
        text = f"search: {name}\n{text}{''.join(places)}"
    return _text(text, answer.failed, told | ({"files": answer.files} if answer.files else {}))


def _json(value: Any) -> types.CallToolResult:
    return _text(msgspec.json.encode(value).decode(), structured={"result": value})


def _text(text: str, is_error: bool = False, structured: Mapping[str, Any] | None = None) -> types.CallToolResult:
    content = [types.TextContent(type="text", text=text)]
    return types.CallToolResult(content=[*content], structured_content=structured, is_error=is_error)


Close = Callable[[], Awaitable[None]]
CHUNK = 1 << 16
"""Bytes of standard input that are read at once."""


def serve_stdio(server: Server[Any], close: Close | None = None) -> None:
    """Answer the client that started this process, until it closes standard input, or until SIGTERM or Ctrl-C."""
    from mcp.server.stdio import stdio_server

    async def until_ended() -> None:
        if (task := asyncio.current_task()) is not None:
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        try:
            # The package reads in a thread, which no signal ends.
            async with stdio_server(cast(Any, _lines(sys.stdin.fileno()))) as (read, write):
                await server.run(read, write, server.create_initialization_options())
        finally:
            if close is not None:
                await close()

    with suppress(asyncio.CancelledError):
        asyncio.run(until_ended())


async def _lines(file: int) -> AsyncIterator[str]:
    begun: list[bytes] = []
    loop, readable = asyncio.get_running_loop(), asyncio.Event()
    waits = not stat.S_ISREG(os.fstat(file).st_mode)
    while True:
        if waits:
            readable.clear()
            loop.add_reader(file, readable.set)
            try:
                await readable.wait()
            finally:
                loop.remove_reader(file)
        chunk = os.read(file, CHUNK)
        *ends, rest = chunk.split(b"\n")
        for end in ends:
            yield b"".join((*begun, end)).decode(errors="replace")
            begun.clear()
        begun.append(rest)
        if not chunk:
            break
    if last := b"".join(begun):
        yield last.decode(errors="replace")


def serve_http(
    server: Server[Any],
    access: Access,
    host: str,
    port: int,
    on_ready: Callable[[int], None] = lambda _: None,
    close: Close | None = None,
) -> None:
    """Answer clients at /mcp until SIGTERM or Ctrl-C. Raise UsageError if nothing can listen there."""
    from mcp.server.transport_security import TransportSecuritySettings

    from harness1.serve.server import serve
    from harness1.serve.service import Refused, ServiceLimits, guard

    # Who may call is checked by `access`, which knows the names of this server. What a client has begun is known by the
    # names of its searches: a session of the protocol would only be one more thing to leave behind.
    security = TransportSecuritySettings(enable_dns_rebinding_protection=False)
    app = server.streamable_http_app(
        host=host, transport_security=security, stateless_http=True, max_request_body_size=BODY_BYTES
    )

    def admit(scope: Scope) -> None:
        access.check(scope)
        if scope["method"] != "POST":  # this server has nothing to say unasked
            raise Refused(405, "requests are sent by POST", {"Allow": "POST"})

    @asynccontextmanager
    async def sessions() -> AsyncIterator[None]:
        async with server.session_manager.run():
            try:
                yield
            finally:
                if close is not None:
                    await close()

    under_way: set[asyncio.Future[None]] = set()

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        # The package ends a request whose client leaves; a cancelled one would fail, and discard its session.
        request = asyncio.ensure_future(app(scope, receive, send))
        under_way.add(request)
        request.add_done_callback(under_way.discard)
        await asyncio.shield(request)

    serve(guard(answer, admit), ServiceLimits(), host, port, on_ready, sessions)
