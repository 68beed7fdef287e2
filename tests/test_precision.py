"""`dtype = "auto"`: the type that is faster on this machine, and the type itself in every record."""

from collections.abc import Iterator

import pytest

from harness1.config import load_config, training
from harness1.config.training import MARGIN, fastest_dtype


@pytest.fixture(autouse=True)
def measured_anew() -> Iterator[None]:
    fastest_dtype.cache_clear()
    yield
    fastest_dtype.cache_clear()


@pytest.mark.parametrize(
    ("gain", "expected"), [(2.0, "bfloat16"), (1.01 * MARGIN, "bfloat16"), (1.0, "float32"), (0.3, "float32")]
)
def test_the_measured_speeds_decide(monkeypatch: pytest.MonkeyPatch, gain: float, expected: str) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(training, "_products", lambda _, dtype: gain if dtype == torch.bfloat16 else 1.0)
    config = load_config(None, ["train.dtype=auto", "policy.dtype=auto"])
    assert (config.train.dtype, config.policy.dtype) == (expected, expected)


def test_both_types_are_measured() -> None:
    torch = pytest.importorskip("torch")
    assert all(training._products(torch, dtype) > 0 for dtype in (torch.float32, torch.bfloat16))
    assert fastest_dtype() in ("float32", "bfloat16")


def test_nothing_is_measured_where_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "_products", lambda *_: pytest.fail("measured"))
    assert load_config("sft/paper", ["policy.dtype=float32"]).train.dtype == "bfloat16"


def test_it_is_float32_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "find_spec", lambda _: None)
    config = load_config("rl/handles")
    assert (config.train.dtype, config.policy.dtype) == ("float32", "float32")
