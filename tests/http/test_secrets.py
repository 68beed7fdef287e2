"""Secrets are used and never shown: keys, and what addresses hold of them."""

import pickle

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.pretty import Pretty

from harness1.cli.options import show
from harness1.config import load_config
from harness1.errors import UsageError
from harness1.models.spec import ModelSpec
from harness1.plain import Secret, public_address, secrets_of, without_password
from harness1.policy.registry import open_model
from harness1.retrieval.open import is_engine, open_retriever
from harness1.runs.folder import public_config, run_stage, toml_lines

SECRET = "s3cr3t-and-l0ng"
ADDRESSES = {
    f"http://user:{SECRET}@host:80/v1": "http://***@host:80/v1",
    f"http://{SECRET}@host": "http://***@host",
    f"https://host/search?num=5&key={SECRET}": "https://host/search?***",
    f"shelf:https://root:{SECRET}@host:19530/db?token={SECRET}#books": "shelf:https://***@host:19530/db?***#books",
    f"ray://u:{SECRET}@[::1]:10001": "ray://***@[::1]:10001",
    f"http://user:a/b?c#{SECRET}@host/v1": "http://***@host/v1",
    f"http://user:p@{SECRET}@host/@x": "http://***@host/@x",
}
PUBLIC = (
    *("http://host/v1", "shelf:me@home.db", "openai:gpt@http://h/v1", "http://[::1]:80/@a", "runs/a@b"),
    *("", "http://"),
)


def test_an_address_is_shown_without_its_secrets_and_otherwise_stays() -> None:
    for address, shown in ADDRESSES.items():
        assert public_address(address) == shown == public_address(shown)
        assert without_password(address) == shown.replace("***@", "")
        assert SECRET in "".join(secrets_of(address))
    for address in PUBLIC:
        assert public_address(address) == address
        assert secrets_of(address) == ()


@given(st.text("key&=?/.", max_size=30), st.text("abc/?#@:", max_size=30))
def test_no_password_is_left_in_any_address(name: str, rest: str) -> None:
    for address in (
        f"http://u:{SECRET}@{rest}",
        f"shelf:https://{SECRET}@host/{rest}",
        f"http://h?{name}={SECRET}{rest}",
    ):
        assert SECRET not in public_address(address)
        assert SECRET not in without_password(address)


def test_a_secret_prints_as_nothing_and_is_no_json() -> None:
    secret = Secret(SECRET)
    for shown in (str(secret), repr(secret), f"{secret} {secret!r} {secret:>20}", "{}".format(secret), "%s" % secret):  # noqa: UP031, UP032
        assert SECRET not in shown
    with pytest.raises(TypeError):
        msgspec.json.encode({"key": secret})
    with pytest.raises(TypeError):
        msgspec.to_builtins(secret)
    again = pickle.loads(pickle.dumps(secret))
    assert (type(again), "" + again, str(again)) == (Secret, SECRET, "***")
    assert secret == SECRET
    assert "Bearer " + secret == f"Bearer {SECRET}"


def overrides() -> list[str]:
    keys = [f"{name}={SECRET}" for name in ("model.key", "verifier.key", "web.search_key", "web.read_key")]
    keys += [f"web.search_url=https://host/search?key={SECRET}", f"web.read_url=http://u:{SECRET}@host/"]
    keys += [
        f"verifier.url=https://u:{SECRET}@host/v1?api-version={SECRET}",
        f"fleet.address=ray://{SECRET}@host:10001",
    ]
    return [f"machine.{key}" for key in keys]


def test_no_setting_shows_its_secrets(capsys: pytest.CaptureFixture[str]) -> None:
    config = load_config(None, overrides())
    policy = open_model("openai:gpt@http://host/v1", config)
    Console(width=200).print(Pretty(policy, expand_all=True))
    for as_json in (False, True):
        show(overrides=overrides(), as_json=as_json)
    assert SECRET not in capsys.readouterr().out
    assert config.machine.web.search_url == f"https://host/search?key={SECRET}"
    lines = "\n".join(toml_lines(public_config(config)))
    for shown in (
        repr(config),
        str(config),
        f"{config.machine.web.search_url}",
        lines,
        repr(policy),
        repr(vars(policy)),
    ):
        assert SECRET not in shown
    assert 'search_url = "https://host/search?***"' in lines
    with pytest.raises(TypeError):
        msgspec.json.encode(config)


def test_a_card_names_an_engine_without_its_password_and_says_so_when_it_is_opened() -> None:
    card = run_stage(load_config(None, overrides()), "scripted", {}, f"http://u:{SECRET}@host:1#a", {})
    assert SECRET not in msgspec.json.encode(card).decode()
    assert card.outputs["index"] == "http://***@host:1#a"
    assert is_engine(card.outputs["index"])
    for recorded in (card.outputs["index"], "http://host/retrieve?***"):
        with pytest.raises(UsageError, match="give the whole address with --index"):
            open_retriever(recorded)


def test_no_error_repeats_a_secret() -> None:
    models = ("openai:gpt@ftp://u:{}@host", "gpt@https://host/?key={}", "openai:gpt@http://u:{}@h/v1")
    indexes = ("http://u:{}@h", "http://{}@:x")
    for spec, open_spec in [(each, ModelSpec.read) for each in models] + [(each, open_retriever) for each in indexes]:
        with pytest.raises(UsageError) as caught:
            open_spec(spec.format(SECRET))
        assert SECRET not in str(caught.value)
