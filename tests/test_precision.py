"""`dtype = "auto"`: the type that is faster on this machine, and the type itself in every record."""

from collections.abc import Iterator

import pytest

from harness1.config import load_config, training
from harness1.config.training import fastest_dtype


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    fastest_dtype.cache_clear()
    yield
    fastest_dtype.cache_clear()


@pytest.mark.parametrize(
    ("gpu", "processor", "expected"),
    [(None, True, "bfloat16"), (None, False, "float32"), (True, False, "bfloat16"), (False, True, "float32")],
)
def test_what_the_device_calculates_with_decides(
    monkeypatch: pytest.MonkeyPatch, gpu: bool | None, processor: bool, expected: str
) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu is not None)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: gpu)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: processor)
    config = load_config(None, ["train.dtype=auto", "policy.dtype=auto"])
    assert (config.train.dtype, config.policy.dtype) == (expected, expected)


def test_it_is_float32_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "find_spec", lambda _: None)
    config = load_config("rl/handles")
    assert (config.train.dtype, config.policy.dtype) == ("float32", "float32")
