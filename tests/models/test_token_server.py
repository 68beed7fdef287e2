"""Servers of token ids: what they are asked, what of their answers is believed, and when their weights change."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from harness1.errors import InfrastructureFault, MissingExtra, Refusal, Unreachable, UsageError
from harness1.http.loop_thread import LoopThread
from harness1.http.model_endpoint import ModelEndpoint
from harness1.model_folder import open_tensors
from harness1.models.backend import Grammar, SampledOutput, Sleeper
from harness1.models.token_server import SglangServer, VllmServer
from harness1.models.transformers_backend import TransformersBackend
from harness1.models.vllm_engine import VllmBackend
from harness1.models.weight_gate import WeightGate, check_same_shapes, weight_shapes
from harness1.records import Sampling
from tests.models.test_adapters import save_adapters
from tests.support import in_loop, run
from tests.tiny_models import save_tiny_model

PROMPT = (1, 5, 9)
STOP = 2
IDS, LOGPROBS = [7, 8, STOP], [-0.5, -1.25, -0.125]
SAMPLING = Sampling(max_tokens=4, stop_ids=(STOP,), seed=11)
Reply = Callable[[str, dict[str, Any]], object]


class FakeEndpoint:
    """A `ModelEndpoint` whose server is a function; an exception that the function gives is raised. It serves the base
    of the adapters here."""

    url = "http://server"
    client = SimpleNamespace(tell=lambda path, body: None)

    def __init__(self, reply: Reply) -> None:
        self.reply, self.asked = reply, list[tuple[str, dict[str, Any]]]()
        self.gate = asyncio.Event()
        self.gate.set()

    async def post(self, path: str, body: object, kind: type[Any]) -> Any:
        sent = msgspec.json.decode(msgspec.json.encode(body))
        if path == "/v1/models":
            return msgspec.convert({"data": [{"id": "served", "root": "elsewhere/base"}]}, kind)
        self.asked.append((path, sent))
        made = self.reply(path, sent)
        await self.gate.wait()
        if isinstance(made, Exception):
            raise made
        if kind is bytes:
            return str(made).encode()
        try:
            return msgspec.json.decode(json.dumps(made), type=kind)
        except msgspec.DecodeError as error:
            raise InfrastructureFault(str(error)) from error

    @property
    def paths(self) -> list[str]:
        return [path for path, _ in self.asked]


def completion(**changed: Any) -> dict[str, Any]:
    """What vLLM answers, changed at its choice."""
    choice = {"index": 0, "text": "unused", "finish_reason": "stop", "stop_reason": STOP, "token_ids": IDS}
    choice |= {"prompt_token_ids": list(PROMPT), "logprobs": {"tokens": ["a"], "token_logprobs": LOGPROBS}}
    return {"id": "x", "choices": [{**choice, **changed}]}


def generated(**changed: Any) -> dict[str, Any]:
    """What SGLang answers, changed at its `meta_info`."""
    drawn = [[logprob, token, None] for logprob, token in zip(LOGPROBS, IDS, strict=True)]
    meta = {"prompt_tokens": len(PROMPT), "finish_reason": {"type": "stop", "matched": STOP}}
    meta |= {"output_token_logprobs": drawn, "weight_version": "default"}
    return {"text": "unused", "meta_info": {**meta, **changed}}


def vllm(reply: Reply) -> tuple[VllmServer, FakeEndpoint]:
    endpoint = FakeEndpoint(reply)
    return VllmServer(endpoint, "smol"), endpoint


def sglang(reply: Reply) -> tuple[SglangServer, FakeEndpoint]:
    endpoint = FakeEndpoint(reply)
    return SglangServer(endpoint, "smol"), endpoint


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    write_weights(tmp_path, {"a": (2,)})
    return tmp_path


def with_temperature(temperature: float) -> Sampling:
    return msgspec.structs.replace(SAMPLING, temperature=temperature)


def sample(server: VllmServer | SglangServer, sampling: Sampling = SAMPLING) -> SampledOutput:
    return run(server.generate(PROMPT, sampling))


def test_a_server_is_asked_for_token_ids_under_exactly_the_sampling_of_the_record() -> None:
    expected = SampledOutput(tuple(IDS), tuple(LOGPROBS), "stop")
    grammar = Grammar('root ::= "yes"', "digest")
    server, endpoint = vllm(lambda path, body: completion())
    assert sample(server) == run(server.generate(PROMPT, SAMPLING, grammar)) == expected
    (path, body), (_, masked) = endpoint.asked
    assert path == "/v1/completions"
    neutral = {"min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "seed": 11, "stop_token_ids": [STOP], "max_tokens": 4}
    asked = {"model": "smol", "prompt": list(PROMPT), "ignore_eos": True, "logprobs": 0, "return_token_ids": True}
    assert body == neutral | sampling | asked
    assert masked == body | {"structured_outputs": {"grammar": grammar.ebnf}}
    other, endpoint = sglang(lambda path, body: generated())
    assert sample(other) == run(other.generate(PROMPT, SAMPLING, grammar)) == expected
    (path, body), (_, masked) = endpoint.asked
    params = {"temperature": 1.0, "max_new_tokens": 4, "stop_token_ids": [STOP], "sampling_seed": 11}
    assert path == "/generate"
    assert body == {"input_ids": list(PROMPT), "sampling_params": params, "return_logprob": True}
    assert masked["sampling_params"] == params | {"ebnf": grammar.ebnf}


@pytest.mark.parametrize(
    "changed",
    [
        *({"token_ids": ids} for ids in (None, [], "7 8 2", [-7, 8, STOP], [2**31, 8, STOP], IDS[:2], [7, STOP, STOP])),
        *({"prompt_token_ids": ids} for ids in (None, [1, 5])),
        {"logprobs": None},
        *({"logprobs": {"token_logprobs": LOGPROBS[:size]}} for size in (0, 2)),
        *({"logprobs": {"token_logprobs": [-0.5, value, -0.125]}} for value in (None, "-1", -9999.0, 0.7)),
        *({"finish_reason": reason} for reason in ("abort", None)),
        *({"stop_reason": reason} for reason in (None, "</s>", 3)),
    ],
    ids=str,
)
def test_no_faulty_answer_of_vllm_becomes_a_generation(changed: dict[str, Any]) -> None:
    for temperature in (1.0, 0.0):
        with pytest.raises(InfrastructureFault):
            sample(vllm(lambda path, body: completion(**changed))[0], with_temperature(temperature))


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        *(({"choices": completion()["choices"] * count}, f"{count} outputs instead of one") for count in (0, 2)),
        *((answer, "Object missing|Expected `object`") for answer in ({}, [], None)),
    ],
    ids=str,
)
def test_an_answer_of_vllm_that_is_no_single_output_is_a_fault(answer: object, says: str) -> None:
    with pytest.raises(InfrastructureFault, match=says):
        sample(vllm(lambda path, body: answer)[0])


@pytest.mark.parametrize(
    "changed",
    [
        *({"output_token_logprobs": made} for made in (None, [], [[None, 7, None], [-1.0, STOP, None]])),
        *({"prompt_tokens": count} for count in (2, None)),
        {"finish_reason": None},
        *({"finish_reason": {"type": kind, "matched": end}} for kind, end in (("abort", STOP), ("stop", "</s>"))),
    ],
    ids=str,
)
def test_no_faulty_answer_of_sglang_becomes_a_generation(changed: dict[str, Any]) -> None:
    with pytest.raises(InfrastructureFault):
        sample(sglang(lambda path, body: generated(**changed))[0])


def test_a_cut_output_has_no_more_tokens_than_asked_for_and_at_temperature_0_log_probabilities_are_0() -> None:
    server, _ = vllm(lambda path, body: completion(finish_reason="length", stop_reason=None, token_ids=[7, 8, 9]))
    assert sample(server).finish_reason == "length"
    with pytest.raises(InfrastructureFault, match="3 tokens where 2 were requested"):
        sample(server, Sampling(max_tokens=2))
    server, endpoint = vllm(lambda path, body: completion())
    assert sample(server, Sampling(temperature=0.0, top_p=0.5, max_tokens=4)).output_logprobs == (0.0, 0.0, 0.0)
    assert len(endpoint.asked) == 1


def probed(processed: bool) -> tuple[tuple[VllmServer, FakeEndpoint], tuple[SglangServer, FakeEndpoint]]:
    """Servers whose likeliest token has probability 0.3 at temperature 0.5 and 0.01 at 2, or always the same."""

    def best(temperature: float) -> float:
        return {0.5: -1.2, 2.0: -4.6}[temperature] if processed else -2.0

    def by_vllm(path: str, body: dict[str, Any]) -> object:
        if body["logprobs"] == 0:
            return completion()
        top = {"other": -7.0, "best": best(body["temperature"])}
        return completion(logprobs={"token_logprobs": [-7.0], "top_logprobs": [top]})

    def by_sglang(path: str, body: dict[str, Any]) -> object:
        if "top_logprobs_num" not in body:
            return generated()
        return generated(output_top_logprobs=[[[best(body["sampling_params"]["temperature"]), 7, None]]])

    return vllm(by_vllm), sglang(by_sglang)


@pytest.mark.parametrize("processed", [True, False])
@pytest.mark.parametrize("kind", [0, 1], ids=["vllm", "sglang"])
def test_a_server_is_asked_once_whether_its_log_probabilities_are_processed(kind: int, processed: bool) -> None:
    server, endpoint = probed(processed)[kind]
    for _ in range(2):
        with nullcontext() if processed else pytest.raises(UsageError, match="start "):
            assert sample(server, with_temperature(0.7)).output_ids == tuple(IDS)
    assert len(endpoint.asked) == (2 + 2 if processed else 2), "asked twice over, and for an output only if it fits"
    assert sample(server).output_ids == tuple(IDS)


@pytest.mark.parametrize("sampling", [Sampling(top_p=0.9), Sampling(top_k=5)], ids=["top_p", "top_k"])
def test_cuts_of_the_distribution_need_processed_log_probabilities(sampling: Sampling) -> None:
    with pytest.raises(UsageError, match="processed_logprobs"):
        sample(probed(False)[0][0], sampling)
    with pytest.raises(UsageError, match="top_p"):
        sample(probed(True)[1][0], sampling)


def test_a_probe_without_an_answer_is_a_fault_and_is_repeated() -> None:
    server, endpoint = probed(True)[0]
    answers, answer = [InfrastructureFault("away"), completion(logprobs=None)], endpoint.reply
    endpoint.reply = lambda path, body: answers.pop(0) if answers else answer(path, body)
    for _ in range(2):
        with pytest.raises(InfrastructureFault):
            sample(server, with_temperature(0.7))
    assert sample(server, with_temperature(0.7)).output_ids == tuple(IDS)


def test_a_temperature_that_vllm_would_replace_is_refused() -> None:
    server, endpoint = probed(True)[0]
    with pytest.raises(UsageError, match="temperature"):
        sample(server, Sampling(temperature=0.005))
    assert endpoint.asked == []


def test_the_hash_names_the_model_and_not_the_server() -> None:
    first, second = (VllmServer(ModelEndpoint(url), "m").hash for url in ("http://a", "http://b"))
    assert first == second != VllmServer(ModelEndpoint("http://a"), "n").hash


def test_vllm_is_paused_while_it_reads_weights_under_the_same_path(weights: Path) -> None:
    server, endpoint = vllm(lambda path, body: completion() if "completions" in path else {"results": [None]})
    run(server.load_weights(weights, 7))
    assert endpoint.paths == ["/pause?mode=wait", "/collective_rpc", "/resume"]
    assert endpoint.asked[1][1] == {"method": "reload_weights", "kwargs": {"weights_path": str(weights)}}
    output = sample(server)
    assert (output.version_start, output.version_end) == (7, 7) == (server.version, server.version)


@pytest.mark.parametrize("failing", ["/pause", "/collective_rpc", "/resume"])
def test_a_server_whose_weights_could_not_be_changed_is_not_left_paused(weights: Path, failing: str) -> None:
    server, endpoint = vllm(lambda path, body: InfrastructureFault("no answer") if path.startswith(failing) else {})
    with pytest.raises(InfrastructureFault, match=r"^no answer$"):
        run(server.load_weights(weights, 1))
    assert endpoint.paths[-1] == "/resume"


@pytest.mark.parametrize(
    ("error", "raised", "says"),
    [
        (Refusal("400 shapes"), UsageError, "^400 shapes$"),
        (Unreachable("404", 404), UsageError, "VLLM_SERVER_DEV_MODE=1"),
        (Unreachable("Cannot connect (3 attempts)"), Unreachable, r"^Cannot connect \(3 attempts\)$"),
    ],
)
def test_a_server_that_refuses_weights_goes_on_with_what_it_has(
    weights: Path, error: Exception, raised: type[UsageError], says: str
) -> None:
    server, _ = vllm(lambda path, body: completion() if "completions" in path else error)
    with pytest.raises(raised, match=says):
        run(server.load_weights(weights, 1))
    assert sample(server).version_end == 0


def test_no_server_is_sent_to_a_folder_without_weights(tmp_path: Path) -> None:
    for server, endpoint in (vllm(lambda path, body: {}), sglang(lambda path, body: {})):
        with pytest.raises(UsageError, match="is not a model"):
            run(server.load_weights(tmp_path / "absent", 1))
        assert endpoint.asked == []


def test_sglang_says_which_weights_an_output_is_of_and_that_it_did_not_load_some(weights: Path) -> None:
    loaded: dict[str, object] = {"success": True, "message": "ok"}
    server, endpoint = sglang(lambda path, body: generated(weight_version="8") if path == "/generate" else loaded)
    assert sample(server).version_start == 8
    run(server.load_weights(weights, 3))
    assert endpoint.asked[-1] == ("/update_weights_from_disk", {"model_path": str(weights), "weight_version": "3"})
    assert server.version == 3
    loaded |= {"success": False, "message": "no space"}
    with pytest.raises(InfrastructureFault, match="no space"):
        run(server.load_weights(weights, 4))
    refusing, _ = sglang(lambda path, body: generated() if path == "/generate" else Refusal("400 shapes"))
    with pytest.raises(UsageError, match="400 shapes"):
        run(refusing.load_weights(weights, 4))
    assert sample(refusing).version_end == 0


def write_weights(folder: Path, shapes: Mapping[str, tuple[int, ...]], name: str = "model") -> None:
    """A folder with a configuration, and tensors of zeros."""
    save_file({key: torch.zeros(shape) for key, shape in shapes.items()}, folder / f"{name}.safetensors")
    (folder / "config.json").write_text("{}")


def test_the_shapes_are_those_of_all_files_and_need_no_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_weights(tmp_path, {"a": (2, 3)}, "model-1")
    write_weights(tmp_path, {"b": ()}, "model-2")
    monkeypatch.setitem(sys.modules, "torch", None)
    assert weight_shapes(tmp_path) == {"a": (2, 3), "b": ()}
    with ExitStack() as stack, pytest.raises(MissingExtra, match="torch is not installed"):
        open_tensors(tmp_path, stack)


def test_weights_of_another_architecture_are_refused_by_name(tmp_path: Path) -> None:
    write_weights(tmp_path, {"a": (2, 3), "b": (1,)})
    check_same_shapes({"b": (1,), "a": (2, 3)}, tmp_path)
    for opened in ({"a": (3, 2), "b": (1,)}, {"a": (2, 3)}, {"a": (2, 3), "b": (1,), "c": (1,)}):
        with pytest.raises(UsageError, match="weights of another model"):
            check_same_shapes(opened, tmp_path)


def test_a_tied_output_head_may_be_left_out_on_either_side_but_not_differ(tmp_path: Path) -> None:
    write_weights(tmp_path, {"a": (1,), "lm_head.weight": (4, 2)})
    check_same_shapes({"a": (1,)}, tmp_path)
    with pytest.raises(UsageError, match=r"lm_head\.weight"):
        check_same_shapes({"a": (1,), "lm_head.weight": (5, 2)}, tmp_path)
    write_weights(tmp_path, {"a": (1,)})
    check_same_shapes({"a": (1,), "lm_head.weight": (4, 2)}, tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(UsageError, match="is not a model"):
        weight_shapes(tmp_path)


SLEEP, WAKE = "/sleep?level=1&mode=wait", "/wake_up"


def by_vllm(path: str, body: dict[str, Any]) -> object:
    return completion() if path == "/v1/completions" else ""


@in_loop
async def test_calls_that_come_while_a_server_sleeps_wait() -> None:
    server, endpoint = vllm(by_vllm)
    async with server.asleep():
        late = asyncio.create_task(server.generate(PROMPT, SAMPLING))
        await asyncio.sleep(0.01)
        assert endpoint.paths == [SLEEP]
    assert (await late).version_end == 0
    assert endpoint.paths == [SLEEP, WAKE, "/v1/completions"]


@pytest.mark.parametrize(
    ("asleep", "says", "paths"),
    [
        ("", "not finite", [SLEEP, WAKE]),
        (Unreachable("404", 404), "DEV_MODE=1 and --enable-sleep-mode", [SLEEP]),
        (Refusal("400 off"), "^400 off; to let it sleep.*--enable-sleep-mode$", [SLEEP]),
    ],
)
def test_a_server_is_awake_after_an_error_of_the_trainer_or_if_it_cannot_sleep(
    asleep: object, says: str, paths: list[str]
) -> None:
    server, endpoint = vllm(lambda path, body: asleep if path == SLEEP else by_vllm(path, body))

    async def work() -> None:
        async with server.asleep():
            raise UsageError("the loss is not finite")

    with pytest.raises(UsageError, match=says):
        run(work())
    assert endpoint.paths == paths
    assert sample(server).version_end == 0


def test_only_vllm_can_sleep() -> None:
    assert isinstance(vllm(by_vllm)[0], Sleeper)
    assert not isinstance(sglang(by_vllm)[0], Sleeper)
    assert not issubclass(TransformersBackend, Sleeper)


class Uses:
    """Tasks that use or change weights until they are let go, and the order in which they began and ended."""

    def __init__(self) -> None:
        self.gate, self.order = WeightGate(), list[str]()
        self.free = asyncio.Event()

    async def call(self, name: str) -> None:
        async with self.gate.call():
            self.order.append(name)
            await self.free.wait()
            self.order.append(f"/{name}")

    async def change(self, version: int) -> None:
        async with self.gate.change(version):
            self.order.append(f"v{version}")
            await asyncio.sleep(0)
            self.order.append(f"/v{version}")


@in_loop
async def test_a_change_waits_for_the_calls_in_flight_and_later_calls_for_the_change() -> None:
    uses = Uses()
    tasks = [asyncio.create_task(each) for each in (uses.call("a"), uses.call("b"), uses.change(1), uses.call("c"))]
    await asyncio.sleep(0.01)
    assert uses.order == ["a", "b"]
    uses.free.set()
    await asyncio.gather(*tasks)
    assert uses.order == ["a", "b", "/a", "/b", "v1", "/v1", "c", "/c"]
    assert uses.gate.version == 1


@in_loop
async def test_changes_come_one_after_another() -> None:
    uses = Uses()
    await asyncio.gather(uses.change(1), uses.change(2), uses.change(3))
    assert uses.order == ["v1", "/v1", "v2", "/v2", "v3", "/v3"]


@pytest.mark.parametrize("cancelled", ["call", "change"])
@in_loop
async def test_a_call_or_a_change_that_is_cancelled_gives_its_place_up(cancelled: str) -> None:
    uses = Uses()
    tasks = {"call": asyncio.create_task(uses.call("a")), "change": asyncio.create_task(uses.change(1))}
    await asyncio.sleep(0.01)
    tasks.pop(cancelled).cancel()
    uses.free.set()
    await asyncio.wait_for(asyncio.gather(*tasks.values(), uses.call("b")), 5)
    assert uses.gate.version == (cancelled == "call")
    assert "/b" in uses.order


@pytest.mark.parametrize(("error", "usable"), [(UsageError("no such folder"), True), (OSError("disk"), False)])
def test_only_a_refused_change_leaves_the_old_weights_in_use(error: Exception, usable: bool) -> None:
    gate = WeightGate()

    async def work() -> None:
        with pytest.raises(type(error)):
            async with gate.change(1):
                raise error
        assert gate.version == 0
        if usable:
            async with gate.call():
                return
        with pytest.raises(InfrastructureFault):
            async with gate.call():
                pass
        async with gate.change(2):
            pass
        async with gate.call():
            assert gate.version == 2

    run(work())


def test_a_gate_serves_one_event_loop_after_another() -> None:
    uses = Uses()

    async def work(version: int) -> None:
        uses.free = asyncio.Event()
        call = asyncio.create_task(uses.call("a"))
        await asyncio.sleep(0)
        change, late = asyncio.create_task(uses.change(version)), asyncio.create_task(uses.call("b"))
        await asyncio.sleep(0)
        uses.free.set()
        await asyncio.gather(call, change, late)

    for version in (1, 2):
        run(work(version))
    assert uses.gate.version == 2


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("adapters")
    save_adapters(home / "adapters", save_tiny_model(home / "base"))
    return home / "adapters"


def by_sglang(path: str, body: dict[str, Any]) -> object:
    return generated() if path == "/generate" else {"success": True, "loaded_adapters": {}}


def test_vllm_loads_each_version_under_its_own_name_and_new_calls_use_it(adapters: Path) -> None:
    server, endpoint = vllm(by_vllm)
    run(server.load_weights(adapters, 3))
    path, body = endpoint.asked[0]
    assert path == "/v1/load_lora_adapter"
    assert body == {"lora_name": body["lora_name"], "lora_path": str(adapters), "load_inplace": False}
    assert body["lora_name"].startswith("harness1-3-")
    assert sample(server).version_end == server.version == 3
    assert endpoint.asked[1][1]["model"] == body["lora_name"]
    run(server.load_weights(adapters, 4))
    assert sample(server).version_end == 4
    assert endpoint.asked[-1][1]["model"].startswith("harness1-4-")


@in_loop
async def test_calls_in_flight_end_on_their_version_which_is_unloaded_when_no_call_uses_it(adapters: Path) -> None:
    server, endpoint = vllm(by_vllm)

    def unloaded() -> list[str]:
        return [body["lora_name"][:10] for path, body in endpoint.asked if path == "/v1/unload_lora_adapter"]

    await server.load_weights(adapters, 1)
    held = endpoint.gate = asyncio.Event()
    early = asyncio.create_task(server.generate(PROMPT, SAMPLING))
    await asyncio.sleep(0.01)
    endpoint.gate = asyncio.Event()
    endpoint.gate.set()
    for version in (2, 3, 4):
        await server.load_weights(adapters, version)
    assert unloaded() == ["harness1-2"], "1 is in use; 3 and 4 are the newest"
    held.set()
    assert (await early).version_end == 1
    await server.load_weights(adapters, 5)
    assert unloaded() == ["harness1-2", "harness1-1", "harness1-3"]


@pytest.mark.parametrize(
    ("error", "raised", "says"),
    [
        (Unreachable("404 Not Found", 404), UsageError, r"UPDATING=1, --enable-lora, --max-lora-rank"),
        (Refusal("400 rank too large"), UsageError, "--enable-lora"),
        (InfrastructureFault("500 LoRA is not enabled"), InfrastructureFault, "--enable-lora"),
        (Unreachable("Cannot connect (3 attempts)"), Unreachable, r"^Cannot connect \(3 attempts\)$"),
    ],
)
def test_a_vllm_that_does_not_load_adapters_says_what_to_do(
    adapters: Path, error: Exception, raised: type[Exception], says: str
) -> None:
    server, _ = vllm(lambda path, body: error if "lora" in path else completion())
    with pytest.raises(raised, match=says):
        run(server.load_weights(adapters, 1))
    assert sample(server).version_end == 0


def test_an_adapter_that_an_unanswered_try_has_loaded_is_used(adapters: Path) -> None:
    server, _ = vllm(lambda path, body: Refusal("has already been loaded") if "lora" in path else completion())
    run(server.load_weights(adapters, 2))
    assert sample(server).version_end == 2


def test_whole_weights_take_the_place_of_adapters(adapters: Path, tmp_path: Path) -> None:
    write_weights(tmp_path, {"a": (2,)})
    server, endpoint = vllm(lambda path, body: completion() if path == "/v1/completions" else {})
    run(server.load_weights(adapters, 1))
    run(server.load_weights(tmp_path, 2))
    assert sample(server).version_end == 2
    assert endpoint.asked[-1][1]["model"] == "smol"


def test_sglang_names_the_adapter_in_each_request(adapters: Path) -> None:
    server, endpoint = sglang(by_sglang)
    run(server.load_weights(adapters, 3))
    path, body = endpoint.asked[0]
    assert (path, body["lora_path"]) == ("/load_lora_adapter", str(adapters))
    assert sample(server).version_end == 3
    assert endpoint.asked[-1][1]["lora_path"] == body["lora_name"]
    refusing, _ = sglang(lambda path, body: {"success": False, "error_message": "rank"})
    with pytest.raises(InfrastructureFault, match=r"rank.*--enable-lora"):
        run(refusing.load_weights(adapters, 3))


class FakeEngine:
    """What `VllmBackend` uses of vLLM's engine. A call waits for the event that `gate` was when it began."""

    model_config = SimpleNamespace(max_model_len=64)

    def __init__(self) -> None:
        self.added: list[Any] = []
        self.removed: list[int] = []
        self.sampled_with: list[Any] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.fault: Exception | None = None
        self.asleep: tuple[int, str] | None = None

    async def add_lora(self, request: Any) -> bool:
        if self.fault is not None:
            raise self.fault
        self.added.append(request)
        return True

    async def remove_lora(self, number: int) -> bool:
        self.removed.append(number)
        return True

    async def generate(self, prompt: Any, params: Any, number: str, lora_request: Any) -> AsyncIterator[Any]:
        self.sampled_with.append(lora_request)
        await self.gate.wait()
        chosen = SimpleNamespace(logprob=-0.5)
        out = SimpleNamespace(
            token_ids=[7, 2], logprobs=[{7: chosen}, {2: chosen}], finish_reason="stop", stop_reason=2
        )
        yield SimpleNamespace(outputs=[out])

    async def sleep(self, level: int, mode: str) -> None:
        self.asleep = (level, mode)

    async def wake_up(self) -> None:
        self.asleep = None

    def shutdown(self) -> None:
        pass


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package `vllm` with what is imported from it."""

    def record(*values: Any, **fields: Any) -> SimpleNamespace:
        names = dict(zip(("lora_name", "lora_int_id", "lora_path"), values, strict=False))
        return SimpleNamespace(**names, **fields)

    error = type("VLLMError", (Exception,), {})
    parts: dict[str, dict[str, Any]] = {
        "vllm": {"SamplingParams": record},
        "vllm.exceptions": {"VLLMError": error, "VLLMClientError": type("VLLMClientError", (error,), {})},
        "vllm.inputs": {"tokens_input": list},
        "vllm.lora": {},
        "vllm.lora.request": {"LoRARequest": record},
        "vllm.sampling_params": {"RequestOutputKind": SimpleNamespace(FINAL_ONLY=2), "StructuredOutputsParams": record},
    }
    for name, values in parts.items():
        module = ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)


@pytest.fixture
def backend(adapters: Path, package: None) -> Iterator[VllmBackend]:
    made = VllmBackend(FakeEngine(), LoopThread("vLLM"), {}, "name", adapters.with_name("base"), WeightGate())
    yield made
    made.close()


def test_each_version_has_its_name_and_number_and_calls_use_the_newest(backend: VllmBackend, adapters: Path) -> None:
    engine: Any = backend._engine
    assert run(backend.generate((1, 5), SAMPLING)).version_end == 0
    for version in (3, 4, 4):
        run(backend.load_weights(adapters, version))
        assert run(backend.generate((1, 5), SAMPLING)).version_end == backend.version == version
    assert [request.lora_path for request in engine.added] == [str(adapters)] * 3
    assert [request.lora_int_id for request in engine.added] == [1, 2, 2], "the same version keeps its number"
    assert [request.lora_name[:11] for request in engine.added] == ["harness1-3-", "harness1-4-", "harness1-4-"]
    assert engine.sampled_with == [None, *engine.added]
    assert engine.removed == [1]


@in_loop
async def test_a_version_is_removed_when_it_is_old_and_no_call_uses_it(backend: VllmBackend, adapters: Path) -> None:
    engine: Any = backend._engine
    await backend.load_weights(adapters, 1)
    held = engine.gate = asyncio.Event()
    early = asyncio.create_task(backend.generate((1, 5), SAMPLING))
    while not engine.sampled_with:
        await asyncio.sleep(0.001)
    engine.gate = asyncio.Event()
    engine.gate.set()
    for version in (2, 3):
        await backend.load_weights(adapters, version)
    assert engine.removed == [2], "1 is in use, and 3 is the newest"
    backend._loop._loop.call_soon_threadsafe(held.set)
    assert (await early).version_end == engine.sampled_with[0].lora_int_id == 1
    await backend.load_weights(adapters, 4)
    assert sorted(engine.removed) == [1, 2, 3]


def test_an_adapter_that_does_not_load_leaves_the_present_one_in_use(backend: VllmBackend, adapters: Path) -> None:
    engine: Any = backend._engine
    run(backend.load_weights(adapters, 1))
    engine.fault = Exception("Call to add_lora method failed: LoRA rank 16 is greater than max_lora_rank 8")
    with pytest.raises(InfrastructureFault, match="max_lora_rank"):
        run(backend.load_weights(adapters, 2))
    assert run(backend.generate((1, 5), SAMPLING)).version_end == 1
    assert engine.removed == []


@in_loop
async def test_an_engine_sleeps_and_calls_wait_for_its_end(backend: VllmBackend) -> None:
    engine: Any = backend._engine
    async with backend.asleep():
        assert engine.asleep == (1, "wait")
        call = asyncio.create_task(backend.generate((1, 5), SAMPLING))
        await asyncio.sleep(0.05)
        assert engine.sampled_with == []
    assert engine.asleep is None
    assert (await call).version_end == 0


def test_an_engine_that_cannot_sleep_goes_on(backend: VllmBackend) -> None:
    engine: Any = backend._engine

    async def refused(level: int, mode: str) -> None:
        raise Exception("sleep mode is not enabled")

    async def work() -> None:
        with pytest.raises(InfrastructureFault, match="sleep mode is not enabled"):
            async with backend.asleep():
                raise AssertionError("it does not sleep")

    engine.sleep = refused
    run(work())


def test_adapters_of_another_base_are_not_given_to_the_engine(backend: VllmBackend, tmp_path: Path) -> None:
    engine: Any = backend._engine
    save_adapters(tmp_path / "adapters", save_tiny_model(tmp_path / "base", seed=1))
    with pytest.raises(UsageError):
        run(backend.load_weights(tmp_path / "adapters", 1))
    assert engine.added == []


def test_an_engine_whose_closing_was_interrupted_is_closed_by_the_next(
    backend: VllmBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = backend._loop._loop
    close = loop.close

    def interrupted() -> None:
        close()
        raise KeyboardInterrupt

    monkeypatch.setattr(loop, "close", interrupted)
    with pytest.raises(KeyboardInterrupt):
        backend.close()
    backend.close()
    assert not hasattr(backend, "_engine")
