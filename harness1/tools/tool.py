"""Builds tools from typed generator functions over the working memory. A tool may yield one `Request` to the world
outside, receives the `Answer`, changes the memory, and returns an `Observation`. Its arguments after `memory` and `env`
are what the policy may pass; their annotations are the schema. A text tool of one's own needs neither: a replay has its
text."""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable, Generator
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, TypeVar

import msgspec

from harness1.config import Env
from harness1.errors import InfrastructureFault, UsageError
from harness1.memory.working_memory import WorkingMemory
from harness1.plugins import failure, is_interrupt
from harness1.records import DocId, Hit, Note, Observation, Ranking, Record, ToolCall, UnitId, Verdict
from harness1.retrieval.corpus import CHARACTERS_PER_TOKEN

SAID, FAILED = "answered", "tool_error"  # notes with what a text tool returned, and what it raised as a `ToolError`


class SearchFor(Record):
    """Run these queries concurrently, `k` hits each, without the chunks that are already stored."""

    queries: tuple[str, ...]
    k: int
    about: str = ""  # a text that the embeddings of the results are compared with; empty: none


class GrepFor(Record):
    """Find at most `limit` chunks, in corpus order, whose text matches an RE2 pattern."""

    pattern: str
    limit: int


class ReadDocument(Record):
    """All chunks of one document, in order."""

    doc_id: DocId


class Judge(Record):
    """Judge a claim against the text of each unit."""

    claim: str
    texts: tuple[tuple[UnitId, str], ...]


class Consult(Record):
    """Call a function that returns a text, of which at most `characters` are kept."""

    function: Callable[..., Any]
    arguments: dict[str, Any]
    characters: int


Request = SearchFor | GrepFor | ReadDocument | Judge | Consult


class Answer(Record):
    """The answer to a request: hits (each chunk once), rankings by query, verdicts, or a text; or why there is none."""

    hits: tuple[Hit, ...] = ()
    rankings: tuple[Ranking, ...] = ()
    verdicts: tuple[Verdict, ...] = ()
    bad_pattern: str | None = None
    unshown: int = 0  # parts of a document for which a recorded observation had no room
    text: str = ""
    refused: str | None = None


def answer_of(observation: Observation) -> Answer:
    """Return the answer that an observation was made from; replay gives it to the pure core in place of the world."""
    reasons = {observation.error.code: observation.error.data.get("reason")} if observation.error else {}
    fresh = tuple(verdict for verdict in observation.verdicts if not verdict.cached)
    unshown = sum(note.data["parts"] for note in observation.notes if note.code == "continues")
    text = "".join(note.data["text"] for note in observation.notes if note.code == SAID)
    bad, refused = reasons.get("bad_pattern"), reasons.get(FAILED)
    return Answer(observation.hits, observation.rankings, fresh, bad, unshown, text, refused)


Steps = Generator[Request, Answer, Observation]
ToolFunction = Callable[..., Steps | Observation]  # a generator if the tool asks the world something
NAME_CHARACTERS = 40


class ToolSpec(Record):
    """A tool as shown to a model; `parameters` is a JSON schema of type object."""

    name: str
    description: str
    parameters: dict[str, Any]


@dataclass(frozen=True)
class Needs:
    """Marks a parameter that exists only under a configuration, as `Annotated[T, Needs(condition)]`."""

    condition: Callable[[Env], bool]


F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Traits:
    """Properties of a tool beyond its schema; `@Traits(...)` above the function sets them."""

    shows: Literal["whole", "query", "pattern"] = "whole"  # or the sentences nearest to the query or pattern's words
    _: KW_ONLY
    discovers: bool = False  # True if it brings documents from the corpus: guidance sums them up
    curates: bool = False  # True if it edits the curated set: guidance counts the turns since
    frees: bool = False  # True if it makes room in a transcript

    def __call__(self, function: F) -> F:
        """Mark a tool's function with these traits."""
        function.traits = self  # type: ignore[attr-defined]
        return function


def traits_of(function: ToolFunction) -> Traits:
    """Return the traits that a function is marked with, or the defaults."""
    marked: Traits = getattr(function, "traits", PLAIN)
    return marked


PLAIN = Traits()


def one_line(name: str) -> str:
    """Cut a name that a policy made up to one short line, so that it cannot forge a line of an observation."""
    return " ".join(name[: 4 * NAME_CHARACTERS].split())[:NAME_CHARACTERS]


@dataclass(frozen=True)
class Tool:
    """A tool under one configuration: its schema, its traits, and how to run it."""

    spec: ToolSpec
    arguments: type[msgspec.Struct]
    function: ToolFunction
    traits: Traits = PLAIN

    def run(self, memory: WorkingMemory, env: Env, call: ToolCall) -> Steps:
        """Validate the arguments and run; bad arguments are an observation, never an exception."""
        try:
            arguments = msgspec.convert(call.arguments, self.arguments)
        except msgspec.ValidationError as error:
            data = {"reason": str(error)[:300], "parameters": ", ".join(self.spec.parameters["properties"])}
            return Observation(self.spec.name, error=Note("bad_arguments", data))
        result = self.function(memory, env, **msgspec.structs.asdict(arguments))
        return result if isinstance(result, Observation) else (yield from result)


def knows_memory(function: Callable[..., Any]) -> bool:
    """Return whether a tool works on the memory: its first parameters are `memory` and `env`."""
    return [*inspect.signature(function).parameters][:2] == ["memory", "env"]


def tool(function: F) -> F:
    """Mark a function of one's own as a tool, and return it unchanged. Its docstring and annotations are what a policy
    is told of it; it returns a text, or raises `ToolError` for a call that makes no sense.

    Raises:
        UsageError: it has no docstring, or a parameter without a type.
    """
    name = getattr(function, "__name__", repr(function))
    if not inspect.getdoc(function):
        raise UsageError(f"the tool {name} has no docstring: a policy reads it to know what the tool does")
    parameters = [*inspect.signature(function).parameters.values()]
    for parameter in parameters[2:] if knows_memory(function) else parameters:
        wrong, own = "", parameter.name
        if own in ("memory", "env"):
            wrong = f"calls a parameter {own!r}, as tools of the memory do: rename it"
        elif parameter.annotation is parameter.empty:
            wrong = f"does not say the type of {own!r}, as in {own}: str"
        elif parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            wrong = f"takes {parameter}, which has no schema: name each parameter"
        if wrong:
            raise UsageError(f"the tool {name} {wrong}")
    return function


def text_tool(function: Callable[..., Any]) -> ToolFunction:
    """Return the tool of a function that knows nothing of the memory and returns a text."""

    @functools.wraps(tool(function))
    def ask(memory: WorkingMemory, env: Env, **arguments: Any) -> Steps:
        room = CHARACTERS_PER_TOKEN * env.observation_limit(env.read.tokens)
        answer = yield Consult(function, arguments, room)
        if answer.refused is not None:
            return Observation(function.__name__, error=Note(FAILED, {"reason": answer.refused}))
        return Observation(function.__name__, notes=(Note(SAID, {"text": answer.text}),))

    return ask


def memory_tool(function: ToolFunction) -> ToolFunction:
    """Return the tool of a function of others that works on the memory; it raises InfrastructureFault if it fails."""

    @functools.wraps(function)
    def work(memory: WorkingMemory, env: Env, **arguments: Any) -> Steps:
        try:
            result = function(memory, env, **arguments)
            found: object = result if isinstance(result, Observation) else (yield from result)
            if isinstance(found, Observation):
                return found
            raise TypeError(f"it returned {type(found).__name__}, not an observation")
        except BaseException as error:
            trace = error.__traceback__
            closed = isinstance(error, GeneratorExit) and trace is not None and trace.tb_next is None  # raised here
            if closed or is_interrupt(error):
                raise
            raise InfrastructureFault(f"the tool {function.__name__} failed: {failure(error)}") from error

    return work


def build_tool(function: ToolFunction, env: Env) -> Tool:
    """Derive a tool from its function: its name, the first paragraph of its docstring, and its annotated parameters.
    Minimal instructions describe nothing. Raises UsageError: a type or a default has no place in a schema."""
    described = env.rendering.instructions != "minimal"
    hints = typing.get_type_hints(function, include_extras=True)
    fields: list[tuple[str, Any, Any]] = []
    for name, parameter in inspect.signature(function).parameters.items():
        needs = [extra for extra in getattr(hints.get(name), "__metadata__", ()) if isinstance(extra, Needs)]
        if name not in ("memory", "env") and all(need.condition(env) for need in needs):
            default = msgspec.NODEFAULT if parameter.default is inspect.Parameter.empty else parameter.default
            fields.append((name, hints[name], default))
    description = " ".join((inspect.getdoc(function) or "").split("\n\n")[0].split()) if described else ""
    struct = f"{function.__name__}_arguments"
    try:
        arguments = msgspec.defstruct(struct, fields, forbid_unknown_fields=True, kw_only=True)
        (_,), classes = msgspec.json.schema_components([arguments])
    except TypeError as error:
        raise UsageError(f"the tool {function.__name__} cannot be described to a policy: {error}") from error
    derived = classes.pop(struct)
    schema = {
        **({"$defs": classes} if classes else {}),
        "type": "object",
        "properties": derived["properties"],
        "required": derived["required"],
        "additionalProperties": False,
    }
    spec = ToolSpec(function.__name__, description, schema if described else _strip_descriptions(schema))
    return Tool(spec, arguments, function, traits_of(function))


def _strip_descriptions(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_strip_descriptions(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {name for name, part in schema.items() if name != "description" or not isinstance(part, str)}
    return {name: _strip_descriptions(part) for name, part in schema.items() if name in kept}
