"""A chat server as upstream, without a socket: which of its calls are examples, and what it is asked with."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness1.config import ChatPolicy, Config
from harness1.errors import Refusal
from harness1.serve.proxy import ProxyService
from harness1.serve.upstreams import ChatUpstream
from tests.proxying import ANTHROPIC_PATH, OPENAI_PATH, ask, recorded

WORDS = {"model": "m", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 20}
TOOL = {"type": "function", "function": {"name": "look"}}
Body = dict[str, Any]


def completion(output: tuple[int, ...] = (5, 6), **message: Any) -> Body:
    content = [{"logprob": -0.5} for _ in output]
    choice = {"message": {"content": "Hi.", **message}, "token_ids": output, "logprobs": {"content": content}}
    return {"choices": [choice], "prompt_token_ids": [1, 2]}


class Server:
    """Answers in place of a chat server's socket; `asked` has every body, those that were refused included."""

    def __init__(self, answer: Callable[[Body], Body] = lambda _: completion(), config: Config | None = None) -> None:
        self.asked: list[Body] = []
        self.answer = answer
        self.upstream = ChatUpstream("http://127.0.0.1:9/v1", "", config or Config())
        self.upstream._endpoint.post = self._post

    async def _post(self, path: str, body: Body, kind: type[Any]) -> Any:
        self.asked.append(body)
        return msgspec.json.decode(json.dumps(self.answer(body)), type=kind)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"temperature": 1, "top_p": 1.0, "top_k": 0, "presence_penalty": 0, "tool_choice": "none"}, None),
        ({"presence_penalty": 1.5, "min_p": 0.5}, "presence_penalty, min_p"),
        ({"logit_bias": {"5": 100}}, "logit_bias"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"guided_regex": "a+"}, "guided_regex"),
        ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
        ({"temperature": 0.3}, "may be raw"),
        ({"temperature": 0}, "may be raw"),
        ({"top_p": 0.9}, "may be raw"),
        ({"top_k": 5}, "may be raw"),
    ],
)
def test_a_call_is_an_example_only_if_its_record_says_how_it_was_sampled(
    tmp_path: Path, changes: Body, reason: str | None
) -> None:
    server = Server()
    (call,) = recorded(tmp_path, server.upstream, lambda service: ask(service, {**WORDS, **changes}))
    assert (call.status, call.output_ids) == (200, (5, 6))
    if reason is None:
        assert (call.untrainable, call.request, call.reply, call.as_call() is None) == (None, None, None, False)
    else:
        assert reason in str(call.untrainable)
        assert (call.request, call.as_call()) == (server.asked[0], None)


NO_IDS, NO_LOGPROBS = "no token ids", "no log probabilities"


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ({}, NO_IDS),
        ({"prompt_token_ids": [1, 2]}, NO_IDS),
        ({"prompt_token_ids": [1, 2], "token_ids": [3, 4]}, NO_LOGPROBS),
        ({"prompt_token_ids": [1, 2], "token_ids": [3, 4], "logprobs": [-1.0]}, "1 log probabilities for 2 tokens"),
        ({"prompt_token_ids": [1, 2], "token_ids": [3, 4], "logprobs": [-1.0, None]}, NO_LOGPROBS),
        ({"prompt_token_ids": [1, 2], "token_ids": [3, 4], "logprobs": [-1.0, -9999.0]}, NO_LOGPROBS),
        ({"prompt_token_ids": [1, 2], "token_ids": [3, 4], "logprobs": [-1.0, -0.5]}, None),
    ],
)
def test_an_upstream_without_ids_is_served_and_its_calls_are_no_examples(
    tmp_path: Path, answer: Body, reason: str | None
) -> None:
    content = [{"logprob": each} for each in answer.get("logprobs", ())]
    choice = {"message": {"content": "Hi.", "refusal": None}, "token_ids": answer.get("token_ids")}
    server = Server(lambda _: {**answer, "choices": [{**choice, "logprobs": {"content": content}}]})
    (call,) = recorded(tmp_path, server.upstream, lambda service: ask(service, {**WORDS, "user": "me"}))
    added = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "stream": False}
    assert server.asked == [{**WORDS, "user": "me", **added, "logprobs": True, "return_token_ids": True}]
    if reason is None:
        assert (call.untrainable, call.output_ids, call.output_logprobs) == (None, (3, 4), (-1.0, -0.5))
    else:
        assert reason in str(call.untrainable)
        assert (call.output_ids, call.output_logprobs, call.reply) == ((), None, {"content": "Hi."})


def test_a_setting_or_another_dialect_does_not_make_an_example_either(tmp_path: Path) -> None:
    server = Server(config=Config(policy=ChatPolicy(temperature=0.7)))
    (call,) = recorded(tmp_path / "a", server.upstream, lambda service: ask(service, WORDS))
    assert "may be raw" in str(call.untrainable)
    tool = {"name": "x", "input_schema": {}}
    asked = {**WORDS, "tools": [tool], "tool_choice": {"type": "any"}}
    (call,) = recorded(tmp_path / "b", Server().upstream, lambda service: ask(service, asked, ANTHROPIC_PATH))
    assert "tool_choice" in str(call.untrainable)


@pytest.mark.parametrize("token", [-1, 1 << 31, 1 << 70])
def test_ids_that_are_none_leave_a_record_without_them(tmp_path: Path, token: int) -> None:
    server = Server(lambda _: completion((5, token)))
    (call,) = recorded(tmp_path / "a", server.upstream, lambda service: ask(service, WORDS))
    assert (call.status, call.prompt_ids, call.output_ids, call.output_logprobs) == (200, (), (), None)
    assert "invalid token ids" in str(call.untrainable)
    assert (call.request, call.reply) == (server.asked[0], {"content": "Hi."})


def test_agents_are_not_confused_by_call_ids_that_a_server_uses_again(tmp_path: Path) -> None:
    called = {"id": "call_0", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    server = Server(lambda _: completion(tool_calls=[called]))
    answer = [{"role": "assistant", "tool_calls": [called]}, {"role": "tool", "tool_call_id": "call_0", "content": "x"}]
    asked = [{"role": "user", "content": "A"}]

    async def scene(service: ProxyService) -> None:
        for messages in (asked, [{"role": "user", "content": "B"}], asked + answer):
            await ask(service, {"messages": messages})
        assert not service._memory._said, "what is never shown again by its ids is not kept"

    calls = recorded(tmp_path, server.upstream, scene)
    assert len({call.session_id for call in calls}) == 3, "which of the first two went on, nobody knows"


CALLED = {"name": "look", "arguments": {"at": "x"}}


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"content": f"I look.\n<tool_call>{json.dumps(CALLED)}</tool_call>"}, "I look."),
        ({"content": [{"type": "text", "text": "I look."}, {"type": "text", "text": json.dumps(CALLED)}]}, "I look."),
        ({"content": None, "tool_calls": [{"function": {"name": "look", "arguments": {"at": "x"}}}]}, None),
        ({"content": "I look.", "tool_calls": [{"id": "", "function": CALLED}]}, "I look."),
        ({"content": "", "reasoning_content": f"So.<|tool_calls_section_begin|>{json.dumps(CALLED)}"}, None),
    ],
)
def test_calls_are_read_in_whatever_shape_a_server_leaves_them(tmp_path: Path, message: Body, text: str | None) -> None:
    server, given = Server(lambda _: completion(**message)), list[Body]()

    async def scene(service: ProxyService) -> None:
        answered = await ask(service, {**WORDS, "tools": [TOOL]})
        given.append(json.loads(answered.body)["choices"][0])

    (call,) = recorded(tmp_path, server.upstream, scene)
    (choice,) = given
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", text)
    (made,) = choice["message"]["tool_calls"]
    assert made["id"] == f"call_{call.call_id}_0"
    assert (made["function"]["name"], json.loads(made["function"]["arguments"])) == ("look", {"at": "x"})
    assert [(action.name, action.arguments) for action in call.actions] == [("look", {"at": "x"})]


def test_without_tools_a_call_in_a_text_is_a_text(tmp_path: Path) -> None:
    server = Server(lambda _: completion(content=json.dumps(CALLED)))
    (call,) = recorded(tmp_path, server.upstream, lambda service: ask(service, WORDS))
    assert call.actions == ()


def strict(*unknown: str) -> Callable[[Body], Body]:
    """A hosted server, which refuses the first argument that it does not know."""

    def answer(body: Body) -> Body:
        if name := next((each for each in unknown if each in body), None):
            said = "Use 'max_completion_tokens' instead." if name == "max_tokens" else ""
            raise Refusal(f"Unrecognized request argument supplied: {name}. {said}", 400)
        return {"choices": [{"message": {"content": "Hi."}}]}

    return answer


def test_a_server_that_refuses_what_the_proxy_adds_is_asked_without_it_from_then_on(tmp_path: Path) -> None:
    server = Server(strict("return_token_ids", "top_k", "max_tokens"))

    async def scene(service: ProxyService) -> None:
        for _ in range(2):
            assert (await ask(service, WORDS)).status == 200

    calls = recorded(tmp_path, server.upstream, scene)
    assert len(server.asked) == 5, "three refusals, and two answers"
    assert all("the server refuses return_token_ids, top_k" in str(call.untrainable) for call in calls)
    assert [(body.get("max_tokens"), body.get("max_completion_tokens")) for body in server.asked[3:]] == [
        (None, 20)
    ] * 2


def test_an_output_that_the_window_of_a_server_does_not_permit_is_as_long_as_it_permits(tmp_path: Path) -> None:
    def answer(body: Body) -> Body:
        if body.get("max_tokens", 0) > 8000:
            raise Refusal("This model's maximum context length is 8192 tokens. However, you requested 32020.", 400)
        return completion()

    server = Server(answer)

    async def scene(service: ProxyService) -> None:
        for most in (32_000, 100):
            await ask(service, {**WORDS, "max_tokens": most})

    calls = recorded(tmp_path, server.upstream, scene)
    assert [(call.status, call.unmet) for call in calls] == [(200, {"max_tokens": 32_000}), (200, {})]
    assert [body.get("max_tokens") for body in server.asked] == [32_000, None, 100]


def test_what_an_agent_asks_for_itself_is_never_left_out_and_a_refusal_that_goes_on_teaches_nothing(
    tmp_path: Path,
) -> None:
    """A message may repeat the whole request, and so name what is not at fault."""
    own = Server(strict("top_k"))
    (call,) = recorded(tmp_path / "own", own.upstream, lambda service: ask(service, {**WORDS, "top_k": 5}))
    assert (call.status, len(own.asked)) == (400, 1)

    def answer(body: Body) -> Body:
        if "odd" in body:
            raise Refusal(f"odd is not permitted in {body}", 400)
        return completion()

    server = Server(answer)

    async def scene(service: ProxyService) -> None:
        await ask(service, {**WORDS, "odd": 1})
        await ask(service, WORDS, OPENAI_PATH)

    calls = recorded(tmp_path / "odd", server.upstream, scene)
    assert [(call.status, call.untrainable) for call in calls] == [(400, None), (200, None)]
