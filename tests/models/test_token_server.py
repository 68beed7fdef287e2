"""vLLM, behind a server and in this process, and SGLang: what they are asked, what of their answers is believed, and
when their weights change."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from harness1.errors import InfrastructureFault, MissingExtra, Refusal, Unreachable, UsageError
from harness1.http.loop_thread import LoopThread
from harness1.model_folder import open_tensors
from harness1.models.backend import Grammar, SampledOutput
from harness1.models.token_server import SglangServer, TokenServer, VllmServer
from harness1.models.vllm_engine import VllmBackend
from harness1.models.weight_gate import WeightGate, weight_shapes
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


def sample(server: TokenServer, sampling: Sampling = SAMPLING) -> SampledOutput:
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
    for answer in ({"choices": completion()["choices"] * 2}, {"choices": []}, {}, [], None):
        with pytest.raises(InfrastructureFault, match=r"instead of one|Object missing|Expected `object`"):
            sample(vllm(lambda path, body, answer=answer: answer)[0])


def probed(processed: bool) -> tuple[VllmServer, FakeEndpoint]:
    """A server whose likeliest token has probability 0.3 at temperature 0.5 and 0.01 at 2, or always the same."""

    def reply(path: str, body: dict[str, Any]) -> object:
        if body["logprobs"] == 0:
            return completion()
        best = {0.5: -1.2, 2.0: -4.6}[body["temperature"]] if processed else -2.0
        return completion(logprobs={"token_logprobs": [-7.0], "top_logprobs": [{"other": -7.0, "best": best}]})

    return vllm(reply)


@pytest.mark.parametrize("processed", [True, False])
def test_a_server_is_asked_once_whether_its_log_probabilities_are_processed(processed: bool) -> None:
    server, endpoint = probed(processed)
    with pytest.raises(UsageError, match="temperature"):
        sample(server, Sampling(temperature=0.005))
    for sampling in (with_temperature(0.7), Sampling(top_p=0.9), Sampling(top_k=5)):
        with nullcontext() if processed else pytest.raises(UsageError, match=r"start .*processed_logprobs"):
            assert sample(server, sampling).output_ids == tuple(IDS)
    assert len(endpoint.asked) == (2 + 3 if processed else 2), "asked twice over, and for an output only if it fits"
    assert sample(server).output_ids == tuple(IDS)


@pytest.mark.parametrize("processed", [True, False])
def test_sglang_is_asked_the_same_and_has_no_log_probabilities_of_a_cut_distribution(processed: bool) -> None:
    def reply(path: str, body: dict[str, Any]) -> object:
        if "top_logprobs_num" not in body:
            return generated()
        best = {0.5: -1.2, 2.0: -4.6}[body["sampling_params"]["temperature"]] if processed else -2.0
        return generated(output_top_logprobs=[[[best, 7, None]]])

    server, endpoint = sglang(reply)
    for cut in (Sampling(top_p=0.9), Sampling(top_k=5)):
        with pytest.raises(UsageError, match="set top_p to 1 and top_k to 0"):
            sample(server, cut)
    for _ in range(2):
        with nullcontext() if processed else pytest.raises(UsageError, match="start SGLang without"):
            assert sample(server, with_temperature(0.7)).output_ids == tuple(IDS)
    assert len(endpoint.asked) == (2 + 2 if processed else 2)
    with pytest.raises(InfrastructureFault, match="no log probabilities"):
        sample(sglang(lambda path, body: generated())[0], with_temperature(0.7))


def test_a_probe_without_an_answer_is_a_fault_and_is_repeated() -> None:
    server, endpoint = probed(True)
    answers, answer = [InfrastructureFault("away"), completion(logprobs=None)], endpoint.reply
    endpoint.reply = lambda path, body: answers.pop(0) if answers else answer(path, body)
    for _ in range(2):
        with pytest.raises(InfrastructureFault):
            sample(server, with_temperature(0.7))
    assert sample(server, with_temperature(0.7)).output_ids == tuple(IDS)


def test_vllm_is_paused_while_it_reads_weights_under_the_same_path(weights: Path) -> None:
    server, endpoint = vllm(lambda path, body: completion() if "completions" in path else {"results": [None]})
    with pytest.raises(UsageError, match="is not a model"):
        run(server.load_weights(weights / "absent", 1))
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


def test_sglang_says_which_weights_an_output_is_of_and_that_it_did_not_load_some(weights: Path) -> None:
    changed: list[object] = [{"success": True}, {"success": False, "message": "no space"}, Refusal("400 shapes")]
    server, endpoint = sglang(lambda path, body: generated(weight_version="8") if path == "/generate" else changed[0])
    assert sample(server).version_start == 8
    run(server.load_weights(weights, 3))
    assert endpoint.asked[-1] == ("/update_weights_from_disk", {"model_path": str(weights), "weight_version": "3"})
    assert server.version == 3
    for says in ("no space", "400 shapes"):
        del changed[0]
        with pytest.raises(UsageError, match=says):
            run(server.load_weights(weights, 4))
        assert server.version == 3


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
    asked = (uses.call("a"), uses.call("b"), uses.change(1), uses.change(2), uses.call("c"))
    tasks = [asyncio.create_task(each) for each in asked]
    await asyncio.sleep(0.01)
    assert uses.order == ["a", "b"]
    uses.free.set()
    await asyncio.gather(*tasks)
    assert uses.order == ["a", "b", "/a", "/b", "v1", "/v1", "v2", "/v2", "c", "/c"]
    assert uses.gate.version == 2


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


def test_vllm_loads_each_version_under_its_own_name_and_new_calls_use_it(adapters: Path, weights: Path) -> None:
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
    run(server.load_weights(weights, 5))
    assert sample(server).version_end == 5
    assert endpoint.asked[-1][1]["model"] == "smol"


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


def test_sglang_names_the_adapter_in_each_request(adapters: Path) -> None:
    answer: dict[str, object] = {"success": True}
    server, endpoint = sglang(lambda path, body: generated(weight_version="8") if path == "/generate" else answer)
    run(server.load_weights(adapters, 3))
    path, body = endpoint.asked[0]
    assert (path, body["lora_path"]) == ("/load_lora_adapter", str(adapters))
    assert sample(server).version_end == 3
    assert endpoint.asked[-1][1]["lora_path"] == body["lora_name"]
    for version in (4, 5):
        run(server.load_weights(adapters, version))
    assert endpoint.asked[-1] == ("/unload_lora_adapter", {"lora_name": body["lora_name"]})
    answer |= {"success": False, "error_message": "rank"}
    with pytest.raises(UsageError, match=r"rank.*--enable-lora"):
        run(server.load_weights(adapters, 6))
    assert sample(server).version_end == 5


class FakeEngine:
    """What `VllmBackend` uses of vLLM's engine. A call waits for the event that `gate` was when it began."""

    model_config = SimpleNamespace(max_model_len=64)

    def __init__(self) -> None:
        self.add_lora, self.remove_lora, self.sleep, self.wake_up = (AsyncMock() for _ in range(4))
        self.shutdown, self.sampled_with = Mock(), list[Any]()
        self.gate = asyncio.Event()
        self.gate.set()

    @property
    def added(self) -> list[Any]:
        return [call.args[0] for call in self.add_lora.await_args_list]

    @property
    def removed(self) -> list[int]:
        return [call.args[0] for call in self.remove_lora.await_args_list]

    async def generate(self, prompt: Any, params: Any, number: str, lora_request: Any) -> AsyncIterator[Any]:
        self.sampled_with.append(lora_request)
        await self.gate.wait()
        chosen = SimpleNamespace(logprob=-0.5)
        out = SimpleNamespace(
            token_ids=[7, 2], logprobs=[{7: chosen}, {2: chosen}], finish_reason="stop", stop_reason=2
        )
        yield SimpleNamespace(outputs=[out])


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
    made = VllmBackend(FakeEngine(), LoopThread("vLLM"), "name", adapters.with_name("base"), WeightGate())
    yield made
    for _ in range(2):
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
    engine.add_lora.side_effect = Exception(
        "Call to add_lora method failed: LoRA rank 16 is greater than max_lora_rank 8"
    )
    with pytest.raises(InfrastructureFault, match="max_lora_rank"):
        run(backend.load_weights(adapters, 2))
    assert run(backend.generate((1, 5), SAMPLING)).version_end == 1
    assert engine.removed == []


@in_loop
async def test_an_engine_sleeps_and_calls_wait_for_its_end(backend: VllmBackend) -> None:
    engine: Any = backend._engine
    async with backend.asleep():
        engine.sleep.assert_awaited_once_with(level=1, mode="wait")
        call = asyncio.create_task(backend.generate((1, 5), SAMPLING))
        await asyncio.sleep(0.05)
        assert engine.sampled_with == []
    engine.wake_up.assert_awaited_once_with()
    assert (await call).version_end == 0


def test_an_engine_that_cannot_sleep_goes_on(backend: VllmBackend) -> None:
    engine: Any = backend._engine

    engine.sleep.side_effect = Exception("sleep mode is not enabled")

    async def work() -> None:
        with pytest.raises(InfrastructureFault, match="sleep mode is not enabled"):
            async with backend.asleep():
                raise AssertionError("it does not sleep")

    run(work())


def test_adapters_of_another_base_are_not_given_to_the_engine(backend: VllmBackend, tmp_path: Path) -> None:
    engine: Any = backend._engine
    save_adapters(tmp_path / "adapters", save_tiny_model(tmp_path / "base", seed=1))
    with pytest.raises(UsageError):
        run(backend.load_weights(tmp_path / "adapters", 1))
    assert engine.added == []
