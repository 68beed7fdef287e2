"""A hosted model asked for its reasons: what it is shown, and what of its answers the environment gets."""

from __future__ import annotations

import pytest

from harness1.config import Curation, Env
from harness1.env.render import Context
from harness1.policy.policy import Decision
from harness1.policy.wrappers import ReasonedPolicy, asking
from harness1.records import Task, ToolCall
from harness1.tools.registry import Toolbox
from tests.support import Script, call, make_env, run

TASK = Task("t", "Where did the father of Ada Lovelace die?")


class Fixed(Script):
    """Makes the same decision at every turn and remembers what it was shown."""

    def __init__(self, decision: Decision) -> None:
        super().__init__()
        self.decision, self.shown = decision, list[Context]()
        self.pending: Decision | None = None

    def open(self, task: Task, seed: int) -> Fixed:  # type: ignore[override]
        return self

    async def act(self, context: Context) -> Decision:
        self.shown.append(context)
        return self.decision

    def fork(self) -> Fixed:
        return self


def decided(*actions: ToolCall, reasoning: str = "", env: Env = Env(), error: str | None = None) -> Decision:  # noqa: B008
    async def act() -> Decision:
        context = await make_env(env).reset(TASK)
        assert context is not None
        return await ReasonedPolicy(Fixed(Decision(actions, reasoning, parse_error=error))).open(TASK, 0).act(context)

    return run(act())


def test_every_tool_demands_a_reason_first_and_curation_a_tag() -> None:
    for spec in Toolbox.of(Env()).specs:
        shown = asking(spec).parameters
        assert next(iter(shown["properties"])) == "reasoning"
        assert shown["properties"]["reasoning"]["type"] == "string"
        assert shown["properties"].keys() == spec.parameters["properties"].keys() | {"reasoning"}
        wanted = {"reasoning", *spec.parameters["required"], *(["importance"] if spec.name == "curate" else [])}
        assert (set(shown["required"]), len(shown["required"])) == (wanted, len(wanted))
        assert "reasoning" not in spec.parameters["required"]


def test_where_there_are_no_tags_none_is_demanded() -> None:
    (curate,) = [spec for spec in Toolbox.of(Env(curation=Curation(tags=False))).specs if spec.name == "curate"]
    assert asking(curate).parameters["required"] == ["reasoning"]


def test_the_reason_becomes_the_reasoning_and_leaves_the_arguments() -> None:
    decision = decided(call("search_corpus", query="poet", reasoning=" The father is missing. "), reasoning="hm")
    assert decision.actions == (call("search_corpus", query="poet"),)
    assert decision.reasoning == "The father is missing."


def test_the_end_of_a_search_keeps_its_reason() -> None:
    decision = decided(call("end_search", reasoning="All is found."))
    assert (decision.actions, decision.reasoning) == ((call("end_search", reasoning="All is found."),), "All is found.")


@pytest.mark.parametrize("given", [{}, {"reasoning": ""}, {"reasoning": ["because"]}])
def test_what_was_said_beside_a_call_stands_where_no_reason_was_given(given: dict[str, object]) -> None:
    decision = decided(call("search_corpus", query="poet", **given), reasoning="said beside")
    assert (decision.actions, decision.reasoning) == ((call("search_corpus", query="poet"),), "said beside")


def test_of_several_calls_the_reason_is_that_of_the_one_carried_out() -> None:
    end, search = call("end_search", reasoning="one"), call("search_corpus", query="poet", reasoning="two")
    decision = decided(end, search, call("no_such_tool", reasoning="three"))
    assert decision.reasoning == "two"
    assert decision.actions == (end, call("search_corpus", query="poet"), call("no_such_tool"))


def test_forks_and_names_are_those_of_the_policy() -> None:
    inner = Fixed(Decision((call("search_corpus", query="poet", reasoning="who"),)))
    taught = ReasonedPolicy(inner)
    session = taught.open(TASK, 0)
    assert session.pending is None
    inner.pending = Decision(parse_error="cut")
    assert session.fork().pending == inner.pending
    assert (taught.name, taught.hash != inner.hash) == ("script", True)
    assert ReasonedPolicy(Script("x")).hash != taught.hash
