"""Opening the configured verifier."""

from __future__ import annotations

from collections.abc import Sequence

from harness1.config import Env, Machine
from harness1.env.verifiers.cross_encoder import CrossEncoderVerifier
from harness1.env.verifiers.language_model import LanguageModelVerifier
from harness1.env.verifiers.lexical import LexicalVerifier
from harness1.env.verifiers.protocol import Judgement, Verifier, VerifierFault
from harness1.errors import ConfigError
from harness1.http.model_endpoint import ModelEndpoint
from harness1.records import UnitId
from harness1.retrieval.cross_encoder import open_cross_encoder


def open_verifier(env: Env, machine: Machine) -> Verifier:
    """Open the verifier that `env.verification.judge` names.

    Raises:
        ConfigError: a setting is missing or wrong; for the language model, its name or address.
        UsageError: the cross-encoder cannot be loaded.
        MissingExtra: a library of the verifier is not installed.
    """
    verification = env.verification
    if verification.judge == "lexical" or not verification.on:
        return unopened_verifier(env)
    if verification.judge == "language_model":
        return _language_verifier(env, machine)
    scorer, window_s = open_cross_encoder(machine), machine.batch_ms / 1000
    return CrossEncoderVerifier(scorer, verification.characters, window_s, machine.batch_size)


def unopened_verifier(env: Env) -> Verifier:
    """Return a verifier that needs no model: the configured one, or one that always fails."""
    judge, characters = env.verification.judge, env.verification.characters
    return LexicalVerifier(characters) if judge == "lexical" else NoVerifier(judge)


def _language_verifier(env: Env, machine: Machine) -> LanguageModelVerifier:
    needed = {"machine.verifier.url": machine.verifier.url, "env.verification.model": env.verification.model}
    if missing := [name for name, value in needed.items() if not value]:
        raise ConfigError(f"env.verification.judge=language_model needs {' and '.join(missing)}")
    verifier = machine.verifier
    # One attempt each, because the environment repeats failed calls.
    endpoint = ModelEndpoint(verifier.url, verifier.key, verifier.timeout_s, 1, concurrency=verifier.concurrency)
    return LanguageModelVerifier(endpoint, env.verification.model, env.verification.characters)


class NoVerifier:
    """A placeholder for a configured verifier that was not opened. It always returns faults, never a substitute."""

    def __init__(self, judge: str) -> None:
        self._fault = VerifierFault(f"env.verification.judge={judge} needs a verifier from open_verifier")

    async def judge(self, claim: str, documents: Sequence[tuple[UnitId, str]]) -> list[Judgement | VerifierFault]:
        return [self._fault] * len(documents)
