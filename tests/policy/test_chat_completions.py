"""A hosted model as a policy: what it is asked, what its answers mean, and who is to blame if they mean nothing."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness1.config import ChatPolicy, Config, Env, Machine
from harness1.data.open import open_source
from harness1.env.pieces import counter_of
from harness1.episodes.rollout import replay_episode, rollout
from harness1.errors import InfrastructureFault, Overflow, Refusal, Unreachable
from harness1.eval.metrics import failure_class, model_use
from harness1.http.model_endpoint import ModelEndpoint
from harness1.models.calls import NOT_EXECUTED
from harness1.models.served import ServedModel
from harness1.policy.language_model import FEW, INSTRUCTION, ChatCompletionsPolicy
from harness1.policy.policy import Decision
from harness1.policy.registry import open_policy
from harness1.policy.wrappers import ReasonedPolicy
from harness1.records import DocId, Episode, Gold, Sampling, Status, StopReason, Task, ToolCall
from harness1.retrieval.build import build_index
from harness1.reward import score
from harness1.reward.measures import measure_outcome
from harness1.rows.calls import calls_of, calls_to_train
from harness1.runs.journal import read_episodes
from tests.cli.commands import Ended, command_in_process
from tests.models.test_chat_messages import check
from tests.serving import imitating
from tests.support import END, call, chunk, curate, make_env, run, search, wide_corpus

TASK = Task("t", "Where did the father of Ada Lovelace die?")
RESERVE = 400
NONSENSE = "the secret nonsense of a faulty attempt"

Answer = dict[str, Any]


def answer(*calls: ToolCall | tuple[str, str], content: str | None = None, **fields: Any) -> Answer:
    """A completion with calls, of which a pair holds the raw text of the arguments."""
    listed = []
    for place, each in enumerate(calls):
        name, arguments = (each.name, json.dumps(each.arguments)) if isinstance(each, ToolCall) else each
        function = {"name": name, "arguments": arguments}
        listed.append({"id": f"id-{place}", "type": "function", "index": place, "function": function})
    message = {"role": "assistant", "content": content, "refusal": None, **fields}
    finish = "tool_calls" if listed else "stop"
    return {"id": "x", "choices": [{"index": 0, "message": message | {"tool_calls": listed}, "finish_reason": finish}]}


class Hosted:
    """An endpoint that answers from a list, then ends the episode; what is an exception is raised."""

    def __init__(self, *answers: Answer | Exception) -> None:
        self.answers, self.asked = list(answers), list[dict[str, Any]]()

    async def post(self, path: str, body: object, kind: type, ended: object = None) -> Any:
        assert path == "/chat/completions"
        self.asked.append(json.loads(msgspec.json.encode(body)))
        given = self.answers.pop(0) if self.answers else answer(END)
        if isinstance(given, Exception):
            raise given
        try:
            return msgspec.json.decode(json.dumps(given), type=kind)
        except msgspec.ValidationError as error:
            raise InfrastructureFault(str(error)) from error


def policy_of(hosted: Hosted, **settings: Any) -> ChatCompletionsPolicy:
    return ChatCompletionsPolicy(hosted, "gpt", RESERVE, ChatPolicy(**settings))


def episode_of(hosted: Hosted, seed: int = 0, **settings: Any) -> Episode:
    env = make_env(Env(generation_reserve=RESERVE), wide_corpus(20))
    return run(rollout(env, policy_of(hosted, **settings), TASK, seed=seed))


def decided(*answers: Answer, **settings: Any) -> tuple[Decision, Hosted]:
    """The decision at the first turn."""
    hosted, context = Hosted(*answers), run(make_env().reset(TASK))
    return run(policy_of(hosted, **settings).open(TASK, 0).act(context)), hosted


def test_a_request_declares_the_tools_and_demands_a_call() -> None:
    decision, hosted = decided(answer(search("poet")), temperature=0.0)
    (body,) = hosted.asked
    assert [message["role"] for message in body["messages"]] == ["system", "user"]
    assert [tool["function"]["name"] for tool in body["tools"]] == [spec.name for spec in make_env().toolbox.specs]
    names = ("model", "tool_choice", "temperature", "top_p", "max_tokens")
    assert [body[name] for name in names] == ["gpt", "required", 0.0, 1.0, FEW]
    assert body.keys() == {*names, "messages", "tools", "seed"}
    (made,) = decision.calls
    assert made.sampling == Sampling(0.0, 1.0, 0, FEW, body["seed"])
    assert (made.finish_reason, made.call_id, made.output_ids) == ("tool_calls", "1.0", ())
    assert made.t_end >= made.t_start > 0


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        (search("poet"), search("poet")),
        (("functions.search_corpus", '```json\n{"query": "poet",}\n```'), search("poet")),
        (("curate", json.dumps(json.dumps({"add_ids": '["D1"]'}))), curate(add_ids=["D1"])),
        (("end_search", ""), call("end_search")),
        (("end_search", "{}"), call("end_search")),
        (("no_such_tool", '{"x": 1}'), call("no_such_tool", x=1)),
    ],
)
def test_a_call_is_understood_where_its_meaning_is_clear(said: ToolCall | tuple[str, str], meant: ToolCall) -> None:
    decision, _ = decided(answer(said))
    assert (decision.actions, decision.parse_error, len(decision.calls)) == ((meant,), None, 1)


def test_arguments_may_come_as_an_object_or_not_at_all_and_calls_without_ids() -> None:
    given = answer(search("poet"))
    (listed,) = given["choices"][0]["message"]["tool_calls"]
    del listed["id"]
    for arguments, meant in (({"query": "war"}, search("war")), (None, call("search_corpus"))):
        listed["function"]["arguments"] = arguments
        assert decided(given)[0].actions == (meant,)


def answered(hosted: Hosted) -> list[bool]:
    """Whether each call of the first turn was told that it was not executed."""
    answers = [message["content"] for message in hosted.asked[1]["messages"] if message["role"] == "tool"]
    return [text == NOT_EXECUTED for text in answers]


def test_of_several_calls_each_is_answered_and_one_carried_out() -> None:
    hosted = Hosted(answer(END, search("river"), curate(add_ids=["D1"])))
    first = episode_of(hosted).turns[0]
    assert (first.action, first.ignored) == (search("river"), (END, curate(add_ids=["D1"])))
    names = [message["tool_call_id"] for message in hosted.asked[1]["messages"] if message["role"] == "tool"]
    assert (names, answered(hosted)) == (["id-0", "id-1", "id-2"], [True, False, True])
    inner = [{"recipient_name": "functions.end_search", "parameters": {}}]
    hosted = Hosted(answer(("multi_tool_use.parallel", json.dumps({"tool_uses": inner})), search("river")))
    assert episode_of(hosted).turns[0].action == search("river")
    assert answered(hosted) == [True, False]


def test_calls_that_a_server_does_not_tell_apart_get_ids() -> None:
    for ids in (["", ""], ["same", "same"], [None, "a"]):
        given = answer(END, search("river"))
        for listed, name in zip(given["choices"][0]["message"]["tool_calls"], ids, strict=True):
            listed["id"] = name
        hosted = Hosted(given)
        episode_of(hosted)
        check(hosted.asked[1]["messages"])
        assert answered(hosted) == [True, False]


def test_a_message_goes_back_as_it_came_with_its_thoughts() -> None:
    said = answer(search("river"), content="Let me see.", reasoning_content="Rivers.", reasoning=None)
    hosted = Hosted(said)
    assert episode_of(hosted).turns[0].reasoning == "Rivers."
    back = next(message for message in hosted.asked[1]["messages"] if message["role"] == "assistant")
    (listed,) = said["choices"][0]["message"]["tool_calls"]
    del listed["index"]
    kept = {"content": "Let me see.", "reasoning_content": "Rivers.", "tool_calls": [listed]}
    assert back == {"role": "assistant", **kept}


def test_reasoning_is_found_where_servers_put_it() -> None:
    for fields, reasoning in (
        ({"reasoning_content": " a ", "reasoning": "b", "content": "c"}, "a"),
        ({"reasoning_content": "", "reasoning": "b", "content": "c"}, "b"),
        ({"reasoning_content": None, "content": " c\n"}, "c"),
        ({"reasoning": {"odd": 1}, "content": [{"type": "text", "text": "x"}, {"type": "image"}]}, "x"),
        ({"reasoning": {"odd": 1}, "content": 3}, ""),
    ):
        assert decided(answer(search("poet"), **fields))[0].reasoning == reasoning


@pytest.mark.parametrize(
    ("faulty", "error"),
    [
        (answer(("search_corpus", NONSENSE)), "the arguments are not a JSON object"),
        (answer(search("war"), ("curate", '["D1"]')), "the arguments are not a JSON object"),
        (answer(content=NONSENSE), "there is no call"),
        (answer(("", "{}")), "there is no call"),
        (answer(("parallel", '{"tool_calls": []}')), "there is no call"),
        ({"choices": [{"message": {"content": None}, "finish_reason": "length"}]}, "the output was too long"),
    ],
)
def test_a_faulty_answer_is_asked_again_with_a_note_and_without_itself(faulty: Answer, error: str) -> None:
    hosted = Hosted(faulty, faulty, answer(search("river")), answer(search("war")))
    episode = episode_of(hosted)
    assert [turn.action for turn in episode.turns] == [search("river"), search("war"), END]
    first, second, third, after = [body["messages"] for body in hosted.asked[:4]]
    assert second == third == [*first, second[-1]]
    assert second[-1]["role"] == "user"
    assert second[-1]["content"].startswith(f"Your last output was not valid: {error}")
    assert second[-1]["content"].endswith(f". {INSTRUCTION}\n")
    assert NONSENSE not in json.dumps(hosted.asked)
    assert "not valid" not in json.dumps(after)
    assert episode.untrainable == "its model gives no token ids"
    assert not any(made.output_ids for made in calls_to_train(episode))
    assert replay_episode(episode, Env(generation_reserve=RESERVE)).difference is None
    recorded = [(made.call_id, made.attempt) for made in episode.turns[0].calls]
    assert recorded == [("1.0", 0), ("1.1", 1), ("1.2", 2)]
    seeds = [made.sampling.seed for made in calls_of(episode)]
    assert seeds == [body["seed"] for body in hosted.asked]
    assert len(set(seeds)) == len(seeds)


def test_after_the_last_attempt_the_episode_ends_by_its_policys_error() -> None:
    for retries in (0, 3):
        hosted = Hosted(answer(search("river")), *[answer(content=NONSENSE, reasoning="Lost.")] * 9)
        episode = episode_of(hosted, format_retries=retries)
        assert (episode.stop_reason, episode.status) == (StopReason.FORMAT_LIMIT, Status.POLICY_ERROR)
        failed = episode.turns[-1]
        assert (failed.action, failed.parse_error, failed.reasoning) == (None, "there is no call", "Lost.")
        assert [made.attempt for made in failed.calls] == list(range(retries + 1))
        assert len(hosted.asked) == retries + 2


def test_a_call_that_was_mended_goes_back_as_it_was_understood() -> None:
    mended = {
        '{"query": "poet",}': '{"query": "poet"}',
        '{"query": "a\nb"}': r'{"query": "a\nb"}',
        None: "{}",
        "": "{}",
    }
    for given, arguments in mended.items():
        hosted = Hosted(answer(("functions.search_corpus", given)))
        episode_of(hosted)
        back = next(message for message in hosted.asked[1]["messages"] if message["role"] == "assistant")
        assert back["tool_calls"][0]["function"] == {"name": "search_corpus", "arguments": arguments}


def test_no_name_goes_back_that_servers_refuse() -> None:
    for name in ("multi_tool_use.parallel", "search corpus!", "<|channel|>search", "x" * 99):
        hosted = Hosted(answer((name, '{"tool_calls": [{"name": "end_search", "arguments": {}}]}'), search("river")))
        episode_of(hosted)
        said = [message for message in hosted.asked[-1]["messages"] if message["role"] == "assistant"]
        names = [each["function"]["name"] for message in said for each in message["tool_calls"]]
        assert names == [each for each in names if re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", each)] != []


def test_a_prompt_longer_than_the_models_context_is_the_policys_failure_and_scores_0() -> None:
    said = "400 maximum context length is 8192"
    episode = episode_of(Hosted(answer(search("river")), answer(curate(add={"d1": "high"})), *[Overflow(said)] * 2))
    assert (episode.stop_reason, episode.status) == (StopReason.CONTEXT_OVERFLOW, Status.POLICY_ERROR)
    assert episode.error == said
    assert [turn.action and turn.action.name for turn in episode.turns] == ["search_corpus", "curate"]
    gold = Gold({DocId(str(episode.curated[0].unit_id)): 1})
    result = measure_outcome(episode, gold)
    assert (result.recall, result.set_size, result.trajectory_recall) == (0.0, 0, 1.0)
    assert score(episode, gold, Config()).reward.total == Config().reward.empty
    assert failure_class(episode.stop_reason, result) == "context"
    assert replay_episode(episode, Env(generation_reserve=RESERVE)).difference is None


def test_a_prompt_that_is_too_long_is_shortened_once_and_the_rules_are_kept() -> None:
    hosted = Hosted(answer(search("river")), Overflow("400 context size"), answer(search("war")))
    episode = episode_of(hosted)
    assert [turn.action for turn in episode.turns] == [search("river"), search("war"), END]
    refused, sent = (body["messages"] for body in hosted.asked[1:3])
    sizes = [sum(len(str(message["content"])) for message in each) for each in (refused, sent)]
    assert sizes[1] <= 0.71 * sizes[0]
    assert [message["role"] for message in sent] == [message["role"] for message in refused]
    assert sent[0] == refused[0]
    assert TASK.query in sent[1]["content"]
    assert [made.finish_reason for made in episode.turns[1].calls] == ["overflow", "tool_calls"]
    assert episode.turns[1].calls[0].text == "400 context size"
    assert model_use(episode)["failed_attempts"] == 0
    assert replay_episode(episode, Env(generation_reserve=RESERVE)).difference is None


def test_an_episode_says_how_its_tokens_were_counted_and_is_replayed_without_the_server() -> None:
    served = ServedModel("llama.cpp", 8192, (3.9, 2.0, 1.1))
    policy = ChatCompletionsPolicy(hosted := Hosted(), "gpt", RESERVE, served=served)
    assert counter_of(ReasonedPolicy(policy)) is policy.counter
    env = make_env(Env(generation_reserve=RESERVE), wide_corpus(20), counter=policy.counter)
    hosted.answers = [answer(search("river"))]
    episode = run(rollout(env, policy, TASK))
    assert (episode.hashes.counter, episode.counts) == ("characters/3.9,2.0,1.1", {})
    assert replay_episode(episode, Env(generation_reserve=RESERVE)).difference is None
    assert hosted.asked[0]["stream"]
    assert "stream" not in json.dumps(decided(answer(END))[1].asked[0]), "of an unknown server nothing is asked"


def test_a_server_that_refuses_what_is_added_is_asked_without_from_then_on() -> None:
    hosted = Hosted(Refusal("400 extra fields"), answer(search("river")))
    policy = ChatCompletionsPolicy(hosted, "gpt", RESERVE, served=ServedModel("llama.cpp"))
    run(rollout(make_env(Env(generation_reserve=RESERVE), wide_corpus(20)), policy, TASK))
    assert ["stream" in body for body in hosted.asked] == [True, False, False]


def test_a_slow_server_that_goes_on_takes_no_time_of_its_episode() -> None:
    class Slow(Hosted):
        async def post(self, *asked: Any) -> Any:
            await asyncio.sleep(0.1)
            return await super().post(*asked)

    for program, status in (("llama.cpp", Status.COMPLETED), ("vllm", Status.INFRA_ERROR)):
        policy = ChatCompletionsPolicy(Slow(answer(search("river"))), "gpt", RESERVE, served=ServedModel(program))
        env = make_env(Env(generation_reserve=RESERVE), wide_corpus(20))
        env.world.machine = Machine(episode_deadline_s=0.15)
        assert run(rollout(env, policy, TASK)).status is status


def test_a_fault_or_a_refusal_breaks_its_episode_alone_and_a_wrong_key_ends_everything() -> None:
    for bad in (InfrastructureFault("no answer"), Refusal("400 filtered"), {"choices": []}):
        hosted = Hosted(answer(search("river")), bad)
        episode = episode_of(hosted)
        assert (episode.status, len(episode.turns)) == (Status.INFRA_ERROR, 1)
        assert episode.error == str(bad) or bad == {"choices": []}
        assert episode_of(hosted).status is Status.COMPLETED
    with pytest.raises(Unreachable, match="401 wrong key"):
        episode_of(Hosted(Unreachable("401 wrong key", 401)))
    cost = episode_of(Hosted(answer(search("river")), answer(content=NONSENSE), InfrastructureFault("no answer")))
    assert [len(turn.calls) for turn in cost.turns] == [1, 1], "what a faulty attempt cost is kept"
    assert (cost.status, cost.turns[-1].action) == (Status.INFRA_ERROR, None)


def test_a_server_that_does_not_let_calls_be_demanded_is_asked_for_them_freely() -> None:
    refusal = Refusal("http://host: 400 Thinking mode does not support this tool_choice")
    hosted = Hosted(refusal, answer(search("river")), answer(content="Hm."), answer(search("war")))
    episode = episode_of(hosted)
    assert [turn.action for turn in episode.turns] == [search("river"), search("war"), END]
    assert [body["tool_choice"] for body in hosted.asked] == ["required", *["auto"] * 4]
    assert [len(turn.calls) for turn in episode.turns] == [1, 2, 1]


def test_seeds_follow_the_episode_and_a_fork_goes_on_by_itself() -> None:
    def seeds(seed: int) -> set[int]:
        hosted = Hosted(answer(search("river")))
        episode_of(hosted, seed)
        return {body["seed"] for body in hosted.asked}

    assert seeds(1) == seeds(1)
    assert not seeds(1) & seeds(2)
    hosted, env = Hosted(answer(search("river"), content="Mine.")), make_env()

    async def forked() -> None:
        session = policy_of(hosted).open(TASK, 0)
        decision = await session.act(await env.reset(TASK))
        twin, context = session.fork(), (await env.step(decision.actions, "")).context
        for each in (twin, session):
            await each.act(context)

    run(forked())
    first, second = (body["messages"] for body in hosted.asked[1:])
    assert first == second
    assert "Mine." in json.dumps(first)


def test_the_hash_names_model_settings_and_reserve_and_not_the_address() -> None:
    plain = policy_of(Hosted()).hash
    assert open_policy("openai:gpt@http://a/v1", {}, Config()).hash != plain
    one, other = (open_policy(f"openai:gpt@http://{host}/v1", {}, Config()).hash for host in "ab")
    assert one == other
    assert policy_of(Hosted(), temperature=0.5).hash != plain
    assert ChatCompletionsPolicy(Hosted(), "gpt-2", RESERVE).hash != plain


Served = Callable[[dict[str, Any]], tuple[int, bytes]]
"""What a server makes of a body."""


def well(body: dict[str, Any]) -> tuple[int, bytes]:
    """A server that searches, curates and ends, and demands what OpenAI demands of messages."""
    check(body["messages"])
    turns = sum(message["role"] == "assistant" for message in body["messages"])
    said = [answer(search("company founder"), END), answer(curate(add={"D1": "high"})), answer(END)]
    return 200, json.dumps(said[turns]).encode()


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> str:
    made = tmp_path_factory.mktemp("hosted") / "index"
    build_index(open_source("world:60").documents(), made, Config().index)
    return str(made)


@pytest.mark.service
def test_a_whole_episode_against_a_server() -> None:
    asked: list[tuple[str, str, dict[str, Any]]] = []

    def reply(method: str, path: str, body: bytes) -> tuple[int, bytes]:
        asked.append((method, path, json.loads(body)))
        return well(asked[-1][2])

    with imitating(reply) as url:
        policy = ChatCompletionsPolicy(ModelEndpoint(f"{url}/v1", "sk-key"), "gpt", RESERVE)
        for _ in range(2):  # each on an event loop of its own
            episode = asyncio.run(rollout(make_env(Env()), policy, TASK))
            assert (episode.status, len(episode.turns)) == (Status.COMPLETED, 3)
    assert {(method, path) for method, path, _ in asked} == {("POST", "/v1/chat/completions")}
    assert [body["seed"] for _, _, body in asked[:3]] == [body["seed"] for _, _, body in asked[3:]]


@pytest.fixture
def searched(
    index: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[Ended, list[dict[str, Any]]]]:
    """How `harness1 search` with a server ended, and what that was asked."""

    def search_by(served: Served, *options: str) -> tuple[Ended, list[dict[str, Any]]]:
        asked: list[dict[str, Any]] = []

        def reply(method: str, path: str, body: bytes) -> tuple[int, bytes]:
            if method == "GET":  # it says nothing of itself
                return 404, b"{}"
            asked.append(json.loads(body))
            return served(asked[-1])

        with imitating(reply) as url:
            words = ("search", "Who founded it?", "--index", index, "--policy", f"openai:gpt:20b@{url}/v1")
            secret = ("--set", "machine.model.key=sk-secret", "--out", str(tmp_path / "run"))
            return command_in_process(monkeypatch, capsys)(*words, *secret, *options), asked

    return search_by


@pytest.mark.service
def test_a_search_by_a_hosted_model_is_recorded(searched: Any, tmp_path: Path) -> None:
    ended, asked = searched(well, "--json")
    assert (ended.code, len(asked)) == (0, 3)
    shown = json.loads(ended.out)
    assert (shown["status"], shown["turns"], shown["error"], shown["parse_error"]) == ("completed", 3, None, None)
    (episode,) = read_episodes(tmp_path / "run")
    assert episode.untrainable == "its model gives no token ids"
    stage = (tmp_path / "run" / "stage.json").read_text()
    assert '"policy": "openai:gpt:20b@http' in stage
    assert "sk-secret" not in stage + (tmp_path / "run" / "episodes.jsonl").read_text()


@pytest.mark.service
def test_a_search_whose_model_never_calls_shows_what_it_wrote_and_fails(searched: Any, tmp_path: Path) -> None:
    written = (f"No call {number}: \x1b[31m{NONSENSE}" for number in range(9))
    served = lambda _: (200, json.dumps(answer(content=next(written))).encode())  # noqa: E731
    ended, asked = searched(served)
    assert (ended.code, len(asked)) == (1, 4)
    assert "No document was found" not in ended.out
    *_, before, last = ended.out.splitlines()
    assert before == "The policy gave no valid action in 4 attempts: there is no call"
    assert last == f"Its last output: No call 3: \\u001b[31m{NONSENSE}"
    (episode,) = read_episodes(tmp_path / "run")
    assert [made.text for made in calls_of(episode)] == [f"No call {at}: \x1b[31m{NONSENSE}" for at in range(4)]


@pytest.mark.service
@pytest.mark.parametrize(
    ("status", "body", "played", "says"),
    [
        (401, b'{"error": {"message": "wrong key sk-secret"}}', False, "401 wrong key ***"),
        (404, b"<html>no such page</html>", False, "404 <html>no such page"),
        (200, b"<html>welcome</html>", True, "unexpected answer"),
        (200, b'{"error": {"message": "overloaded"}}', True, "unexpected answer"),
        (200, b'{"choices": [{"message": null}]}', True, "unexpected answer"),
        (500, b"\xff\x00", True, "500"),
    ],
)
def test_a_server_that_answers_something_else_is_one_line_and_an_exit_code(
    searched: Any, tmp_path: Path, status: int, body: bytes, played: bool, says: str
) -> None:
    ended, asked = searched(lambda _: (status, body), "--set", "machine.attempts=2")
    assert (ended.code, len(asked)) == (3, 2 if played else 1)
    assert "No document was found" not in ended.out
    line = ended.err.strip()
    assert line.startswith("harness1: the episode is invalid: http://" if played else "harness1: http://")
    assert says in line
    assert "\n" not in line
    assert "sk-secret" not in line
    assert [episode.status for episode in read_episodes(tmp_path / "run")] == [Status.INFRA_ERROR] * played


def test_control_tokens_of_documents_reach_no_server_as_they_are() -> None:
    hosted = Hosted(answer(search("king castle")))
    env = make_env(chunks=[chunk("one", "The king built the castle. <|im_end|> It stands there.")])
    run(rollout(env, policy_of(hosted), TASK))
    sent = json.dumps(hosted.asked[1]["messages"])
    assert "< |im_end|>" in sent
    assert "<|im_end|>" not in sent
