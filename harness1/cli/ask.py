"""harness1 ask: an answer to one's own question, with the passages that it rests on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

from rich.style import Style
from rich.text import Text
from typer import Argument, Option

from harness1.cli.options import ConfigFile, Json, Overrides, resolve
from harness1.cli.policies import PolicyName, open_setup
from harness1.cli.printing import print_json, put, say_torn
from harness1.cli.progress import Terminal
from harness1.data.indexing import files_of
from harness1.env.environment import SearchEnv
from harness1.eval.cited import ANSWER_TOKENS, TOKENS, open_answerer
from harness1.eval.cited import ask as ask_model


def ask(
    question: Annotated[str, Argument(help="The question.", metavar="QUESTION")],
    index: Annotated[str, Option("--index", "--retriever", help="An index, engine or FILE.py:NAME.", metavar="SPEC")],
    answerer: Annotated[str, Option(help="The model that answers.", metavar="openai:MODEL@URL|hf:MODEL")] = "",
    follow: Annotated[bool, Option("--follow", help="Go on from the last question: what it found is known.")] = False,
    tokens: Annotated[int, Option(help="Most tokens of passages for the model.", min=1)] = TOKENS,
    answer_tokens: Annotated[int, Option(help="Most tokens of an answer.", min=1)] = ANSWER_TOKENS,
    policy: PolicyName = "scripted",
    out: Annotated[Path | None, Option(help="Run folder; default runs/search-HASH.", metavar="RUN")] = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Answer a question from documents: a model's answer with the passages that it cites, or the passages themselves.

    A search comes first; then the answer is shown as it is written, and its citations, which are checked.

    Example: harness1 ask "Who founded the company that makes Velcro?" --index wiki.index"""
    setup = open_setup(question, index, policy, resolve(config, overrides, policy))
    model = open_answerer(answerer, setup.config, tokens, answer_tokens)
    console, files = Terminal(quiet=as_json), files_of(index)

    @contextmanager
    def watch(env: SearchEnv) -> Iterator[None]:
        with console.status("searching; the first time, the search is compiled"):
            yield

    written = (lambda _: None) if as_json else Writer()
    answer, out = ask_model(question, setup, model, out, follow, watch=watch, on_text=written, on_torn=say_torn)
    if as_json:
        print_json(answer.as_json(files) | {"run": str(out)})
    else:
        put("\n" if answer.model else answer.question)
        for line, path in answer.lines(files):  # each path alone on one, which a terminal that can opens at a click
            link = Style(link=path.as_uri()) if path else Style()
            console.print(Text(line, link), soft_wrap=True)


class Writer:
    """Is called with a text as it grows, and prints what is new of it."""

    def __init__(self) -> None:
        self._shown = ""

    def __call__(self, text: str) -> None:
        """Print what is new; all of it on another line, where a server failed on the way and was asked again."""
        if not text.startswith(self._shown):
            put("")
            self._shown = ""
        put(text[len(self._shown) :], end="", flush=True)
        self._shown = text
