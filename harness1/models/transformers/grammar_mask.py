"""Masks of the tokens that a grammar allows next, by `xgrammar`, on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness1.errors import InfrastructureFault, UsageError, optional
from harness1.models.backend import Grammar

if TYPE_CHECKING:
    from torch import Tensor

COMPILED_BYTES = 64 << 20
"""Size up to which compiled grammars are cached, rather than compiled for every call."""
STOP_SETS = 4
"""Sets of stop tokens whose compilers are cached, least recently used dropped first."""


class GrammarCompiler:
    """A compiler of grammars for the tokenizer in a model's folder.

    Args:
        vocabulary: width of the model's logits.

    Raises:
        MissingExtra: xgrammar is not installed.
        UsageError: the folder has no tokenizer.
    """

    def __init__(self, folder: Path, vocabulary: int) -> None:
        with optional("grammar"):
            import xgrammar
        from transformers import AutoTokenizer

        try:
            self._tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            raise UsageError(f"{folder} has no tokenizer that a grammar can be compiled for: {error}") from error
        self._xgrammar, self._vocabulary = xgrammar, vocabulary
        self._compiler = lru_cache(STOP_SETS)(self._new_compiler)

    def start(self, grammar: Grammar, stop_ids: Sequence[int]) -> GrammarState:
        """Return the state at the beginning of an output. A stop token is allowed only where the grammar may end.

        Raises:
            UsageError: the grammar does not compile, or there is no stop token to end it.
        """
        if not stop_ids:
            raise UsageError("an output with a grammar needs a stop token: nothing else can end it")
        try:
            compiled = self._compiler(tuple(stop_ids)).compile_grammar(grammar.ebnf)
        except (RuntimeError, ValueError) as error:
            raise UsageError(f"the grammar {grammar.digest} does not compile: {error}") from error
        return GrammarState(self._xgrammar.GrammarMatcher(compiled), self._vocabulary)

    def _new_compiler(self, stop_ids: tuple[int, ...]) -> Any:
        """Return a compiler for these stop tokens. Others that the tokenizer names would be allowed anywhere."""
        info = self._xgrammar.TokenizerInfo.from_huggingface(
            self._tokenizer, vocab_size=self._vocabulary, stop_token_ids=list(stop_ids)
        )
        return self._xgrammar.GrammarCompiler(info, max_threads=1, cache_limit_bytes=COMPILED_BYTES)

    def masks(self, grammar: Grammar, stop_ids: Sequence[int], output_ids: Sequence[int]) -> Tensor:
        """Return what was allowed at each token of an output: bool, [tokens, vocabulary].

        Raises:
            UsageError: as `start`.
            InfrastructureFault: the output does not match the grammar.
        """
        import torch

        state, masks = self.start(grammar, stop_ids), []
        for token in output_ids:
            masks.append(state.allowed())
            state.accept(token)
        return torch.stack(masks)


class GrammarState:
    """The position of an output in its grammar."""

    def __init__(self, matcher: Any, vocabulary: int) -> None:
        import torch

        self._matcher, self._vocabulary = matcher, vocabulary
        self._bits = torch.empty(1, -(-vocabulary // 32), dtype=torch.int32)

    def allowed(self) -> Tensor:
        """Return which tokens may come next: bool, [vocabulary].

        Raises:
            InfrastructureFault: none may.
        """
        import torch

        self._bits.fill_(-1)
        self._matcher.fill_next_token_bitmask(self._bits)
        mask = (self._bits[0, :, None] >> torch.arange(32, dtype=torch.int32) & 1).bool().flatten()[: self._vocabulary]
        if not mask.any():
            raise InfrastructureFault("the grammar allows none of the tokenizer's tokens")
        return mask

    def accept(self, token: int) -> None:
        """Advance by a token.

        Raises:
            InfrastructureFault: the grammar does not allow it.
        """
        if not self._matcher.accept_token(token):
            raise InfrastructureFault(f"the grammar does not allow the token {token} here")
