"""The masks of a grammar, rebuilt from what was sampled under it: a distribution is recorded without them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from harness1.errors import UsageError
from harness1.models.backend import Grammar
from harness1.models.transformers.grammar_mask import GrammarCompiler
from harness1.rl.logprobs import MaskOf
from harness1.rows.calls import SampledCall

if TYPE_CHECKING:
    from torch import Tensor


def grammar_masks(folder: Path, vocabulary: int, grammars: Sequence[Grammar]) -> MaskOf:
    """A function that gives what a call's grammar allowed at each of its tokens: bool, [tokens, vocabulary].

    Args:
        folder: of the model, for its tokenizer.
        vocabulary: width of its logits.

    Raises:
        MissingExtra: xgrammar is not installed.
        UsageError: the folder has no tokenizer; on calling, if a call names another grammar.
    """
    compiler = GrammarCompiler(folder, vocabulary)
    known = {grammar.digest: grammar for grammar in grammars}

    def mask_of(call: SampledCall) -> Tensor | None:
        name = call.sampling.grammar
        if name is None:
            return None
        if name not in known:
            raise UsageError(f"a call was sampled under the grammar {name[:12]}, which is not that of this environment")
        return compiler.masks(known[name], call.sampling.stop_ids, call.output_ids)

    return mask_of
