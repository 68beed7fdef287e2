"""The bundled models themselves, from the package index that pip uses."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness1.models.fetch import find_bundled, get_model, resolve_model

pytestmark = pytest.mark.service


def test_smollm2_speaks(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = get_model(find_bundled("smollm2-135m"), tmp_path)
    assert resolve_model("smollm2-135m", tmp_path) == folder
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert (len(tokenizer), tokenizer.model_max_length) == (49152, 8192)
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|im_end|>")
    text = "In 2024  the café had 12 visitors.\n\n\t{'a': [1, 2]} 日本 🙂"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008
    asked = tokenizer("The capital of France is", return_tensors="pt")
    output = model.generate(**asked, max_new_tokens=3, do_sample=False)
    assert tokenizer.decode(output[0]).startswith("The capital of France is Paris.")


def test_minilm_embeds(tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(get_model(find_bundled("minilm"), tmp_path)), device="cpu")
    query, near, far = model.encode(["a small dog", "a little puppy", "interest rates rose"])
    assert query.shape == (384,)
    assert query @ near > query @ far + 0.3
